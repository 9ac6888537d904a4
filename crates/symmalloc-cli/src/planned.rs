//! Plans of a job: computed from its requests, written, read back, and validated against a job before the job follows them.
//!
//! ```text
//!            ┌─► steps    requests to each heap, by step ──► solved   an offset for each ──┐
//! Recorded ──┤                                                                             ├─► PlanFile
//!            └─► learned   plans learned by the pools, if the program has its own steps ────┘
//!
//! PlanFile ──► segments    reserved pools get segments as large as the planned job needs
//! PlanFile, and a recording ──► follow    fails unless job and configuration match and the plan fits
//! ```

mod difference;
mod draft;
mod follow;
mod learned;
mod refusal;
mod segments;
mod steps;

pub(crate) use draft::GRANULE_BYTES;
pub(crate) use follow::follow;

use crate::args::PolicyArgs;
use crate::error::CliError;
use crate::job::Steady;
use crate::output::reason;
use crate::progress::Progress;
use crate::quantity::{count, counted, memory};
use crate::recorded::Recorded;
use refusal::{not_followed, refused};
use std::sync::Arc;
use std::time::Instant;
use symmalloc_core::PoolId;
use symmalloc_core::config::{Config, StreamPolicy};
use symmalloc_core::errors::{AllocateError, LimitScope, OutOfMemoryCause};
use symmalloc_core::op::Op;
use symmalloc_core::plans::{Plan, PlanError, SearchBudget};
use symmalloc_trace::plan::PlanFile;

/// Units of search work that count as one second: one core does more than this in a second. Work is counted instead of time, so that every
/// machine finds the same plan.
const WORK_PER_SECOND: u64 = 3_000_000;

/// Default duration of the search, in seconds. It is shorter for a long job, because the other parts of its planning take several seconds.
pub(crate) const SECONDS: u64 = 10;
pub(crate) const SECONDS_FOR_LONG_JOBS: u64 = 4;

/// Duration of the search in seconds if the plan is only a part of a report or a picture. A report leaves out the plan of a long job.
const SECONDS_IN_REPORTS: u64 = 2;
const SECONDS_IN_REPORTS_OF_LONG_JOBS: u64 = 1;

/// Returns the search budget for about this many seconds of processor time.
pub(crate) fn budget(seconds: u64) -> SearchBudget {
    SearchBudget(seconds.saturating_mul(WORK_PER_SECOND))
}

/// The plans of a job, and the results of following them.
pub(crate) struct PlannedJob {
    pub(crate) file: Arc<PlanFile>,
    /// Results of the job with its plans.
    pub(crate) followed: Steady,
    /// Time that planning took.
    pub(crate) seconds: f64,
}

/// The reason why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoPlan {
    pub(crate) reason: String,
    /// `true` if the reason is a limit that is less than the plan's memory.
    pub(crate) exceeds_limit: bool,
}

impl NoPlan {
    /// Returns the reason that an error states. If the plan exceeds a limit, the reason also states the memory that the plan needs.
    pub(crate) fn of(error: &CliError) -> Self {
        if let CliError::NotPlanned { pool, source: PlanError::Memory(AllocateError::OutOfMemory(lack)), .. } = error
            && let OutOfMemoryCause::Limit { scope, limit_bytes } = lack.cause
            && lack.reserved_bytes.saturating_add(lack.missing_bytes) > limit_bytes
        {
            let needed = memory(lack.reserved_bytes.saturating_add(lack.missing_bytes));
            let limit = match scope {
                LimitScope::Pool => format!("the limit of pool {}", pool.0),
                _ => "the limit of all pools".to_owned(),
            };
            let reason = format!("a plan needs at least {needed}, and {limit} is {}", memory(limit_bytes));
            return NoPlan { reason, exceeds_limit: true };
        }
        NoPlan { reason: reason(error), exceeds_limit: false }
    }
}

