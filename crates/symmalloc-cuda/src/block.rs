//! One owned allocation: what buffers of device and of host memory have in common.

use crate::allocator::{DropError, State};
use crate::backend::CudaMemory;
use crate::lane::Lane;
use std::sync::Arc;
use symmalloc_core::errors::FreeError;
use symmalloc_core::{Handle, StreamId};

/// An allocation that is freed when it is dropped. Freeing never blocks and never panics; an error is counted, and the
/// memory stays allocated.
pub(crate) struct Block<B: CudaMemory> {
    /// Of the stream that it was allocated on.
    pub(crate) lane: Arc<Lane<B>>,
    pub(crate) handle: Handle,
    /// 0 when there are no bytes.
    pub(crate) address: u64,
    /// Whether dropping it leaves the memory allocated.
    is_kept: bool,
}

impl<B: CudaMemory> Block<B> {
    /// Takes over an allocation that nobody else frees.
    #[inline]
    pub(crate) fn of(lane: Arc<Lane<B>>, handle: Handle, address: u64) -> Self {
        Block { lane, handle, address, is_kept: false }
    }

    /// The allocator.
    #[inline]
    pub(crate) fn state(&self) -> &Arc<State<B>> {
        &self.lane.state
    }

    /// Leaves the memory allocated when the block is dropped.
    pub(crate) fn keep(&mut self) {
        self.is_kept = true;
    }

    #[cold]
    #[inline(never)]
    fn note_drop_error(&self, error: FreeError) {
        self.state().note_drop_error(DropError::Free(error));
    }

    /// Notes that work on another stream uses it.
    pub(crate) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state().core.record_use(self.handle, stream);
    }
}

impl<B: CudaMemory> Drop for Block<B> {
    #[inline]
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(error) = self.state().core.free_in(&self.lane.heap, self.handle) {
            self.note_drop_error(error);
        }
    }
}
