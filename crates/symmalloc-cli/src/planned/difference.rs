//! The check that a plan belongs to a job.

use super::steps::{self, HeapStep};
use crate::quantity::exact_memory;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use symmalloc_core::ids::{HeapId, PoolId};
use symmalloc_core::plans::{Plan, StepAllocation};
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;
use thiserror::Error;

/// The first difference between a job and its plan. Allocations are counted from 0 in the step of the heap, ops in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum JobDifference {
    #[error("the job creates pool {pool}, which the plan does not configure")]
    UnknownPool { pool: PoolId },
    #[error("the plan has steps {key} of {heap}, in which the job requests no memory")]
    NoStep { heap: HeapId, key: u64 },
    #[error("op {op} requests memory of {heap}, which has no plan")]
    NoPlan { heap: HeapId, op: usize },
    #[error(
        "allocation {number} of {heap} (op {op}) requests {} on {}, but the plan expects {}",
        exact_memory(asked.requested_bytes), asked.stream, Expected(*planned)
    )]
    Request { heap: HeapId, number: usize, op: usize, asked: StepAllocation, planned: Option<StepAllocation> },
    #[error("the plan expects {} as allocation {number} of {heap}, but the job ends before it", Expected(Some(*planned)))]
    Ended { heap: HeapId, number: usize, planned: StepAllocation },
    #[error(
        "allocation {number} of {heap} (op {op}) is freed later than the plan expects: before allocation {asked}, not {planned}"
    )]
    Lifetime { heap: HeapId, number: usize, op: usize, asked: u32, planned: u32 },
}

/// Display of a planned allocation.
struct Expected(Option<StepAllocation>);

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(planned) => write!(f, "{} on {}", exact_memory(planned.requested_bytes), planned.stream),
            None => f.write_str("no more"),
        }
    }
}

/// Checks that a plan belongs to this job: each plan is for steps that the job has. If the job has no steps, each of its heaps must
/// have a plan.
pub(super) fn check(program: &Program, file: &PlanFile) -> Result<(), JobDifference> {
    let has_steps = program.has_steps();
    let steps = steps::of(program, file);
    let mut alike: BTreeMap<(HeapId, u64), Vec<&HeapStep>> = BTreeMap::new();
    for step in &steps {
        alike.entry((step.heap, step.key)).or_default().push(step);
    }
    for (heap, plan) in file.plans() {
        let mut found = Err(JobDifference::NoStep { heap, key: plan.key() });
        for step in alike.get(&(heap, plan.key())).into_iter().flatten() {
            found = compare(step, plan, has_steps);
            if found.is_ok() {
                break;
            }
        }
        found?;
    }
    let planned: BTreeSet<HeapId> = file.plans().map(|(heap, _)| heap).collect();
    match steps.iter().find(|step| !has_steps && !planned.contains(&step.heap)) {
        Some(HeapStep { heap, ops, .. }) => Err(JobDifference::NoPlan { heap: *heap, op: ops[0] }),
        None => Ok(()),
    }
}

/// Compares a step with its plan: first all requests, then all lifetimes. Takes time for the step only, because many steps can have one plan.
fn compare(step: &HeapStep, plan: &Plan, has_steps: bool) -> Result<(), JobDifference> {
    let heap = step.heap;
    let planned = |number: usize| plan.allocations().get(number).map(|planned| planned.wanted);
    let asked = || step.wanted.iter().zip(&step.ops).enumerate();
    for (number, (asked, op)) in asked() {
        let (asked, op, planned) = (*asked, *op, planned(number));
        let is_same = |it: StepAllocation| (it.stream, it.requested_bytes) == (asked.stream, asked.requested_bytes);
        if !planned.is_some_and(is_same) {
            return Err(JobDifference::Request { heap, number, op, asked, planned });
        }
    }
    if let Some(planned) = planned(step.wanted.len()) {
        return Err(JobDifference::Ended { heap, number: step.wanted.len(), planned });
    }
    for (number, (asked, op)) in asked() {
        let planned = planned(number).expect("the plan has the step's requests");
        // Allocations that outlive a step of the program are unknown here. Only a learning pool sees them.
        if let (false, Some(asked), Some(planned)) = (has_steps, asked.until, planned.until)
            && asked > planned
        {
            return Err(JobDifference::Lifetime { heap, number, op: *op, asked, planned });
        }
    }
    Ok(())
}
