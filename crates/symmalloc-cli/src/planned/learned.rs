//! Plans of a job with its own steps, as its pools learn them when the job is repeated.
//!
//! The pools learn without limits, so that a plan contains every request of its step. Adopting the plan shows whether it fits
//! into the limits.

use super::draft;
use crate::error::CliError;
use crate::job::JobError;
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, ConfigError, PlanPolicy, PoolConfig, SegmentPolicy};
use symmalloc_core::op::{Op, Record};
use symmalloc_core::plans::Plan;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::IdleBackend;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Number of passes over the job. A step that occurs once in the job occurs a second time in the second pass.
const PASSES: u32 = 3;

/// Runs the job in learning pools, and returns the plans that they have at the end.
pub(super) fn plans(recorded: &Recorded, config: &Config) -> Result<PlanFile, CliError> {
    let mut file = draft::empty(recorded, config.clone())?;
    let failed = |source| CliError::Job { path: recorded.path.clone(), source };
    let learning = learning(config.default_pool());
    let learning = learning.and_then(|pool| config.to_builder().total_limit_bytes(None).default_pool(pool).build());
    let learning = learning.map_err(|error| recorded.invalid(error))?;
    let program = program(recorded).map_err(|error| recorded.invalid(error))?;
    let allocator: Allocator<_> =
        Allocator::new(IdleBackend::default(), learning).map_err(|error| recorded.invalid(error))?;
    let mut replay = Replay::new(&allocator, &program);
    let mut learned: BTreeMap<PoolId, Vec<Plan>> = BTreeMap::new();
    let mut take = |replay: &Replay<'_, _, _>, pool: PoolId| {
        let plans = replay.pool_of(pool).and_then(|pool| allocator.plans(pool).ok());
        if let Some(plans) = plans.filter(|plans| !plans.is_empty()) {
            learned.insert(pool, plans);
        }
    };
    for _ in 0..PASSES {
        replay.begin_pass().map_err(|error| failed(JobError::Pass { rank: 0, error }))?;
        for (op, call) in program.ops().iter().enumerate() {
            if let Op::DestroyPool { pool } = call {
                take(&replay, *pool);
            }
            match replay.step(call) {
                // The step succeeded, or a request was refused: it is larger than any segment, or exceeds a quota.
                Ok(_) | Err(StepError::Allocate(_) | StepError::NotLive { .. }) => {}
                Err(error) => return Err(failed(JobError::Step { rank: 0, op, error })),
            }
        }
        replay.free_all().map_err(|error| failed(JobError::Free { rank: 0, error }))?;
        file.pools().map(|(pool, _)| pool).chain([PoolId::DEFAULT]).for_each(|pool| take(&replay, pool));
    }
    for (pool, plans) in learned {
        for plan in plans {
            file.add_plan(pool, plan).map_err(|source| draft::contradicts(recorded, source))?;
        }
    }
    Ok(file)
}

/// Returns the pool's configuration for learning. A pool with a quota keeps its configuration, because it has no plans.
fn learning(config: &PoolConfig) -> Result<PoolConfig, ConfigError> {
    if config.has_quota() {
        return Ok(config.clone());
    }
    let builder = config.to_builder().plan(PlanPolicy::Learn).limit_bytes(None);
    match config.segments() {
        SegmentPolicy::Reserved { .. } => builder.expandable().build(),
        _ => builder.build(),
    }
}

/// Returns the job with learning pools.
fn program(recorded: &Recorded) -> Result<Program, ConfigError> {
    let record = |record: &Record| {
        let mut record = record.clone();
        if let Op::CreatePool { config, .. } = &mut record.op {
            **config = learning(config)?;
        }
        Ok(record)
    };
    let records = recorded.recording.records.iter().map(record).collect::<Result<Vec<Record>, ConfigError>>()?;
    Ok(Program::new(&records).expect("the records were a valid program before"))
}
