//! A heap: one (pool, stream), or one pool whose streams share. Read this file and you know how a block is placed.
//!
//! A heap composes the leaves: the [`BlockTable`] says what lies where, the [`FreeIndex`] says what is free in the order
//! of rule D2, the [`FenceTable`] says what a block's next user must wait for, and [`SizeRules`] says how large things
//! are. This file keeps them in step and folds each decision into the digest. [`crate::merging`] makes one block of a freed
//! one and its free neighbours. What needs the driver has files of its own: [`crate::obtain`] when nothing fits,
//! [`crate::fencing`] when other streams used a block, [`crate::trim`] when memory goes back.
//!
//! ```text
//!  allocate   best fit in the free index ──found──► wait for its fences ─► split ─► allocated
//!                     │ nothing fits                        ▲
//!                     └──────► obtain: grow, or new segment ┘
//!  free       fence other streams' uses ─► merge with free neighbours ─► into the free index
//! ```
//!
//! A call that fails has changed nothing that a later decision could see, with one exception: an allocation whose wait
//! fails after the heap grew leaves the heap grown, as it is by now on the ranks whose wait did not fail.
//!
//! Most heaps are *plain*: one stream, sizes that are exact, no books, no recording. What their blocks are placed by is
//! known ahead of time ([`Exact`]), and most of their requests end in `allocate_at_once` and `free_at_once`. Everything
//! else takes the longer way, by the same code and to the same places.
//!
//! Everything a decision reads is in the heap or in its pool's configuration. That is what makes heaps independent
//! (rule D8), and the heap's lock the only lock on the way.

use crate::backend::{Backend, BackendError, DeviceAddress, Range};
use crate::block_table::{Block, BlockState, BlockTable, Slot};
use crate::budget::{Budget, Budgets, LimitMet};
use crate::config::{PointerLookup, PoolConfig};
use crate::digest::{Digest, Mark, OpKind, op_word, placement_word};
use crate::errors::{FreeError, HandleError};
use crate::fence::{FenceSetId, FenceTable};
use crate::fencing::{Fencing, wait_for_users};
use crate::free_index::{FreeIndex, Unfit};
use crate::handle::{Allocation, Handle, Tags};
use crate::ids::{HeapId, Placement, PoolId, SegmentId, StreamId};
use crate::journal::{Journal, ProgramOrder};
use crate::lock::{Lock, LockCell};
use crate::merging::{Users, merge};
use crate::names::Names;
use crate::peak_shares::Share;
use crate::plain::{StreamOps, Way};
use crate::pointer_index::{PointerIndex, SegmentDirectory};
use crate::segment_log::SegmentLog;
use crate::size_rules::{ByRule, Exact, SizeClass, SizeRules, Sizing};
use crate::stats::{HeapUsage, RareCounts};
use crate::stream_clocks::{StreamClocks, Tick};
use crate::units::{Units, bytes};
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

/// One heap. Nothing of it can be used from outside.
#[derive(Debug)]
pub struct Heap {
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
    /// The free blocks. Holes and allocated blocks are not in it.
    pub(crate) free: FreeIndex,
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
    /// Number of ops after which the pool was destroyed: nothing is obtained any more.
    pub(crate) closed_after_ops: Option<u64>,
    /// All ranks agreed on the whole history up to the destruction: it is compared no more. A rank that restarts later
    /// has no such heap.
    pub(crate) is_settled: bool,
    pub(crate) usage: HeapUsage,
    pub(crate) digest: Digest,
    pub(crate) tags: Tags,
    pub(crate) names: Names,
    pub(crate) pointers: PointerIndex,
    /// What agreement looks back on; heaps of symmetric pools have one.
    pub(crate) journal: Option<Box<Journal>>,
    /// Ops are recorded: they pass the gate first, see [`crate::recording`].
    pub(crate) is_recorded: bool,
    /// An allocation or a free has something to note besides its block: streams that share have clocks, pointers can be
    /// looked up, an allocation has a name, memory is released at a threshold, or agreement looks back on ops.
    /// [`Self::note_books`] keeps it true.
    pub(crate) keeps_books: bool,
    /// Which way requests go. [`Self::note_books`] keeps it true.
    pub(crate) way: Way,
    /// Of the heap's stream, if it has one.
    pub(crate) own: StreamOps,
    /// Its part in the peak over all heaps.
    pub(crate) share: Share,
    /// What is counted away from the path of a cache hit.
    pub(crate) rare: RareCounts,
}

