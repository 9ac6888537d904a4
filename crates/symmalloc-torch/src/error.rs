//! What can go wrong in this crate, with a message that says what to do.

use crate::settings::SettingsError;
use crate::status::symmalloc_status;
use std::io;
use symmalloc_agreement::AgreementError;
use symmalloc_core::errors::{AllocateError, FreeError, RecordUseError, TrimError, UnknownError};
use symmalloc_core::plans::{PlanError, StepError};
use symmalloc_core::recording::{RecordingEnd, RecordingError, StartRecordingError};
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_cuda::{CudaError, ResizeError};
use symmalloc_nccl::{
    AllToAllError, AttachError, CommError, LookupError, Obstacle, RankObstacle, SplitsError, SyncError,
};
use symmalloc_trace::plan::PlanTextError;
use thiserror::Error;

/// Why a call failed. What it was to change is as it was before.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum Error {
    /// An argument must not be null.
    #[error("`{argument}` is NULL: give a valid pointer")]
    Null {
        /// The argument.
        argument: &'static str,
    },
    /// A text is not UTF-8.
    #[error("`{argument}` is not UTF-8")]
    NotText {
        /// The argument.
        argument: &'static str,
    },
    /// An argument has a value that means nothing.
    #[error("`{argument}` is {value}: {expected}")]
    Argument {
        /// The argument.
        argument: &'static str,
        /// Its value.
        value: i64,
        /// What it must be.
        expected: &'static str,
    },
    /// The settings are not understood.
    #[error("SYMMALLOC_CONF, or the text given instead: {0}")]
    TorchSettings(Box<SettingsError>),
    /// Settings came too late.
    #[error("device {device} has an allocator already: configure before the first use of CUDA memory")]
    TooLate {
        /// A device that has one.
        device: usize,
    },
    /// A callback called the library.
    #[error(
        "a memory listener called the library, which holds a lock meanwhile: call it after the listener has returned"
    )]
    InCallback,
    /// The process that shares memory is another user's.
    #[error(
        "the process that shares the tensor runs as user {}, this one as user {ours}: run both as the same user",
        .theirs.map_or_else(|| "unknown".to_owned(), |user| user.to_string())
    )]
    OtherUser {
        /// The other process's; `None` when the kernel does not say.
        theirs: Option<u32>,
        /// This process's.
        ours: u32,
    },
    /// The pointer is not a live allocation of this allocator.
    #[error("{address:#x} is no live allocation of device {device}: it was freed already, or is another allocator's")]
    UnknownPointer {
        /// The pointer.
        address: u64,
        /// The allocator's device.
        device: usize,
    },
    /// The pool was given up, or is not the C interface's.
    #[error("pool {pool} is unknown or was destroyed: create it with symmalloc_pool_create")]
    UnknownPool {
        /// The pool.
        pool: u32,
    },
    /// A scope ends that did not begin.
    #[error("device {device} has no {scope} to end on this thread: pair begin with end, push with pop")]
    NoScope {
        /// The device.
        device: usize,
        /// What kind.
        scope: &'static str,
    },
    /// The process is a child of the one that used CUDA.
    #[error("CUDA memory cannot be used in a process that was forked after CUDA was used: start workers with spawn")]
    Forked,
    /// Too many bytes were asked for, or fewer than none.
    #[error("{size} bytes cannot be allocated")]
    Size {
        /// Bytes asked for.
        size: i64,
    },
    /// The fraction is not one.
    #[error("a memory fraction of {fraction} means nothing: use a number from 0 to 1")]
    Fraction {
        /// The number given.
        fraction: f64,
    },
    /// The driver or the device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The allocator refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The allocator could not free.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// The allocator could not note a use.
    #[error(transparent)]
    RecordUse(#[from] RecordUseError),
    /// A step is open, or none is.
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
        /// Why.
        source: io::Error,
    },
    /// A plan file is none.
    #[error("{path}: {source}")]
    PlanFile {
        /// The file.
        path: String,
        /// What is wrong with it.
        source: Box<PlanTextError>,
    },
    /// Memory could not go back.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The ranks differ, or could not find out.
    #[error(transparent)]
    Agreement(Box<AgreementError>),
    /// Heaps of pools that are not symmetric differ.
    #[error("{0}")]
    Heaps(String),
    /// NCCL.
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
    /// An all-to-all was refused, or failed.
    #[error(transparent)]
    AllToAll(Box<AllToAllError>),
    /// A snapshot could not be written.
    #[error("the snapshot cannot be written: {0}")]
    Snapshot(#[from] io::Error),
    /// A trace cannot begin.
    #[error(transparent)]
    StartRecording(#[from] StartRecordingError),
    /// A trace ended early, or there is none.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// A checkpoint of a private pool cannot be made.
    #[error(transparent)]
    Checkpoint(Box<LayoutError>),
    /// A private pool cannot go back to a checkpoint.
    #[error("a private pool cannot go back to its checkpoint: {0}")]
    Restore(Box<RestoreError>),
    /// The memory cannot leave the process.
    #[error(
        "the memory at {address:#x} cannot be shared with other processes: the device, or the pool's allocator, gives no file \
        descriptors for it"
    )]
    NotShareable {
        /// What was to be shared.
        address: u64,
    },
    /// Another process was to be asked for memory, or asks.
    #[error("memory cannot be shared with another process, which may have ended: {0}")]
    Sharing(io::Error),
    /// A text names no shared memory.
    #[error("{text:?} names no memory of symmalloc's: both processes need symmalloc.install()")]
    NotSharedMemory {
        /// How it begins.
        text: String,
    },
    /// The owner of shared memory gave it up.
    #[error("{bytes} bytes of shared memory are gone: keep the tensor in the process that sent it")]
    SharedMemoryGone {
        /// Of the chunk.
        bytes: u64,
    },
    /// A pool did not fall asleep, or did not wake, on all ranks.
    #[error(transparent)]
    Sleep(Box<symmalloc_nccl::SleepError>),
    /// A capture is under way.
    #[error("a stream is being captured: end the capture before the pool sleeps")]
    Capturing,
    /// The pool has two registrars, of which each knows its own windows.
    #[error(
        "pool {pool} is registered with agreement at every sync on one communicator, and otherwise on another: to sleep, register it alike on \
        all"
    )]
    TwoModes {
        /// The pool.
        pool: u32,
    },
    /// Ranks could not tell which of two communicators is meant.
    #[error(
        "pool {pool} is on two communicators named {name:?}: to sleep, register it with a name for each, the same on all of its ranks"
    )]
    SameName {
        /// The pool.
        pool: u32,
        /// The name.
        name: String,
    },
    /// No pool has the tag.
    #[error("no pool of device {device} has the tag {tag:?}: make it with `tag:{tag}` in its configuration")]
    UnknownTag {
        /// The tag.
        tag: String,
        /// The device.
        device: usize,
    },
    /// An assertion failed.
    #[error("symmalloc found itself in a state that must not be, please report it: {message}")]
    Internal {
        /// What the assertion says.
        message: String,
    },
}

