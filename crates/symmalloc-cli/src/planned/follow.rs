//! A plan's file for a recording: read, and held against flags, job and pools before anything runs.

use super::contradiction::Contradiction;
use super::difference::{self, JobDifference};
use crate::args::PolicyArgs;
use crate::error::CliError;
use crate::input;
use crate::recorded::reconfigure;
use std::path::Path;
use symmalloc_core::lock::Exclusive;
use symmalloc_core::op::Op;
use symmalloc_core::plans::PlanError;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_import::Recording;
use symmalloc_import::compression;
use symmalloc_sim::IdleBackend;
use symmalloc_trace::plan::{self, PlanFile};
use symmalloc_trace::replay::Program;

/// Reads a plan for a recording, and configures the recording's allocator and pools as the plan says.
///
/// # Errors
/// When it is no plan, is another job's, a flag contradicts it, or its pools cannot adopt it.
pub(crate) fn follow(
    path: &Path,
    job: &Path,
    recording: &mut Recording,
    policy: &PolicyArgs,
) -> Result<PlanFile, CliError> {
    let open = |source| CliError::OpenPlan { path: path.to_path_buf(), source };
    let file = plan::read(compression::decompress(input::open(path).map_err(open)?).map_err(open)?);
    let file = file.map_err(|source| CliError::PlanText { path: path.to_path_buf(), source })?;
    Contradiction::of(policy, file.config())
        .map_or(Ok(()), |source| Err(CliError::PlanContradicted { path: path.to_path_buf(), source }))?;
    let another = |source| CliError::PlanOfAnotherJob { plan: path.to_path_buf(), job: job.to_path_buf(), source };
    configure(recording, &file).map_err(another)?;
    let program =
        Program::new(&recording.records).map_err(|source| CliError::Program { path: job.to_path_buf(), source })?;
    difference::check(&program, &file).map_err(another)?;
    adopt(&file, program.stream_count()).map_err(|(pool, source)| CliError::PlanRefused {
        path: path.to_path_buf(),
        pool,
        source,
    })?;
    Ok(file)
}

/// Puts the plan's configuration in the place of the recording's, for every pool.
fn configure(recording: &mut Recording, file: &PlanFile) -> Result<(), JobDifference> {
    reconfigure(recording, file.config());
    for record in &mut recording.records {
        if let Op::CreatePool { pool, config } = &mut record.op {
            let planned = file.pool_config(*pool).ok_or(JobDifference::UnknownPool { pool: *pool })?;
            **config = planned.clone();
        }
    }
    Ok(())
}

/// Whether an allocator of the plan's configuration adopts it. Pools come and go in a program, so each is tried by itself.
pub(super) fn adopt(file: &PlanFile, streams: usize) -> Result<(), (PoolId, PlanError)> {
    let mut pools: Vec<PoolId> = file.plans().map(|(pool, _)| pool).collect();
    pools.dedup();
    for pool in pools {
        let settings = file.pool_config(pool).expect("it has plans").clone();
        let Ok(config) = file.config().to_builder().default_pool(settings).build() else { continue };
        // What is not valid for a device is found when the job runs.
        let Ok(allocator) = Allocator::<_, Exclusive>::new(IdleBackend::default(), config) else { continue };
        (0..streams).try_for_each(|_| allocator.register_stream().map(drop)).ok();
        let adopted = file.plans_of(pool).try_for_each(|plan| allocator.adopt_plan(PoolId::DEFAULT, plan.clone()));
        adopted.map_err(|error| (pool, error))?;
    }
    Ok(())
}
