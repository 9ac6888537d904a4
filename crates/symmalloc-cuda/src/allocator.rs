//! The allocators of this crate. Each combines the core's shared allocator with the pool that it allocates from.

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
use symmalloc_core::lock::Shared;
use symmalloc_core::plans::{Plan, PlanError, StepError};
use symmalloc_core::report::{LeakReport, MemoryStats, Snapshot};
use symmalloc_core::{Allocation, Digest, Handle, PoolId, Retry, SharedAllocator, StepGuard, StreamId};

/// A caching allocator of one device, or of pinned host memory, that threads share. Clones are cheap and refer to the same allocator.
///
/// Memory is allocated for work on a stream, and can be freed while work still uses it: the stream of the memory's next user waits for this
/// work, without blocking the host. Freed memory stays cached until [`trim_all`](Self::trim_all), a limit or a release threshold returns it
/// to the device.
///
/// # Determinism
/// The n-th allocation for a pool and a stream has the same placement on every rank that makes the same calls. Register streams in the same
/// order on every rank. Threads that share a stream must make their calls in the same order on every rank; threads with separate streams
/// need no order.
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
    /// Lease that keeps the pool alive.
    lease: Arc<PoolLease<B>>,
}

/// The allocator of a device's memory. See [`CachingAllocator`].
pub type CudaAllocator = CachingAllocator<CudaBackend>;

impl<B: CudaMemory> Clone for CachingAllocator<B> {
    fn clone(&self) -> Self {
        CachingAllocator { lease: Arc::clone(&self.lease) }
    }
}

impl CudaAllocator {
    /// Creates an allocator of a device's memory with default options. Allocates no device memory yet.
    ///
    /// `Config::default()` does not stitch memory. The configuration `"stitching:true".parse()`, which is the default under PyTorch, holds
    /// less memory if the program allocates blocks of 128 MiB or more whose sizes change.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, or the configuration does not fit the device.
    pub fn new(device: &Arc<CudaDevice>, config: Config) -> Result<Self, CudaError> {
        Self::with_backend(CudaBackend::builder(device).build()?, config)
    }
}

impl<B: CudaMemory> CachingAllocator<B> {
    /// Creates an allocator over a backend.
    ///
    /// If the backend cannot grow address ranges, a default pool with expandable segments gets fixed segments instead, and a warning is
    /// logged.
    ///
    /// # Errors
    /// Returns an error if the configuration does not fit the device.
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

    /// Returns the core's allocator, for operations that this type does not offer.
    ///
    /// # Examples
    /// Record every op and decision in a trace that replays without a device:
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

    /// Returns the device whose context and streams the allocator uses.
    pub fn device(&self) -> &Arc<CudaDevice> {
        self.state().device()
    }

    /// Returns the pool that this allocator allocates from.
    pub fn pool(&self) -> PoolId {
        self.lease.pool()
    }

    /// Registers a stream, or returns its id if it is already registered. Allocating on a stream registers it. Register streams in the same
    /// order on every rank. A registered stream stays alive as long as the allocator.
    ///
    /// # Errors
    /// Returns an error if the stream belongs to another context or is a per-thread stream, or if all stream ids are in use.
    pub fn register_stream(&self, stream: &Arc<CudaStream>) -> Result<StreamId, CudaError> {
        Ok(self.for_stream(stream)?.stream_id())
    }

    /// Registers a stream in the group that is named by its first stream, `group`. If the stream is already registered, returns its id, and
    /// the stream stays in its group. In pools with `streams:grouped`, the streams of a group share memory; other pools ignore groups.
    /// Register streams in the same order, and in the same groups, on every rank.
    ///
    /// # Errors
    /// See [`register_stream`](Self::register_stream). Returns an error if no group has this name.
    pub fn register_stream_in(&self, stream: &Arc<CudaStream>, group: StreamId) -> Result<StreamId, CudaError> {
        self.state().register(stream, Some(group))
    }

    /// Returns the allocator for work on a stream, and registers the stream if necessary. Code that creates many buffers can call this
    /// function once, and let the buffers borrow the returned allocator.
    ///
    /// # Errors
    /// Returns an error if the stream belongs to another context or is a per-thread stream, or if all stream ids are in use.
    #[inline]
    pub fn for_stream(&self, stream: &Arc<CudaStream>) -> Result<&Arc<StreamAllocator<B>>, CudaError> {
        self.lease.stream(stream)
    }

