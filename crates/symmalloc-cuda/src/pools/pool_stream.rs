//! One (pool, stream) of an allocator.
//!
//! ```text
//!  allocator ─┐
//!  allocator ─┼─ PoolLease ─── table by stream ──► PoolStream ─── AllocatorState
//!  Pool      ─┘                                        ▲
//!  DeviceBuffer ───────────────────────────────────────┘ counted
//! ```
//! A buffer holds its pool stream, so freeing it takes no search. Threads with streams of their own count in different places.

use super::state::AllocatorState;
use crate::backend::CudaMemory;
use cudarc::driver::CudaStream;
use std::sync::Arc;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::{Allocation, PoolId, StreamId};

/// Where allocations for work on a stream come from. Alone on its cache lines: every buffer counts it.
#[repr(align(128))]
pub(crate) struct PoolStream<B: CudaMemory> {
    state: Arc<AllocatorState<B>>,
    pool: PoolId,
    id: StreamId,
    /// `None` for the host.
    stream: Option<Arc<CudaStream>>,
}

impl<B: CudaMemory> PoolStream<B> {
    /// Of a registered stream, or of the host.
    pub(super) fn new(state: &Arc<AllocatorState<B>>, pool: PoolId, id: StreamId) -> Self {
        PoolStream { state: Arc::clone(state), pool, id, stream: state.streams().stream(id).cloned() }
    }

    #[inline]
    pub(crate) fn state(&self) -> &AllocatorState<B> {
        &self.state
    }

    #[inline]
    pub(crate) fn id(&self) -> StreamId {
        self.id
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

    /// The pool that allocations come from: that of the capture which the stream is part of, or its own.
    #[inline]
    fn present_pool(&self) -> Result<PoolId, AllocateError> {
        if self.state.device().is_capturing() { self.state.capture_pool(self.id, self.pool) } else { Ok(self.pool) }
    }
}
