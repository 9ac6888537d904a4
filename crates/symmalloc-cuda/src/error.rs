//! The error types of this crate. Errors of driver calls state the call, the code, and a suggested action.

use crate::error_names::error_name;
use crate::resize::ResizeError;
use std::fmt;
use symmalloc_core::backend::{BackendError, Reason};
use symmalloc_core::config::ConfigError;
use symmalloc_core::errors::{AllocateError, FreeError, PoolError, StreamError, TrimError, UnknownError};
use symmalloc_core::ids::PoolId;
use symmalloc_core::sleep::SleepError;
use symmalloc_core::units::Counted;
use thiserror::Error;

/// An error that prevents the use of libcuda. No driver call was made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library could be opened.
    #[error(
        "libcuda cannot be opened ({}): install the NVIDIA driver, put the folder of libcuda.so.1 on LD_LIBRARY_PATH, or name \
         the file in SYMMALLOC_CUDA_LIBRARY", .tried.join("; ")
    )]
    LibraryMissing {
        /// Each name that was tried, in order, with the system's error message.
        tried: Vec<String>,
    },
    /// The library lacks a required call: the driver is older than CUDA 11.4, or the file is not libcuda.
    #[error(
        "{path} has no {symbol}: the driver is too old, install a newer one (CUDA 11.4 at least); or name another file in \
         SYMMALLOC_CUDA_LIBRARY"
    )]
    SymbolMissing {
        /// Path of the library.
        path: String,
        /// Name of the missing function.
        symbol: &'static str,
    },
}

/// A failed driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// Name of the call, for example `cuMemCreate`.
    pub call: &'static str,
    /// The driver's code (`CUresult`).
    pub code: i32,
}

