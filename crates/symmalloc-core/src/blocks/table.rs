//! The block table: every block and every segment of one heap, and their tiling.
//!
//! There are three nouns. A **segment** is one reservation of device memory. A **block** is a contiguous part of one
//! segment; the blocks of a segment form a doubly linked ring in offset order that tiles it without gap or overlap. A
//! **hole** is a part of an expandable segment whose memory was released to the device; it is a block too, so that the
//! tiling is complete.
//!
//! ```text
//!  segment 3   ┌───────────┬──────┬──────────────┬──────────┬───────────────┐
//!       edge ◄─┤ allocated │ free │  allocated   │   hole   │     free      ├─► edge     (addresses reserved, not mapped)
//!              └───────────┴──────┴──────────────┴──────────┴───────────────┘
//!              0           no two free neighbors: they are merged at once   end
//! ```
//! The ring begins and ends with the segment's *edge*, a slot that holds no block. A block therefore always has a
//! neighbor on both sides, and no code checks whether it is the first or the last.
//!
//! A [`Handle`](crate::types::handle::Handle) contains the slot of its block, and the serial of the allocation, which
//! detects a handle to a reused slot. The table only links and unlinks blocks: the arena keeps the free index
//! consistent, and nothing here calls the backend.
//!
//! Segments are stored in a [`Slab`]. Blocks are stored in a vector whose vacant slots are linked, as in a slab. A slab
//! would cost more, because it moves whole blocks in and out and checks every look-up twice. These costs matter,
//! because most pairs of `allocate` and `free` create and remove a block.

use crate::config::size_rules::SizeClass;
use crate::streams::clocks::Tick;
use crate::streams::fences::FenceSetId;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::{Placement, SegmentId, StreamId};
use crate::types::units::{Units, bytes, units};
use crate::types::work;
use slab::Slab;
use std::collections::BTreeMap;
use std::num::NonZeroU64;

/// A slot of the block table.
pub(crate) type Slot = u32;

/// The null slot.
pub(crate) const NONE: Slot = Slot::MAX;

/// The serial in the state of a block that the program has freed and that its heap does not reuse yet. No handle has it.
/// The first serial of a range is never assigned.
pub(crate) const QUARANTINED: NonZeroU64 = NonZeroU64::new(0xFFFF_FFFF << 32).expect("not zero");

/// Number of slots at the start of the table that hold no blocks. They are the sentinels of the free index: a list of
/// blocks begins and ends with a sentinel, which compares greater than any block.
pub(crate) const SENTINELS: usize = 512;

/// The start of a block: the ordinal of its segment, which is the block's sequence, and the offset in the segment. Both
/// are packed into one word, which orders blocks of the same size (rule D2) and is part of digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location(u64);

impl Location {
    #[inline(always)]
    pub(crate) fn new(sequence: SegmentId, offset: Units) -> Self {
        Location((u64::from(sequence.0) << 32) | u64::from(offset))
    }

    /// Returns the location `size` units after this one, in the same segment.
    #[inline(always)]
    pub(crate) fn plus(self, size: Units) -> Self {
        Location(self.0 + u64::from(size))
    }

    #[inline(always)]
    pub(crate) fn sequence(self) -> SegmentId {
        SegmentId((self.0 >> 32) as u32)
    }

    /// Returns the offset from the start of the segment.
    #[inline(always)]
    pub(crate) fn offset(self) -> Units {
        self.0 as Units
    }

    /// Returns the location as a decision in a digest; see
    /// [`unpack_placement`](crate::history::digest::unpack_placement).
    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    #[inline(always)]
    pub(crate) fn placement(self) -> Placement {
        Placement { segment: self.sequence(), offset_bytes: bytes(self.offset()) }
    }
}

