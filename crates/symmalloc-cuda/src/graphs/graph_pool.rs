//! CUDA graphs: memory that keeps its addresses for the lifetime of a captured graph.
//!
//! Beginning a capture waits for all registered streams. Therefore the host need not wait for an earlier fence during the capture. Querying
//! an event during a capture, or waiting for it from outside, would invalidate the capture. The backend does neither (see the table in
//! `streams/captures.rs`).

use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::device::RestoreCurrent;
use crate::error::{CudaError, DriverError};
use crate::pools::{AbandonedPool, AllocatorState, lock};
use crate::streams::{CaptureId, CaptureWatch, capture_of};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaGraph, CudaStream};
use std::sync::{Arc, Mutex};
use std::{fmt, mem};
use symmalloc_core::config::{PoolConfig, Reclaim};
use symmalloc_core::sleep::Phase;
use symmalloc_core::{ObserverId, PoolId, StreamId};
use symmalloc_files::is_forked;

/// A memory pool for graphs. Clones refer to the same pool.
///
/// ```text
///  GraphPool ── begin(stream) ──► GraphCapture ── end() ──► DeviceGraph ── launch(stream), any number of times
///      ▲            allocations on streams of the capture           │
///      └────────────── come from the pool ◄──────── keeps it ───────┘
/// ```
///
/// While a stream is part of a capture that the pool began, all allocations on it come from the pool, regardless of the allocator clone
/// that is used. A block that is freed during the capture is reused by later allocations of the same capture. If such an allocation is on a
/// different stream, the freed block's fence becomes an edge of the graph. `trim` and limits never release the pool's memory, and no other
/// allocation comes from the pool. The memory is released after the pool's last owner is dropped: every clone of the `GraphPool`, every
/// graph, and every buffer.
///
/// # Sharing
/// Graphs that are captured from one pool share its memory, so they must not run at the same time: launch them on one stream, or order
/// them. A graph may overwrite data that another graph left in a freed buffer. A buffer that is kept alive keeps its memory exclusively.
///
/// # Determinism
/// If the same program is captured again from a new pool, it gets the same offsets. It also gets the same offsets from the same pool, if
/// the pool has a reserved segment (`PoolConfig::builder().reserved(bytes)`) and the buffers of the first capture are dropped. A pool that
/// grows is larger for the second capture than it was for the first, so the best fit may be a different block.
///
/// # Order of work
/// Beginning a capture blocks the host until all registered streams are idle, because a graph cannot wait for work that was not captured.
/// The program must make each launch wait for the work that fills the graph's inputs.
///
/// # Examples
/// ```no_run
/// use cudarc::driver::CudaStream;
/// use std::sync::Arc;
/// use symmalloc_core::PoolConfig;
/// use symmalloc_cuda::{CudaAllocator, CudaError, DeviceGraph, GraphPool};
///
/// fn capture(allocator: &CudaAllocator, stream: &Arc<CudaStream>) -> Result<DeviceGraph, CudaError> {
///     let pool = GraphPool::new(allocator, PoolConfig::default())?;
///     let capture = pool.begin(stream)?;
///     let scratch = allocator.alloc_zeroed::<f32>(stream, 4096)?;
///     // kernels on `stream`, which use `scratch`
///     drop(scratch);
///     capture.end() // the graph can be launched any number of times, and keeps the memory
/// }
/// ```
#[derive(Clone, Debug)]
pub struct GraphPool {
    inner: Arc<GraphPoolState>,
}

struct GraphPoolState {
    state: Arc<AllocatorState<CudaBackend>>,
    pool: PoolId,
    /// Observer that prevents the core from releasing dead segments if the program trims the pool through the core's allocator.
    observer: ObserverId,
    /// Streams on which graphs of this pool were launched.
    launched_on: Mutex<Vec<StreamId>>,
    /// The option `debug:unmap` of the pool.
    unmaps: bool,
}

