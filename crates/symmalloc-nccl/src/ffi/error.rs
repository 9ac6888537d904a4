//! Errors of loading NCCL and of its calls.

use crate::ffi::version::NcclVersion;
use std::fmt;
use thiserror::Error;

/// An error that prevents the use of libnccl.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library could be opened.
    #[error(
        "libnccl cannot be opened ({}): install NCCL, put the folder of libnccl.so.2 on LD_LIBRARY_PATH, or name the file \
         in SYMMALLOC_NCCL_LIBRARY", .tried.join("; ")
    )]
    LibraryMissing {
        /// Each name that was tried, in order, with the system's error.
        tried: Vec<String>,
    },
    /// The library lacks a call that every supported version has.
    #[error("{path} has no {symbol}: it is not NCCL, or it is incomplete; set SYMMALLOC_NCCL_LIBRARY to another file")]
    SymbolMissing {
        /// Path of the library.
        path: String,
        /// Name of the missing call.
        symbol: &'static str,
    },
    /// The library does not report its version.
    #[error("ncclGetVersion of {path} failed with {code}: it is not NCCL; set SYMMALLOC_NCCL_LIBRARY to another file")]
    NoVersion {
        /// Path of the library.
        path: String,
        /// The result of the call.
        code: i32,
    },
    /// The library is older than the minimum version.
    #[error("{path} is NCCL {version}: install {} or newer, or set SYMMALLOC_NCCL_LIBRARY to one", NcclVersion::OLDEST)]
    TooOld {
        /// Path of the library.
        path: String,
        /// The library's version.
        version: NcclVersion,
    },
}

/// An NCCL call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The call, for example `ncclCommInitRankConfig`.
    pub call: &'static str,
    /// NCCL's code (`ncclResult_t`).
    pub code: i32,
    /// NCCL's last message in this process, which may concern a different communicator.
    pub detail: Option<Box<str>>,
}

/// `ncclUnhandledCudaError`.
pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
/// `ncclSystemError`.
pub(crate) const SYSTEM_ERROR: i32 = 2;
/// `ncclInternalError`.
pub(crate) const INTERNAL_ERROR: i32 = 3;
/// `ncclInvalidArgument`.
pub(crate) const INVALID_ARGUMENT: i32 = 4;
/// `ncclInvalidUsage`.
pub(crate) const INVALID_USAGE: i32 = 5;
/// `ncclRemoteError`.
pub(crate) const REMOTE_ERROR: i32 = 6;
/// `ncclInProgress`.
pub(crate) const IN_PROGRESS: i32 = 7;

impl NcclError {
    /// Returns the name of the code.
    pub fn name(&self) -> &'static str {
        match self.code {
            0 => "ncclSuccess",
            UNHANDLED_CUDA_ERROR => "ncclUnhandledCudaError",
            SYSTEM_ERROR => "ncclSystemError",
            INTERNAL_ERROR => "ncclInternalError",
            INVALID_ARGUMENT => "ncclInvalidArgument",
            INVALID_USAGE => "ncclInvalidUsage",
            REMOTE_ERROR => "ncclRemoteError",
            IN_PROGRESS => "ncclInProgress",
            _ => "an ncclResult_t",
        }
    }

    fn advice(&self) -> &'static str {
        match self.code {
            UNHANDLED_CUDA_ERROR => {
                "a CUDA call inside NCCL failed, or NCCL does not support the memory: run with NCCL_DEBUG=WARN"
            }
            SYSTEM_ERROR => {
                "the network or the system failed: check NCCL_SOCKET_IFNAME and the other ranks, run with NCCL_DEBUG=WARN"
            }
            INVALID_ARGUMENT | INVALID_USAGE => "run with NCCL_DEBUG=WARN to see which argument is invalid",
            REMOTE_ERROR => "another rank is gone or the network failed: look for the first error among the ranks",
            _ => "run with NCCL_DEBUG=INFO",
        }
    }

    /// Returns `true` if the communicator is unusable after this error.
    pub(crate) fn is_fatal(&self) -> bool {
        !matches!(self.code, INVALID_ARGUMENT | INVALID_USAGE)
    }

    /// Returns `true` if the error usually means that another rank is gone.
    pub(crate) fn is_of_another_rank(&self) -> bool {
        matches!(self.code, SYSTEM_ERROR | REMOTE_ERROR)
    }
}

impl std::error::Error for NcclError {}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {} ({})", self.call, self.code, self.name())?;
        if let Some(detail) = &self.detail {
            write!(f, ", last message: {detail}")?;
        }
        write!(f, ": {}", self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refused_arguments_leave_a_communicator_usable() {
        let is_fatal = |code| NcclError { call: "ncclAllReduce", code, detail: None }.is_fatal();
        assert_eq!([1, 2, 3, 6, 99].map(is_fatal), [true; 5]);
        assert_eq!([4, 5].map(is_fatal), [false; 2]);
    }
}
