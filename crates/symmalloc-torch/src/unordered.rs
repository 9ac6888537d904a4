//! Memory for work on streams that the caller does not name.
//!
//! Some interfaces of runtimes allocate and free without a stream: ONNX Runtime's external allocator, Numba's memory managers,
//! synchronous memory resources in C++. Nothing says then which work still uses what is freed, so the free waits for the device, as
//! `cuMemFree` does. A pool of its own keeps the memory apart from what is only ordered by a stream: whatever it holds free, nobody
//! uses any more.

use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::streams::RawStream;
use std::ffi::c_void;
use symmalloc_cuda::CudaError;

impl DeviceAllocator {
    /// Allocates for work on any stream. Zero bytes are a null pointer and no op.
    pub(crate) fn allocate_unordered(&self, size_bytes: u64) -> Result<*mut c_void, Error> {
        let pool = self.unordered.get_or_make(|| self.create_pool(None))?;
        // All of it is of one heap, that of the default stream, which there always is.
        // SAFETY: the default stream is of every context.
        unsafe { self.allocate(pool, size_bytes, RawStream::new(std::ptr::null_mut())) }
    }

    /// Frees an allocation, whatever it was allocated for, when all work that was given to the device is done. Blocks until then. A
    /// null pointer is no op. When the device cannot be waited for, as during a capture, the allocation is still live.
    pub(crate) fn free_unordered(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        // What is not ours is no reason to wait.
        self.find(pointer)?;
        self.allocator().device().synchronize().map_err(CudaError::from)?;
        self.free(pointer)
    }

    /// Frees an allocation behind the work that was given to a stream so far, whatever stream it was allocated for. What was allocated
    /// for none is freed as such.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
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

    /// Frees an allocation as what it was allocated as.
    pub(crate) fn free_any(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        if self.unordered.is(self.find(pointer)?.pool) { self.free_unordered(pointer) } else { self.free(pointer) }
    }
}
