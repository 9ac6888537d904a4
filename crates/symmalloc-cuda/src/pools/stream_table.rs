//! An append-only hash table keyed by the address of a `CudaStream`. Readers take no lock.
//!
//! The backend keeps registered streams alive, so their addresses are not reused: equal addresses mean the same stream.

use std::sync::OnceLock;

/// Number of slots of one level; a power of two.
const SLOTS: usize = 64;
/// Number of consecutive slots, starting at the key's hash, that may hold a key. If all are occupied, the next level is searched.
const PROBES: usize = 4;

pub(super) struct StreamTable<T> {
    slots: [OnceLock<(usize, T)>; SLOTS],
    next: OnceLock<Box<StreamTable<T>>>,
}

impl<T> StreamTable<T> {
    pub(super) fn new() -> Self {
        StreamTable { slots: std::array::from_fn(|_| OnceLock::new()), next: OnceLock::new() }
    }

    /// Returns the value of the key.
    #[inline]
    pub(super) fn get(&self, key: usize) -> Option<&T> {
        match self.slots[hash(key)].get() {
            Some((known, value)) if *known == key => Some(value),
            _ => self.get_beside(key),
        }
    }

    /// Continues [`get`](Self::get) when another key occupies the first slot.
    #[inline(never)]
    fn get_beside(&self, key: usize) -> Option<&T> {
        for slot in self.slots_of(key) {
            // No key is stored behind a free slot.
            let (known, value) = slot.get()?;
            if *known == key {
                return Some(value);
            }
        }
        self.next.get()?.get(key)
    }

    /// Inserts the value and returns a reference to it, or to the existing value if another thread inserted one first.
    pub(super) fn insert(&self, key: usize, value: T) -> &T {
        let mut entry = Some((key, value));
        for slot in self.slots_of(key) {
            let (known, value) = slot.get_or_init(|| entry.take().expect("the entry is inserted into one slot only"));
            if *known == key {
                return value;
            }
        }
        let (key, value) = entry.expect("every slot holds another key");
        self.next.get_or_init(|| Box::new(StreamTable::new())).insert(key, value)
    }

    fn slots_of(&self, key: usize) -> impl Iterator<Item = &OnceLock<(usize, T)>> {
        (0..PROBES).map(move |step| &self.slots[(hash(key) + step) % SLOTS])
    }
}

/// Returns the first slot to search for a key.
#[inline]
fn hash(key: usize) -> usize {
    // Fibonacci hashing: the multiplication propagates all bits to the highest ones.
    ((key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOTS.ilog2())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_keeps_its_first_value() {
        let table = StreamTable::new();
        let keys: Vec<usize> = (0..1000).map(|number| number * 64).collect();
        for key in &keys {
            assert_eq!(table.get(*key), None);
            assert_eq!(*table.insert(*key, key + 1), key + 1);
            assert_eq!(*table.insert(*key, key + 2), key + 1);
        }
        assert!(keys.iter().all(|key| table.get(*key) == Some(&(key + 1))));
    }
}