impl Error {
    /// What the C interface returns.
    pub(crate) fn status(&self) -> symmalloc_status {
        use symmalloc_status::*;
        match self {
            Error::Null { .. } | Error::NotText { .. } | Error::Argument { .. } | Error::Size { .. } => {
                SYMMALLOC_INVALID_ARGUMENT
            }
            Error::Fraction { .. } => SYMMALLOC_INVALID_ARGUMENT,
            Error::TorchSettings(_)
            | Error::Cuda(CudaError::Config(_) | CudaError::ChunkSize { .. } | CudaError::PrefetchSize { .. }) => {
                SYMMALLOC_INVALID_SETTINGS
            }
            Error::TooLate { .. } | Error::NoScope { .. } | Error::Forked => SYMMALLOC_INVALID_STATE,
            Error::UnknownPointer { .. } => SYMMALLOC_UNKNOWN_POINTER,
            Error::UnknownPool { .. } => SYMMALLOC_UNKNOWN_POOL,
            Error::Allocate(error) | Error::Cuda(CudaError::Allocate(error)) => of_allocation(error),
            Error::Cuda(CudaError::Sleep(error)) => of_sleep(error),
            Error::Cuda(CudaError::NoSleep) | Error::Capturing => SYMMALLOC_INVALID_STATE,
            Error::TwoModes { .. } | Error::SameName { .. } => SYMMALLOC_INVALID_STATE,
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
                SyncError::Disagreed { .. } | SyncError::PlansDiffer { .. } | SyncError::OffsetsDiffer { .. } => {
                    SYMMALLOC_MISALIGNED
                }
                SyncError::Capturing => SYMMALLOC_INVALID_STATE,
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
            | Error::OtherUser { .. }
            | Error::InCallback => SYMMALLOC_INVALID_STATE,
            Error::NotSharedMemory { .. } => SYMMALLOC_INVALID_ARGUMENT,
            Error::Sharing(_) => SYMMALLOC_IO,
            Error::Internal { .. } => SYMMALLOC_INTERNAL,
        }
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
        SleepCause::Synchronize { .. } | SleepCause::Save { .. } | SleepCause::Held { .. } | SleepCause::Load(_) => {
            symmalloc_status::SYMMALLOC_CUDA
        }
        _ => symmalloc_status::SYMMALLOC_INVALID_STATE,
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

fn of_sleep_over_ranks(error: &symmalloc_nccl::SleepError) -> symmalloc_status {
    use symmalloc_nccl::SleepError;
    match error {
        SleepError::Unknown(error) => of_unknown(error),
        SleepError::Disagreed { .. } | SleepError::Differ { .. } => symmalloc_status::SYMMALLOC_MISALIGNED,
        SleepError::Refused { ranks, .. } => of_obstacles(ranks),
        SleepError::Held { .. } | SleepError::Cuda { .. } => symmalloc_status::SYMMALLOC_CUDA,
        SleepError::NotAttached { .. } | SleepError::Capturing => symmalloc_status::SYMMALLOC_INVALID_STATE,
        _ => symmalloc_status::SYMMALLOC_NCCL,
    }
}

/// What the first of the ranks says that could not.
fn of_obstacles(ranks: &[RankObstacle]) -> symmalloc_status {
    match ranks.first().map(|rank| rank.obstacle) {
        Some(Obstacle::Limit { .. } | Obstacle::Memory { .. }) => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        Some(Obstacle::Stream { .. } | Obstacle::Save { .. } | Obstacle::Load { .. }) => {
            symmalloc_status::SYMMALLOC_CUDA
        }
        Some(Obstacle::Lost) => symmalloc_status::SYMMALLOC_NCCL,
        _ => symmalloc_status::SYMMALLOC_INVALID_STATE,
    }
}

fn of_all_to_all(error: &AllToAllError) -> symmalloc_status {
    match error {
        AllToAllError::Refused { .. } | AllToAllError::DifferentCalls { .. } | AllToAllError::Disagreement { .. } => {
            symmalloc_status::SYMMALLOC_MISALIGNED
        }
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

/// The large ones are boxed, so that results that are no errors are small.
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
    Restore(RestoreError);
    Communicator(CommError);
    TorchSettings(SettingsError);
    Sleep(symmalloc_nccl::SleepError);
    Sync(SyncError);
    Window(LookupError);
}

impl From<SplitsError> for Error {
    fn from(error: SplitsError) -> Self {
        AllToAllError::from(error).into()
    }
}

/// Every allocation and free returns one or none.
const _: () = assert!(size_of::<Error>() <= 88);
