//! A heap: one (pool, stream), or one pool that all its streams share. This file implements placement.
//!
//! A heap combines these types. The [`BlockTable`] holds blocks and segments, the [`FreeIndex`] the free
//! blocks in the order of rule D2, the [`FenceTable`] the waits of each block's next user, and [`SizeRules`] the sizes.
//! This file keeps them consistent and folds each decision into the digest. Work that needs the driver has its own
//! files: [`acquire`] and [`stitch`] if nothing fits, [`fencing`] if other streams used a block, [`trim`] to release
//! memory.
//!
//! ```text
//!  allocate   best fit in the free index ──found──► wait for its fences ─► split ─► allocated
//!                     │ nothing fits                        ▲
//!                     └──────► acquire: grow or new segment ┘
//!  free       fence other streams' uses ─► merge with free neighbors ─► into the free index
//! ```
//!
//! A call that fails changes nothing that a later decision depends on, with one exception: if the wait of an allocation
//! fails after the heap grew, the heap stays grown, as on the ranks whose wait succeeded.
//!
//! Everything that a decision reads is in the heap or in its pool's configuration. That makes heaps independent (rule
//! D8) and the heap's lock the only lock of a cache hit. The fields are private to this module.

mod acquire;
pub(crate) mod fencing;
mod follow;
pub(crate) mod invariants;
mod rejoin;
pub(crate) mod revive;
mod sleep;
mod stitch;
pub(crate) mod trim;
pub(crate) mod view;

use crate::blocks::FreeIndex;
use crate::blocks::stitched::StitchedRange;
use crate::blocks::table::{Block, BlockState, BlockTable, Location, Slot};
use crate::config::PoolConfig;
use crate::config::errors::{FreeError, HandleError, OutOfMemoryCause};
use crate::config::size_rules::SizeRules;
use crate::history::digest::{Digest, Mark, op_word};
use crate::history::journal::Journal;
use crate::history::segment_log::SegmentLog;
use crate::plans::heap_plans::HeapPlans;
use crate::plans::plan_cursor::PlanCursor;
use crate::pointers::{PointerMap, SegmentDirectory};
use crate::sleep::mappings::Mappings;
use crate::stats::budget::Budget;
use crate::stats::usage::{RareCounts, Usage};
use crate::streams::clocks::StreamClocks;
use crate::streams::fences::{FenceSetId, FenceTable};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, DeviceAddress};
use crate::types::handle::{Allocation, Handle, Serials};
use crate::types::ids::{HeapId, Placement, PoolId, SegmentId, StreamId};
use crate::types::look_up::LookUp;
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;
use std::mem;
use std::num::NonZeroU64;
use std::sync::Arc;

/// The state that all heaps share. Only the budget influences decisions.
pub(crate) struct Context<B: ?Sized, L: Lock> {
    pub(crate) clocks: L::Cell<StreamClocks>,
    pub(crate) directory: L::Cell<SegmentDirectory>,
    /// The budget over all pools.
    pub(crate) budget: Budget<L>,
    pub(crate) backend: B,
}

/// The context without the backend's type, for code that calls the driver and need not be monomorphized.
pub(crate) type DynContext<'a, L> = Context<dyn Backend + 'a, L>;

/// The reason why a heap could not serve a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// `missing` units of memory could not be acquired.
    Memory { missing: Units, cause: OutOfMemoryCause },
    /// A free block was found or acquired, but the stream cannot be made to wait for its earlier users.
    Fence(BackendError),
    /// The pool was destroyed after the request had found the heap.
    Closed,
    /// The pool sleeps.
    Asleep,
}

impl Shortage {
    fn of(missing: Units, cause: OutOfMemoryCause) -> Box<Self> {
        Shortage::Memory { missing, cause }.boxed()
    }

    #[cold]
    fn boxed(self) -> Box<Self> {
        Box::new(self)
    }
}

/// The slot in handles of allocations of zero bytes.
const NO_SLOT: Slot = u32::MAX;

/// Serials and zero-byte allocations of a heap's earlier pools.
pub(crate) type Past = (Serials, ZeroSized);

