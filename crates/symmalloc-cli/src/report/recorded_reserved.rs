//! The memory that the recorded allocator reserved from the device.
//!
//! A snapshot contains this number. A trace contains only the placements of allocations, which give a lower bound: a segment extends at
//! least to the end of its allocations, and exists at least from its first allocation to its last free.

use crate::recorded::Recorded;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{AllocationId, HeapId, Placement, PoolId};
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
    /// Returns the peak, or `None` if the recording has no placements.
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

/// A segment. Each heap numbers its own from 0.
type SegmentKey = (HeapId, u32);

fn at_least(recording: &Recording) -> u64 {
    let mut pools =
        BTreeMap::from([(PoolId::DEFAULT, recording.config.as_ref().map(|config| config.default_pool().streams()))]);
    let mut live: BTreeMap<AllocationId, SegmentKey> = BTreeMap::new();
    // The extents of segments that exist, and of those whose pool was destroyed.
    let (mut extents, mut ended) = (BTreeMap::<SegmentKey, Extent>::new(), Vec::new());
    let mut groups = Groups::default();
    for (number, record) in recording.records.iter().enumerate() {
        record.op.note_group(&mut groups);
        match (&record.op, record.placement) {
            (Op::CreatePool { pool, config }, _) => _ = pools.insert(*pool, Some(config.streams())),
            (Op::Allocate { id, pool, stream, size_bytes }, Some(placement)) if placement != Placement::NOWHERE => {
                let Placement { segment, offset_bytes } = placement;
                let streams = pools.get(pool).copied().flatten().unwrap_or_default();
                let key = (HeapId { pool: *pool, group: streams.group_of(*stream, &groups) }, segment.0);
                live.insert(*id, key);
                let end_bytes = offset_bytes.saturating_add(*size_bytes);
                let extent = extents.entry(key);
                let extent = extent.or_insert(Extent { first_op: number, last_op: number, end_bytes });
                extent.end_bytes = extent.end_bytes.max(end_bytes);
                extent.last_op = number;
            }
            (Op::Free { id }, _) => {
                if let Some(extent) = live.remove(id).and_then(|key| extents.get_mut(&key)) {
                    extent.last_op = number;
                }
            }
            (Op::DestroyPool { pool }, _) => {
                live.retain(|_, (owner, _)| owner.pool != *pool);
                let (of_pool, others) =
                    std::mem::take(&mut extents).into_iter().partition(|((owner, _), _)| owner.pool == *pool);
                extents = others;
                let of_pool: BTreeMap<SegmentKey, Extent> = of_pool;
                ended.extend(of_pool.into_values());
            }
            _ => {}
        }
    }
    // Allocations that are never freed keep their segment to the end.
    for key in live.values() {
        extents.get_mut(key).expect("a segment with a live allocation has an extent").last_op = usize::MAX;
    }
    ended.extend(extents.into_values());
    let births = ended.iter().map(|extent| (extent.first_op, 1, extent.end_bytes));
    let deaths = ended.iter().map(|extent| (extent.last_op, 2, extent.end_bytes));
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

    /// Every heap has its own segment 0. A destroyed pool keeps none.
    #[test]
    fn segments_of_different_heaps_add_up() {
        let at_least = |lines: &[&str]| {
            let text = format!("symmalloc-trace 1\n{}\nend {}\n", lines.join("\n"), lines.len());
            at_least(&read_bytes(text.as_bytes(), &ReadOptions::default()).unwrap())
        };
        let mut lines = vec!["stream s0", "stream s1", "pool p1", "pool p2 streams:shared"];
        lines.extend(["a 0 1000 s0 -> 0@0", "a 1 200 s1 -> 0@0", "a 2 30 s0 p1 -> 0@0", "a 3 4 s0 p2 -> 0@0"]);
        lines.push("a 4 4 s1 p2 -> 0@4");
        assert_eq!(at_least(&lines), 1238);
        lines.extend(["f 2", "destroy p1", "pool p3", "a 5 100 s0 p3 -> 0@0"]);
        assert_eq!(at_least(&lines), 1308);
    }
}
