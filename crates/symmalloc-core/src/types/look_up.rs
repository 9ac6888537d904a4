//! Hash maps that are looked up by key only: nothing can go through one, so no decision and no report follows hash order.

use rustc_hash::FxBuildHasher;
use std::hash::Hash;

/// A hash map. Its keys are the allocator's or the driver's, not a stranger's: the quickest hash is good enough.
#[allow(clippy::disallowed_types, reason = "looked up by key only, with a fixed hash")]
pub(crate) struct LookUp<K, V>(std::collections::HashMap<K, V, FxBuildHasher>);

impl<K, V> Default for LookUp<K, V> {
    fn default() -> Self {
        LookUp(Default::default())
    }
}

impl<K: Copy + Eq + Hash, V> LookUp<K, V> {
    pub(crate) fn find(&self, key: K) -> Option<&V> {
        self.0.get(&key)
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.0.insert(key, value);
    }

    /// As [`find`](Self::find), and it is not there any more.
    pub(crate) fn take(&mut self, key: K) -> Option<V> {
        self.0.remove(&key)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
