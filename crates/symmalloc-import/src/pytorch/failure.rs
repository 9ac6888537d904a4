//! The memory of the recorded allocator at an entry of the trace, for a request that failed there.
//!
//! ```text
//! segments at the end ── entries backward: minus those obtained, plus those released ──► segments at the beginning
//! segments at the beginning, allocations live then ── entries forward ──► both at the failed request
//! ```

use std::collections::BTreeMap;

use super::before::{Before, SegmentAtEnd};
use super::error::SnapshotError;
use super::trace::{DeviceTrace, TraceEntry};
use super::words::{ACTION, ALLOC, FREE_COMPLETED, OOM, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SIZE};
use crate::held_memory::HeldMemory;
use crate::pickle::Value;

/// Multiple to which PyTorch rounds every size, in bytes.
const UNIT_BYTES: u64 = 512;

/// Returns the number of the last entry that is a failed request.
pub(super) fn last(trace: &DeviceTrace<'_>) -> Option<u64> {
    let is_failure = |entry: &TraceEntry<'_>| entry.field(ACTION) == Some(Value::Word(OOM));
    trace.entries().filter_map(Result::ok).filter(is_failure).last().map(|entry| entry.number)
}

/// Returns the memory that the allocator held at an entry.
pub(super) fn held_at(trace: &DeviceTrace<'_>, before: &Before, number: u64) -> Result<HeldMemory, SnapshotError> {
    let entries = trace.entries().collect::<Result<Vec<_>, _>>()?;
    let mut ranges = Ranges::default();
    before.at_end.iter().for_each(|segment| ranges.insert(segment));
    for entry in entries.iter().rev() {
        match action(entry) {
            Change::Obtained(segment) => ranges.remove(&segment),
            Change::Released(segment) => ranges.insert(&segment),
            _ => {}
        }
    }
    let mut used: BTreeMap<u64, u64> =
        before.lived.iter().map(|lived| (lived.address, rounded(lived.size_bytes))).collect();
    for entry in &entries[..entries.len().min(number as usize)] {
        match action(entry) {
            Change::Obtained(segment) => ranges.insert(&segment),
            Change::Released(segment) => ranges.remove(&segment),
            Change::Allocated { address, size_bytes } => _ = used.insert(address, rounded(size_bytes)),
            Change::Completed { address } => _ = used.remove(&address),
            Change::None => {}
        }
    }
    Ok(ranges.held(&used))
}

/// Returns the memory that the segments at the end of the snapshot show.
pub(super) fn held_at_end(before: &Before) -> HeldMemory {
    let mut held = HeldMemory::default();
    for SegmentAtEnd { start, end, used, .. } in &before.at_end {
        held.add_segment(end - start, used.iter().map(|(address, bytes)| (address.saturating_sub(*start), *bytes)));
    }
    held
}

fn rounded(size_bytes: u64) -> u64 {
    size_bytes.checked_next_multiple_of(UNIT_BYTES).unwrap_or(size_bytes)
}

/// The effect of an entry on the memory of the allocator.
enum Change {
    Obtained(SegmentAtEnd),
    Released(SegmentAtEnd),
    Allocated { address: u64, size_bytes: u64 },
    Completed { address: u64 },
    None,
}

/// Returns the effect of an entry. An entry without an address or a size has none; reading the trace reports the error.
fn action(entry: &TraceEntry<'_>) -> Change {
    let (Ok(address), Ok(size_bytes)) = (entry.address(), entry.integer(SIZE)) else { return Change::None };
    let (address, end) = (address.0, address.0.saturating_add(size_bytes));
    let range = |grows| SegmentAtEnd { start: address, end, grows, used: Vec::new() };
    match entry.field(ACTION) {
        Some(Value::Word(SEGMENT_ALLOC)) => Change::Obtained(range(false)),
        Some(Value::Word(SEGMENT_MAP)) => Change::Obtained(range(true)),
        Some(Value::Word(SEGMENT_FREE)) => Change::Released(range(false)),
        Some(Value::Word(SEGMENT_UNMAP)) => Change::Released(range(true)),
        Some(Value::Word(ALLOC)) => Change::Allocated { address, size_bytes },
        Some(Value::Word(FREE_COMPLETED)) => Change::Completed { address },
        _ => Change::None,
    }
}

/// Disjoint ranges of addresses that have memory.
#[derive(Default)]
struct Ranges {
    /// By start: the end, and whether the range belongs to an expandable segment. Touching ranges of one are contiguous.
    by_start: BTreeMap<u64, (u64, bool)>,
}

impl Ranges {
    fn insert(&mut self, segment: &SegmentAtEnd) {
        self.remove(segment);
        if segment.end > segment.start {
            self.by_start.insert(segment.start, (segment.end, segment.grows));
        }
    }

    fn remove(&mut self, segment: &SegmentAtEnd) {
        while let Some((&start, &(end, grows))) = self.by_start.range(..segment.end).next_back()
            && end > segment.start
        {
            self.by_start.remove(&start);
            if end > segment.end {
                self.by_start.insert(segment.end, (end, grows));
            }
            if start < segment.start {
                self.by_start.insert(start, (segment.start, grows));
            }
        }
    }

    fn held(&self, used: &BTreeMap<u64, u64>) -> HeldMemory {
        let mut held = HeldMemory::default();
        let mut ranges = self.by_start.iter().map(|(start, (end, grows))| (*start, *end, *grows)).peekable();
        while let Some((start, mut end, grows)) = ranges.next() {
            while let Some((_, next_end, true)) = ranges.next_if(|(next, _, also)| grows && *also && *next == end) {
                end = next_end;
            }
            let blocks = used.range(start..end).map(|(address, bytes)| (address - start, *bytes));
            held.add_segment(end - start, blocks);
        }
        held
    }
}
