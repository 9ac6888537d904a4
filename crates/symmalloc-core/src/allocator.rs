//! The allocator: streams, pools and the way from a request to the heap that serves it.
//!
//! A placement is decided inside one heap, by the story told in `heap.rs`. This file finds the heap, checks what the
//! program passed, and walks the documented path when memory runs out:
//!
//! ```text
//!  1. best fit among the heap's free blocks                                             (heap.rs)
//!  2. obtain memory: fill a hole, grow, or a new segment, within the limits             (obtain.rs)
//!  3. a configured limit stood in the way, and the request would fit into it: give back free memory as
//!     `reclaim` says, try again                                                            (trim.rs)
//!  4. still short, or the driver refused: ask the failure callback, at most `retries_max` times; each yes tries again
//!  5. a typed error; the heap is as it was, and its digest says that it refused
//! ```
//!
//! Step 3 is the same on every rank because limits are configured bytes. When the driver refuses, which may happen on one
//! rank alone, nothing is given back behind the program's back: step 3 is skipped.

use crate::backend::{Backend, BackendError};
use crate::budget::Budget;
use crate::config::{Config, ConfigError, PoolConfig, Reclaim, StreamPolicy};
use crate::digest::{Mark, op_word};
use crate::errors::{
    AllocateError, FreeError, HandleError, OutOfMemory, OutOfMemoryCause, PoolError, RecordUseError, ReserveError,
    StreamError, TrimError, UnknownError,
};
use crate::fence::StreamClocks;
use crate::handle::{Allocation, Handle};
use crate::heap::{Heap, HeapIdentity, Shortage, Surroundings};
use crate::ids::{HeapId, Placement, PoolId, StreamId};
use crate::lock::{Exclusive, Lock, LockCell, Shared};
use crate::observers::Observers;
use crate::pointer_index::SegmentDirectory;
use crate::registry::Registry;
use crate::stats::{ScopedUsage, UsageStats};
use crate::trim::TrimGoal;
use crate::units::{SEGMENT_BYTES_MAX, UNIT_BYTES, bytes};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};

/// A caching device allocator over a backend, driven by one thread ([`Exclusive`]) or by many ([`Shared`]).
///
/// # Determinism
/// Every placement is a function of the configuration and of the ops on its heap so far. With one host thread a heap's
/// ops are in program order. With several, each heap must be driven in the same order on every rank: a stream per
/// thread, or threads that synchronise among themselves.
///
/// # Examples
/// ```
/// use symmalloc_core::{Allocator, Config, PoolId, sim::SimBackend};
///
/// let allocator: Allocator<_> = Allocator::new(SimBackend::builder().seed(7).build(), Config::default())?;
/// let stream = allocator.register_stream()?;
/// let a = allocator.allocate(PoolId::DEFAULT, stream, 3 << 20)?;
/// allocator.free(a.handle)?;
/// let b = allocator.allocate(PoolId::DEFAULT, stream, 1 << 20)?;
/// assert_eq!(b.placement, a.placement);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Allocator<B: Backend, L: Lock = Exclusive> {
    /// What heaps need from outside.
    pub(crate) around: Surroundings<B, L>,
    config: Config,
    /// Tells this allocator's handles from another's.
    owner: u16,
    granularity_bytes: u64,
    /// Number of registered streams. Written under the lock of `clocks`.
    streams: AtomicU32,
    pub(crate) pools: Registry<Box<Pool<L>>>,
    pub(crate) heaps: Registry<Arc<L::Cell<Heap>>>,
    /// Exact usage over all heaps, kept while [`is_tallied`](Self::is_tallied).
    pub(crate) usage: L::Cell<ScopedUsage>,
    pub(crate) open_scopes: L::Cell<usize>,
    pub(crate) observers: L::Cell<Observers>,
    failure_callback: L::Cell<Option<FailureCallback<B, L>>>,
}

/// An [`Allocator`] that many threads drive. Put it into an `Arc`.
pub type SharedAllocator<B> = Allocator<B, Shared>;

/// What a program is asked when an allocation is about to fail. Called without any lock; may free, trim and log.
type FailureCallback<B, L> = Arc<dyn Fn(&Allocator<B, L>, &OutOfMemory) -> Retry + Send + Sync>;

