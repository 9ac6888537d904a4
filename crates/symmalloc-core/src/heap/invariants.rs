//! The named invariants of a heap, checked by a complete scan: O(blocks), for tests and for finding defects.
//!
//! `docs/architecture.md` lists them, with the tests that detect violations. This file reads everything and writes
//! nothing.

use super::Heap;
use crate::blocks::FreeKey;
use crate::blocks::table::{Block, BlockState, Location, Slot};
use crate::config::SegmentPolicy;
use crate::config::size_rules::SizeClass;
use crate::sleep::mappings::Mappings;
use crate::stitching::{Granule, Run, StitchedRange};
use crate::sync::lock::Lock;
use crate::types::backend::Event;
use crate::types::ids::{HeapId, PoolId, StreamGroup};
use crate::types::units::{Units, bytes};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// A violated invariant: the allocator has a defect, or its memory was overwritten.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("invariant {name} is violated in {} {}: {meaning}", .heap.pool, .heap.group)]
#[non_exhaustive]
pub struct Violation {
    /// The invariant's name in `docs/architecture.md`, for example `I2`.
    pub name: &'static str,
    /// The violated statement.
    pub meaning: &'static str,
    /// The heap.
    pub heap: HeapId,
}

type Check<L> = fn(&Heap<L>) -> bool;

/// Returns the name, the statement and the check of every invariant of a heap.
fn invariants<L: Lock>() -> [(&'static str, &'static str, Check<L>); 11] {
    [
        ("I1", "the blocks of a segment tile it from 0 to its end, linked both ways", blocks_tile_their_segment),
        ("I2", "no two neighbors are both free or both holes, and no segment ends in a hole", neighbors_are_merged),
        (
            "I3",
            "the free index holds exactly the free blocks, each once, in key order, linked both ways",
            free_index_is_exact,
        ),
        ("I4", "mapped bytes are those of all blocks but the holes", mapped_bytes_add_up),
        ("I5", "usage equals the sum over live allocations, and no peak is below its current value", usage_adds_up),
        ("I6", "every fence set belongs to one block and every event to one fence of a free block", fences_are_owned),
        (
            "I7",
            "a live request fits its block, its serial is of this heap, and names are of live ones",
            live_ones_are_sane,
        ),
        ("I8", "memory begins and ends on granule boundaries, and segments lie in their range", extents_are_granular),
        ("I9", "the pointer map, where configured, holds exactly the live allocations", pointers_are_exact),
        (
            "I11",
            "memory that has several names is in use or free under exactly one of them",
            each_granule_is_at_one_address,
        ),
        ("I12", "places of plans lie in one block, and those that are live do not overlap", places_are_apart),
    ]
}

impl<L: Lock> Heap<L> {
    /// Checks every invariant. Returns the bytes that the heap holds and the number of its segments.
    pub(crate) fn check(&self) -> Result<(u64, usize), Violation> {
        let heap = self.id;
        for (name, meaning, holds) in invariants::<L>() {
            if !holds(self) {
                return Err(Violation { name, meaning, heap });
            }
        }
        let live_bytes = self.asleep().map_or(self.arena.mapped_bytes(), Mappings::mapped_bytes);
        let reserved_bytes = live_bytes + self.log.retired_bytes();
        if reserved_bytes != self.budget.reserved_bytes() {
            return Err(Violation::of_budgets(heap.pool));
        }
        Ok((reserved_bytes, self.arena.segment_count()))
    }
}

impl Violation {
    /// Creates the violation for a pool whose budgets or directory entries contradict its heaps.
    pub(crate) fn of_budgets(pool: PoolId) -> Self {
        let meaning = "budget charges and directory entries match the contents of the heaps";
        Violation { name: "I10", meaning, heap: HeapId { pool, group: StreamGroup::All } }
    }
}

fn segments<L: Lock>(heap: &Heap<L>) -> impl Iterator<Item = u32> {
    heap.arena.segments_in_order().into_iter()
}

fn blocks<L: Lock>(heap: &Heap<L>) -> impl Iterator<Item = (Slot, &Block)> {
    segments(heap).flat_map(|segment| heap.arena.blocks_of(segment)).map(|slot| (slot, heap.arena.block(slot)))
}

/// Returns the blocks of all segments and the places of plans.
fn blocks_and_places<L: Lock>(heap: &Heap<L>) -> impl Iterator<Item = (Slot, &Block)> {
    let places = heap.places().iter().map(|slot| (*slot, heap.arena.block(*slot)));
    blocks(heap).chain(places)
}

