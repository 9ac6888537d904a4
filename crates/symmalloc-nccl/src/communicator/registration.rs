//! Handles of registered memory. Their types distinguish the kinds, so that each is deregistered by the matching call.

use crate::ffi::handles::{RegistrationHandle, WindowHandle};
use std::fmt;
use std::sync::Arc;

/// Required alignment of a window's base address (`NCCL_WIN_REQUIRED_ALIGNMENT`), in bytes.
pub const WINDOW_ALIGNMENT: u64 = 4096;

/// The result of a window registration.
#[derive(Debug)]
#[must_use = "deregister it before the memory is released"]
pub enum Registered {
    /// A window, through which kernels access the peers' memory.
    Window(Window),
    /// A plain registration of this rank, because the ranks cannot access each other's memory (no NVLink, no peer access).
    Plain(BufferRegistration),
}

/// A window of one communicator over a whole segment, on all of its ranks.
///
/// Deregister it with [`Communicator::deregister_window`](crate::Communicator::deregister_window) before the memory is unmapped. If the
/// communicator ends first, no call is needed.
#[must_use = "deregister it before the memory is released"]
pub struct Window {
    pub(crate) raw: WindowHandle,
    pub(crate) memory: Memory,
}

/// A registration of memory that is local to this rank.
///
/// Deregister it with [`Communicator::deregister_buffer`](crate::Communicator::deregister_buffer) before the memory is unmapped. If the
/// communicator ends first, no call is needed.
#[must_use = "deregister it before the memory is released"]
pub struct BufferRegistration {
    pub(crate) raw: RegistrationHandle,
    pub(crate) memory: Memory,
}

/// The memory of a registration, and its communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) base: u64,
    pub(crate) size_bytes: u64,
    /// [`Communicator::serial`](crate::Communicator) of the owner.
    pub(crate) owner: u64,
    pub(crate) owner_name: Arc<str>,
}

impl Registered {
    pub(crate) fn base(&self) -> u64 {
        match self {
            Registered::Window(window) => window.base(),
            Registered::Plain(registration) => registration.base(),
        }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Registered::Window(window) => window.size_bytes(),
            Registered::Plain(registration) => registration.size_bytes(),
        }
    }
}

impl Window {
    /// Returns NCCL's handle, which is valid until the window is deregistered or its communicator ends.
    pub fn handle(&self) -> WindowHandle {
        self.raw
    }

    /// Returns the address of the window's first byte on this rank.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Returns its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.size_bytes
    }
}

impl BufferRegistration {
    /// Returns the address of the memory's first byte.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Returns its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.size_bytes
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("handle", &self.raw).field("memory", &self.memory).finish()
    }
}

impl fmt::Debug for BufferRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferRegistration").field("memory", &self.memory).finish_non_exhaustive()
    }
}
