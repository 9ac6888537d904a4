//! A job with its plan: the recorded ops, with what is reserved put in front of them.
//!
//! ```text
//! recorded   stream s0   a 0 ..   pool p1 ..             a 1 .. p1   stream s1   trim   a 2 .. s1
//! planned    stream s0   stream s1   reserve .. s0   reserve .. s1   a 0 ..   pool p1 ..   reserve .. s0 p1   a 1 .. p1   a 2 ..
//! ```
//!
//! Streams are registered first, so that all of them can be reserved for before the first allocation; a pool is reserved
//! for when it is made. What reserves, trims or reclaims in the recording is left out: the plan takes its place.

use super::heap::Heaps;
use std::collections::BTreeMap;
use symmalloc_core::config::{PoolConfig, StreamPolicy};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::{Op, Record};
use symmalloc_import::rerun::Owner;

/// How each pool of a job is configured, by id; the first is the default pool.
pub(super) type Pools = BTreeMap<PoolId, PoolConfig>;

/// Records, and for each the recorded op that it was, or that it stands before.
pub(super) struct PlannedProgram {
    pub(super) records: Vec<Record>,
    pub(super) origins: Vec<usize>,
}

/// The job of these records under a plan for `pools` and `heaps`, with at least this many streams.
pub(super) fn planned(records: &[Record], streams: u32, pools: &Pools, heaps: &Heaps) -> PlannedProgram {
    let mut program = PlannedProgram { records: Vec::new(), origins: Vec::new() };
    let ids = (0..streams).map_while(|stream| u16::try_from(stream).ok()).map(StreamId);
    ids.for_each(|stream| program.push(0, Op::RegisterStream { stream }.into()));
    program.reserve(0, PoolId::DEFAULT, heaps);
    for (number, record) in records.iter().enumerate() {
        match &record.op {
            Op::CreatePool { pool: PoolId::DEFAULT, .. } => {}
            Op::CreatePool { pool, .. } => {
                let config = Box::new(pools[pool].clone());
                program.push(number, Op::CreatePool { pool: *pool, config }.into());
                program.reserve(number, *pool, heaps);
            }
            Op::DestroyPool { .. }
            | Op::Allocate { .. }
            | Op::Free { .. }
            | Op::RecordUse { .. }
            | Op::Wait { .. }
            | Op::Synchronize { .. }
            | Op::Sync => program.push(number, record.clone()),
            _ => {}
        }
    }
    program
}

impl PlannedProgram {
    fn push(&mut self, origin: usize, record: Record) {
        self.records.push(record);
        self.origins.push(origin);
    }

    fn reserve(&mut self, origin: usize, pool: PoolId, heaps: &Heaps) {
        for heap in heaps.iter().filter(|(owner, heap)| owner.pool == pool && heap.reserve_bytes > 0) {
            self.push(origin, heap.1.reserve(pool).into());
        }
    }
}

/// Number of streams that are registered.
pub(super) fn stream_count(records: &[Record]) -> u32 {
    let registered = records.iter().filter(|record| matches!(record.op, Op::RegisterStream { .. })).count();
    u32::try_from(registered).unwrap_or(u32::MAX)
}

/// The heaps that hold memory, each with the lowest stream that allocates from it.
pub(super) fn heaps_of(records: &[Record], pools: &Pools) -> BTreeMap<Owner, StreamId> {
    let mut heaps = BTreeMap::new();
    for record in records {
        if let Op::Allocate { pool, stream, size_bytes: 1.., .. } = record.op {
            let is_shared = pools.get(&pool).is_some_and(|config| config.streams() == StreamPolicy::Shared);
            let owner = Owner { pool, stream: (!is_shared).then_some(stream) };
            let lowest = heaps.entry(owner).or_insert(stream);
            *lowest = stream.min(*lowest);
        }
    }
    heaps
}