/// The answer of a failure callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was made available: try again.
    Again,
    /// Let the allocation fail.
    GiveUp,
}

#[derive(Debug)]
pub(crate) struct Pool<L: Lock> {
    pub(crate) config: PoolConfig,
    pub(crate) budget: Arc<Budget>,
    /// The heap of each stream, by stream; of all streams, at index 0, when they share.
    routes: Registry<Arc<L::Cell<Heap>>>,
    pub(crate) is_destroyed: AtomicBool,
}

impl<L: Lock> Pool<L> {
    fn new(config: PoolConfig) -> Self {
        Pool {
            budget: Arc::new(Budget::new(config.limit_bytes())),
            config,
            routes: Registry::new(),
            is_destroyed: AtomicBool::new(false),
        }
    }

    /// The pool's heaps in stream order.
    pub(crate) fn heaps(&self) -> impl Iterator<Item = &L::Cell<Heap>> {
        self.routes.iter().map(|(_, heap)| heap.as_ref())
    }

    /// Which route serves a stream.
    #[inline]
    fn route_index(&self, stream: StreamId) -> usize {
        match self.config.streams() {
            StreamPolicy::Separate => stream.index(),
            StreamPolicy::Shared => 0,
        }
    }
}

/// Numbers the allocators of this process. Goes into handles, never into a decision.
static NEXT_OWNER: AtomicU16 = AtomicU16::new(1);

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// An allocator over a backend, with the default pool and no streams. Takes no device memory yet.
    ///
    /// # Errors
    /// When the backend's granularity is not a power of two from 512 bytes to 1 GiB.
    pub fn new(backend: B, config: Config) -> Result<Self, ConfigError> {
        let granularity_bytes = backend.granularity_bytes();
        if !granularity_bytes.is_power_of_two() {
            return Err(ConfigError::NotAPowerOfTwo { key: "granularity", value: granularity_bytes });
        }
        if !(UNIT_BYTES..=1 << 30).contains(&granularity_bytes) {
            return Err(ConfigError::OutOfRange {
                key: "granularity",
                value: granularity_bytes,
                min: UNIT_BYTES,
                max: 1 << 30,
            });
        }
        let pools = Registry::new();
        pools.push(|_| Box::new(Pool::new(config.default_pool().clone())));
        Ok(Allocator {
            around: Surroundings {
                backend,
                clocks: L::Cell::new(StreamClocks::default()),
                directory: L::Cell::new(SegmentDirectory::default()),
                budget: Budget::new(config.limit_bytes()),
            },
            owner: NEXT_OWNER.fetch_add(1, Ordering::Relaxed),
            granularity_bytes,
            streams: AtomicU32::new(0),
            pools,
            heaps: Registry::new(),
            usage: L::Cell::new(ScopedUsage::default()),
            open_scopes: L::Cell::new(0),
            observers: L::Cell::new(Observers::default()),
            failure_callback: L::Cell::new(None),
            config,
        })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.around.backend
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Registers the program's next stream. Register streams in the same order on every rank.
    ///
    /// # Errors
    /// When all 65,535 ids are taken.
    pub fn register_stream(&self) -> Result<StreamId, StreamError> {
        let mut clocks = self.around.clocks.lock();
        let streams = self.streams.load(Ordering::Relaxed);
        let id = u16::try_from(streams).ok().filter(|id| *id < u16::MAX);
        let id = id.ok_or(StreamError::TooManyStreams { streams })?;
        clocks.register();
        self.streams.store(streams + 1, Ordering::Release);
        Ok(StreamId(id))
    }

    /// Number of registered streams.
    pub fn stream_count(&self) -> u32 {
        self.streams.load(Ordering::Acquire)
    }

    /// Makes the program's next pool. Create pools in the same order on every rank.
    ///
    /// # Errors
    /// None at present; reserved for policies that a backend cannot serve.
    pub fn create_pool(&self, config: PoolConfig) -> Result<PoolId, PoolError> {
        Ok(PoolId(self.pools.push(|_| Box::new(Pool::new(config))) as u32))
    }

    /// Number of pools created so far, the default pool and destroyed ones included.
    pub fn pool_count(&self) -> u32 {
        self.pools.len() as u32
    }

    /// Gives a pool up: all of its memory goes back to the device, reserved segments too. Its id is not reused.
    ///
    /// # Errors
    /// When it does not exist, is the default pool, is observed, or has live allocations; it is as it was then. When the
    /// driver fails, the pool is destroyed and the next [`trim`](Self::trim) of all pools tries again.
    pub fn destroy_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        let entry = self.pool(pool)?;
        if pool == PoolId::DEFAULT {
            return Err(PoolError::Default);
        }
        let observers = self.observers.lock().count(pool);
        if observers > 0 {
            return Err(PoolError::Observed { pool, observers });
        }
        // All heaps at once, so that no other thread allocates between the question and the answer.
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let live = heaps.iter().map(|heap| heap.usage.stats().all).fold(UsageStats::default(), UsageStats::plus);
        if live.allocations.current > 0 {
            return Err(PoolError::InUse {
                pool,
                allocations: live.allocations.current,
                allocated_bytes: live.allocated_bytes.current,
            });
        }
        entry.is_destroyed.store(true, Ordering::Release);
        let mut first_error = None;
        for heap in &mut heaps {
            heap.is_closed = true;
            heap.retire_all(&self.around);
            first_error = first_error.or(heap.release_retired(&self.around).1);
        }
        first_error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Allocates `size_bytes` from a pool for work on a stream. Zero bytes take no memory and have address 0.
    ///
    /// The memory may still be in use by earlier work of other streams; the stream has been told to wait for it.
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing is allocated then.
    #[inline(never)]
    pub fn allocate(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<Allocation, AllocateError> {
        if let Some(heap) = self.route(pool, stream)
            && (1..=SEGMENT_BYTES_MAX).contains(&size_bytes)
            && let Some(allocation) = heap.lock().allocate_at_once(stream, size_bytes)
        {
            self.tally(|usage| usage.allocate(allocation.size_bytes, size_bytes));
            return Ok(allocation);
        }
        self.allocate_by_all_means(pool, stream, size_bytes)
    }

    /// Whatever [`allocate`](Self::allocate) may need besides a free block: a heap, memory, waits, a refusal.
    #[inline(never)]
    fn allocate_by_all_means(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
    ) -> Result<Allocation, AllocateError> {
        let (entry, heap) = self.route_or_make(pool, stream)?;
        if size_bytes == 0 {
            return Ok(self.allocate_nothing(heap, stream));
        }
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let outcome = heap.lock().allocate(&self.around, stream, size_bytes);
        let allocation = match outcome {
            Ok(allocation) => allocation,
            Err(shortage) => {
                let request = Request { pool, stream, size_bytes };
                self.persist(entry, heap, request, *shortage, |heap| heap.allocate(&self.around, stream, size_bytes))?
            }
        };
        self.tally(|usage| usage.allocate(allocation.size_bytes, size_bytes));
        Ok(allocation)
    }

    /// Allocates as [`allocate`](Self::allocate) does and names the allocation, for snapshots and reports.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_named(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        name: &str,
    ) -> Result<Allocation, AllocateError> {
        let allocation = self.allocate(pool, stream, size_bytes)?;
        if let (1.., Ok(heap)) = (size_bytes, self.heap_of(allocation.handle)) {
            heap.lock().set_name(allocation.handle.slot, name);
        }
        Ok(allocation)
    }

    /// Frees an allocation: other work may use the memory at once, ordered behind this one's uses on the device.
    ///
    /// # Errors
    /// When the handle is not live here, or the driver cannot fence the uses; the allocation is still live then.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        if let Some(heap) = self.heaps.get(handle.heap.index())
            && let Some(freed) = heap.lock().free_at_once(handle)
        {
            self.tally(|usage| usage.free(freed.allocated_bytes, freed.requested_bytes));
            return Ok(());
        }
        self.free_by_all_means(handle)
    }

    /// Whatever [`free`](Self::free) may need besides the block: events, books, a release, a refusal.
    #[inline(never)]
    fn free_by_all_means(&self, handle: Handle) -> Result<(), FreeError> {
        let mut heap = self.heap_of(handle)?.lock();
        if handle.slot == NO_SLOT {
            return Ok(free_nothing(&mut heap, handle)?);
        }
        let freed = heap.free(&self.around, handle)?;
        heap.recycle_spent(&self.around);
        if let Some(threshold) = heap.config.release_threshold_bytes() {
            self.release_above(&mut heap, threshold);
        }
        drop(heap);
        self.tally(|usage| usage.free(freed.allocated_bytes, freed.requested_bytes));
        Ok(())
    }

    /// Tells that work on `stream`, too, uses the allocation (`record_stream` in PyTorch). Whoever takes the memory
    /// after the free waits for that work on the device.
    ///
    /// # Errors
    /// When the handle is not live here or the stream is unknown.
    pub fn record_use(&self, handle: Handle, stream: StreamId) -> Result<(), RecordUseError> {
        self.known_stream(stream)?;
        if handle.slot == NO_SLOT {
            return Ok(());
        }
        Ok(self.heap_of(handle)?.lock().record_use(handle, stream)?)
    }

    /// Tells that the program made `stream` wait, on the device, for all work given to `on` so far. Fences that this
    /// covers are not waited for again.
    ///
    /// # Errors
    /// When a stream is unknown.
    pub fn stream_waits(&self, stream: StreamId, on: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        self.known_stream(on)?;
        if stream != on {
            self.around.clocks.lock().waits_for_now(stream, on);
        }
        Ok(())
    }

    /// Tells that the host waited for all work given to `stream` so far.
    ///
    /// # Errors
    /// When the stream is unknown.
    pub fn stream_synchronized(&self, stream: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        self.around.clocks.lock().synchronized(stream);
        Ok(())
    }

    /// Brings the device memory of the heap of (pool, stream) to at least `size_bytes`, so that later allocations find it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); the heap holds what it held before then.
    pub fn reserve(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<(), ReserveError> {
        let (entry, heap) = self.route_or_make(pool, stream)?;
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let outcome = heap.lock().reserve(&self.around, stream, size_bytes);
        let Err(shortage) = outcome else { return Ok(()) };
        self.persist(entry, heap, Request { pool, stream, size_bytes }, *shortage, |heap| {
            heap.reserve(&self.around, stream, size_bytes)
        })
    }

    /// Gives the free memory of a pool, or of all pools, back to the device, in (pool, stream, sequence) order. Returns
    /// the bytes that are back. Waits on the host for streams that used the memory. Dead segments of an observed pool
    /// stay until the observers have acknowledged; reserved segments stay.
    ///
    /// # Errors
    /// When the pool is unknown, or the driver fails; every heap is consistent then and the rest can be trimmed again.
    pub fn trim(&self, pool: Option<PoolId>) -> Result<u64, TrimError> {
        if let Some(pool) = pool {
            return self.trim_pool(self.pool(pool)?, TrimGoal::Everything);
        }
        let mut released = Ok(0);
        for (_, entry) in self.pools.iter() {
            released = sum_trims(released, self.trim_pool(entry, TrimGoal::Everything));
        }
        released
    }

    fn trim_pool(&self, entry: &Pool<L>, goal: TrimGoal) -> Result<u64, TrimError> {
        let mut released = Ok(0);
        for heap in entry.heaps() {
            let outcome = heap.lock().trim(&self.around, goal);
            released = sum_trims(
                released,
                outcome.map_err(|failure| TrimError::Backend {
                    released_bytes: failure.released_bytes,
                    error: failure.error,
                }),
            );
        }
        released
    }

    /// Asks the backend which fences are over and drops those, so that their events can be reused. Returns how many
    /// events were dropped. No placement and no digest notices (rule D3).
    ///
    /// # Errors
    /// When the driver cannot say.
    pub fn drop_completed_fences(&self) -> Result<u64, BackendError> {
        let mut dropped = 0;
        for (_, entry) in self.pools.iter() {
            for heap in entry.heaps() {
                dropped += heap.lock().drop_completed_fences(&self.around)?;
            }
        }
        Ok(dropped)
    }

    /// Sets what is asked when an allocation is about to fail. It is called without any lock and may use the allocator;
    /// an allocation inside it that fails asks it again. For ranks to stay alike it must decide from the program alone.
    pub fn set_failure_callback(&self, callback: impl Fn(&Self, &OutOfMemory) -> Retry + Send + Sync + 'static) {
        *self.failure_callback.lock() = Some(Arc::new(callback));
    }

    /// The out-of-memory path: steps 3 to 5 of the [module documentation](self).
    #[cold]
    fn persist<T>(
        &self,
        entry: &Pool<L>,
        heap: &L::Cell<Heap>,
        request: Request,
        mut shortage: Shortage,
        attempt: impl Fn(&mut Heap) -> Result<T, Box<Shortage>>,
    ) -> Result<T, AllocateError> {
        let mut retries = 0;
        let mut has_reclaimed = false;
        loop {
            let (missing, cause) = match shortage {
                Shortage::Limit { met, missing } => {
                    let (scope, limit_bytes) = (met.scope, met.limit_bytes);
                    (missing, OutOfMemoryCause::Limit { scope, limit_bytes })
                }
                Shortage::SegmentFull { segment_bytes, missing } => {
                    (missing, OutOfMemoryCause::SegmentFull { segment_bytes })
                }
                Shortage::Driver { error, missing } => (missing, OutOfMemoryCause::Driver(error)),
                Shortage::Fence(error) => return Err(AllocateError::Fence { stream: request.stream, error }),
                Shortage::Closed => return Err(UnknownError::DestroyedPool { pool: request.pool }.into()),
            };
            // What is larger than the limit itself does not fit into an empty pool either: nothing is given back in vain.
            let can_help =
                matches!(cause, OutOfMemoryCause::Limit { limit_bytes, .. } if bytes(missing) <= limit_bytes);
            if can_help && !has_reclaimed {
                has_reclaimed = true;
                self.reclaim(entry, heap, TrimGoal::AtLeast(bytes(missing)));
            } else {
                let error = self.out_of_memory(entry, heap, request, bytes(missing), cause);
                let callback = self.failure_callback.lock().clone();
                let may_retry = retries < self.config.retries_max();
                match callback.filter(|_| may_retry).map(|callback| callback(self, &error)) {
                    Some(Retry::Again) => retries += 1,
                    Some(Retry::GiveUp) | None => return Err(self.refuse(heap, request, error)),
                }
            }
            match attempt(&mut heap.lock()) {
                Ok(done) => return Ok(done),
                Err(again) => shortage = *again,
            }
        }
    }

    /// Step 3: gives back what `reclaim` allows. What the driver then fails to take back counts as still reserved.
    fn reclaim(&self, entry: &Pool<L>, heap: &L::Cell<Heap>, goal: TrimGoal) {
        let failed = match entry.config.reclaim() {
            Reclaim::Never => None,
            Reclaim::Heap => heap.lock().trim(&self.around, goal).err().map(|failure| failure.error),
            Reclaim::Pool => self.trim_pool(entry, goal).err().and_then(|error| match error {
                TrimError::Backend { error, .. } => Some(error),
                TrimError::Unknown(_) => None,
            }),
        };
        if let Some(error) = failed {
            tracing::warn!(name: "trim.failed", target: "symmalloc", %error);
        }
    }

    fn out_of_memory(
        &self,
        entry: &Pool<L>,
        heap: &L::Cell<Heap>,
        request: Request,
        missing_bytes: u64,
        cause: OutOfMemoryCause,
    ) -> OutOfMemory {
        let allocated_bytes = entry.heaps().map(|heap| heap.lock().usage.stats().all.allocated_bytes.current).sum();
        OutOfMemory {
            pool: request.pool,
            stream: request.stream,
            requested_bytes: request.size_bytes,
            missing_bytes,
            reserved_bytes: entry.budget.reserved_bytes(),
            allocated_bytes,
            largest_free_bytes: heap.lock().largest_free_bytes(),
            cause,
        }
    }

    /// Step 5.
    fn refuse(&self, heap: &L::Cell<Heap>, request: Request, error: OutOfMemory) -> AllocateError {
        let mark = match error.cause {
            OutOfMemoryCause::Limit { .. } => Mark::RefusedByLimit,
            OutOfMemoryCause::SegmentFull { .. } => Mark::RefusedBySegment,
            OutOfMemoryCause::Driver(_) => Mark::RefusedByDriver,
        };
        heap.lock().digest.fold(op_word(mark, request.stream, request.size_bytes), 0);
        tracing::warn!(
            name: "memory.refused",
            target: "symmalloc",
            pool = request.pool.0,
            stream = request.stream.0,
            requested_bytes = request.size_bytes,
            reserved_bytes = error.reserved_bytes,
            allocated_bytes = error.allocated_bytes,
            cause = ?error.cause,
        );
        AllocateError::OutOfMemory(Box::new(error))
    }

    /// The configured trigger of rule D5: a heap that holds more free bytes than the threshold gives them back.
    #[cold]
    fn release_above(&self, heap: &mut Heap, threshold_bytes: u64) {
        let free_bytes = heap.mapped - heap.usage.stats().all.allocated_bytes.current;
        if free_bytes <= threshold_bytes {
            return;
        }
        if let Err(failure) = heap.trim(&self.around, TrimGoal::Everything) {
            tracing::warn!(name: "trim.failed", target: "symmalloc", error = %failure.error);
        }
    }

    #[cold]
    fn allocate_nothing(&self, heap: &L::Cell<Heap>, stream: StreamId) -> Allocation {
        let mut heap = heap.lock();
        heap.digest.fold(op_word(Mark::AllocateNothing, stream, 0), 0);
        Allocation {
            handle: Handle { heap: heap.id, slot: NO_SLOT, tag: heap.tags.next() },
            address: crate::backend::DeviceAddress(0),
            placement: Placement::NOWHERE,
            size_bytes: 0,
        }
    }

    pub(crate) fn pool(&self, pool: PoolId) -> Result<&Pool<L>, UnknownError> {
        let Some(entry) = self.pools.get(pool.index()) else { return Err(self.unknown_pool(pool)) };
        if entry.is_destroyed.load(Ordering::Acquire) {
            return Err(UnknownError::DestroyedPool { pool });
        }
        Ok(entry)
    }

    #[inline]
    fn known_stream(&self, stream: StreamId) -> Result<(), UnknownError> {
        let streams = self.streams.load(Ordering::Acquire);
        if u32::from(stream.0) < streams { Ok(()) } else { Err(UnknownError::Stream { stream, streams }) }
    }

    /// Whether usage over all heaps is counted beside each heap's own: with one heap they are the same, and several
    /// threads would meet at the counters.
    #[inline]
    pub(crate) fn is_tallied(&self) -> bool {
        L::IS_EXCLUSIVE && self.heaps.len() > 1
    }

    #[inline(always)]
    fn tally(&self, count: impl FnOnce(&mut ScopedUsage)) {
        if self.is_tallied() {
            count(&mut self.usage.lock());
        }
    }

    /// A second heap comes to the first: from now on their sum has peaks of its own.
    fn start_tally(&self) {
        if let Some(first) = self.heaps.get(0).filter(|_| L::IS_EXCLUSIVE) {
            *self.usage.lock() = first.lock().usage.all().clone();
        }
    }

    pub(crate) fn heap_of(&self, handle: Handle) -> Result<&L::Cell<Heap>, HandleError> {
        self.heaps.get(handle.heap.index()).map(Arc::as_ref).ok_or(HandleError::Foreign { handle })
    }

    /// The heap that serves a stream in a pool, if it was made already.
    #[inline(always)]
    fn route(&self, pool: PoolId, stream: StreamId) -> Option<&L::Cell<Heap>> {
        let entry = self.pools.get(pool.index())?;
        let heap = match entry.config.streams() {
            // A stream has a heap only if it is registered.
            StreamPolicy::Separate => entry.routes.get(stream.index()),
            StreamPolicy::Shared => entry.routes.get(0).filter(|_| self.known_stream(stream).is_ok()),
        };
        heap.map(Arc::as_ref)
    }

    /// The heap that serves a stream in a pool, made at the first request.
    fn route_or_make(&self, pool: PoolId, stream: StreamId) -> Result<(&Pool<L>, &L::Cell<Heap>), UnknownError> {
        let Some(entry) = self.pools.get(pool.index()) else { return Err(self.unknown_pool(pool)) };
        self.known_stream(stream)?;
        match entry.routes.get(entry.route_index(stream)) {
            Some(heap) => Ok((entry, heap)),
            None => Ok((entry, self.make_heap(pool, stream)?)),
        }
    }

    /// The heap of (pool, stream) if it was made already.
    pub(crate) fn existing_heap<'a>(&self, entry: &'a Pool<L>, stream: StreamId) -> Option<&'a L::Cell<Heap>> {
        entry.routes.get(entry.route_index(stream)).map(Arc::as_ref)
    }

    #[cold]
    fn make_heap(&self, pool: PoolId, stream: StreamId) -> Result<&L::Cell<Heap>, UnknownError> {
        let entry = self.pool(pool)?;
        let heap = entry.routes.get_or_make(entry.route_index(stream), || {
            let make = |index| {
                let identity = HeapIdentity {
                    id: HeapId(index as u32),
                    pool,
                    stream: (entry.config.streams() == StreamPolicy::Separate).then_some(stream),
                    owner: self.owner,
                };
                let budget = Arc::clone(&entry.budget);
                let lookup = self.config.pointer_lookup();
                let mut heap = Heap::new(identity, entry.config.clone(), budget, self.granularity_bytes, lookup);
                (0..*self.open_scopes.lock()).for_each(|_| heap.usage.open_scope());
                self.observers.lock().of_pool(pool).for_each(|observer| heap.log.observe(observer));
                Arc::new(L::Cell::new(heap))
            };
            let index = self.heaps.push(make);
            if index == 1 {
                self.start_tally();
            }
            Arc::clone(self.heaps.get(index).expect("it was just made"))
        });
        Ok(heap)
    }

    #[cold]
    fn unknown_pool(&self, pool: PoolId) -> UnknownError {
        UnknownError::Pool { pool, pools: self.pool_count() }
    }
}

