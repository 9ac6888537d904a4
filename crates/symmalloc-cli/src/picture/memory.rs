//! The layout of memory after one op: heaps, segments and blocks.

use super::Selection;
use crate::error::CliError;
use crate::recorded::Recorded;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::{AllocationId, HeapId, Placement, PoolId};
use symmalloc_core::op::Op;
use symmalloc_core::report::{BlockStateSnapshot, SegmentSnapshot, Snapshot};
use symmalloc_core::units::UNIT_BYTES;
use symmalloc_import::rerun::{Happened, Rerun};

/// Upper bound of a device's memory, small enough that no sum overflows: 1 PiB.
const DEVICE_BYTES_MAX: u64 = 1 << 50;

/// State of a drawn block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// A live allocation.
    Live,
    /// A live allocation whose placement differs from that on the other rank.
    Differs,
    /// Free.
    Free,
    /// Free, but the next user may have to wait for other streams.
    Fenced,
}

/// A block in the picture.
#[derive(Clone, Debug)]
pub(crate) struct DrawnBlock {
    pub(crate) size_bytes: u64,
    pub(crate) state: BlockState,
    /// The allocation of a live block.
    pub(crate) held: Option<LiveAllocation>,
}

/// A live allocation.
#[derive(Clone, Debug)]
pub(crate) struct LiveAllocation {
    pub(crate) id: AllocationId,
    pub(crate) name: Option<Arc<str>>,
    pub(crate) requested_bytes: u64,
    pub(crate) placement: Placement,
}

impl LiveAllocation {
    /// Returns the allocation's name, or else its number.
    pub(crate) fn label(&self) -> String {
        self.name.as_deref().map_or_else(|| format!("allocation {}", self.id.0), str::to_owned)
    }
}

/// A segment without its unmapped parts.
#[derive(Clone, Debug)]
pub(crate) struct DrawnSegment {
    pub(crate) id: u32,
    pub(crate) blocks: Vec<DrawnBlock>,
}

/// A heap in the picture.
#[derive(Clone, Debug)]
pub(crate) struct DrawnHeap {
    pub(crate) owner: HeapId,
    pub(crate) segments: Vec<DrawnSegment>,
}

/// Memory of the selected heaps after one op.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) op: usize,
    pub(crate) heaps: Vec<DrawnHeap>,
}

impl DrawnHeap {
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &DrawnBlock> {
        self.segments.iter().flat_map(|segment| &segment.blocks)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.blocks().map(|block| block.size_bytes).sum()
    }
}

impl Memory {
    /// Returns the memory after `op` as our allocator places it.
    pub(crate) fn replayed(recorded: &Recorded, op: usize, selection: Selection) -> Result<Self, CliError> {
        let failed = |error| recorded.failed(error);
        let program = recorded.program();
        let mut rerun = Rerun::new(program, &recorded.config).map_err(failed)?;
        let mut ids = BTreeMap::new();
        rerun
            .run(op + 1, |moment| {
                match &moment.happened {
                    Happened::Allocated(live) => drop(ids.insert(live.address.0, live.id)),
                    Happened::Freed(live) => drop(ids.remove(&live.address.0)),
                    _ => {}
                }
                Ok(())
            })
            .map_err(failed)?;
        Ok(Memory::of(op, rerun.snapshot(), &ids, selection))
    }

    /// Returns the memory after `op` from a snapshot. `ids` maps addresses to allocations.
    pub(super) fn of(op: usize, snapshot: Snapshot, ids: &BTreeMap<u64, AllocationId>, selection: Selection) -> Self {
        let mut heaps: Vec<DrawnHeap> = Vec::new();
        for segment in snapshot.segments {
            let owner = segment.heap;
            if !selection.has(owner) {
                continue;
            }
            let shown = segment_of(&segment, ids);
            match heaps.last_mut() {
                Some(heap) if heap.owner == owner => heap.segments.push(shown),
                _ => heaps.push(DrawnHeap { owner, segments: vec![shown] }),
            }
        }
        Memory { op, heaps }
    }