/// A block. It fits into one cache line, so placing and freeing it touches one line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    /// Slot of the segment in the table (not its id).
    pub(crate) segment: u32,
    /// The start of the block.
    pub(crate) location: Location,
    /// Size of the block; not zero.
    pub(crate) size: Units,
    /// The neighbor at the lower offset, or the edge.
    pub(crate) prev: Slot,
    /// The neighbor at the higher offset, or the edge.
    pub(crate) next: Slot,
    /// If free: the previous and the next slot in a list of the free index. Only the free index uses this field.
    pub(crate) links: [Slot; 2],
    /// If allocated: other streams that use the block. If free: the fences for which its next user waits. Empty for
    /// holes.
    pub(crate) fences: FenceSetId,
    /// The part of the free index that contains the block while it is free. Equal for all blocks of a segment.
    pub(crate) class: SizeClass,
    pub(crate) state: BlockState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    Allocated {
        /// The stream it was allocated for.
        stream: StreamId,
        /// Requested bytes; at most the block's size.
        requested: u64,
        /// The serial in its handle.
        serial: NonZeroU64,
    },
    Free {
        /// The stream that used the block last. Always the same in a heap of one stream.
        stream: StreamId,
        /// The end of this use, on the stream's logical clock.
        since: Tick,
    },
    Hole,
    /// The memory in which plans place allocations.
    Planned,
    /// Not a block: a sentinel, an edge or a vacant slot. The `next` of a vacant slot is the next vacant slot.
    Vacant,
    /// Memory that is allocated or free under other addresses; see [`stitching`](crate::stitching).
    Elsewhere,
}

impl Block {
    /// Creates a block of `size` units without neighbors.
    fn new(segment: u32, class: SizeClass, location: Location, size: Units, state: BlockState) -> Self {
        Block {
            location,
            size,
            segment,
            prev: NONE,
            next: NONE,
            links: [NONE; 2],
            fences: FenceSetId::EMPTY,
            class,
            state,
        }
    }

    /// Creates the sentinel of an empty list.
    fn sentinel(slot: Slot) -> Self {
        let greatest = Block::new(0, SizeClass::Small, Location(u64::MAX), Units::MAX, BlockState::Vacant);
        Block { links: [slot; 2], ..greatest }
    }

    #[inline(always)]
    pub(crate) fn is_free(&self) -> bool {
        matches!(self.state, BlockState::Free { .. })
    }

    /// Returns `true` if the block is free and `stream` can use it without a wait: `stream` used the block last, and
    /// the block has no fences.
    #[inline(always)]
    pub(crate) fn is_ready_for(&self, stream: StreamId) -> bool {
        matches!(self.state, BlockState::Free { stream: owner, .. } if owner == stream) && self.fences.is_empty()
    }

    /// Returns `true` if the block is a place of a plan: it lies in the plan memory and in no segment's ring.
    #[inline(always)]
    pub(crate) fn is_place(&self) -> bool {
        self.prev == NONE
    }

    /// Returns `true` if the program has freed the block and its heap does not reuse it yet.
    pub(crate) fn is_quarantined(&self) -> bool {
        matches!(self.state, BlockState::Allocated { serial: QUARANTINED, .. })
    }

    pub(crate) fn is_elsewhere(&self) -> bool {
        self.state == BlockState::Elsewhere
    }

    pub(crate) fn is_hole(&self) -> bool {
        self.state == BlockState::Hole
    }

    /// Returns the offset from the start of the segment.
    #[inline]
    pub(crate) fn offset(&self) -> Units {
        self.location.offset()
    }

    /// Returns the offset of the end of the block.
    #[inline]
    pub(crate) fn end(&self) -> Units {
        self.offset() + self.size
    }
}

/// A segment. Aligned to pairs of cache lines, because processors fetch lines in pairs, and the table of another
/// thread's heap may be adjacent.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Segment {
    /// The segment's ordinal in the heap, which is the sequence of its blocks.
    pub(crate) id: SegmentId,
    pub(crate) range: Range,
    /// The blocks tile `0..end`.
    pub(crate) end: Units,
    /// Size of the mapped part of `0..end`, which is everything except the holes. 0 for a stitched range, which only
    /// aliases memory.
    pub(crate) mapped: Units,
    /// `true` if its addresses map memory of other segments.
    pub(crate) is_stitched: bool,
    /// The slot between the last and the first block of the ring.
    edge: Slot,
}

