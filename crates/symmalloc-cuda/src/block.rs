//! One owned allocation: what buffers of device and of host memory have in common.

use crate::allocator::{DropError, State};
use crate::backend::CudaMemory;
use crate::lane::Lane;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::{Handle, StreamId};

/// An allocation that its buffer [`free`]s when it is dropped. Freeing never blocks and never panics; an error is counted,
/// and the memory stays allocated.
pub(crate) struct Block<B: CudaMemory> {
    /// Of the stream that it was allocated on. `None` once somebody else frees the allocation. The buffer takes it from here
    /// when it is dropped, and nothing is left to drop: a second look would cost as much as the first.
    lane: ManuallyDrop<Option<Arc<Lane<B>>>>,
    pub(crate) handle: Handle,
    /// 0 when there are no bytes.
    pub(crate) address: u64,
}

impl<B: CudaMemory> Block<B> {
    /// Takes over an allocation that nobody else frees.
    #[inline(always)]
    pub(crate) fn of(lane: ManuallyDrop<Option<Arc<Lane<B>>>>, handle: Handle, address: DeviceAddress) -> Self {
        Block { lane, handle, address: address.0 }
    }

    #[inline]
    pub(crate) fn lane(&self) -> &Lane<B> {
        self.lane.as_deref().expect("nobody else frees it yet")
    }

    /// The allocator.
    #[inline]
    pub(crate) fn state(&self) -> &Arc<State<B>> {
        &self.lane().state
    }

    /// The lane, for whoever frees the allocation; `None` if it was let go before.
    #[inline(always)]
    pub(crate) fn let_go(&mut self) -> Option<Arc<Lane<B>>> {
        self.lane.take()
    }

    /// Notes that work on another stream uses it.
    pub(crate) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state().core.record_use(self.handle, stream);
    }
}

/// Frees an allocation of a lane.
#[inline(always)]
pub(crate) fn free<B: CudaMemory>(lane: &Lane<B>, handle: Handle) {
    if !lane.state.core.free_at_hand_in(&lane.heap, handle) {
        free_by_all_means(lane, handle);
    }
}

#[cold]
#[inline(never)]
fn free_by_all_means<B: CudaMemory>(lane: &Lane<B>, handle: Handle) {
    if let Err(error) = lane.state.core.free(handle) {
        lane.state.note_drop_error(DropError::Free(error));
    }
}
