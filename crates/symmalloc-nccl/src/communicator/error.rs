//! Errors of communicators.

use crate::communicator::registration::WINDOW_ALIGNMENT;
use crate::communicator::state::{CommState, Stage};
use crate::ffi::error::{LoadError, NcclError};
use crate::ffi::version::{Capability, NcclVersion};
use crate::rendezvous::error::RendezvousError;
use crate::rendezvous::launch::LaunchError;
use crate::watchdog::Failure;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_cuda::{CudaError, DriverError};
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
    /// Other ranks did not arrive in time, and the communicator was ended. NCCL does not report which ranks they are.
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
    /// A collective completed without a rank's message, and NCCL reported no error. This happens if a third rank aborts the communicator
    /// because it no longer waits for that rank.
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
        /// Its state.
        state: CommState,
        /// The error that ended it, if any.
        cause: Option<Arc<CommError>>,
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
    /// A communicator handle is null.
    #[error("{call}: the communicator is null: pass a live ncclComm_t")]
    NoCommunicator {
        /// The call.
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
    OtherDevice {
        /// The given device.
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
        /// The communicator that created it.
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
        /// The collective.
        collective: &'static str,
        /// The buffer.
        role: &'static str,
        /// Its number of elements.
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
    /// The name is empty or contains a zero byte.
    #[error("a communicator's name must not be empty or contain a zero byte")]
    Name,
}

impl From<DriverError> for CommError {
    fn from(error: DriverError) -> Self {
        CommError::Cuda(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_happened_and_what_to_do() {
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
