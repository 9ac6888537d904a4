//! One (pool, stream) of an allocator.
//!
//! ```text
//!  allocator ─┐
//!  allocator ─┼─ PoolLease ─── table by stream ──► StreamAllocator ─── AllocatorState
//!  Pool      ─┘                                        ▲
//!  DeviceBuffer ───────────────────────────────────────┘ counted or borrowed
//! ```
//! A buffer refers to its stream's allocator, so freeing it takes no search. Threads with streams of their own count in
//! different places.

use super::state::AllocatorState;
use crate::backend::{CudaBackend, CudaMemory};
use cudarc::driver::CudaStream;
use std::fmt;
use std::sync::Arc;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::{Allocation, Handle, PoolId, StreamId};

/// An allocator, one of its pools and a stream: what allocates for work on that stream.
/// [`CachingAllocator::for_stream`](crate::CachingAllocator::for_stream) finds it.
///
/// Its buffers borrow it, where those of [`CudaAllocator`](crate::CudaAllocator) count it: that saves two atomic operations for
/// each of them. Whoever holds it keeps the allocator's memory, but not a [`Pool`](crate::Pool), from going back to the device.
///
/// # Examples
/// ```no_run
/// use std::sync::Arc;
/// use symmalloc_core::Config;
/// use symmalloc_cuda::{CudaAllocator, CudaDevice, DeviceBuffer, StreamAllocator};
///
/// let device = CudaDevice::new(0)?;
/// let stream = device.context().new_stream()?;
/// let allocator = CudaAllocator::new(&device, Config::default())?;
/// let scratch: DeviceBuffer<f32, &StreamAllocator> = allocator.for_stream(&stream)?.alloc_zeroed(4096)?;
/// drop(scratch);
///
/// // An engine that keeps one allocator until it ends has buffers without a lifetime:
/// let engine: &'static Arc<StreamAllocator> = Box::leak(Box::new(allocator)).for_stream(&stream)?;
/// let weights: DeviceBuffer<f32, &'static StreamAllocator> = engine.alloc_zeroed(4096)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Alone on its cache lines: every counted buffer writes to it.
#[repr(align(128))]
pub struct StreamAllocator<B: CudaMemory = CudaBackend> {
    state: Arc<AllocatorState<B>>,
    pool: PoolId,
    id: StreamId,
    /// `None` for the host.
    stream: Option<Arc<CudaStream>>,
}

impl<B: CudaMemory> StreamAllocator<B> {
    /// Of a registered stream, or of the host.
    pub(super) fn new(state: &Arc<AllocatorState<B>>, pool: PoolId, id: StreamId) -> Self {
        StreamAllocator { state: Arc::clone(state), pool, id, stream: state.streams().stream(id).cloned() }
    }

    #[inline]
    pub(crate) fn state(&self) -> &AllocatorState<B> {
        &self.state
    }

    /// The stream's id, equal on all ranks.
    #[inline]
    pub fn stream_id(&self) -> StreamId {
        self.id
    }

    /// The pool that it takes memory from, but during a capture, which has a pool of its own.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// The stream; `None` for the host.
    #[inline]
    pub(crate) fn stream(&self) -> Option<&Arc<CudaStream>> {
        self.stream.as_ref()
    }

    #[inline]
    pub(crate) fn allocate(&self, size_bytes: u64) -> Result<Allocation, AllocateError> {
        self.state.core().allocate(self.present_pool()?, self.id, size_bytes)
    }

    pub(crate) fn allocate_named(&self, size_bytes: u64, name: &str) -> Result<Allocation, AllocateError> {
        self.state.core().allocate_named(self.present_pool()?, self.id, size_bytes, name)
    }

    /// Notes that work on another stream uses a live allocation.
    pub(crate) fn record_use(&self, live: Handle, stream: StreamId) {
        // Live and registered: neither the handle nor the stream can be unknown.
        let _known = self.state.core().record_use(live, stream);
    }

    /// The pool that allocations come from: that of the capture which the stream is part of, or its own.
    #[inline]
    fn present_pool(&self) -> Result<PoolId, AllocateError> {
        if self.state.device().is_capturing() { self.state.capture_pool(self.id, self.pool) } else { Ok(self.pool) }
    }
}

impl<B: CudaMemory> fmt::Debug for StreamAllocator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamAllocator").field("pool", &self.pool).field("stream", &self.id).finish_non_exhaustive()
    }
}

/// How a buffer refers to its [`StreamAllocator`]: an `Arc` counts it, a `&` borrows it. No other type can be one.
pub trait StreamAllocatorRef: Clone + sealed::Sealed {}

impl<B: CudaMemory> StreamAllocatorRef for Arc<StreamAllocator<B>> {}

impl<B: CudaMemory> StreamAllocatorRef for &StreamAllocator<B> {}

mod sealed {
    use super::{Arc, CudaMemory, StreamAllocator};

    /// Always leads to the same allocator, which `std::ops::Deref` does not promise.
    pub trait Sealed {
        type Memory: CudaMemory;

        fn stream_allocator(&self) -> &StreamAllocator<Self::Memory>;
    }

    impl<B: CudaMemory> Sealed for Arc<StreamAllocator<B>> {
        type Memory = B;

        #[inline]
        fn stream_allocator(&self) -> &StreamAllocator<B> {
            self
        }
    }

    impl<B: CudaMemory> Sealed for &StreamAllocator<B> {
        type Memory = B;

        #[inline]
        fn stream_allocator(&self) -> &StreamAllocator<B> {
            self
        }
    }
}
