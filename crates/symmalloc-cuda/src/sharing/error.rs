//! What can go wrong when memory is shared.

use super::message::MessageError;
use crate::error::CudaError;
use crate::memory::{Access, ExportState};
use std::fmt;
use thiserror::Error;

/// The UUID of a device, as the driver gives it.
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

/// Why memory was not exported, or not attached to. Nothing is mapped then, and no descriptor is left open.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShareError {
    /// The driver refused, or the device does not fit.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// How memory can be exported is chosen when it is made, and this was made without.
    #[error(
        "the memory of this allocator cannot be exported: build its backend with CudaBackend::builder and without plain(), on a device \
         whose MemoryTraits have posix_fd"
    )]
    NotExportable,
    /// The pool has no allocation.
    #[error("nothing is allocated in the pool: export it once its memory is allocated")]
    Empty,
    /// The pool changed while it was exported.
    #[error("allocations were freed while the pool was exported: export it when nobody frees in it")]
    Changed,
    /// The list of allocations is longer than a message may be.
    #[error(
        "a list of {bytes} bytes cannot be sent, only {most}: export pools with fewer allocations or shorter names"
    )]
    TooLong {
        /// Its size.
        bytes: usize,
        /// What can be sent.
        most: usize,
    },
    /// The memory is no longer what was exported.
    #[error("the memory is stale: {0}; export it again, and attach to that")]
    Stale(ExportState),
    /// The two processes use different devices.
    #[error(
        "the memory is on {exporter}, the importer uses {importer}: choose the same device in both, see CUDA_VISIBLE_DEVICES"
    )]
    OtherDevice {
        /// The exporter's.
        exporter: DeviceUuid,
        /// The importer's.
        importer: DeviceUuid,
    },
    /// The exporter gives less than the importer wants.
    #[error("the importer wants {wanted:?}, the exporter gives {given:?}")]
    AccessRefused {
        /// What the importer asked for.
        wanted: Access,
        /// What it may have.
        given: Access,
    },
    /// The other process is of a version that does not speak as this one does.
    #[error(
        "the other process speaks version {theirs} of the protocol, this one {ours}: build both with the same symmalloc"
    )]
    OtherVersion {
        /// The other one's.
        theirs: u32,
        /// This one's.
        ours: u32,
    },
    /// The other process could not go on, and says which driver call failed with which code.
    #[error("the other process gave up: its driver returned {code}")]
    PeerFailed {
        /// The driver's code; 0 when it was something else.
        code: i32,
    },
    /// The other process closed the socket, or ended.
    #[error("the other process closed the socket before both were done")]
    HungUp,
    /// The other process did not answer in time.
    #[error("the other process did not answer in time: give it longer, or see what it waits for")]
    TimedOut,
    /// The socket failed.
    #[error("the socket failed: {}", std::io::Error::from_raw_os_error(*.os_error))]
    Socket {
        /// The system's number of the error.
        os_error: i32,
    },
    /// What came is no message of this protocol.
    #[error("what came is not what a symmalloc process sends: {0}")]
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

/// Why imported memory cannot be used as asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ImportError {
    /// It is no longer what was exported.
    #[error("the imported memory is stale: {state}{}; detach, and attach to a new export", of(.allocation))]
    Stale {
        /// What became of it.
        state: ExportState,
        /// The name of the allocation that was freed, where it was that and the allocation has a name.
        allocation: Option<Box<str>>,
    },
    /// No allocation has this name.
    #[error("no allocation of the import is called {name:?}")]
    Unknown {
        /// The name asked for.
        name: Box<str>,
    },
    /// Several allocations have this name.
    #[error("{count} allocations of the import are called {name:?}: give each a name of its own, or use their numbers")]
    Ambiguous {
        /// The name asked for.
        name: Box<str>,
        /// How many have it.
        count: usize,
    },
    /// There is no allocation with this number.
    #[error("there is no allocation {number} in the import, which has {count}")]
    NoSuchAllocation {
        /// The number asked for.
        number: usize,
        /// How many there are.
        count: usize,
    },
    /// The allocation is not a number of whole elements.
    #[error("{size_bytes} bytes are no whole number of elements of {element_bytes} bytes")]
    Elements {
        /// Bytes that the exporter asked for.
        size_bytes: u64,
        /// Bytes of an element.
        element_bytes: usize,
    },
    /// It was attached to for reading.
    #[error("the import is read-only: attach with Access::ReadWrite")]
    ReadOnly,
    /// It is not attached any more.
    #[error("the import is detached")]
    Detached,
}

fn of(allocation: &Option<Box<str>>) -> String {
    allocation.as_ref().map_or_else(String::new, |name| format!(", {name:?}"))
}
