//! One owned allocation: what buffers of device and of host memory have in common.

use crate::allocator::{DropError, State};
use crate::backend::CudaMemory;
use crate::lane::Lane;
use std::sync::Arc;
use symmalloc_core::{Handle, StreamId};

/// An allocation that is freed when it is dropped. Freeing never blocks and never panics; an error is counted, and the
/// memory stays allocated.
pub(crate) struct Block<B: CudaMemory> {
    /// Of the stream that it was allocated on.
    pub(crate) lane: Arc<Lane<B>>,
    pub(crate) handle: Handle,
    /// 0 when there are no bytes.
    pub(crate) address: u64,
}

/// In place of the handle of a block whose memory stays allocated. It names nothing, so that freeing it is refused.
const KEPT: Handle = Handle::from_raw((u64::MAX, 0));

impl<B: CudaMemory> Block<B> {
    /// Takes over an allocation that nobody else frees.
    #[inline]
    pub(crate) fn of(lane: Arc<Lane<B>>, handle: Handle, address: u64) -> Self {
        Block { lane, handle, address }
    }

    /// The allocator.
    #[inline]
    pub(crate) fn state(&self) -> &Arc<State<B>> {
        &self.lane.state
    }

    /// Leaves the memory allocated when the block is dropped. Whoever wants the handle asks for it before.
    pub(crate) fn keep(&mut self) {
        self.handle = KEPT;
    }

    /// Notes that work on another stream uses it.
    pub(crate) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state().core.record_use(self.handle, stream);
    }
}

impl<B: CudaMemory> Drop for Block<B> {
    #[inline(always)]
    fn drop(&mut self) {
        free(&self.lane, self.handle);
    }
}

/// Takes the block's words: it need not lie in memory where it is dropped.
#[inline(never)]
fn free<B: CudaMemory>(lane: &Lane<B>, handle: Handle) {
    if !lane.state.core.free_at_hand_in(&lane.heap, handle) {
        free_by_all_means(lane, handle);
    }
}

#[cold]
#[inline(never)]
fn free_by_all_means<B: CudaMemory>(lane: &Lane<B>, handle: Handle) {
    match lane.state.core.free(handle) {
        Err(error) if handle != KEPT => lane.state.note_drop_error(DropError::Free(error)),
        _ => {}
    }
}
