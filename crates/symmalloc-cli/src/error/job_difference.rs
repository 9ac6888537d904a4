//! The first difference between a job and a plan of another job.

use crate::quantity::exact_memory;
use std::fmt;
use symmalloc_core::ids::{HeapId, PoolId};
use symmalloc_core::plans::StepAllocation;
use thiserror::Error;

/// The first difference between a job and its plan. Allocations are counted from 0 within the heap's step, and ops within the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum JobDifference {
    #[error("the job creates pool {pool}, which the plan does not configure")]
    UnknownPool { pool: PoolId },
    #[error("the plan has steps {key} of {heap}, in which the job requests no memory")]
    NoStep { heap: HeapId, key: u64 },
    #[error("op {op} requests memory of {heap}, which has no plan")]
    NoPlan { heap: HeapId, op: usize },
    #[error(
        "allocation {number} of {heap} (op {op}) requests {} on {}, but the plan expects {}",
        exact_memory(asked.requested_bytes), asked.stream, Expected(*planned)
    )]
    Request { heap: HeapId, number: usize, op: usize, asked: StepAllocation, planned: Option<StepAllocation> },
    #[error("the plan expects {} as allocation {number} of {heap}, but the job ends before it", Expected(Some(*planned)))]
    Ended { heap: HeapId, number: usize, planned: StepAllocation },
    #[error(
        "allocation {number} of {heap} (op {op}) is freed later than the plan expects: before allocation {asked}, not {planned}"
    )]
    Lifetime { heap: HeapId, number: usize, op: usize, asked: u32, planned: u32 },
}

/// Display of a planned allocation.
struct Expected(Option<StepAllocation>);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(planned) => write!(f, "{} on {}", exact_memory(planned.requested_bytes), planned.stream),
            None => f.write_str("no more"),
        }
    }
}
