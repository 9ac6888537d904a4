//! The allocator: the interface for programs.
//!
//! A request finds its heap, takes the heap's lock, and is placed there as `heap.rs` describes. There is one path
//! to allocate and one to free; buffers, handles and pointers refer to the same allocation. An allocation takes these
//! steps, and most end with the first:
//!
//! ```text
//!  1. best fit among the heap's free blocks                                             (heap.rs)
//!  2. acquire memory: fill a hole, grow, or a new segment, within the limits            (heap/acquire.rs)
//!  3. a configured limit refused, and the request would fit within it: destroy the private pools that the program
//!     dropped, then release free memory as `reclaim` allows, and retry each time, until the request is served or
//!     nothing is left to release                                                           (heap/trim.rs)
//!  4. still short, or a driver call failed: call the failure callback, at most `retries_max` times, and retry if it asks
//!     to. Not for a request that no free can make fit
//!  5. a typed error; the heap is unchanged, and its digest includes the refusal
//! ```
//!
//! Step 3 is the same on every rank because limits are configured bytes. A driver call can fail on one rank alone. Step
//! 3 is therefore skipped after a failed driver call, and nothing is released.
//!
//! Statistics over all heaps and the recording are updated after a decision. They influence none. While a recording is
//! active, ops pass its gate one at a time.

mod address;
mod debug_state;
mod debugging;
mod destroyed;
mod gate;
mod guard;
#[doc(hidden)]
pub mod histories;
mod lookup;
mod observers;
mod out_of_memory;
mod pool;
mod pools;
mod recorder;
pub mod recording;
mod replay;
pub mod report;
mod restore;
mod save;
mod sleep;
mod steps;
mod watched;

pub use address::{AddressBlock, AddressReport};
pub use guard::AllocationGuard;
pub use lookup::SegmentPosition;
pub use observers::Unread;
pub use pools::Emptied;
pub use replay::ReplayOps;
pub use restore::{Restored, RestoredAllocation, RestoredHeap, RevivedPlace};
pub use sleep::{Quiesced, Remapped};
pub use steps::StepGuard;

use crate::arena::fencing::Context;
use crate::config::errors::{
    AllocateError, FreeError, HandleError, OutOfMemory, RecordUseError, ReserveError, TrimError, UnknownError,
};
use crate::config::op::Op;
use crate::config::{Config, ConfigError, PointerLookup, in_range};
use crate::heap::trim::Released;
use crate::heap::{Freed, is_nothing};
use crate::history::journal::ProgramOrder;
use crate::history::segment_log::Observers;
use crate::pointers::{HeapHints, SegmentDirectory};
use crate::stats::budget::Budget;
use crate::stats::usage::TotalUsage;
use crate::streams::clocks::StreamClocks;
use crate::sync::lock::{Exclusive, Lock, LockCell, Shared};
use crate::sync::registry::Registry;
use crate::types::backend::{Backend, BackendError, DeviceAddress};
use crate::types::groups::Groups;
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{HeapId, HeapNumber, PoolId, StreamGroup, StreamId};
use crate::types::units::{SEGMENT_BYTES_MAX, UNIT_BYTES, Units, bytes, units};
use debug_state::DebugState;
use destroyed::Destroyed;
use gate::{Gate, Recorder, Request};
use pool::{HeapCell, HeapGuard, PoolHeap, PoolRef, PoolSlot, reserve_addresses};
use recorder::RecordingEnd;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The answer of a failure callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was made available: retry.
    Again,
    /// Retry if the allocator released memory since the request failed, in the callback or on another thread. A callback
    /// that only trims returns this: if threads run out of memory together, one of them releases what the others need.
    /// Which of their requests succeed may then depend on timing, as with any limit that threads share.
    IfReleased,
    /// Let the allocation fail.
    GiveUp,
}

/// The callback that runs before an allocation fails. It is called without any lock, and can free, trim and log.
type FailureCallback<B, L> = Arc<dyn Fn(&Allocator<B, L>, &OutOfMemory) -> Retry + Send + Sync>;

