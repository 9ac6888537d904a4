//! The errors of this crate. Each message states the problem and what to do.

use crate::settings::SettingsError;
use crate::status::symmalloc_status;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use symmalloc_agreement::AgreementError;
use symmalloc_core::backend::{BackendError, Reason};
use symmalloc_core::base::BaseError;
use symmalloc_core::config::ConfigError;
use symmalloc_core::debug::MemoryDamage;
use symmalloc_core::errors::{AllocateError, FreeError, PoolError, RecordUseError, TrimError, UnknownError};
use symmalloc_core::plans::{PlanError, StepError};
use symmalloc_core::recording::{RecordingEnd, RecordingError, StartRecordingError};
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_cuda::{CudaError, ResizeError, ShareError};
use symmalloc_files::say;
use symmalloc_nccl::{
    AllToAllError, AttachError, CommError, LookupError, Obstacle, RankObstacle, SplitsError, SyncError,
};
use symmalloc_trace::plan::PlanTextError;
use thiserror::Error;

/// An error returned by a call. A failed call changes nothing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// An argument must not be null.
    #[error("`{argument}` is NULL: pass a valid pointer")]
    Null {
        /// The argument.
        argument: &'static str,
    },
    /// A text is not UTF-8.
    #[error("`{argument}` is not UTF-8: pass a UTF-8 text")]
    NotText {
        /// The argument.
        argument: &'static str,
    },
    /// An argument has an invalid value.
    #[error("`{argument}` is {value}: {expected}")]
    Argument {
        /// The argument.
        argument: &'static str,
        /// Its value.
        value: i64,
        /// The valid values.
        expected: &'static str,
    },
    /// The settings are invalid.
    #[error("invalid settings in SYMMALLOC_CONF, or in the text that replaces it: {0}")]
    TorchSettings(Box<SettingsError>),
    /// The settings were changed too late.
    #[error("device {device} has an allocator already: configure before the first use of CUDA memory")]
    TooLate {
        /// A device that has an allocator.
        device: usize,
    },
    /// A callback called the library.
    #[error("a callback called the library, which may hold a lock: call it after the callback has returned")]
    InCallback,
    /// The process that shares memory belongs to another user.
    #[error(
        "the process that shares the tensor runs as user {}, this one as user {ours}: run both as the same user",
        .theirs.map_or_else(|| "unknown".to_owned(), |user| user.to_string())
    )]
    ForeignUser {
        /// The user of the other process; `None` if the kernel does not report it.
        theirs: Option<u32>,
        /// The user of this process.
        ours: u32,
    },
    /// The pointer is not a live allocation of this allocator.
    #[error(
        "{address:#x} is not a live allocation of device {device}: it was freed already, or belongs to another allocator"
    )]
    UnknownPointer {
        /// The pointer.
        address: u64,
        /// The allocator's device.
        device: usize,
    },
    /// The pool was destroyed, or was not created through the C interface.
    #[error("pool {pool} is unknown or was destroyed: create it with symmalloc_pool_create")]
    UnknownPool {
        /// The pool.
        pool: u32,
    },
    /// A destroy call got a pointer that no create call returned, or that was destroyed already.
    #[error(
        "`{argument}` is {address:#x}, which no create call returned or which was destroyed already: destroy each object once, and \
        never the process's allocators, which the library owns"
    )]
    NotCreated {
        /// The argument.
        argument: &'static str,
        /// The pointer.
        address: u64,
    },
    /// No pool has a base to which the address belongs.
    #[error(
        "{address:#x} belongs to no pool with a base: only such a pool allocates at given addresses, see the key `base` in \
         docs/fixed-addresses.md"
    )]
    NoBase {
        /// The address.
        address: u64,
    },
    /// The memory at an address is in use, or belongs to another stream.
    #[error("{size_bytes} bytes cannot be allocated at {address:#x}: {error}")]
    NotAtAddress {
        /// The address.
        address: u64,
        /// Requested bytes.
        size_bytes: u64,
        /// The reason.
        error: Box<RestoreError>,
    },
    /// A scope ends without a begin.
    #[error("device {device} has no {scope} to end on this thread: pair begin with end, push with pop")]
    NoScope {
        /// The device.
        device: usize,
        /// The kind of scope.
        scope: &'static str,
    },
    /// The process was forked from one that used CUDA.
    #[error("CUDA memory cannot be used in a process that was forked after CUDA was used: start workers with spawn")]
    Forked,
    /// The requested size is too large or negative.
    #[error("{size} bytes cannot be allocated")]
    Size {
        /// Requested bytes.
        size: i64,
    },
    /// The memory fraction is out of range.
    #[error("invalid memory fraction {fraction}: use a number from 0 to 1")]
    Fraction {
        /// The given value.
        fraction: f64,
    },
    /// The driver or the device failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The allocation failed.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// A check found damaged memory.
    #[error("memory was damaged: {0}")]
    Damaged(#[from] Box<MemoryDamage>),
    /// The free failed.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// Recording a use failed.
    #[error(transparent)]
    RecordUse(#[from] RecordUseError),
    /// A step cannot begin or end.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A plan cannot be adopted or dropped.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan file cannot be opened.
    #[error("{path} cannot be opened: {source}")]
    OpenPlan {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// A file is not a valid plan.
    #[error("{path}: {source}")]
    PlanFile {
        /// The file.
        path: String,
        /// The problem.
        source: Box<PlanTextError>,
    },
    /// Memory could not be released.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The ranks differ, or failed to compare their histories.
    #[error(transparent)]
    Agreement(Box<AgreementError>),
    /// Heaps of pools that are not symmetric differ.
    #[error("{0}")]
    Heaps(String),
    /// NCCL failed.
    #[error(transparent)]
    Communicator(Box<CommError>),
    /// A pool cannot be registered.
    #[error(transparent)]
    Attach(Box<AttachError>),
    /// Registration failed.
    #[error(transparent)]
    Sync(Box<SyncError>),
    /// There is no window over the memory.
    #[error(transparent)]
    Window(Box<LookupError>),
    /// An all-to-all was rejected, or failed.
    #[error(transparent)]
    AllToAll(Box<AllToAllError>),
    /// A snapshot could not be written.
    #[error("the snapshot cannot be written: {0}")]
    Snapshot(#[from] io::Error),
    /// A trace could not begin.
    #[error(transparent)]
    StartRecording(#[from] StartRecordingError),
    /// A trace ended early, or there is none.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// A mempool cannot be checkpointed.
    #[error(transparent)]
    Checkpoint(Box<LayoutError>),
    /// A mempool cannot be restored to a checkpoint.
    #[error("a mempool cannot be restored to its checkpoint: {0}")]
    Restore(Box<RestoreError>),
    /// The memory cannot be shared with another process.
    #[error(
        "the memory at {address:#x} cannot be shared with other processes: the device, or the pool's allocator, does not provide \
        file descriptors for it"
    )]
    NotShareable {
        /// The address of the memory.
        address: u64,
    },
    /// There is no dma-buf of the memory.
    #[error(transparent)]
    DmaBuf(Box<ShareError>),
    /// Communication with another process about shared memory failed.
    #[error("memory cannot be shared with another process, which may have ended: {0}")]
    Sharing(io::Error),
    /// A text does not name shared memory.
    #[error("{text:?} does not name memory of symmalloc: call symmalloc.install() in both processes")]
    NotSharedMemory {
        /// The beginning of the text.
        text: String,
    },
    /// The owner of shared memory released it.
    #[error("{bytes} bytes of shared memory were freed by their owner: keep the tensor in the process that sent it")]
    SharedMemoryGone {
        /// The size of the chunk.
        bytes: u64,
    },
    /// A pool did not sleep or wake on all ranks.
    #[error(transparent)]
    Sleep(Box<symmalloc_nccl::CollectiveSleepError>),
    /// A stream capture is active.
    #[error("a stream is being captured: end the capture before the pool sleeps")]
    Capturing,
    /// Two communicators of the pool have the same name, so ranks cannot distinguish them.
    #[error(
        "pool {pool} is on two communicators named {name:?}: to sleep, register it with different names, equal on all of their ranks"
    )]
    SameName {
        /// The pool.
        pool: u32,
        /// The name.
        name: String,
    },
    /// No pool has the tag.
    #[error("no pool of device {device} has the tag {tag:?}: create one with `tag:{tag}` in its configuration")]
    UnknownTag {
        /// The tag.
        tag: String,
        /// The device.
        device: usize,
    },
    /// Saved contents have no single host address.
    #[error("the saved contents are in a file, or in several pieces: copy them instead of asking for their address")]
    Scattered,
    /// Saved contents cannot be read.
    #[error("the saved contents cannot be read: {0}")]
    Saved(BackendError),
    /// An assertion failed.
    #[error("an assertion of symmalloc failed, please report it: {message}")]
    Internal {
        /// The assertion's message.
        message: String,
    },
}

