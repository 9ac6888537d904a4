//! The named invariants of a heap, checked by scanning all of it: O(blocks), for tests and for suspicion.
//!
//! `docs/invariants.md` lists them with the tests that would notice. Reads everything and writes nothing.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::block_table::{Block, BlockState, NONE, Place, Slot};
use crate::config::SegmentPolicy;
use crate::fence::Fence;
use crate::free_key::FreeKey;
use crate::heap::Heap;
use crate::ids::{PoolId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::size_rules::SizeClass;
use crate::units::{Units, bytes};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// An invariant that does not hold: the allocator has a defect, or something wrote over its memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("invariant {name} is violated in {pool} {}: {meaning}", .stream.map_or("(shared)".into(), |s| s.to_string()))]
#[non_exhaustive]
pub struct Violation {
    /// The invariant's name in `docs/invariants.md`, for example `I2`.
    pub name: &'static str,
    /// What should hold.
    pub meaning: &'static str,
    /// The pool of the heap.
    pub pool: PoolId,
    /// The stream of the heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
}

type Check = fn(&Heap) -> bool;

/// Name, meaning and check of every invariant of a heap.
const INVARIANTS: [(&str, &str, Check); 9] = [
    ("I1", "the blocks of a segment tile it from 0 to its end, linked both ways", blocks_tile_their_segment),
    ("I2", "no two neighbours are both free or both holes, and no segment ends in a hole", neighbours_are_merged),
    (
        "I3",
        "the free index holds exactly the free blocks, each once, in key order, linked both ways",
        free_index_is_exact,
    ),
    ("I4", "mapped bytes are those of all blocks but the holes, and every hole is counted", mapped_bytes_add_up),
    ("I5", "usage equals the sum over live allocations, and no peak is below its current value", usage_adds_up),
    ("I6", "every fence set belongs to one block and every event to one fence of a free block", fences_are_owned),
    (
        "I7",
        "a live allocation's request fits its block, its tag was given by this heap, and names are of live ones",
        live_ones_are_sane,
    ),
    (
        "I8",
        "blocks lie on granule boundaries where memory begins and ends, and segments within their range",
        extents_are_granular,
    ),
    ("I9", "the pointer index holds exactly the live allocations", pointer_index_is_exact),
];

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Checks every invariant of every heap, and that the budgets equal the sums over heaps (`I10`). Slow; for tests.
    /// Between ops only: with another thread in the middle of one, sums may differ.
    ///
    /// # Errors
    /// The first violation found, in (pool, stream) order.
    pub fn check(&self) -> Result<(), Violation> {
        let (mut reserved_in_all, mut segments_in_all) = (0, 0);
        for (pool, entry) in self.pools.iter() {
            let mut reserved = 0;
            for heap in entry.heaps() {
                let heap = heap.lock();
                for (name, meaning, holds) in INVARIANTS {
                    if !holds(&heap) {
                        return Err(Violation { name, meaning, pool: heap.pool, stream: heap.stream });
                    }
                }
                let held = heap.mapped + heap.log.retired_bytes();
                if held != heap.budget.reserved_bytes() {
                    return Err(budget_violation(PoolId(pool as u32)));
                }
                reserved += held;
                segments_in_all += heap.table.segment_count();
            }
            if reserved != entry.budget.reserved_bytes() {
                return Err(budget_violation(PoolId(pool as u32)));
            }
            reserved_in_all += reserved;
        }
        let directory_is_exact = self.around.directory.lock().len() == segments_in_all;
        if reserved_in_all != self.around.budget.reserved_bytes() || !directory_is_exact {
            return Err(budget_violation(PoolId::DEFAULT));
        }
        Ok(())
    }
}

fn budget_violation(pool: PoolId) -> Violation {
    let meaning = "what is charged to the budgets and listed in the directory is what the heaps hold";
    Violation { name: "I10", meaning, pool, stream: None }
}

fn segments(heap: &Heap) -> impl Iterator<Item = u32> {
    heap.table.segments_in_order().into_iter()
}

fn blocks(heap: &Heap) -> impl Iterator<Item = (Slot, &Block)> {
    segments(heap).flat_map(|segment| heap.table.blocks_of(segment)).map(|slot| (slot, heap.table.block(slot)))
}

fn blocks_tile_their_segment(heap: &Heap) -> bool {
    let mut count = 0;
    let tiled = segments(heap).all(|id| {
        let segment = heap.table.segment(id);
        let (mut end, mut prev) = (0, NONE);
        for slot in heap.table.blocks_of(id) {
            let block = heap.table.block(slot);
            if block.place != Place::new(segment.id, end)
                || block.prev != prev
                || block.segment != id
                || block.size == 0
            {
                return false;
            }
            (end, prev) = (block.end(), slot);
            count += 1;
        }
        end == segment.end && prev == segment.last && segment.id < heap.next_segment
    });
    tiled && count == heap.table.block_count()
}

fn neighbours_are_merged(heap: &Heap) -> bool {
    blocks(heap).all(|(_, block)| match block.next {
        NONE => !block.is_hole(),
        next => {
            let next = heap.table.block(next);
            !(block.is_free() && next.is_free() || block.is_hole() && next.is_hole())
        }
    })
}

