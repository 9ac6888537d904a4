//! The memory that the recorded allocator reserved from the device.
//!
//! A snapshot contains this number. A trace contains only the placements of allocations, which give a lower bound: a segment extends at
//! least to the end of its allocations, and exists at least from its first allocation to its last free.

use crate::recorded::Recorded;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use symmalloc_core::ids::{AllocationId, Placement};
use symmalloc_core::op::Op;
use symmalloc_import::Recording;

/// Peak of the memory that the recorded allocator reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordedReserved {
    pub(crate) peak_bytes: u64,
    /// `true` if the peak is known exactly, `false` if it is a lower bound.
    pub(crate) is_exact: bool,
}

impl RecordedReserved {
    /// Returns `None` if the recording has no placements.
    pub(crate) fn of(recorded: &Recorded) -> Option<Self> {
        let recording = &recorded.recording;
        if let Some(peak_bytes) = recording.summary.recorded_reserved_bytes_peak {
            return (peak_bytes > 0).then_some(RecordedReserved { peak_bytes, is_exact: true });
        }
        let peak_bytes = at_least(recording);
        (peak_bytes > 0).then_some(RecordedReserved { peak_bytes, is_exact: false })
    }

    pub(crate) fn object(self) -> Value {
        json!({ "peak_bytes": self.peak_bytes, "is_exact": self.is_exact })
    }
}

/// Lifetime and extent of a segment, as its allocations show them.
struct Extent {
    first_op: usize,
    last_op: usize,
    end_bytes: u64,
}

fn at_least(recording: &Recording) -> u64 {
    // Only looked up, never iterated.
    let mut segment_of: BTreeMap<AllocationId, u32> = BTreeMap::new();
    let mut extents: BTreeMap<u32, Extent> = BTreeMap::new();
    for (number, record) in recording.records.iter().enumerate() {
        match (&record.op, record.placement) {
            (Op::Allocate { id, size_bytes, .. }, Some(placement)) if placement != Placement::NOWHERE => {
                let Placement { segment, offset_bytes } = placement;
                segment_of.insert(*id, segment.0);
                let end_bytes = offset_bytes.saturating_add(*size_bytes);
                let extent = extents.entry(segment.0);
                let extent = extent.or_insert(Extent { first_op: number, last_op: number, end_bytes });
                extent.end_bytes = extent.end_bytes.max(end_bytes);
                extent.last_op = number;
            }
            (Op::Free { id }, _) => {
                if let Some(extent) = segment_of.get(id).and_then(|segment| extents.get_mut(segment)) {
                    extent.last_op = number;
                }
            }
            _ => {}
        }
    }
    // Allocations that are never freed keep their segment to the end.
    let mut live: BTreeMap<AllocationId, u32> = segment_of;
    for record in &recording.records {
        if let Op::Free { id } = record.op {
            live.remove(&id);
        }
    }
    for segment in live.values() {
        extents.get_mut(segment).expect("a segment with a live allocation has an extent").last_op = usize::MAX;
    }
    let births = extents.values().map(|extent| (extent.first_op, 1, extent.end_bytes));
    let deaths = extents.values().map(|extent| (extent.last_op, 2, extent.end_bytes));
    let mut changes: Vec<(usize, u8, u64)> = births.chain(deaths).collect();
    changes.sort_unstable();
    let (mut held, mut most) = (0u64, 0u64);
    for (_, change, bytes) in changes {
        held = if change == 1 { held.saturating_add(bytes) } else { held.saturating_sub(bytes) };
        most = most.max(held);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_import::{ReadOptions, read_bytes};

    #[test]
    fn a_segment_counts_up_to_the_end_of_its_last_live_allocation() {
        let trace = "symmalloc-trace 1\nstream s0\na 0 1000 s0 -> 0@0\na 1 500 s0 -> 0@1024\nf 0\nf 1\na 2 100 s0 -> 1@512\n\
                     a 3 2000 s0 -> 2@0\nf 2\nend 8\n";
        let recording = read_bytes(trace.as_bytes(), &ReadOptions::default()).unwrap();
        assert_eq!(at_least(&recording), 612 + 2000);
    }
}