impl Error {
    /// Returns `true` if an allocation failed because its pool was destroyed.
    pub(crate) fn is_destroyed_pool(&self) -> bool {
        matches!(self, Error::Allocate(AllocateError::Unknown(UnknownError::DestroyedPool { .. })))
    }

    /// Returns the status of the error in the C interface.
    pub(crate) fn status(&self) -> symmalloc_status {
        use symmalloc_status::*;
        match self {
            Error::Null { .. } | Error::NotText { .. } | Error::Argument { .. } | Error::Size { .. } => {
                SYMMALLOC_INVALID_ARGUMENT
            }
            Error::NotCreated { .. } | Error::Fraction { .. } => SYMMALLOC_INVALID_ARGUMENT,
            Error::Cuda(CudaError::Pool(PoolError::KeyInUse { .. } | PoolError::KeyOutOfRange { .. })) => {
                SYMMALLOC_INVALID_ARGUMENT
            }
            Error::Cuda(CudaError::Config(ConfigError::Base(error)) | CudaError::Pool(PoolError::Base(error))) => {
                of_base(error)
            }
            Error::TorchSettings(_)
            | Error::Cuda(CudaError::Config(_) | CudaError::ChunkSize { .. } | CudaError::PrefetchSize { .. }) => {
                SYMMALLOC_INVALID_SETTINGS
            }
            Error::TooLate { .. } | Error::NoScope { .. } | Error::Forked => SYMMALLOC_INVALID_STATE,
            Error::UnknownPointer { .. } => SYMMALLOC_UNKNOWN_POINTER,
            Error::UnknownPool { .. } | Error::NoBase { .. } => SYMMALLOC_UNKNOWN_POOL,
            Error::NotAtAddress { .. } => SYMMALLOC_INVALID_STATE,
            Error::Allocate(error) | Error::Cuda(CudaError::Allocate(error)) => of_allocation(error),
            Error::Cuda(CudaError::Sleep(error)) => of_sleep(error),
            Error::Cuda(CudaError::NoSleep) | Error::Capturing => SYMMALLOC_INVALID_STATE,
            Error::SameName { .. } => SYMMALLOC_INVALID_STATE,
            Error::Cuda(CudaError::Resize(error)) => of_resize(error),
            Error::Sleep(error) => of_sleep_over_ranks(error),
            Error::UnknownTag { .. } => SYMMALLOC_UNKNOWN_POOL,
            Error::Cuda(CudaError::Unknown(error)) | Error::Trim(TrimError::Unknown(error)) => of_unknown(error),
            Error::Free(FreeError::Handle(_)) | Error::RecordUse(RecordUseError::Handle(_)) => {
                SYMMALLOC_UNKNOWN_POINTER
            }
            Error::Cuda(_) | Error::Free(_) | Error::RecordUse(_) | Error::Trim(_) => SYMMALLOC_CUDA,
            Error::Heaps(_) => SYMMALLOC_MISALIGNED,
            Error::Agreement(error) => match **error {
                AgreementError::Disagreed(_) => SYMMALLOC_MISALIGNED,
                _ => SYMMALLOC_TRANSPORT,
            },
            Error::Sync(error) => match **error {
                SyncError::Disagreed { .. } | SyncError::Differ { .. } | SyncError::OffsetsDiffer { .. } => {
                    SYMMALLOC_MISALIGNED
                }
                SyncError::Capturing | SyncError::Suspended { .. } => SYMMALLOC_INVALID_STATE,
                SyncError::Cuda { .. } => SYMMALLOC_CUDA,
                _ => SYMMALLOC_NCCL,
            },
            Error::Window(_) => SYMMALLOC_INVALID_STATE,
            Error::AllToAll(error) => of_all_to_all(error),
            Error::Communicator(_) | Error::Attach(_) => SYMMALLOC_NCCL,
            Error::StartRecording(StartRecordingError::AlreadyRecording | StartRecordingError::InUse { .. }) => {
                SYMMALLOC_INVALID_STATE
            }
            Error::Recording(RecordingError::Ended { source: RecordingEnd::Sink(_), .. })
            | Error::StartRecording(_)
            | Error::Snapshot(_) => SYMMALLOC_IO,
            Error::Step(StepError::Unknown(error)) | Error::Plan(PlanError::Unknown(error)) => of_unknown(error),
            Error::Plan(PlanError::Memory(error)) => of_allocation(error),
            Error::Step(_) | Error::Plan(PlanError::StepOpen { .. }) => SYMMALLOC_INVALID_STATE,
            Error::Plan(_) | Error::PlanFile { .. } => SYMMALLOC_INVALID_SETTINGS,
            Error::OpenPlan { .. } => SYMMALLOC_IO,
            Error::Recording(_) | Error::Checkpoint(_) | Error::Restore(_) => SYMMALLOC_INVALID_STATE,
            Error::NotShareable { .. }
            | Error::SharedMemoryGone { .. }
            | Error::ForeignUser { .. }
            | Error::InCallback => SYMMALLOC_INVALID_STATE,
            Error::DmaBuf(error) => match **error {
                ShareError::NotMapped { .. } => SYMMALLOC_UNKNOWN_POINTER,
                ShareError::Cuda(_) => SYMMALLOC_CUDA,
                ShareError::Socket { .. } => SYMMALLOC_IO,
                _ => SYMMALLOC_INVALID_STATE,
            },
            Error::NotSharedMemory { .. } => SYMMALLOC_INVALID_ARGUMENT,
            Error::Sharing(_) => SYMMALLOC_IO,
            Error::Scattered | Error::Damaged(_) => SYMMALLOC_INVALID_STATE,
            Error::Saved(error) => of_reason(error.reason),
            Error::Internal { .. } => SYMMALLOC_INTERNAL,
        }
    }
}