/// What became of a free that takes neither the driver nor books.
pub(crate) enum Freed {
    Now,
    /// The heap is plain, and other streams used the block, which has to be fenced first.
    Used(Live),
    /// The allocation is not here, or freeing it takes the longer way.
    NotYet,
}

/// A live allocation, as its block knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) slot: Slot,
    pub(crate) stream: StreamId,
    pub(crate) requested: u64,
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
        let digest = first_digest(&config, granularity_bytes, stream);
        let mut heap = Heap {
            id,
            pool,
            stream,
            config,
            pool_budget,
            budget: Budget::new(None),
            rules,
            table: BlockTable::default(),
            free: FreeIndex::default(),
            fences: FenceTable::default(),
            log: SegmentLog::default(),
            next_segment: SegmentId(0),
            mapped: 0,
            hole_count: 0,
            stray_ranges: Vec::new(),
            closed_after_ops: None,
            is_settled: false,
            usage: HeapUsage::default(),
            digest,
            tags: Tags::new(owner),
            names: Names::default(),
            pointers: PointerIndex::new(lookup),
            journal: None,
            is_recorded: false,
            keeps_books: true,
            way: Way::ByRule,
            own: StreamOps::new(stream.unwrap_or_default()),
            share: Share::default(),
            rare: RareCounts::default(),
        };
        heap.note_books();
        heap
    }

    /// Takes up a history that a digest stands for, in place of the heap's own: the ops so far are not of this heap any
    /// more. Whatever remembers single ops must forget them here.
    pub(crate) fn begin_history(&mut self, digest: Digest) {
        self.digest = digest;
        if let Some(journal) = &mut self.journal {
            journal.begin(digest);
        }
    }

    /// The digest before the first op.
    pub(crate) fn first_digest(&self) -> Digest {
        first_digest(&self.config, bytes(self.rules.granule), self.stream)
    }

    /// The pool is destroyed: that is the last op of the heap's history that ranks compare.
    pub(crate) fn close(&mut self) {
        if self.has_history() {
            self.fold(op_word(Mark::Destroy, StreamId(0), 0), 0);
        }
        self.closed_after_ops = Some(self.digest.ops);
    }

    /// Whether the heap has done anything. One that was made for a request which came to nothing, because its pool was
    /// destroyed at the same time, say, is as good as not there: nothing may tell it from one that was not made, or is not
    /// any more after a restart.
    pub(crate) fn has_history(&self) -> bool {
        self.digest.ops > 0
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed_after_ops.is_some()
    }

    /// Whether nothing ever happened here.
    pub(crate) fn is_fresh(&self) -> bool {
        self.digest.ops == 0 && self.next_segment == SegmentId(0)
    }

    /// From now on the heap remembers its last ops, for agreement to look back on.
    pub(crate) fn keep_journal(&mut self, history_ops: u32, order: Arc<ProgramOrder>) {
        self.journal = Some(Box::new(Journal::new(history_ops, self.digest, order)));
        self.note_books();
    }

    /// From now on ops are recorded, or not any more.
    pub(crate) fn set_recorded(&mut self, is_recorded: bool) {
        self.is_recorded = is_recorded;
        self.note_books();
    }

    /// Folds an op and the decision about it into the digest, and notes them in the journal.
    #[inline(always)]
    pub(crate) fn fold(&mut self, op: u64, decision: u64) {
        self.digest.fold(op, decision);
        if self.keeps_books {
            note(&mut self.journal, op, decision, self.digest);
        }
    }

    /// What reservations are charged to.
    pub(crate) fn budgets<'a, B, L: Lock>(&'a self, around: &'a Surroundings<B, L>) -> Budgets<'a> {
        Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &around.budget }
    }

    /// Puts a free block into its free index.
    pub(crate) fn link(&mut self, slot: Slot) {
        let blocks = self.table.blocks_mut();
        self.free.insert(blocks, blocks[slot as usize].home, slot);
    }

    /// Takes a free block out of its free index: before anything of its key changes.
    pub(crate) fn unlink(&mut self, slot: Slot) {
        let blocks = self.table.blocks_mut();
        self.free.remove(blocks, slot);
    }

    /// Allocates if a free block is at hand that nobody else used: that takes neither the driver nor a wait. The heap is
    /// plain, and `requested` from 1 to [`SEGMENT_BYTES_MAX`](crate::units::SEGMENT_BYTES_MAX).
    #[inline(always)]
    pub(crate) fn allocate_at_once(&mut self, requested: u64) -> Result<Allocation, Unfit> {
        self.place::<Exact>(|own| *own, requested, None, |_, _, block| block.fences.is_empty())
    }

    /// As [`allocate_at_once`](Self::allocate_at_once), where others used the best fit: orders the stream behind them first.
    /// `None` also when that fails; then [`allocate`](Self::allocate) says why.
    #[inline(always)]
    pub(crate) fn allocate_behind_users<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        requested: u64,
        unfit: Unfit,
    ) -> Option<Allocation> {
        let slot = unfit.best_fit()?;
        wait_for_users(around, &mut self.fences, self.own.stream, self.table.block_mut(slot)).ok()?;
        self.place::<Exact>(|own| *own, requested, Some(slot), |_, _, _| true).ok()
    }

    /// As [`allocate_at_once`](Self::allocate_at_once) in a heap that is not plain, without a wait.
    #[inline(always)]
    pub(crate) fn allocate_at_once_by_rule(&mut self, stream: StreamId, requested: u64) -> Option<Allocation> {
        let placed = self.place::<ByRule>(
            |_| StreamOps::new(stream),
            requested,
            None,
            |rules, size, block| rules.accepts(size, block.size) && block.is_free_for(stream),
        );
        let placed = placed.ok()?;
        if self.keeps_books {
            self.book(&placed, stream, requested);
        }
        Some(placed)
    }

    /// Notes an allocation in the books.
    #[inline(always)]
    fn book(&mut self, placed: &Allocation, stream: StreamId, requested: u64) {
        let op = StreamOps::new(stream).allocates.with(requested);
        note(&mut self.journal, op, placement_word(placed.placement), self.digest);
        if !self.pointers.is_off() {
            let table = &self.table;
            self.pointers.insert(placed.address, placed.handle.slot(), |slot| table.address(slot));
        }
    }

    /// Allocates for work on `stream`, whatever it takes. `S` is the heap's sizing; [`ByRule`] is every heap's.
    #[inline(always)]
    pub(crate) fn allocate<B: Backend, L: Lock, S: Sizing>(
        &mut self,
        around: &Surroundings<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        let mapped_before = self.mapped;
        let slot = match self.choose::<B, L, S>(around, stream, requested) {
            Ok(slot) => slot,
            Err(shortage) => {
                self.fold_obtained(stream, mapped_before);
                return Err(shortage);
            }
        };
        // Nothing fails from here on.
        let placed = self.place::<S>(|_| StreamOps::new(stream), requested, Some(slot), |_, _, _| true);
        let placed = placed.expect("the block is chosen");
        if self.keeps_books {
            self.book(&placed, stream, requested);
        }
        self.fold_obtained(stream, mapped_before);
        Ok(placed)
    }

    /// How much was obtained is a decision too: a limit that several heaps share may have shaped it.
    #[inline(always)]
    fn fold_obtained(&mut self, stream: StreamId, mapped_before: u64) {
        if self.mapped > mapped_before {
            self.fold(op_word(Mark::Obtain, stream, self.mapped - mapped_before), 0);
        }
    }

    /// A free block for a request, obtained if need be, which work on `stream` may use.
    #[inline(always)]
    fn choose<B: Backend, L: Lock, S: Sizing>(
        &mut self,
        around: &Surroundings<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Slot, Box<Shortage>> {
        let size = S::block_size(&self.rules, requested);
        let home = S::home_of(&self.rules, size);
        let blocks = self.table.blocks();
        let fit = self.free.best_fit(blocks, home, size);
        let slot = match fit.filter(|slot| S::accepts(&self.rules, size, blocks[*slot as usize].size)) {
            Some(slot) => slot,
            None => self.obtain(around, stream, size)?,
        };
        self.wait_for_earlier_users(around, slot, stream)?;
        Ok(slot)
    }

    /// Makes a free block, or as much of its start as is wanted, an allocation of a stream, which `ops` finds: it may know it
    /// from the heap's own. The block is the one that was chosen, or else the best fit if it serves a request of that size.
    /// What remains stays free, with the same fences. Fails when there is no such block.
    #[inline(always)]
    fn place<S: Sizing>(
        &mut self,
        ops: impl Fn(&StreamOps) -> StreamOps,
        requested: u64,
        chosen: Option<Slot>,
        serves: impl Fn(&SizeRules, Units, &Block) -> bool,
    ) -> Result<Allocation, Unfit> {
        let wanted = S::block_size(&self.rules, requested);
        let home = S::home_of(&self.rules, wanted);
        let index = &mut self.free;
        let mut tiling = self.table.tiling_with_room();
        let free = match chosen {
            None => index.take_best_fit(tiling.blocks, home, wanted, |block| serves(&self.rules, wanted, block))?,
            Some(slot) => {
                index.remove(tiling.blocks, slot);
                slot
            }
        };
        let slot = if S::splits(&self.rules, home, wanted, tiling.blocks[free as usize].size) {
            // The rest keeps the slot.
            let (front, rest) = tiling.cut_front(free, wanted, home);
            index.insert_anew(tiling.blocks, home, free, rest);
            front
        } else {
            free
        };
        let tag = self.tags.next();
        let block = &mut tiling.blocks[slot as usize];
        block.state = BlockState::Allocated { stream: ops(&self.own).stream, requested, tag };
        let &mut Block { place, size, segment, .. } = block;
        // A best fit that is taken at once has none.
        if chosen.is_some() && !block.fences.is_empty() {
            let fences = std::mem::replace(&mut block.fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
        }
        let base = tiling.base(segment);
        self.digest.fold(ops(&self.own).allocates.with(requested), place.word());
        self.usage.allocate(size, requested);
        let placement = place.placement();
        let address = base.plus(placement.offset_bytes);
        Ok(Allocation { handle: Handle::new(self.id, slot, tag), address, placement, size_bytes: bytes(size) })
    }

    /// Frees a live allocation if nobody else used the block, and tells its allocated and requested bytes to `tally`.
    /// Else it is as it was. The heap is plain.
    #[inline(always)]
    pub(crate) fn free_at_once(&mut self, handle: Handle, tally: impl FnOnce(u64, u64)) -> Freed {
        let Some(live) = self.find_live(handle) else { return Freed::NotYet };
        if !self.table.block(live.slot).fences.is_empty() {
            return Freed::Used(live);
        }
        let home = Exact::home_of(&self.rules, 0);
        self.give_back(live, home, Users::Owner, self.own.frees, 0, tally);
        Freed::Now
    }

    /// As [`free_at_once`](Self::free_at_once), in a heap that is not plain and keeps no book but the journal.
    #[inline(always)]
    pub(crate) fn free_at_once_by_rule(&mut self, handle: Handle, tally: impl FnOnce(u64, u64)) -> Freed {
        let Some(live) = self.find_live(handle) else { return Freed::NotYet };
        let Block { home, fences, .. } = *self.table.block(live.slot);
        if !fences.is_empty() || self.keeps_books && self.has_books_of_frees() {
            return Freed::NotYet;
        }
        let frees = OpKind::new(Mark::Free, live.stream);
        let placed = self.give_back(live, home, Users::Owner, frees, 0, tally);
        if self.keeps_books {
            note(&mut self.journal, frees.with(0), placed, self.digest);
        }
        Freed::Now
    }

    /// Frees a live allocation of a plain heap that other streams may have used. On an error it is still live.
    #[inline(always)]
    pub(crate) fn free_used<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        live: Live,
        fencing: Fencing,
        tally: impl FnOnce(u64, u64),
    ) -> Result<(), BackendError> {
        self.fence_uses(around, live.slot, fencing)?;
        // Nothing fails from here on.
        let home = Exact::home_of(&self.rules, 0);
        self.give_back(live, home, Users::Fenced, self.own.frees, 0, tally);
        self.recycle_spent(around);
        Ok(())
    }

    /// Frees a live allocation, whatever it takes. On an error it is still live.
    pub(crate) fn free<B: Backend, L: Lock>(
        &mut self,
        around: &Surroundings<B, L>,
        (handle, fencing): (Handle, Fencing),
        tally: impl FnOnce(u64, u64),
    ) -> Result<(), FreeError> {
        let live = self.live(handle)?;
        let Live { slot, stream, .. } = live;
        if !self.table.block(slot).fences.is_empty() {
            self.fence_uses(around, slot, fencing)?;
        }
        // Nothing fails from here on.
        let since = if self.stream.is_some() { 0 } else { around.clocks.lock().now(stream) };
        let name = if self.keeps_books { self.strike(slot) } else { None };
        let (home, frees) = (self.table.block(slot).home, OpKind::new(Mark::Free, stream));
        let placed = self.give_back(live, home, self.users(), frees, since, tally);
        if self.keeps_books {
            note(&mut self.journal, frees.with(0), placed, self.digest);
        }
        if let (Some(name), Some(journal)) = (name, &mut self.journal) {
            journal.name_newest(&name);
        }
        Ok(())
    }

    fn users(&self) -> Users {
        self.stream.map_or(Users::Several, |_| Users::Fenced)
    }

    /// Makes an allocated block free again. What was decided is where it lay, as a word.
    #[inline(always)]
    pub(crate) fn give_back(
        &mut self,
        live: Live,
        home: SizeClass,
        users: Users,
        frees: OpKind,
        since: Tick,
        tally: impl FnOnce(u64, u64),
    ) -> u64 {
        let Live { slot, stream, requested } = live;
        let mut tiling = self.table.tiling();
        let Block { place, size, .. } = tiling.blocks[slot as usize];
        self.usage.free(size, requested);
        tally(bytes(size), requested);
        self.digest.fold(frees.with(0), place.word());
        let state = BlockState::Free { stream, since };
        merge(&mut tiling, (&mut self.free, home), &mut self.fences, users, (slot, state));
        place.word()
    }

    /// Strikes an allocation that is about to be freed from the books. The name that it had.
    #[inline(always)]
    fn strike(&mut self, slot: Slot) -> Option<Box<str>> {
        self.strike_pointer(slot);
        if self.names.is_empty() {
            return None;
        }
        let name = self.names.take(slot);
        self.note_books();
        name
    }

    /// Puts a free block that is in no index into the free index, merged with its free neighbours. Returns the result.
    pub(crate) fn put_back(&mut self, slot: Slot) -> Slot {
        let users = self.users();
        let Block { home, state, .. } = *self.table.block(slot);
        merge(&mut self.table.tiling(), (&mut self.free, home), &mut self.fences, users, (slot, state))
    }

    /// Size of a block if it is there and free, else 0.
    #[inline(always)]
    pub(crate) fn free_size(&self, slot: Slot) -> Units {
        self.table.find(slot).and_then(Block::free_size).unwrap_or(0)
    }

    /// Gives a live allocation a name.
    pub(crate) fn set_name(&mut self, slot: Slot, name: &str) {
        let placed = placement_word(self.placement(slot));
        if let Some(journal) = &mut self.journal {
            journal.name_allocation(placed, name);
        }
        self.names.insert(slot, name);
        self.note_books();
    }

    pub(crate) fn live(&self, handle: Handle) -> Result<Live, HandleError> {
        self.find_live(handle).ok_or_else(|| self.not_live(handle))
    }

    #[inline(always)]
    pub(crate) fn find_live(&self, handle: Handle) -> Option<Live> {
        let slot = handle.slot();
        match self.table.find(slot)?.state {
            BlockState::Allocated { stream, requested, tag } if tag == handle.tag() => {
                Some(Live { slot, stream, requested })
            }
            _ => None,
        }
    }

    #[cold]
    pub(crate) fn not_live(&self, handle: Handle) -> HandleError {
        if self.tags.gave(handle.tag()) { HandleError::Stale { handle } } else { HandleError::Foreign { handle } }
    }

    pub(crate) fn placement(&self, slot: Slot) -> Placement {
        self.table.block(slot).place.placement()
    }

    pub(crate) fn address(&self, slot: Slot) -> DeviceAddress {
        self.table.address(slot)
    }

    /// Bytes of the largest free block.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.free.largest(self.table.blocks()).map_or(0, bytes)
    }
}

/// Remembers an op that was folded, where agreement looks back on ops.
#[inline(always)]
pub(crate) fn note(journal: &mut Option<Box<Journal>>, op: u64, decision: u64, after: Digest) {
    if let Some(journal) = journal {
        journal.note(op, decision, after);
    }
}

/// Whatever decisions depend on besides ops is in the digest from the start: other configurations never agree.
fn first_digest(config: &PoolConfig, granularity_bytes: u64, stream: Option<StreamId>) -> Digest {
    let mut digest = Digest::new(config.digest());
    digest.fold(granularity_bytes, stream.map_or(u64::MAX, |stream| stream.0.into()));
    Digest { ops: 0, ..digest }
}