impl GraphPool {
    /// Creates a pool for graphs. The `reclaim`, release threshold and stitching settings of `config` are ignored, because the pool's
    /// memory must stay at the addresses that graphs have captured.
    ///
    /// # Errors
    /// Returns an error if the device does not support `config`.
    #[allow(clippy::needless_pass_by_value, reason = "like `create_pool`")]
    pub fn new(allocator: &CudaAllocator, config: PoolConfig) -> Result<Self, CudaError> {
        let config =
            config.to_builder().stitching(None).reclaim(Reclaim::Never).release_threshold_bytes(None).build()?;
        let unmaps = config.debug().unmap;
        let state = Arc::clone(allocator.state());
        let pool = state.create_untrimmed_pool(config)?;
        let (observer, _) = state.core().observe(pool)?;
        state.note_graph_pool(pool);
        Ok(GraphPool {
            inner: Arc::new(GraphPoolState { state, pool, observer, launched_on: Mutex::default(), unmaps }),
        })
    }

    /// Returns the pool's id, which is equal on all ranks.
    pub fn id(&self) -> PoolId {
        self.inner.pool
    }

    pub(crate) fn state(&self) -> &Arc<AllocatorState<CudaBackend>> {
        &self.inner.state
    }

    /// Begins to capture the work that is submitted to the stream, and to streams that wait for it through
    /// [`CachingAllocator::wait`](crate::CachingAllocator::wait). First blocks the host until all registered streams are idle.
    ///
    /// During the capture, other threads are not restricted. This thread is restricted as in CUDA's thread-local capture mode, except for
    /// the allocator's own calls.
    ///
    /// # Errors
    /// Returns an error if the stream is already being captured or cannot be registered, or a driver call fails. No capture is begun in
    /// that case.
    pub fn begin(&self, stream: &Arc<CudaStream>) -> Result<GraphCapture, CudaError> {
        let allocator = CudaAllocator::of_state(&self.inner.state);
        let id = allocator.register_stream(stream)?;
        let under_way = allocator.device().watch_captures();
        let streams = self.inner.state.streams();
        if streams.capture_of(stream.cu_stream())?.is_some() {
            return Err(CudaError::AlreadyCapturing);
        }
        {
            let pool = self.inner.pool.0;
            let _entered = tracing::debug_span!(target: "symmalloc", "capture.prepare", pool, stream = id.0).entered();
            allocator.synchronize_uncaptured()?;
        }
        let _restore = RestoreCurrent::of(streams.device().driver())?;
        let begun = stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        begun.map_err(|error| DriverError { call: "cuStreamBeginCapture", code: error.0 as i32 })?;
        let mut capture = GraphCapture {
            pool: self.clone(),
            stream: Arc::clone(stream),
            id,
            capture: None,
            is_ended: false,
            _under_way: under_way,
        };
        // SAFETY: the stream is alive.
        capture.capture = unsafe { capture_of(streams.device().driver(), stream.cu_stream()) }?;
        if let Some(capture) = capture.capture {
            self.inner.state.set_capture_pool(capture, self.inner.pool);
        }
        let capture_id = capture.capture;
        tracing::debug!(name: "capture.begun", target: "symmalloc", pool = self.id().0, stream = id.0, capture_id);
        Ok(capture)
    }
}

impl Drop for GraphPoolState {
    /// Leaves the memory for the allocator's next trim, because releasing memory may block and dropping must not. With `debug:unmap`, the
    /// memory is released now, so that a later launch faults. In a forked child, the memory belongs to the parent process and is not touched.
    fn drop(&mut self) {
        if is_forked() {
            return mem::forget(Arc::clone(&self.state));
        }
        let streams = mem::take(&mut *lock(&self.launched_on));
        self.state.abandon_graph_pool(AbandonedPool { pool: self.pool, observer: Some(self.observer), streams });
        if self.unmaps {
            self.state.destroy_abandoned_graph(self.pool);
        }
    }
}

impl fmt::Debug for GraphPoolState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphPool").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// A capture in progress. Dropping it without [`end`](GraphCapture::end) discards the capture.
#[must_use = "end the capture to get its graph"]
pub struct GraphCapture {
    pool: GraphPool,
    stream: Arc<CudaStream>,
    id: StreamId,
    /// The driver's id of the capture.
    capture: Option<CaptureId>,
    is_ended: bool,
    _under_way: CaptureWatch,
}

