//! One owned allocation: what buffers of device and of host memory have in common.

use crate::allocator::{CachingAllocator, DropError, State};
use crate::backend::CudaMemory;
use crate::error::CudaError;
use crate::lane::Lane;
use crate::spares::{CoreAllocator, Spares};
use cudarc::driver::CudaStream;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::errors::FreeError;
use symmalloc_core::{Allocation, Handle, StreamId};

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

/// What a block consists of beside its handle, which comes back in registers.
struct Taken<B: CudaMemory> {
    lane: ManuallyDrop<Option<Arc<Lane<B>>>>,
    address: DeviceAddress,
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

    /// Notes that work on another stream uses it: who drops the block frees it [behind its uses](free_behind_uses).
    pub(crate) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state().core.record_use_by_owner(self.handle, stream);
    }
}

impl<B: CudaMemory> CachingAllocator<B> {
    /// Room for `len` elements that is freed when it is dropped, if the lane is at hand and its heap has a free block. So
    /// little of it is inlined that what a buffer consists of stays in registers until it is where its owner keeps it.
    #[inline(always)]
    pub(crate) fn block_at_hand<T>(&self, stream: &CudaStream, len: usize) -> Option<Block<B>> {
        let size_bytes = len.checked_mul(size_of::<T>())?;
        let mut taken = Taken { lane: ManuallyDrop::new(None), address: DeviceAddress(0) };
        let handle = self.take(stream, size_bytes as u64, &mut taken)?;
        Some(Block::of(taken.lane, handle, taken.address))
    }

    /// Takes what a block consists of. What is given holds nothing yet.
    #[inline(never)]
    fn take(&self, stream: &CudaStream, size_bytes: u64, taken: &mut Taken<B>) -> Option<Handle> {
        let at_hand = self.place_at_hand(stream)?;
        let core = || core_of(&at_hand.lane);
        let (handle, spare) = at_hand.entrance.allocate(size_bytes, &mut taken.address, Spares::take, core)?;
        taken.lane = ManuallyDrop::new(Some(spare.unwrap_or_else(|| Arc::clone(&at_hand.lane))));
        Some(handle)
    }

    /// As [`block_at_hand`](Self::block_at_hand), whatever it takes.
    #[cold]
    #[inline(never)]
    pub(crate) fn block<T>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<Block<B>, CudaError> {
        self.block_on::<T>(self.lane(stream)?, len, None)
    }

    /// As [`block`](Self::block), on a lane of this allocator's pool, with a name or without.
    pub(crate) fn block_on<T>(
        &self,
        lane: Arc<Lane<B>>,
        len: usize,
        name: Option<&str>,
    ) -> Result<Block<B>, CudaError> {
        let element_bytes = size_of::<T>();
        let size_bytes = len.checked_mul(element_bytes).ok_or(CudaError::TooLarge { len, element_bytes })? as u64;
        let Allocation { handle, address, .. } = match name {
            None => self.allocate_on(&lane, size_bytes)?,
            Some(name) => self.state.core.allocate_named(self.pool_for(lane.stream)?, lane.stream, size_bytes, name)?,
        };
        Ok(Block::of(ManuallyDrop::new(Some(lane)), handle, address))
    }
}

/// Frees an allocation of a lane whose [uses](crate::uses) are none, and lets go of the lane. Waits for no other thread, where
/// the lane's heap takes mail.
#[inline(always)]
pub(crate) fn free<B: CudaMemory>(lane: Arc<Lane<B>>, handle: Handle) {
    if let Some(lane) = lane.heap.entrance().free(handle, lane, core_of, note_refused) {
        let_go(lane);
    }
}

/// As [`free`], of an allocation that other streams used: their work until now has an event when this returns.
#[inline(never)]
pub(crate) fn free_behind_uses<B: CudaMemory>(lane: Arc<Lane<B>>, handle: Handle) {
    if let Some(lane) = lane.heap.entrance().free_used(handle, lane, core_of, note_refused) {
        let_go(lane);
    }
}

#[inline(always)]
fn core_of<B: CudaMemory>(lane: &Arc<Lane<B>>) -> &CoreAllocator<B> {
    &lane.state.core
}

#[cold]
fn note_refused<B: CudaMemory>(lane: &Arc<Lane<B>>, error: FreeError) {
    lane.state.note_drop_error(DropError::Free(error));
}

/// Lets go of a lane that is not among the spares, and with it of the allocator perhaps.
#[inline(never)]
fn let_go<B: CudaMemory>(lane: Arc<Lane<B>>) {
    drop(lane);
}