    /// Registers a stream that other code created and owns, such as a stream from C code.
    ///
    /// # Safety
    /// The stream must belong to the device's context, and must live as long as the allocator and its buffers.
    ///
    /// # Errors
    /// See [`register_stream`](Self::register_stream).
    pub unsafe fn register_raw_stream(&self, stream: CUstream) -> Result<StreamId, CudaError> {
        // SAFETY: the caller's contract; the wrapper does not own the stream.
        let stream = unsafe { self.device().context().wrap_borrowed_stream(stream) };
        self.register_stream(&stream)
    }

    /// Registers a stream in a group, like [`register_stream_in`](Self::register_stream_in). Other code created the stream and owns it.
    ///
    /// # Safety
    /// See [`register_raw_stream`](Self::register_raw_stream).
    ///
    /// # Errors
    /// See [`register_stream_in`](Self::register_stream_in).
    pub unsafe fn register_raw_stream_in(&self, stream: CUstream, group: StreamId) -> Result<StreamId, CudaError> {
        // SAFETY: the caller's contract; the wrapper does not own the stream.
        let stream = unsafe { self.device().context().wrap_borrowed_stream(stream) };
        self.register_stream_in(&stream, group)
    }

    /// Registers a stream that other code owns. After [`return_stream`](Self::return_stream), the owner may destroy the stream while the
    /// allocator is alive. Intended for programs that drive the core's allocator directly: [`stream_id`](Self::stream_id) does not find
    /// such a stream, and calls that affect all registered streams skip it.
    ///
    /// # Safety
    /// The stream must belong to the device's context, and must live until it is returned.
    ///
    /// # Errors
    /// Returns an error if all stream ids are in use.
    pub unsafe fn lend_stream(&self, stream: LentStream) -> Result<StreamId, CudaError> {
        self.state().register_lent(stream)
    }

    /// Gives a lent stream back to its owner, before the owner destroys it. The id remains valid, and stands for the stream's remaining
    /// work until [`relend_stream`](Self::relend_stream) assigns the id to another stream. The allocator no longer passes the returned
    /// stream to the driver.
    ///
    /// # Errors
    /// Returns an error if the stream was not lent, or a driver call fails. Nothing changes in that case.
    pub fn return_stream(&self, id: StreamId) -> Result<(), CudaError> {
        Ok(self.state().streams().return_lent(id)?)
    }

    /// Assigns the id of a returned stream to another stream. Later work on the new stream waits for the earlier work of the id, without
    /// blocking the host.
    ///
    /// # Safety
    /// See [`lend_stream`](Self::lend_stream).
    ///
    /// # Errors
    /// See [`return_stream`](Self::return_stream).
    pub unsafe fn relend_stream(&self, id: StreamId, stream: LentStream) -> Result<(), CudaError> {
        Ok(self.state().streams().relend(id, stream)?)
    }

    /// Registers the host as a stream. Memory that is allocated on this stream is used by the host, so `allocate` blocks until the earlier
    /// work of other streams on that memory is done.
    ///
    /// # Errors
    /// Returns an error if all stream ids are in use.
    pub fn register_host_stream(&self) -> Result<StreamId, CudaError> {
        self.state().register_host()
    }

    /// Returns the id of a stream, or `None` if the stream is not registered.
    pub fn stream_id(&self, stream: &CudaStream) -> Option<StreamId> {
        self.state().streams().find(stream)
    }

    /// Makes later work on `stream` wait for all work submitted to `on` so far, without blocking the host. Later reuse of memory does not
    /// wait for this work again. During a capture of `on`, `stream` joins the capture.
    ///
    /// # Errors
    /// Returns an error if a stream cannot be registered or a driver call fails. No wait is added in that case.
    pub fn wait(&self, stream: &Arc<CudaStream>, on: &Arc<CudaStream>) -> Result<(), CudaError> {
        let (stream, on) = (self.register_stream(stream)?, self.register_stream(on)?);
        Ok(self.state().wait(stream, on).map_err(DriverError::from)?)
    }

