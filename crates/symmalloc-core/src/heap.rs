//! A heap: the memory of a pool for one stream, for a group of streams, or for all streams. This file implements
//! placement.
//!
//! A heap composes parts that own their state, and makes every decision:
//!
//! | part | knows |
//! |---|---|
//! | [`Arena`] | the heap's memory: segments, blocks, free blocks, fences |
//! | [`Ledger`] | the record of the heap's decisions: digest, journal, usage, names, pointers |
//! | [`SegmentLog`] | the segment events for observers, and dead segments whose memory is not released yet |
//! | [`HeapPlans`] | plans; optional |
//! | [`StitchedRanges`] | the addresses that map memory a second time; empty unless the pool stitches |
//! | [`FixedAddresses`] | the addresses of the pool, which its heaps share; only in a pool with a base |
//! | [`Mappings`] | what a sleeping heap must map again; only while it sleeps |
//! | [`HeapDebugger`] | guards, patterns and the quarantine; optional |
//!
//! The [`RequestMode`] decides how a request is served. Work that needs the driver is in separate files: [`acquire`]
//! and [`stitch`] if no free block fits, [`fencing`](crate::arena::fencing) if other streams used a block, and [`trim`]
//! to release memory.
//!
//! ```text
//!  allocate   best fit in the free index ──found──► wait for its fences ─► split ─► allocated ─► recorded
//!                     │ nothing fits                        ▲
//!                     └──────► acquire: grow or new segment ┘
//!  free       fence other streams' uses ─► recorded ─► merge with free neighbors ─► into the free index
//! ```
//!
//! A call that fails changes nothing that a later decision depends on, with one exception: if the wait of an allocation
//! fails after the heap grew, the heap stays grown, as on the ranks whose wait succeeded.
//!
//! Everything that a decision reads is in the heap or in its pool's configuration. Heaps are therefore independent
//! (rule D8), and a cache hit takes no lock but the heap's. Only this file and the folder `heap/` see the heap's
//! fields, and the fields of each part are private to the part. Other modules call methods.

mod acquire;
pub(crate) mod debug;
pub(crate) mod debugger;
mod follow;
pub(crate) mod invariants;
mod record;
mod rejoin;
pub(crate) mod revive;
mod sleep;
mod stitch;
pub(crate) mod trim;
pub(crate) mod view;

use crate::arena::Arena;
use crate::arena::addresses::FixedAddresses;
use crate::arena::fencing::{Context, DynContext};
use crate::blocks::table::{Block, BlockState, Location, QUARANTINED, Slot};
use crate::config::PoolConfig;
use crate::config::errors::{FreeError, HandleError, OutOfMemoryCause};
use crate::config::size_rules::SizeRules;
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::SegmentLog;
use crate::ledger::Ledger;
use crate::plans::heap_plans::HeapPlans;
use crate::plans::step::Step;
use crate::sleep::mappings::Mappings;
use crate::stats::budget::Budget;
use crate::stitching::StitchedRanges;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{HeapId, HeapNumber, Placement, StreamId};
use crate::types::units::{Units, bytes};
use debugger::HeapDebugger;
use std::num::NonZeroU64;
use std::sync::Arc;

/// The reason why a heap could not serve a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// `missing` units of memory could not be acquired. The request needs `demand` units of memory if it can use none
    /// of the heap's free memory. Before the attempt, the allocator had released `released_bytes` in total.
    Memory { missing: Units, demand: Units, cause: OutOfMemoryCause, released_bytes: u64 },
    /// A free block was found or acquired, but a driver call failed while ordering the stream after the block's earlier
    /// users.
    Fence(BackendError),
    /// The pool was destroyed after the request had found the heap.
    Closed,
    /// The pool sleeps.
    Asleep,
}

impl Shortage {
    fn of(missing: Units, cause: OutOfMemoryCause) -> Box<Self> {
        Shortage::Memory { missing, demand: missing, cause, released_bytes: 0 }.boxed()
    }

    /// Returns the shortage with `demand` set to `needed` units.
    fn demanding(mut self: Box<Self>, needed: Units) -> Box<Self> {
        if let Shortage::Memory { demand, .. } = &mut *self {
            *demand = needed;
        }
        self
    }

    /// Sets the total of the allocator's released bytes before the attempt.
    fn since(mut self: Box<Self>, total_bytes: u64) -> Box<Self> {
        if let Shortage::Memory { released_bytes, .. } = &mut *self {
            *released_bytes = total_bytes;
        }
        self
    }

    #[cold]
    fn boxed(self) -> Box<Self> {
        Box::new(self)
    }
}

/// The slot in handles of allocations of zero bytes.
const NO_SLOT: Slot = u32::MAX;

