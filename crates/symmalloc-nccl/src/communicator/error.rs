//! Errors of communicators, with the states and stages that they report.

use crate::ffi::calls::WINDOW_ALIGNMENT;
use crate::ffi::error::{LoadError, NcclError};
use crate::ffi::version::{Capability, NcclVersion};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_cuda::{CudaError, DriverError};
use symmalloc_rendezvous::LaunchError;
use symmalloc_rendezvous::RendezvousError;
use symmalloc_watchdog::{Failure, FailureReport};
use thiserror::Error;

/// An error returned by an operation on a communicator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommError {
    /// libnccl cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The environment does not specify this process's rank.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// An NCCL call failed.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// The allocator or the driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Other ranks did not arrive in time, and the communicator was ended. NCCL does not report which ranks are missing.
    #[error(
        "communicator \"{name}\": {stage} took longer than {waited:?}: another rank died, is stuck, or does not make this call \
         (NCCL does not report which). The communicator is {state} now. Look for the first error among the ranks"
    )]
    Deadline {
        /// The communicator's name.
        name: Arc<str>,
        /// The stage that did not complete.
        stage: Stage,
        /// Duration of the wait.
        waited: Duration,
        /// The communicator's state.
        state: CommState,
    },
    /// A collective completed without a rank's message, and NCCL reported no error. This happens if a third rank gives up waiting for the
    /// missing rank and aborts the communicator.
    #[error(
        "communicator \"{name}\": the message of rank {rank} did not arrive: it died, is stuck, or ended the communicator. The \
         communicator is {state} now. Look for the first error among the ranks"
    )]
    PeerLost {
        /// The communicator's name.
        name: Arc<str>,
        /// The first rank whose message is missing.
        rank: u32,
        /// The communicator's state.
        state: CommState,
    },
    /// The watchdog ended the communicator: a rank is gone, stopped or stuck.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// The communicator was already destroyed, aborted or lost.
    #[error(
        "communicator \"{name}\" is {state}{}: connect a new one",
        .cause.as_ref().map_or_else(String::new, |cause| format!(" because of this: {cause}"))
    )]
    Gone {
        /// The communicator's name.
        name: Arc<str>,
        /// The communicator's state: destroyed, aborted or lost.
        state: CommState,
        /// The error that ended it, if any.
        cause: Option<Arc<CommError>>,
    },
    /// The communicator is suspended.
    #[error("communicator \"{name}\" is suspended: wake the pool with which it sleeps, or resume it, on every rank")]
    Suspended {
        /// The communicator's name.
        name: Arc<str>,
    },
    /// A communicator with registrations cannot be suspended.
    #[error(
        "communicator \"{name}\" has {registrations} registered windows and buffers: deregister them before it is suspended, or put their \
         pools to sleep"
    )]
    Registered {
        /// The communicator's name.
        name: Arc<str>,
        /// Number of registrations, including those of other communicators that borrow the same `ncclComm_t`. Registrations that other
        /// libraries make on it are unknown.
        registrations: usize,
    },
    /// This version of libnccl lacks the capability.
    #[error("NCCL {} is required for {capability}, but the library is {version}: install a newer one, or set SYMMALLOC_NCCL_LIBRARY to one", .capability.since())]
    Unsupported {
        /// The required capability.
        capability: Capability,
        /// The library's version.
        version: NcclVersion,
    },
    /// The rank is not less than the number of ranks, or there are no ranks.
    #[error("rank {rank} is out of range for {ranks} ranks: ranks count from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// A split's color or key exceeds the range of NCCL's integers.
    #[error("color {color} and key {key} must be below 2^31")]
    SplitArgument {
        /// The color.
        color: u32,
        /// The key.
        key: u32,
    },
    /// A shrink excludes no rank, or the rank that calls it.
    #[error(
        "communicator \"{name}\": rank {rank} cannot call a shrink that excludes {excluded:?}: exclude at least one rank, and let only \
         the remaining ranks call it"
    )]
    ShrinkArgument {
        /// The communicator's name.
        name: Arc<str>,
        /// This rank.
        rank: u32,
        /// The excluded ranks.
        excluded: Vec<u32>,
    },
    /// The communicator was revoked: its work was stopped and its windows are gone.
    #[error(
        "communicator \"{name}\" is revoked: shrink it to the ranks that continue, or destroy it and connect a new one"
    )]
    Revoked {
        /// The communicator's name.
        name: Arc<str>,
    },
    /// Only the owner of a communicator can revoke it.
    #[error("communicator \"{name}\" is borrowed: revoke it where it was created")]
    Borrowed {
        /// The communicator's name.
        name: Arc<str>,
    },
    /// A grown communicator must have more ranks than the old one.
    #[error("communicator \"{name}\" has {ranks} ranks and cannot grow to {requested}: pass a larger number")]
    GrowRanks {
        /// The old communicator's name.
        name: Arc<str>,
        /// The old communicator's number of ranks.
        ranks: u32,
        /// The number of ranks that was passed.
        requested: u32,
    },
    /// The id of a grow cannot be created or used.
    #[error("communicator \"{name}\", rank {rank}: {obstacle}")]
    GrowId {
        /// The old communicator's name.
        name: Arc<str>,
        /// This rank.
        rank: u32,
        /// The reason.
        obstacle: GrowIdObstacle,
    },
    /// A communicator handle is null.
    #[error("{call}: the communicator is null: pass a live ncclComm_t")]
    NoCommunicator {
        /// Name of the call that was given, or that returned, the null handle.
        call: &'static str,
    },
    /// The device's context is not its primary context, which NCCL requires.
    #[error("NCCL requires the primary context of device {ordinal}: create the CudaDevice with CudaDevice::new")]
    ForeignContext {
        /// The device.
        ordinal: usize,
    },
    /// The borrowed communicator belongs to another device.
    #[error(
        "the communicator is on device {actual}, the CudaDevice is device {ordinal}: use the communicator's device"
    )]
    DeviceMismatch {
        /// Ordinal of the given [`CudaDevice`](symmalloc_cuda::CudaDevice).
        ordinal: usize,
        /// The communicator's device.
        actual: i32,
    },
    /// The stream belongs to a different context than the communicator.
    #[error(
        "the stream and the communicator \"{name}\" belong to different contexts: use a stream of the communicator's device"
    )]
    ForeignStream {
        /// The communicator's name.
        name: Arc<str>,
    },
    /// The registration belongs to another communicator.
    #[error("the registration belongs to communicator \"{owner}\", not to \"{name}\": deregister it on \"{owner}\"")]
    ForeignRegistration {
        /// The communicator's name.
        name: Arc<str>,
        /// Name of the communicator that created the registration.
        owner: Arc<str>,
    },
    /// The base address of a window is not aligned as NCCL requires.
    #[error("a window cannot start at {base:#x}: NCCL needs a multiple of {WINDOW_ALIGNMENT}")]
    Unaligned {
        /// The address.
        base: u64,
    },
    /// The size of a registration is zero.
    #[error("the size of a registration must not be 0")]
    Empty,
    /// A stream of the device is being captured.
    #[error("memory cannot be registered while a graph is captured: register (sync) before the capture begins")]
    Capturing,
    /// A buffer does not have the number of elements that the collective requires.
    #[error("{collective}: the {role} buffer has {actual} elements, it must have {expected}")]
    Length {
        /// Name of the collective.
        collective: &'static str,
        /// Role of the buffer: "send" or "receive".
        role: &'static str,
        /// The buffer's number of elements.
        actual: usize,
        /// The required number of elements.
        expected: usize,
    },
    /// A group mixes blocking and nonblocking communicators, which NCCL rejects.
    #[error(
        "a group cannot have both blocking and nonblocking communicators: \"{blocking}\" blocks, \"{nonblocking}\" does not"
    )]
    MixedGroup {
        /// A blocking communicator.
        blocking: Arc<str>,
        /// A nonblocking communicator.
        nonblocking: Arc<str>,
    },
    /// The system cannot create a thread for a call that may wait for other ranks.
    #[error(
        "no thread can be started for a call that may wait ({kind}): raise the limit on threads (ulimit -u, cgroup pids)"
    )]
    Thread {
        /// The system's reason.
        kind: std::io::ErrorKind,
    },
    /// The system cannot create a thread or a descriptor for the watchdog.
    #[error(
        "the watchdog cannot start ({kind}): raise the limits on threads (ulimit -u, cgroup pids) and descriptors (ulimit -n), or set \
         SYMMALLOC_WATCHDOG=off"
    )]
    Watchdog {
        /// The system's reason.
        kind: std::io::ErrorKind,
    },
    /// The name is empty or contains a zero byte.
    #[error("a communicator's name must not be empty or contain a zero byte")]
    Name,
}

