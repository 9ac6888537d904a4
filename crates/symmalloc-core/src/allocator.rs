//! The allocator: what a program calls.
//!
//! A placement is decided inside one heap, by the story told in `heap.rs`. An allocation takes these steps, and most end
//! with the first:
//!
//! ```text
//!  1. best fit among the heap's free blocks                                             (heap.rs)
//!  2. obtain memory: fill a hole, grow, or a new segment, within the limits             (obtain.rs)
//!  3. a configured limit stood in the way, and the request would fit into it: give back free memory as
//!     `reclaim` says, try again, until it is served or no more is free                     (trim.rs)
//!  4. still short, or the driver refused: ask the failure callback, at most `retries_max` times; each yes tries again
//!  5. a typed error; the heap is as it was, and its digest says that it refused
//! ```
//!
//! Step 3 is the same on every rank because limits are configured bytes. When the driver refuses, which may happen on one
//! rank alone, nothing is given back behind the program's back: step 3 is skipped.

use crate::address_map::AddressMap;
use crate::backend::{Backend, BackendError};
use crate::budget::Budget;
use crate::config::{Config, ConfigError, PointerLookup};
use crate::digest::{Mark, op_word};
use crate::errors::{AllocateError, RecordUseError, ReserveError, StreamError, TrimError, UnknownError};
use crate::handle::{Allocation, Handle};
use crate::heap::{Heap, Surroundings};
use crate::held::{HeapCell, HeapRef};
use crate::ids::{Placement, PoolId, StreamId};
use crate::journal::ProgramOrder;
use crate::lock::{Exclusive, Lock, LockCell, Shared};
use crate::observers::Observers;
use crate::op::Op;
use crate::out_of_memory::{FailureCallback, Request};
use crate::peak_shares::SharedPeak;
use crate::pointer_index::SegmentDirectory;
use crate::pool::Pool;
use crate::recording::Recorder;
use crate::registry::Registry;
use crate::routes::Route;
use crate::size_rules::ByRule;
use crate::stream_clocks::StreamClocks;
use crate::sync::AtomicU32;
use crate::trim::TrimGoal;
use crate::units::{SEGMENT_BYTES_MAX, UNIT_BYTES};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

/// A caching device allocator over a backend, driven by one thread ([`Exclusive`]) or by many ([`Shared`]).
///
/// # Determinism
/// Every placement is a function of the configuration and of the ops on its heap so far. With one host thread a heap's
/// ops are in program order. With several, each heap must be driven in the same order on every rank: a stream per
/// thread, or threads that synchronise among themselves.
///
/// # Examples
/// ```
/// use symmalloc_core::{Allocator, Config, PoolId};
/// use symmalloc_sim::SimBackend;
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
    pub(crate) owner: u16,
    pub(crate) granularity_bytes: u64,
    /// Number of registered streams. Written under the lock of `clocks`.
    pub(crate) streams: AtomicU32,
    pub(crate) pools: Registry<Box<Pool<L>>>,
    pub(crate) heaps: Registry<L::HeapRef>,
    /// Where allocations were found by their addresses.
    pub(crate) address_map: AddressMap,
    /// The most bytes that all heaps together held, for allocations by pointer. Locked before any heap.
    pub(crate) shared_peak: Mutex<SharedPeak>,
    /// Usage over all heaps, counted while [`is_tallied`](Self::is_tallied).
    pub(crate) tally: L::Tally,
    /// Held while a scope is opened or closed, and while a heap is made: every heap has every open scope.
    pub(crate) open_scopes: L::Cell<usize>,
    /// Held while a pool's observers change, while a pool is destroyed, and while a heap is made: every heap has its pool's
    /// observers, and none is made in a destroyed pool. Taken before `open_scopes`, and both before any heap.
    pub(crate) observers: L::Cell<Observers>,
    pub(crate) failure_callback: L::Cell<Option<FailureCallback<B, L>>>,
    /// Numbers the ops of symmetric pools, for agreement. In no digest.
    pub(crate) program_order: Arc<ProgramOrder>,
    /// The gate that recorded ops pass one at a time. Taken before every other lock.
    pub(crate) recorder: L::Cell<Recorder>,
    /// Whether new heaps are recorded. Changes behind the gate, with `observers` and `open_scopes` held.
    pub(crate) is_recording: AtomicBool,
}