/// The identity of a heap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeapIdentity {
    pub(crate) id: HeapId,
    pub(crate) pool: PoolId,
    /// The heap's stream; `None` if the pool's streams share a heap.
    pub(crate) stream: Option<StreamId>,
}

/// One heap.
pub(crate) struct Heap<L: Lock> {
    identity: HeapIdentity,
    config: PoolConfig,
    /// The budget of the pool.
    pool_budget: Arc<Budget<L>>,
    /// The budget of this heap. It has no limit and only counts.
    budget: Budget<L>,
    rules: SizeRules,
    table: BlockTable,
    /// The free blocks, without holes and allocated blocks.
    free: FreeIndex,
    fences: FenceTable,
    log: SegmentLog,
    /// Ordinal of the next segment.
    next_segment: SegmentId,
    /// Bytes backed by memory, without retired segments.
    mapped_bytes: u64,
    /// Stitched ranges, oldest first. Empty unless the pool stitches.
    stitched: Vec<StitchedRange>,
    /// Number of ops at which the pool was destroyed. From then on the heap acquires no memory.
    closed_after_ops: Option<u64>,
    /// `true` if all ranks agreed on the whole history up to the destruction, and do not compare it again. A rank that
    /// restarts later has no such heap.
    is_settled: bool,
    usage: Usage,
    /// Counts of rare events, outside the path of a cache hit.
    rare: RareCounts,
    digest: Digest,
    serials: Serials,
    /// Live allocations of zero bytes.
    zero_sized: ZeroSized,
    /// Names of live allocations, given by the program.
    names: LookUp<Slot, Box<str>>,
    /// Live allocations by address, if configured.
    pointers: Option<PointerMap>,
    /// The recent ops that agreement compares. Only heaps of symmetric pools have one.
    journal: Option<Box<Journal>>,
    mode: RequestMode,
    /// Cursor of the active plan; empty otherwise.
    cursor: PlanCursor,
    /// The plans and the state of the step; created at the first step or plan.
    heap_plans: Option<Box<HeapPlans>>,
}

/// The mode in which a heap serves requests. Frees do not depend on it.
#[derive(Debug)]
enum RequestMode {
    /// Places requests by best fit.
    Ordinary,
    /// Passes requests to [`HeapPlans`] first: a step is open that follows a plan or is logged. The mode is
    /// [`Ordinary`](Self::Ordinary) again from the first request that differs from the plan.
    Step,
    /// Refuses requests: the pool sleeps.
    Asleep(Mappings),
    /// Refuses requests: the pool was destroyed.
    Closed,
}

/// Allocations of zero bytes that are live, by serial.
#[derive(Default)]
pub(crate) struct ZeroSized {
    live: LookUp<NonZeroU64, ()>,
    /// Live allocations of earlier pools. Their frees are not ops of this heap.
    earlier: LookUp<NonZeroU64, ()>,
    /// Allocations of a restored pool. Each represents any number of allocations.
    restored: SmallVec<[NonZeroU64; 1]>,
}

impl ZeroSized {
    /// Converts the live allocations to earlier ones when the pool is destroyed, so that they can still be freed.
    pub(crate) fn into_earlier(mut self) -> Self {
        self.earlier.extend(self.live);
        ZeroSized { earlier: self.earlier, ..ZeroSized::default() }
    }

    fn has(&self, serial: NonZeroU64) -> bool {
        self.live.find(serial).is_some() || self.earlier.find(serial).is_some() || self.restored.contains(&serial)
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
        identity: HeapIdentity,
        config: PoolConfig,
        pool_budget: Arc<Budget<L>>,
        granularity_bytes: u64,
        log: SegmentLog,
    ) -> Self {
        let rules = SizeRules::new(&config, granularity_bytes);
        Heap {
            identity,
            pool_budget,
            budget: Budget::new(None),
            table: BlockTable::default(),
            free: FreeIndex::default(),
            fences: FenceTable::default(),
            log,
            next_segment: SegmentId(0),
            mapped_bytes: 0,
            stitched: Vec::new(),
            closed_after_ops: None,
            is_settled: false,
            usage: Usage::default(),
            rare: RareCounts::default(),
            digest: Self::digest_before_ops(&config, bytes(rules.granule), identity.stream),
            rules,
            serials: Serials::default(),
            zero_sized: ZeroSized::default(),
            names: LookUp::default(),
            pointers: None,
            journal: None,
            mode: RequestMode::Ordinary,
            cursor: PlanCursor::default(),
            heap_plans: None,
            config,
        }
    }

