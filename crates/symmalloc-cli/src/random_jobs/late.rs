//! Recordings that begin in the middle of a job, as RMM and PyTorch write them, with the number of allocations that
//! were live at that point.
//!
//! ```text
//! ops of a job ──► events of a log │ cut: those before are lost ──► file
//!                                  └─► live at the cut, as far as the file shows ──► Beginning
//! ```

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use symmalloc_core::ids::{AllocationId, PoolId, StreamId};
use symmalloc_core::op::{Op, Record};
use symmalloc_sim::SplitMix64;

/// The state that a late recording shows at its start, and its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Beginning {
    pub(super) lived_before: u64,
    pub(super) lived_before_bytes: u64,
    pub(super) peak_live_bytes: u64,
    /// `true` if the recording is marked as having lost entries.
    pub(super) is_overwritten: bool,
}

/// An allocation of at least one byte.
#[derive(Clone, Copy, Debug)]
struct Made {
    address: u64,
    pool: PoolId,
    stream: StreamId,
    size_bytes: u64,
}

/// A line of a log, or an entry of a trace.
#[derive(Clone, Copy, Debug)]
enum Event {
    Allocate(Made),
    Free(Made),
    FreeCompleted(Made),
}

/// A kind of recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    RmmLog,
    Snapshot,
    /// A snapshot without its list of segments.
    SnapshotWithoutSegments,
}

impl Format {
    pub(super) fn file_name(self) -> &'static str {
        match self {
            Format::RmmLog => "late.csv",
            _ => "late.pickle",
        }
    }
}

/// Writes the part of a job after a random cut. Returns `None` if nothing is left.
pub(super) fn recording(records: &[Record], format: Format, random: &mut SplitMix64) -> Option<(Vec<u8>, Beginning)> {
    let events = events(records, format);
    if events.is_empty() {
        return None;
    }
    let cut = random.below(events.len() as u64) as usize;
    let mut live = BTreeMap::new();
    events[..cut].iter().for_each(|event| event.apply(&mut live));
    let mut at_end = live.clone();
    events[cut..].iter().for_each(|event| event.apply(&mut at_end));
    // A log shows which allocations are freed later. A snapshot also shows which are live at its end.
    let is_shown = |made: &Made| {
        // The first free after the cut at the address is that of the allocation.
        let is_free = |event: &Event| matches!(event, Event::Free(freed) if freed.address == made.address);
        let is_freed = events[cut..].iter().any(is_free);
        is_freed || format == Format::Snapshot
    };
    live.retain(|_, made: &mut Made| is_shown(made));
    let bytes = |live: &BTreeMap<u64, Made>| live.values().map(|made| made.size_bytes).sum::<u64>();
    let mut beginning = Beginning {
        lived_before: live.len() as u64,
        lived_before_bytes: bytes(&live),
        peak_live_bytes: bytes(&live),
        is_overwritten: cut > 0 && format != Format::RmmLog,
    };
    for event in &events[cut..] {
        event.apply(&mut live);
        beginning.peak_live_bytes = beginning.peak_live_bytes.max(bytes(&live));
    }
    let allocates = events[cut..].iter().any(|event| matches!(event, Event::Allocate(_)));
    if !allocates && beginning.lived_before == 0 {
        return None;
    }
    let file = match format {
        Format::RmmLog => log(&events[cut..]).into_bytes(),
        _ => {
            let at_end = (format == Format::Snapshot).then(|| at_end.into_values().collect());
            snapshot(&events[cut..], at_end, beginning.is_overwritten)
        }
    };
    Some((file, beginning))
}

/// Returns the events of a job. An address is reused as soon as it is free.
fn events(records: &[Record], format: Format) -> Vec<Event> {
    let mut live: BTreeMap<AllocationId, Made> = BTreeMap::new();
    let mut events = Vec::new();
    for record in records {
        match record.op {
            Op::Allocate { id, pool, stream, size_bytes: size_bytes @ 1.. } => {
                let is_taken = |address: &u64| live.values().any(|made| made.address == *address);
                let address =
                    (1..).map(|slot| slot << 32).find(|address| !is_taken(address)).expect("an address should be free");
                let made = Made { address, pool, stream, size_bytes };
                live.insert(id, made);
                events.push(Event::Allocate(made));
            }
            Op::Free { id } => {
                if let Some(made) = live.remove(&id) {
                    events.push(Event::Free(made));
                    if format != Format::RmmLog {
                        events.push(Event::FreeCompleted(made));
                    }
                }
            }
            _ => {}
        }
    }
    events
}