#[derive(Debug)]
pub(crate) struct BlockTable {
    /// All slots: sentinels, edges, blocks and vacant ones.
    blocks: Vec<Block>,
    /// The next vacant slot to use; `NONE` if there is none.
    vacant: Slot,
    segments: Slab<Segment>,
    /// The slot of each segment, by ordinal.
    order: BTreeMap<SegmentId, u32>,
}

impl Default for BlockTable {
    fn default() -> Self {
        let blocks = (0..SENTINELS as Slot).map(Block::sentinel).collect();
        BlockTable { blocks, vacant: NONE, segments: Slab::new(), order: BTreeMap::new() }
    }
}

impl BlockTable {
    #[inline(always)]
    pub(crate) fn block(&self, slot: Slot) -> &Block {
        &self.blocks[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn block_mut(&mut self, slot: Slot) -> &mut Block {
        &mut self.blocks[slot as usize]
    }

    /// Returns the block in a slot that may be stale or vacant.
    #[inline(always)]
    pub(crate) fn find(&self, slot: Slot) -> Option<&Block> {
        self.blocks.get(slot as usize)
    }

    /// Returns all slots, including those without a block.
    #[inline(always)]
    pub(crate) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Borrows the blocks for code that changes several of them. A vacant slot is available, so this code can create
    /// one block.
    #[inline(always)]
    pub(crate) fn tiling(&mut self) -> Tiling<'_> {
        if self.vacant == NONE {
            self.add_vacant_slot();
        }
        Tiling { blocks: &mut self.blocks, vacant: &mut self.vacant }
    }

    /// Returns the size of a block if it is free, and 0 otherwise.
    pub(crate) fn free_size(&self, slot: Slot) -> Units {
        let block = self.block(slot);
        if block.is_free() { block.size } else { 0 }
    }

    #[cold]
    fn add_vacant_slot(&mut self) {
        assert!(self.blocks.len() < NONE as usize - 1, "a heap has more than four billion blocks");
        self.vacant = self.blocks.len() as Slot;
        self.blocks.push(Block::new(0, SizeClass::Small, Location(0), 0, BlockState::Vacant));
    }

    #[inline(always)]
    pub(crate) fn segment(&self, segment: u32) -> &Segment {
        &self.segments[segment as usize]
    }

    pub(crate) fn segment_mut(&mut self, segment: u32) -> &mut Segment {
        &mut self.segments[segment as usize]
    }

    /// Returns the first address of a block.
    #[inline(always)]
    pub(crate) fn address(&self, slot: Slot) -> DeviceAddress {
        let block = self.block(slot);
        self.address_at(block.segment, block.location)
    }

    /// Returns the address of a location in a segment.
    #[inline(always)]
    pub(crate) fn address_at(&self, segment: u32, location: Location) -> DeviceAddress {
        self.segment(segment).range.base.plus(bytes(location.offset()))
    }

    /// Returns the first block of a segment.
    pub(crate) fn first(&self, segment: u32) -> Slot {
        self.block(self.segment(segment).edge).next
    }

    /// Returns the last block of a segment.
    pub(crate) fn last(&self, segment: u32) -> Slot {
        self.block(self.segment(segment).edge).prev
    }

    /// Returns `true` if a block is the last in its segment.
    pub(crate) fn is_last(&self, slot: Slot) -> bool {
        self.last(self.block(slot).segment) == slot
    }

    /// Returns the number of blocks. O(blocks), for the invariants.
    pub(crate) fn block_count(&self) -> usize {
        self.blocks.iter().filter(|block| block.state != BlockState::Vacant).count()
    }

    pub(crate) fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Returns the slots of all segments in sequence order.
    pub(crate) fn segments_in_order(&self) -> Vec<u32> {
        work::count(self.order.len());
        self.order.values().copied().collect()
    }

    /// Returns the slot of the segment with this ordinal.
    pub(crate) fn segment_of(&self, id: SegmentId) -> Option<u32> {
        self.order.get(&id).copied()
    }

    /// Returns the slot of the newest segment with its own memory.
    pub(crate) fn newest_backed(&self, is_meant: impl Fn(&Segment) -> bool) -> Option<u32> {
        let is_it = |slot: &u32| !self.segment(*slot).is_stitched && is_meant(self.segment(*slot));
        self.order.values().rev().inspect(|_| work::count(1)).copied().find(is_it)
    }

    /// Returns the slots of all segments with their own memory, in sequence order.
    pub(crate) fn backed_segments(&self) -> Vec<u32> {
        let mut slots = self.segments_in_order();
        slots.retain(|slot| !self.segment(*slot).is_stitched);
        slots
    }

    /// Returns the slots of a segment's blocks in offset order.
    pub(crate) fn blocks_of(&self, segment: u32) -> impl Iterator<Item = Slot> + '_ {
        let edge = self.segment(segment).edge;
        std::iter::successors(Some(edge), |slot| Some(self.block(*slot).next))
            .skip(1)
            .take_while(move |slot| *slot != edge)
            .inspect(|_| work::count(1))
    }

