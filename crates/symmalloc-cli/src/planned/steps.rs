//! The requests to each heap of a job, by step.
//!
//! In every pool, a program without steps counts as one step, and its leftover allocations are freed at its end. A sleep ends the step of
//! its pool, and the wake begins the next step (see [`symmalloc_trace::replay`]).

use std::collections::BTreeMap;
use symmalloc_core::ids::{AllocationId, HeapId, PoolId, StreamGroup};
use symmalloc_core::op::Op;
use symmalloc_core::plans::StepAllocation;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;

/// Requests to one heap in one step: at least one allocation.
pub(super) struct HeapStep {
    pub(super) heap: HeapId,
    pub(super) key: u64,
    pub(super) wanted: Vec<StepAllocation>,
    /// The op of each request, counted from 0.
    pub(super) ops: Vec<usize>,
}

/// Returns the steps of a program in the order in which they end. Steps of one pool that end at the same op are in stream order. The
/// configurations in the file determine which streams share a heap. Requests to pools with a quota, and to pools that the file does not
/// configure, are left out.
pub(super) fn of(program: &Program, file: &PlanFile) -> Vec<HeapStep> {
    let (has_steps, groups) = (program.has_steps(), program.groups());
    let mut steps = Vec::new();
    // The open step of each heap, with its number.
    let mut open: BTreeMap<HeapId, (usize, HeapStep)> = BTreeMap::new();
    // Keys of the open steps. In a program without steps, the key is the number of the pool's sleeps so far.
    let mut keys: BTreeMap<PoolId, u64> = BTreeMap::new();
    // Live allocations: the heap, the number of the step, and the allocation's number in the step.
    let mut live: BTreeMap<AllocationId, (HeapId, usize, usize)> = BTreeMap::new();
    let mut begun = 0;
    for (number, op) in program.ops().iter().enumerate() {
        match *op {
            Op::BeginStep { pool, key } => drop(keys.insert(pool, key)),
            Op::EndStep { pool } | Op::Sleep { pool, .. } => {
                if has_steps {
                    keys.remove(&pool);
                } else {
                    *keys.entry(pool).or_default() += 1;
                }
                let of_pool =
                    open.range(HeapId { pool, group: StreamGroup::All }..).take_while(|(heap, _)| heap.pool == pool);
                let ended: Vec<_> = of_pool.map(|(heap, _)| *heap).collect();
                steps.extend(ended.iter().filter_map(|heap| open.remove(heap)).map(|(_, step)| step));
            }
            Op::Allocate { id, pool, stream, size_bytes: requested_bytes @ 1.. } => {
                let key = keys.get(&pool).copied().or((!has_steps).then_some(0));
                let config = file.pool_config(pool).filter(|config| !config.has_quota());
                let (Some(key), Some(config)) = (key, config) else { continue };
                let heap = HeapId { pool, group: config.streams().group_of(stream, &groups) };
                let (number_of_step, step) = open.entry(heap).or_insert_with(|| {
                    begun += 1;
                    (begun, HeapStep { heap, key, wanted: Vec::new(), ops: Vec::new() })
                });
                live.insert(id, (heap, *number_of_step, step.wanted.len()));
                step.wanted.push(StepAllocation { stream, requested_bytes, until: None });
                step.ops.push(number);
            }
            Op::Free { id } => {
                // An allocation of an earlier step does not end in this step.
                if let Some((heap, number_of_step, allocation)) = live.remove(&id)
                    && let Some((_, step)) = open.get_mut(&heap).filter(|(number, _)| *number == number_of_step)
                {
                    step.wanted[allocation].until = Some(step.wanted.len() as u32);
                }
            }
            _ => {}
        }
    }
    if !has_steps {
        for (_, step) in open.values_mut() {
            let count = step.wanted.len() as u32;
            step.wanted.iter_mut().for_each(|wanted| wanted.until = wanted.until.or(Some(count)));
        }
    }
    steps.extend(open.into_values().map(|(_, step)| step));
    if !has_steps {
        // A step is not planned if all of its allocations stay live while the pool sleeps.
        steps.retain(|step| step.wanted.iter().any(|wanted| wanted.until.is_some()));
    }
    steps
}
