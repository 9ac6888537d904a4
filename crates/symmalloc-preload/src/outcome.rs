//! Conversion of the allocator's errors to driver codes.

use std::ffi::c_int;
use symmalloc_core::errors::{AllocateError, FreeError, OutOfMemoryCause};
use symmalloc_cuda::CudaError;

/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: c_int = 2;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: c_int = 801;
/// `CUDA_ERROR_UNKNOWN`.
pub(crate) const UNKNOWN: c_int = 999;

/// Returns the code for a failed allocation.
pub(crate) fn code_of_allocate(error: &AllocateError) -> c_int {
    match error {
        AllocateError::TooLarge { .. } => OUT_OF_MEMORY,
        AllocateError::OutOfMemory(error) => match &error.cause {
            OutOfMemoryCause::Driver(error) => error.code,
            _ => OUT_OF_MEMORY,
        },
        AllocateError::Fence { error, .. } => error.code,
        AllocateError::Fault(fault) => fault.error.code,
        _ => UNKNOWN,
    }
}

/// Returns the code for a failed free.
pub(crate) fn code_of_free(error: &FreeError) -> c_int {
    match error {
        FreeError::Fence(error) => error.code,
        FreeError::Fault(fault) => fault.error.code,
        FreeError::Handle(_) => INVALID_VALUE,
        _ => UNKNOWN,
    }
}

/// Returns the code for any other failed call.
pub(crate) fn code_of_cuda(error: &CudaError) -> c_int {
    match error {
        CudaError::Driver(error) => error.code,
        CudaError::Allocate(error) => code_of_allocate(error),
        _ => UNKNOWN,
    }
}
