//! Reading a plan for a recording, and validating it against flags, job and pools before anything runs.

use super::difference;
use crate::args::{PlanFlagContradiction, PolicyArgs};
use crate::error::{CliError, JobDifference};
use crate::input;
use crate::recorded::reconfigure;
use std::io::{self, BufRead};
use std::path::Path;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::groups::Groups;
use symmalloc_core::op::Op;
use symmalloc_core::plans::{Plan, PlanError};
use symmalloc_core::{Allocator, PoolId, StreamId};
use symmalloc_import::Recording;
use symmalloc_import::compression;
use symmalloc_sim::IdleBackend;
use symmalloc_trace::plan::{self, PlanFile, PlanTextError};
use symmalloc_trace::replay::Program;

/// Reads a plan for a recording, and gives the recording's allocator and pools the configuration of the plan.
///
/// # Errors
/// Returns an error if the file is not a plan, belongs to another job, contradicts a flag, or cannot be adopted by its pools.
pub(crate) fn follow(
    path: &Path,
    job: &Path,
    recording: &mut Recording,
    policy: &PolicyArgs,
) -> Result<PlanFile, CliError> {
    let open = |source| CliError::OpenPlan { path: path.to_path_buf(), source };
    let text = compression::decompress(input::open(path).map_err(open)?).map_err(open)?;
    let file = read(text, PLAN_BYTES_MAX).map_err(open)?;
    let file = file.map_err(|source| CliError::PlanText { path: path.to_path_buf(), source })?;
    PlanFlagContradiction::of(policy, file.config())
        .map_or(Ok(()), |source| Err(CliError::PlanContradicted { path: path.to_path_buf(), source }))?;
    let another = |source| CliError::PlanOfAnotherJob { plan: path.to_path_buf(), job: job.to_path_buf(), source };
    configure(recording, &file).map_err(another)?;
    let program =
        Program::new(&recording.records).map_err(|source| CliError::Program { path: job.to_path_buf(), source })?;
    difference::check(&program, &file).map_err(another)?;
    adopt(&file, &program.groups()).map_err(|(pool, source)| CliError::PlanRefused {
        path: path.to_path_buf(),
        pool,
        source,
    })?;
    Ok(file)
}

/// Maximum size of a plan's text, in bytes. Its allocations take about five times as much memory. The text of a job of a million
/// allocations has 30 MiB.
const PLAN_BYTES_MAX: u64 = 256 << 20;

/// Reads a plan whose text has fewer bytes than `bytes_max`.
fn read(text: impl BufRead, bytes_max: u64) -> io::Result<Result<PlanFile, PlanTextError>> {
    let mut text = text.take(bytes_max);
    let file = plan::read(&mut text);
    if text.limit() > 0 {
        return Ok(file);
    }
    let message = format!("the plan's text exceeds {} MiB: plan a shorter recording", bytes_max >> 20);
    Err(io::Error::new(io::ErrorKind::FileTooLarge, message))
}

/// Replaces the configuration of every pool of the recording with the plan's.
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

/// Replaces the pool that the error names, which is the trial pool of [`adopt`], by the pool of the program.
fn named(mut error: PlanError, pool: PoolId) -> PlanError {
    if let PlanError::Memory(AllocateError::OutOfMemory(lack)) = &mut error {
        lack.pool = pool;
    }
    error
}

/// Checks that an allocator with the plan's configuration adopts the plans. Each pool is tried separately, because not all pools of a
/// program exist at the same time. They share one allocator, because registering all streams for each pool would take quadratic time.
pub(super) fn adopt(file: &PlanFile, groups: &Groups) -> Result<(), (PoolId, PlanError)> {
    let mut pools: Vec<PoolId> = file.plans().map(|(heap, _)| heap.pool).collect();
    pools.dedup();
    // A configuration that is invalid for a device fails when the job runs.
    let Ok(allocator) = Allocator::new(IdleBackend::default(), file.config().clone()) else { return Ok(()) };
    let of_plan =
        |(_, plan): (_, &Plan)| plan.allocations().iter().map(|planned| planned.wanted.stream.index() + 1).max();
    let needed = file.plans().filter_map(of_plan).max().unwrap_or(0);
    for stream in (0..groups.stream_count().min(needed)).map(|stream| StreamId(stream as u16)) {
        let first = groups.first_of(stream);
        // If a stream cannot be registered, the allocator adopts no plan that contains it.
        let _registered =
            if first == stream { allocator.register_stream() } else { allocator.register_stream_in(first) };
    }
    for pool in pools {
        let settings = file.pool_config(pool).expect("a pool with plans should have a configuration").clone();
        let Ok(trial) = allocator.create_pool(settings) else { continue };
        let adopted = file.plans_of(pool).try_for_each(|plan| allocator.adopt_plan(trial, plan.clone()));
        // The trial pool is destroyed, so that the next one gets its address space and its budget.
        let _destroyed = allocator.destroy_pool(trial);
        adopted.map_err(|error| (pool, named(error, pool)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_a_maximum_size() {
        let text = "symmalloc-plan 1\nconfig segments:fixed\nend 1\n";
        let read = |bytes_max| read(text.as_bytes(), bytes_max);
        assert!(read(text.len() as u64 + 1).expect("small enough").is_ok());
        for bytes_max in [0, 20, text.len() as u64] {
            assert_eq!(read(bytes_max).expect_err("too large").kind(), io::ErrorKind::FileTooLarge);
        }
    }
}
