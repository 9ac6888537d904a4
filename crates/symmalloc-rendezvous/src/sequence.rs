//! Counters of events that are equal on every rank by construction.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Counts the occurrences of a key on each rank, so that the n-th occurrence on one rank corresponds to the n-th on every other. Ranks can
/// be threads of one process. An entry for each key remains until the counter is dropped: a count that is forgotten would start at 0 again,
/// while other ranks continue theirs.
#[derive(Debug)]
pub struct SequenceCounter<K> {
    counts: Mutex<BTreeMap<(K, u32), u32>>,
}

impl<K: Ord> Default for SequenceCounter<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Ord> SequenceCounter<K> {
    /// Creates a counter that has counted nothing.
    pub const fn new() -> Self {
        SequenceCounter { counts: Mutex::new(BTreeMap::new()) }
    }

    /// Returns the number of earlier occurrences on this rank.
    pub fn next(&self, key: K, rank: u32) -> u32 {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry((key, rank)).or_default();
        *count += 1;
        *count - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_and_key_has_its_own_count() {
        let counter = SequenceCounter::new();
        assert_eq!(
            [counter.next("a", 0), counter.next("a", 0), counter.next("a", 1), counter.next("b", 0)],
            [0, 1, 0, 0]
        );
    }
}
