//! Errors in the text of a plan: an invalid line, or a statement that contradicts earlier ones.

use super::line::{MAGIC, VERSION};
use crate::text::{LineError, SHARED};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::PlanError;

/// Error reading a plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanTextError {
    /// A line is invalid by itself.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line does not identify a plan.
    #[error("not a plan: the first line must be `{MAGIC} {VERSION}`; write one with `symmalloc plan JOB -o FILE`")]
    NotAPlan,
    /// The plan has a later version of the format.
    #[error(
        "the plan has version {found}, but this library reads version {VERSION}: use a newer one, or plan the job again"
    )]
    UnsupportedVersion {
        /// The version that the plan states.
        found: u64,
    },
    /// A statement is out of order.
    #[error("line {line}: misplaced; expected {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// The statements allowed there.
        expected: &'static str,
    },
    /// No allocator can follow the plan.
    #[error("line {line}: {source}")]
    Inconsistent {
        /// The line.
        line: u64,
        /// The contradiction.
        source: PlanContradiction,
    },
    /// The input ends without an `end` line: its writer was interrupted.
    #[error("line {line}: the plan is torn; write it again")]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states a different number of lines: some were lost, or edited.
    #[error(
        "line {line}: the plan states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The stated number.
        stated: u64,
        /// Number of lines between the first one and this one.
        lines: u64,
    },
    /// Text follows the `end` line.
    #[error("line {line}: the plan ended before this line; a file holds one plan of a job")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

/// A pool or a plan that contradicts earlier statements.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanContradiction {
    /// A pool is configured twice; `config` configures p0.
    #[error("pool {pool} is already configured; use `config` for p0, and one `pool` line for each other pool")]
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
    #[error("step key {key} of {pool} {} already has a plan; keep one of the two", heap_word(*stream))]
    PlanTwice {
        /// The pool.
        pool: PoolId,
        /// The heap's stream; `None` for the heap that all streams share.
        stream: Option<StreamId>,
        /// The key of the steps.
        key: u64,
    },
    /// A plan has a different number of allocations than its first line states.
    #[error("the plan states {stated} allocations, but {found} follow; plan the job again")]
    Allocations {
        /// The stated number.
        stated: u64,
        /// Number of allocation lines that follow.
        found: u64,
    },
    /// The plan is impossible, or its streams do not match the pool's stream policy.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Returns the word for a heap in a plan.
pub(super) fn heap_word(stream: Option<StreamId>) -> String {
    stream.map_or_else(|| SHARED.to_owned(), |stream| stream.to_string())
}