/// A caching device allocator over a backend, for any [`Lock`]. Programs use its two aliases,
/// [`symmalloc_core::Allocator`](crate::Allocator) and [`SharedAllocator`](crate::SharedAllocator); code that supports
/// both is generic over the lock.
pub struct Allocator<B: Backend, L: Lock> {
    /// The environment of the heaps.
    context: Context<B, L>,
    config: Config,
    /// The allocator's number in the process, which identifies the entries that its observers read.
    number: u64,
    granularity_bytes: u64,
    /// Number of registered streams. Written under the lock of the clocks.
    streams: AtomicU32,
    /// The group of each registered stream. No other lock is taken under its lock.
    groups: L::Cell<Groups>,
    pools: Registry<PoolSlot<L>>,
    /// Destroyed pools. Its lock is the last in the lock order.
    destroyed: L::Cell<Destroyed<L>>,
    /// Pools that the program dropped and that were not destroyed when they were last tried, ascending. Held only while
    /// the list is read or changed.
    abandoned: L::Cell<Vec<PoolId>>,
    heaps: Registry<Arc<PoolHeap<L>>>,
    /// Hints for the look-up by address.
    hints: Option<HeapHints>,
    /// Usage over all heaps. Counted only if one thread drives the allocator; many threads would contend here.
    usage: L::Cell<TotalUsage>,
    /// Number of open statistics scopes. The lock is held while a scope opens or closes and while a heap is created, so
    /// that every heap has every open scope.
    open_scopes: L::Cell<usize>,
    /// The observers of all pools. The lock is held while a pool's observers change, while a pool is destroyed, and
    /// while a heap is created, so that every heap has its pool's observers and none is created in a destroyed pool.
    /// Taken before `open_scopes`, and both before any heap's lock.
    observers: L::Cell<Observers>,
    failure_callback: L::Cell<Option<FailureCallback<B, L>>>,
    /// The numbering of ops in symmetric pools, for agreement. Not part of any digest.
    program_order: Arc<ProgramOrder>,
    /// The gate through which recorded ops pass one at a time. Taken before every other lock.
    recorder: Recorder<L>,
    /// The state that the debuggers of all heaps share.
    debug: DebugState<L>,
}

impl<B: Backend> Allocator<B, Exclusive> {
    /// Creates an allocator for one thread, with the default pool and no streams. Takes no device memory yet.
    ///
    /// # Errors
    /// Returns an error if the backend's granularity is not a power of two from 512 bytes to 1 GiB.
    pub fn new(backend: B, config: Config) -> Result<Self, ConfigError> {
        Allocator::with_lock(backend, config)
    }
}

