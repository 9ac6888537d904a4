//! One owned allocation: what buffers of device and of host memory have in common.

use crate::allocator::{DropError, State};
use crate::backend::CudaMemory;
use crate::error::CudaError;
use std::sync::Arc;
use symmalloc_core::{Allocation, Handle, PoolId, StreamId};

/// An allocation that is freed when it is dropped. Freeing never blocks and never panics; an error is counted, and the
/// memory stays allocated.
pub(crate) struct Block<B: CudaMemory> {
    pub(crate) state: Arc<State<B>>,
    pub(crate) handle: Handle,
    /// 0 when there are no bytes.
    pub(crate) address: u64,
    /// The stream it was allocated on.
    pub(crate) owner: StreamId,
    /// Whether dropping it leaves the memory allocated.
    is_kept: bool,
}

impl<B: CudaMemory> Block<B> {
    pub(crate) fn allocate<T>(
        state: &Arc<State<B>>,
        pool: PoolId,
        owner: StreamId,
        len: usize,
        name: Option<&str>,
    ) -> Result<Self, CudaError> {
        let element_bytes = size_of::<T>();
        let size_bytes = len.checked_mul(element_bytes).ok_or(CudaError::TooLarge { len, element_bytes })? as u64;
        let Allocation { handle, address, .. } = match name {
            None => state.core.allocate(pool, owner, size_bytes)?,
            Some(name) => state.core.allocate_named(pool, owner, size_bytes, name)?,
        };
        Ok(Block::of(Arc::clone(state), handle, address.0, owner))
    }

    /// Takes over an allocation that nobody else frees.
    pub(crate) fn of(state: Arc<State<B>>, handle: Handle, address: u64, owner: StreamId) -> Self {
        Block { state, handle, address, owner, is_kept: false }
    }

    /// Leaves the memory allocated when the block is dropped.
    pub(crate) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Notes that work on another stream uses it.
    pub(crate) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state.core.record_use(self.handle, stream);
    }
}

impl<B: CudaMemory> Drop for Block<B> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(error) = self.state.core.free(self.handle) {
            self.state.note_drop_error(DropError::Free(error));
        }
    }
}
