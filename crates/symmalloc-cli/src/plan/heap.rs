//! The planned reservation of each heap.

use std::collections::BTreeMap;
use symmalloc_core::ids::{HeapId, PoolId, StreamGroup, StreamId};
use symmalloc_core::op::Op;

/// Planned reservation of a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeapPlan {
    /// The stream for which memory is reserved: the heap's own, or the lowest that allocates from a shared heap.
    pub(super) stream: StreamId,
    /// Peak of requested bytes.
    pub(super) peak_live_bytes: u64,
    /// Bytes to which the heap grows without reservations.
    pub(super) grown_bytes: u64,
    /// Bytes to reserve at the start.
    pub(super) reserve_bytes: u64,
}

/// Planned reservations by owner.
pub(super) type Heaps = BTreeMap<HeapId, HeapPlan>;

impl HeapPlan {
    pub(super) fn new(stream: StreamId) -> Self {
        HeapPlan { stream, peak_live_bytes: 0, grown_bytes: 0, reserve_bytes: 0 }
    }

    pub(super) fn reserve(&self, pool: PoolId) -> Op {
        Op::Reserve { pool, stream: self.stream, size_bytes: self.reserve_bytes }
    }
}

/// Returns the reservations of one pool.
pub(super) fn heaps_of_pool(heaps: &Heaps, pool: PoolId) -> impl Iterator<Item = (&HeapId, &HeapPlan)> {
    heaps.range(HeapId { pool, group: StreamGroup::All }..).take_while(move |(owner, _)| owner.pool == pool)
}
