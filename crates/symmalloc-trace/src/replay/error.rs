//! What stops a replay.

use symmalloc_core::backend::BackendError;
use symmalloc_core::errors::{
    AllocateError, FreeError, PoolError, RecordUseError, StreamError, TrimError, UnknownError,
};
use symmalloc_core::ids::{AllocationId, ObserverId};
use symmalloc_core::plans::PlanError;
use symmalloc_core::restore::RestoreError;
use symmalloc_core::sleep::SleepError;
use thiserror::Error;

/// The op that stopped a replay, counted from 0, and why.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("op {op}: {error}")]
#[non_exhaustive]
pub struct ReplayError {
    /// The op's number in the program.
    pub op: usize,
    /// What was wrong.
    pub error: StepError,
}

/// Why an op could not be carried out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The allocation was never made, its allocation failed, or it is freed already.
    #[error("allocation {} is not live", .id.0)]
    NotLive {
        /// The allocation.
        id: AllocationId,
    },
    /// Two ops make an allocation of the same id.
    #[error("allocation {} is made twice", .id.0)]
    MadeTwice {
        /// The allocation.
        id: AllocationId,
    },
    /// The observer never came, or is gone already.
    #[error("observer {observer} is not there")]
    NotObserving {
        /// The observer.
        observer: ObserverId,
    },
    /// A pool or stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The allocator refused.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// The allocator refused.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// The allocator refused.
    #[error(transparent)]
    RecordUse(#[from] RecordUseError),
    /// The allocator refused.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The allocator refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A step is open, or none is.
    #[error(transparent)]
    Step(#[from] symmalloc_core::plans::StepError),
    /// A plan is not followed here.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The pool did not fall asleep, or did not wake.
    #[error(transparent)]
    Sleep(#[from] SleepError),
    /// An allocation was not revived.
    #[error(transparent)]
    Revive(#[from] RestoreError),
    /// The driver failed.
    #[error(transparent)]
    Trim(#[from] TrimError),
    /// The driver failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
