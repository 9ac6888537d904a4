//! A job with its reservations: the recorded ops, preceded by `reserve` ops.
//!
//! ```text
//! recorded   stream s0   a 0 ..   pool p1 ..             a 1 .. p1   stream s1   trim   a 2 .. s1
//! planned    stream s0   stream s1   reserve .. s0   reserve .. s1   a 0 ..   pool p1 ..   reserve .. s0 p1   a 1 .. p1   a 2 ..
//! ```
//!
//! Streams are registered first, so that memory can be reserved for all of them before the first allocation. The memory of a pool is
//! reserved when the pool is created. The reservations replace all recorded ops that reserve, trim or reclaim. Steps, sleeps, resets and
//! observers are left out, too.

use super::heap::{Heaps, heaps_of_pool};
use crate::recorded::Recorded;
use std::collections::BTreeMap;
use symmalloc_core::config::{PoolConfig, StreamPolicy};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::{HeapId, PoolId, StreamId};
use symmalloc_core::op::{Op, Record};

/// Configuration of each pool of a job, by id. The first is the default pool.
pub(super) type Pools = BTreeMap<PoolId, PoolConfig>;

/// Records, each with the index of its recorded op. An added record has the index of the recorded op that it precedes.
pub(super) struct PlannedProgram {
    pub(super) records: Vec<Record>,
    pub(super) origins: Vec<usize>,
}

/// Returns the job of these records, with the reservations for `pools` and `heaps`, and with the streams of `groups`.
pub(super) fn planned(records: &[Record], groups: &Groups, pools: &Pools, heaps: &Heaps) -> PlannedProgram {
    let mut program = PlannedProgram { records: Vec::new(), origins: Vec::new() };
    for stream in (0..groups.stream_count()).map(|id| StreamId(id as u16)) {
        program.push(0, Op::RegisterStream { stream, group: groups.first_of(stream) }.into());
    }
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
        for heap in heaps_of_pool(heaps, pool).filter(|(_, heap)| heap.reserve_bytes > 0) {
            self.push(origin, heap.1.reserve(pool).into());
        }
    }
}

/// Returns the streams and groups of the rank that registers the most streams.
pub(super) fn groups_of(jobs: &[Recorded]) -> Groups {
    jobs.iter().map(|job| job.program().groups()).max_by_key(Groups::stream_count).unwrap_or_default()
}

/// Returns the heaps that hold memory, each with the lowest stream that allocates from it.
pub(super) fn heaps_of(records: &[Record], groups: &Groups, pools: &Pools) -> BTreeMap<HeapId, StreamId> {
    let mut heaps = BTreeMap::new();
    for record in records {
        if let Op::Allocate { pool, stream, size_bytes: 1.., .. } = record.op {
            let streams = pools.get(&pool).map_or_else(StreamPolicy::default, PoolConfig::streams);
            let owner = HeapId { pool, group: streams.group_of(stream, groups) };
            let lowest = heaps.entry(owner).or_insert(stream);
            *lowest = stream.min(*lowest);
        }
    }
    heaps
}
