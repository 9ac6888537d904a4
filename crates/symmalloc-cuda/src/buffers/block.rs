//! An owned allocation: the common part of device buffers and host buffers.

use crate::error::{CudaError, DropError};
use crate::pools::{AllocatorState, StreamAllocator, StreamAllocatorRef};
use std::mem;
use symmalloc_core::Handle;
use symmalloc_files::is_forked;

/// An allocation that is freed when it is dropped. If freeing fails, the error is counted and the memory stays allocated.
pub(super) struct OwnedBlock<A: StreamAllocatorRef> {
    /// The allocator of the block; `None` once this value no longer owns the block.
    allocator: Option<A>,
    handle: Handle,
    /// Address of the first byte; 0 if the block is empty.
    address: u64,
}

impl<A: StreamAllocatorRef> OwnedBlock<A> {
    /// Allocates memory for `len` elements.
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

    /// Takes ownership of an allocation that no other code frees.
    #[inline]
    pub(super) fn of(allocator: &A, handle: Handle, address: u64) -> Self {
        OwnedBlock { allocator: Some(allocator.clone()), handle, address }
    }

    /// Moves the block out of this value, which no longer owns it afterwards.
    pub(super) fn take(&mut self) -> Self {
        OwnedBlock { allocator: self.allocator.take(), handle: self.handle, address: self.address }
    }

    /// Returns the reference to the block's allocator.
    #[inline]
    pub(super) fn allocator_ref(&self) -> &A {
        self.allocator.as_ref().expect("a block is moved only out of values that are dropped next")
    }

    /// Returns the block's allocator.
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

    /// Returns the address of the first byte; 0 if the block is empty.
    #[inline]
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Returns a reference to the address, for kernel arguments.
    #[inline]
    pub(super) fn address_ref(&self) -> &u64 {
        &self.address
    }

    /// Returns `true` if dropping this value frees the block.
    #[inline]
    pub(super) fn is_owned(&self) -> bool {
        self.allocator.is_some()
    }

    /// Gives up ownership, so that dropping this value does not free the block.
    pub(super) fn disown(&mut self) {
        self.allocator = None;
    }
}

impl<A: StreamAllocatorRef> Drop for OwnedBlock<A> {
    #[inline]
    fn drop(&mut self) {
        let Some(allocator) = &self.allocator else { return };
        if is_forked() {
            // The block and its allocator belong to the parent process, so keep a reference to the allocator forever. Freeing the block
            // could also deadlock: the heap's lock may be held by a thread that does not exist in the child.
            return mem::forget(allocator.clone());
        }
        let state = allocator.stream_allocator().state();
        if let Err(error) = state.free(self.handle, self.address) {
            state.note_drop_error(DropError::Free(error));
        }
    }
}
