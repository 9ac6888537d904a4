//! A heap: one (pool, stream), or one pool whose streams share. Read this file and you know how a block is placed.
//!
//! A heap composes the leaves: the [`BlockTable`] says what lies where, the [`FreeIndex`] says what is free in the order
//! of rule D2, the [`FenceTable`] says what a block's next user must wait for, and [`SizeRules`] says how large things
//! are. The heap keeps the three in step, asks the backend for memory when nothing fits ([`crate::obtain`]), gives memory
//! back when told to ([`crate::trim`]), and folds each decision into its digest.
//!
//! ```text
//!  allocate   best fit in the free index ──found──► wait for its fences ─► split ─► allocated
//!                     │ nothing fits                        ▲
//!                     └──────► obtain: grow, or new segment ┘
//!  free       fence other streams' uses ─► merge with free neighbours ─► into the free index
//! ```
//!
//! A call that fails has changed nothing that a later decision could see, with one exception that all ranks share: an
//! allocation whose wait fails after the heap grew leaves the heap grown.
//!
//! Everything a decision reads is in the heap or in its pool's configuration. That is what makes heaps independent
//! (rule D8), and the heap's lock the only lock on the way.

use crate::backend::{Backend, BackendError, DeviceAddress, Range};
use crate::block_table::{Block, BlockState, BlockTable};
use crate::budget::{Budget, Budgets, LimitMet};
use crate::config::{PointerLookup, PoolConfig};
use crate::digest::{Digest, Mark, op_word, placement_word};
use crate::errors::{FreeError, HandleError};
use crate::fence::{Fence, FenceSet, FenceSetId, FenceTable, StreamClocks, Tick};
use crate::free_index::{FreeIndex, Slot};
use crate::handle::{Allocation, Handle, Tags};
use crate::ids::{HeapId, Placement, PoolId, SegmentId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::names::Names;
use crate::pointer_index::{PointerIndex, SegmentDirectory};
use crate::segment_log::SegmentLog;
use crate::size_rules::SizeRules;
use crate::stats::HeapUsage;
use crate::units::{Units, bytes};
use smallvec::SmallVec;
use std::sync::Arc;

/// What a heap needs from outside: nothing of it decides a placement but the budgets.
#[derive(Debug)]
pub(crate) struct Surroundings<B, L: Lock> {
    pub(crate) backend: B,
    pub(crate) clocks: L::Cell<StreamClocks>,
    pub(crate) directory: L::Cell<SegmentDirectory>,
    /// Over all pools.
    pub(crate) budget: Budget,
}

/// Why a heap could not serve a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    Limit {
        met: LimitMet,
        missing: Units,
    },
    SegmentFull {
        segment_bytes: u64,
        missing: Units,
    },
    Driver {
        error: BackendError,
        missing: Units,
    },
    /// A free block was found or obtained, but the stream cannot be told to wait for its earlier users.
    Fence(BackendError),
    /// The pool was destroyed after the request had found it.
    Closed,
}

#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) id: HeapId,
    pub(crate) pool: PoolId,
    /// The heap's stream; `None` when the pool's streams share.
    pub(crate) stream: Option<StreamId>,
    pub(crate) config: PoolConfig,
    /// The pool's.
    pub(crate) pool_budget: Arc<Budget>,
    /// The heap's own: it has no limit, and counts.
    pub(crate) budget: Budget,
    pub(crate) rules: SizeRules,
    pub(crate) table: BlockTable,
    /// Free blocks of each home class. Holes and allocated blocks are in neither.
    pub(crate) free: [FreeIndex; 2],
    pub(crate) fences: FenceTable,
    pub(crate) log: SegmentLog,
    /// Birth ordinal of the next segment.
    pub(crate) next_segment: SegmentId,
    /// Bytes backed by memory, retired segments not included.
    pub(crate) mapped: u64,
    /// Number of holes in all segments.
    pub(crate) hole_count: usize,
    /// Address ranges without memory that the driver did not take back.
    pub(crate) stray_ranges: Vec<Range>,
    /// The pool was destroyed: nothing is obtained any more.
    pub(crate) is_closed: bool,
    pub(crate) usage: HeapUsage,
    pub(crate) digest: Digest,
    pub(crate) tags: Tags,
    pub(crate) names: Names,
    pub(crate) pointers: PointerIndex,
}

/// What makes one heap different from the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeapIdentity {
    pub(crate) id: HeapId,
    pub(crate) pool: PoolId,
    pub(crate) stream: Option<StreamId>,
    /// The allocator's number, for the tags of handles.
    pub(crate) owner: u16,
}

