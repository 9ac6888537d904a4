//! Communicators that ended and were removed from the registrar, but that other ranks may still name in their messages.

use crate::communicator::Communicator;
use crate::sync::fold;
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::PoolId;

/// A communicator that ended and was removed on this rank.
#[derive(Clone, Debug)]
pub(crate) struct EndedComm {
    pub(crate) name: String,
    /// Identifier of the communicator in messages to other ranks.
    pub(crate) id: u64,
    pub(crate) ranks: u32,
    /// Pools that were attached to it.
    pub(crate) pools: Vec<PoolId>,
}

/// The ended communicators of a registrar.
#[derive(Debug, Default)]
pub(crate) struct EndedComms(Mutex<Vec<EndedComm>>);

impl EndedComms {
    /// Adds communicators. Removes communicators whose pools have all been destroyed, because destroyed pools neither sleep nor wake.
    pub(crate) fn add(&self, ended: impl Iterator<Item = EndedComm>, exists: impl Fn(PoolId) -> bool) {
        let mut all = self.lock();
        all.extend(ended);
        all.retain(|ended| ended.pools.iter().any(|pool| exists(*pool)));
    }

    /// Returns the communicators that this pool was attached to.
    pub(crate) fn of(&self, pool: PoolId) -> Vec<EndedComm> {
        self.lock().iter().filter(|ended| ended.pools.contains(&pool)).cloned().collect()
    }

    /// Removes the communicators that have also ended on all other ranks.
    pub(crate) fn forget(&self, is_over: impl Fn(u64) -> bool) {
        self.lock().retain(|ended| !is_over(ended.id));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<EndedComm>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the identifier of a communicator in messages to other ranks.
pub(crate) fn id_of(comm: &Communicator) -> u64 {
    let bytes = comm.order().as_bytes();
    bytes.iter().fold(bytes.len() as u64, |digest, byte| fold(digest, u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(id: u64, pools: &[u32]) -> EndedComm {
        EndedComm { name: "tp".to_owned(), id, ranks: 2, pools: pools.iter().copied().map(PoolId).collect() }
    }

    #[test]
    fn communicators_are_kept_while_one_of_their_pools_exists() {
        let all = EndedComms::default();
        all.add([ended(1, &[1, 2]), ended(2, &[1])].into_iter(), |_| true);
        assert_eq!(all.of(PoolId(1)).len(), 2);
        all.add([].into_iter(), |pool| pool == PoolId(2));
        let left: Vec<u64> = all.of(PoolId(1)).into_iter().map(|ended| ended.id).collect();
        assert_eq!(left, [1]);
    }

    #[test]
    fn communicators_are_removed_once_they_have_ended_on_all_ranks() {
        let all = EndedComms::default();
        all.add([ended(1, &[1]), ended(2, &[1])].into_iter(), |_| true);
        all.forget(|id| id == 1);
        let left: Vec<u64> = all.of(PoolId(1)).into_iter().map(|ended| ended.id).collect();
        assert_eq!(left, [2]);
    }
}
