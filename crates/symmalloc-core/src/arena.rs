//! The arena of a heap: its segments, blocks, free blocks and fences. It knows nothing about requests, limits or
//! histories.
//!
//! The [`BlockTable`] holds blocks and segments, the [`FreeIndex`] the free blocks in the order of rule D2, the
//! [`FenceTable`] the fences for which each block's next user waits, and [`SizeRules`] the rules for sizes. This module
//! keeps them consistent with each other: no other code changes them.
//!
//! ```text
//!  take_front   out of the free index ─► split ─► allocated, or the memory of plans
//!  mark_free    allocated ─► free; then coalesce: merge with free neighbors ─► into the free index
//!  add_segment, extend, fill_hole     memory that the heap acquired becomes free blocks
//!  cut_hole, remove_segment           free blocks whose memory the heap releases become holes, or disappear
//! ```
//! The heap acquires and releases the memory, and records every decision; see [`Heap`](crate::heap::Heap). Of this
//! component, only [`fencing`] calls the driver. [`addresses`] chooses the addresses of ranges in a pool with a base.

pub(crate) mod addresses;
pub(crate) mod fencing;

use crate::blocks::offsets::OffsetIndex;
use crate::blocks::table::{Block, BlockState, BlockTable, Location, QUARANTINED, Segment, Slot};
use crate::blocks::{FreeIndex, FreeKey};
use crate::config::size_rules::{SizeClass, SizeRules};
use crate::history::segment_log::Extents;
use crate::streams::clocks::Tick;
use crate::streams::fences::{Fence, FenceSetId, FenceTable, Fences};
use crate::types::backend::{DeviceAddress, Event, Range};
use crate::types::ids::{SegmentId, StreamId};
use crate::types::units::{Units, bytes};
use crate::types::work;
use smallvec::SmallVec;
use std::mem;
use std::num::NonZeroU64;

/// The memory of a heap. Between two calls, these invariants hold (`docs/architecture.md` lists their names):
///
/// - The blocks of each segment tile it, and no two neighbors are both free (I1, I2).
/// - The free index contains exactly the free blocks, except for places of plans (I3) and a block between `mark_free` and `coalesce`.
/// - `mapped_bytes` is the sum of the mapped bytes of all segments (I4).
/// - Every set of fences belongs to one block (I6).
/// - Every segment's ordinal is less than `next_segment`.
#[derive(Debug)]
pub(crate) struct Arena {
    rules: SizeRules,
    /// The stream of all blocks; `None` if several streams may share the heap. In a heap of one stream, free blocks
    /// need no tick, because the stream executes its work in order.
    stream: Option<StreamId>,
    table: BlockTable,
    /// The free blocks. Holes and allocated blocks are not in it.
    free: FreeIndex,
    fences: FenceTable,
    /// Ordinal of the next segment.
    next_segment: SegmentId,
    /// Bytes backed by memory, excluding retired segments.
    mapped_bytes: u64,
    /// Units of all holes.
    hole_units: u64,
    /// Index of blocks by location; created when an allocation is first revived on its own.
    offsets: Option<Box<OffsetIndex>>,
}

/// A removed segment.
#[derive(Debug)]
pub(crate) struct Removed {
    pub(crate) segment: Segment,
    /// Streams whose work may still use its memory, in any order.
    pub(crate) users: SmallVec<[StreamId; 2]>,
}

impl Arena {
    /// Creates an arena without memory.
    pub(crate) fn new(rules: SizeRules, stream: Option<StreamId>) -> Self {
        Arena {
            rules,
            stream,
            table: BlockTable::default(),
            free: FreeIndex::default(),
            fences: FenceTable::default(),
            next_segment: SegmentId(0),
            mapped_bytes: 0,
            hole_units: 0,
            offsets: None,
        }
    }

    #[inline(always)]
    pub(crate) fn rules(&self) -> &SizeRules {
        &self.rules
    }

