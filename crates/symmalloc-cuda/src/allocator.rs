//! The allocators of this crate: the core's shared allocator, with CUDA's streams for stream ids.
//!
//! ```text
//!  CudaAllocator ─┐                       ┌─ CoreAllocator<B>     placements, fences, limits: symmalloc-core
//!  CudaAllocator ─┼─ Arc ── State<B> ─────┼─ streams              Arc<CudaStream> ↔ StreamId, in registration order
//!  DeviceBuffer  ─┘ (through its lane)    ├─ abandoned pools      destroyed when that can be done without blocking a Drop
//!                                         └─ drop errors
//! ```

use crate::backend::{CudaBackend, CudaMemory};
use crate::capture::CaptureId;
use crate::device::CudaDevice;
use crate::error::{CudaError, DriverError};
use crate::lane::{Lane, Place};
use crate::pool::{Lease, Pool};
use crate::spares::CoreAllocator;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstream;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use symmalloc_core::backend::BackendError;
use symmalloc_core::config::{Config, PoolConfig, SegmentPolicy};
use symmalloc_core::errors::{AllocateError, FreeError, OutOfMemory, PoolError};
use symmalloc_core::report::{LeakReport, MemoryStats, Snapshot};
use symmalloc_core::{Allocation, Digest, Handle, PoolId, Retry, StreamId};

/// A caching allocator of one device (or of pinned memory) that threads share. Cloning it is cheap and gives another name
/// of the same allocator.
///
/// # Examples
/// ```no_run
/// use symmalloc_core::Config;
/// use symmalloc_cuda::{CudaAllocator, CudaDevice};
///
/// let device = CudaDevice::new(0)?;
/// let allocator = CudaAllocator::new(&device, Config::default())?;
/// let stream = device.context().new_stream()?;
/// let mut zeros = allocator.alloc_zeroed::<f32>(&stream, 1 << 20)?;
/// stream.memcpy_htod(&[1.0_f32; 1 << 10], &mut zeros.slice_mut(0..1 << 10))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CachingAllocator<B: CudaMemory> {
    pub(crate) state: Arc<State<B>>,
    /// Its pool, with the lanes that allocations take, and what keeps the pool from being destroyed.
    lease: Arc<Lease<B>>,
}

/// The allocator of a device's memory.
pub type CudaAllocator = CachingAllocator<CudaBackend>;

impl<B: CudaMemory> Clone for CachingAllocator<B> {
    fn clone(&self) -> Self {
        CachingAllocator { state: Arc::clone(&self.state), lease: Arc::clone(&self.lease) }
    }
}

/// What the clones of an allocator and its buffers share.
pub(crate) struct State<B: CudaMemory> {
    pub(crate) core: CoreAllocator<B>,
    registration: Mutex<()>,
    /// Pools that [`CachingAllocator::trim`] trims, in creation order: all but those of graphs.
    trimmable: Mutex<Vec<PoolId>>,
    /// Pools whose owners are gone, see [`CachingAllocator::trim`].
    abandoned: Mutex<Vec<Abandoned>>,
    /// Where allocations of a stream that is being captured go.
    pub(crate) capture_pools: Mutex<Vec<(CaptureId, PoolId)>>,
    drop_error_count: AtomicU64,
    last_drop_error: Mutex<Option<DropError>>,
}

/// A pool to be destroyed as soon as nothing in it is allocated.
pub(crate) struct Abandoned {
    pub(crate) pool: PoolId,
    pub(crate) observer: Option<symmalloc_core::ObserverId>,
    /// Streams whose work may use the pool's memory without the core's knowledge.
    pub(crate) streams: Vec<StreamId>,
}

/// What went wrong where no error could be returned: in a `Drop`, or while a pointer was taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DropError {
    /// A buffer could not be freed; its memory stays allocated.
    #[error("a buffer could not be freed: {0}")]
    Free(#[from] FreeError),
    /// A use on another stream could not be noted or ordered. The host waited for the work instead, where it could.
    #[error("a use on another stream could not be ordered: {0}")]
    Order(#[from] BackendError),
}

/// Errors counted by [`CachingAllocator::drop_errors`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DropErrors {
    /// How many there were.
    pub count: u64,
    /// The last one.
    pub last: Option<DropError>,
}

impl CudaAllocator {
    /// An allocator of a device's memory with default options. Takes no device memory yet.
    ///
    /// # Errors
    /// When the driver refuses, or the configuration does not fit the device.
    pub fn new(device: &Arc<CudaDevice>, config: Config) -> Result<Self, CudaError> {
        Self::with_backend(CudaBackend::builder(device).build()?, config)
    }
}

