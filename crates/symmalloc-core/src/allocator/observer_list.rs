//! The observers and their pools. [`crate::history::segment_log`] explains observers.

use crate::types::ids::{ObserverId, PoolId};
use crate::types::work;
use std::sync::atomic::{AtomicU64, Ordering};

/// The observers and their pools.
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
        work::count(self.live.len());
        self.live.retain(|(id, _)| *id != observer);
    }

    /// Returns all observers in the order of their registration.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ObserverId, PoolId)> + '_ {
        self.live.iter().inspect(|_| work::count(1)).copied()
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

/// Returns a number for a new allocator, unique in this process.
pub(super) fn next_allocator() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
