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
use crate::output::reason;
use crate::quantity::counted;
use crate::recorded::Recorded;
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, StreamPolicy};
use symmalloc_core::op::Op;
use symmalloc_core::plans::{Plan, PlanError, Steps};
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::StepError;

/// Heaps that are each planned with all the steps that a search may take. More of them share the steps of so many, so that a job
/// of thousands of streams takes no longer.
const HEAPS_IN_FULL: u64 = 4;

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
    /// When the job cannot be planned, or cannot be carried out as planned. Without a plan it may well be.
    pub(crate) fn of(recorded: &Recorded, policy: &PolicyArgs) -> Result<Self, CliError> {
        let config = config_of(recorded, policy)?;
        let begun = Instant::now();
        let file =
            if recorded.program().has_steps() { learnt::plans(recorded, &config)? } else { solved(recorded, config)? };
        let seconds = begun.elapsed().as_secs_f64();
        follow::adopt(&file, recorded.job.stream_count()).map_err(|(pool, error)| refused(recorded, pool, error))?;
        let file = Arc::new(file);
        let followed = recorded.job.steady(file.config(), Some(&file));
        Ok(PlannedJob { followed: followed.map_err(|error| not_followed(recorded, error))?, file, seconds })
    }

    /// Plans a job for a comparison with what it does without a plan, in which `own_refused` requests are refused. `None` where there is
    /// nothing to plan.
    ///
    /// # Errors
    /// The reason, in a sentence, why there is no plan, or none that serves as many requests.
    pub(crate) fn of_use(recorded: &Recorded, policy: &PolicyArgs, own_refused: u64) -> Result<Option<Self>, String> {
        let planned = PlannedJob::of(recorded, policy).map_err(|error| reason(&error))?;
        let refused = planned.followed.refused;
        if refused > own_refused {
            return Err(format!("with one, {} are refused, and {own_refused} without", counted(refused, "request")));
        }
        Ok((planned.plan_count() > 0).then_some(planned))
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
    let heap_steps = steps::of(recorded.program(), &file);
    let Steps(of_one) = Steps::default();
    let search = Steps(of_one * HEAPS_IN_FULL / HEAPS_IN_FULL.max(heap_steps.len() as u64));
    for step in heap_steps {
        let config = file.pool_config(step.pool).expect("steps are of pools of the file");
        let plan = Plan::solve(config, draft::GRANULE_BYTES, step.stream, step.key, &step.wanted, search);
        let plan = plan.map_err(|error| refused(recorded, step.pool, error))?;
        file.add_plan(step.pool, plan).map_err(|source| draft::contradicts(recorded, source))?;
    }
    draft::with_exact_segments(recorded, &file)
}

/// The error of a job that stops when it follows its plan. A pool adopts its plans when the program makes it.
fn not_followed(recorded: &Recorded, error: JobError) -> CliError {
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
        source => CliError::Job { path: recorded.path.clone(), source },
    }
}

fn refused(recorded: &Recorded, pool: PoolId, source: PlanError) -> CliError {
    CliError::NotPlanned { path: recorded.path.clone(), pool, source }
}