impl<B: CudaMemory> CachingAllocator<B> {
    /// An allocator over a backend.
    ///
    /// Where ranges cannot grow, a default pool with expandable segments gets fixed segments instead, and the log says so.
    ///
    /// # Errors
    /// When the configuration does not fit the device.
    pub fn with_backend(backend: B, config: Config) -> Result<Self, CudaError> {
        let pool = fitting(&backend, config.default_pool().clone())?;
        let config =
            if pool == *config.default_pool() { config } else { config.to_builder().default_pool(pool).build()? };
        let state = State {
            core: CoreAllocator::new(backend, config)?,
            registration: Mutex::default(),
            trimmable: Mutex::new(vec![PoolId::DEFAULT]),
            abandoned: Mutex::default(),
            capture_pools: Mutex::default(),
            drop_error_count: AtomicU64::new(0),
            last_drop_error: Mutex::default(),
        };
        Ok(Self::of_state(&Arc::new(state)))
    }

    pub(crate) fn of_state(state: &Arc<State<B>>) -> Self {
        let lease = Arc::new(Lease::new(state, PoolId::DEFAULT));
        CachingAllocator { state: Arc::clone(state), lease }
    }

    /// The core's allocator, for whatever this type does not offer.
    ///
    /// # Examples
    /// Every op and decision goes into a trace that replays without a device:
    /// ```no_run
    /// use symmalloc_core::Config;
    /// use symmalloc_cuda::{CudaAllocator, CudaDevice};
    /// use symmalloc_import::{TraceFile, TraceFileOptions};
    ///
    /// let allocator = CudaAllocator::new(&CudaDevice::new(0)?, Config::default())?;
    /// let file = TraceFile::create("job.trace.zst", TraceFileOptions::default())?;
    /// allocator.core().start_recording(file)?; // before the first allocation
    /// // ... the job ...
    /// allocator.core().stop_recording()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn core(&self) -> &CoreAllocator<B> {
        &self.state.core
    }

    /// The device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        self.state.core.backend().device()
    }

    /// The pool that this name of the allocator takes memory from.
    pub fn pool(&self) -> PoolId {
        self.lease.pool
    }

    /// Registers a stream, or finds it if it is registered. Allocating on a stream registers it. Register streams in the
    /// same order on every rank. A registered stream is kept alive as long as the allocator.
    ///
    /// # Errors
    /// When the stream is of another context or differs by thread, or all ids are taken.
    pub fn register_stream(&self, stream: &Arc<CudaStream>) -> Result<StreamId, CudaError> {
        match self.lease.lanes.find(stream) {
            Some(place) => Ok(place.lane.stream),
            None => self.state.register(stream),
        }
    }

    /// Registers a stream that other code made and owns, for example one that came from C.
    ///
    /// # Safety
    /// The stream belongs to the device's context and lives as long as the allocator and its buffers.
    ///
    /// # Errors
    /// As [`register_stream`](Self::register_stream).
    pub unsafe fn register_raw_stream(&self, stream: CUstream) -> Result<StreamId, CudaError> {
        // SAFETY: the caller's contract; the wrapper does not own the stream.
        let stream = unsafe { self.device().context().wrap_borrowed_stream(stream) };
        self.register_stream(&stream)
    }

    /// The id of a stream, if it is registered.
    pub fn stream_id(&self, stream: &CudaStream) -> Option<StreamId> {
        self.state.order().find(stream)
    }

    /// Makes later work on `stream` wait on the device for all work given to `on` so far. Fences that this covers are not
    /// waited for again. During a capture of `on`, `stream` becomes part of the capture.
    ///
    /// # Errors
    /// When a stream cannot be registered or the driver refuses; nothing waits then.
    pub fn wait(&self, stream: &Arc<CudaStream>, on: &Arc<CudaStream>) -> Result<(), CudaError> {
        let (stream, on) = (self.register_stream(stream)?, self.register_stream(on)?);
        Ok(self.state.wait(stream, on).map_err(DriverError::from)?)
    }

    /// Blocks the host until all work given to the stream so far is done. Fences on it are void from then on.
    ///
    /// # Errors
    /// When the stream cannot be registered, or the driver refuses or reports that work failed.
    pub fn synchronize(&self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(self.state.synchronize(stream).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work given to every registered stream so far is done, but not beyond the deadline.
    /// Returns whether it is done.
    ///
    /// # Errors
    /// When the driver refuses or reports that work failed.
    pub fn synchronize_all(&self, deadline: Instant) -> Result<bool, CudaError> {
        Ok(self.state.order().synchronize_all(deadline).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work given so far to every registered stream that is in no capture is done. Fences on them
    /// are void from then on. Before a capture begins, this leaves nothing for which the capture would have to wait.
    ///
    /// # Errors
    /// When the driver refuses or reports that work failed.
    pub fn synchronize_uncaptured(&self) -> Result<(), CudaError> {
        let order = self.state.order();
        for (stream, raw) in order.streams() {
            if order.capture_of(raw.cu_stream())?.is_none() {
                self.state.synchronize(stream).map_err(DriverError::from)?;
            }
        }
        Ok(())
    }

    /// Whether a capture that a [`GraphPool`](crate::GraphPool) began on the device is under way, or a registered stream is
    /// part of anybody's. Asks the driver once per registered stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        Ok(self.state.order().is_capturing()?)
    }

    /// Allocates bytes for work on a stream, to be freed with [`free`](Self::free). Buffers are the safe way.
    ///
    /// # Errors
    /// When the stream cannot be registered or the allocator refuses; nothing is allocated then.
    #[inline]
    pub fn allocate(&self, stream: &Arc<CudaStream>, size_bytes: u64) -> Result<Allocation, CudaError> {
        match self.place_at_hand(stream) {
            Some(Place { lane, .. }) => self.state.core.allocate_in(&lane.heap, size_bytes).map_err(refused),
            None => self.allocate_by_all_means(stream, size_bytes),
        }
    }

    #[cold]
    #[inline(never)]
    fn allocate_by_all_means(&self, stream: &Arc<CudaStream>, size_bytes: u64) -> Result<Allocation, CudaError> {
        self.allocate_on(&*self.lane(stream)?, size_bytes)
    }

    /// As [`allocate`](Self::allocate), on a lane of this allocator's pool.
    #[inline(never)]
    pub(crate) fn allocate_on(&self, lane: &Lane<B>, size_bytes: u64) -> Result<Allocation, CudaError> {
        lane.device.end_rows();
        if lane.device.captures.any() {
            return Ok(self.state.core.allocate(self.pool_for(lane.stream)?, lane.stream, size_bytes)?);
        }
        Ok(self.state.core.allocate_in(&lane.heap, size_bytes)?)
    }

    /// The place of a stream's lane that has one, while no capture is under way: that is the rule. Allocations lie in its heap.
    #[inline(always)]
    pub(crate) fn place_at_hand(&self, stream: &CudaStream) -> Option<&Place<B>> {
        match self.lease.lanes.find_first(stream) {
            Some(place) if place.lane.device.captures.is_quiet() => Some(place),
            Some(place) => behind_rows(place),
            None => self.place_near_hand(stream),
        }
    }

    /// As [`place_at_hand`](Self::place_at_hand), where the lane has to be looked for, or a row ends.
    #[inline(never)]
    fn place_near_hand(&self, stream: &CudaStream) -> Option<&Place<B>> {
        behind_rows(self.lease.lanes.find(stream)?)
    }

    /// The lane of a stream.
    #[inline(never)]
    pub(crate) fn lane(&self, stream: &Arc<CudaStream>) -> Result<Arc<Lane<B>>, CudaError> {
        match self.lease.lanes.find(stream) {
            Some(place) => Ok(Arc::clone(&place.lane)),
            None => self.make_lane(stream),
        }
    }

    #[cold]
    #[inline(never)]
    fn make_lane(&self, stream: &Arc<CudaStream>) -> Result<Arc<Lane<B>>, CudaError> {
        let stream = self.state.register(stream)?;
        self.lane_of(stream)
    }

    /// The lane of a registered stream, or of the host.
    pub(crate) fn lane_of(&self, stream: StreamId) -> Result<Arc<Lane<B>>, CudaError> {
        let lanes = &self.lease.lanes;
        let known = match self.state.order().stream(stream) {
            Some(raw) => lanes.find(raw).map(|place| &place.lane),
            None => lanes.host(),
        };
        if let Some(lane) = known {
            return Ok(Arc::clone(lane));
        }
        let lane = Lane::new(&self.state, self.pool(), stream)?;
        lanes.keep(&lane);
        Ok(lane)
    }

    /// As [`allocate`](Self::allocate), with a name for snapshots and reports.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_named(
        &self,
        stream: &Arc<CudaStream>,
        size_bytes: u64,
        name: &str,
    ) -> Result<Allocation, CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(self.state.core.allocate_named(self.pool_for(stream)?, stream, size_bytes, name)?)
    }

    /// Frees an allocation. Never blocks.
    ///
    /// # Errors
    /// When it is not live, or the driver cannot fence its uses; it is still live then.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        self.state.core.free(handle)
    }

    /// Where an allocation on a stream goes: to the graph pool of the capture that the stream is part of, or here.
    #[inline]
    pub(crate) fn pool_for(&self, stream: StreamId) -> Result<PoolId, AllocateError> {
        self.device().end_rows();
        if !self.device().captures.any() {
            return Ok(self.pool());
        }
        self.state.capture_pool(stream, self.pool())
    }

    /// Makes a pool with a policy of its own. It is destroyed when the returned owner and every allocator of
    /// [`with_pool`](Self::with_pool) are gone and its buffers are freed, by the next [`trim`](Self::trim); while somebody
    /// observes it, a later one.
    ///
    /// # Errors
    /// When the policy does not fit the device.
    pub fn create_pool(&self, config: PoolConfig) -> Result<Pool<B>, CudaError> {
        let config = fitting(self.state.core.backend(), config)?;
        let pool = self.state.core.create_pool(config)?;
        lock(&self.state.trimmable).push(pool);
        Ok(Pool { lease: Arc::new(Lease::new(&self.state, pool)) })
    }

    /// The same allocator, taking memory from this pool for as long as the returned name is used.
    pub fn with_pool(&self, pool: &Pool<B>) -> Self {
        CachingAllocator { state: Arc::clone(&self.state), lease: Arc::clone(&pool.lease) }
    }

    /// Gives free memory of all pools but those of graphs back to the device, with what was made ahead of growth, and destroys
    /// abandoned pools that are empty. Returns the bytes that went back from the former. Waits on the host for streams that
    /// used the memory.
    ///
    /// # Errors
    /// When the driver fails; the rest can be trimmed again.
    pub fn trim(&self) -> Result<u64, CudaError> {
        self.state.destroy_abandoned()?;
        let pools = lock(&self.state.trimmable).clone();
        let mut released_bytes = 0;
        for pool in pools {
            released_bytes += self.state.core.trim(Some(pool))?;
        }
        self.state.core.backend().memory().release_spare();
        Ok(released_bytes)
    }

    /// Statistics over all pools.
    pub fn stats(&self) -> MemoryStats {
        self.state.core.stats()
    }

    /// Every block of every segment.
    pub fn snapshot(&self) -> Snapshot {
        self.state.core.snapshot()
    }

    /// What is still allocated, with names.
    pub fn leak_report(&self) -> LeakReport {
        self.state.core.leak_report()
    }

    /// The history of a pool as one number, equal on all ranks exactly when placements are.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn digest(&self, pool: PoolId) -> Result<Digest, CudaError> {
        Ok(self.state.core.digest(pool)?)
    }

    /// Sets what is asked when an allocation is about to fail. It is called without any lock and may free and trim through
    /// the core's allocator that it is given.
    pub fn set_failure_callback(
        &self,
        callback: impl Fn(&CoreAllocator<B>, &OutOfMemory) -> Retry + Send + Sync + 'static,
    ) {
        self.state.core.set_failure_callback(callback);
    }

    /// Errors that no call could return: of buffers that were dropped and pointers that were taken.
    pub fn drop_errors(&self) -> DropErrors {
        DropErrors {
            count: self.state.drop_error_count.load(Ordering::Relaxed),
            last: lock(&self.state.last_drop_error).clone(),
        }
    }
}

