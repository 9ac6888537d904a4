//! One owned allocation: what buffers of device and of host memory have in common.

use crate::backend::CudaMemory;
use crate::error::{CudaError, DropError};
use crate::pools::{AllocatorState, PoolStream};
use std::sync::Arc;
use symmalloc_core::{Handle, StreamId};

/// An allocation that is freed when it is dropped. An error is counted then, and the memory stays allocated.
pub(super) struct OwnedBlock<B: CudaMemory> {
    /// `None` once the block is not this one's to free.
    pool_stream: Option<Arc<PoolStream<B>>>,
    handle: Handle,
    /// 0 when there are no bytes.
    address: u64,
}

impl<B: CudaMemory> OwnedBlock<B> {
    /// Room for `len` elements.
    #[inline]
    pub(super) fn allocate<T>(
        pool_stream: &Arc<PoolStream<B>>,
        len: usize,
        name: Option<&str>,
    ) -> Result<Self, CudaError> {
        let element_bytes = size_of::<T>();
        let size_bytes = len.checked_mul(element_bytes).ok_or(CudaError::TooLarge { len, element_bytes })? as u64;
        let allocation = match name {
            None => pool_stream.allocate(size_bytes)?,
            Some(name) => pool_stream.allocate_named(size_bytes, name)?,
        };
        Ok(Self::of(pool_stream, allocation.handle, allocation.address.0))
    }

    /// Takes over an allocation that no other code frees.
    #[inline]
    pub(super) fn of(pool_stream: &Arc<PoolStream<B>>, handle: Handle, address: u64) -> Self {
        OwnedBlock { pool_stream: Some(Arc::clone(pool_stream)), handle, address }
    }

    /// Where it was allocated.
    #[inline]
    pub(super) fn pool_stream(&self) -> &PoolStream<B> {
        self.pool_stream.as_deref().expect("it is taken away only from what is dropped next")
    }

    #[inline]
    pub(super) fn state(&self) -> &AllocatorState<B> {
        self.pool_stream().state()
    }

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

    /// Notes that work on another stream uses it.
    pub(super) fn record_use(&self, stream: StreamId) {
        // Owned and registered: neither the handle nor the stream can be unknown.
        let _known = self.state().core().record_use(self.handle, stream);
    }

    /// Whether dropping it frees it.
    #[inline]
    pub(super) fn is_owned(&self) -> bool {
        self.pool_stream.is_some()
    }

    /// Dropping it does not free it any more.
    pub(super) fn disown(&mut self) {
        self.pool_stream = None;
    }
}

impl<B: CudaMemory> Drop for OwnedBlock<B> {
    #[inline]
    fn drop(&mut self) {
        let Some(pool_stream) = &self.pool_stream else { return };
        if let Err(error) = pool_stream.state().core().free(self.handle) {
            pool_stream.state().note_drop_error(DropError::Free(error));
        }
    }
}
