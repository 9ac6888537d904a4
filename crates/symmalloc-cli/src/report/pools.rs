//! Private pools: many pools of one kind, such as one per captured graph, each hold free memory that the others cannot use.

use crate::picture::memory::{DrawnHeap, Memory};
use crate::quantity::{count, memory};
use crate::recorded::Recorded;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::PoolId;
use symmalloc_core::op::{Op, Record};
use symmalloc_trace::replay::Program;

/// Minimum number of pools of one kind for the report to give advice.
const POOLS_MIN: usize = 4;

/// The PyTorch calls with which graphs share a pool.
const SHARING: &str = "torch.cuda.graph(..., pool=...), or one MemPool";

/// The condition under which graphs may share a pool.
const CONDITION: &str = "Graphs that share a pool must be replayed in the order of their capture, never at the same time, and a later \
                         replay may overwrite the outputs of an earlier graph";

/// A change of a job's records. It returns `None` if the change is impossible.
pub(super) type Change<'a> = &'a dyn Fn(&[Record]) -> Option<Vec<Record>>;

/// Private pools with equal settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrivatePools {
    /// Number of pools that hold memory at the op of the report.
    pools: usize,
    reserved_bytes: u64,
    live_bytes: u64,
    /// Peak of reserved memory in the first pass, with the pools as they are and with one pool in their place.
    now_bytes: u64,
    as_one_bytes: u64,
    /// `true` if one pool in place of these serves the request that failed.
    serves_request: bool,
}

impl PrivatePools {
    /// Returns the largest group of private pools with equal settings, if one pool in their place needs less memory or serves the request
    /// that failed. `serves` determines the latter; it gets a function that changes the records before the request.
    pub(super) fn of(recorded: &Recorded, shown: &Memory, serves: impl FnOnce(Change<'_>) -> bool) -> Option<Self> {
        let mut kinds: BTreeMap<String, Vec<PoolId>> = BTreeMap::new();
        for record in &recorded.recording.records {
            if let Op::CreatePool { pool, config } = &record.op
                && *pool != PoolId::DEFAULT
                && !config.symmetric()
            {
                kinds.entry(config.to_string()).or_default().push(*pool);
            }
        }
        let of_kind = kinds.into_values().max_by_key(Vec::len).filter(|pools| pools.len() >= POOLS_MIN)?;
        let in_kind: BTreeSet<PoolId> = of_kind.iter().copied().collect();
        let heaps = || shown.heaps.iter().filter(|heap| in_kind.contains(&heap.owner.pool));
        let pools = heaps().map(|heap| heap.owner.pool).collect::<BTreeSet<_>>().len();
        let reserved_bytes = heaps().map(DrawnHeap::size_bytes).sum();
        let live = heaps().flat_map(DrawnHeap::blocks).filter_map(|block| block.held.as_ref());
        let live_bytes = live.map(|held| held.requested_bytes).sum();
        let program = Program::new(&as_one(&recorded.recording.records, &of_kind)?).ok()?;
        let all = recorded.op_count();
        let now_bytes = recorded.job.attempt(recorded.program(), &recorded.config, all).ok()?.reserved_bytes;
        let as_one_bytes = recorded.job.attempt(&program, &recorded.config, all).ok()?.reserved_bytes;
        let serves_request = serves(&|records| as_one(records, &of_kind));
        (as_one_bytes < now_bytes || serves_request).then_some(PrivatePools {
            pools,
            reserved_bytes,
            live_bytes,
            now_bytes,
            as_one_bytes,
            serves_request,
        })
    }

    /// Describes the pools, and what sharing one pool saves.
    pub(super) fn advice(&self) -> String {
        format!(
            "{} with equal settings hold {} at this op, {} of it live; if they share one ({SHARING}), the peak of the first pass is {} \
             instead of {}. {CONDITION}",
            count(self.pools),
            memory(self.reserved_bytes),
            memory(self.live_bytes),
            memory(self.as_one_bytes),
            memory(self.now_bytes)
        )
    }

    /// Returns `true` if one pool in place of these serves the request that failed.
    pub(super) fn serves_request(&self) -> bool {
        self.serves_request
    }

    /// Describes how to serve the failed request by sharing one pool.
    pub(super) fn remedy(&self) -> String {
        format!(
            "let the {} private pools with equal settings share one ({SHARING}): the request is then served. {CONDITION}",
            count(self.pools)
        )
    }

    pub(super) fn object(&self) -> Value {
        json!({
            "pools": self.pools,
            "reserved_bytes": self.reserved_bytes,
            "live_bytes": self.live_bytes,
            "peak_reserved_bytes": self.now_bytes,
            "peak_reserved_bytes_as_one": self.as_one_bytes,
        })
    }
}

/// Returns the records with one pool in place of `pools`. Returns `None` if the program uses these pools for more than allocations.
fn as_one(records: &[Record], pools: &[PoolId]) -> Option<Vec<Record>> {
    let (first, others) = pools.split_first()?;
    let others: BTreeSet<&PoolId> = others.iter().collect();
    let is_one = |pool: &PoolId| pool == first || others.contains(pool);
    let mut changed = Vec::with_capacity(records.len());
    for record in records {
        let mut record = record.clone();
        record.placement = None;
        record.revived_bytes = None;
        match &mut record.op {
            Op::Allocate { pool, .. } | Op::Refuse { pool, .. } if others.contains(pool) => *pool = *first,
            Op::CreatePool { pool, .. } if others.contains(pool) => continue,
            Op::DestroyPool { pool } if is_one(pool) => continue,
            Op::ResetPool { pool }
            | Op::Reserve { pool, .. }
            | Op::Trim { pool: Some(pool) }
            | Op::BeginStep { pool, .. }
            | Op::EndStep { pool }
            | Op::Sleep { pool, .. }
            | Op::Wake { pool }
            | Op::Stay { pool, .. }
            | Op::Observe { pool, .. }
            | Op::Reclaim { pool, .. }
                if is_one(pool) =>
            {
                return None;
            }
            _ => {}
        }
        changed.push(record);
    }
    Some(changed)
}