impl<B: Backend + fmt::Debug, L: Lock> fmt::Debug for Allocator<B, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator")
            .field("backend", &self.around.backend)
            .field("config", &self.config)
            .field("streams", &self.stream_count())
            .field("pools", &self.pool_count())
            .field("reserved_bytes", &self.around.budget.reserved_bytes())
            .finish_non_exhaustive()
    }
}

impl<B: Backend, L: Lock> Drop for Allocator<B, L> {
    /// Gives all memory back, live allocations included; what the driver refuses is left to the end of its context.
    fn drop(&mut self) {
        for (_, entry) in self.pools.iter() {
            entry.heaps().for_each(|heap| heap.lock().abandon(&self.around));
        }
    }
}

/// What was asked for, for errors and digests.
#[derive(Clone, Copy)]
struct Request {
    pool: PoolId,
    stream: StreamId,
    size_bytes: u64,
}

/// The slot in handles of allocations of zero bytes.
const NO_SLOT: u32 = u32::MAX;

#[cold]
fn free_nothing(heap: &mut Heap, handle: Handle) -> Result<(), HandleError> {
    if !heap.tags.gave(handle.tag) {
        return Err(HandleError::Foreign { handle });
    }
    heap.digest.fold(op_word(Mark::FreeNothing, StreamId(0), 0), 0);
    Ok(())
}

/// Adds up what several trims gave back; the first failure stays, with all bytes.
fn sum_trims(one: Result<u64, TrimError>, other: Result<u64, TrimError>) -> Result<u64, TrimError> {
    let add = |error: TrimError, bytes: u64| match error {
        TrimError::Backend { released_bytes, error } => {
            TrimError::Backend { released_bytes: released_bytes + bytes, error }
        }
        unknown @ TrimError::Unknown(_) => unknown,
    };
    match (one, other) {
        (Ok(one), Ok(other)) => Ok(one + other),
        (Err(error), Ok(bytes)) | (Ok(bytes), Err(error)) => Err(add(error, bytes)),
        (Err(first), Err(second)) => {
            let bytes = if let TrimError::Backend { released_bytes, .. } = second { released_bytes } else { 0 };
            Err(add(first, bytes))
        }
    }
}