impl<B: CudaMemory> State<B> {
    pub(crate) fn order(&self) -> &crate::order::Order {
        self.core.backend().order()
    }

    /// The id of a stream, registered now if it was not before.
    #[cold]
    fn register(&self, stream: &Arc<CudaStream>) -> Result<StreamId, CudaError> {
        if let Some(id) = self.order().find(stream) {
            return Ok(id);
        }
        if stream.cu_stream() as usize == 2 {
            return Err(CudaError::PerThreadStream);
        }
        if stream.context().cu_ctx() != self.order().device.context().cu_ctx() {
            return Err(CudaError::ForeignStream);
        }
        let _one_at_a_time = lock(&self.registration);
        if let Some(id) = self.order().find(stream) {
            return Ok(id);
        }
        let id = self.core.register_stream()?;
        let index = self.order().add_stream(Arc::clone(stream));
        assert_eq!(index, id.index(), "streams were registered behind the allocator's back, with its core");
        Ok(id)
    }

    /// Registers the host as the next stream.
    pub(crate) fn register_host(&self) -> Result<StreamId, CudaError> {
        let _one_at_a_time = lock(&self.registration);
        let id = self.core.register_stream()?;
        let index = self.order().add_host();
        assert_eq!(index, id.index(), "streams were registered behind the allocator's back, with its core");
        Ok(id)
    }

