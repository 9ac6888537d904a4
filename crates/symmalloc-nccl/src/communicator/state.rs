//! What a communicator is doing, and what became of it.

use std::fmt;

/// What became of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommState {
    /// It can be used.
    Ready,
    /// It was destroyed in order. Its windows are gone.
    Destroyed,
    /// It was aborted, by the program or because of an error. Its windows are gone.
    Aborted,
    /// It is lost: a call of NCCL's does not end, so nothing can be taken back yet. It becomes [`Aborted`](Self::Aborted) if it
    /// ends after all, for example when the peers are gone; until then what it holds stays as it is.
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

/// What was waited for when a deadline passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// The ranks connect.
    Connect,
    /// The communicator is split.
    Split,
    /// A window is made.
    Register,
    /// A buffer of this rank's is registered.
    RegisterBuffer,
    /// Memory is deregistered.
    Deregister,
    /// A collective is given to the stream.
    Submit,
    /// A collective runs on the device.
    Run,
    /// The communicator is destroyed.
    Destroy,
    /// The communicator is aborted.
    Abort,
}

impl Stage {
    /// Whether a communicator in this stage was never ready.
    pub(super) fn is_birth(self) -> bool {
        self == Stage::Connect
    }

    /// Whether all ranks come to it, and the watchdog knows of it.
    pub(super) fn is_watched(self) -> bool {
        matches!(self, Stage::Split | Stage::Register | Stage::Submit | Stage::Destroy)
    }

    /// The call whose outcome NCCL reports later.
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