/// `CUDA_ERROR_INVALID_VALUE`.
pub(crate) const INVALID_VALUE: i32 = 1;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(crate) const NOT_SUPPORTED: i32 = 801;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub(crate) const NOT_INITIALIZED: i32 = 3;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: i32 = 100;
/// `CUDA_ERROR_INVALID_DEVICE`.
pub(crate) const INVALID_DEVICE: i32 = 101;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub(crate) const INVALID_CONTEXT: i32 = 201;
/// `CUDA_ERROR_INVALID_HANDLE`.
pub(crate) const INVALID_HANDLE: i32 = 400;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: i32 = 600;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION`.
pub(crate) const CAPTURE_ISOLATION: i32 = 905;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
pub(crate) const CAPTURE_IMPLICIT: i32 = 906;

impl DriverError {
    /// Classifies the code for the allocator: out of memory, a lost device, or any other failure.
    pub fn reason(&self) -> Reason {
        match self.code {
            OUT_OF_MEMORY => Reason::OutOfMemory,
            // Codes after which every call in the context fails, according to the driver's documentation.
            46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 => Reason::DeviceLost,
            _ => Reason::Refused,
        }
    }

    /// Returns the name of the code. Asks the driver for names that this crate does not know.
    pub fn name(&self) -> Option<&'static str> {
        let name = match self.code {
            INVALID_VALUE => "CUDA_ERROR_INVALID_VALUE",
            OUT_OF_MEMORY => "CUDA_ERROR_OUT_OF_MEMORY",
            NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            INVALID_DEVICE => "CUDA_ERROR_INVALID_DEVICE",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            INVALID_HANDLE => "CUDA_ERROR_INVALID_HANDLE",
            NOT_READY => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            704 => "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            710 => "CUDA_ERROR_ASSERT",
            714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
            715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
            717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
            718 => "CUDA_ERROR_INVALID_PC",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            CAPTURE_UNSUPPORTED => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            CAPTURE_ISOLATION => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            CAPTURE_IMPLICIT => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            999 => "CUDA_ERROR_UNKNOWN",
            code => return error_name(code),
        };
        Some(name)
    }

    fn advice(&self) -> &'static str {
        match (self.code, self.reason()) {
            (OUT_OF_MEMORY, _) => "free or trim memory, or end other processes on the device (nvidia-smi lists them)",
            (34, _) => {
                "the library found is the toolkit's stub: put the driver's own libcuda first on the library path"
            }
            (NO_DEVICE | INVALID_DEVICE, _) => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
            (802, _) => "start nvidia-fabricmanager, or wait for it",
            (803 | 804, _) => "the driver's library and kernel module differ: update both, and restart",
            (999, _) => "check dmesg and nvidia-smi; the kernel module may need to be reloaded",
            (CAPTURE_UNSUPPORTED | 901 | CAPTURE_ISOLATION | CAPTURE_IMPLICIT, _) => {
                "the call is not allowed during a stream capture: make it before the capture begins"
            }
            (_, Reason::DeviceLost) => "a kernel failed or the device is gone: end the process; its context is lost",
            _ => "see the documentation of the call",
        }
    }
}

impl std::error::Error for DriverError {}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.call, self.code)?;
        if let Some(name) = self.name() {
            write!(f, " ({name})")?;
        }
        write!(f, ": {}", self.advice())
    }
}

impl From<DriverError> for BackendError {
    fn from(error: DriverError) -> Self {
        BackendError::new(error.call, error.code, error.reason())
    }
}

impl From<BackendError> for DriverError {
    /// Backend errors of this crate come from driver calls.
    fn from(error: BackendError) -> Self {
        DriverError { call: error.call, code: error.code }
    }
}

/// The error type of this crate's operations.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// libcuda cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The device does not exist.
    #[error(
        "device {ordinal} does not exist; the driver reports {}: check nvidia-smi and CUDA_VISIBLE_DEVICES", Counted(*devices as u64, "device")
    )]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: usize,
        /// Number of devices that the driver reports.
        devices: usize,
    },
    /// The peer cannot access the device's memory, or the memory cannot be mapped for the peer.
    #[error("device {peer} cannot access the memory of device {ordinal}: leave it out of the peers")]
    NoPeerAccess {
        /// The device that owns the memory.
        ordinal: usize,
        /// The device that should get access.
        peer: usize,
    },
    /// The chunk size is not a positive multiple of the device's granularity.
    #[error("chunks of {chunk_bytes} bytes cannot be mapped: use a positive multiple of {granularity_bytes}")]
    ChunkSize {
        /// The requested chunk size in bytes.
        chunk_bytes: u64,
        /// The device's mapping granularity in bytes.
        granularity_bytes: u64,
    },
    /// The prefetch size is smaller than a chunk, or not a multiple of the device's granularity.
    #[error(
        "cannot prefetch {prefetch_bytes} bytes: use a multiple of {granularity_bytes} that is at least the chunk size, \
         {chunk_bytes}"
    )]
    PrefetchSize {
        /// The requested size in bytes.
        prefetch_bytes: u64,
        /// Size of the largest chunk in bytes.
        chunk_bytes: u64,
        /// The device's mapping granularity in bytes.
        granularity_bytes: u64,
    },
    /// The size of the reservation from which descending addresses are handed out is not a positive multiple of the device's granularity.
    #[error(
        "cannot reserve {size_bytes} bytes for descending addresses: use a positive multiple of {granularity_bytes}"
    )]
    AddressSpace {
        /// The requested size in bytes.
        size_bytes: u64,
        /// The device's mapping granularity in bytes.
        granularity_bytes: u64,
    },
    /// The stream is the per-thread default stream (handle 2), which differs in each thread.
    #[error(
        "the per-thread default stream is a different stream in each thread: create a stream and register it instead"
    )]
    PerThreadStream,
    /// The stream and the allocator belong to different contexts.
    #[error("the stream belongs to another context than the allocator: use a stream of the allocator's context")]
    ForeignStream,
    /// The program is already capturing the stream.
    #[error("the stream is already being captured: begin the capture with GraphPool::begin")]
    AlreadyCapturing,
    /// The capture recorded nothing or was invalidated.
    #[error("the capture ended without a graph: nothing was submitted to the stream, or a call in it was not allowed")]
    EmptyCapture,
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An allocation failed.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A stream could not be registered.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A pool could not be created or changed.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A trim failed.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The pool or stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool could not be put to sleep or woken.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// The pool could not be resized.
    #[error(transparent)]
    Resize(Box<ResizeError>),
    /// A pool whose memory the graph uses is asleep.
    #[error("the graph uses memory of {pool}, which is asleep: wake it first")]
    GraphSleeps {
        /// The pool that is asleep.
        pool: PoolId,
    },
    /// The device does not support virtual memory management, so addresses cannot outlive their memory.
    #[error(
        "pools cannot sleep without virtual memory: memory from cuMemAlloc loses its addresses when it is released"
    )]
    NoSleep,
    /// The size in bytes exceeds the range of an address.
    #[error("{len} elements of {element_bytes} bytes exceed the address space")]
    TooLarge {
        /// Number of elements.
        len: usize,
        /// Size of one element in bytes.
        element_bytes: usize,
    },
}

impl From<ResizeError> for CudaError {
    fn from(error: ResizeError) -> Self {
        CudaError::Resize(Box::new(error))
    }
}

/// An error that no call could return: it occurred in a `Drop` implementation, or while a pointer was taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DropError {
    /// A buffer could not be freed; its memory stays allocated.
    #[error("a buffer could not be freed: {0}")]
    Free(#[from] FreeError),
    /// A use on another stream could not be recorded or ordered. If this happened while a pointer was taken, the host waited for the work
    /// instead, where possible. If it happened while a buffer was dropped, the buffer's memory stays allocated.
    #[error("a use on another stream could not be ordered: {0}")]
    Order(#[from] BackendError),
}

/// Errors counted by [`CachingAllocator::drop_errors`](crate::CachingAllocator::drop_errors).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DropErrors {
    /// Number of errors since the allocator was created.
    pub count: u64,
    /// The last error.
    pub last: Option<DropError>,
}