impl<B: Backend> Allocator<B, Shared> {
    /// Creates an allocator that many threads can use, with the default pool and no streams. Takes no device memory yet.
    ///
    /// # Errors
    /// Returns an error if the backend's granularity is not a power of two from 512 bytes to 1 GiB.
    pub fn new(backend: B, config: Config) -> Result<Self, ConfigError> {
        Allocator::with_lock(backend, config)
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Creates an allocator with the lock that the type names, in code that is generic over the lock. See
    /// [`Allocator::new`](crate::Allocator::new) and [`SharedAllocator::new`](crate::SharedAllocator::new).
    ///
    /// # Errors
    /// Returns an error if the backend's granularity is not a power of two from 512 bytes to 1 GiB, or if the default
    /// pool has a base whose addresses cannot be reserved.
    pub fn with_lock(backend: B, config: Config) -> Result<Self, ConfigError> {
        let granularity_bytes = backend.granularity_bytes();
        if !granularity_bytes.is_power_of_two() {
            return Err(ConfigError::NotAPowerOfTwo { key: "granularity", value: granularity_bytes });
        }
        in_range("granularity", granularity_bytes, UNIT_BYTES, 1 << 30)?;
        let can_alias = backend.can_alias();
        let number = next_number();
        let pools = Registry::new();
        let default_pool = config.default_pool().clone().that_works(can_alias);
        let addresses = reserve_addresses(&backend, PoolId::DEFAULT, &default_pool).map_err(Box::new)?;
        pools.push(|_| PoolSlot::new(PoolId::DEFAULT, default_pool, addresses));
        let allocator = Allocator {
            context: Context {
                backend,
                clocks: L::Cell::new(StreamClocks::default()),
                directory: L::Cell::new(SegmentDirectory::default()),
                budget: Budget::new(config.total_limit_bytes()),
            },
            number,
            granularity_bytes,
            streams: AtomicU32::new(0),
            groups: L::Cell::new(Groups::default()),
            pools,
            destroyed: L::Cell::new(Destroyed::new()),
            abandoned: L::Cell::new(Vec::new()),
            heaps: Registry::new(),
            hints: (config.pointer_lookup() != PointerLookup::Off).then(HeapHints::new),
            usage: L::Cell::new(TotalUsage::default()),
            open_scopes: L::Cell::new(0),
            observers: L::Cell::new(Observers::default()),
            failure_callback: L::Cell::new(None),
            program_order: Arc::new(ProgramOrder::new(L::IS_EXCLUSIVE)),
            recorder: Recorder::new(number),
            debug: DebugState::new(),
            config,
        };
        if allocator.context.backend.reports_blocks() || !allocator.config.default_pool().debug().is_off() {
            allocator.recorder.begin_debugging();
        }
        Ok(allocator)
    }

    /// Returns the backend.
    pub fn backend(&self) -> &B {
        &self.context.backend
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the current limit on the device memory of all pools together: [`Config::total_limit_bytes`], or the last
    /// value of [`set_total_limit_bytes`](Self::set_total_limit_bytes).
    pub fn total_limit_bytes(&self) -> Option<u64> {
        self.context.budget.limit_bytes()
    }

    /// Changes the limit on the device memory of all pools together. Memory that already exceeds it stays; the next
    /// request for more fails.
    ///
    /// # Determinism
    /// The limit is an input of every later decision, like the configuration (rule D4): set the same number of bytes at
    /// the same point of the program on every rank. Agreement compares it. No op of a trace represents the change, so
    /// it ends an active [recording], and a later recording begins with the new limit.
    pub fn set_total_limit_bytes(&self, limit_bytes: impl Into<Option<u64>>) {
        let limit_bytes = limit_bytes.into();
        let mut gate = self.gate();
        if limit_bytes != self.total_limit_bytes() {
            self.context.budget.set_limit_bytes(limit_bytes);
            gate.end(RecordingEnd::LimitChanged);
        }
    }

    /// Allocates `size_bytes` from a pool for work on a stream. Zero bytes take no memory and have address 0.
    ///
    /// Earlier work of other streams may still use the memory; `stream` waits for it on the device.
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing is allocated then.
    pub fn allocate(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<Allocation, AllocateError> {
        if self.recorder.is_watched() {
            return self.allocate_watched(Request { pool, stream, size_bytes }, None);
        }
        self.allocate_in_pool(Request { pool, stream, size_bytes }, None)
    }

    /// Allocates like [`allocate`](Self::allocate), and names the allocation for snapshots and reports.
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate).
    #[inline(never)]
    pub fn allocate_named(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        name: &str,
    ) -> Result<Allocation, AllocateError> {
        self.allocate_sharing_name(pool, stream, size_bytes, &name.into())
    }

    /// Allocates like [`allocate_named`](Self::allocate_named), but shares the name instead of copying it. Many allocations
    /// with one name then take its memory once.
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate).
    #[inline(never)]
    pub fn allocate_sharing_name(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        name: &Arc<str>,
    ) -> Result<Allocation, AllocateError> {
        if self.recorder.is_watched() {
            return self.allocate_watched(Request { pool, stream, size_bytes }, Some(name));
        }
        self.allocate_in_pool(Request { pool, stream, size_bytes }, Some(name))
    }

    /// Performs all steps of an allocation that is neither recorded nor debugged.
    #[inline(always)]
    fn allocate_in_pool(&self, request: Request, name: Option<&Arc<str>>) -> Result<Allocation, AllocateError> {
        let Request { stream, size_bytes, .. } = request;
        let (heap, mut locked) = self.lock_heap(request)?;
        let placed = locked.allocate(&self.context, stream, size_bytes, name);
        drop(locked);
        let allocation = match placed {
            Ok(allocation) => allocation,
            Err(shortage) => self.retry(request, heap, shortage, None, move |heap| {
                heap.allocate(&self.context, stream, size_bytes, name)
            })?,
        };
        if allocation.size_bytes > 0 {
            self.count_allocation(units(allocation.size_bytes), size_bytes);
        }
        Ok(allocation)
    }

    /// Returns the heap of a request, and locks it. Creates it at the first request.
    #[inline(always)]
    fn lock_heap(&self, request: Request) -> Result<(&HeapCell<L>, HeapGuard<'_, L>), AllocateError> {
        let Request { pool, stream, size_bytes } = request;
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let heap = match self.find_heap(pool, stream) {
            Some(heap) => heap,
            None => self.make_heap(pool, stream)?,
        };
        let mut locked = heap.lock();
        if locked.id().pool != pool {
            drop(locked);
            locked = self.remake_heap(pool, stream, heap)?;
        }
        Ok((heap, locked))
    }

    /// Frees an allocation. The memory can be reused at once: on the device, its next user waits for the uses so far.
    /// The call may block on another thread that holds the same heap's lock, never on the device.
    ///
    /// # Errors
    /// Returns an error if the handle is not live here, or the driver cannot fence the uses; the allocation is still live then.
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        if self.recorder.is_watched() {
            return self.free_watched(handle).map(drop);
        }
        let mut heap = self.heap_of(handle)?.lock();
        let freed = heap.free(&self.context, handle)?;
        self.finish_free(heap, freed, None);
        Ok(())
    }

