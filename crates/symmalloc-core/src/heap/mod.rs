//! A heap: one (pool, stream), or one pool whose streams share. Read this file and you know how a block is placed.
//!
//! A heap composes the rooms above: the [`BlockTable`] says what lies where, the [`FreeIndex`] says what is free in the order
//! of rule D2, the [`FenceTable`] says what a block's next user must wait for, and [`SizeRules`] says how large things
//! are. This file keeps them in step and folds each decision into the digest. What needs the driver has files of its own:
//! [`obtain`] when nothing fits, [`fencing`] when other streams used a block, [`trim`] when memory goes back.
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
//! Everything a decision reads is in the heap or in its pool's configuration. That is what makes heaps independent
//! (rule D8), and the heap's lock the only lock on the way of a cache hit. The fields are private to this room.

mod fencing;
pub(crate) mod invariants;
mod obtain;
mod rejoin;
mod rewind;
pub(crate) mod trim;
pub(crate) mod view;

use crate::blocks::FreeIndex;
use crate::blocks::table::{BlockState, BlockTable, Slot};
use crate::config::PoolConfig;
use crate::config::errors::{FreeError, HandleError};
use crate::config::size_rules::SizeRules;
use crate::history::digest::{Digest, Mark, op_word, placement_word};
use crate::history::journal::{Journal, ProgramOrder};
use crate::history::names::Names;
use crate::history::segment_log::SegmentLog;
use crate::pointers::SegmentDirectory;
use crate::stats::budget::{Budget, Budgets, LimitMet};
use crate::stats::usage::{RareCounts, Usage};
use crate::streams::clocks::StreamClocks;
use crate::streams::fences::{Fence, FenceSetId, FenceTable};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle, Serials};
use crate::types::ids::{HeapId, Placement, PoolId, SegmentId, StreamId};
use crate::types::units::{Units, bytes};
use std::sync::Arc;

/// What a heap needs from outside. Only the budget decides anything.
#[derive(Debug)]
pub(crate) struct Context<B, L: Lock> {
    pub(crate) backend: B,
    pub(crate) clocks: L::Cell<StreamClocks>,
    pub(crate) directory: L::Cell<SegmentDirectory>,
    /// Over all pools.
    pub(crate) budget: Budget<L>,
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

/// The slot in handles of allocations of zero bytes.
const NO_SLOT: Slot = u32::MAX;

/// What makes one heap different from the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeapIdentity {
    /// The allocator.
    pub(crate) owner: u64,
    pub(crate) id: HeapId,
    pub(crate) pool: PoolId,
    /// The heap's stream; `None` when the pool's streams share.
    pub(crate) stream: Option<StreamId>,
}

/// One heap.
#[derive(Debug)]
pub(crate) struct Heap<L: Lock> {
    identity: HeapIdentity,
    config: PoolConfig,
    /// The pool's.
    pool_budget: Arc<Budget<L>>,
    /// The heap's own: it has no limit, and counts.
    budget: Budget<L>,
    rules: SizeRules,
    table: BlockTable,
    /// The free blocks. Holes and allocated blocks are not in it.
    free: FreeIndex,
    fences: FenceTable,
    log: SegmentLog,
    /// The ordinal of the next segment.
    next_segment: SegmentId,
    /// Bytes backed by memory, retired segments not included.
    mapped_bytes: u64,
    /// Number of holes in all segments.
    hole_count: usize,
    /// Address ranges without memory that the driver did not take back.
    stray_ranges: Vec<Range>,
    /// Number of ops after which the pool was destroyed: nothing is obtained any more.
    closed_after_ops: Option<u64>,
    /// All ranks agreed on the whole history up to the destruction, and compare it no more. A rank that restarts later has no
    /// such heap.
    is_settled: bool,
    usage: Usage,
    /// What is counted away from the path of a cache hit.
    rare: RareCounts,
    digest: Digest,
    serials: Serials,
    names: Names,
    /// What agreement looks back on; heaps of symmetric pools have one.
    journal: Option<Box<Journal>>,
}

/// A live allocation, as its block knows it.
#[derive(Clone, Copy, Debug)]
struct Live {
    slot: Slot,
    stream: StreamId,
    requested: u64,
}

