//! The memory of the recorded allocator at one entry of the trace, to explain a request that failed there.
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
use crate::transcript::{RawPool, RawStream};

/// Multiple to which PyTorch rounds every size, in bytes.
const UNIT_BYTES: u64 = 512;

/// Returns the number of the last entry that is a refused request.
pub(super) fn last(trace: &DeviceTrace<'_>) -> Option<u64> {
    let is_failure = |entry: &TraceEntry<'_>| entry.field(ACTION) == Some(Value::Word(OOM));
    trace.entries().filter_map(Result::ok).filter(is_failure).last().map(|entry| entry.number)
}

/// The memory of each heap.
pub(super) type Heaps = BTreeMap<(RawPool, RawStream), HeldMemory>;

/// Returns the memory that the allocator held just before an entry.
pub(super) fn held_at(trace: &DeviceTrace<'_>, before: &Before, number: u64) -> Result<Heaps, SnapshotError> {
    let entries = trace.entries().collect::<Result<Vec<_>, _>>()?;
    let mut ranges = Ranges::default();
    before.at_end.iter().for_each(|segment| ranges.insert(segment));
    for entry in entries.iter().rev() {
        match action(entry, before) {
            Change::Obtained(segment) => ranges.remove(&segment),
            Change::Released(segment) => ranges.insert(&segment),
            _ => {}
        }
    }
    let mut used: BTreeMap<u64, u64> =
        before.lived.iter().map(|lived| (lived.address, rounded(lived.size_bytes))).collect();
    for entry in &entries[..entries.len().min(number as usize)] {
        match action(entry, before) {
            Change::Obtained(segment) => ranges.insert(&segment),
            Change::Released(segment) => ranges.remove(&segment),
            Change::Allocated { address, size_bytes } => _ = used.insert(address, rounded(size_bytes)),
            Change::Completed { address } => _ = used.remove(&address),
            Change::None => {}
        }
    }
    Ok(ranges.held(&used))
}

/// Returns the memory that the segments in the snapshot's final state show.
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

/// Returns the effect of an entry. An entry without an address or a size has no effect here; reading the trace reports
/// it as an error.
fn action(entry: &TraceEntry<'_>, before: &Before) -> Change {
    let (Ok(address), Ok(size_bytes)) = (entry.address(), entry.integer(SIZE)) else { return Change::None };
    let (address, end) = (address.0, address.0.saturating_add(size_bytes));
    let (pool, stream) = (before.pool(entry).unwrap_or_default(), entry.stream().unwrap_or_default());
    let range = |grows| SegmentAtEnd { start: address, end, grows, pool, stream, used: Vec::new() };
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

/// A range of addresses that is backed by memory.
#[derive(Clone, Copy)]
struct Range {
    end: u64,
    /// `true` if the range belongs to an expandable segment, whose adjacent ranges are contiguous memory.
    grows: bool,
    heap: (RawPool, RawStream),
}

/// Disjoint ranges of addresses that are backed by memory, by start.
#[derive(Default)]
struct Ranges {
    by_start: BTreeMap<u64, Range>,
}

impl Ranges {
    fn insert(&mut self, segment: &SegmentAtEnd) {
        self.remove(segment);
        if segment.end > segment.start {
            let SegmentAtEnd { start, end, grows, pool, stream, .. } = *segment;
            self.by_start.insert(start, Range { end, grows, heap: (pool, stream) });
        }
    }

    fn remove(&mut self, segment: &SegmentAtEnd) {
        while let Some((&start, &range)) = self.by_start.range(..segment.end).next_back()
            && range.end > segment.start
        {
            self.by_start.remove(&start);
            if range.end > segment.end {
                self.by_start.insert(segment.end, range);
            }
            if start < segment.start {
                self.by_start.insert(start, Range { end: segment.start, ..range });
            }
        }
    }

    fn held(&self, used: &BTreeMap<u64, u64>) -> Heaps {
        let mut heaps = Heaps::new();
        let mut ranges = self.by_start.iter().map(|(start, range)| (*start, *range)).peekable();
        while let Some((start, Range { mut end, grows, heap })) = ranges.next() {
            let continues =
                |next: u64, range: &Range, end: u64| grows && range.grows && range.heap == heap && next == end;
            while let Some((_, next)) = ranges.next_if(|(next, range)| continues(*next, range, end)) {
                end = next.end;
            }
            let blocks = used.range(start..end).map(|(address, bytes)| (address - start, *bytes));
            heaps.entry(heap).or_default().add_segment(end - start, blocks);
        }
        heaps
    }
}
