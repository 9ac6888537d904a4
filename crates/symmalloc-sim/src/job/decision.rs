//! The decisions of a rank's allocator, in a form that can be compared between ranks.

use std::fmt;
use symmalloc_core::errors::{AllocateError, FreeError, OutOfMemoryCause, PoolError, RecordUseError, TrimError};
use symmalloc_core::plans::StepError;
use symmalloc_core::sleep::{SleepCause, SleepError};
use symmalloc_core::{LimitScope, Placement};

/// The decision of an allocator about a step. Decisions are equal if and only if the allocators decided identically.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// The op succeeded.
    Done,
    /// The allocation was placed at this location.
    Placed(Placement),
    /// A step of a pool ended.
    Ended {
        /// Number of allocations that were placed as planned.
        planned: u32,
        /// Index of the first allocation that was not placed as planned; `None` if there is none.
        differs_at: Option<u32>,
    },
    /// The op was refused.
    Refused(DecidedRefusal),
}

/// The reason why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecidedRefusal {
    /// The allocation is not live, because its request was refused.
    NotLive,
    /// The size exceeds what a segment can hold.
    TooLarge,
    /// The pool's limit is reached.
    PoolLimit,
    /// The limit over all pools is reached.
    LimitOverAll,
    /// The segment or address range of the heap is full.
    SegmentFull,
    /// The pool cannot be destroyed because it has live allocations.
    PoolInUse,
    /// The pool is already destroyed, or is the default pool.
    NoSuchPool,
    /// A step of the pool is open.
    StepOpen,
    /// No step of the pool is open.
    NoStepOpen,
    /// The pool is asleep.
    Asleep,
    /// A driver call failed.
    Driver,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Done => f.write_str("done"),
            Decision::Placed(placement) if *placement == Placement::NOWHERE => {
                f.write_str("zero bytes, without a location")
            }
            Decision::Placed(placement) => write!(f, "at {placement}"),
            Decision::Ended { planned, differs_at: None } => write!(f, "{planned} allocations placed as planned"),
            Decision::Ended { planned, differs_at: Some(number) } => {
                write!(f, "{planned} allocations placed as planned, but not number {number}")
            }
            Decision::Refused(refusal) => write!(f, "refused: {refusal}"),
        }
    }
}

impl fmt::Display for DecidedRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DecidedRefusal::NotLive => "the allocation is not live",
            DecidedRefusal::TooLarge => "too large for a segment",
            DecidedRefusal::PoolLimit => "the pool's limit is reached",
            DecidedRefusal::LimitOverAll => "the limit over all pools is reached",
            DecidedRefusal::SegmentFull => "the segment is full",
            DecidedRefusal::PoolInUse => "the pool is in use",
            DecidedRefusal::NoSuchPool => "no such pool",
            DecidedRefusal::StepOpen => "a step of the pool is open",
            DecidedRefusal::NoStepOpen => "no step of the pool is open",
            DecidedRefusal::Asleep => "the pool is asleep",
            DecidedRefusal::Driver => "a driver call failed",
        })
    }
}

impl From<&AllocateError> for DecidedRefusal {
    fn from(error: &AllocateError) -> Self {
        match error {
            AllocateError::Unknown(_) => DecidedRefusal::NoSuchPool,
            AllocateError::Sleeps(_) => DecidedRefusal::Asleep,
            AllocateError::TooLarge { .. } => DecidedRefusal::TooLarge,
            AllocateError::OutOfMemory(error) => match error.cause {
                OutOfMemoryCause::Limit { scope: LimitScope::Pool, .. } => DecidedRefusal::PoolLimit,
                OutOfMemoryCause::Limit { .. } => DecidedRefusal::LimitOverAll,
                OutOfMemoryCause::SegmentFull { .. } | OutOfMemoryCause::AddressesFull { .. } => {
                    DecidedRefusal::SegmentFull
                }
                _ => DecidedRefusal::Driver,
            },
            _ => DecidedRefusal::Driver,
        }
    }
}

impl From<&FreeError> for DecidedRefusal {
    fn from(error: &FreeError) -> Self {
        if matches!(error, FreeError::Handle(_)) { DecidedRefusal::NotLive } else { DecidedRefusal::Driver }
    }
}

impl From<&RecordUseError> for DecidedRefusal {
    fn from(_: &RecordUseError) -> Self {
        DecidedRefusal::NotLive
    }
}

impl From<&TrimError> for DecidedRefusal {
    fn from(error: &TrimError) -> Self {
        if matches!(error, TrimError::Unknown(_)) { DecidedRefusal::NoSuchPool } else { DecidedRefusal::Driver }
    }
}

impl From<&StepError> for DecidedRefusal {
    fn from(error: &StepError) -> Self {
        match error {
            StepError::Unknown(_) => DecidedRefusal::NoSuchPool,
            StepError::Open { .. } => DecidedRefusal::StepOpen,
            StepError::Sleeps(_) => DecidedRefusal::Asleep,
            _ => DecidedRefusal::NoStepOpen,
        }
    }
}

impl From<&SleepError> for DecidedRefusal {
    fn from(error: &SleepError) -> Self {
        match error.cause {
            SleepCause::Unknown(_) => DecidedRefusal::NoSuchPool,
            SleepCause::StepOpen => DecidedRefusal::StepOpen,
            SleepCause::Memory { cause: OutOfMemoryCause::Limit { .. }, .. } => DecidedRefusal::LimitOverAll,
            _ => DecidedRefusal::Driver,
        }
    }
}

impl From<&PoolError> for DecidedRefusal {
    fn from(error: &PoolError) -> Self {
        match error {
            PoolError::InUse { .. } => DecidedRefusal::PoolInUse,
            PoolError::Unknown(_) | PoolError::Default => DecidedRefusal::NoSuchPool,
            _ => DecidedRefusal::Driver,
        }
    }
}
