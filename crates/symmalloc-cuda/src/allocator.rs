//! The allocators of this crate: names of a core allocator that is shared, each with the pool that it takes memory from.

use crate::backend::{CudaBackend, CudaMemory};
use crate::call_counters::DeviceCalls;
use crate::device::CudaDevice;
use crate::error::{CudaError, DriverError, DropErrors};
use crate::pools::{AllocatorState, Pool, PoolLease, StreamAllocator};
use crate::streams::LentStream;
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstream;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{FreeError, OutOfMemory};
use symmalloc_core::report::{LeakReport, MemoryStats, Snapshot};
use symmalloc_core::{Allocation, Digest, Handle, PoolId, Retry, SharedAllocator, StreamId};

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
    /// Its pool, which is not destroyed meanwhile.
    lease: Arc<PoolLease<B>>,
}

/// The allocator of a device's memory.
pub type CudaAllocator = CachingAllocator<CudaBackend>;

impl<B: CudaMemory> Clone for CachingAllocator<B> {
    fn clone(&self) -> Self {
        CachingAllocator { lease: Arc::clone(&self.lease) }
    }
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
        Ok(Self::of_state(&Arc::new(AllocatorState::new(backend, config)?)))
    }

    pub(crate) fn of_state(state: &Arc<AllocatorState<B>>) -> Self {
        CachingAllocator { lease: Arc::new(PoolLease::new(state, PoolId::DEFAULT)) }
    }

    #[inline]
    pub(crate) fn lease(&self) -> &PoolLease<B> {
        &self.lease
    }

    #[inline]
    pub(crate) fn state(&self) -> &Arc<AllocatorState<B>> {
        self.lease.state()
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
    pub fn core(&self) -> &SharedAllocator<B> {
        self.state().core()
    }

    /// The device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        self.state().device()
    }

    /// The pool that this name of the allocator takes memory from.
    pub fn pool(&self) -> PoolId {
        self.lease.pool()
    }

    /// Registers a stream, or finds it if it is registered. Allocating on a stream registers it. Register streams in the
    /// same order on every rank. A registered stream is kept alive as long as the allocator.
    ///
    /// # Errors
    /// When the stream is of another context or differs by thread, or all ids are taken.
    pub fn register_stream(&self, stream: &Arc<CudaStream>) -> Result<StreamId, CudaError> {
        Ok(self.for_stream(stream)?.stream_id())
    }

    /// What allocates for work on a stream, which is registered now if it was not before. Look it up once where many buffers
    /// are made: they can borrow it.
    ///
    /// # Errors
    /// When the stream is of another context or differs by thread, or all ids are taken.
    #[inline]
    pub fn for_stream(&self, stream: &Arc<CudaStream>) -> Result<&Arc<StreamAllocator<B>>, CudaError> {
        self.lease.stream(stream)
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

    /// Registers a stream that other code owns and may destroy while the allocator lives: [`return_stream`](Self::return_stream)
    /// comes before that. For programs that drive the core's allocator: such a stream is not found by
    /// [`stream_id`](Self::stream_id), and calls about all registered streams leave it out.
    ///
    /// # Safety
    /// The stream belongs to the device's context and lives until it is returned.
    ///
    /// # Errors
    /// When all ids are taken.
    pub unsafe fn lend_stream(&self, stream: LentStream) -> Result<StreamId, CudaError> {
        self.state().register_lent(stream)
    }

    /// The owner of a lent stream is about to destroy it. The id stays, and stands for what is left of the stream's work, until
    /// [`relend_stream`](Self::relend_stream) gives it to another one. The driver is not asked about the stream any more.
    ///
    /// # Errors
    /// When the stream was not lent, or the driver refuses; nothing has changed then.
    pub fn return_stream(&self, id: StreamId) -> Result<(), CudaError> {
        Ok(self.state().streams().return_lent(id)?)
    }

    /// Gives the id of a lent stream to another stream, which is ordered behind the work of those before on the device.
    ///
    /// # Safety
    /// As [`lend_stream`](Self::lend_stream).
    ///
    /// # Errors
    /// As [`return_stream`](Self::return_stream).
    pub unsafe fn relend_stream(&self, id: StreamId, stream: LentStream) -> Result<(), CudaError> {
        Ok(self.state().streams().relend(id, stream)?)
    }

    /// Registers the host as a stream: memory that is allocated for it is the host's to hand out, and the host waits, in
    /// `allocate`, for the work of streams that used it before.
    ///
    /// # Errors
    /// When all ids are taken.
    pub fn register_host_stream(&self) -> Result<StreamId, CudaError> {
        self.state().register_host()
    }

    /// The id of a stream, if it is registered.
    pub fn stream_id(&self, stream: &CudaStream) -> Option<StreamId> {
        self.state().streams().find(stream)
    }

    /// Makes later work on `stream` wait on the device for all work given to `on` so far. Fences that this covers are not
    /// waited for again. During a capture of `on`, `stream` becomes part of the capture.
    ///
    /// # Errors
    /// When a stream cannot be registered or the driver refuses; nothing waits then.
    pub fn wait(&self, stream: &Arc<CudaStream>, on: &Arc<CudaStream>) -> Result<(), CudaError> {
        let (stream, on) = (self.register_stream(stream)?, self.register_stream(on)?);
        Ok(self.state().wait(stream, on).map_err(DriverError::from)?)
    }

    /// Blocks the host until all work given to the stream so far is done. Fences on it are void from then on.
    ///
    /// # Errors
    /// When the stream cannot be registered, or the driver refuses or reports that work failed.
    pub fn synchronize(&self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(self.state().synchronize(stream).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work given to every registered stream so far is done, but not beyond the deadline.
    /// Returns whether it is done.
    ///
    /// # Errors
    /// When the driver refuses or reports that work failed.
    pub fn synchronize_all(&self, deadline: Instant) -> Result<bool, CudaError> {
        Ok(self.state().streams().synchronize_all(deadline).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work given so far to every registered stream that is in no capture is done. Fences on them
    /// are void from then on. Before a capture begins, this leaves nothing for which the capture would have to wait.
    ///
    /// # Errors
    /// When the driver refuses or reports that work failed.
    pub fn synchronize_uncaptured(&self) -> Result<(), CudaError> {
        let streams = self.state().streams();
        for (stream, raw) in streams.iter() {
            if streams.capture_of(raw.cu_stream())?.is_none() {
                self.state().synchronize(stream).map_err(DriverError::from)?;
            }
        }
        Ok(())
    }

    /// Whether a capture that a [`GraphPool`](crate::GraphPool) began on the device is under way, or a registered stream is
    /// part of one that other code began. Asks the driver once per registered stream.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        Ok(self.state().streams().is_capturing()?)
    }

    /// Allocates bytes for work on a stream, to be freed with [`free`](Self::free). Buffers are the safe way.
    ///
    /// # Errors
    /// When the stream cannot be registered or the allocator refuses; nothing is allocated then.
    #[inline]
    pub fn allocate(&self, stream: &Arc<CudaStream>, size_bytes: u64) -> Result<Allocation, CudaError> {
        Ok(self.for_stream(stream)?.allocate(size_bytes)?)
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
        Ok(self.for_stream(stream)?.allocate_named(size_bytes, name)?)
    }

    /// Frees an allocation. May wait for another thread that holds the lock of the same heap, never for the device.
    ///
    /// # Errors
    /// When it is not live, or the driver cannot fence its uses; it is still live then.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        let address = match self.state().exported().is_empty() {
            true => 0,
            false => self.core().allocation(handle).map_or(0, |allocation| allocation.address.0),
        };
        self.state().free(handle, address)
    }

    /// Makes a pool with a policy of its own. It is destroyed when the returned owner and every allocator of
    /// [`with_pool`](Self::with_pool) are gone and its buffers are freed, by the next [`trim`](Self::trim); while the
    /// pool is observed, by a later one.
    ///
    /// # Errors
    /// When the policy does not fit the device.
    pub fn create_pool(&self, config: PoolConfig) -> Result<Pool<B>, CudaError> {
        let pool = self.state().create_pool(config)?;
        Ok(Pool::new(PoolLease::new(self.state(), pool)))
    }

    /// The same allocator, taking memory from this pool for as long as the returned name is used.
    pub fn with_pool(&self, pool: &Pool<B>) -> Self {
        CachingAllocator { lease: Arc::clone(pool.lease()) }
    }

    /// Gives free memory of all pools but those of graphs back to the device, with what was made ahead of growth, and destroys
    /// abandoned pools that are empty. Returns the bytes that went back from the former. Waits on the host for streams that
    /// used the memory.
    ///
    /// # Errors
    /// When the driver fails; the rest can be trimmed again.
    pub fn trim(&self) -> Result<u64, CudaError> {
        self.state().trim()
    }

    /// Statistics over all pools.
    pub fn stats(&self) -> MemoryStats {
        self.core().stats()
    }

    /// Every block of every segment.
    pub fn snapshot(&self) -> Snapshot {
        self.core().snapshot()
    }

    /// What is still allocated, with names.
    pub fn leak_report(&self) -> LeakReport {
        self.core().leak_report()
    }

    /// The history of a pool as one number, equal on all ranks exactly when placements are.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn digest(&self, pool: PoolId) -> Result<Digest, CudaError> {
        Ok(self.core().digest(pool)?)
    }

    /// Sets what is asked when an allocation is about to fail. It is called without any lock and may free and trim through
    /// the core's allocator that it is given.
    pub fn set_failure_callback(
        &self,
        callback: impl Fn(&SharedAllocator<B>, &OutOfMemory) -> Retry + Send + Sync + 'static,
    ) {
        self.core().set_failure_callback(callback);
    }

    /// Errors that no call could return: of buffers that were dropped and pointers that were taken.
    pub fn drop_errors(&self) -> DropErrors {
        self.state().drop_errors()
    }

    /// How often the device was asked for what.
    pub fn device_calls(&self) -> DeviceCalls {
        self.state().streams().device_calls()
    }
}

impl<B: CudaMemory> fmt::Debug for CachingAllocator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("device", self.device())
            .field("pool", &self.pool())
            .finish_non_exhaustive()
    }
}