    /// Returns the memory after `op` as the recorded allocator placed it. Segments extend to the end of the furthest allocation made up to
    /// that op.
    ///
    /// # Errors
    /// Returns an error if a placement exceeds the memory of any device.
    pub(crate) fn recorded(recorded: &Recorded, op: usize, selection: Selection) -> Result<Self, CliError> {
        let impossible = |op| CliError::ImpossiblePlacement { path: recorded.path.clone(), op };
        let mut total_bytes = 0;
        let mut live: BTreeMap<AllocationId, (HeapId, LiveAllocation)> = BTreeMap::new();
        let mut ends: BTreeMap<(HeapId, u32), u64> = BTreeMap::new();
        let mut pools: BTreeMap<PoolId, StreamPolicy> = BTreeMap::new();
        pools.insert(PoolId::DEFAULT, recorded.config.default_pool().streams());
        let groups = recorded.program().groups();
        let calls = recorded.recording.records.iter().zip(recorded.program().ops());
        for (number, (record, call)) in calls.take(op + 1).enumerate() {
            match call {
                Op::CreatePool { pool, config } => drop(pools.insert(*pool, config.streams())),
                Op::Allocate { id, pool, stream, size_bytes } => {
                    let streams = pools.get(pool).copied().unwrap_or_default();
                    let owner = HeapId { pool: *pool, group: streams.group_of(*stream, &groups) };
                    let Some(placement) = record.placement.filter(|_| *size_bytes > 0 && selection.has(owner)) else {
                        continue;
                    };
                    let end = placement.offset_bytes.saturating_add(rounded(*size_bytes));
                    let known = ends.entry((owner, placement.segment.0)).or_default();
                    total_bytes = end.saturating_sub(*known).saturating_add(total_bytes);
                    if total_bytes > DEVICE_BYTES_MAX {
                        return Err(impossible(number));
                    }
                    *known = end.max(*known);
                    let name = record.name.clone();
                    live.insert(
                        *id,
                        (owner, LiveAllocation { id: *id, name, requested_bytes: *size_bytes, placement }),
                    );
                }
                Op::Free { id } => drop(live.remove(id)),
                // The pool's segments are released, and its allocations end.
                Op::DestroyPool { pool } => {
                    live.retain(|_, (owner, _)| owner.pool != *pool);
                    ends.retain(|(owner, _), end| {
                        let stays = owner.pool != *pool;
                        total_bytes -= if stays { 0 } else { *end };
                        stays
                    });
                }
                _ => {}
            }
        }
        Ok(Memory { op, heaps: tiled(live, &ends) })
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = &DrawnBlock> {
        self.heaps.iter().flat_map(DrawnHeap::blocks)
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.heaps.iter().map(DrawnHeap::size_bytes).sum()
    }

    /// Returns the live blocks, each with its heap and its allocation.
    pub(crate) fn live(&self) -> impl Iterator<Item = (HeapId, &DrawnBlock, &LiveAllocation)> {
        self.heaps.iter().flat_map(|heap| {
            let live = heap.blocks().filter_map(|block| Some((block, block.held.as_ref()?)));
            live.map(|(block, held)| (heap.owner, block, held))
        })
    }

    /// Marks the allocations whose placements differ in `other`, and returns their number.
    pub(crate) fn mark(&mut self, other: &Memory) -> usize {
        let places: BTreeSet<(AllocationId, Placement)> =
            other.blocks().filter_map(|block| block.held.as_ref()).map(|held| (held.id, held.placement)).collect();
        let mut differing = 0;
        let segments = self.heaps.iter_mut().flat_map(|heap| &mut heap.segments);
        for block in segments.flat_map(|segment| &mut segment.blocks) {
            if block.held.as_ref().is_some_and(|held| !places.contains(&(held.id, held.placement))) {
                block.state = BlockState::Differs;
                differing += 1;
            }
        }
        differing
    }
}

fn rounded(size_bytes: u64) -> u64 {
    size_bytes.checked_next_multiple_of(UNIT_BYTES).unwrap_or(size_bytes)
}

fn segment_of(segment: &SegmentSnapshot, ids: &BTreeMap<u64, AllocationId>) -> DrawnSegment {
    let blocks = segment.blocks.iter().filter_map(|block| {
        let size_bytes = block.size_bytes;
        let placement = Placement { segment: segment.segment, offset_bytes: block.offset_bytes };
        Some(match &block.state {
            BlockStateSnapshot::Allocated { requested_bytes, name, .. } => {
                let id = ids.get(&(segment.base.0 + block.offset_bytes)).copied().unwrap_or_default();
                let held = LiveAllocation { id, name: name.clone(), requested_bytes: *requested_bytes, placement };
                DrawnBlock { size_bytes, state: BlockState::Live, held: Some(held) }
            }
            BlockStateSnapshot::Free { fenced_by } if fenced_by.is_empty() => {
                DrawnBlock { size_bytes, state: BlockState::Free, held: None }
            }
            BlockStateSnapshot::Free { .. } => DrawnBlock { size_bytes, state: BlockState::Fenced, held: None },
            _ => return None,
        })
    });
    DrawnSegment { id: segment.segment.0, blocks: blocks.collect() }
}

/// Returns heaps whose segments are known only by their allocations. The space between allocations is free.
fn tiled(
    live: BTreeMap<AllocationId, (HeapId, LiveAllocation)>,
    ends: &BTreeMap<(HeapId, u32), u64>,
) -> Vec<DrawnHeap> {
    let mut by_segment: BTreeMap<(HeapId, u32), Vec<LiveAllocation>> = BTreeMap::new();
    for (owner, held) in live.into_values() {
        by_segment.entry((owner, held.placement.segment.0)).or_default().push(held);
    }
    let mut heaps: Vec<DrawnHeap> = Vec::new();
    for (&(owner, id), &end) in ends {
        let mut held = by_segment.remove(&(owner, id)).unwrap_or_default();
        held.sort_by_key(|held| held.placement.offset_bytes);
        let (mut blocks, mut at) = (Vec::new(), 0);
        let free = |size_bytes| DrawnBlock { size_bytes, state: BlockState::Free, held: None };
        for held in held {
            let (offset, size_bytes) = (held.placement.offset_bytes, rounded(held.requested_bytes));
            // In a contradictory recording, allocations may overlap. Only the first one is shown.
            if offset < at {
                continue;
            }
            if offset > at {
                blocks.push(free(offset - at));
            }
            at = offset + size_bytes;
            blocks.push(DrawnBlock { size_bytes, state: BlockState::Live, held: Some(held) });
        }
        if at < end {
            blocks.push(free(end - at));
        }
        let segment = DrawnSegment { id, blocks };
        match heaps.last_mut() {
            Some(heap) if heap.owner == owner => heap.segments.push(segment),
            _ => heaps.push(DrawnHeap { owner, segments: vec![segment] }),
        }
    }
    heaps
}

/// Returns `true` if a recording has placements.
pub(crate) fn has_placements(recorded: &Recorded) -> bool {
    recorded.recording.summary.placements > 0
}

/// Returns the op of `other` after which it has made as many allocations and frees as `one` has after `op`.
pub(crate) fn same_point(one: &Recorded, op: usize, other: &Recorded) -> usize {
    let counts = |op: &Op| matches!(op, Op::Allocate { .. } | Op::Free { .. });
    let calls = one.program().ops().iter().take(op + 1).filter(|op| counts(op)).count();
    let mut numbers = other.program().ops().iter().enumerate().filter(|(_, op)| counts(op)).map(|(number, _)| number);
    let last = other.op_count().saturating_sub(1);
    if calls == 0 { 0 } else { numbers.nth(calls - 1).unwrap_or(last) }
}
