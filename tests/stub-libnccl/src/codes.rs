//! The values of `ncclResult_t`.

use std::ffi::{CStr, c_int};

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclUnhandledCudaError`.
pub const CUDA_ERROR: c_int = 1;
/// `ncclSystemError`.
pub const SYSTEM_ERROR: c_int = 2;
/// `ncclInternalError`.
pub const INTERNAL_ERROR: c_int = 3;
/// `ncclInvalidArgument`.
pub const INVALID_ARGUMENT: c_int = 4;
/// `ncclInvalidUsage`.
pub const INVALID_USAGE: c_int = 5;
/// `ncclRemoteError`.
pub const REMOTE_ERROR: c_int = 6;
/// `ncclInProgress`.
pub const IN_PROGRESS: c_int = 7;

/// Returns the text of `ncclGetErrorString`.
pub fn text(code: c_int) -> &'static CStr {
    match code {
        SUCCESS => c"no error",
        CUDA_ERROR => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        SYSTEM_ERROR => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        INTERNAL_ERROR => c"internal error - please report this issue to the NCCL developers",
        INVALID_ARGUMENT => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        INVALID_USAGE => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}