impl PlannedJob {
    /// Plans a job. The streams of its default pool share one heap, unless the recording or the flags configure them.
    ///
    /// # Errors
    /// Returns an error if the job cannot be planned, or fails when it follows the plan. It may still run without a plan.
    pub(crate) fn of(recorded: &Recorded, policy: &PolicyArgs, budget: SearchBudget) -> Result<Self, CliError> {
        let config = config_of(recorded, policy)?;
        let begun = Instant::now();
        let file = if recorded.program().has_steps() {
            learned::plans(recorded, &config)?
        } else {
            solved(recorded, config, budget)?
        };
        let file = segments::exact(recorded, file)?;
        let seconds = begun.elapsed().as_secs_f64();
        let file = Arc::new(file);
        let followed = recorded.job.steady(file.config(), Some(&file)).map_err(|error| {
            // If a pool rejects the plan, report that instead.
            match follow::adopt(&file, &recorded.program().groups()) {
                Err((pool, error)) => refused(recorded, pool, error),
                Ok(()) => not_followed(recorded, error),
            }
        })?;
        Ok(PlannedJob { followed, file, seconds })
    }

    /// Plans a job for a comparison with a run without a plan, in which `own_refused` requests are refused. Returns `None` if there
    /// is nothing to plan.
    ///
    /// # Errors
    /// Returns a reason that states why there is no plan, or why every plan refuses more requests.
    pub(crate) fn of_use(recorded: &Recorded, policy: &PolicyArgs, own_refused: u64) -> Result<Option<Self>, NoPlan> {
        let seconds = if recorded.job.is_long() { SECONDS_IN_REPORTS_OF_LONG_JOBS } else { SECONDS_IN_REPORTS };
        let planned = PlannedJob::of(recorded, policy, budget(seconds)).map_err(|error| NoPlan::of(&error))?;
        let refused = planned.followed.refused;
        if refused > own_refused {
            let passes = counted(planned.followed.passes, "pass");
            let own = match own_refused {
                0 => "none is".to_owned(),
                1 => "1 is".to_owned(),
                own => format!("{} are", count(own)),
            };
            let refused = counted(refused, "request");
            let reason = format!("in {passes}, the plan refuses {refused}; without a plan, {own} refused");
            return Err(NoPlan { reason, exceeds_limit: false });
        }
        Ok((planned.plan_count() > 0).then_some(planned))
    }

    /// Returns the size of the memory in which the plans place allocations, in bytes. Plans of the same heap share memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        draft::heaps(&self.file).values().sum()
    }

    pub(crate) fn plan_count(&self) -> usize {
        self.file.plans().count()
    }

    /// Returns the stream policy of the default pool.
    pub(crate) fn streams(&self) -> StreamPolicy {
        self.file.config().default_pool().streams()
    }
}

/// Returns the configuration of the job's allocator when it follows a plan.
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

/// Plans the whole job as one step. The heaps share the budget: each heap gets an equal share of what the previous heaps left.
fn solved(recorded: &Recorded, config: Config, SearchBudget(mut left): SearchBudget) -> Result<PlanFile, CliError> {
    let mut file = draft::empty(recorded, config)?;
    let mut heap_steps = steps::of(recorded.program(), &file);
    // Small heaps come first, because they leave most of their share to the others. The order of plans in the file does not depend on it.
    heap_steps.sort_by_key(|step| step.wanted.len());
    let progress = Progress::new(&recorded.path.to_string_lossy(), heap_steps.len() as u64, "heaps");
    let mut plans = Vec::new();
    for (number, step) in heap_steps.iter().enumerate() {
        let share = left / (heap_steps.len() - number) as u64;
        let config = file.pool_config(step.heap.pool).expect("steps are of pools of the file");
        let plan =
            Plan::solve_within(config, GRANULE_BYTES, step.heap.group, step.key, &step.wanted, SearchBudget(share));
        let (plan, spent) = plan.map_err(|error| refused(recorded, step.heap.pool, error))?;
        left = left.saturating_sub(spent);
        plans.push((step.heap, plan));
        progress.step();
    }
    plans.sort_by_key(|(heap, plan)| (*heap, plan.key()));
    for (heap, plan) in plans {
        file.add_plan(heap.pool, plan).map_err(|source| draft::contradicts(recorded, source))?;
    }
    Ok(file)
}