/// The state of one heap.
pub(crate) struct Heap<L: Lock> {
    id: HeapId,
    number: HeapNumber,
    config: PoolConfig,
    /// The budget of the pool.
    pool_budget: Arc<Budget<L>>,
    /// The addresses of the pool, if it has a base.
    addresses: Option<Arc<FixedAddresses<L>>>,
    /// Parts of these addresses that the current request acquired. Empty between requests.
    carved: Vec<Range>,
    /// The budget of this heap. It has no limit and only counts.
    budget: Budget<L>,
    mode: RequestMode,
    /// The segments, blocks, free blocks and fences.
    arena: Arena,
    /// The record of all decisions.
    ledger: Ledger,
    /// The entries that observers of segments read, and dead segments whose memory is not released yet.
    log: SegmentLog,
    stitched: StitchedRanges,
    /// The plans; created at the first step or plan.
    plans: Option<Box<HeapPlans>>,
    /// The debugger; `None` unless the pool has debugging options.
    debugger: Option<Box<HeapDebugger>>,
}

/// The mode in which a heap serves requests. Frees do not depend on the mode.
#[derive(Debug)]
enum RequestMode {
    /// Serves requests in the way that the step requires.
    Serving(Step),
    /// Refuses requests: the pool sleeps.
    Asleep(Box<Mappings>),
    /// Refuses requests: the pool was destroyed.
    Closed,
}

impl RequestMode {
    /// Returns `true` if every request is served by best fit. This takes one comparison of the tag. A match on both
    /// enums would take two.
    #[inline(always)]
    fn is_best_fit(&self) -> bool {
        matches!(self, RequestMode::Serving(Step::None | Step::Unplanned { .. } | Step::Diverged(_)))
    }
}

/// A live allocation as recorded in its block.
#[derive(Clone, Copy, Debug)]
struct Live {
    slot: Slot,
    stream: StreamId,
    requested: u64,
}

/// The result of a free, for the statistics. Its size is 0 for an allocation of zero bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) size: Units,
    pub(crate) requested_bytes: u64,
}

impl<L: Lock> Heap<L> {
    pub(crate) fn new(
        id: HeapId,
        number: HeapNumber,
        config: PoolConfig,
        (pool_budget, addresses): (Arc<Budget<L>>, Option<Arc<FixedAddresses<L>>>),
        granularity_bytes: u64,
        log: SegmentLog,
    ) -> Self {
        let rules = SizeRules::new(&config, granularity_bytes);
        let ledger = Ledger::new(Self::digest_before_ops(&config, bytes(rules.granule), id.group));
        Heap {
            id,
            number,
            pool_budget,
            addresses,
            carved: Vec::new(),
            budget: Budget::new(None),
            mode: RequestMode::Serving(Step::None),
            arena: Arena::new(rules, id.stream()),
            ledger,
            log,
            stitched: StitchedRanges::default(),
            plans: None,
            debugger: None,
            config,
        }
    }

    /// Replaces this heap with a new one, which still recognizes handles of this heap as stale.
    pub(crate) fn replace(&mut self, mut next: Self) {
        next.ledger.inherit_handles(&mut self.ledger);
        *self = next;
    }

