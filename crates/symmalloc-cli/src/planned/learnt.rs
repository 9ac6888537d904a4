//! Plans of a job that says where its steps begin and end: what its pools learn when it is repeated.

use super::draft;
use crate::error::CliError;
use crate::job::JobError;
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, ConfigError, PlanPolicy, PoolConfig};
use symmalloc_core::lock::Exclusive;
use symmalloc_core::op::{Op, Record};
use symmalloc_core::plans::Plan;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::SimBackend;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, Replay, StepError};

/// How often the job is carried out: a step that comes once in it comes twice alike in the second pass.
const PASSES: u32 = 3;

/// Carries the job out in pools that learn, and takes the plans that they end with.
pub(super) fn plans(recorded: &Recorded, config: &Config) -> Result<PlanFile, CliError> {
    let mut file = draft::empty(recorded, config.clone())?;
    let failed = |source| CliError::Job { path: recorded.path.clone(), source };
    let learning = learning(config.default_pool()).and_then(|pool| config.to_builder().default_pool(pool).build());
    let learning = learning.map_err(|error| recorded.invalid(error))?;
    let program = program(recorded).map_err(|error| recorded.invalid(error))?;
    let device = SimBackend::builder().memory_bytes(u64::MAX).build();
    let allocator = Allocator::<_, Exclusive>::new(device, learning).map_err(|error| recorded.invalid(error))?;
    let mut replay = Replay::new(&allocator, &program);
    let mut learnt: BTreeMap<PoolId, Vec<Plan>> = BTreeMap::new();
    let mut take = |replay: &Replay<'_, _, _>, pool: PoolId| {
        let plans = replay.pool_of(pool).and_then(|pool| allocator.plans(pool).ok());
        if let Some(plans) = plans.filter(|plans| !plans.is_empty()) {
            learnt.insert(pool, plans);
        }
    };
    for _ in 0..PASSES {
        for (op, call) in program.ops().iter().enumerate() {
            if let Op::DestroyPool { pool } = call {
                take(&replay, *pool);
            }
            match replay.step(call) {
                // What a limit refuses without a plan may have room with one.
                Ok(_) | Err(StepError::Allocate(_) | StepError::NotLive { .. }) => {}
                Err(error) => return Err(failed(JobError::Step { rank: 0, op, error })),
            }
        }
        replay.free_all().map_err(|error| failed(JobError::Free { rank: 0, error }))?;
        file.pools().map(|(pool, _)| pool).chain([PoolId::DEFAULT]).for_each(|pool| take(&replay, pool));
    }
    for (pool, plans) in learnt {
        for plan in plans {
            file.add_plan(pool, plan).map_err(|source| draft::contradicts(recorded, source))?;
        }
    }
    Ok(file)
}

fn learning(config: &PoolConfig) -> Result<PoolConfig, ConfigError> {
    config.to_builder().plan(PlanPolicy::Learn).build()
}

/// The job with pools that learn.
fn program(recorded: &Recorded) -> Result<Program, ConfigError> {
    let record = |record: &Record| {
        let mut record = record.clone();
        if let Op::CreatePool { config, .. } = &mut record.op {
            **config = learning(config)?;
        }
        Ok(record)
    };
    let records = recorded.recording.records.iter().map(record).collect::<Result<Vec<Record>, ConfigError>>()?;
    Ok(Program::new(&records).expect("it was one before"))
}