    /// Adds a segment with one block that covers it, and returns the block.
    pub(crate) fn add_segment(
        &mut self,
        id: SegmentId,
        range: Range,
        class: SizeClass,
        size: Units,
        fresh: BlockState,
    ) -> Slot {
        let segment = self.segments.vacant_key() as u32;
        let edge = self.tiling().insert(Block::new(segment, class, Location::new(id, 0), 0, BlockState::Vacant));
        let block = self.block_mut(edge);
        (block.prev, block.next) = (edge, edge);
        self.segments.insert(Segment { id, range, end: 0, mapped: 0, is_stitched: false, edge });
        self.order.insert(id, segment);
        self.extend(segment, size, fresh)
    }

    /// Adds a stitched range with one block that covers it, and returns the block.
    pub(crate) fn add_stitched(&mut self, id: SegmentId, range: Range, state: BlockState) -> Slot {
        let slot = self.add_segment(id, range, SizeClass::Large, units(range.size_bytes), state);
        let segment = self.segment_mut(self.block(slot).segment);
        (segment.mapped, segment.is_stitched) = (0, true);
        slot
    }

    /// Removes a segment without allocations, with all its blocks.
    pub(crate) fn remove_segment(&mut self, segment: u32) -> Segment {
        for slot in self.blocks_of(segment).collect::<Vec<_>>() {
            let state = self.block(slot).state;
            let is_in_use = matches!(state, BlockState::Allocated { .. } | BlockState::Planned);
            assert!(!is_in_use, "a segment with a live allocation or a plan cannot be removed");
            self.tiling().vacate(slot);
        }
        let dead = self.segments.remove(segment as usize);
        self.order.remove(&dead.id);
        self.tiling().vacate(dead.edge);
        dead
    }

    /// Adds a block of `size` at the end of a segment, and returns it.
    pub(crate) fn extend(&mut self, segment: u32, size: Units, fresh: BlockState) -> Slot {
        let Segment { id, edge, end, .. } = *self.segment(segment);
        let Block { prev: last, class, .. } = *self.block(edge);
        let block = Block::new(segment, class, Location::new(id, end), size, fresh);
        let slot = self.tiling().insert(Block { prev: last, next: edge, ..block });
        self.block_mut(last).next = slot;
        self.block_mut(edge).prev = slot;
        let segment = self.segment_mut(segment);
        segment.end += size;
        segment.mapped += size;
        slot
    }

    /// Adds a place of a plan at an offset in the plan memory.
    pub(crate) fn add_place(&mut self, memory: Slot, offset: Units, size: Units, state: BlockState) -> Slot {
        let Block { segment, class, location, .. } = *self.block(memory);
        self.tiling().insert(Block::new(segment, class, location.plus(offset), size, state))
    }