    /// Blocks the host until all work submitted to the stream so far is done. Later reuse of memory does not wait for this work again.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered, or a driver call fails or reports that work failed.
    pub fn synchronize(&self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(self.state().synchronize(stream).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work submitted to every registered stream so far is done or the deadline passes. Returns `true` if the
    /// work is done.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or reports that work failed.
    pub fn synchronize_all(&self, deadline: Instant) -> Result<bool, CudaError> {
        Ok(self.state().streams().synchronize_all(deadline).map_err(DriverError::from)?)
    }

    /// Blocks the host until the work submitted so far to every registered stream that is not being captured is done. Later reuse of memory
    /// does not wait for this work again. Call this before a capture begins, so that the capture has no earlier work to wait for.
    ///
    /// # Errors
    /// Returns an error if a driver call fails or reports that work failed.
    pub fn synchronize_uncaptured(&self) -> Result<(), CudaError> {
        let streams = self.state().streams();
        for (stream, raw) in streams.iter() {
            if streams.capture_of(raw.cu_stream())?.is_none() {
                self.state().synchronize(stream).map_err(DriverError::from)?;
            }
        }
        Ok(())
    }

    /// Returns `true` if a capture that a [`GraphPool`](crate::GraphPool) began on the device is in progress, or a registered stream is
    /// part of a capture that other code began. Queries the driver once per registered stream.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn is_capturing(&self) -> Result<bool, CudaError> {
        Ok(self.state().streams().is_capturing()?)
    }

    /// Allocates bytes for work on a stream. Free them with [`free`](Self::free). Buffers are the safe alternative.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered or the allocation fails. Nothing is allocated in that case.
    #[inline]
    pub fn allocate(&self, stream: &Arc<CudaStream>, size_bytes: u64) -> Result<Allocation, CudaError> {
        Ok(self.for_stream(stream)?.allocate(size_bytes)?)
    }

    /// Like [`allocate`](Self::allocate), with a name for snapshots and reports.
    ///
    /// # Errors
    /// See [`allocate`](Self::allocate).
    pub fn allocate_named(
        &self,
        stream: &Arc<CudaStream>,
        size_bytes: u64,
        name: &str,
    ) -> Result<Allocation, CudaError> {
        Ok(self.for_stream(stream)?.allocate_named(size_bytes, name)?)
    }

    /// Frees an allocation. May wait for another thread that holds the lock of the same heap, but never for the device.
    ///
    /// # Errors
    /// Returns an error if the allocation is not live, or the driver cannot record events for its uses on other streams. In the latter
    /// case, the allocation stays live.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        let address = match self.state().exported().is_empty() {
            true => 0,
            false => self.core().allocation(handle).map_or(0, |allocation| allocation.address.0),
        };
        self.state().free(handle, address)
    }

    /// Creates a pool with a separate policy. [`Pool::destroy`] destroys the pool. Otherwise, the pool can be destroyed once the returned
    /// owner, every allocator from [`with_pool`](Self::with_pool) and all buffers of the pool are dropped. The next
    /// [`trim_all`](Self::trim_all) then destroys it or, if the pool is observed, the first trim after the observation ends. If the limit
    /// over all pools is about to refuse a request, private pools without owners are destroyed first.
    ///
    /// Create pools in the same order on every rank. If several threads create pools at the same time, use
    /// [`create_pool_with_key`](Self::create_pool_with_key).
    ///
    /// # Errors
    /// Returns an error if the policy does not fit the device.
    pub fn create_pool(&self, config: PoolConfig) -> Result<Pool<B>, CudaError> {
        let pool = self.state().create_pool(None, config)?;
        Ok(Pool::new(PoolLease::new(self.state(), pool)))
    }

    /// Creates a pool like [`create_pool`](Self::create_pool), but with an id that the program chooses: `key`, a number from 1 to 65,535
    /// that is used only once. The id then does not depend on the timing of the threads that create pools. Pools without a key get the id
    /// after the highest one so far, so create them before the threads start, or give every pool a key.
    ///
    /// # Errors
    /// Returns an error if the key is out of range or was used before, or the policy does not fit the device.
    pub fn create_pool_with_key(&self, key: u32, config: PoolConfig) -> Result<Pool<B>, CudaError> {
        let pool = self.state().create_pool(Some(PoolId(key)), config)?;
        Ok(Pool::new(PoolLease::new(self.state(), pool)))
    }

    /// Returns an allocator that shares the state of this allocator and allocates from `pool`.
    pub fn with_pool(&self, pool: &Pool<B>) -> Self {
        CachingAllocator { lease: Arc::clone(pool.lease()) }
    }

    /// Releases the free memory of all pools except graph pools to the device, together with memory that was prefetched for growth. Also
    /// destroys empty pools that were dropped. Returns the number of released bytes, including those of destroyed pools and prefetched
    /// memory.
    /// Blocks the host until the streams that used the memory are done with it.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. The remaining memory can be trimmed by another call.
    pub fn trim_all(&self) -> Result<u64, CudaError> {
        self.state().trim_all()
    }

    /// Returns statistics over all pools.
    pub fn stats(&self) -> MemoryStats {
        self.core().stats()
    }

    /// Returns every block of every segment.
    pub fn snapshot(&self) -> Snapshot {
        self.core().snapshot()
    }

    /// Returns a report of all live allocations, with names.
    pub fn leak_report(&self) -> LeakReport {
        self.core().leak_report()
    }

    /// Returns the digest of a pool's history. Equal histories have equal digests; different histories have
    /// different digests with very high probability.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn digest(&self, pool: PoolId) -> Result<Digest, CudaError> {
        Ok(self.core().digest(pool)?)
    }

    /// Sets the callback that runs when an allocation is about to fail. No lock is held while the callback runs. It may free and trim
    /// through the core's allocator, which it receives as an argument.
    pub fn set_failure_callback(
        &self,
        callback: impl Fn(&SharedAllocator<B>, &OutOfMemory) -> Retry + Send + Sync + 'static,
    ) {
        self.core().set_failure_callback(callback);
    }

    /// Returns the number of errors that no call could return, and the last of these errors. They occur when a buffer is dropped, or when
    /// its pointer is taken.
    pub fn drop_errors(&self) -> DropErrors {
        self.state().drop_errors()
    }

    /// Returns the number of calls to the device, by kind.
    pub fn device_calls(&self) -> DeviceCalls {
        self.state().streams().device_calls()
    }

    /// Begins a step of this allocator's pool: a unit that the program repeats, such as a training step or a batch. The step ends when the
    /// returned guard is dropped or [ended](StepGuard::end). Steps with the same `key` are expected to be alike, so the key may encode the
    /// shape of a batch. Use 0 if all steps are alike. In a pool with `plan:learn`, a step that occurs twice in the same form is planned
    /// when it ends, and later steps follow the plan. The reserved memory then equals the peak of live memory.
    ///
    /// Begin and end steps at the same points on every rank, outside of captures, while no other thread uses the pool. If the end of a step
    /// computes a plan, it can take several seconds. It also releases free memory, and the host waits until the streams that used this
    /// memory are done with it.
    ///
    /// # Errors
    /// Returns an error if a step of the pool is already open.
    ///
    /// # Examples
    /// ```no_run
    /// use symmalloc_core::Config;
    /// use symmalloc_cuda::{CudaAllocator, CudaDevice};
    ///
    /// let device = CudaDevice::new(0)?;
    /// let allocator = CudaAllocator::new(&device, "plan:learn".parse::<Config>()?)?;
    /// let stream = device.context().new_stream()?;
    /// for _ in 0..100 {
    ///     let step = allocator.step(0)?;
    ///     let activations = allocator.alloc_zeroed::<f32>(&stream, 1 << 20)?;
    ///     drop(activations);
    ///     let report = step.end()?;
    ///     if let Some(difference) = report.difference {
    ///         eprintln!("{difference}");
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn step(&self, key: u64) -> Result<StepGuard<'_, B, Shared>, StepError> {
        self.core().step(self.pool(), key)
    }

    /// Adopts a plan for steps of this allocator's pool. See [`symmalloc_core::Allocator::adopt_plan`].
    ///
    /// # Errors
    /// Returns an error if the plan does not fit the pool, or there is no memory for it.
    pub fn adopt_plan(&self, plan: Plan) -> Result<(), PlanError> {
        self.core().adopt_plan(self.pool(), plan)
    }

    /// Discards the plans of this allocator's pool.
    ///
    /// # Errors
    /// Returns an error if a step of the pool is open.
    pub fn drop_plans(&self) -> Result<(), PlanError> {
        self.core().drop_plans(self.pool())
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
