//! Contradictions between the statements of a plan.

use symmalloc_core::ids::{HeapId, PoolId};
use symmalloc_core::plans::PlanError;

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
    #[error("step key {key} of {} {} already has a plan; keep one of the two", .heap.pool, .heap.group)]
    PlanTwice {
        /// The heap.
        heap: HeapId,
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
