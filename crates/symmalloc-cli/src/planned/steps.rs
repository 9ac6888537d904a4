//! The requests to each heap of a job, step by step.
//!
//! Where the program states no steps, all of it is one step of every pool, and what it leaves is freed at its end. A sleep
//! ends the step of its pool, and after the wake another one begins (see [`symmalloc_trace::replay`]).

use std::collections::BTreeMap;
use symmalloc_core::config::StreamPolicy;
use symmalloc_core::ids::{AllocationId, PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::plans::StepAllocation;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::Program;

/// What one heap is asked for in one step: at least one allocation.
pub(super) struct HeapStep {
    pub(super) pool: PoolId,
    /// `None` for the heap of all streams.
    pub(super) stream: Option<StreamId>,
    pub(super) key: u64,
    pub(super) wanted: Vec<StepAllocation>,
    /// The op that asks for each, counted from 0.
    pub(super) ops: Vec<usize>,
}

/// The steps of a program, in the order in which they end, those of one pool in stream order. The file says whose streams share; what
/// the program asks of pools that the file does not configure, or that have a quota, is left out.
pub(super) fn of(program: &Program, file: &PlanFile) -> Vec<HeapStep> {
    let has_steps = program.has_steps();
    let mut steps = Vec::new();
    // By heap: the step that is open.
    let mut open: BTreeMap<(PoolId, Option<StreamId>), HeapStep> = BTreeMap::new();
    // Of steps that are open, or that passes are.
    let mut keys: BTreeMap<PoolId, u64> = BTreeMap::new();
    let mut live: BTreeMap<AllocationId, ((PoolId, Option<StreamId>), usize)> = BTreeMap::new();
    for (number, op) in program.ops().iter().enumerate() {
        match *op {
            Op::BeginStep { pool, key } => drop(keys.insert(pool, key)),
            Op::EndStep { pool } | Op::Sleep { pool, .. } => {
                if has_steps {
                    keys.remove(&pool);
                } else {
                    *keys.entry(pool).or_default() += 1;
                }
                let ended: Vec<_> = open.keys().filter(|(of, _)| *of == pool).copied().collect();
                steps.extend(ended.iter().filter_map(|heap| open.remove(heap)));
                live.retain(|_, (heap, _)| heap.0 != pool);
            }
            Op::Allocate { id, pool, stream, size_bytes: requested_bytes @ 1.. } => {
                let key = keys.get(&pool).copied().or((!has_steps).then_some(0));
                let config = file.pool_config(pool).filter(|config| !config.has_quota());
                let (Some(key), Some(config)) = (key, config) else { continue };
                let heap = (pool, (config.streams() != StreamPolicy::Shared).then_some(stream));
                let step = open.entry(heap).or_insert_with(|| HeapStep {
                    pool,
                    stream: heap.1,
                    key,
                    wanted: Vec::new(),
                    ops: Vec::new(),
                });
                live.insert(id, (heap, step.wanted.len()));
                step.wanted.push(StepAllocation { stream, requested_bytes, until: None });
                step.ops.push(number);
            }
            Op::Free { id } => {
                if let Some((heap, allocation)) = live.remove(&id)
                    && let Some(step) = open.get_mut(&heap)
                {
                    step.wanted[allocation].until = Some(step.wanted.len() as u32);
                }
            }
            _ => {}
        }
    }
    if !has_steps {
        for step in open.values_mut() {
            let count = step.wanted.len() as u32;
            step.wanted.iter_mut().for_each(|wanted| wanted.until = wanted.until.or(Some(count)));
        }
    }
    steps.extend(open.into_values());
    if !has_steps {
        // Nothing of a step is planned whose allocations all live on while the pool sleeps.
        steps.retain(|step| step.wanted.iter().any(|wanted| wanted.until.is_some()));
    }
    steps
}
