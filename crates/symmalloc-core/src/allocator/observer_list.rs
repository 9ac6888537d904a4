//! Which observer watches which pool. What observers are for stands in [`crate::history::segment_log`].

use crate::types::ids::{ObserverId, PoolId};
use std::sync::atomic::{AtomicU64, Ordering};

/// Which observer watches which pool.
#[derive(Debug, Default)]
pub(super) struct Observers {
    next: u32,
    live: Vec<(ObserverId, PoolId)>,
}

impl Observers {
    pub(super) fn add(&mut self, pool: PoolId) -> ObserverId {
        let observer = ObserverId(self.next);
        self.next += 1;
        self.live.push((observer, pool));
        observer
    }

    pub(super) fn remove(&mut self, observer: ObserverId) {
        self.live.retain(|(id, _)| *id != observer);
    }

    /// All observers, in the order in which they came.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ObserverId, PoolId)> + '_ {
        self.live.iter().copied()
    }

    pub(super) fn count(&self, pool: PoolId) -> u32 {
        self.of_pool(pool).count() as u32
    }

    pub(super) fn of_pool(&self, pool: PoolId) -> impl Iterator<Item = ObserverId> + '_ {
        self.iter().filter(move |(_, watched)| *watched == pool).map(|(observer, _)| observer)
    }

    pub(super) fn pool_of(&self, observer: ObserverId) -> Option<PoolId> {
        self.iter().find(|(id, _)| *id == observer).map(|(_, pool)| pool)
    }
}

/// Numbers the allocators of this process, and never gives a number twice.
pub(super) fn next_allocator() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