    /// Returns a block, or a place of a plan.
    #[inline(always)]
    pub(crate) fn block(&self, slot: Slot) -> &Block {
        self.table.block(slot)
    }

    /// Returns the block in a slot that may be stale or vacant.
    #[inline(always)]
    pub(crate) fn find_block(&self, slot: Slot) -> Option<&Block> {
        self.table.find(slot)
    }

    /// Returns the block that contains an offset of a live segment.
    pub(crate) fn block_at(&mut self, id: SegmentId, offset: Units) -> Option<Slot> {
        let segment = self.table.segment_of(id)?;
        self.offsets.get_or_insert_default().find(&self.table, segment, offset)
    }

    /// Returns the first address of a block, or of a place of a plan.
    #[inline(always)]
    pub(crate) fn address(&self, slot: Slot) -> DeviceAddress {
        self.table.address(slot)
    }

    /// Returns the address of a location in a segment.
    #[inline(always)]
    pub(crate) fn address_at(&self, segment: u32, location: Location) -> DeviceAddress {
        self.table.address_at(segment, location)
    }

    /// Returns the size of a block if it is free, and 0 otherwise.
    pub(crate) fn free_size(&self, slot: Slot) -> Units {
        self.table.free_size(slot)
    }

    /// Returns the number of blocks. O(blocks), for the invariants.
    pub(crate) fn block_count(&self) -> usize {
        self.table.block_count()
    }

    #[inline(always)]
    pub(crate) fn segment(&self, segment: u32) -> &Segment {
        self.table.segment(segment)
    }

    pub(crate) fn segment_count(&self) -> usize {
        self.table.segment_count()
    }

    /// Returns the slots of all segments in sequence order.
    pub(crate) fn segments_in_order(&self) -> Vec<u32> {
        self.table.segments_in_order()
    }

    /// Returns the slots of all segments with their own memory, in sequence order.
    pub(crate) fn backed_segments(&self) -> Vec<u32> {
        self.table.backed_segments()
    }