fn blocks_tile_their_segment<L: Lock>(heap: &Heap<L>) -> bool {
    let mut count = 0;
    let tiled = segments(heap).all(|id| {
        let segment = heap.arena.segment(id);
        let first = heap.arena.block(heap.arena.first_block(id));
        let (mut end, mut prev) = (0, first.prev);
        for slot in heap.arena.blocks_of(id) {
            let block = heap.arena.block(slot);
            if block.location != Location::new(segment.id, end)
                || block.prev != prev
                || block.segment != id
                || block.size == 0
            {
                return false;
            }
            (end, prev) = (block.end(), slot);
            count += 1;
        }
        end == segment.end && prev == heap.arena.last_block(id) && segment.id < heap.arena.next_segment()
    });
    tiled && count + heap.places().len() == heap.arena.block_count()
}

fn neighbors_are_merged<L: Lock>(heap: &Heap<L>) -> bool {
    blocks(heap).all(|(slot, block)| {
        let next = heap.arena.block(block.next);
        let is_last = heap.arena.is_last(slot);
        !(block.is_free() && next.is_free() || block.is_hole() && (is_last || next.is_hole()))
    })
}

fn free_index_is_exact<L: Lock>(heap: &Heap<L>) -> bool {
    let is_exact = |class| {
        let free = blocks(heap).filter(|(_, block)| block.is_free() && block.class == class);
        let mut expected: Vec<FreeKey> = free.map(|(slot, block)| FreeKey::of(block, slot)).collect();
        expected.sort_unstable();
        heap.arena.free_keys(class).eq(expected)
    };
    is_exact(SizeClass::Small) && is_exact(SizeClass::Large) && heap.arena.free_index_is_linked()
}

fn mapped_bytes_add_up<L: Lock>(heap: &Heap<L>) -> bool {
    let (mut total, mut holes) = (0, 0);
    let each = segments(heap).all(|id| {
        let blocks = heap.arena.blocks_of(id).map(|slot| heap.arena.block(slot));
        holes += blocks.filter(|block| block.is_hole()).map(|block| u64::from(block.size)).sum::<u64>();
        let blocks = heap.arena.blocks_of(id).map(|slot| heap.arena.block(slot));
        let is_own = |block: &&Block| !block.is_hole() && !heap.arena.segment(id).is_stitched;
        let mapped: Units = blocks.filter(is_own).map(|block| block.size).sum();
        total += bytes(mapped);
        mapped == heap.arena.segment(id).mapped
    });
    each && total == heap.arena.mapped_bytes() && holes == heap.arena.hole_units()
}

fn usage_adds_up<L: Lock>(heap: &Heap<L>) -> bool {
    let (mut count, mut allocated, mut requested_in_all) = (0, 0, 0);
    for (_, block) in blocks_and_places(heap) {
        if let BlockState::Allocated { requested, .. } = block.state
            && !block.is_quarantined()
        {
            count += 1;
            allocated += bytes(block.size);
            requested_in_all += requested;
        }
    }
    let stats = heap.ledger.usage().stats();
    let sum = stats.small + stats.large;
    let all = stats.all;
    let currents = [all.allocations.current, all.allocated_bytes.current, all.requested_bytes.current];
    currents == [count, allocated, requested_in_all]
        && currents == [sum.allocations.current, sum.allocated_bytes.current, sum.requested_bytes.current]
        && [all.allocations, all.allocated_bytes, all.requested_bytes].iter().all(|stat| stat.peak >= stat.current)
}

fn fences_are_owned<L: Lock>(heap: &Heap<L>) -> bool {
    let (mut sets, mut events) = (BTreeSet::new(), BTreeMap::new());
    let each = blocks_and_places(heap).all(|(slot, block)| {
        let fences = heap.arena.fences_of(slot);
        let is_named_once = block.fences.is_empty() || !fences.is_empty() && sets.insert(block.fences);
        let is_ordered = fences.is_sorted_by(|a, b| a.stream < b.stream);
        // Events are recorded at free, on every stream that used the block.
        let is_armed = fences.iter().all(|fence| match fence.event {
            Some(event) => {
                *events.entry(event.0).or_insert(0) += 1;
                block.is_free() || block.is_quarantined()
            }
            None => true,
        });
        is_named_once && is_ordered && is_armed && (fences.is_empty() || !block.is_hole())
    });
    let are_counted = events.into_iter().all(|(event, fences)| heap.arena.event_shares(Event(event)) == fences);
    each && are_counted && sets.len() == heap.arena.fence_sets()
}