fn of_base(error: &BaseError) -> symmalloc_status {
    match error {
        BaseError::Occupied { .. } => symmalloc_status::SYMMALLOC_INVALID_STATE,
        BaseError::Driver { .. } => symmalloc_status::SYMMALLOC_CUDA,
        _ => symmalloc_status::SYMMALLOC_INVALID_SETTINGS,
    }
}

fn of_allocation(error: &AllocateError) -> symmalloc_status {
    match error {
        AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. } => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        AllocateError::Unknown(error) => of_unknown(error),
        AllocateError::Sleeps(_) => symmalloc_status::SYMMALLOC_INVALID_STATE,
        _ => symmalloc_status::SYMMALLOC_CUDA,
    }
}

fn of_sleep(error: &SleepError) -> symmalloc_status {
    match &error.cause {
        SleepCause::Unknown(error) => of_unknown(error),
        SleepCause::Memory { .. } => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        SleepCause::Save { error, .. } | SleepCause::Load(error) => of_reason(error.reason),
        SleepCause::Synchronize { .. } | SleepCause::Held { .. } => symmalloc_status::SYMMALLOC_CUDA,
        _ => symmalloc_status::SYMMALLOC_INVALID_STATE,
    }
}

fn of_reason(reason: Reason) -> symmalloc_status {
    match reason {
        Reason::File | Reason::Modified => symmalloc_status::SYMMALLOC_IO,
        _ => symmalloc_status::SYMMALLOC_CUDA,
    }
}