    /// Orders `stream` behind `on` on the device, and tells the core.
    pub(crate) fn wait(&self, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
        if stream == on {
            return Ok(());
        }
        let order = self.order();
        order.device.end_rows();
        order.order_behind(stream, on)?;
        if !order.device.captures.any() {
            // What a capture orders is ordered in its graph only.
            let _known = self.core.stream_waits(stream, on);
        }
        Ok(())
    }

    pub(crate) fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.order().synchronize(stream)?;
        let _known = self.core.stream_synchronized(stream);
        Ok(())
    }

    #[cold]
    fn capture_pool(&self, stream: StreamId, otherwise: PoolId) -> Result<PoolId, AllocateError> {
        let Some(raw) = self.order().stream(stream).map(|stream| stream.cu_stream()) else { return Ok(otherwise) };
        let fence = |error: DriverError| AllocateError::Fence { stream, error: error.into() };
        let Some(capture) = self.order().capture_of(raw).map_err(fence)? else { return Ok(otherwise) };
        let pools = lock(&self.capture_pools);
        Ok(pools.iter().find(|(id, _)| *id == capture).map_or(otherwise, |(_, pool)| *pool))
    }

    pub(crate) fn note_drop_error(&self, error: DropError) {
        self.drop_error_count.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(name: "drop.failed", target: "symmalloc", %error);
        *lock(&self.last_drop_error) = Some(error);
    }

    pub(crate) fn abandon(&self, abandoned: Abandoned) {
        lock(&self.trimmable).retain(|pool| *pool != abandoned.pool);
        lock(&self.abandoned).push(abandoned);
    }

    /// Destroys the abandoned pools in which nothing is allocated any more and that nobody observes.
    fn destroy_abandoned(&self) -> Result<(), CudaError> {
        let abandoned = std::mem::take(&mut *lock(&self.abandoned));
        let mut first_error = Ok(());
        for mut entry in abandoned {
            match self.destroy(&mut entry) {
                Ok(()) => {}
                Err(CudaError::Pool(PoolError::InUse { .. } | PoolError::Observed { .. })) => {
                    lock(&self.abandoned).push(entry);
                }
                Err(error) => {
                    // A pool that the driver did not take back entirely is destroyed for the core, which tries again.
                    if !matches!(error, CudaError::Pool(PoolError::Backend(_))) {
                        lock(&self.abandoned).push(entry);
                    }
                    first_error = first_error.and(Err(error));
                }
            }
        }
        first_error
    }

    fn destroy(&self, entry: &mut Abandoned) -> Result<(), CudaError> {
        while let Some(stream) = entry.streams.last().copied() {
            self.synchronize(stream).map_err(DriverError::from)?;
            entry.streams.pop();
        }
        if let Some(observer) = entry.observer.take() {
            self.core.forget(observer)?;
        }
        Ok(self.core.destroy_pool(entry.pool)?)
    }
}