fn live_ones_are_sane<L: Lock>(heap: &Heap<L>) -> bool {
    let sane = blocks_and_places(heap).all(|(_, block)| match block.state {
        BlockState::Allocated { requested, serial, stream } => {
            requested > 0
                && requested <= bytes(block.size)
                && (heap.ledger.has_issued(serial) || block.is_quarantined())
                && heap.id.group.may_include(stream)
        }
        _ => true,
    });
    let is_named_and_live = |(slot, block): &(Slot, &Block)| {
        matches!(block.state, BlockState::Allocated { .. }) && heap.ledger.name_of(*slot).is_some()
    };
    sane && blocks_and_places(heap).filter(is_named_and_live).count() == heap.ledger.name_count()
}

fn extents_are_granular<L: Lock>(heap: &Heap<L>) -> bool {
    let rules = heap.arena.rules();
    let granule = rules.granule;
    let is_expandable = matches!(heap.config.segments(), SegmentPolicy::Expandable(_));
    segments(heap).all(|id| {
        let segment = heap.arena.segment(id);
        let blocks = heap.arena.blocks_of(id).map(|slot| heap.arena.block(slot));
        let holes = blocks.filter(|block| block.is_hole() || block.is_elsewhere());
        bytes(segment.end) <= segment.range.size_bytes
            && segment.end == rules.tight_size(segment.end)
            && (is_expandable && !rules.is_tight(segment.end) || bytes(segment.end) == segment.range.size_bytes)
            && holes
                .into_iter()
                .all(|hole| is_expandable && hole.offset().is_multiple_of(granule) && hole.size.is_multiple_of(granule))
    })
}

fn pointers_are_exact<L: Lock>(heap: &Heap<L>) -> bool {
    let Some(pointers) = heap.ledger.pointers() else { return true };
    let is_live = |block: &Block| matches!(block.state, BlockState::Allocated { .. }) && !block.is_quarantined();
    let mut live = blocks_and_places(heap).filter(|(_, block)| is_live(block));
    live.all(|(slot, _)| pointers.find(heap.arena.address(slot)) == Some(&slot))
        && pointers.len() as u64 == heap.ledger.usage().allocations()
}

fn each_granule_is_at_one_address<L: Lock>(heap: &Heap<L>) -> bool {
    let granule = heap.arena.rules().granule;
    let is_whole = |block: &Block| block.offset().is_multiple_of(granule) && block.size.is_multiple_of(granule);
    let at_home = blocks(heap).filter(|(_, block)| !heap.arena.segment(block.segment).is_stitched);
    let mut covered: Vec<(Run, Slot)> = at_home
        .filter(|(_, block)| block.is_elsewhere())
        .map(|(slot, block)| {
            let start = Granule { segment: block.segment, offset: block.offset() };
            (Run { start, size: block.size }, slot)
        })
        .collect();
    let ranges = heap.stitched.ranges();
    let mut filled: Vec<(Run, Slot)> =
        ranges.iter().flat_map(StitchedRange::filled_pieces).map(|(_, run, slot)| (run, slot)).collect();
    covered.sort_unstable();
    filled.sort_unstable();
    let is_filled_here = |range: &StitchedRange| {
        let here = |offset| range.filled_pieces().any(|(at, run, _)| at <= offset && offset < at + run.size);
        let blocks = heap.arena.blocks_of(range.segment()).map(|slot| heap.arena.block(slot));
        blocks.into_iter().all(|block| {
            let mut granules = (block.offset() / granule * granule..block.end()).step_by(granule as usize);
            granules.all(|offset| here(offset) != block.is_elsewhere())
        })
    };
    let maps_once = |range: &StitchedRange| {
        let mut runs: Vec<Run> = range.mapped_pieces().map(|(_, run)| run).collect();
        runs.sort_unstable();
        runs.windows(2).all(|pair| {
            pair[0].start.segment < pair[1].start.segment || pair[0].start.offset + pair[0].size <= pair[1].start.offset
        })
    };
    blocks(heap).all(|(_, block)| !block.is_elsewhere() || is_whole(block))
        && covered == filled
        && ranges.iter().all(|range| is_filled_here(range) && maps_once(range))
}

fn places_are_apart<L: Lock>(heap: &Heap<L>) -> bool {
    let planned = blocks(heap).filter(|(_, block)| block.state == BlockState::Planned).map(|(slot, _)| slot);
    if !planned.eq(heap.plan_memory()) {
        return false;
    }
    let Some(memory) = heap.plan_memory().map(|slot| heap.arena.block(slot)) else { return true };
    let places = || heap.places().iter().map(|slot| heap.arena.block(*slot));
    let lies_in_memory = |place: &Block| {
        place.is_place()
            && place.segment == memory.segment
            && memory.offset() <= place.offset()
            && place.end() <= memory.end()
    };
    let live: Vec<&Block> = heap.live_places().into_iter().map(|slot| heap.arena.block(slot)).collect();
    places().all(lies_in_memory) && live.is_sorted_by(|lower, upper| lower.end() <= upper.offset())
}
