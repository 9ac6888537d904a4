//! The program of a job, which every rank runs. It is computed once and shared by all ranks.
//!
//! ```text
//!  steps of the plan ....... sync ....... sync ....│ liveness: end steps, free everything, trim, destroy, trim
//!  └── stretch 0 ─────────┘└─ stretch 1 ─┘         │
//!       each with its JobOrder: the steps that may be reordered
//! ```
//!
//! All ranks meet at every sync. Between two syncs, a rank runs independently of all other ranks. Its schedule is
//! therefore computed when its turn comes, and discarded afterward. Between two stretches, a rank consists only of its
//! allocator, its device and its live allocations.

use crate::job::order::{HeapsByAllocation, JobOrder, Resources};
use crate::job::steps::{JobStep, PoolPolicies};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use symmalloc_core::config::Config;
use symmalloc_core::{AllocationId, Op, PoolId};

/// The steps between two syncs, and their order.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    pub(crate) steps: Range<usize>,
    pub(crate) order: JobOrder,
}

/// The steps that all ranks run. See the [module documentation](self).
#[derive(Clone, Debug)]
pub(crate) struct JobProgram {
    pub(crate) steps: Vec<JobStep>,
    /// By step: the slot in which a rank keeps the step's allocation.
    pub(crate) slots: Vec<u32>,
    /// Number of slots: the maximum number of allocations that a rank keeps.
    pub(crate) slot_count: usize,
    pub(crate) homes: HeapsByAllocation,
    pub(crate) policies: PoolPolicies,
    /// Number of streams that the program registers.
    pub(crate) streams: usize,
    pub(crate) stretches: Vec<Stretch>,
    /// Index of the first stretch of the liveness phase, in which no call fails.
    pub(crate) liveness: usize,
}

/// Stands for the slot of a step without an allocation.
const NO_SLOT: u32 = u32::MAX;

impl JobProgram {
    /// Creates the program that consists of these steps and the liveness phase. A stretch has at most `stretch_max`
    /// steps.
    pub(crate) fn new(config: &Config, steps: &[JobStep], stretch_max: usize) -> Self {
        let policies = PoolPolicies::new(config, steps);
        let mut steps = steps.to_vec();
        let mut ranges = stretches(&steps, stretch_max);
        let liveness = ranges.len();
        for part in liveness_phase(&steps, &policies) {
            let start = steps.len();
            steps.extend(part);
            ranges.push(start..steps.len());
        }
        let homes: HeapsByAllocation = steps.iter().filter_map(|step| home(&step.op)).collect();
        let streams = steps.iter().filter(|step| matches!(step.op, Op::RegisterStream { .. })).count();
        let resources = Resources(&policies);
        let order = |range: &Range<usize>| JobOrder::new(&steps[range.clone()], resources, &homes);
        let stretches: Vec<Stretch> = ranges.into_iter().map(|steps| Stretch { order: order(&steps), steps }).collect();
        let (slots, slot_count) = slots(&steps, &stretches);
        JobProgram { slots, slot_count, homes, streams, stretches, liveness, policies, steps }
    }

    /// Returns the number of pools that the program creates, including the default pool.
    pub(crate) fn pools(&self) -> usize {
        self.policies.count()
    }
}

fn home(op: &Op) -> Option<(AllocationId, (PoolId, symmalloc_core::StreamId))> {
    match *op {
        Op::Allocate { id, pool, stream, .. } => Some((id, (pool, stream))),
        _ => None,
    }
}

/// Splits a program at its syncs, and splits parts that are longer than `stretch_max`. The syncs themselves belong to
/// no part.
fn stretches(steps: &[JobStep], stretch_max: usize) -> Vec<Range<usize>> {
    let (mut stretches, mut start) = (Vec::new(), 0);
    for (index, step) in steps.iter().enumerate() {
        let is_sync = matches!(step.op, Op::Sync);
        if is_sync || index - start == stretch_max {
            stretches.push(start..index);
            start = index + usize::from(is_sync);
        }
    }
    stretches.push(start..steps.len());
    stretches.retain(|stretch| !stretch.is_empty());
    stretches
}