/// A reason why the id of a grow cannot be created or used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrowIdObstacle {
    /// This rank is not rank 0.
    NotRankZero,
    /// `NCCL_COMM_ID` is set in the environment, in which case NCCL refuses to grow.
    CommIdVariable,
    /// An id that was created earlier has not been used yet.
    Unused,
    /// This rank did not create the id, or has already used it.
    Unknown,
}

impl fmt::Display for GrowIdObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GrowIdObstacle::NotRankZero => {
                "only rank 0 creates the id of a grow: call grow_id there, and pass its result to all ranks"
            }
            GrowIdObstacle::CommIdVariable => "NCCL does not grow while NCCL_COMM_ID is set: start the job without it",
            GrowIdObstacle::Unused => {
                "the last id of a grow is still unused: grow with it before you create another one"
            }
            GrowIdObstacle::Unknown => {
                "the id is not the last result of grow_id, or was used: call grow_id, and pass its result to all ranks"
            }
        })
    }
}

impl From<DriverError> for CommError {
    fn from(error: DriverError) -> Self {
        CommError::Cuda(error.into())
    }
}

/// The state of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommState {
    /// Usable.
    Ready,
    /// Revoked: its work was stopped and its windows are gone. It can only be shrunk, destroyed or aborted.
    Revoked,
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
            CommState::Revoked => "revoked",
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
    /// The remaining ranks create a smaller communicator.
    Shrink,
    /// The communicator gets more ranks.
    Grow,
    /// A window is registered.
    Register,
    /// A buffer of this rank is registered.
    RegisterBuffer,
    /// Memory is deregistered.
    Deregister,
    /// The communicator's memory is released.
    Suspend,
    /// The communicator's memory is restored.
    Resume,
    /// A collective is submitted to the stream.
    Submit,
    /// A collective runs on the device.
    Run,
    /// The communicator is destroyed.
    Destroy,
    /// The communicator is revoked.
    Revoke,
    /// The communicator is aborted.
    Abort,
}