impl GraphCapture {
    /// Ends the capture and instantiates its graph.
    ///
    /// # Errors
    /// Returns an error if a call during the capture was not allowed, a stream that joined the capture was not joined back to the first
    /// stream, or nothing was captured.
    pub fn end(mut self) -> Result<DeviceGraph, CudaError> {
        let graph = self.end_capture().map_err(CudaError::Driver)?.ok_or(CudaError::EmptyCapture)?;
        Ok(DeviceGraph { graph, pool: self.pool.clone(), other_pools: Vec::new() })
    }

    fn end_capture(&mut self) -> Result<Option<CudaGraph>, DriverError> {
        if mem::replace(&mut self.is_ended, true) {
            return Ok(None);
        }
        let state = &self.pool.inner.state;
        if let Some(capture) = self.capture {
            state.forget_capture(capture);
        }
        // If the driver does not report the current context, the capture ends nevertheless.
        let _restore = RestoreCurrent::of(state.device().driver());
        let mut ended = self.stream.end_capture(CUgraphInstantiate_flags(0));
        // cudarc first makes its context current. If that fails, the capture is still in progress.
        if ended.is_err() && state.streams().capture_of(self.stream.cu_stream()).is_ok_and(|capture| capture.is_some())
        {
            ended = self.stream.end_capture(CUgraphInstantiate_flags(0));
        }
        let ended = ended.map_err(|error| DriverError { call: "cuStreamEndCapture", code: error.0 as i32 });
        let (pool, stream, capture_id) = (self.pool.id().0, self.id.0, self.capture);
        match &ended {
            Ok(_) => tracing::debug!(name: "capture.ended", target: "symmalloc", pool, stream, capture_id),
            Err(error) => {
                tracing::warn!(name: "capture.failed", target: "symmalloc", pool, stream, capture_id, %error);
            }
        }
        ended
    }
}

impl Drop for GraphCapture {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        // On error, the driver has already ended the capture.
        let _graph = self.end_capture();
    }
}

impl fmt::Debug for GraphCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphCapture").field("pool", &self.pool.id()).field("stream", &self.id).finish_non_exhaustive()
    }
}

/// A captured graph and its memory. As in CUDA, only one thread at a time may use a graph.
pub struct DeviceGraph {
    // Dropped first, because the pool's memory must outlive the graph.
    graph: CudaGraph,
    pool: GraphPool,
    /// Other pools whose memory the graph uses.
    other_pools: Vec<PoolId>,
}

impl DeviceGraph {
    /// Declares other pools whose memory the graph uses, for example for weights. Launching returns an error while one of them is asleep.
    #[must_use]
    pub fn using(mut self, pools: impl IntoIterator<Item = PoolId>) -> Self {
        self.other_pools.extend(pools);
        self
    }

    /// Submits the graph to a stream.
    ///
    /// # Errors
    /// Returns an error if the graph's pool or a pool that it [uses](Self::using) is asleep, the stream cannot be registered, or the driver
    /// call fails. Nothing is submitted in that case.
    pub fn launch(&self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let state = &self.pool.inner.state;
        for pool in std::iter::once(self.pool.id()).chain(self.other_pools.iter().copied()) {
            if state.core().phase(pool)? != Phase::Awake {
                return Err(CudaError::GraphSleeps { pool });
            }
        }
        let id = CudaAllocator::of_state(state).register_stream(stream)?;
        {
            let mut launched_on = lock(&self.pool.inner.launched_on);
            if !launched_on.contains(&id) {
                launched_on.push(id);
            }
        }
        let device = state.device();
        let _current = device.enter()?;
        // SAFETY: the graph is alive and instantiated, and the pool keeps its memory.
        Ok(unsafe { device.driver().graph_launch(self.graph.cu_graph_exec(), stream.cu_stream()) }?)
    }

    /// Returns the pool that owns the graph's memory.
    pub fn pool(&self) -> &GraphPool {
        &self.pool
    }

    /// Returns cudarc's graph.
    pub fn graph(&self) -> &CudaGraph {
        &self.graph
    }
}

impl fmt::Debug for DeviceGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceGraph").field("pool", &self.pool.id()).finish_non_exhaustive()
    }
}
