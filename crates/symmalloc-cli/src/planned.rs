//! The plans of a job: made from all that it asks for, written, read again, and held against a job before they are followed.
//!
//! ```text
//!            ┌─► steps    what each heap is asked for, step by step ──► solved   an offset for each ──┐
//! Recorded ──┤                                                                                     ├─► PlanFile
//!            └─► learnt   the same by a pool that learns, where the program has steps of its own ──┘
//!
//! PlanFile, and a recording ──► follow    is it this job's, of this configuration, and does it fit? else an error
//! ```

mod contradiction;
mod difference;
mod draft;
mod follow;
mod learnt;
mod steps;

pub(crate) use contradiction::Contradiction;
pub(crate) use difference::JobDifference;
pub(crate) use follow::follow;

use crate::args::PolicyArgs;
use crate::error::CliError;
use crate::job::{JobError, Steady};
use crate::recorded::Recorded;
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, StreamPolicy};
use symmalloc_core::op::Op;
use symmalloc_core::plans::{Plan, PlanError, Steps};
use symmalloc_trace::plan::PlanFile;

/// A job's plans, and what following them takes.
pub(crate) struct PlannedJob {
    pub(crate) file: Arc<PlanFile>,
    /// The job as it follows them.
    pub(crate) followed: Steady,
    /// What planning took.
    pub(crate) seconds: f64,
}

impl PlannedJob {
    /// Plans a job. Its default pool's streams share, unless the recording or the flags say how it is configured.
    ///
    /// # Errors
    /// When the job cannot be carried out or planned, or a limit leaves no room for its plans.
    pub(crate) fn of(recorded: &Recorded, policy: &PolicyArgs) -> Result<Self, CliError> {
        let config = config_of(recorded, policy)?;
        let begun = Instant::now();
        let file =
            if recorded.program().has_steps() { learnt::plans(recorded, &config)? } else { solved(recorded, config)? };
        let seconds = begun.elapsed().as_secs_f64();
        follow::adopt(&file, recorded.job.stream_count()).map_err(|(pool, error)| refused(recorded, pool, error))?;
        let file = Arc::new(file);
        let followed = recorded.job.steady(file.config(), Some(&file));
        let failed = |source: JobError| CliError::Job { path: recorded.path.clone(), source };
        Ok(PlannedJob { followed: followed.map_err(failed)?, file, seconds })
    }

    /// Bytes of memory that the plans place in. Those of one heap share it.
    pub(crate) fn memory_bytes(&self) -> u64 {
        draft::heaps(&self.file).values().sum()
    }

    pub(crate) fn plan_count(&self) -> usize {
        self.file.plans().count()
    }

    /// How the default pool's streams share.
    pub(crate) fn streams(&self) -> StreamPolicy {
        self.file.config().default_pool().streams()
    }
}

/// How the job's allocator is configured when it follows a plan.
fn config_of(recorded: &Recorded, policy: &PolicyArgs) -> Result<Config, CliError> {
    let states_it = |op: &Op| matches!(op, Op::CreatePool { pool: PoolId::DEFAULT, .. });
    let is_stated = policy.streams.is_some()
        || recorded.recording.config.is_some()
        || recorded.program().ops().iter().any(states_it);
    if is_stated {
        return Ok(recorded.config.clone());
    }
    let shared = recorded.config.default_pool().to_builder().streams(StreamPolicy::Shared).build();
    let config = shared.and_then(|pool| recorded.config.to_builder().default_pool(pool).build());
    config.map_err(|error| recorded.invalid(error))
}

/// Plans the whole job as one step.
fn solved(recorded: &Recorded, config: Config) -> Result<PlanFile, CliError> {
    let mut file = draft::empty(recorded, config)?;
    for step in steps::of(recorded.program(), &file) {
        let config = file.pool_config(step.pool).expect("steps are of pools of the file");
        let plan = Plan::solve(config, step.key, step.stream, &step.wanted, Steps::default());
        let plan = plan.map_err(|error| refused(recorded, step.pool, error))?;
        file.add_plan(step.pool, plan).map_err(|source| draft::contradicts(recorded, source))?;
    }
    draft::with_exact_segments(recorded, &file)
}

fn refused(recorded: &Recorded, pool: PoolId, source: PlanError) -> CliError {
    CliError::NotPlanned { path: recorded.path.clone(), pool, source }
}