impl Stage {
    /// Returns `true` if a communicator in this stage was never ready.
    pub(super) fn is_creation(self) -> bool {
        self == Stage::Connect
    }

    /// Returns `true` if all ranks perform this stage and the watchdog observes it.
    pub(super) fn is_watched(self) -> bool {
        matches!(self, Stage::Split | Stage::Register | Stage::Submit | Stage::Destroy | Stage::Suspend | Stage::Resume)
    }

    /// Returns the name of the NCCL call of this stage, for errors that NCCL reports later.
    pub(super) fn call(self) -> &'static str {
        match self {
            Stage::Connect => "ncclCommInitRankConfig",
            Stage::Split => "ncclCommSplit",
            Stage::Shrink => "ncclCommShrink",
            Stage::Grow => "ncclCommGrow",
            Stage::Register => "ncclCommWindowRegister",
            Stage::RegisterBuffer => "ncclCommRegister",
            Stage::Deregister => "ncclCommWindowDeregister",
            Stage::Suspend => "ncclCommSuspend",
            Stage::Resume => "ncclCommResume",
            Stage::Submit | Stage::Run => "ncclCommGetAsyncError",
            Stage::Destroy => "ncclCommFinalize",
            Stage::Revoke => "ncclCommRevoke",
            Stage::Abort => "ncclCommAbort",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Connect => "connecting",
            Stage::Split => "splitting",
            Stage::Shrink => "shrinking",
            Stage::Grow => "growing",
            Stage::Register => "registering a window",
            Stage::RegisterBuffer => "registering a buffer",
            Stage::Deregister => "deregistering memory",
            Stage::Suspend => "suspending it",
            Stage::Resume => "resuming it",
            Stage::Submit => "submitting a collective",
            Stage::Run => "a collective on the device",
            Stage::Destroy => "destroying it",
            Stage::Revoke => "revoking it",
            Stage::Abort => "aborting it",
        })
    }
}

impl CommError {
    /// Returns the report of this error that is sent to the other ranks.
    pub(super) fn report(&self) -> FailureReport {
        let (first_rank, stopped_ms) = match self {
            CommError::PeerLost { rank, .. } => (Some(*rank), None),
            CommError::Failed(failure) => (failure.cause.rank(), failure.cause.stopped_ms()),
            _ => (None, None),
        };
        FailureReport { text: self.to_string(), first_rank, stopped_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_state_the_cause_and_the_remedy() {
        let nccl = NcclError { call: "ncclCommSplit", code: 6, detail: Some("Connection closed".into()) };
        assert_eq!(
            nccl.to_string(),
            "ncclCommSplit failed with 6 (ncclRemoteError), last message: Connection closed: another rank is gone or the \
             network failed: look for the first error among the ranks"
        );
        let (name, waited): (Arc<str>, _) = ("tp".into(), Duration::from_secs(60));
        let deadline = CommError::Deadline { name, stage: Stage::Register, waited, state: CommState::Aborted };
        assert_eq!(
            deadline.to_string(),
            "communicator \"tp\": registering a window took longer than 60s: another rank died, is stuck, or does not make \
             this call (NCCL does not report which). The communicator is aborted now. Look for the first error among the ranks"
        );
        let gone = CommError::Gone { name: "tp".into(), state: CommState::Aborted, cause: Some(Arc::new(nccl.into())) };
        assert!(gone.to_string().starts_with("communicator \"tp\" is aborted because of this: ncclCommSplit failed"));
        let missing = LoadError::LibraryMissing { tried: vec!["libnccl.so.2: no".into(), "libnccl.so: no".into()] };
        assert_eq!(
            missing.to_string(),
            "libnccl cannot be opened (libnccl.so.2: no; libnccl.so: no): install NCCL, put the folder of libnccl.so.2 on \
             LD_LIBRARY_PATH, or name the file in SYMMALLOC_NCCL_LIBRARY"
        );
        let old = LoadError::TooOld { path: "/x/libnccl.so".into(), version: NcclVersion::new(2, 17, 1) };
        assert_eq!(
            old.to_string(),
            "/x/libnccl.so is NCCL 2.17.1: install 2.18.1 or newer, or set SYMMALLOC_NCCL_LIBRARY to one"
        );
    }
}