impl Heap {
    pub(crate) fn new(
        identity: HeapIdentity,
        config: PoolConfig,
        pool_budget: Arc<Budget>,
        granularity_bytes: u64,
        lookup: PointerLookup,
    ) -> Self {
        let HeapIdentity { id, pool, stream, owner } = identity;
        let rules = SizeRules::new(&config, granularity_bytes);
        // Whatever decisions depend on besides ops is in the digest from the start: other configurations never agree.
        let mut digest = Digest::new(config.digest());
        digest.fold(granularity_bytes, stream.map_or(u64::MAX, |stream| stream.0.into()));
        Heap {
            id,
            pool,
            stream,
            config,
            pool_budget,
            budget: Budget::new(None),
            rules,
            table: BlockTable::default(),
            free: Default::default(),
            fences: FenceTable::default(),
            log: SegmentLog::default(),
            next_segment: SegmentId(0),
            mapped: 0,
            hole_count: 0,
            stray_ranges: Vec::new(),
            is_closed: false,
            usage: HeapUsage::default(),
            digest: Digest { ops: 0, ..digest },
            tags: Tags::new(owner),
            names: Names::default(),
            pointers: PointerIndex::new(lookup),
        }
    }

    /// What reservations are charged to.
    pub(crate) fn budgets<'a, B, L: Lock>(&'a self, around: &'a Surroundings<B, L>) -> Budgets<'a> {
        Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &around.budget }
    }

    /// Puts a free block into its free index.
    #[inline(always)]
    pub(crate) fn link(&mut self, slot: Slot) {
        let home = self.table.block(slot).home;
        self.free[home as usize].insert(&mut self.table, slot);
    }

    /// Gives a free block another place and size.
    #[inline(always)]
    pub(crate) fn resize(&mut self, slot: Slot, offset: Units, size: Units) {
        let home = self.table.block(slot).home;
        self.free[home as usize].resize(&mut self.table, slot, offset, size);
    }

    /// Takes a free block out of its free index: before anything of its key changes.
    #[inline(always)]
    pub(crate) fn unlink(&mut self, slot: Slot) {
        let home = self.table.block(slot).home;
        self.free[home as usize].remove(&mut self.table, slot);
    }

    /// Allocates for work on `stream`. `requested` is from 1 to [`SEGMENT_BYTES_MAX`](crate::units::SEGMENT_BYTES_MAX).
    #[inline(always)]
    pub(crate) fn allocate<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        let size = self.rules.block_size(requested);
        let slot = match self.best_fit(size) {
            Some(slot) => slot,
            None => self.obtain(around, stream, size)?,
        };
        self.wait_for_earlier_users(around, slot, stream)?;
        // Nothing fails from here on.
        Ok(self.place(slot, size, stream, requested))
    }

    /// The free block that rule D2 gives to a request.
    #[inline(always)]
    fn best_fit(&self, size: Units) -> Option<Slot> {
        let home = self.rules.home_of(SizeRules::class_of(size));
        let slot = self.free[home as usize].best_fit(&self.table, size)?;
        self.rules.accepts(size, self.table.block(slot).size).then_some(slot)
    }

    /// Makes a free block, or as much of its start as is wanted, the allocation. What remains stays free, with the same
    /// fences.
    #[inline(always)]
    fn place(&mut self, free: Slot, size: Units, stream: StreamId, requested: u64) -> Allocation {
        let tag = self.tags.next();
        let state = BlockState::Allocated { stream, requested, tag };
        let block = self.table.block(free);
        let (offset, sequence, segment, whole) = (block.offset, block.sequence, block.segment, block.size);
        let (slot, size) = if self.rules.splits(block.home, size, whole) {
            // The rest keeps the slot, and most times its place in the free index.
            let slot = self.table.cut_front(free, size, state);
            self.resize(free, offset + size, whole - size);
            (slot, size)
        } else {
            self.unlink(free);
            let block = self.table.block_mut(free);
            block.state = state;
            if !block.fences.is_empty() {
                let fences = std::mem::replace(&mut block.fences, FenceSetId::EMPTY);
                self.fences.clear(fences);
            }
            (free, whole)
        };
        let placement = Placement { segment: sequence, offset_bytes: bytes(offset) };
        let address = DeviceAddress(self.table.segment(segment).range.base.0 + placement.offset_bytes);
        if !self.pointers.is_off() {
            self.pointers.insert(address, slot);
        }
        self.usage.allocate(SizeRules::class_of(size), bytes(size), requested);
        self.digest.fold(op_word(Mark::Allocate, stream, requested), placement_word(placement));
        Allocation { handle: Handle { heap: self.id, slot, tag }, address, placement, size_bytes: bytes(size) }
    }

    /// Orders `stream` behind everyone who used the free block before, on the device.
    #[inline(always)]
    fn wait_for_earlier_users<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        slot: Slot,
        stream: StreamId,
    ) -> Result<(), Box<Shortage>> {
        let block = self.table.block(slot);
        let BlockState::Free { stream: owner, since } = block.state else {
            unreachable!("the free index names only free blocks");
        };
        if block.fences.is_empty() && owner == stream {
            return Ok(());
        }
        self.wait_for_fences(around, slot, stream, (owner, since)).map_err(|error| Box::new(Shortage::Fence(error)))
    }

    #[cold]
    fn wait_for_fences<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        slot: Slot,
        stream: StreamId,
        (owner, since): (StreamId, Tick),
    ) -> Result<(), BackendError> {
        let block = self.table.block(slot);
        let last_owner = Fence { stream: owner, tick: since, event: None };
        let mut fences: FenceSet = self.fences.fences(block.fences).into();
        fences.push(last_owner);
        for fence in fences {
            self.wait_for(around, stream, fence)?;
        }
        self.recycle_spent(around);
        Ok(())
    }

    fn wait_for<B: Backend, L: Lock>(
        &self,
        around: &Surroundings<B, L>,
        stream: StreamId,
        fence: Fence,
    ) -> Result<(), BackendError> {
        if around.clocks.lock().covers(stream, fence.stream, fence.tick) {
            return Ok(());
        }
        match fence.event {
            Some(event) => {
                around.backend.wait(stream, event)?;
                around.clocks.lock().waits_for_tick(stream, fence.stream, fence.tick);
            }
            None => {
                let event = around.backend.record(fence.stream)?;
                let waited = around.backend.wait(stream, event);
                around.backend.recycle(event);
                waited?;
                around.clocks.lock().waits_for_now(stream, fence.stream);
            }
        }
        Ok(())
    }

    pub(crate) fn recycle_spent<B: Backend, L: Lock>(&mut self, around: &Surroundings<B, L>) {
        self.fences.drain_spent().for_each(|event| around.backend.recycle(event));
    }

    /// Frees a live allocation. On an error it is still live.
    #[inline(always)]
    pub(crate) fn free<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        handle: Handle,
    ) -> Result<Freed, FreeError> {
        let (stream, requested) = self.live(handle)?;
        let slot = handle.slot;
        if !self.table.block(slot).fences.is_empty() {
            self.fence_uses(around, slot)?;
        }
        // Nothing fails from here on.
        let since = if self.stream.is_some() { 0 } else { tick_now(around, stream) };
        let block = self.table.block_mut(slot);
        let (size, segment) = (block.size, block.segment);
        let placement = Placement { segment: block.sequence, offset_bytes: bytes(block.offset) };
        block.state = BlockState::Free { stream, since };
        if !self.pointers.is_off() {
            let base = self.table.segment(segment).range.base;
            self.pointers.remove(DeviceAddress(base.0 + placement.offset_bytes));
        }
        if !self.names.is_empty() {
            self.names.remove(slot);
        }
        self.put_back(slot);
        if self.fences.has_spent() {
            self.recycle_spent(around);
        }
        self.usage.free(SizeRules::class_of(size), bytes(size), requested);
        self.digest.fold(op_word(Mark::Free, stream, 0), placement_word(placement));
        Ok(Freed { allocated_bytes: bytes(size), requested_bytes: requested })
    }

    /// Merges a free block that is in no index with its free neighbours, and puts the result into the free index.
    /// Returns the result.
    #[inline(always)]
    pub(crate) fn put_back(&mut self, slot: Slot) -> Slot {
        let blocks = self.table.blocks_mut();
        let block = &blocks[slot as usize];
        let (prev, next, offset, size) = (block.prev, block.next, block.offset, block.size);
        let next_size = blocks.get(next as usize).map_or(0, Block::free_size);
        let prev_size = blocks.get(prev as usize).map_or(0, Block::free_size);
        if prev_size > 0 {
            self.hand_over(slot, prev);
            self.table.take_out(slot);
            if next_size > 0 {
                self.unlink(next);
                self.hand_over(next, prev);
                self.table.take_out(next);
            }
            self.resize(prev, offset - prev_size, prev_size + size + next_size);
            prev
        } else if next_size > 0 {
            self.hand_over(slot, next);
            self.table.take_out(slot);
            self.resize(next, offset, size + next_size);
            next
        } else {
            self.link(slot);
            slot
        }
    }

    /// Size of a block if it is there and free, else 0.
    #[inline(always)]
    pub(crate) fn free_size(&self, slot: Slot) -> Units {
        self.table.find(slot).map_or(0, Block::free_size)
    }

    /// A free block is merged into another: what had to be waited for before the one is waited for before the other.
    #[inline(always)]
    fn hand_over(&mut self, from: Slot, to: Slot) {
        let (giver, taker) = (self.table.block(from), self.table.block(to));
        if giver.fences.is_empty() && giver.state == taker.state {
            return;
        }
        self.hand_over_fences(from, to);
    }

    #[cold]
    fn hand_over_fences(&mut self, from: Slot, to: Slot) {
        let (giver, taker) = (self.table.block(from), self.table.block(to));
        let (BlockState::Free { stream: other, since: other_since }, BlockState::Free { stream, since }) =
            (giver.state, taker.state)
        else {
            unreachable!("only free blocks are merged");
        };
        let mut fences = self.fences.union(taker.fences, giver.fences);
        let state = if stream == other {
            BlockState::Free { stream, since: since.max(other_since) }
        } else if since == 0 {
            // Memory that nobody used yet takes over its neighbour's owner.
            BlockState::Free { stream: other, since: other_since }
        } else {
            if other_since != 0 {
                fences = self.fences.add(fences, Fence { stream: other, tick: other_since, event: None });
            }
            BlockState::Free { stream, since }
        };
        let taker = self.table.block_mut(to);
        (taker.fences, taker.state) = (fences, state);
    }

    /// Records an event on every other stream that used the block, all or none.
    #[cold]
    fn fence_uses<B: Backend, L: Lock>(&mut self, around: &Surroundings<B, L>, slot: Slot) -> Result<(), BackendError> {
        let set = self.table.block(slot).fences;
        let mut recorded: SmallVec<[_; 4]> = SmallVec::new();
        for fence in self.fences.fences(set) {
            match around.backend.record(fence.stream) {
                Ok(event) => recorded.push((around.clocks.lock().advance(fence.stream), event)),
                Err(error) => {
                    recorded.into_iter().for_each(|(_, event)| around.backend.recycle(event));
                    return Err(error);
                }
            }
        }
        self.fences.arm(set, recorded);
        Ok(())
    }

    /// Notes that work on `stream` uses the allocation.
    pub(crate) fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), HandleError> {
        let (owner, _) = self.live(handle)?;
        let block = self.table.block_mut(handle.slot);
        if stream != owner {
            block.fences = self.fences.add(block.fences, Fence { stream, tick: 0, event: None });
        }
        let placement = self.placement(handle.slot);
        self.digest.fold(op_word(Mark::RecordUse, stream, 0), placement_word(placement));
        Ok(())
    }

    /// Gives a live allocation a name.
    pub(crate) fn set_name(&mut self, slot: Slot, name: &str) {
        self.names.insert(slot, name);
    }

    /// The stream and requested bytes of a live allocation.
    #[inline(always)]
    pub(crate) fn live(&self, handle: Handle) -> Result<(StreamId, u64), HandleError> {
        match self.table.find(handle.slot).map(|block| block.state) {
            Some(BlockState::Allocated { stream, requested, tag }) if tag == handle.tag => Ok((stream, requested)),
            _ => Err(self.not_live(handle)),
        }
    }

    #[cold]
    fn not_live(&self, handle: Handle) -> HandleError {
        if self.tags.gave(handle.tag) { HandleError::Stale { handle } } else { HandleError::Foreign { handle } }
    }

    pub(crate) fn placement(&self, slot: Slot) -> Placement {
        let block = self.table.block(slot);
        Placement { segment: block.sequence, offset_bytes: bytes(block.offset) }
    }

    pub(crate) fn address(&self, slot: Slot) -> DeviceAddress {
        let block = self.table.block(slot);
        DeviceAddress(self.table.segment(block.segment).range.base.0 + bytes(block.offset))
    }

    /// Bytes of the largest free block.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.free.iter().filter_map(|index| index.largest(&self.table)).max().map_or(0, bytes)
    }

    /// Drops the fences that are over, asking the backend. Placement does not notice.
    pub(crate) fn drop_completed_fences<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
    ) -> Result<u64, BackendError> {
        let mut dropped = 0;
        for segment in self.table.segments_in_order() {
            for slot in self.table.blocks_of(segment).collect::<Vec<_>>() {
                let set = self.table.block(slot).fences;
                let mut completed = SmallVec::<[StreamId; 2]>::new();
                for fence in self.fences.fences(set) {
                    if let Some(event) = fence.event
                        && around.backend.query(event)?
                    {
                        completed.push(fence.stream);
                    }
                }
                dropped += completed.len() as u64;
                let left = self.fences.retain(set, |fence| !completed.contains(&fence.stream));
                self.table.block_mut(slot).fences = left;
                self.recycle_spent(around);
            }
        }
        Ok(dropped)
    }
}

#[inline(never)]
fn tick_now<B, L: Lock>(around: &Surroundings<B, L>, stream: StreamId) -> Tick {
    around.clocks.lock().now(stream)
}

/// What a free gave back to the heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) allocated_bytes: u64,
    pub(crate) requested_bytes: u64,
}