impl<B: CudaMemory> Drop for State<B> {
    fn drop(&mut self) {
        let abandoned = std::mem::take(&mut *lock(&self.abandoned));
        for mut entry in abandoned {
            // What cannot be destroyed goes with the allocator.
            let _destroyed = self.destroy(&mut entry);
        }
    }
}

/// The place, once the rows that are open have ended; `None` while a capture is under way.
#[inline(never)]
fn behind_rows<B: CudaMemory>(place: &Place<B>) -> Option<&Place<B>> {
    place.lane.device.is_quiet().then_some(place)
}

#[cold]
#[inline(never)]
fn refused(error: AllocateError) -> CudaError {
    error.into()
}

/// The policy, or the nearest that the backend can serve.
pub(crate) fn fitting<B: CudaMemory>(backend: &B, config: PoolConfig) -> Result<PoolConfig, CudaError> {
    if backend.is_expandable() || !matches!(config.segments(), SegmentPolicy::Expandable(_)) {
        return Ok(config);
    }
    tracing::info!(
        name: "pool.fixed",
        target: "symmalloc",
        "ranges cannot grow here: the pool has fixed segments in place of expandable ones",
    );
    Ok(config.to_builder().fixed().build()?)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: CudaMemory> fmt::Debug for CachingAllocator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("device", self.device())
            .field("pool", &self.pool())
            .finish_non_exhaustive()
    }
}
