//! `symmalloc address`: which allocation of a recording contains, or contained, an address, and what is next to it.
//!
//! Snapshots, logs and flight records state the addresses of the recorded process. A trace has none, because they differ between ranks: there, an address
//! is a place, `SEGMENT@OFFSET`, as reports of other commands print it.

use crate::args::{AddressArgs, Location};
use crate::error::CliError;
use crate::input;
use crate::output;
use crate::quantity::{count, counted, memory};
use crate::verdict::Verdict;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::fs::File;
use std::io::Read;
use symmalloc_core::op::Op;
use symmalloc_core::{AllocationId, PoolId, SegmentId, StreamId};
use symmalloc_import::Recording;
use symmalloc_text::visible_line;
use symmalloc_watchdog::{FlightRecord, MemoryRecord};

/// Maximum number of earlier allocations at the address that the text lists.
const LISTED_MAX: usize = 10;

/// An allocation of the recording, with its lifetime. Ops are counted from 0.
#[derive(Clone, Debug)]
struct Lifetime {
    id: AllocationId,
    name: Option<String>,
    pool: PoolId,
    stream: StreamId,
    /// Its memory: the segment, or `None` if the start is an address.
    segment: Option<SegmentId>,
    start: u64,
    size_bytes: u64,
    /// `None` if the flight record does not know it.
    allocated_at: Option<usize>,
    freed_at: Option<usize>,
    used_by: Vec<StreamId>,
}

impl Lifetime {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.size_bytes)
    }

    fn contains(&self, location: Location) -> bool {
        let (segment, at) = match location {
            Location::Address(address) => (None, address),
            Location::Place { segment, offset_bytes } => (Some(segment), offset_bytes),
        };
        self.segment == segment && (self.start..self.end()).contains(&at)
    }

    /// Returns `true` if it was live when the op was executed.
    fn is_live_at(&self, op: usize) -> bool {
        self.allocated_at.is_none_or(|allocated| allocated <= op) && self.freed_at.is_none_or(|freed| freed > op)
    }

    fn as_json(&self) -> Value {
        json!({
            "allocation": self.id.0,
            "name": self.name,
            "pool": self.pool.0,
            "stream": self.stream.0,
            "segment": self.segment.map(|segment| segment.0),
            "start": self.start,
            "size_bytes": self.size_bytes,
            "allocated_at_op": self.allocated_at,
            "freed_at_op": self.freed_at,
            "used_by": self.used_by.iter().map(|stream| stream.0).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Lifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "allocation {}", count(self.id.0))?;
        if let Some(name) = &self.name {
            write!(f, " ({})", visible_line(name))?;
        }
        let Lifetime { pool, stream, .. } = self;
        let start = match self.segment {
            Some(segment) => Location::Place { segment, offset_bytes: self.start },
            None => Location::Address(self.start),
        };
        write!(f, ": {} at {start}, {pool}, {stream}", memory(self.size_bytes))?;
        if let Some(op) = self.allocated_at {
            write!(f, ", op {}", count(op as u64))?;
        }
        match self.freed_at {
            Some(op) => write!(f, " to {}", count(op as u64))?,
            None => f.write_str(", not freed")?,
        }
        if !self.used_by.is_empty() {
            let used_by: Vec<_> = self.used_by.iter().map(StreamId::to_string).collect();
            write!(f, "; used by {}", used_by.join(", "))?;
        }
        Ok(())
    }
}

/// Prints the allocations that contained an address.
pub(crate) fn address(args: &AddressArgs) -> Result<Verdict, CliError> {
    let (lifetimes, ends_at) = match flight_record(args)? {
        // The op numbers of a flight record count the ops of each heap. Neighbors are those at its end.
        Some(record) => (recorded_memory(&record.memory), usize::MAX),
        None => {
            let recording = input::recording_with_addresses(&args.input, &args.reading)?;
            if matches!(args.address, Location::Address(_)) && recording.addresses.is_none() {
                return Err(CliError::NoAddresses { path: args.input.clone() });
            }
            (lifetimes(&recording, args.address), recording.records.len())
        }
    };
    let mut containing: Vec<&Lifetime> = lifetimes.iter().filter(|life| life.contains(args.address)).collect();
    // Newest first.
    containing.reverse();
    let at_newest = containing.first().and_then(|newest| newest.allocated_at).filter(|_| ends_at != usize::MAX);
    let op = at_newest.unwrap_or(ends_at);
    let (before, after) = neighbors(&lifetimes, args.address, op);
    if args.json {
        output::print_json(json!({
            "address": args.address.to_string(),
            "containing": containing.iter().map(|life| life.as_json()).collect::<Vec<_>>(),
            "before": before.map(Lifetime::as_json),
            "after": after.map(Lifetime::as_json),
        }))?;
        return Ok(Verdict::Agree);
    }
    let mut out = format!("{} was in {}\n", args.address, counted(containing.len(), "allocation"));
    for life in containing.iter().take(LISTED_MAX) {
        let at = match args.address {
            Location::Address(at) | Location::Place { offset_bytes: at, .. } => at,
        };
        let _ = writeln!(out, "  byte {} of {life}", count(at - life.start));
    }
    if containing.len() > LISTED_MAX {
        let _ = writeln!(out, "  and {} earlier ones; --json lists all", count(containing.len() - LISTED_MAX));
    }
    let when = if at_newest.is_none() { "at the end" } else { "when the newest one was allocated" };
    for (word, neighbor) in [("before", before), ("after", after)] {
        if let Some(neighbor) = neighbor {
            let _ = writeln!(out, "{word} it, {when}: {neighbor}");
        }
    }
    output::print(&out)?;
    Ok(Verdict::Agree)
}