/// What was freed, for statistics and look-up. Nothing at address 0 for an allocation of zero bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) address: DeviceAddress,
    pub(crate) size: Units,
    pub(crate) requested_bytes: u64,
}

impl<L: Lock> Heap<L> {
    pub(crate) fn new(
        identity: HeapIdentity,
        config: PoolConfig,
        pool_budget: Arc<Budget<L>>,
        granularity_bytes: u64,
        log: SegmentLog,
    ) -> Self {
        Heap {
            identity,
            pool_budget,
            budget: Budget::new(None),
            rules: SizeRules::new(&config, granularity_bytes),
            table: BlockTable::default(),
            free: FreeIndex::default(),
            fences: FenceTable::default(),
            log,
            next_segment: SegmentId(0),
            mapped_bytes: 0,
            hole_count: 0,
            stray_ranges: Vec::new(),
            closed_after_ops: None,
            is_settled: false,
            usage: Usage::default(),
            rare: RareCounts::default(),
            digest: first_digest(&config, granularity_bytes, identity.stream),
            serials: Serials::default(),
            names: Names::default(),
            journal: None,
            config,
        }
    }

    /// From now on the heap remembers its last ops, for agreement to look back on.
    pub(crate) fn keep_journal(&mut self, history_ops: u32, order: Arc<ProgramOrder>) {
        self.journal = Some(Box::new(Journal::new(history_ops, self.digest, order)));
    }