    /// Removes the hole at the end of a segment. The segment keeps at least one other block.
    pub(crate) fn shorten(&mut self, segment: u32) {
        let last = self.last(segment);
        let block = self.block(last);
        assert!(
            block.is_hole() && last != self.first(segment),
            "only a hole can be cut off a segment, which keeps at least one block"
        );
        self.segment_mut(segment).end = block.offset();
        self.tiling().take_out(last);
    }
}

/// The blocks of a table, borrowed once so that code that visits several blocks checks each slot once.
#[derive(Debug)]
pub(crate) struct Tiling<'a> {
    blocks: &'a mut [Block],
    /// Never [`NONE`] when a block is created.
    vacant: &'a mut Slot,
}

impl<'a> Tiling<'a> {
    /// Returns all slots, including those without a block.
    #[inline(always)]
    pub(crate) fn blocks(&mut self) -> &mut [Block] {
        self.blocks
    }

    /// Returns all slots for as long as the table is borrowed.
    #[inline(always)]
    pub(crate) fn into_blocks(self) -> &'a mut [Block] {
        self.blocks
    }

    fn insert(self, block: Block) -> Slot {
        let slot = *self.vacant;
        *self.vacant = self.blocks[slot as usize].next;
        self.blocks[slot as usize] = block;
        slot
    }

    /// Splits `size` off the start of a larger block that is in no index. The front becomes a new block without fences.
    /// The rest keeps the slot, the state and the fences.
    #[inline(always)]
    pub(crate) fn cut_front(&mut self, slot: Slot, size: Units, state: BlockState) -> Slot {
        let front = *self.vacant;
        let rest = &mut self.blocks[slot as usize];
        let (segment, class, location, prev) = (rest.segment, rest.class, rest.location, rest.prev);
        rest.location = location.plus(size);
        rest.size -= size;
        rest.prev = front;
        // Assign field by field. Otherwise a whole block would be built on the stack first.
        let block = &mut self.blocks[front as usize];
        *self.vacant = block.next;
        (block.segment, block.class, block.location, block.size) = (segment, class, location, size);
        (block.prev, block.next) = (prev, slot);
        (block.fences, block.state) = (FenceSetId::EMPTY, state);
        self.blocks[prev as usize].next = front;
        front
    }

    /// Inserts a place that lies at the start of the plan memory into the ring, as a separate block. The plan memory
    /// may then have size zero.
    pub(crate) fn put_front(&mut self, memory: Slot, place: Slot) {
        let (prev, size) = (self.blocks[memory as usize].prev, self.blocks[place as usize].size);
        let rest = &mut self.blocks[memory as usize];
        assert!(size <= rest.size, "a place lies in the plan memory");
        rest.location = rest.location.plus(size);
        rest.size -= size;
        rest.prev = place;
        let block = &mut self.blocks[place as usize];
        (block.prev, block.next) = (prev, memory);
        self.blocks[prev as usize].next = place;
    }

    /// Extends the block `to`, which is in no index, over its neighbor `from`, and removes `from`.
    #[inline(always)]
    pub(crate) fn absorb(&mut self, from: Slot, to: Slot) {
        let Block { size, location, .. } = self.blocks[from as usize];
        let taker = &mut self.blocks[to as usize];
        taker.size += size;
        taker.location = taker.location.min(location);
        self.take_out(from);
    }

    /// Removes a block from the tiling. The caller extends a neighbor over it.
    #[inline(always)]
    pub(crate) fn take_out(&mut self, slot: Slot) {
        let Block { prev, next, .. } = self.blocks[slot as usize];
        self.blocks[prev as usize].next = next;
        self.blocks[next as usize].prev = prev;
        self.vacate(slot);
    }

    #[inline(always)]
    pub(crate) fn vacate(&mut self, slot: Slot) {
        let block = &mut self.blocks[slot as usize];
        (block.state, block.next) = (BlockState::Vacant, *self.vacant);
        *self.vacant = slot;
    }
}

#[cfg(test)]
mod tests;
