//! What a rank's allocator answered to a step, in a form that ranks can compare.

use std::fmt;
use symmalloc_core::errors::{AllocateError, FreeError, OutOfMemoryCause, PoolError, RecordUseError, TrimError};
use symmalloc_core::{LimitScope, Placement};

/// An answer. Equal on two ranks exactly when they decided alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// It was done.
    Done,
    /// The allocation lies there.
    Placed(Placement),
    /// It was refused.
    Refused(Refusal),
}

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The allocation is not live: it was refused itself.
    NotLive,
    /// More than a segment can have.
    TooLarge,
    /// The pool's limit.
    PoolLimit,
    /// The limit over all pools.
    LimitOverAll,
    /// The heap's segment or range is full.
    SegmentFull,
    /// Not destroyed: allocations of the pool are live.
    PoolInUse,
    /// The pool was destroyed before, or is the default one.
    NoSuchPool,
    /// The driver.
    Driver,
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Decision::Done => f.write_str("done"),
            Decision::Placed(placement) if *placement == Placement::NOWHERE => f.write_str("no bytes, nowhere"),
            Decision::Placed(placement) => write!(f, "at {placement}"),
            Decision::Refused(refusal) => write!(f, "refused: {refusal}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refusal::NotLive => "the allocation is not live",
            Refusal::TooLarge => "too large for a segment",
            Refusal::PoolLimit => "the pool's limit",
            Refusal::LimitOverAll => "the limit over all pools",
            Refusal::SegmentFull => "the segment is full",
            Refusal::PoolInUse => "the pool is in use",
            Refusal::NoSuchPool => "no such pool",
            Refusal::Driver => "the driver",
        })
    }
}

impl From<&AllocateError> for Refusal {
    fn from(error: &AllocateError) -> Self {
        match error {
            AllocateError::Unknown(_) => Refusal::NoSuchPool,
            AllocateError::TooLarge { .. } => Refusal::TooLarge,
            AllocateError::OutOfMemory(error) => match error.cause {
                OutOfMemoryCause::Limit { scope: LimitScope::Pool, .. } => Refusal::PoolLimit,
                OutOfMemoryCause::Limit { .. } => Refusal::LimitOverAll,
                OutOfMemoryCause::SegmentFull { .. } => Refusal::SegmentFull,
                _ => Refusal::Driver,
            },
            _ => Refusal::Driver,
        }
    }
}

impl From<&FreeError> for Refusal {
    fn from(error: &FreeError) -> Self {
        if matches!(error, FreeError::Handle(_)) { Refusal::NotLive } else { Refusal::Driver }
    }
}

impl From<&RecordUseError> for Refusal {
    fn from(_: &RecordUseError) -> Self {
        Refusal::NotLive
    }
}

impl From<&TrimError> for Refusal {
    fn from(error: &TrimError) -> Self {
        if matches!(error, TrimError::Unknown(_)) { Refusal::NoSuchPool } else { Refusal::Driver }
    }
}

impl From<&PoolError> for Refusal {
    fn from(error: &PoolError) -> Self {
        match error {
            PoolError::InUse { .. } => Refusal::PoolInUse,
            PoolError::Unknown(_) | PoolError::Default => Refusal::NoSuchPool,
            _ => Refusal::Driver,
        }
    }
}