fn free_index_is_exact(heap: &Heap) -> bool {
    let is_exact = |home| {
        let free = blocks(heap).filter(|(_, block)| block.is_free() && block.home == home);
        let mut expected: Vec<FreeKey> = free.map(|(slot, block)| FreeKey::of(block, slot)).collect();
        expected.sort_unstable();
        heap.free.keys(heap.table.blocks(), home).eq(expected)
    };
    is_exact(SizeClass::Small) && is_exact(SizeClass::Large) && heap.free.is_linked(heap.table.blocks())
}

fn mapped_bytes_add_up(heap: &Heap) -> bool {
    let holes = blocks(heap).filter(|(_, block)| block.is_hole()).count();
    let mut total = 0;
    let each = segments(heap).all(|id| {
        let blocks = heap.table.blocks_of(id).map(|slot| heap.table.block(slot));
        let mapped: Units = blocks.filter(|block| !block.is_hole()).map(|block| block.size).sum();
        total += bytes(mapped);
        mapped == heap.table.segment(id).mapped
    });
    each && holes == heap.hole_count && total == heap.mapped
}

fn usage_adds_up(heap: &Heap) -> bool {
    let (mut count, mut allocated, mut requested_in_all) = (0, 0, 0);
    for (_, block) in blocks(heap) {
        if let BlockState::Allocated { requested, .. } = block.state {
            count += 1;
            allocated += bytes(block.size);
            requested_in_all += requested;
        }
    }
    let stats = heap.usage.stats();
    let sum = stats.small.plus(stats.large);
    let all = stats.all;
    let currents = [all.allocations.current, all.allocated_bytes.current, all.requested_bytes.current];
    currents == [count, allocated, requested_in_all]
        && currents == [sum.allocations.current, sum.allocated_bytes.current, sum.requested_bytes.current]
        && [all.allocations, all.allocated_bytes, all.requested_bytes].iter().all(|stat| stat.peak >= stat.current)
}

fn fences_are_owned(heap: &Heap) -> bool {
    let mut holders = BTreeMap::<_, usize>::new();
    let (mut lists, mut list_count, mut node_count) = (BTreeSet::new(), 0, 0);
    for (_, block) in blocks(heap) {
        let fences: Vec<Fence> = heap.fences.fences(block.fences).collect();
        if block.fences.is_list() {
            (list_count, node_count) = (list_count + 1, node_count + fences.len());
            lists.insert(block.fences);
        }
        // A stream alone takes no place.
        let ones = heap.fences.ones(block.fences).filter(|one| one.stream_alone().is_none());
        ones.for_each(|one| *holders.entry(one).or_default() += 1);
        let is_ordered = fences.is_sorted_by(|a, b| a.stream < b.stream);
        // Events are recorded at free, on every stream that used the block.
        let is_armed = fences.iter().all(|fence| fence.event.is_none() || block.is_free());
        if block.is_hole() && !fences.is_empty() || !is_ordered || !is_armed {
            return false;
        }
    }
    let events: Vec<u64> = holders.keys().filter_map(|one| Some(heap.fences.fence(*one).event?.0)).collect();
    list_count == lists.len()
        && node_count == heap.fences.node_count()
        && holders == heap.fences.holders()
        && events.iter().collect::<BTreeSet<_>>().len() == events.len()
}

fn live_ones_are_sane(heap: &Heap) -> bool {
    let sane = blocks(heap).all(|(_, block)| match block.state {
        BlockState::Allocated { requested, tag, stream } => {
            requested > 0
                && requested <= bytes(block.size)
                && heap.tags.gave(tag)
                && heap.stream.is_none_or(|own| own == stream)
        }
        _ => true,
    });
    let is_named_and_live = |(slot, block): &(Slot, &Block)| {
        matches!(block.state, BlockState::Allocated { .. }) && heap.names.find(*slot).is_some()
    };
    sane && blocks(heap).filter(is_named_and_live).count() == heap.names.len()
}

fn extents_are_granular(heap: &Heap) -> bool {
    let granule = heap.rules.granule;
    let is_expandable = matches!(heap.config.segments(), SegmentPolicy::Expandable(_));
    segments(heap).all(|id| {
        let segment = heap.table.segment(id);
        let holes = heap.table.blocks_of(id).map(|slot| heap.table.block(slot)).filter(|block| block.is_hole());
        bytes(segment.end) <= segment.range.size_bytes
            && segment.end.is_multiple_of(granule)
            && (is_expandable || bytes(segment.end) == segment.range.size_bytes)
            && holes
                .into_iter()
                .all(|hole| is_expandable && hole.offset().is_multiple_of(granule) && hole.size.is_multiple_of(granule))
    })
}

fn pointer_index_is_exact(heap: &Heap) -> bool {
    let live = || blocks(heap).filter(|(_, block)| matches!(block.state, BlockState::Allocated { .. }));
    heap.pointers.len().is_none_or(|len| {
        len == live().count() && live().all(|(slot, _)| heap.slot_around(heap.address(slot)) == Some(slot))
    })
}