    /// Returns the slots of a segment's blocks in offset order.
    pub(crate) fn blocks_of(&self, segment: u32) -> impl Iterator<Item = Slot> + '_ {
        self.table.blocks_of(segment)
    }

    /// Returns the first block of a segment.
    pub(crate) fn first_block(&self, segment: u32) -> Slot {
        self.table.first(segment)
    }

    /// Returns the last block of a segment.
    pub(crate) fn last_block(&self, segment: u32) -> Slot {
        self.table.last(segment)
    }

    /// Returns `true` if a block is the last in its segment.
    pub(crate) fn is_last(&self, slot: Slot) -> bool {
        self.table.is_last(slot)
    }

    /// Returns the keys of all free blocks of a class, in ascending order.
    pub(crate) fn free_keys(&self, class: SizeClass) -> impl Iterator<Item = FreeKey> + '_ {
        self.free.keys(self.table.blocks(), class)
    }

    /// Returns the slots of all free blocks of a class with at least `size`, in the order of rule D2.
    pub(crate) fn free_at_least(&self, class: SizeClass, size: Units) -> impl Iterator<Item = Slot> + '_ {
        self.free.at_least(self.table.blocks(), class, size)
    }

    /// Returns the size of the largest free block.
    pub(crate) fn largest_free(&self) -> Option<Units> {
        self.free.largest(self.table.blocks())
    }

    /// Returns `true` if the lists of the free index are linked in both directions, for the invariants.
    pub(crate) fn free_index_is_linked(&self) -> bool {
        self.free.is_linked(self.table.blocks())
    }

    /// Returns the number of sets of fences, for the invariants.
    pub(crate) fn fence_sets(&self) -> usize {
        self.fences.len()
    }

    /// Returns the number of fences that share an event, for the invariants.
    pub(crate) fn event_shares(&self, event: Event) -> u32 {
        self.fences.shares(event)
    }

    /// Returns the fences of a block.
    pub(crate) fn fences_of(&self, slot: Slot) -> &[Fence] {
        self.fences.fences(self.table.block(slot).fences)
    }

    #[inline(always)]
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Returns the units of all holes.
    pub(crate) fn hole_units(&self) -> u64 {
        self.hole_units
    }

    /// Returns the ordinal of the next segment, which is the number of segments so far.
    pub(crate) fn next_segment(&self) -> SegmentId {
        self.next_segment
    }

    /// Returns the slots of all blocks in (sequence, offset) order.
    pub(crate) fn all_blocks(&self) -> Vec<Slot> {
        self.table.segments_in_order().into_iter().flat_map(|segment| self.table.blocks_of(segment)).collect()
    }

    /// Returns the mapped parts of a segment, between its holes.
    pub(crate) fn extents_of(&self, segment: u32) -> Extents {
        let mut extents = Extents::new();
        let Segment { mapped, end, .. } = *self.table.segment(segment);
        if mapped == end {
            extents.push((0, bytes(end)));
            return extents;
        }
        for block in self.table.blocks_of(segment).map(|slot| self.table.block(slot)).filter(|block| !block.is_hole()) {
            let (offset, size_bytes) = (bytes(block.offset()), bytes(block.size));
            match extents.last_mut() {
                Some((from, size)) if *from + *size == offset => *size += size_bytes,
                _ => extents.push((offset, size_bytes)),
            }
        }
        extents
    }

    /// Returns the streams whose work may still use a free block.
    pub(crate) fn streams_of(&self, slot: Slot) -> SmallVec<[StreamId; 2]> {
        work::count(self.fences_of(slot).len());
        let mut streams: SmallVec<[StreamId; 2]> = self.fences_of(slot).iter().map(|fence| fence.stream).collect();
        if let BlockState::Free { stream, .. } = self.table.block(slot).state {
            streams.push(stream);
        }
        streams
    }

    /// Returns the free units at the end of the newest segment.
    pub(crate) fn free_at_end(&self) -> Units {
        self.newest_growable().map_or(0, |segment| self.table.free_size(self.table.last(segment)))
    }

    /// Returns the newest segment with its own memory that may grow.
    pub(crate) fn newest_growable(&self) -> Option<u32> {
        self.table.newest_backed(|segment| !self.rules.is_tight(segment.end))
    }

    /// Returns the lowest hole that fits, with its segment.
    pub(crate) fn find_hole(&self, fits: impl Fn(&Block) -> bool) -> Option<(Slot, u32)> {
        if self.hole_units == 0 {
            return None;
        }
        // Holes exist only after a trim. Segments that are mapped to their end are skipped.
        let has_holes = |segment: &u32| self.table.segment(*segment).mapped < self.table.segment(*segment).end;
        self.table.backed_segments().into_iter().filter(has_holes).find_map(|segment| {
            let mut slots = self.table.blocks_of(segment);
            let is_meant = |block: &Block| block.is_hole() && fits(block);
            slots.find(|slot| is_meant(self.table.block(*slot))).map(|slot| (slot, segment))
        })
    }

    /// Returns the free blocks of at least `size` in the order of their locations, each with the ordinal of its
    /// segment.
    pub(crate) fn free_from(&self, size: Units) -> Vec<(SegmentId, Slot)> {
        let mut slots: Vec<Slot> = self.free_at_least(SizeClass::Large, size).collect();
        work::count(slots.len());
        slots.sort_unstable_by_key(|slot| self.table.block(*slot).location);
        slots.into_iter().map(|slot| (self.table.block(slot).location.sequence(), slot)).collect()
    }

    /// Returns the free block from which the rules serve a request of `size`.
    pub(crate) fn best_fit(&self, size: Units) -> Option<Slot> {
        self.best_fit_block(size).map(|(slot, _)| slot)
    }

    /// Returns the smallest free block of the large class with at least `size`, even if the rules would not split it
    /// for a request.
    pub(crate) fn smallest_free(&self, size: Units) -> Option<Slot> {
        self.free.best_fit(self.table.blocks(), SizeClass::Large, size)
    }

    /// Returns the free block from which the rules serve a request of `size`, and its slot.
    #[inline(always)]
    pub(crate) fn best_fit_block(&self, size: Units) -> Option<(Slot, &Block)> {
        let blocks = self.table.blocks();
        let slot = self.free.best_fit(blocks, self.rules.class_of(size), size)?;
        let block = &blocks[slot as usize];
        self.rules.accepts(size, block.size).then_some((slot, block))
    }

    /// Takes the start of a free block and gives it `state`, which is not free. The rest stays free with the same
    /// fences, unless the rules assign the whole block to the request. Returns the taken block, which has no fences,
    /// and its slot.
    #[inline(always)]
    pub(crate) fn take_front(&mut self, free: Slot, size: Units, state: BlockState) -> (Slot, &Block) {
        let mut tiling = self.table.tiling();
        self.free.remove(tiling.blocks(), free);
        let block = &tiling.blocks()[free as usize];
        if self.rules.splits(block.class, size, block.size) {
            let front = tiling.cut_front(free, size, state);
            self.free.insert(tiling.blocks(), free);
            (front, &tiling.into_blocks()[front as usize])
        } else {
            let block = &mut tiling.into_blocks()[free as usize];
            block.state = state;
            if !block.fences.is_empty() {
                let fences = mem::replace(&mut block.fences, FenceSetId::EMPTY);
                self.fences.clear(fences);
            }
            (free, block)
        }
    }

    /// Marks an allocated block, or a place of a plan, as free, but does not add it to the free index. Returns it. If
    /// it is a block, the caller then calls [`coalesce`](Self::coalesce).
    #[inline(always)]
    pub(crate) fn mark_free(&mut self, slot: Slot, stream: StreamId, since: Tick) -> &Block {
        let block = self.table.block_mut(slot);
        block.state = BlockState::Free { stream, since };
        block
    }

    /// Adds a free block to the free index.
    fn link(&mut self, slot: Slot) {
        self.free.insert(self.table.tiling().blocks(), slot);
    }

    /// Removes a free block from the free index. Call this before any part of the block's key changes.
    fn unlink(&mut self, slot: Slot) {
        self.free.remove(self.table.tiling().blocks(), slot);
    }

    /// Merges a free block that is not in the free index with its free neighbors, and adds the result to the index.
    /// Returns the resulting block.
    ///
    /// ```text
    ///  prev      freed     next                          the earlier free block absorbs the freed one and keeps its owner
    ///  free    + block   + free    ──►  prev
    ///  free    + block             ──►  prev
    ///            block   + free    ──►  next
    /// ```
    #[inline(always)]
    pub(crate) fn coalesce(&mut self, slot: Slot) -> Slot {
        let mut tiling = self.table.tiling();
        let Block { prev, next, .. } = tiling.blocks()[slot as usize];
        let mut merged = slot;
        for neighbor in [prev, next] {
            if tiling.blocks()[neighbor as usize].is_free() {
                self.free.remove(tiling.blocks(), neighbor);
                // The first merged neighbor absorbs the second.
                let (from, to) = if merged == slot { (slot, neighbor) } else { (neighbor, merged) };
                let blocks = tiling.blocks();
                let (giver, taker) = (&blocks[from as usize], &blocks[to as usize]);
                // In a heap of one stream, all blocks have that stream as their owner.
                if !giver.fences.is_empty() || self.stream.is_none() && giver.state != taker.state {
                    merge_fences(&mut self.fences, blocks, from, to);
                }
                tiling.absorb(from, to);
                merged = to;
            }
        }
        self.free.insert(tiling.blocks(), merged);
        merged
    }

    /// Adds a segment whose first `size` units are backed by memory. Returns its free block.
    pub(crate) fn add_segment(&mut self, range: Range, class: SizeClass, size: Units, free: BlockState) -> Slot {
        let id = self.next_id();
        let slot = self.table.add_segment(id, range, class, size, free);
        self.mapped_bytes += bytes(size);
        self.link(slot);
        slot
    }

    /// Adds a stitched range, which maps memory of other segments. Returns its free block.
    pub(crate) fn add_stitched(&mut self, range: Range, free: BlockState) -> Slot {
        let id = self.next_id();
        let slot = self.table.add_stitched(id, range, free);
        self.link(slot);
        slot
    }

    fn next_id(&mut self) -> SegmentId {
        let id = self.next_segment;
        self.next_segment = SegmentId(id.0.checked_add(1).expect("2^32 segments were created in one heap"));
        id
    }

    /// Adds a saved segment. Its parts are free memory or holes, in offset order, and the last part is memory. Returns
    /// the segment.
    pub(crate) fn restore_segment(
        &mut self,
        id: SegmentId,
        range: Range,
        class: SizeClass,
        parts: impl Iterator<Item = (BlockState, Units)>,
    ) -> u32 {
        let mut segment = None;
        for (state, size) in parts {
            let slot = match segment {
                None => self.table.add_segment(id, range, class, size, state),
                Some(segment) => self.table.extend(segment, size, state),
            };
            let segment = *segment.insert(self.table.block(slot).segment);
            if state == BlockState::Hole {
                self.table.segment_mut(segment).mapped -= size;
                self.hole_units += u64::from(size);
            } else {
                self.link(slot);
            }
        }
        let segment = segment.expect("a saved segment has an extent");
        self.mapped_bytes += bytes(self.table.segment(segment).mapped);
        segment
    }

    /// Continues the numbering of a saved heap, whose segments were restored.
    pub(crate) fn restore_numbering(&mut self, next_segment: SegmentId) {
        self.next_segment = next_segment;
    }

    /// Adds `size` units of memory at the end of a segment. Returns the free block that contains them.
    pub(crate) fn extend(&mut self, segment: u32, size: Units, free: BlockState) -> Slot {
        let slot = self.table.extend(segment, size, free);
        self.mapped_bytes += bytes(size);
        self.coalesce(slot)
    }

    /// Turns the first `size` units of a hole into free memory. Returns the free block that contains them.
    pub(crate) fn fill_hole(&mut self, slot: Slot, size: Units, free: BlockState) -> Slot {
        let Block { segment, size: whole, .. } = *self.table.block(slot);
        let filled = if size < whole {
            self.table.tiling().cut_front(slot, size, free)
        } else {
            self.table.block_mut(slot).state = free;
            slot
        };
        self.table.segment_mut(segment).mapped += size;
        self.mapped_bytes += bytes(size);
        self.hole_units -= u64::from(size);
        self.coalesce(filled)
    }

    /// Turns `from..to` of a free block, whose memory was released, into a hole, or shortens the segment if this part
    /// is at its end. The host has already waited for the block's users.
    pub(crate) fn cut_hole(&mut self, slot: Slot, from: Units, to: Units) {
        let block = self.table.block(slot);
        let (segment, offset, end, fences) = (block.segment, block.offset(), block.end(), block.fences);
        self.unlink(slot);
        // The host has waited for these streams, so the rest of the block needs no wait either.
        self.fences.clear(fences);
        self.table.block_mut(slot).fences = FenceSetId::EMPTY;
        let free = self.table.block(slot).state;
        if from > offset {
            let front = self.table.tiling().cut_front(slot, from - offset, free);
            self.link(front);
        }
        let hole = if to < end {
            let hole = self.table.tiling().cut_front(slot, to - from, BlockState::Hole);
            self.link(slot);
            hole
        } else {
            self.table.block_mut(slot).state = BlockState::Hole;
            slot
        };
        self.table.segment_mut(segment).mapped -= to - from;
        self.mapped_bytes -= bytes(to - from);
        self.hole_units += u64::from(to - from);
        self.join_holes(hole);
    }

    /// Restores the canonical tiling next to a new hole: no two adjacent holes, and none at the end.
    fn join_holes(&mut self, mut slot: Slot) {
        let Block { prev, next, segment, .. } = *self.table.block(slot);
        if self.table.block(next).is_hole() {
            self.table.tiling().absorb(next, slot);
        }
        if self.table.block(prev).is_hole() {
            self.table.tiling().absorb(slot, prev);
            slot = prev;
        }
        if self.table.is_last(slot) {
            self.hole_units -= u64::from(self.table.block(slot).size);
            self.table.shorten(segment);
        }
    }

    /// Removes a segment without live allocations.
    pub(crate) fn remove_segment(&mut self, segment: u32) -> Removed {
        let mut users: SmallVec<[StreamId; 2]> = SmallVec::new();
        for slot in self.table.blocks_of(segment).collect::<Vec<_>>() {
            let block = self.table.block(slot);
            if block.is_hole() || block.is_elsewhere() {
                continue;
            }
            users.extend(self.streams_of(slot));
            let fences = self.table.block(slot).fences;
            self.fences.clear(fences);
            self.unlink(slot);
        }
        let segment = self.table.remove_segment(segment);
        self.mapped_bytes -= bytes(segment.mapped);
        if !segment.is_stitched {
            self.hole_units -= u64::from(segment.end - segment.mapped);
        }
        Removed { segment, users }
    }

    /// Turns every live allocation into a free block without an op, because the allocator is dropped. The uses of an
    /// allocation remain as fences without events.
    pub(crate) fn abandon_live(&mut self) {
        for slot in self.all_blocks() {
            let block = self.table.block_mut(slot);
            if let BlockState::Allocated { stream, .. } = block.state {
                block.state = BlockState::Free { stream, since: Tick::MAX };
                self.link(slot);
            }
        }
    }

    /// Keeps a block that the program has freed out of the free index.
    pub(crate) fn quarantine(&mut self, slot: Slot) {
        if let BlockState::Allocated { serial, .. } = &mut self.table.block_mut(slot).state {
            *serial = QUARANTINED;
        }
    }

    /// Returns the stream of a quarantined block.
    pub(crate) fn quarantined_stream(&self, slot: Slot) -> StreamId {
        match self.table.block(slot).state {
            BlockState::Allocated { stream, serial: QUARANTINED, .. } => stream,
            state => unreachable!("the block is not in quarantine: {state:?}"),
        }
    }

    /// Cuts `offset..end` out of a free block, and returns it in `state`, which is not free. The remainders on both
    /// sides stay free, with the same earlier users. The returned block has no fences.
    pub(crate) fn carve(&mut self, slot: Slot, offset: Units, end: Units, state: BlockState) -> Slot {
        self.unlink(slot);
        let free = self.table.block(slot).state;
        let start = self.table.block(slot).offset();
        if start < offset {
            let front = self.table.tiling().cut_front(slot, offset - start, free);
            self.table.block_mut(front).fences = self.fences.copy(self.table.block(slot).fences);
            self.link(front);
        }
        if end == self.table.block(slot).end() {
            let block = self.table.block_mut(slot);
            block.state = state;
            let fences = mem::replace(&mut block.fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
            return slot;
        }
        let carved = self.table.tiling().cut_front(slot, end - offset, state);
        self.link(slot);
        carved
    }

    /// Marks an `Elsewhere` block as free, with these earlier users. Returns the block that then contains it.
    pub(crate) fn bring_back(&mut self, slot: Slot, free: BlockState, users: FenceSetId) -> Slot {
        let fences = self.fences.copy(users);
        let block = self.table.block_mut(slot);
        debug_assert!(block.is_elsewhere());
        (block.state, block.fences) = (free, fences);
        self.coalesce(slot)
    }

    /// Splits an `Elsewhere` block. Returns the block of the first `size` units; the rest keeps the slot.
    pub(crate) fn divide_elsewhere(&mut self, slot: Slot, size: Units) -> Slot {
        debug_assert!(self.table.block(slot).is_elsewhere());
        self.table.tiling().cut_front(slot, size, BlockState::Elsewhere)
    }

    /// Joins the blocks of a segment, all of which are `Elsewhere`.
    pub(crate) fn join_elsewhere(&mut self, segment: u32) {
        let first = self.first_block(segment);
        while !self.is_last(first) {
            work::count(1);
            let next = self.table.block(first).next;
            self.table.tiling().absorb(next, first);
        }
    }

    /// Adds a place of a plan at an offset in the memory of plans. It is free, and no stream has used it yet.
    pub(crate) fn add_place(&mut self, memory: Slot, offset: Units, size: Units, stream: StreamId) -> Slot {
        self.table.add_place(memory, offset, size, fresh(stream))
    }

    /// Turns a free place of a plan into an allocation for a stream that is ordered after the place's users. Returns
    /// it.
    #[inline(always)]
    pub(crate) fn take_place(&mut self, slot: Slot, stream: StreamId, requested: u64, serial: NonZeroU64) -> &Block {
        let block = self.table.block_mut(slot);
        block.state = BlockState::Allocated { stream, requested, serial };
        block
    }

    /// Removes the memory of plans and its places. Live places become blocks. The rest of the memory becomes free, with
    /// this state and these fences.
    pub(crate) fn remove_places(&mut self, memory: Slot, places: &[Slot], (free, fences): (BlockState, Fences)) {
        let (idle, mut live): (Vec<Slot>, Vec<Slot>) =
            places.iter().partition(|slot| self.table.block(**slot).is_free());
        live.sort_unstable_by_key(|slot| self.table.block(*slot).location);
        for slot in idle {
            let fences = self.table.block(slot).fences;
            self.fences.clear(fences);
            self.table.tiling().vacate(slot);
        }
        let mut pieces = Vec::new();
        self.table.block_mut(memory).state = free;
        for slot in live {
            let gap = self.table.block(slot).offset() - self.table.block(memory).offset();
            if gap > 0 {
                pieces.push(self.table.tiling().cut_front(memory, gap, free));
            }
            self.table.tiling().put_front(memory, slot);
        }
        if self.table.block(memory).size > 0 {
            pieces.push(memory);
        } else {
            self.table.tiling().take_out(memory);
        }
        for piece in pieces {
            self.table.block_mut(piece).fences = self.fences.insert(fences.clone());
            self.coalesce(piece);
        }
    }
}