fn of_resize(error: &ResizeError) -> symmalloc_status {
    match error {
        ResizeError::Unknown(error) => of_unknown(error),
        ResizeError::OutOfRange { .. } => symmalloc_status::SYMMALLOC_INVALID_ARGUMENT,
        ResizeError::Reserve { error, .. } => of_allocation(error),
        ResizeError::Trim(_) => symmalloc_status::SYMMALLOC_CUDA,
        _ => symmalloc_status::SYMMALLOC_INVALID_STATE,
    }
}

fn of_sleep_over_ranks(error: &symmalloc_nccl::CollectiveSleepError) -> symmalloc_status {
    use symmalloc_nccl::CollectiveSleepError;
    match error {
        CollectiveSleepError::Unknown(error) => of_unknown(error),
        CollectiveSleepError::Disagreed { .. } | CollectiveSleepError::Differ { .. } => {
            symmalloc_status::SYMMALLOC_MISALIGNED
        }
        CollectiveSleepError::Refused { ranks, .. } => of_obstacles(ranks),
        CollectiveSleepError::NoRoom { .. } => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        CollectiveSleepError::Held { .. } | CollectiveSleepError::Cuda { .. } => symmalloc_status::SYMMALLOC_CUDA,
        CollectiveSleepError::NotAttached { .. } | CollectiveSleepError::Capturing => {
            symmalloc_status::SYMMALLOC_INVALID_STATE
        }
        _ => symmalloc_status::SYMMALLOC_NCCL,
    }
}

