//! What is planned for each heap.

use std::collections::BTreeMap;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_import::rerun::Owner;

/// What is planned for a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeapPlan {
    /// The stream for which its memory is reserved: its own, or of a shared heap the lowest that allocates from it.
    pub(super) stream: StreamId,
    /// The most that was requested at any time.
    pub(super) peak_live_bytes: u64,
    /// What it grew to with nothing reserved.
    pub(super) grown_bytes: u64,
    /// What it is to hold from the start.
    pub(super) reserve_bytes: u64,
}

/// By owner.
pub(super) type Heaps = BTreeMap<Owner, HeapPlan>;

impl HeapPlan {
    pub(super) fn new(stream: StreamId) -> Self {
        HeapPlan { stream, peak_live_bytes: 0, grown_bytes: 0, reserve_bytes: 0 }
    }

    pub(super) fn reserve(&self, pool: PoolId) -> Op {
        Op::Reserve { pool, stream: self.stream, size_bytes: self.reserve_bytes }
    }
}
