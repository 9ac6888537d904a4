//! Errors of a replay.

use symmalloc_core::backend::BackendError;
use symmalloc_core::errors::{
    AllocateError, FreeError, PoolError, RecordUseError, StreamError, TrimError, UnknownError,
};
use symmalloc_core::ids::{AllocationId, ObserverId};
use symmalloc_core::plans::PlanError;
use symmalloc_core::restore::RestoreError;
use symmalloc_core::sleep::SleepError;
use symmalloc_core::work::TooMuchWork;
use thiserror::Error;

/// The op that stopped a replay, and the cause.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("op {op}: {error}")]
#[non_exhaustive]
pub struct ReplayError {
    /// Index of the op in the program, from 0.
    pub op: usize,
    /// The cause.
    pub error: StepError,
}

/// Error executing an op.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The allocation was never made, was refused, or is already freed.
    #[error("allocation {} is not live", .id.0)]
    NotLive {
        /// The allocation.
        id: AllocationId,
    },
    /// Two ops make an allocation with the same id.
    #[error("allocation {} is made twice", .id.0)]
    MadeTwice {
        /// The allocation.
        id: AllocationId,
    },
    /// The observer does not exist, or was forgotten.
    #[error("observer {observer} is not registered")]
    NotObserving {
        /// The observer.
        observer: ObserverId,
    },
    /// The program repeats ops whose work grows with its live memory, and exceeds the limit on this work.
    #[error(transparent)]
    TooMuchWork(#[from] TooMuchWork),
    /// A pool or stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The allocator rejected an allocation.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The allocator rejected a free.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// The allocator rejected a recorded use.
    #[error(transparent)]
    RecordUse(#[from] RecordUseError),
    /// The allocator rejected a stream.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The allocator rejected a pool operation.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A step is already open, or no step is open.
    #[error(transparent)]
    Step(#[from] symmalloc_core::plans::StepError),
    /// A plan cannot be adopted.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The pool failed to sleep or to wake.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// An allocation could not be revived.
    #[error(transparent)]
    Revive(#[from] RestoreError),
    /// The driver failed to release memory.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The driver failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
