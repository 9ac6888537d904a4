//! The states of a communicator, and the stages of its calls.

use std::fmt;

/// The state of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommState {
    /// Usable.
    Ready,
    /// Destroyed normally. Its windows are gone.
    Destroyed,
    /// Aborted by the program or because of an error. Its windows are gone.
    Aborted,
    /// Lost: an NCCL call does not return, so nothing can be released yet. The state becomes [`Aborted`](Self::Aborted) if the call
    /// returns later, for example when the peers are gone. Until then its resources remain allocated.
    Lost,
}

impl fmt::Display for CommState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CommState::Ready => "ready",
            CommState::Destroyed => "destroyed",
            CommState::Aborted => "aborted",
            CommState::Lost => "lost",
        })
    }
}

/// The operation in progress when a deadline expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// The ranks connect.
    Connect,
    /// The communicator is split.
    Split,
    /// A window is registered.
    Register,
    /// A buffer of this rank is registered.
    RegisterBuffer,
    /// Memory is deregistered.
    Deregister,
    /// A collective is submitted to the stream.
    Submit,
    /// A collective runs on the device.
    Run,
    /// The communicator is destroyed.
    Destroy,
    /// The communicator is aborted.
    Abort,
}

impl Stage {
    /// Returns `true` if a communicator in this stage was never ready.
    pub(super) fn is_birth(self) -> bool {
        self == Stage::Connect
    }

    /// Returns `true` if all ranks perform this stage and the watchdog observes it.
    pub(super) fn is_watched(self) -> bool {
        matches!(self, Stage::Split | Stage::Register | Stage::Submit | Stage::Destroy)
    }

    /// Returns the name of the NCCL call of this stage, for errors that NCCL reports later.
    pub(super) fn call(self) -> &'static str {
        match self {
            Stage::Connect => "ncclCommInitRankConfig",
            Stage::Split => "ncclCommSplit",
            Stage::Register => "ncclCommWindowRegister",
            Stage::RegisterBuffer => "ncclCommRegister",
            Stage::Deregister => "ncclCommWindowDeregister",
            Stage::Submit | Stage::Run => "ncclCommGetAsyncError",
            Stage::Destroy => "ncclCommFinalize",
            Stage::Abort => "ncclCommAbort",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Connect => "connecting",
            Stage::Split => "splitting",
            Stage::Register => "registering a window",
            Stage::RegisterBuffer => "registering a buffer",
            Stage::Deregister => "deregistering memory",
            Stage::Submit => "submitting a collective",
            Stage::Run => "a collective on the device",
            Stage::Destroy => "destroying it",
            Stage::Abort => "aborting it",
        })
    }
}
