//! A job that follows a plan: reserved memory over its ops, and its layout after one of them.

use super::Selection;
use super::memory::Memory;
use super::timeline::PlannedCurve;
use crate::error::CliError;
use crate::job::JobError;
use std::collections::BTreeMap;
use std::path::Path;
use symmalloc_core::Allocator;
use symmalloc_core::op::Op;
use symmalloc_sim::IdleBackend;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Runs a program with its plan. Returns the curve over all ops, and the memory after `op`, both for the selected heaps.
///
/// # Errors
/// Returns an error if an op fails. Requests that a limit refuses are skipped.
pub(crate) fn follow(
    job: &Path,
    program: &Program,
    file: &PlanFile,
    op: usize,
    selection: Selection,
) -> Result<(PlannedCurve, Memory), CliError> {
    let failed = |source| CliError::Job { path: job.to_path_buf(), source };
    let not_followed = |error| failed(JobError::Plan { rank: 0, error });
    let allocator = Allocator::new(IdleBackend::default(), file.config().clone());
    let allocator = allocator.map_err(|error| failed(error.into()))?;
    let mut replay = Replay::following(&allocator, program, file).map_err(not_followed)?;
    replay.begin_pass().map_err(|error| failed(JobError::Pass { rank: 0, error }))?;
    let mut curve = PlannedCurve::default();
    let mut memory = None;
    let (mut ids, mut addresses) = (BTreeMap::new(), BTreeMap::new());
    for (number, call) in program.ops().iter().enumerate() {
        match (replay.step(call), call) {
            (Ok(Some(made)), Op::Allocate { id, .. }) => {
                ids.insert(made.address.0, *id);
                addresses.insert(*id, made.address.0);
            }
            (Ok(_), Op::Free { id }) => {
                addresses.remove(id).map(|address| ids.remove(&address));
            }
            (Ok(_) | Err(StepError::Allocate(_) | StepError::NotLive { .. }), _) => {}
            (Err(error), _) => return Err(failed(JobError::Step { rank: 0, op: number, error })),
        }
        let heaps = allocator.stats_by_heap().into_iter();
        let selected = heaps.filter(|(heap, _)| selection.has(*heap));
        let reserved_bytes = selected.map(|(_, stats)| stats.reserved_bytes.current).sum();
        curve.see(number, program.ops().len(), reserved_bytes);
        if number == op {
            memory = Some(Memory::of(op, allocator.snapshot(), &ids, selection));
        }
    }
    Ok((curve, memory.unwrap_or(Memory { op, heaps: Vec::new() })))
}