/// Returns the flight record, if the file is one with allocations, and the location is an address.
fn flight_record(args: &AddressArgs) -> Result<Option<FlightRecord>, CliError> {
    // A pipe can be read only once, and a recorded job is no file.
    let is_file = std::fs::metadata(&args.input).is_ok_and(|metadata| metadata.is_file());
    let mut first = [0];
    let mut is_json = |file: &mut File| file.read_exact(&mut first).is_ok() && first == *b"{";
    if !is_file || !File::open(&args.input).is_ok_and(|mut file| is_json(&mut file)) {
        return Ok(None);
    }
    let record = FlightRecord::read(&args.input).map_err(CliError::FlightRecord)?;
    if record.memory.is_empty() || !matches!(args.address, Location::Address(_)) {
        return Err(CliError::NoAddresses { path: args.input.clone() });
    }
    Ok(Some(record))
}

/// Returns the allocations of a flight record.
fn recorded_memory(records: &[MemoryRecord]) -> Vec<Lifetime> {
    let lifetime = |(id, record): (u64, &MemoryRecord)| Lifetime {
        id: AllocationId(id),
        name: record.name.clone(),
        pool: PoolId(record.pool),
        stream: StreamId(record.stream),
        segment: None,
        start: record.address,
        size_bytes: record.size_bytes,
        allocated_at: record.allocated_at_op.map(|op| op as usize),
        freed_at: record.freed_at_op.map(|op| op as usize),
        used_by: record.used_by.iter().copied().map(StreamId).collect(),
    };
    (0..).zip(records).map(lifetime).collect()
}

/// Returns the allocations of the recording that have addresses, or places in the segment, in the order of their ops.
fn lifetimes(recording: &Recording, location: Location) -> Vec<Lifetime> {
    let mut lifetimes: Vec<Lifetime> = Vec::new();
    let mut by_id: BTreeMap<AllocationId, usize> = BTreeMap::new();
    let mut users: BTreeSet<(usize, StreamId)> = BTreeSet::new();
    for (index, record) in recording.records.iter().enumerate() {
        match record.op {
            Op::Allocate { id, pool, stream, size_bytes } => {
                let memory = match location {
                    Location::Address(_) => {
                        let addresses = recording.addresses.as_ref();
                        addresses.and_then(|addresses| addresses.get(id.0 as usize)).map(|address| (None, *address))
                    }
                    Location::Place { segment, .. } => record
                        .placement
                        .filter(|placement| placement.segment == segment)
                        .map(|placement| (Some(segment), placement.offset_bytes)),
                };
                let Some((segment, start)) = memory else { continue };
                by_id.insert(id, lifetimes.len());
                lifetimes.push(Lifetime {
                    id,
                    name: record.name.as_deref().map(str::to_owned),
                    pool,
                    stream,
                    segment,
                    start,
                    size_bytes,
                    allocated_at: Some(index),
                    freed_at: None,
                    used_by: Vec::new(),
                });
            }
            Op::Free { id } => {
                if let Some(at) = by_id.remove(&id) {
                    lifetimes[at].freed_at = Some(index);
                }
            }
            Op::RecordUse { id, stream } => {
                if let Some(&at) = by_id.get(&id)
                    && users.insert((at, stream))
                {
                    lifetimes[at].used_by.push(stream);
                }
            }
            _ => {}
        }
    }
    lifetimes
}

/// Returns the nearest allocations before and after a location that were live at an op.
fn neighbors(lifetimes: &[Lifetime], location: Location, op: usize) -> (Option<&Lifetime>, Option<&Lifetime>) {
    let (Location::Address(at) | Location::Place { offset_bytes: at, .. }) = location;
    let others = || lifetimes.iter().filter(|life| life.is_live_at(op) && !life.contains(location));
    let before = others().filter(|life| life.end() <= at).max_by_key(|life| life.end());
    let after = others().filter(|life| life.start > at).min_by_key(|life| life.start);
    (before, after)
}
