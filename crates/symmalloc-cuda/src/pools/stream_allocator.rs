//! The allocator for one pool and one stream.
//!
//! ```text
//!  allocator ─┐
//!  allocator ─┼─ PoolLease ─── table by stream ──► StreamAllocator ─── AllocatorState
//!  Pool      ─┘                                        ▲
//!  DeviceBuffer ───────────────────────────────────────┘ counted or borrowed
//! ```
//! A buffer refers to its stream's allocator, so freeing it needs no lookup. Threads with separate streams update separate reference
//! counts.

use super::state::AllocatorState;
use crate::backend::{CudaBackend, CudaMemory};
use cudarc::driver::CudaStream;
use std::fmt;
use std::sync::Arc;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::{Allocation, Handle, PoolId, StreamId};

/// An allocator for work on one stream, with memory from one pool. Returned by
/// [`CachingAllocator::for_stream`](crate::CachingAllocator::for_stream).
///
/// Its buffers borrow it, whereas buffers of [`CudaAllocator`](crate::CudaAllocator) hold a counted reference. Borrowing saves two atomic
/// operations per buffer. Holding a `StreamAllocator` keeps the allocator's memory alive, but not that of a [`Pool`](crate::Pool).
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
/// // An engine that never drops its allocator can use buffers with a static lifetime:
/// let engine: &'static Arc<StreamAllocator> = Box::leak(Box::new(allocator)).for_stream(&stream)?;
/// let weights: DeviceBuffer<f32, &'static StreamAllocator> = engine.alloc_zeroed(4096)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// Aligned to a separate cache line, because every counted buffer writes to the reference count.
#[repr(align(128))]
pub struct StreamAllocator<B: CudaMemory = CudaBackend> {
    state: Arc<AllocatorState<B>>,
    pool: PoolId,
    id: StreamId,
    /// `None` for the host.
    stream: Option<Arc<CudaStream>>,
}

impl<B: CudaMemory> StreamAllocator<B> {
    /// Creates the allocator for a registered stream, or for the host.
    pub(super) fn new(state: &Arc<AllocatorState<B>>, pool: PoolId, id: StreamId) -> Self {
        StreamAllocator { state: Arc::clone(state), pool, id, stream: state.streams().stream(id).cloned() }
    }

    #[inline]
    pub(crate) fn state(&self) -> &AllocatorState<B> {
        &self.state
    }

    /// Returns the stream's id, which is equal on all ranks.
    #[inline]
    pub fn stream_id(&self) -> StreamId {
        self.id
    }

    /// Returns the pool that this allocator allocates from. While the stream is part of a capture, allocations come from the capture's pool
    /// instead.
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Returns the stream, or `None` for the host.
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

    /// Records that work on another stream uses a live allocation.
    pub(crate) fn record_use(&self, live: Handle, stream: StreamId) {
        // The handle is live and the stream is registered, so neither can be unknown.
        let _known = self.state.core().record_use(live, stream);
    }

    /// Returns the pool for the next allocation: the capture's pool if the stream is part of a capture, and this allocator's pool
    /// otherwise.
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

/// A reference from a buffer to its [`StreamAllocator`]: an `Arc`, which counts references, or a `&`, which borrows. This trait is sealed.
pub trait StreamAllocatorRef: Clone + sealed::Sealed {}

impl<B: CudaMemory> StreamAllocatorRef for Arc<StreamAllocator<B>> {}

impl<B: CudaMemory> StreamAllocatorRef for &StreamAllocator<B> {}

mod sealed {
    use super::{Arc, CudaMemory, StreamAllocator};

    /// Unlike `std::ops::Deref`, guarantees to return the same allocator every time.
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
