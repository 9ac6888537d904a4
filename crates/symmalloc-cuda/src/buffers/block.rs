//! One owned allocation: what buffers of device and of host memory have in common.

use crate::error::{CudaError, DropError};
use crate::pools::{AllocatorState, StreamAllocator, StreamAllocatorRef};
use symmalloc_core::Handle;

/// An allocation that is freed when it is dropped. An error is counted then, and the memory stays allocated.
pub(super) struct OwnedBlock<A: StreamAllocatorRef> {
    /// Where it was allocated; `None` once the block is not this one's to free.
    allocator: Option<A>,
    handle: Handle,
    /// 0 when there are no bytes.
    address: u64,
}

impl<A: StreamAllocatorRef> OwnedBlock<A> {
    /// Room for `len` elements.
    #[inline]
    pub(super) fn allocate<T>(allocator: &A, len: usize, name: Option<&str>) -> Result<Self, CudaError> {
        let element_bytes = size_of::<T>();
        let size_bytes = len.checked_mul(element_bytes).ok_or(CudaError::TooLarge { len, element_bytes })? as u64;
        let allocation = match name {
            None => allocator.stream_allocator().allocate(size_bytes)?,
            Some(name) => allocator.stream_allocator().allocate_named(size_bytes, name)?,
        };
        Ok(Self::of(allocator, allocation.handle, allocation.address.0))
    }

    /// Takes over an allocation that no other code frees.
    #[inline]
    pub(super) fn of(allocator: &A, handle: Handle, address: u64) -> Self {
        OwnedBlock { allocator: Some(allocator.clone()), handle, address }
    }

    /// The same block, which this does not own any more.
    pub(super) fn take(&mut self) -> Self {
        OwnedBlock { allocator: self.allocator.take(), handle: self.handle, address: self.address }
    }

    /// How it refers to where it was allocated.
    #[inline]
    pub(super) fn allocator_ref(&self) -> &A {
        self.allocator.as_ref().expect("it is taken away only from what is dropped next")
    }

    /// Where it was allocated.
    #[inline]
    pub(super) fn allocator(&self) -> &StreamAllocator<A::Memory> {
        self.allocator_ref().stream_allocator()
    }

    #[inline]
    pub(super) fn state(&self) -> &AllocatorState<A::Memory> {
        self.allocator().state()
    }

    #[inline]
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// The first byte; 0 when there are no bytes.
    #[inline]
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Where the address stands, for kernels' arguments.
    #[inline]
    pub(super) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// Whether dropping it frees it.
    #[inline]
    pub(super) fn is_owned(&self) -> bool {
        self.allocator.is_some()
    }

    /// Dropping it does not free it any more.
    pub(super) fn disown(&mut self) {
        self.allocator = None;
    }
}

impl<A: StreamAllocatorRef> Drop for OwnedBlock<A> {
    #[inline]
    fn drop(&mut self) {
        let Some(allocator) = &self.allocator else { return };
        let state = allocator.stream_allocator().state();
        if let Err(error) = state.free(self.handle, self.address) {
            state.note_drop_error(DropError::Free(error));
        }
    }
}
