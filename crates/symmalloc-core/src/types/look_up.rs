//! Hash maps with look-up by key only. They cannot be iterated, so no decision and no report follows hash order.

use ahash::RandomState;
use std::fmt;
use std::hash::Hash;

#[allow(clippy::disallowed_types, reason = "looked up by key only, with fixed seeds")]
type Map<K, V> = std::collections::HashMap<K, V, RandomState>;

/// A hash map with fixed seeds.
pub(crate) struct LookUp<K, V>(Map<K, V>);

impl<K, V> Default for LookUp<K, V> {
    fn default() -> Self {
        LookUp(Map::with_hasher(RandomState::with_seeds(1, 2, 3, 4)))
    }
}

impl<K, V> fmt::Debug for LookUp<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LookUp").finish_non_exhaustive()
    }
}

impl<K: Copy + Eq + Hash, V> LookUp<K, V> {
    pub(crate) fn find(&self, key: K) -> Option<&V> {
        self.0.get(&key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.0.insert(key, value);
    }

    /// Removes and returns the value.
    pub(crate) fn take(&mut self, key: K) -> Option<V> {
        self.0.remove(&key)
    }

    pub(crate) fn extend(&mut self, others: LookUp<K, V>) {
        self.0.extend(others.0);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
