//! Where a job is another one than its plan was made for.

use super::steps::{self, HeapStep};
use crate::quantity::exact_memory;
use std::fmt;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::{Plan, StepAllocation};
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;
use thiserror::Error;

/// The first thing in which a job differs from its plan. Allocations are counted from 0 in the step of the heap, ops in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum JobDifference {
    #[error("the job makes pool {pool}, which the plan does not configure")]
    UnknownPool { pool: PoolId },
    #[error("the plan is for steps {key} of {heap}, and the job asks nothing of that heap in such steps")]
    NoStep { heap: HeapName, key: u64 },
    #[error("op {op} asks for memory of {heap}, for which there is no plan")]
    NoPlan { heap: HeapName, op: usize },
    #[error(
        "allocation {number} of {heap} (op {op}) asks for {} on {}, and the plan expects {}",
        exact_memory(asked.requested_bytes), asked.stream, Expected(*planned)
    )]
    Request { heap: HeapName, number: usize, op: usize, asked: StepAllocation, planned: Option<StepAllocation> },
    #[error("the plan expects {} as allocation {number} of {heap}, and the job ends before that", Expected(Some(*planned)))]
    Ended { heap: HeapName, number: usize, planned: StepAllocation },
    #[error(
        "allocation {number} of {heap} (op {op}) is freed later than the plan expects: before allocation {asked}, not {planned}"
    )]
    Lifetime { heap: HeapName, number: usize, op: usize, asked: u32, planned: u32 },
}

/// A heap in an error: its pool, and its stream if streams do not share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeapName {
    pool: PoolId,
    stream: Option<StreamId>,
}

impl fmt::Display for HeapName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stream {
            Some(stream) => write!(f, "{} {stream}", self.pool),
            None => self.pool.fmt(f),
        }
    }
}

/// What a plan expects, in words.
struct Expected(Option<StepAllocation>);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(planned) => write!(f, "{} on {}", exact_memory(planned.requested_bytes), planned.stream),
            None => f.write_str("no more"),
        }
    }
}

/// Whether a plan is this job's: every plan is for steps that the job has, and without steps of its own all of its heaps are planned.
pub(super) fn check(program: &Program, file: &PlanFile) -> Result<(), JobDifference> {
    let has_steps = program.has_steps();
    let steps = steps::of(program, file);
    for (pool, plan) in file.plans() {
        let heap = HeapName { pool, stream: plan.stream() };
        let is_meant = |step: &&HeapStep| (step.pool, step.stream, step.key) == (pool, plan.stream(), plan.key());
        let mut found = Err(JobDifference::NoStep { heap, key: plan.key() });
        for step in steps.iter().filter(is_meant) {
            found = compare(step, plan, has_steps);
            if found.is_ok() {
                break;
            }
        }
        found?;
    }
    let is_planned = |step: &HeapStep| file.plans_of(step.pool).any(|plan| plan.stream() == step.stream);
    match steps.iter().find(|step| !has_steps && !is_planned(step)) {
        Some(HeapStep { pool, stream, ops, .. }) => {
            Err(JobDifference::NoPlan { heap: HeapName { pool: *pool, stream: *stream }, op: ops[0] })
        }
        None => Ok(()),
    }
}

/// All requests first, then how long each lives.
fn compare(step: &HeapStep, plan: &Plan, has_steps: bool) -> Result<(), JobDifference> {
    let heap = HeapName { pool: step.pool, stream: step.stream };
    let planned: Vec<StepAllocation> = plan.allocations().iter().map(|planned| planned.wanted).collect();
    let asked = || step.wanted.iter().zip(&step.ops).enumerate();
    for (number, (asked, op)) in asked() {
        let (asked, op, planned) = (*asked, *op, planned.get(number).copied());
        let is_same = |it: StepAllocation| (it.stream, it.requested_bytes) == (asked.stream, asked.requested_bytes);
        if !planned.is_some_and(is_same) {
            return Err(JobDifference::Request { heap, number, op, asked, planned });
        }
    }
    if let Some(planned) = planned.get(step.wanted.len()).copied() {
        return Err(JobDifference::Ended { heap, number: step.wanted.len(), planned });
    }
    for ((number, (asked, op)), planned) in asked().zip(&planned) {
        // What a step of its own carries over into the next one is known by those who learn it.
        if let (false, Some(asked), Some(planned)) = (has_steps, asked.until, planned.until)
            && asked > planned
        {
            return Err(JobDifference::Lifetime { heap, number, op: *op, asked, planned });
        }
    }
    Ok(())
}
