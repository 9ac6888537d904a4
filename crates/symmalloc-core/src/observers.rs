//! Which observer watches which pool. What observers are for stands in [`crate::segment_log`].

use crate::ids::{ObserverId, PoolId};

#[derive(Debug, Default)]
pub(crate) struct Observers {
    next: u32,
    live: Vec<(ObserverId, PoolId)>,
}

impl Observers {
    pub(crate) fn add(&mut self, pool: PoolId) -> ObserverId {
        let observer = ObserverId(self.next);
        self.next += 1;
        self.live.push((observer, pool));
        observer
    }

    pub(crate) fn remove(&mut self, observer: ObserverId) {
        self.live.retain(|(id, _)| *id != observer);
    }

    /// All observers, in the order in which they came.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ObserverId, PoolId)> + '_ {
        self.live.iter().copied()
    }

    pub(crate) fn count(&self, pool: PoolId) -> u32 {
        self.of_pool(pool).count() as u32
    }

    pub(crate) fn of_pool(&self, pool: PoolId) -> impl Iterator<Item = ObserverId> + '_ {
        self.live.iter().filter(move |(_, watched)| *watched == pool).map(|(observer, _)| *observer)
    }

    pub(crate) fn pool_of(&self, observer: ObserverId) -> Option<PoolId> {
        self.live.iter().find(|(id, _)| *id == observer).map(|(_, pool)| *pool)
    }
}
