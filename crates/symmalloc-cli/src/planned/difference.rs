//! The check that a plan belongs to a job.

use super::steps::{self, HeapStep};
use crate::error::JobDifference;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::ids::HeapId;
use symmalloc_core::plans::{Plan, StepAllocation};
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;

/// Checks that a plan belongs to this job: each plan in the file is for a step that the job has. If the job has no steps, each of its heaps
/// must have a plan.
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

/// Compares a step with its plan: first all requests, then all lifetimes. Takes time in proportion to the step alone, because many steps
/// can have the same plan.
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
        // In a program with steps, allocations that outlive their step are unknown here. Only a learning pool sees them.
        if let (false, Some(asked), Some(planned)) = (has_steps, asked.until, planned.until)
            && asked > planned
        {
            return Err(JobDifference::Lifetime { heap, number, op: *op, asked, planned });
        }
    }
    Ok(())
}