    /// Allocates for work on `stream`, with an optional name. `requested` is at most
    /// [`SEGMENT_BYTES_MAX`](crate::types::units::SEGMENT_BYTES_MAX).
    #[inline(always)]
    pub(crate) fn allocate<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
        name: Option<&str>,
    ) -> Result<Allocation, Box<Shortage>> {
        let allocation = match self.mode {
            _ if requested == 0 => return self.allocate_nothing(stream),
            RequestMode::Ordinary => self.allocate_anywhere(context, stream, requested)?,
            RequestMode::Step => self.allocate_in_step(context, stream, requested)?,
            RequestMode::Asleep(_) => return Err(Shortage::Asleep.boxed()),
            RequestMode::Closed => return Err(Shortage::Closed.boxed()),
        };
        if let Some(name) = name {
            self.set_name(allocation.handle.slot(), name);
        }
        Ok(allocation)
    }

    /// Allocates by best fit.
    #[inline(always)]
    fn allocate_anywhere<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        stream: StreamId,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        let size = self.rules.block_size(requested);
        let blocks = self.table.blocks();
        let fit = self.free.best_fit(blocks, self.rules.class_of(size), size);
        let fit = fit.filter(|slot| self.rules.accepts(size, blocks[*slot as usize].size));
        match fit {
            Some(slot) if blocks[slot as usize].is_ready_for(stream) => Ok(self.place(slot, stream, size, requested)),
            fit => self.prepare_and_place(context, fit, stream, size, requested),
        }
    }

    /// Allocates if no free block fits, or if the stream must wait for the earlier users of the best fit.
    #[inline(never)]
    fn prepare_and_place<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        fit: Option<Slot>,
        stream: StreamId,
        size: Units,
        requested: u64,
    ) -> Result<Allocation, Box<Shortage>> {
        let mapped_before = self.mapped_bytes;
        let found = fit.map_or_else(|| self.acquire_memory(context, stream, size), Ok);
        let placed = found.and_then(|slot| {
            let waited = self.wait_for_earlier_users(context, slot, stream);
            waited.map_err(|error| Box::new(Shortage::Fence(error)))?;
            Ok(self.place(slot, stream, size, requested))
        });
        if self.mapped_bytes > mapped_before {
            // The acquired amount is part of the decision: a limit that several heaps share may have determined it.
            self.fold(op_word(Mark::Obtain, stream, self.mapped_bytes - mapped_before), 0);
        }
        placed
    }

    /// Turns the start of a free block into an allocation. The rest stays free with the same fences.
    #[inline(always)]
    fn place(&mut self, free: Slot, stream: StreamId, size: Units, requested: u64) -> Allocation {
        let serial = self.serials.next();
        let allocated = BlockState::Allocated { stream, requested, serial };
        let mut tiling = self.table.tiling();
        self.free.remove(tiling.blocks(), free);
        let slot = if self.rules.splits(self.rules.class_of(size), size, tiling.blocks()[free as usize].size) {
            let front = tiling.cut_front(free, size, allocated);
            self.free.insert(tiling.blocks(), free);
            front
        } else {
            let block = &mut tiling.blocks()[free as usize];
            block.state = allocated;
            if !block.fences.is_empty() {
                let fences = mem::replace(&mut block.fences, FenceSetId::EMPTY);
                self.fences.clear(fences);
            }
            free
        };
        let Block { segment, location, size, .. } = tiling.blocks()[slot as usize];
        let address = |heap: &Self| heap.table.address_at(segment, location);
        self.announce((slot, location, size), serial, stream, requested, address)
    }

    /// Completes a new allocation: counts it, folds the decision into the digest, and returns the allocation.
    #[inline(always)]
    fn announce(
        &mut self,
        (slot, location, size): (Slot, Location, Units),
        serial: NonZeroU64,
        stream: StreamId,
        requested: u64,
        address: impl FnOnce(&Self) -> DeviceAddress,
    ) -> Allocation {
        self.usage.allocate(size, requested);
        self.fold(op_word(Mark::Allocate, stream, requested), location.word());
        self.note_pointer(slot);
        Allocation {
            handle: self.handle(slot, serial),
            address: address(self),
            placement: location.placement(),
            size_bytes: bytes(size),
        }
    }

    /// Returns an error if the pool sleeps or was destroyed.
    fn check_open(&self) -> Result<(), Box<Shortage>> {
        match self.mode {
            RequestMode::Ordinary | RequestMode::Step => Ok(()),
            RequestMode::Asleep(_) => Err(Shortage::Asleep.boxed()),
            RequestMode::Closed => Err(Shortage::Closed.boxed()),
        }
    }

    /// Allocates zero bytes, which take no memory.
    #[cold]
    fn allocate_nothing(&mut self, stream: StreamId) -> Result<Allocation, Box<Shortage>> {
        self.check_open()?;
        self.fold(op_word(Mark::AllocateNothing, stream, 0), 0);
        let serial = self.serials.next();
        self.zero_sized.live.insert(serial, ());
        Ok(Allocation {
            handle: self.handle(NO_SLOT, serial),
            address: DeviceAddress(0),
            placement: Placement::NOWHERE,
            size_bytes: 0,
        })
    }

    /// Creates a handle that represents every allocation of zero bytes that was live when the heap was saved.
    pub(crate) fn restored_nothing(&mut self) -> Handle {
        let serial = self.serials.next();
        self.zero_sized.restored.push(serial);
        self.handle(NO_SLOT, serial)
    }

    /// Checks that an allocation of zero bytes is live.
    #[cold]
    pub(crate) fn check_nothing(&self, handle: Handle) -> Result<(), HandleError> {
        if self.zero_sized.has(handle.serial()) {
            Ok(())
        } else if self.serials.gave(handle.serial()) {
            Err(HandleError::Stale { handle })
        } else {
            Err(HandleError::Foreign { handle })
        }
    }

    /// Removes and returns the records that identify earlier handles of this heap, for the heap that replaces it.
    pub(crate) fn take_past(&mut self) -> Past {
        (mem::take(&mut self.serials), mem::take(&mut self.zero_sized).into_earlier())
    }

    pub(crate) fn set_past(&mut self, (serials, zero_sized): Past) {
        (self.serials, self.zero_sized) = (serials, zero_sized);
    }

    /// Frees a live allocation. After an error it is still live.
    #[inline(always)]
    pub(crate) fn free<B: Backend>(&mut self, context: &Context<B, L>, handle: Handle) -> Result<Freed, FreeError> {
        if is_nothing(handle) {
            return self.free_nothing(handle);
        }
        let live = self.live(handle)?;
        if self.table.block(live.slot).fences.is_empty() {
            return Ok(self.make_free(context, live, true));
        }
        self.fence_and_free(context, live)
    }

    /// Frees the allocation that starts at an address; see [`free`](Self::free). Returns `None` if there is none.
    #[inline(always)]
    pub(crate) fn free_at<B: Backend>(
        &mut self,
        context: &Context<B, L>,
        address: DeviceAddress,
    ) -> Option<Result<Freed, FreeError>> {
        let slot = self.pointers.as_mut()?.take(address)?;
        let BlockState::Allocated { stream, requested, .. } = self.table.block(slot).state else {
            unreachable!("the pointer map knows live allocations only");
        };
        let live = Live { slot, stream, requested };
        if self.table.block(slot).fences.is_empty() {
            return Some(Ok(self.make_free(context, live, false)));
        }
        // The pointer map contains the allocation until its uses are fenced, because the backend call may fail or
        // panic.
        self.note_pointer(slot);
        Some(self.fence_and_free(context, live))
    }

    /// Adds a live allocation to the pointer map, if look-up by pointer is configured.
    #[inline(always)]
    fn note_pointer(&mut self, slot: Slot) {
        if let Some(pointers) = &mut self.pointers {
            pointers.insert(self.table.address(slot), slot);
        }
    }

    /// Frees a live allocation that other streams used.
    #[inline(never)]
    fn fence_and_free<B: Backend>(&mut self, context: &Context<B, L>, live: Live) -> Result<Freed, FreeError> {
        self.fence_uses(context, live.slot)?;
        Ok(self.make_free(context, live, true))
    }

    /// Turns an allocation whose uses are fenced into a free block. The pointer map may still contain it.
    #[inline(always)]
    fn make_free<B: Backend>(&mut self, context: &Context<B, L>, live: Live, is_mapped: bool) -> Freed {
        let Live { slot, stream, requested } = live;
        let since = if self.identity.stream.is_some() { 0 } else { context.clocks.lock().now(stream) };
        let block = self.table.block_mut(slot);
        block.state = BlockState::Free { stream, since };
        let is_place = block.is_place();
        let Block { segment, location, size, .. } = *block;
        if is_mapped && let Some(pointers) = &mut self.pointers {
            pointers.take(self.table.address_at(segment, location));
        }
        self.usage.free(size, requested);
        self.fold(op_word(Mark::Free, stream, 0), location.word());
        if !self.names.is_empty() {
            self.forget_name(slot);
        }
        if !is_place {
            if let Some(heap_plans) = &mut self.heap_plans {
                heap_plans.note_free(slot);
            }
            self.coalesce(slot);
        }
        self.recycle_spent(context);
        Freed { size, requested_bytes: requested }
    }

    /// Removes the name of a freed allocation, if it has one.
    #[inline(never)]
    fn forget_name(&mut self, slot: Slot) {
        if let Some(name) = self.names.take(slot)
            && let Some(journal) = &mut self.journal
        {
            journal.name_newest(&name);
        }
    }

    #[cold]
    fn free_nothing(&mut self, handle: Handle) -> Result<Freed, FreeError> {
        self.check_nothing(handle)?;
        if self.zero_sized.earlier.take(handle.serial()).is_none() {
            self.zero_sized.live.take(handle.serial());
            self.fold(op_word(Mark::FreeNothing, StreamId(0), 0), 0);
        }
        Ok(Freed { size: 0, requested_bytes: 0 })
    }

    /// Folds an op and its decision into the digest, and notes them in the journal.
    #[inline(always)]
    fn fold(&mut self, op: u64, decision: u64) {
        self.digest.fold(op, decision);
        if let Some(journal) = &mut self.journal {
            journal.note(op, decision, self.digest);
        }
    }

    /// Adds a free block to the free index.
    fn link(&mut self, slot: Slot) {
        self.free.insert(self.table.tiling().blocks(), slot);
    }

    /// Removes a free block from the free index, before any part of its key changes.
    fn unlink(&mut self, slot: Slot) {
        self.free.remove(self.table.tiling().blocks(), slot);
    }

    /// Adds a free block that is not yet in the free index to it, merged with its free neighbors. Returns the result.
    ///
    /// ```text
    ///  prev      freed     next                          the earlier free block absorbs the freed one and keeps its owner
    ///  free    + block   + free    ──►  prev
    ///  free    + block             ──►  prev
    ///            block   + free    ──►  next
    /// ```
    #[inline(always)]
    fn coalesce(&mut self, slot: Slot) -> Slot {
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
                if !giver.fences.is_empty() || self.identity.stream.is_none() && giver.state != taker.state {
                    Self::merge_fences(&mut self.fences, blocks, from, to);
                }
                tiling.absorb(from, to);
                merged = to;
            }
        }
        self.free.insert(tiling.blocks(), merged);
        merged
    }

    /// Returns the live allocation of a handle of this heap.
    #[inline(always)]
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

    fn handle(&self, slot: Slot, serial: NonZeroU64) -> Handle {
        Handle::new(self.identity.id, slot, serial)
    }
}

/// Returns `true` if the handle belongs to an allocation of zero bytes.
pub(crate) fn is_nothing(handle: Handle) -> bool {
    handle.slot() == NO_SLOT
}
