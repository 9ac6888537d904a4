//! Handles of physical memory, for other processes and other devices.

use super::chunks::Part;
use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD};
use crate::error::DriverError;
use std::ffi::{c_uint, c_ulonglong};
use std::os::fd::OwnedFd;

/// Size of a fabric handle in bytes.
pub(crate) const FABRIC_BYTES: usize = 64;

/// The form in which physical memory is passed to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandleKind {
    /// A file descriptor, for a process on the same machine.
    FileDescriptor,
    /// A fabric handle: plain bytes that any process of the same IMEX domain can import.
    Fabric,
}

impl HandleKind {
    pub(crate) fn flag(self) -> c_uint {
        match self {
            HandleKind::FileDescriptor => HANDLE_POSIX_FD,
            HandleKind::Fabric => HANDLE_FABRIC,
        }
    }
}

/// A handle of a chunk, for another process.
#[derive(Debug)]
#[doc(hidden)]
pub enum ExportedHandle {
    FileDescriptor(OwnedFd),
    Fabric(Box<[u8; FABRIC_BYTES]>),
}

/// A dma-buf, and the memory that it refers to. Its owner passes the handles to
/// [`release_held`](super::interface::BackendMemory::release_held).
#[doc(hidden)]
pub struct HeldDmaBuf {
    pub(crate) file: OwnedFd,
    /// Handles that keep the chunks, in the order of `chunks`.
    pub(crate) handles: Vec<c_ulonglong>,
    /// Address ranges of the chunks.
    pub(crate) chunks: Vec<Part>,
}

/// The reason no dma-buf of a range could be created.
#[doc(hidden)]
pub enum DmaBufRefusal {
    /// No memory is mapped at an address, or the addresses belong to different ranges.
    NotMapped,
    /// A driver call failed.
    Driver {
        /// Number of chunks behind the range.
        chunks: usize,
        error: DriverError,
    },
}
