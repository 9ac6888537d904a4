//! What can be wrong with the text of a plan: a line, or a statement that contradicts those before it.

use super::line::{MAGIC, VERSION};
use crate::text::{LineError, SHARED};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::PlanError;

/// Why a plan could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanTextError {
    /// A line by itself is wrong.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line is not a plan's.
    #[error("not a plan: the first line must be `{MAGIC} {VERSION}`; write one with `symmalloc plan JOB -o FILE`")]
    NotAPlan,
    /// The plan was written by a later version of the format.
    #[error(
        "the plan has version {found}, but this library reads version {VERSION}: use a newer one, or plan the job again"
    )]
    UnsupportedVersion {
        /// The version the plan states.
        found: u64,
    },
    /// A line stands where it cannot.
    #[error("line {line}: misplaced; here must stand {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// What may stand there.
        expected: &'static str,
    },
    /// No allocator can follow that.
    #[error("line {line}: {source}")]
    Inconsistent {
        /// The line.
        line: u64,
        /// What contradicts what.
        source: PlanContradiction,
    },
    /// The input ends without an `end` line: whoever wrote it was stopped.
    #[error("line {line}: the plan is torn; write it again")]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states another number of lines than there are: some were lost, or edited.
    #[error(
        "line {line}: the plan states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The number stated.
        stated: u64,
        /// How many lines there are between the first one and this one.
        lines: u64,
    },
    /// Something follows the `end` line.
    #[error("line {line}: the plan ended before this line; a file holds one plan of a job")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

/// A pool or a plan that contradicts those before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanContradiction {
    /// A pool is configured twice; `config` configures p0.
    #[error("pool {pool} is configured already; `config` does it for p0, and one `pool` line for each other pool")]
    PoolTwice {
        /// The pool.
        pool: PoolId,
    },
    /// A plan is for a pool that has no configuration.
    #[error("pool {pool} is not configured; put `pool {pool} SETTINGS` before its plans")]
    UnknownPool {
        /// The pool.
        pool: PoolId,
    },
    /// A heap has two plans for the same steps.
    #[error("there is a plan for the steps {key} of {pool} {} already; keep one of them", heap_word(*stream))]
    PlanTwice {
        /// The pool.
        pool: PoolId,
        /// Of which heap; `None` for that of all streams.
        stream: Option<StreamId>,
        /// The steps.
        key: u64,
    },
    /// A plan has another number of allocations than its first line says.
    #[error("the plan states {stated} allocations, and {found} follow; plan the job again")]
    Allocations {
        /// The number stated.
        stated: u64,
        /// How many lines of allocations follow.
        found: u64,
    },
    /// What the plan says is impossible, or its streams are not the pool's.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// What a heap is called in a plan.
pub(super) fn heap_word(stream: Option<StreamId>) -> String {
    stream.map_or_else(|| SHARED.to_owned(), |stream| stream.to_string())
}