/// An [`Allocator`] that many threads drive. Put it into an `Arc`.
pub type SharedAllocator<B> = Allocator<B, Shared>;

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
            address_map: AddressMap::new(config.pointer_lookup() != PointerLookup::Off),
            shared_peak: Mutex::default(),
            tally: L::Tally::default(),
            open_scopes: L::Cell::new(0),
            observers: L::Cell::new(Observers::default()),
            failure_callback: L::Cell::new(None),
            program_order: Arc::new(ProgramOrder::new(L::IS_EXCLUSIVE)),
            recorder: L::Cell::new(Recorder::Off),
            is_recording: AtomicBool::new(false),
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

    /// The most device memory all pools together may hold now: [`Config::limit_bytes`], or what
    /// [`set_limit_bytes`](Self::set_limit_bytes) said since.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.around.budget.limit_bytes()
    }

    /// Changes the most device memory all pools together may hold. What is held beyond it stays; the next request for more
    /// is refused.
    ///
    /// # Determinism
    /// The limit is an input of every later decision, like the configuration (rule D4): set the same number of bytes at the
    /// same point of the program on every rank. Agreement compares it. No op of a trace says it: a change
    /// ends a [recording](crate::recording) that is on, and one that begins later has the new limit.
    pub fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        let mut tape = self.tape();
        if limit_bytes != self.limit_bytes() {
            self.around.budget.set_limit_bytes(limit_bytes);
            tape.note_limit();
        }
    }

    /// Registers the program's next stream. Register streams in the same order on every rank.
    ///
    /// # Errors
    /// When all 65,535 ids are taken.
    pub fn register_stream(&self) -> Result<StreamId, StreamError> {
        let mut tape = self.tape();
        let mut clocks = self.around.clocks.lock();
        let streams = self.streams.load(Ordering::Relaxed);
        let id = u16::try_from(streams).ok().filter(|id| *id < u16::MAX);
        let id = id.ok_or(StreamError::TooManyStreams { streams })?;
        clocks.register();
        self.streams.store(streams + 1, Ordering::Release);
        drop(clocks);
        tape.note(Op::RegisterStream { stream: StreamId(id) });
        tracing::debug!(name: "stream.registered", target: "symmalloc", stream = id);
        Ok(StreamId(id))
    }

    /// Number of registered streams.
    pub fn stream_count(&self) -> u32 {
        self.streams.load(Ordering::Acquire)
    }

    /// Allocates `size_bytes` from a pool for work on a stream. Zero bytes take no memory and have address 0.
    ///
    /// The memory may still be in use by earlier work of other streams; the stream has been told to wait for it.
    ///
    /// # Errors
    /// See [`AllocateError`]; nothing is allocated then.
    #[inline(never)]
    pub fn allocate(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<Allocation, AllocateError> {
        match self.route(pool, stream) {
            Some(heap) => Route { allocator: self, heap, pool, stream }.allocate(size_bytes),
            None => self.allocate_by_all_means(pool, stream, size_bytes),
        }
    }

    /// Allocates from a heap that may have to be made, or nothing, or refuses.
    #[cold]
    #[inline(never)]
    pub(crate) fn allocate_by_all_means(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
    ) -> Result<Allocation, AllocateError> {
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let (_, heap) = self.route_or_make(pool, stream)?;
        let route = Route { allocator: self, heap, pool, stream };
        let mut guard = heap.lock();
        if guard.is_recorded {
            return route.allocate_recorded(guard, size_bytes);
        }
        if size_bytes == 0 {
            return Ok(allocate_nothing(&mut guard, stream)?);
        }
        route.allocate_by::<ByRule>(guard, size_bytes)
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
        if self.is_recording() && size_bytes <= SEGMENT_BYTES_MAX {
            let (_, heap) = self.route_or_make(pool, stream)?;
            return Route { allocator: self, heap, pool, stream }.allocate_behind_gate(size_bytes, Some(name));
        }
        let allocation = self.allocate(pool, stream, size_bytes)?;
        if let (1.., Ok(heap)) = (size_bytes, self.heap_of(allocation.handle)) {
            heap.lock().set_name(allocation.handle.slot(), name);
        }
        Ok(allocation)
    }

    /// Tells that work on `stream`, too, uses the allocation (`record_stream` in PyTorch). Whoever takes the memory
    /// after the free waits for that work on the device.
    ///
    /// # Errors
    /// When the handle is not live here or the stream is unknown.
    pub fn record_use(&self, handle: Handle, stream: StreamId) -> Result<(), RecordUseError> {
        let heap = self.record_use_in(handle, stream)?;
        if !L::IS_EXCLUSIVE
            && let Some(heap) = heap
        {
            // Who frees it may not know of the use, and must not leave the free to somebody who comes later: the stream may
            // be part of a capture by then, and have no moment any more that an event could stand for.
            heap.mail.close();
        }
        Ok(())
    }

    /// As [`record_use`](Self::record_use), by who frees the allocation and then does not leave it to
    /// [`Entrance::free`](crate::Entrance::free).
    ///
    /// # Errors
    /// As [`record_use`](Self::record_use).
    pub fn record_use_by_owner(&self, handle: Handle, stream: StreamId) -> Result<(), RecordUseError> {
        self.record_use_in(handle, stream).map(|_heap| ())
    }

    /// Notes a use. The heap that the allocation lies in, if it takes memory.
    #[inline(always)]
    fn record_use_in(&self, handle: Handle, stream: StreamId) -> Result<Option<&HeapCell<L>>, RecordUseError> {
        self.known_stream(stream)?;
        if handle.slot() == NO_SLOT {
            self.record_use_rarely(handle, stream)?;
            return Ok(None);
        }
        let cell = self.heap_of(handle)?;
        let mut heap = cell.lock();
        if heap.is_recorded {
            drop(heap);
            self.record_use_rarely(handle, stream)?;
        } else {
            heap.record_use(handle, stream)?;
        }
        Ok(Some(cell))
    }

    /// Of an allocation of zero bytes, or whose heap is recorded: the gate comes before the heap.
    #[cold]
    #[inline(never)]
    fn record_use_rarely(&self, handle: Handle, stream: StreamId) -> Result<(), RecordUseError> {
        let mut tape = self.tape();
        if handle.slot() != NO_SLOT {
            self.heap_of(handle)?.lock().record_use(handle, stream)?;
        }
        tape.note_use(handle, stream);
        Ok(())
    }

    /// Tells that the program made `stream` wait, on the device, for all work given to `on` so far. Fences that this
    /// covers are not waited for again. Call it before another thread gives more work to `on`, or fences of that work
    /// would be taken for covered too.
    ///
    /// # Errors
    /// When a stream is unknown.
    pub fn stream_waits(&self, stream: StreamId, on: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        self.known_stream(on)?;
        let mut tape = self.tape();
        if stream != on {
            self.around.clocks.lock().waits_for_all(stream, on);
        }
        tape.note(Op::Wait { stream, on });
        Ok(())
    }

    /// Tells that the host waited for all work given to `stream` so far. Call it before another thread gives more work to
    /// the stream.
    ///
    /// # Errors
    /// When the stream is unknown.
    pub fn stream_synchronized(&self, stream: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        let mut tape = self.tape();
        let mut clocks = self.around.clocks.lock();
        let moment = clocks.moment(stream);
        clocks.synchronized(&moment);
        drop(clocks);
        tape.note(Op::Synchronize { stream });
        Ok(())
    }

    /// Brings the device memory of the heap of (pool, stream) to at least `size_bytes`, so that later allocations find it.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); the heap holds what it held before then.
    pub fn reserve(&self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Result<(), ReserveError> {
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(AllocateError::TooLarge { requested_bytes: size_bytes });
        }
        let (entry, heap) = self.route_or_make(pool, stream)?;
        let span =
            tracing::debug_span!(target: "symmalloc", "heap.reserve", pool = pool.0, stream = stream.0, size_bytes);
        let _entered = span.enter();
        let mut tape = self.tape();
        let outcome = heap.lock().reserve(&self.around, stream, size_bytes);
        if let Err(shortage) = outcome {
            self.persist(entry, heap, Request { pool, stream, size_bytes }, *shortage, &mut tape, |heap| {
                heap.reserve(&self.around, stream, size_bytes)
            })?;
        }
        tape.note(Op::Reserve { pool, stream, size_bytes });
        Ok(())
    }

    /// Gives the free memory of a pool, or of all pools, back to the device, in (pool, stream, sequence) order. Returns
    /// the bytes that are back. Waits on the host for streams that used the memory. Dead segments of an observed pool
    /// stay until the observers have acknowledged; reserved segments stay.
    ///
    /// # Errors
    /// When the pool is unknown, or the driver fails; every heap is consistent then and the rest can be trimmed again.
    pub fn trim(&self, pool: Option<PoolId>) -> Result<u64, TrimError> {
        let mut tape = self.tape();
        let released = match pool {
            Some(pool) => self.trim_pool(self.pool(pool)?, TrimGoal::Everything),
            None => {
                let trims = self.pools.iter().map(|(_, entry)| self.trim_pool(entry, TrimGoal::Everything));
                trims.fold(Ok(0), sum_trims)
            }
        };
        tape.note(Op::Trim { pool });
        tape.note_failed_trim(&released);
        released
    }

    pub(crate) fn trim_pool(&self, entry: &Pool<L>, goal: TrimGoal) -> Result<u64, TrimError> {
        let (mut released, mut left) = (Ok(0), goal);
        for heap in entry.heaps() {
            if left == TrimGoal::AtLeast(0) {
                break;
            }
            let mut heap = heap.lock();
            if !heap.has_history() {
                continue;
            }
            let mapped = heap.mapped;
            let outcome = heap.trim(&self.around, left);
            left = left.less(mapped - heap.mapped);
            released = sum_trims(released, outcome.map_err(TrimError::from));
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
    /// Ends a recording, and gives all memory back, live allocations included; what the driver refuses is left to the end of
    /// its context.
    fn drop(&mut self) {
        self.end_recording();
        for (_, entry) in self.pools.iter() {
            entry.heaps().for_each(|heap| {
                heap.mail.close();
                heap.lock().abandon(&self.around);
            });
        }
        self.heaps.iter().for_each(|(_, heap)| heap.clone().end());
    }
}

/// The slot in handles of allocations of zero bytes.
pub(crate) const NO_SLOT: u32 = u32::MAX;

#[cold]
pub(crate) fn allocate_nothing(heap: &mut Heap, stream: StreamId) -> Result<Allocation, UnknownError> {
    if heap.is_closed() {
        return Err(UnknownError::DestroyedPool { pool: heap.pool });
    }
    heap.fold(op_word(Mark::AllocateNothing, stream, 0), 0);
    Ok(Allocation {
        handle: Handle::new(heap.id, NO_SLOT, heap.tags.next()),
        address: crate::backend::DeviceAddress(0),
        placement: Placement::NOWHERE,
        size_bytes: 0,
    })
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
