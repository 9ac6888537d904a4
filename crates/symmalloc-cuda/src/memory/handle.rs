//! Handles of physical memory that another process can import.

use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD};
use std::ffi::c_uint;
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
