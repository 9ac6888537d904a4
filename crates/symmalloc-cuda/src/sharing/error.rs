//! Errors of memory sharing.

use super::message::MessageError;
use crate::error::CudaError;
use crate::memory::{Access, ExportState};
use std::fmt;
use symmalloc_core::units::Counted;
use thiserror::Error;

/// The UUID of a device, as reported by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        self.0.iter().enumerate().try_for_each(|(at, byte)| {
            let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")
        })
    }
}

/// The reason memory could not be exported or attached to. Nothing is mapped in that case, and no descriptor is left open.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShareError {
    /// A driver call failed, or the device is unsuitable.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The memory was created without support for export, which cannot be added later.
    #[error(
        "the memory of this allocator cannot be exported: build its backend with CudaBackend::builder and without plain(), on a device \
         whose MemoryTraits have posix_fd"
    )]
    NotExportable,
    /// The device or the driver cannot create dma-bufs.
    #[error(
        "device {ordinal} does not support dma-buf: use the open kernel modules of a driver for CUDA 11.7 or later on Linux 5.12 or \
         later, or register its memory through nvidia-peermem"
    )]
    NoDmaBuf {
        /// Ordinal of the device.
        ordinal: usize,
    },
    /// The range does not lie in the mapped memory of one segment.
    #[error(
        "{size_bytes} bytes at {address:#x} are not all memory of one segment of this allocator: pass the address and size of a live \
         allocation, or of a segment that is mapped"
    )]
    NotMapped {
        /// Address of the first byte.
        address: u64,
        /// Size in bytes.
        size_bytes: u64,
    },
    /// The driver refused a dma-buf of a range that spans several physical chunks.
    #[error(
        "the driver refused a dma-buf across {chunks} physical chunks ({error}): use a pool with segments:reserved or segments:fixed, \
         whose segments are one chunk each, or one dma-buf for each chunk"
    )]
    ManyChunks {
        /// Number of chunks behind the range.
        chunks: usize,
        /// The driver's error.
        error: crate::error::DriverError,
    },
    /// The pool has no allocation.
    #[error("nothing is allocated in the pool: export it once its memory is allocated")]
    Empty,
    /// The pool changed during the export.
    #[error("allocations were freed during the export of the pool: export it while no thread frees in it")]
    Changed,
    /// The list of allocations exceeds the size of a message.
    #[error(
        "the list of allocations has {bytes} bytes, more than the limit of {most}: export pools with fewer allocations or shorter names"
    )]
    TooLong {
        /// Size of the list in bytes.
        bytes: usize,
        /// Maximum size in bytes.
        most: usize,
    },
    /// The memory has changed since the export.
    #[error("the memory is stale: {0}; export it again, and attach to the new export")]
    Stale(ExportState),
    /// The two processes use different devices.
    #[error(
        "the memory is on {exporter}, but the importer uses {importer}: select the same device in both, see CUDA_VISIBLE_DEVICES"
    )]
    DeviceMismatch {
        /// The exporter's device.
        exporter: DeviceUuid,
        /// The importer's device.
        importer: DeviceUuid,
    },
    /// The exporter grants less access than the importer requested.
    #[error("the importer requested {wanted:?} access, but the exporter grants only {given:?}")]
    AccessRefused {
        /// The requested access.
        wanted: Access,
        /// The granted access.
        given: Access,
    },
    /// The other process uses an incompatible protocol version.
    #[error(
        "the other process uses version {theirs} of the protocol, this one {ours}: build both with the same version of symmalloc"
    )]
    VersionMismatch {
        /// Version of the other process.
        theirs: u32,
        /// Version of this process.
        ours: u32,
    },
    /// The other process gave up because of a driver error.
    #[error("the other process gave up: its driver returned {code}")]
    PeerFailed {
        /// The driver's code; 0 if the cause was not a driver error.
        code: i32,
    },
    /// The other process closed the socket, or exited.
    #[error("the other process closed the socket before the exchange was complete")]
    HungUp,
    /// The other process did not answer in time.
    #[error("the other process did not answer in time: increase the timeout, or check what it waits for")]
    TimedOut,
    /// The socket failed.
    #[error("the socket failed: {}", std::io::Error::from_raw_os_error(*.os_error))]
    Socket {
        /// The system's error number.
        os_error: i32,
    },
    /// The received bytes are not a message of this protocol.
    #[error("invalid message from the other process: {0}")]
    Message(#[from] MessageError),
}

impl From<crate::error::DriverError> for ShareError {
    fn from(error: crate::error::DriverError) -> Self {
        ShareError::Cuda(error.into())
    }
}

impl From<rustix::io::Errno> for ShareError {
    fn from(error: rustix::io::Errno) -> Self {
        match error {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => ShareError::HungUp,
            error => ShareError::Socket { os_error: error.raw_os_error() },
        }
    }
}

/// The reason imported memory cannot be used as requested.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The memory has changed since the export.
    #[error("the imported memory is stale: {state}{}; detach, and attach to a new export", of(.allocation))]
    Stale {
        /// The state of the export.
        state: ExportState,
        /// The name of the freed allocation, if the state is a free and the allocation has a name.
        allocation: Option<Box<str>>,
    },
    /// No allocation has this name.
    #[error("no allocation of the import is called {name:?}")]
    Unknown {
        /// The requested name.
        name: Box<str>,
    },
    /// Several allocations have this name.
    #[error("{count} allocations of the import are called {name:?}: give each a unique name, or use their numbers")]
    Ambiguous {
        /// The requested name.
        name: Box<str>,
        /// Number of allocations with this name.
        count: usize,
    },
    /// No allocation has this number.
    #[error("allocation {number} does not exist: the import has {}", Counted(*count as u64, "allocation"))]
    NoSuchAllocation {
        /// The requested number.
        number: usize,
        /// Number of allocations.
        count: usize,
    },
    /// The size of the allocation is not a multiple of the element size.
    #[error("{size_bytes} bytes are not a multiple of the element size of {element_bytes} bytes")]
    Elements {
        /// Size in bytes that the exporter requested.
        size_bytes: u64,
        /// Size of an element in bytes.
        element_bytes: usize,
    },
    /// The import was attached for reading only.
    #[error("the import is read-only: attach with Access::ReadWrite")]
    ReadOnly,
    /// The import was detached.
    #[error("the import is detached")]
    Detached,
}

fn of(allocation: &Option<Box<str>>) -> String {
    allocation.as_ref().map_or_else(String::new, |name| format!(", {name:?}"))
}
