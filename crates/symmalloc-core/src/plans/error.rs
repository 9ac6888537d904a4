//! Errors of invalid plans, and of plans that cannot be followed.

use crate::config::StreamPolicy;
use crate::config::errors::{AllocateError, PoolSleeps, UnknownError};
use crate::types::ids::{PoolId, StreamGroup, StreamId};
use symmalloc_plan::ProblemError;
use thiserror::Error;

/// An error returned when a plan is created or adopted. The heap is unchanged, except after [`Memory`](Self::Memory).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The pool or a stream does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The plan has no allocations, or too many.
    #[error("a plan has 1 to {most} allocations, not {allocations}: plan one step of the program, not many")]
    Count {
        /// Number of its allocations.
        allocations: usize,
        /// Maximum number of allocations.
        most: usize,
    },
    /// A size, a lifetime or an offset is impossible, or the stream is not the heap's or does not exist.
    #[error(
        "allocation {number} of the plan is not valid: it needs at least 1 byte, an offset that is a multiple of 512 within a \
         segment, an end after its beginning and at most one step later, and the stream of its heap, at most {}",
        StreamId::MAX
    )]
    Allocation {
        /// Number of the allocation in the step.
        number: u32,
    },
    /// Two allocations that are live at the same time overlap.
    #[error(
        "allocations {first} and {second} of the plan overlap in time and place: if the plan is for a pool that rounds \
         sizes differently, plan the job again with this pool's configuration"
    )]
    Overlap {
        /// The earlier allocation.
        first: u32,
        /// The later allocation.
        second: u32,
    },
    /// The plan exceeds the largest segment.
    #[error("the plan needs more memory than the maximum size of a segment (1 TiB): plan fewer allocations")]
    TooLarge,
    /// The plan is for a group of streams that does not share a heap in the pool.
    #[error(
        "the plan is for {}, but {pool} has `streams:{}`{}: plan the job with that setting",
        heap_words(*.group),
        .streams.word(),
        if .streams.makes(*.group) { " and other groups of streams" } else { "" }
    )]
    Streams {
        /// The pool.
        pool: PoolId,
        /// The streams of the plan.
        group: StreamGroup,
        /// The pool's policy.
        streams: StreamPolicy,
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
    /// There is no memory for the plan. The heap drops its plans and continues without them. The message includes the
    /// cause, which is therefore not reported as a source.
    #[error("no memory for the plan: {0}")]
    Memory(AllocateError),
    /// The sum of the sizes overflows.
    #[error(transparent)]
    Solver(ProblemError),
}

/// An error returned when a step begins or ends. Nothing has changed.
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
        /// The key of the open step.
        key: u64,
    },
    /// No step is open.
    #[error("no step of {pool} is open: call begin_step first")]
    NotOpen {
        /// The pool.
        pool: PoolId,
    },
}

fn heap_words(group: StreamGroup) -> String {
    match group {
        StreamGroup::All => "shared streams".to_owned(),
        StreamGroup::One(stream) => format!("the heap of {stream}"),
        StreamGroup::Group(first) => format!("the group of {first}"),
    }
}

impl From<AllocateError> for PlanError {
    fn from(error: AllocateError) -> Self {
        PlanError::Memory(error)
    }
}
