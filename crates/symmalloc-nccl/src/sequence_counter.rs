//! What happens for the n-th time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Counts what each rank does with a key, so that the n-th time of one rank is the n-th time of every other. Ranks may be threads
/// of one process.
pub(crate) struct SequenceCounter<K> {
    counts: Mutex<BTreeMap<(K, u32), u32>>,
}

impl<K: Ord> SequenceCounter<K> {
    pub(crate) const fn new() -> Self {
        SequenceCounter { counts: Mutex::new(BTreeMap::new()) }
    }

    /// How often the rank did it before.
    pub(crate) fn next(&self, key: K, rank: u32) -> u32 {
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