    /// Allocates for work on `stream`, with an optional name. `requested` is at most
    /// [`SEGMENT_BYTES_MAX`](crate::types::units::SEGMENT_BYTES_MAX).
    #[inline(always)]
    pub(crate) fn allocate<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
        name: Option<&Arc<str>>,
    ) -> Result<Allocation, Box<Shortage>> {
        // The inner calls return a handle, because it fits into two registers. They would return an `Allocation`
        // through memory.
        let handle = match &mut self.mode {
            _ if requested == 0 => return self.allocate_nothing(stream),
            mode if mode.is_best_fit() => self.allocate_anywhere(context, stream, requested)?,
            RequestMode::Serving(Step::Following(step)) => match step.next_place(&self.arena, stream, requested) {
                Some(slot) => self.allocate_planned(slot, stream, requested),
                None => self.allocate_following_slow(context, stream, requested)?,
            },
            RequestMode::Serving(Step::Learning { .. }) => self.allocate_logged(context, stream, requested)?,
            _ => return Err(self.refusal()),
        };
        if let Some(name) = name {
            self.set_name(handle.slot(), name);
        }
        Ok(self.allocation_in(handle.slot(), handle))
    }

    /// Allocates by best fit.
    #[inline(always)]
    fn allocate_anywhere<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Handle, Box<Shortage>> {
        let size = self.arena.rules().block_size(requested);
        match self.arena.best_fit_block(size) {
            Some((slot, block)) if block.is_ready_for(stream) => Ok(self.allocate_front(slot, stream, size, requested)),
            fit => self.allocate_after_waits(context, fit.map(|(slot, _)| slot), stream, size, requested),
        }
    }

    /// Allocates when no free block fits, or when the stream must wait for the earlier users of the best fit.
    #[inline(never)]
    fn allocate_after_waits<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        fit: Option<Slot>,
        stream: StreamId,
        size: Units,
        requested: u64,
    ) -> Result<Handle, Box<Shortage>> {
        let mapped_before = self.arena.mapped_bytes();
        let found = fit.map_or_else(|| self.acquire_memory(context, stream, size), Ok);
        let placed = found.and_then(|slot| {
            let waited = self.arena.wait_for_earlier_users(context, slot, stream);
            waited.map_err(|error| Box::new(Shortage::Fence(error)))?;
            Ok(self.allocate_front(slot, stream, size, requested))
        });
        if self.arena.mapped_bytes() > mapped_before {
            // The acquired amount is part of the decision: a limit that several heaps share may have determined it.
            self.ledger.fold(op_word(Mark::Obtain, stream, self.arena.mapped_bytes() - mapped_before), 0);
        }
        self.fold_offsets();
        placed
    }

    /// Turns the start of a free block into an allocation. The rest stays free with the same fences.
    #[inline(always)]
    fn allocate_front(&mut self, free: Slot, stream: StreamId, size: Units, requested: u64) -> Handle {
        let serial = self.ledger.next_serial();
        let state = BlockState::Allocated { stream, requested, serial };
        let (slot, &Block { location, size, .. }) = self.arena.take_front(free, size, state);
        self.note_allocation((slot, location), size, serial, stream, requested)
    }

    /// Records a new allocation, and returns its handle.
    #[inline(always)]
    fn note_allocation(
        &mut self,
        (slot, location): (Slot, Location),
        size: Units,
        serial: NonZeroU64,
        stream: StreamId,
        requested: u64,
    ) -> Handle {
        self.ledger.note_allocation(location, size, stream, requested);
        self.ledger.note_pointer(slot, || self.arena.address(slot));
        self.handle(slot, serial)
    }

    /// Names a live allocation.
    fn set_name(&mut self, slot: Slot, name: &Arc<str>) {
        self.ledger.set_name((slot, self.arena.block(slot).location), name);
    }

    /// Returns an error if the pool sleeps or was destroyed.
    fn check_open(&self) -> Result<(), Box<Shortage>> {
        match self.mode {
            RequestMode::Serving(_) => Ok(()),
            RequestMode::Asleep(_) | RequestMode::Closed => Err(self.refusal()),
        }
    }

    /// Returns the error of a sleeping or destroyed pool.
    #[cold]
    fn refusal(&self) -> Box<Shortage> {
        match self.mode {
            RequestMode::Asleep(_) => Shortage::Asleep.boxed(),
            RequestMode::Closed => Shortage::Closed.boxed(),
            RequestMode::Serving(_) => unreachable!("the pool serves requests"),
        }
    }

    /// Allocates zero bytes, which take no memory.
    #[inline(always)]
    fn allocate_nothing(&mut self, stream: StreamId) -> Result<Allocation, Box<Shortage>> {
        self.check_open()?;
        let serial = self.ledger.allocate_nothing(stream);
        Ok(Allocation {
            handle: self.handle(NO_SLOT, serial),
            address: DeviceAddress(0),
            placement: Placement::NOWHERE,
            size_bytes: 0,
        })
    }

    /// Creates a handle that represents every allocation of zero bytes that was live when the heap was saved.
    pub(crate) fn restored_nothing(&mut self) -> Handle {
        let serial = self.ledger.restore_nothing();
        self.handle(NO_SLOT, serial)
    }

    /// Frees a live allocation. After an error, the allocation is still live.
    #[inline(always)]
    pub(crate) fn free<B: Backend>(&mut self, context: &Context<B, L>, handle: Handle) -> Result<Freed, FreeError> {
        let live = match self.live(handle) {
            Ok(live) => live,
            Err(error) => return self.free_nothing(handle, error),
        };
        if self.arena.block(live.slot).fences.is_empty() {
            return Ok(self.make_free(context, live, true));
        }
        self.fence_and_free(context, live)
    }

    /// Frees the allocation that starts at an address; see [`free`](Self::free). Returns `None` if no allocation starts
    /// there.
    #[inline(always)]
    pub(crate) fn free_at<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        address: DeviceAddress,
    ) -> Option<Result<Freed, FreeError>> {
        let slot = self.ledger.take_at(address)?;
        let BlockState::Allocated { stream, requested, .. } = self.arena.block(slot).state else {
            unreachable!("the pointer map knows live allocations only");
        };
        let live = Live { slot, stream, requested };
        if self.arena.block(slot).fences.is_empty() {
            return Some(Ok(self.make_free(context, live, false)));
        }
        // The pointer map contains the allocation until its uses are fenced, because the backend call may fail or
        // panic.
        self.ledger.note_pointer(slot, || address);
        Some(self.fence_and_free(context, live))
    }

    /// Frees a live allocation that other streams used.
    #[inline(never)]
    fn fence_and_free<B: Backend>(&mut self, context: &Context<B, L>, live: Live) -> Result<Freed, FreeError> {
        self.arena.fence_uses(context, live.slot)?;
        Ok(self.make_free(context, live, true))
    }

    /// Returns the handles of the live allocations that have memory, in the order of their placements, which is the same
    /// after a restore.
    pub(crate) fn live_handles(&self) -> Vec<Handle> {
        let slots = self.arena.all_blocks().into_iter().chain(self.places().iter().copied());
        let live = slots.filter_map(|slot| match self.arena.block(slot).state {
            BlockState::Allocated { serial, .. } if serial != QUARANTINED => Some(self.handle(slot, serial)),
            _ => None,
        });
        let mut live: Vec<Handle> = live.collect();
        live.sort_unstable_by_key(|handle| self.arena.block(handle.slot()).location);
        live
    }

    /// Frees a live allocation without a driver call; see [`Arena::fence_uses_by_clock`].
    pub(crate) fn free_in_reset<B: Backend>(&mut self, context: &Context<B, L>, handle: Handle) -> Freed {
        let live = self.live(handle).expect("the allocation is live");
        self.arena.fence_uses_by_clock(context, live.slot);
        self.make_free(context, live, true)
    }

    /// Turns an allocation whose uses are fenced into a free block. `is_mapped` is `true` if the pointer map still
    /// contains the allocation.
    #[inline(always)]
    fn make_free<B: Backend>(&mut self, context: &Context<B, L>, live: Live, is_mapped: bool) -> Freed {
        let Live { slot, stream, requested } = live;
        let since = if self.id.stream().is_some() { 0 } else { context.clocks.lock().now(stream) };
        let block = self.arena.mark_free(slot, stream, since);
        let is_place = block.is_place();
        let Block { segment, location, size, .. } = *block;
        if is_mapped {
            self.ledger.forget_pointer(|| self.arena.address_at(segment, location));
        }
        self.ledger.note_free((slot, location), size, stream, requested);
        if !is_place {
            self.merge_free(slot, segment);
        }
        self.arena.recycle_spent(context);
        Freed { size, requested_bytes: requested }
    }

    /// Merges a new free block with its free neighbors.
    #[inline(always)]
    fn merge_free(&mut self, slot: Slot, segment: u32) {
        if let Some(plans) = &mut self.plans {
            plans.note_free(slot);
        }
        self.arena.coalesce(slot);
        if !self.stitched.is_empty() && self.arena.segment(segment).is_stitched {
            self.stitched.empty_if_unused(&mut self.arena, segment);
        }
    }

    /// Records that work on `stream` uses the allocation.
    pub(crate) fn record_use(&mut self, handle: Handle, stream: StreamId) -> Result<(), HandleError> {
        let Live { slot, stream: owner, .. } = self.live(handle)?;
        if stream != owner {
            self.arena.add_use(slot, stream);
        }
        self.ledger.note_use((slot, self.arena.block(slot).location), stream);
        Ok(())
    }

    /// Frees an allocation of zero bytes. Returns `error` if the handle names a block.
    #[cold]
    fn free_nothing(&mut self, handle: Handle, error: HandleError) -> Result<Freed, FreeError> {
        if !is_nothing(handle) {
            return Err(error.into());
        }
        self.ledger.free_nothing(handle)?;
        Ok(Freed { size: 0, requested_bytes: 0 })
    }

    /// Drops the fences that have completed, according to the backend. This does not affect placement. Returns the
    /// number of dropped fences.
    pub(crate) fn drop_completed_fences(&mut self, context: &DynContext<'_, L>) -> Result<u64, BackendError> {
        let places = self.places().to_vec();
        self.arena.drop_completed_fences(context, &places)
    }

    /// Returns the live allocation of a handle of this heap.
    #[inline(always)]
    fn live(&self, handle: Handle) -> Result<Live, HandleError> {
        let slot = handle.slot();
        match self.arena.find_block(slot).map(|block| block.state) {
            Some(BlockState::Allocated { stream, requested, serial }) if serial == handle.serial() => {
                Ok(Live { slot, stream, requested })
            }
            _ => Err(self.ledger.misuse_of(handle)),
        }
    }

    fn handle(&self, slot: Slot, serial: NonZeroU64) -> Handle {
        Handle::new(self.number, slot, serial)
    }
}

/// Returns `true` if the handle belongs to an allocation of zero bytes.
pub(crate) fn is_nothing(handle: Handle) -> bool {
    handle.slot() == NO_SLOT
}
