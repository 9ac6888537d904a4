//! Memory for work on streams that the caller does not name.
//!
//! Some runtime interfaces allocate and free without a stream: ONNX Runtime's external allocator, Numba's memory managers, and synchronous
//! memory resources in C++. The allocator then cannot know which work still uses freed memory, so the free waits for the device, as
//! `cuMemFree` does. A separate pool keeps this memory apart from stream-ordered memory, so that no work uses its free blocks.

use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::streams::RawStream;
use std::ffi::c_void;
use symmalloc_cuda::CudaError;

impl DeviceAllocator {
    /// Allocates for work on any stream. For zero bytes, returns a null pointer and records no op.
    pub(crate) fn allocate_unordered(&self, size_bytes: u64) -> Result<*mut c_void, Error> {
        let pool = self.unordered.get_or_make(|| self.create_pool(None, None))?;
        // All of this memory is in the heap of the default stream.
        // SAFETY: every context has the default stream.
        unsafe { self.allocate(pool, RawStream::new(std::ptr::null_mut()), size_bytes, None) }
    }

    /// Blocks until all submitted work of the device has completed, and frees an allocation of any kind. Ignores a null pointer. If it
    /// cannot wait for the device, as during a capture, the allocation stays live.
    pub(crate) fn free_unordered(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        // Unknown pointers return an error without waiting.
        self.find(pointer)?;
        self.allocator().device().synchronize().map_err(CudaError::from)?;
        self.free(pointer)
    }

    /// Frees an allocation after the work submitted to a stream so far, regardless of the stream of its allocation. Passes memory that was
    /// allocated without a stream to [`free_unordered`](Self::free_unordered).
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn free_on(&self, pointer: *mut c_void, stream: RawStream) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        if self.unordered.is(self.find(pointer)?.pool) {
            return self.free_unordered(pointer);
        }
        // SAFETY: the caller's contract.
        unsafe { self.record_use(pointer, stream) }?;
        self.free(pointer)
    }

    /// Frees an allocation as its pool requires: memory without a stream after a wait for the device, other memory without blocking.
    pub(crate) fn free_any(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        if self.unordered.is(self.find(pointer)?.pool) { self.free_unordered(pointer) } else { self.free(pointer) }
    }
}
