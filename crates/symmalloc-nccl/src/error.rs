//! What can go wrong with NCCL, and what to do about it.

use crate::communicator::{CommState, Stage};
use crate::launch::LaunchError;
use crate::library::{Capability, NcclVersion};
use crate::rendezvous::RendezvousError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_cuda::{CudaError, DriverError};
use thiserror::Error;

/// libnccl could not be used at all.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No library could be opened.
    #[error(
        "libnccl cannot be opened ({}): install NCCL, put the folder of libnccl.so.2 on LD_LIBRARY_PATH, or name the file \
         in SYMMALLOC_NCCL_LIBRARY", .tried.join("; ")
    )]
    LibraryMissing {
        /// Each name tried, in order, with the system's reason.
        tried: Vec<String>,
    },
    /// The library lacks a call that every supported version has.
    #[error("{path} has no {symbol}: it is not NCCL, or not a whole one; name another in SYMMALLOC_NCCL_LIBRARY")]
    SymbolMissing {
        /// The library.
        path: String,
        /// The call.
        symbol: &'static str,
    },
    /// The library does not say which version it is.
    #[error("ncclGetVersion of {path} failed with {code}: it is not NCCL; name another in SYMMALLOC_NCCL_LIBRARY")]
    NoVersion {
        /// The library.
        path: String,
        /// What the call gave.
        code: i32,
    },
    /// The library is older than this crate can work with.
    #[error(
        "{path} is NCCL {version}: install {} or newer, or name one in SYMMALLOC_NCCL_LIBRARY",
        NcclVersion::OLDEST
    )]
    TooOld {
        /// The library.
        path: String,
        /// Its version.
        version: NcclVersion,
    },
}

/// An NCCL call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclError {
    /// The call, for example `ncclCommInitRankConfig`.
    pub call: &'static str,
    /// NCCL's code (`ncclResult_t`).
    pub code: i32,
    /// NCCL's last message in this process, which may be about another communicator.
    pub detail: Option<Box<str>>,
}

/// `ncclUnhandledCudaError`.
pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
/// `ncclSystemError`.
pub(crate) const SYSTEM_ERROR: i32 = 2;
/// `ncclInternalError`.
pub(crate) const INTERNAL_ERROR: i32 = 3;
/// `ncclInvalidArgument`.
pub(crate) const INVALID_ARGUMENT: i32 = 4;
/// `ncclInvalidUsage`.
pub(crate) const INVALID_USAGE: i32 = 5;
/// `ncclRemoteError`.
pub(crate) const REMOTE_ERROR: i32 = 6;

impl NcclError {
    /// The code's name.
    pub fn name(&self) -> &'static str {
        match self.code {
            0 => "ncclSuccess",
            UNHANDLED_CUDA_ERROR => "ncclUnhandledCudaError",
            SYSTEM_ERROR => "ncclSystemError",
            INTERNAL_ERROR => "ncclInternalError",
            INVALID_ARGUMENT => "ncclInvalidArgument",
            INVALID_USAGE => "ncclInvalidUsage",
            REMOTE_ERROR => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "an ncclResult_t",
        }
    }

    fn advice(&self) -> &'static str {
        match self.code {
            UNHANDLED_CUDA_ERROR => {
                "a CUDA call inside NCCL failed, or the memory is not what NCCL needs: run with NCCL_DEBUG=WARN"
            }
            SYSTEM_ERROR => {
                "the network or the system refused: check NCCL_SOCKET_IFNAME and the other ranks, run with NCCL_DEBUG=WARN"
            }
            INVALID_ARGUMENT | INVALID_USAGE => "NCCL_DEBUG=WARN says which argument",
            REMOTE_ERROR => "another rank is gone or the network failed: look for the first error among the ranks",
            _ => "run with NCCL_DEBUG=INFO",
        }
    }

    /// Whether a communicator on which this happened cannot be used any more.
    pub(crate) fn is_fatal(&self) -> bool {
        !matches!(self.code, INVALID_ARGUMENT | INVALID_USAGE)
    }
}

impl std::error::Error for NcclError {}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {} ({})", self.call, self.code, self.name())?;
        if let Some(detail) = &self.detail {
            write!(f, ", last message: {detail}")?;
        }
        write!(f, ": {}", self.advice())
    }
}

