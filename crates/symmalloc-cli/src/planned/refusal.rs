//! Errors of jobs that cannot run as planned.

use crate::error::CliError;
use crate::job::JobError;
use crate::recorded::Recorded;
use symmalloc_core::PoolId;
use symmalloc_core::op::Op;
use symmalloc_core::plans::PlanError;
use symmalloc_trace::replay::StepError;

/// Converts the error of a job that stops while it follows its plan. A pool adopts its plans when the program creates the pool, so the op
/// of the error identifies the pool.
pub(super) fn not_followed(recorded: &Recorded, error: JobError) -> CliError {
    match error {
        JobError::Plan { error: StepError::Plan(source), .. } => refused(recorded, PoolId::DEFAULT, source),
        JobError::Step { op, error: StepError::Plan(source), .. } => {
            let made = recorded.program().ops().get(op);
            let pool = made.map_or(PoolId::DEFAULT, |op| match op {
                Op::CreatePool { pool, .. } => *pool,
                _ => PoolId::DEFAULT,
            });
            refused(recorded, pool, source)
        }
        // With a plan, a pool may hold memory that another pool needs to wake.
        source => CliError::NotFollowed { path: recorded.path.clone(), source },
    }
}

/// Returns the error for a pool that refuses its plan.
pub(super) fn refused(recorded: &Recorded, pool: PoolId, source: PlanError) -> CliError {
    CliError::NotPlanned { path: recorded.path.clone(), pool, source }
}