/// Returns the status for the obstacle of the first rank that has one.
fn of_obstacles(ranks: &[RankObstacle]) -> symmalloc_status {
    match ranks.first().map(|rank| rank.obstacle) {
        Some(Obstacle::Limit { .. } | Obstacle::Memory { .. }) => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        Some(Obstacle::Save { reason, .. } | Obstacle::Load { reason, .. }) => of_reason(reason),
        Some(Obstacle::Stream { .. }) => symmalloc_status::SYMMALLOC_CUDA,
        Some(Obstacle::Lost) => symmalloc_status::SYMMALLOC_NCCL,
        _ => symmalloc_status::SYMMALLOC_INVALID_STATE,
    }
}

fn of_all_to_all(error: &AllToAllError) -> symmalloc_status {
    match error {
        AllToAllError::Refused { .. }
        | AllToAllError::DifferentCalls { .. }
        | AllToAllError::Disagreement { .. }
        | AllToAllError::VersionMismatch { .. } => symmalloc_status::SYMMALLOC_MISALIGNED,
        AllToAllError::NotRegistered { .. } | AllToAllError::Capturing => symmalloc_status::SYMMALLOC_INVALID_STATE,
        AllToAllError::Comm(_) | AllToAllError::Transport(_) => symmalloc_status::SYMMALLOC_NCCL,
        AllToAllError::Driver(_) => symmalloc_status::SYMMALLOC_CUDA,
        _ => symmalloc_status::SYMMALLOC_INVALID_ARGUMENT,
    }
}

fn of_unknown(error: &UnknownError) -> symmalloc_status {
    match error {
        UnknownError::Pool { .. } | UnknownError::DestroyedPool { .. } => symmalloc_status::SYMMALLOC_UNKNOWN_POOL,
        _ => symmalloc_status::SYMMALLOC_INVALID_ARGUMENT,
    }
}

/// Large errors are boxed, to keep results small.
macro_rules! boxed {
    ($($variant:ident($source:ty);)*) => {
        $(
            impl From<$source> for Error {
                fn from(error: $source) -> Self {
                    Error::$variant(Box::new(error))
                }
            }
        )*
    };
}

boxed! {
    Agreement(AgreementError);
    AllToAll(AllToAllError);
    Attach(AttachError);
    Checkpoint(LayoutError);
    DmaBuf(ShareError);
    Restore(RestoreError);
    Communicator(CommError);
    TorchSettings(SettingsError);
    Sleep(symmalloc_nccl::CollectiveSleepError);
    Sync(SyncError);
    Window(LookupError);
}

impl From<SplitsError> for Error {
    fn from(error: SplitsError) -> Self {
        AllToAllError::from(error).into()
    }
}

/// Every allocation and free returns a `Result` with this error, so it must stay small.
const _: () = assert!(size_of::<Error>() <= 88);

/// `true` after the first message about an error that a call could not return.
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Reports an error that a call cannot return. Logs every such error, and writes the first to standard error.
pub(crate) fn complain(error: &Error) {
    tracing::warn!(name: "call.failed", target: "symmalloc", %error);
    if !HAS_COMPLAINED.swap(true, Ordering::Relaxed) {
        say(format_args!("{error} (reported once; symmalloc.stats()['errors'] counts all)"));
    }
}
