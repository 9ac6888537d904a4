//! Why a plan is not valid, or cannot be followed here.

use crate::config::errors::{AllocateError, PoolSleeps, UnknownError};
use crate::types::ids::{PoolId, StreamId};
use symmalloc_plan::ProblemError;
use thiserror::Error;

/// Why a plan was not made, or not adopted. The heap is as it was then, except after [`Memory`](Self::Memory).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The pool or a stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// A plan of no allocations, or of too many.
    #[error("a plan has 1 to {most} allocations, not {allocations}: plan one step of the program, not many")]
    Count {
        /// How many it has.
        allocations: usize,
        /// How many it may have.
        most: usize,
    },
    /// A size, a lifetime or an offset is impossible, or the stream is not the heap's.
    #[error(
        "allocation {number} of the plan is not valid: it needs at least 1 byte, an offset that is a multiple of 512 within a \
         segment, an end behind its beginning and at most one step later, and the stream of its heap"
    )]
    Allocation {
        /// Its number in the step.
        number: u32,
    },
    /// Two allocations are live at the same time in the same place.
    #[error(
        "allocations {first} and {second} of the plan overlap in time and place: was it made for a pool that rounds sizes \
         otherwise? Plan the job again with this pool's configuration"
    )]
    Overlap {
        /// The one that was there.
        first: u32,
        /// The one that came.
        second: u32,
    },
    /// The plan reaches beyond what a segment can have.
    #[error("the plan needs more memory than a segment can have (1 TiB): plan fewer allocations")]
    TooLarge,
    /// The plan is for a heap of one stream, and the pool's streams share, or the other way round.
    #[error(
        "the plan is for {}, and the streams of {pool} {}: plan the job with `streams:{}`",
        .stream.map_or("shared streams".to_owned(), |stream| format!("the heap of {stream}")),
        if .stream.is_none() { "are separate" } else { "share" },
        if .stream.is_none() { "separate" } else { "shared" }
    )]
    Streams {
        /// The pool.
        pool: PoolId,
        /// What the plan is for.
        stream: Option<StreamId>,
    },
    /// A step is open.
    #[error("a step of {pool} is open: adopt and drop plans between end_step and begin_step")]
    StepOpen {
        /// The pool.
        pool: PoolId,
    },
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// There is no memory for it. The heap has no plans any more, and goes on without.
    /// Its message has the cause, which is no source of its own therefore.
    #[error("no memory for the plan: {0}")]
    Memory(AllocateError),
    /// The sizes add up to more than the planner can count.
    #[error(transparent)]
    Solver(ProblemError),
}

/// Why a step did not begin or end. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool sleeps.
    #[error(transparent)]
    Sleeps(#[from] PoolSleeps),
    /// A step is open already.
    #[error("step {key} of {pool} is still open: call end_step before the next begin_step")]
    Open {
        /// The pool.
        pool: PoolId,
        /// The key that it began with.
        key: u64,
    },
    /// No step is open.
    #[error("no step of {pool} is open: call begin_step first")]
    NotOpen {
        /// The pool.
        pool: PoolId,
    },
}

impl From<AllocateError> for PlanError {
    fn from(error: AllocateError) -> Self {
        PlanError::Memory(error)
    }
}