/// Merges the fences of one free block into those of another, so that the next user of the second block waits for the
/// users of both.
#[inline(never)]
fn merge_fences(table: &mut FenceTable, blocks: &mut [Block], from: Slot, to: Slot) {
    let (giver, taker) = (&blocks[from as usize], &blocks[to as usize]);
    let (BlockState::Free { stream: other, since: other_since }, BlockState::Free { stream, since }) =
        (giver.state, taker.state)
    else {
        unreachable!("only free blocks are merged");
    };
    let mut fences = table.union(taker.fences, giver.fences);
    let state = if stream == other {
        BlockState::Free { stream, since: since.max(other_since) }
    } else if since == 0 {
        // Memory that no stream has used yet takes over its neighbor's owner.
        BlockState::Free { stream: other, since: other_since }
    } else {
        if other_since != 0 {
            fences = table.add(fences, Fence { stream: other, tick: other_since, event: None });
        }
        BlockState::Free { stream, since }
    };
    blocks[from as usize].fences = FenceSetId::EMPTY;
    let taker = &mut blocks[to as usize];
    (taker.fences, taker.state) = (fences, state);
}

/// Returns the state of memory that no stream has used yet, so there is nothing to wait for.
pub(crate) fn fresh(stream: StreamId) -> BlockState {
    BlockState::Free { stream, since: 0 }
}

#[cfg(test)]
mod tests;