impl Event {
    fn apply(&self, live: &mut BTreeMap<u64, Made>) {
        match self {
            Event::Allocate(made) => drop(live.insert(made.address, *made)),
            Event::Free(made) => drop(live.remove(&made.address)),
            Event::FreeCompleted(_) => {}
        }
    }
}

fn log(events: &[Event]) -> String {
    let mut log = "Thread,Time,Action,Pointer,Size,Stream\n".to_owned();
    for event in events {
        let (action, Made { address, size_bytes, stream, .. }) = match event {
            Event::Allocate(made) => ("allocate", made),
            Event::Free(made) | Event::FreeCompleted(made) => ("free", made),
        };
        let stream = 0x7000 + u64::from(stream.0);
        writeln!(log, "7,00:00:00.000000,{action},{address:#x},{size_bytes},{stream:#x}").unwrap();
    }
    log
}

fn snapshot(events: &[Event], at_end: Option<Vec<Made>>, has_overflowed: bool) -> Vec<u8> {
    let entry = |event: &Event| {
        let (action, made) = match event {
            Event::Allocate(made) => ("alloc", made),
            Event::Free(made) => ("free_requested", made),
            Event::FreeCompleted(made) => ("free_completed", made),
        };
        let Made { address, pool, stream, size_bytes } = made;
        json!({ "action": action, "addr": address, "size": size_bytes, "stream": 16 * stream.0, "pool_id": [0, pool.0] })
    };
    let segment = |made: &Made| {
        let Made { address, pool, stream, size_bytes } = made;
        let block_bytes = size_bytes.next_multiple_of(512);
        let block = json!({
            "address": address, "size": block_bytes, "requested_size": size_bytes, "state": "active_allocated", "frames": [],
        });
        json!({
            "device": 0, "address": address, "total_size": block_bytes, "stream": 16 * stream.0,
            "segment_pool_id": [0, pool.0], "blocks": [block],
        })
    };
    let mut snapshot = json!({
        "device_traces": [events.iter().map(entry).collect::<Vec<_>>()],
        "allocator_settings": { "trace_alloc_overflowed": has_overflowed, "trace_alloc_max_entries": events.len() },
    });
    if let Some(at_end) = at_end {
        snapshot["segments"] = at_end.iter().map(segment).collect();
    }
    let mut pickle = vec![0x80, 2];
    write_pickle(&snapshot, &mut pickle);
    pickle.push(b'.');
    pickle
}

/// Pickles a value. An array of two numbers becomes a tuple, which is PyTorch's form of a pool's id.
fn write_pickle(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'N'),
        Value::Bool(is_true) => out.push(if *is_true { 0x88 } else { 0x89 }),
        Value::Number(number) => {
            out.extend([0x8a, 9]);
            out.extend(number.as_u64().expect("the number should not be negative").to_le_bytes());
            out.push(0);
        }
        Value::String(text) => {
            out.push(b'X');
            out.extend((text.len() as u32).to_le_bytes());
            out.extend(text.as_bytes());
        }
        Value::Array(items) if items.len() == 2 && items.iter().all(Value::is_number) => {
            items.iter().for_each(|item| write_pickle(item, out));
            out.push(0x86);
        }
        Value::Array(items) => {
            out.extend(*b"](");
            items.iter().for_each(|item| write_pickle(item, out));
            out.push(b'e');
        }
        Value::Object(fields) => {
            out.extend(*b"}(");
            for (key, value) in fields {
                write_pickle(&Value::String(key.clone()), out);
                write_pickle(value, out);
            }
            out.push(b'u');
        }
    }
}