    /// Frees the allocation that starts at an address; see [`free`](Self::free). This needs look-up by pointer, see
    /// [`PointerLookup`]. Returns the usable bytes: the request, rounded up.
    ///
    /// # Errors
    /// Returns an error if no live allocation starts there. See also [`free`](Self::free).
    pub fn free_at(&self, address: DeviceAddress) -> Result<u64, FreeError> {
        if self.recorder.is_watched() {
            return self.free_at_watched(address);
        }
        let (heap, freed) = self.at(address, |heap| heap.free_at(&self.context, address))?;
        let freed = freed?;
        self.finish_free(heap, freed, None);
        Ok(bytes(freed.size))
    }

    /// Completes a free: releases memory above the threshold, unlocks the heap, and updates the usage over all heaps.
    #[inline(always)]
    fn finish_free(&self, mut heap: HeapGuard<'_, L>, freed: Freed, gate: Option<&mut Gate<'_, L>>) {
        let failure = heap.release_above_threshold(&self.context);
        drop(heap);
        if L::IS_EXCLUSIVE && freed.size > 0 {
            self.usage.lock().free(freed.size, freed.requested_bytes);
        }
        if let (Some(error), Some(gate)) = (failure, gate) {
            gate.end(RecordingEnd::Driver(error));
        }
    }

    /// Records that work on `stream` uses the allocation as well (`record_stream` in PyTorch). The next user of the
    /// memory waits for that work on the device.
    ///
    /// # Errors
    /// Returns an error if the handle is not live here or the stream is unknown.
    pub fn record_use(&self, handle: Handle, stream: StreamId) -> Result<(), RecordUseError> {
        self.known_stream(stream)?;
        let mut gate = self.gate();
        let mut heap = self.heap_of(handle)?.lock();
        if is_nothing(handle) {
            heap.ledger().check_nothing(handle)?;
        } else {
            heap.record_use(handle, stream)?;
        }
        drop(heap);
        gate.note_use(handle, stream);
        Ok(())
    }

    /// Records a use of the allocation that starts at an address; see [`record_use`](Self::record_use).
    ///
    /// # Errors
    /// Returns an error if no live allocation starts there. See also [`record_use`](Self::record_use).
    pub fn record_use_at(&self, address: DeviceAddress, stream: StreamId) -> Result<(), RecordUseError> {
        let mut gate = self.gate();
        let (mut heap, handle) = self.at(address, |heap| heap.handle_at(address))?;
        self.known_stream(stream)?;
        heap.record_use(handle, stream)?;
        drop(heap);
        gate.note_use(handle, stream);
        Ok(())
    }

    /// Counts an allocation over all heaps.
    #[inline(always)]
    fn count_allocation(&self, size: Units, requested_bytes: u64) {
        if L::IS_EXCLUSIVE {
            self.usage.lock().allocate(size, requested_bytes);
        }
    }

