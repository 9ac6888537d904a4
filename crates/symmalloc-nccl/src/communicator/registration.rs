//! What NCCL gives for memory that was registered. The kind is in the type, so that the wrong deregistration cannot be called.

use crate::handles::{RegistrationHandle, WindowHandle};
use std::fmt;
use std::sync::Arc;

/// `NCCL_WIN_REQUIRED_ALIGNMENT`: where a window may start.
pub const WINDOW_ALIGNMENT: u64 = 4096;

/// What became of memory that was to be a window.
#[derive(Debug)]
#[must_use = "deregister it before the memory goes back"]
pub enum Registered {
    /// A window: kernels reach the peers' memory through it.
    Window(Window),
    /// The ranks cannot reach each other's memory (no NVLink, no peer access): a plain registration of this rank's.
    Plain(BufferRegistration),
}

/// A window of one communicator over a whole segment, on all its ranks.
///
/// Give it back with [`Communicator::deregister_window`](crate::Communicator::deregister_window) before the memory is
/// unmapped. It is gone, without a call, when its communicator is.
#[must_use = "deregister it before the memory goes back"]
pub struct Window {
    pub(crate) raw: WindowHandle,
    pub(crate) memory: Memory,
}

/// A registration of memory that is this rank's own matter.
///
/// Give it back with [`Communicator::deregister_buffer`](crate::Communicator::deregister_buffer) before the memory is unmapped.
/// It is gone, without a call, when its communicator is.
#[must_use = "deregister it before the memory goes back"]
pub struct BufferRegistration {
    pub(crate) raw: RegistrationHandle,
    pub(crate) memory: Memory,
}

/// Which memory, on which communicator.
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
    /// NCCL's name for it; valid until it is deregistered or its communicator is gone.
    pub fn handle(&self) -> WindowHandle {
        self.raw
    }

    /// Its first byte on this rank.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.memory.size_bytes
    }
}

impl BufferRegistration {
    /// Its first byte.
    pub fn base(&self) -> u64 {
        self.memory.base
    }

    /// Its size in bytes.
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