    /// Allocates for work on `stream`, with a name or without. `requested` is at most
    /// [`SEGMENT_BYTES_MAX`](crate::types::units::SEGMENT_BYTES_MAX).
    #[inline]
    pub(crate) fn allocate<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
        name: Option<&str>,
    ) -> Result<Allocation, Box<Shortage>> {
        if requested == 0 {
            return self.allocate_nothing(stream);
        }
        let mapped_before = self.mapped_bytes;
        let size = self.rules.block_size(requested);
        let placed = self.choose(context, stream, size).map(|slot| self.place(slot, stream, size, requested));
        if self.mapped_bytes > mapped_before {
            // How much was obtained is a decision too: a limit that several heaps share may have shaped it.
            self.fold(op_word(Mark::Obtain, stream, self.mapped_bytes - mapped_before), 0);
        }
        if let (Ok(allocation), Some(name)) = (&placed, name) {
            self.set_name(allocation.handle.slot(), name);
        }
        placed
    }

    /// A free block for a request, obtained if need be, which work on `stream` may use.
    #[inline]
    fn choose<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        size: Units,
    ) -> Result<Slot, Box<Shortage>> {
        let blocks = self.table.blocks();
        let fit = self.free.best_fit(blocks, self.rules.class_of(size), size);
        let slot = match fit.filter(|slot| self.rules.accepts(size, blocks[*slot as usize].size)) {
            Some(slot) => slot,
            None => self.obtain(context, stream, size)?,
        };
        self.wait_for_earlier_users(context, slot, stream)?;
        Ok(slot)
    }

    /// Makes a free block, or as much of its start as is wanted, an allocation. What remains stays free, with the same fences.
    #[inline]
    fn place(&mut self, free: Slot, stream: StreamId, size: Units, requested: u64) -> Allocation {
        let serial = self.serials.next();
        let allocated = BlockState::Allocated { stream, requested, serial };
        self.unlink(free);
        let slot = if self.rules.splits(self.rules.class_of(size), size, self.table.block(free).size) {
            let front = self.table.cut_front(free, size, allocated);
            self.link(free);
            front
        } else {
            let block = self.table.block_mut(free);
            block.state = allocated;
            let fences = std::mem::replace(&mut block.fences, FenceSetId::EMPTY);
            self.fences.clear(fences);
            free
        };
        let block = self.table.block(slot);
        let (location, size) = (block.location, block.size);
        self.usage.allocate(size, requested);
        self.fold(op_word(Mark::Allocate, stream, requested), location.word());
        Allocation {
            handle: self.handle(slot, serial),
            address: self.table.address(slot),
            placement: location.placement(),
            size_bytes: bytes(size),
        }
    }

    #[cold]
    fn allocate_nothing(&mut self, stream: StreamId) -> Result<Allocation, Box<Shortage>> {
        if self.is_closed() {
            return Err(Box::new(Shortage::Closed));
        }
        self.fold(op_word(Mark::AllocateNothing, stream, 0), 0);
        Ok(self.nothing())
    }

    /// A new allocation of zero bytes.
    pub(crate) fn nothing(&mut self) -> Allocation {
        let serial = self.serials.next();
        Allocation {
            handle: self.handle(NO_SLOT, serial),
            address: DeviceAddress(0),
            placement: Placement::NOWHERE,
            size_bytes: 0,
        }
    }

    /// Frees a live allocation. On an error it is still live.
    #[inline]
    pub(crate) fn free<B: Backend>(&mut self, context: &Context<B, L>, handle: Handle) -> Result<Freed, FreeError> {
        if is_nothing(handle) {
            return self.free_nothing(handle);
        }
        let Live { slot, stream, requested } = self.live(handle)?;
        if !self.table.block(slot).fences.is_empty() {
            self.fence_uses(context, slot)?;
        }
        // Nothing fails from here on.
        let since = if self.identity.stream.is_some() { 0 } else { context.clocks.lock().now(stream) };
        let block = self.table.block_mut(slot);
        block.state = BlockState::Free { stream, since };
        let (location, size) = (block.location, block.size);
        let freed = Freed { address: self.table.address(slot), size, requested_bytes: requested };
        self.usage.free(size, requested);
        self.fold(op_word(Mark::Free, stream, 0), location.word());
        if let Some(name) = self.names.take(slot)
            && let Some(journal) = &mut self.journal
        {
            journal.name_newest(&name);
        }
        self.put_back(slot);
        self.recycle_spent(context);
        Ok(freed)
    }

    #[cold]
    fn free_nothing(&mut self, handle: Handle) -> Result<Freed, FreeError> {
        if !self.serials.gave(handle.serial()) {
            return Err(HandleError::Foreign { handle }.into());
        }
        self.fold(op_word(Mark::FreeNothing, StreamId(0), 0), 0);
        Ok(Freed { address: DeviceAddress(0), size: 0, requested_bytes: 0 })
    }

    /// Notes that work on `stream` uses the allocation.
    pub(crate) fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), HandleError> {
        let Live { stream: owner, .. } = self.live(handle)?;
        let block = self.table.block_mut(handle.slot());
        if stream != owner {
            block.fences = self.fences.add(block.fences, Fence::of(stream));
        }
        let location = block.location;
        self.fold(op_word(Mark::RecordUse, stream, 0), location.word());
        if let Some(journal) = &mut self.journal
            && let Some(name) = self.names.find(handle.slot())
        {
            journal.name_newest(name);
        }
        Ok(())
    }

    /// Folds an op and the decision about it into the digest, and notes them in the journal.
    #[inline]
    fn fold(&mut self, op: u64, decision: u64) {
        self.digest.fold(op, decision);
        if let Some(journal) = &mut self.journal {
            journal.note(op, decision, self.digest);
        }
    }

    /// A request for so many bytes was refused.
    pub(crate) fn fold_refusal(&mut self, mark: Mark, stream: StreamId, size_bytes: u64) {
        self.fold(op_word(mark, stream, size_bytes), 0);
        self.rare.refusals += 1;
    }

    pub(crate) fn count_retry(&mut self) {
        self.rare.retries += 1;
    }

    /// Gives a live allocation a name.
    fn set_name(&mut self, slot: Slot, name: &str) {
        let placed = placement_word(self.placement(slot));
        if let Some(journal) = &mut self.journal {
            journal.name_allocation(placed, name);
        }
        self.names.insert(slot, name);
    }

    /// Puts a free block into the free index.
    #[inline]
    fn link(&mut self, slot: Slot) {
        self.free.insert(self.table.blocks_mut(), slot);
    }

    /// Takes a free block out of the free index, before anything of its key changes.
    #[inline]
    fn unlink(&mut self, slot: Slot) {
        self.free.remove(self.table.blocks_mut(), slot);
    }

    /// Puts a free block that is in no index into the free index, merged with its free neighbours. Returns the result.
    ///
    /// ```text
    ///  prev      freed     next                          what was free before covers the freed block, and keeps its owner
    ///  free    + block   + free    ──►  prev
    ///  free    + block             ──►  prev
    ///            block   + free    ──►  next
    /// ```
    #[inline]
    fn put_back(&mut self, slot: Slot) -> Slot {
        let (prev, next) = (self.table.block(slot).prev, self.table.block(slot).next);
        let mut merged = slot;
        for neighbour in [prev, next] {
            if self.table.free_size(neighbour) > 0 {
                self.unlink(neighbour);
                // The first neighbour that is merged covers the second.
                let (from, to) = if merged == slot { (slot, neighbour) } else { (neighbour, merged) };
                self.merge(from, to);
                merged = to;
            }
        }
        self.link(merged);
        merged
    }

    /// Lets a free block that is in no index cover its neighbour, which is given up.
    #[inline]
    fn merge(&mut self, from: Slot, to: Slot) {
        let (giver, taker) = (self.table.block(from), self.table.block(to));
        let size = giver.size;
        let location = giver.location.min(taker.location);
        if !giver.fences.is_empty() || giver.state != taker.state {
            self.hand_over(from, to);
        }
        self.table.take_out(from);
        let taker = self.table.block_mut(to);
        taker.size += size;
        taker.location = location;
    }

    /// What had to be waited for before one free block is used must be waited for before the other is.
    fn hand_over(&mut self, from: Slot, to: Slot) {
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
            // Memory that no stream used yet takes over its neighbour's owner.
            BlockState::Free { stream: other, since: other_since }
        } else {
            if other_since != 0 {
                fences = self.fences.add(fences, Fence { stream: other, tick: other_since, event: None });
            }
            BlockState::Free { stream, since }
        };
        self.table.block_mut(from).fences = FenceSetId::EMPTY;
        let taker = self.table.block_mut(to);
        (taker.fences, taker.state) = (fences, state);
    }

    /// What reservations are charged to.
    fn budgets<'a, B>(&'a self, context: &'a Context<B, L>) -> Budgets<'a, L> {
        Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &context.budget }
    }

    /// The live allocation behind a handle of this heap.
    #[inline]
    fn live(&self, handle: Handle) -> Result<Live, HandleError> {
        let slot = handle.slot();
        match self.table.find(slot).map(|block| block.state) {
            Some(BlockState::Allocated { stream, requested, serial }) if serial == handle.serial() => {
                Ok(Live { slot, stream, requested })
            }
            _ if self.serials.gave(handle.serial()) => Err(HandleError::Stale { handle }),
            _ => Err(HandleError::Foreign { handle }),
        }
    }

    fn handle(&self, slot: Slot, serial: std::num::NonZeroU64) -> Handle {
        Handle::new(self.identity.owner, self.identity.id, slot, serial)
    }

    fn placement(&self, slot: Slot) -> Placement {
        self.table.block(slot).location.placement()
    }

    /// Takes up a history that a digest stands for, in place of the heap's own: the ops so far are not of this heap any
    /// more. The journal forgets its ops.
    fn begin_history(&mut self, digest: Digest) {
        self.digest = digest;
        if let Some(journal) = &mut self.journal {
            journal.begin(digest);
        }
    }

    /// The pool is destroyed: that is the last op of the heap's history that ranks compare.
    pub(crate) fn close(&mut self) {
        if self.has_history() {
            self.fold(op_word(Mark::Destroy, StreamId(0), 0), 0);
        }
        self.closed_after_ops = Some(self.digest.ops);
    }

    /// All ranks had this digest here: the history before it is forgotten.
    pub(crate) fn settle(&mut self, digest: Digest) {
        // From what was agreed on, not from what happened since on this rank alone.
        self.is_settled = self.closed_after_ops.is_some_and(|ops| ops <= digest.ops);
        if let Some(journal) = &mut self.journal {
            journal.agree(digest);
            if self.is_settled {
                journal.close();
            }
        }
    }
}

/// Whether the handle is of an allocation of zero bytes.
pub(crate) fn is_nothing(handle: Handle) -> bool {
    handle.slot() == NO_SLOT
}

/// The digest begins with all that decisions depend on besides ops, so that different configurations never agree.
fn first_digest(config: &PoolConfig, granularity_bytes: u64, stream: Option<StreamId>) -> Digest {
    let mut digest = Digest::new(config.digest());
    digest.fold(granularity_bytes, stream.map_or(u64::MAX, |stream| stream.0.into()));
    Digest { ops: 0, ..digest }
}
