//! What can go wrong in this crate, with a message that says what to do.

use crate::settings::SettingsError;
use crate::status::symmalloc_status;
use std::io;
use symmalloc_agreement::AgreementError;
use symmalloc_core::errors::{AllocateError, FreeError, RecordUseError, TrimError, UnknownError};
use symmalloc_core::plans::{PlanError, StepError};
use symmalloc_core::recording::{RecordingEnd, RecordingError, StartRecordingError};
use symmalloc_cuda::CudaError;
use symmalloc_nccl::{AttachError, CommError, SyncError};
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
    /// The pointer is no live allocation of this allocator.
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
    /// A snapshot could not be written.
    #[error("the snapshot cannot be written: {0}")]
    Snapshot(#[from] io::Error),
    /// A trace cannot begin.
    #[error(transparent)]
    StartRecording(#[from] StartRecordingError),
    /// A trace ended early, or there is none.
    #[error(transparent)]
    Recording(#[from] RecordingError),
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
                _ => SYMMALLOC_NCCL,
            },
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
            Error::Recording(_) => SYMMALLOC_INVALID_STATE,
            Error::Internal { .. } => SYMMALLOC_INTERNAL,
        }
    }
}

fn of_allocation(error: &AllocateError) -> symmalloc_status {
    match error {
        AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. } => symmalloc_status::SYMMALLOC_OUT_OF_MEMORY,
        AllocateError::Unknown(error) => of_unknown(error),
        _ => symmalloc_status::SYMMALLOC_CUDA,
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
    Attach(AttachError);
    Communicator(CommError);
    TorchSettings(SettingsError);
    Sync(SyncError);
}

/// Every allocation and free returns one or none.
const _: () = assert!(size_of::<Error>() <= 88);