    /// Acquires device memory until the heap of (pool, stream) has at least `size_bytes`, so that later allocations can
    /// use it.
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate); the heap's memory is then unchanged.
    pub fn reserve(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<(), ReserveError> {
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let mut gate = self.gate();
        let heap = self.heap_for(pool, stream)?;
        let span =
            tracing::debug_span!(target: "symmalloc", "heap.reserve", pool = pool.0, stream = stream.0, size_bytes);
        let _entered = span.enter();
        let outcome = heap.lock().reserve(&self.context, stream, size_bytes);
        if let Err(shortage) = outcome {
            self.retry(Request { pool, stream, size_bytes }, heap, shortage, Some(&mut gate), |heap| {
                heap.reserve(&self.context, stream, size_bytes)
            })?;
        }
        gate.note(Op::Reserve { pool, stream, size_bytes });
        Ok(())
    }

    /// Releases the free memory of a pool to the device, in (stream, sequence) order. Returns the released bytes. Blocks
    /// the host until the streams that used the memory have completed their work. Removed segments of an observed pool
    /// stay until the observers have acknowledged them. Reserved segments stay, and a quota is released. Of a destroyed pool, releases what the
    /// driver still holds.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown, or was destroyed and holds no memory. Returns an error if the driver
    /// fails; every heap is consistent then and the rest can be trimmed again.
    pub fn trim_pool(&self, pool: PoolId) -> Result<u64, TrimError> {
        let mut gate = self.gate();
        self.check_guards_of(pool);
        let released = match self.pool(pool) {
            Ok(entry) => self.release_free(entry, None),
            Err(unknown) => {
                let destroyed = self.listed_pools().find(|entry| entry.id() == pool).ok_or(unknown)?;
                // Not an op: in a replay, the driver released the memory when the pool was destroyed.
                return self.trim_destroyed(destroyed).into_result();
            }
        };
        gate.note(Op::Trim { pool: Some(pool) });
        gate.note_released(&released);
        released.into_result()
    }

    /// Releases the free memory of all pools to the device, as [`trim_pool`](Self::trim_pool) does for one, in pool
    /// order. Pools with a quota keep their memory. Also retries the release of destroyed pools whose memory the driver
    /// still holds.
    ///
    /// # Errors
    /// Returns an error if the driver fails; every heap is consistent then and the rest can be trimmed again.
    pub fn trim_all(&self) -> Result<u64, TrimError> {
        let mut gate = self.gate();
        self.check_guards(None);
        let pools = self.listed_pools().filter(|entry| !entry.config().has_quota() || entry.is_destroyed());
        let trims = pools.map(|entry| match entry.is_destroyed() {
            true => self.trim_destroyed(entry),
            false => self.release_free(entry, None),
        });
        let released = trims.fold(Released::default(), Released::plus);
        gate.note(Op::Trim { pool: None });
        gate.note_released(&released);
        released.into_result()
    }

    /// Retries the release of destroyed pools whose memory the driver still holds. Returns the released bytes. Not an op,
    /// because in a replay the driver released the memory when the pool was destroyed.
    ///
    /// # Errors
    /// Returns an error if the driver fails again.
    pub fn trim_destroyed_pools(&self) -> Result<u64, TrimError> {
        let _gate = self.gate();
        let trims = self.listed_pools().filter(|entry| entry.is_destroyed()).map(|entry| self.trim_destroyed(entry));
        trims.fold(Released::default(), Released::plus).into_result()
    }

    /// Releases the memory of a destroyed pool that the driver still holds.
    fn trim_destroyed(&self, entry: PoolRef<'_, L>) -> Released {
        let released = self.release_free(entry, None);
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        released.plus(self.remove_released(entry, &mut heaps))
    }

    /// Releases all of a pool's free memory, or `goal_bytes` of it.
    fn release_free(&self, entry: PoolRef<'_, L>, goal_bytes: Option<u64>) -> Released {
        let (mut released, mut left_bytes) = (Released::default(), goal_bytes);
        for heap in entry.heaps() {
            if left_bytes == Some(0) {
                break;
            }
            let mut heap = heap.lock();
            let mapped_bytes = heap.mapped_bytes();
            // In a heap without ops nothing is free, but it may hold memory of a failed rejoin that the driver has not
            // released.
            let has_history = heap.ledger().has_history();
            let outcome =
                if has_history { heap.trim(&self.context, left_bytes) } else { heap.release_retired(&self.context) };
            left_bytes = left_bytes.map(|left| left.saturating_sub(mapped_bytes - heap.mapped_bytes()));
            released = released.plus(outcome);
        }
        released
    }

    /// Drops the fences that have completed, according to the backend, so that their events can be reused. Returns the
    /// number of dropped events. Changes no placement and no digest (rule D3).
    ///
    /// # Errors
    /// Returns an error if the driver cannot answer.
    pub fn drop_completed_fences(&self) -> Result<u64, BackendError> {
        let mut dropped = 0;
        for heap in self.all_heaps() {
            dropped += heap.lock().drop_completed_fences(&self.context)?;
        }
        Ok(dropped)
    }

    /// Returns the heap of an allocation.
    #[inline(always)]
    fn heap_of(&self, handle: Handle) -> Result<&HeapCell<L>, HandleError> {
        let heap = self.heaps.get(handle.heap().index());
        heap.map(|heap| heap.cell()).ok_or(HandleError::Foreign { handle })
    }

    /// Returns the heap that serves a stream in a pool. Creates it at the first request.
    fn heap_for(&self, pool: PoolId, stream: StreamId) -> Result<&HeapCell<L>, UnknownError> {
        self.pool(pool)?;
        match self.find_heap(pool, stream) {
            Some(heap) if heap.lock().id().pool == pool => Ok(heap),
            _ => self.make_heap(pool, stream),
        }
    }

    /// Returns the locked heap that serves a stream, after replacing the heap of an earlier pool.
    #[cold]
    fn remake_heap<'a>(
        &'a self,
        pool: PoolId,
        stream: StreamId,
        heap: &'a HeapCell<L>,
    ) -> Result<HeapGuard<'a, L>, UnknownError> {
        loop {
            self.make_heap(pool, stream)?;
            let locked = heap.lock();
            if locked.id().pool == pool {
                return Ok(locked);
            }
        }
    }

    /// Returns the heap that serves a stream in a pool, if it exists. The heap of a destroyed pool has no memory and
    /// acquires none.
    #[inline(always)]
    fn find_heap(&self, pool: PoolId, stream: StreamId) -> Option<&HeapCell<L>> {
        let slot = self.pools.get(pool.index())?;
        if u32::from(stream.0) < self.stream_count() { slot.unchecked_heap(stream) } else { None }
    }

    #[cold]
    fn make_heap(&self, pool: PoolId, stream: StreamId) -> Result<&HeapCell<L>, UnknownError> {
        let observers = self.observers.lock();
        let open_scopes = self.open_scopes.lock();
        let entry = self.pool(pool)?;
        self.known_stream(stream)?;
        let step = entry.step().lock();
        let sleep = entry.sleep().lock();
        let group = self.heap_group(entry, stream);
        let make = |number| {
            let mut heap = self.empty_heap(entry, HeapId { pool, group }, number);
            heap.enable_debugging(self.debug.totals());
            observers.of_pool(pool).for_each(|observer| heap.observe(observer));
            if entry.config().symmetric() && self.config.history_ops() > 0 {
                heap.enable_journal(self.config.history_ops(), Arc::clone(&self.program_order));
            }
            if self.hints.is_some() {
                heap.enable_pointers();
            }
            (0..*open_scopes).for_each(|_| heap.open_stat_scope());
            if let Some(key) = *step {
                let _nothing_is_free = heap.begin_step(&self.context, key);
            }
            if !sleep.is_awake() {
                heap.fall_asleep();
            }
            heap
        };
        let cell = entry.make_heap(stream, group, || {
            let index = self.heaps.push(|index| Arc::new(PoolHeap::new(make(HeapNumber(index as u32)))));
            Arc::clone(self.heaps.get(index).expect("the heap was just created"))
        });
        let mut heap = cell.lock();
        if heap.id().pool != pool {
            // Handles of the earlier pool stay stale.
            let number = heap.number();
            heap.replace(make(number));
        }
        drop(heap);
        Ok(cell)
    }

    /// Returns the group of streams whose heap serves a stream in a pool.
    fn heap_group(&self, entry: PoolRef<'_, L>, stream: StreamId) -> StreamGroup {
        entry.config().streams().group_of(stream, &self.groups.lock())
    }

    /// Returns all heaps in (pool, stream) order.
    fn all_heaps(&self) -> impl Iterator<Item = &HeapCell<L>> {
        self.listed_pools().flat_map(PoolRef::heaps)
    }
}

impl<B: Backend + fmt::Debug, L: Lock> fmt::Debug for Allocator<B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator")
            .field("backend", &self.context.backend)
            .field("config", &self.config)
            .field("streams", &self.stream_count())
            .field("pools", &self.pool_count())
            .field("reserved_bytes", &self.context.budget.reserved_bytes())
            .finish_non_exhaustive()
    }
}

impl<B: Backend, L: Lock> Drop for Allocator<B, L> {
    /// Ends a recording and releases all memory, including live allocations. Memory that the driver fails to release
    /// exists until its context ends.
    fn drop(&mut self) {
        self.end_debugging();
        self.end_recording();
        self.all_heaps().for_each(|heap| heap.lock().abandon(&self.context));
        self.listed_pools().for_each(|entry| {
            self.end_sleep(&mut entry.sleep().lock());
            if let Err(error) = self.release_addresses(entry) {
                tracing::warn!(name: "pool.addresses_kept", target: "symmalloc", pool = entry.id().0, %error);
            }
        });
    }
}

/// Returns a number for a new allocator, unique in this process.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