/// Returns the steps that end every run. The first part frees everything, and the second releases all memory.
fn liveness_phase(steps: &[JobStep], policies: &PoolPolicies) -> [Vec<JobStep>; 2] {
    let mut live: BTreeMap<AllocationId, u8> = BTreeMap::new();
    let (mut open, mut slept) = (BTreeSet::new(), false);
    let mut threads = 1;
    for step in steps {
        threads = threads.max(step.thread + 1);
        match step.op {
            // Each allocation is freed by the thread after the one that allocated it.
            Op::Allocate { id, .. } => drop(live.insert(id, step.thread + 1)),
            Op::Free { id } => drop(live.remove(&id)),
            Op::BeginStep { pool, .. } => drop(open.insert(pool)),
            Op::EndStep { pool } | Op::DestroyPool { pool } => drop(open.remove(&pool)),
            Op::Sleep { pool: PoolId::DEFAULT, .. } => slept = true,
            _ => {}
        }
    }
    let end = open.into_iter().map(|pool| JobStep::new(Op::EndStep { pool }, 0));
    let free = |(id, thread): (AllocationId, u8)| JobStep::new(Op::Free { id }, thread % threads);
    let mut trims = Vec::new();
    // While a pool is awake, a step whose key has no plan releases the memory of plans. Only the default pool needs
    // this, because all other pools are destroyed.
    let has_steps = steps.iter().any(|step| matches!(step.op, Op::BeginStep { pool: PoolId::DEFAULT, .. }));
    let step = [Op::BeginStep { pool: PoolId::DEFAULT, key: u64::MAX }, Op::EndStep { pool: PoolId::DEFAULT }];
    if has_steps && !slept {
        trims.extend(step.clone());
    }
    trims.push(Op::Trim { pool: None });
    trims.extend((1..policies.count() as u32).map(|pool| Op::DestroyPool { pool: PoolId(pool) }));
    if slept {
        // The default pool still holds addresses to release, and may need the memory of other pools to wake.
        trims.push(Op::Wake { pool: PoolId::DEFAULT });
        trims.extend(step.into_iter().filter(|_| has_steps));
    }
    trims.push(Op::Trim { pool: None });
    if policies.of(PoolId::DEFAULT).has_quota() {
        trims.push(Op::Trim { pool: Some(PoolId::DEFAULT) });
    }
    let trims = trims.into_iter().map(|op| JobStep::new(op, 0)).collect();
    [end.chain(live.into_iter().map(free)).collect(), trims]
}

/// Assigns a slot to each allocation. A slot is reused only after a sync, because between two syncs, ranks free and
/// allocate in different orders.
fn slots(steps: &[JobStep], stretches: &[Stretch]) -> (Vec<u32>, usize) {
    let mut slots = vec![NO_SLOT; steps.len()];
    let mut of: BTreeMap<AllocationId, u32> = BTreeMap::new();
    let (mut count, mut free) = (0, Vec::new());
    for stretch in stretches {
        let mut freed = Vec::new();
        for index in stretch.steps.clone() {
            slots[index] = match steps[index].op {
                Op::Allocate { id, .. } => {
                    let slot = free.pop().unwrap_or_else(|| {
                        count += 1;
                        count - 1
                    });
                    of.insert(id, slot);
                    slot
                }
                Op::Free { id } => {
                    let slot = of.remove(&id);
                    freed.extend(slot);
                    slot.unwrap_or(NO_SLOT)
                }
                Op::RecordUse { id, .. } => of.get(&id).copied().unwrap_or(NO_SLOT),
                _ => NO_SLOT,
            };
        }
        free.extend(freed);
    }
    (slots, count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::plan::{JobPlan, Size};
    use std::num::NonZeroU32;

    #[test]
    fn a_slot_is_reused_only_after_a_sync() {
        for seed in 0..40 {
            let plan = JobPlan::from_seed(seed, &Size { ranks: NonZeroU32::MIN, ops: 200 });
            let program = plan.program();
            let mut taken = BTreeSet::new();
            for stretch in &program.stretches {
                let mut freed = BTreeSet::new();
                for index in stretch.steps.clone() {
                    let slot = program.slots[index];
                    match program.steps[index].op {
                        Op::Allocate { .. } => assert!(taken.insert(slot), "seed {seed}, step {index}"),
                        Op::Free { .. } => assert!(taken.contains(&slot) && freed.insert(slot)),
                        Op::RecordUse { .. } => assert!(taken.contains(&slot)),
                        _ => assert_eq!(slot, NO_SLOT),
                    }
                }
                taken.retain(|slot| !freed.contains(slot));
            }
            assert!(taken.is_empty(), "everything is freed at the end");
        }
    }

    #[test]
    fn long_parts_are_split_and_contain_no_syncs() {
        let step = |op| JobStep::new(op, 0);
        let mut steps = vec![step(Op::Trim { pool: None }); 7];
        steps[2] = step(Op::Sync);
        steps[3] = step(Op::Sync);
        assert_eq!(stretches(&steps, 2), [0..2, 4..6, 6..7]);
    }
}