/// Why a communicator could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommError {
    /// libnccl cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The environment does not say which rank this is.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The ranks did not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// NCCL refused.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// The allocator or the driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Other ranks did not come in time, and the communicator was ended. NCCL does not tell which ranks they are.
    #[error(
        "communicator \"{name}\": {stage} took longer than {waited:?}: another rank died, is stuck, or does not make this call \
         (NCCL does not tell which). The communicator is {state} now. Look for the first error among the ranks"
    )]
    Deadline {
        /// The communicator's name.
        name: Arc<str>,
        /// What was waited for.
        stage: Stage,
        /// How long.
        waited: Duration,
        /// What became of the communicator.
        state: CommState,
    },
    /// A collective ended without a rank's message. NCCL says nothing of it: so it goes when another rank aborts the
    /// communicator because it misses that rank.
    #[error(
        "communicator \"{name}\": the message of rank {rank} did not arrive: it died or is stuck, or gave up itself. The \
         communicator is {state} now. Look for the first error among the ranks"
    )]
    PeerLost {
        /// The communicator's name.
        name: Arc<str>,
        /// The first rank whose message is missing.
        rank: u32,
        /// What became of the communicator.
        state: CommState,
    },
    /// The communicator was destroyed, aborted or lost before.
    #[error(
        "communicator \"{name}\" is {state}{}: connect a new one",
        .cause.as_ref().map_or_else(String::new, |cause| format!(" because of this: {cause}"))
    )]
    Gone {
        /// The communicator's name.
        name: Arc<str>,
        /// What became of it.
        state: CommState,
        /// The error that ended it, if one did.
        cause: Option<Arc<CommError>>,
    },
    /// This libnccl cannot do it.
    #[error("{capability} needs NCCL {}, the library is {version}: install a newer one, or name it in SYMMALLOC_NCCL_LIBRARY", .capability.since())]
    Unsupported {
        /// What was asked for.
        capability: Capability,
        /// The library's version.
        version: NcclVersion,
    },
    /// The rank is not below the number of ranks, or there are none.
    #[error("rank {rank} of {ranks} cannot be: ranks count from 0")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        ranks: u32,
    },
    /// A split's color or key is more than NCCL's integers hold.
    #[error("color {color} and key {key} must be below 2^31")]
    SplitArgument {
        /// The color.
        color: u32,
        /// The key.
        key: u32,
    },
    /// There is no communicator where one must be.
    #[error("{call} came without a communicator")]
    NoCommunicator {
        /// Where.
        call: &'static str,
    },
    /// The device's context is not its primary one, in which NCCL works.
    #[error("NCCL works in the primary context of device {ordinal}: make the CudaDevice with CudaDevice::new")]
    ForeignContext {
        /// The device.
        ordinal: usize,
    },
    /// A borrowed communicator belongs to another device.
    #[error(
        "the communicator is on device {actual}, the CudaDevice is device {ordinal}: give the device it was made for"
    )]
    OtherDevice {
        /// The given device.
        ordinal: usize,
        /// The communicator's.
        actual: i32,
    },
    /// The stream belongs to another context than the communicator.
    #[error("the stream belongs to another context than the communicator \"{name}\": use a stream of its device")]
    ForeignStream {
        /// The communicator's name.
        name: Arc<str>,
    },
    /// The registration belongs to another communicator.
    #[error("the registration belongs to communicator \"{owner}\", not to \"{name}\"")]
    ForeignRegistration {
        /// The communicator's name.
        name: Arc<str>,
        /// The one that it was made on.
        owner: Arc<str>,
    },
    /// The base of a window is not where NCCL can start one.
    #[error(
        "a window cannot start at {base:#x}: NCCL needs a multiple of {}",
        crate::communicator::registration::WINDOW_ALIGNMENT
    )]
    Unaligned {
        /// The address.
        base: u64,
    },
    /// A registration of no bytes.
    #[error("there is nothing to register: the size is 0")]
    Empty,
    /// A stream of the device is being captured.
    #[error("memory cannot be registered while a graph is captured: register (sync) before the capture begins")]
    Capturing,
    /// A buffer has not as many elements as the collective needs.
    #[error("{collective}: the {role} buffer has {actual} elements, it must have {expected}")]
    Length {
        /// The collective.
        collective: &'static str,
        /// Which buffer.
        role: &'static str,
        /// Elements it has.
        actual: usize,
        /// Elements it must have.
        expected: usize,
    },
    /// A group has communicators that block and others that do not, which NCCL refuses.
    #[error(
        "a group cannot have both blocking and nonblocking communicators: \"{blocking}\" blocks, \"{nonblocking}\" does not"
    )]
    MixedGroup {
        /// One that blocks.
        blocking: Arc<str>,
        /// One that does not.
        nonblocking: Arc<str>,
    },
    /// The system refused a thread for a call that may wait for other ranks.
    #[error(
        "no thread can be started for a call that may wait ({kind}): raise the limit on threads (ulimit -u, cgroup pids)"
    )]
    Thread {
        /// The system's reason.
        kind: std::io::ErrorKind,
    },
    /// The name holds a zero byte or is empty.
    #[error("a communicator's name must not be empty nor hold a zero byte")]
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
             this call (NCCL does not tell which). The communicator is aborted now. Look for the first error among the ranks"
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
            "/x/libnccl.so is NCCL 2.17.1: install 2.18.1 or newer, or name one in SYMMALLOC_NCCL_LIBRARY"
        );
    }

    #[test]
    fn only_refused_arguments_leave_a_communicator_usable() {
        let is_fatal = |code| NcclError { call: "ncclAllReduce", code, detail: None }.is_fatal();
        assert_eq!([1, 2, 3, 6, 99].map(is_fatal), [true; 5]);
        assert_eq!([4, 5].map(is_fatal), [false; 2]);
    }
}
