//! A global order of communicators, which is equal on every rank by construction.

use crate::unique_id::UniqueId;
use std::sync::Arc;

/// A communicator's position among all communicators of a job. It is unique, and equal on all ranks of the communicator.
///
/// Operations on several communicators (registering memory, comparing histories) must run in the same order on all ranks. Otherwise two
/// ranks can deadlock, each waiting for the other in a different communicator. Sorting communicators by this order prevents such deadlocks.
/// The order compares names first, and then the origin: the unique id, or the parent of a split. A parent precedes its splits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommOrder(Arc<[u8]>);

impl CommOrder {
    /// Returns the order of a connected communicator. `ordinal` counts this rank's communicators with the same id.
    pub(crate) fn connected(name: &str, id: &UniqueId, ordinal: u32) -> Self {
        let mut key = Self::named(b'c', name);
        key.extend_from_slice(id.as_bytes());
        key.extend_from_slice(&ordinal.to_be_bytes());
        CommOrder(key.into())
    }

    /// Returns the order of a communicator that other code created. Only the name identifies such a communicator.
    pub(crate) fn borrowed(name: &str) -> Self {
        CommOrder(Self::named(b'b', name).into())
    }

    /// Returns the order of the communicator that the `ordinal`th split of this one creates for a color.
    pub(crate) fn split(&self, ordinal: u32, color: u32) -> Self {
        let mut key = self.0.to_vec();
        key.push(b's');
        key.extend_from_slice(&ordinal.to_be_bytes());
        key.extend_from_slice(&color.to_be_bytes());
        CommOrder(key.into())
    }

    /// Returns the order of the communicator that the `ordinal`th shrink of this one that excludes these ranks creates.
    pub(crate) fn shrunk(&self, ordinal: u32, excluded: &[u32]) -> Self {
        let mut key = self.0.to_vec();
        key.push(b'x');
        key.extend_from_slice(&ordinal.to_be_bytes());
        // The length before the list keeps one list's key from being a prefix of another's.
        key.extend_from_slice(&(excluded.len() as u32).to_be_bytes());
        excluded.iter().for_each(|rank| key.extend_from_slice(&rank.to_be_bytes()));
        CommOrder(key.into())
    }

    /// Returns the order of a communicator that was grown with this id.
    pub(crate) fn grown(name: &str, id: &UniqueId) -> Self {
        let mut key = Self::named(b'g', name);
        key.extend_from_slice(id.as_bytes());
        CommOrder(key.into())
    }

    fn named(kind: u8, name: &str) -> Vec<u8> {
        let mut key = name.as_bytes().to_vec();
        // Names contain no zero byte, so no name's key is a prefix of another name's key.
        key.extend_from_slice(&[0, kind]);
        key
    }

    /// Returns the order as bytes that compare in the same way, for example for digests.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(name: &str, byte: u8) -> CommOrder {
        CommOrder::connected(name, &UniqueId::from_bytes([byte; UniqueId::BYTES]), 0)
    }

    #[test]
    fn communicators_are_ordered_by_name_before_id() {
        assert!(world("dp", 9) < world("tp", 1));
        assert!(world("dp", 9).split(1, 0) < world("tp", 1));
    }

    #[test]
    fn a_split_sorts_after_its_parent_and_before_the_next_split() {
        let parent = world("world", 7);
        let (first, second) = (parent.split(1, 300), parent.split(2, 0));
        assert!(parent < first && first < second);
        assert!(parent.split(1, 2) < first, "colors compare as numbers");
        assert!(first < world("world", 8));
    }

    #[test]
    fn shrunk_communicators_sort_by_ordinal_and_none_is_a_prefix_of_another() {
        let parent = world("world", 7);
        let lists: [&[u32]; 5] = [&[0], &[1], &[0, 1], &[0, 0x01_0000], &[1, 2, 3]];
        let orders: Vec<_> =
            (0..3).flat_map(|ordinal| lists.map(|list| (ordinal, parent.shrunk(ordinal, list)))).collect();
        for (at, (ordinal, one)) in orders.iter().enumerate() {
            assert!(parent < *one && *one < world("world", 8));
            for (other_ordinal, other) in &orders[at + 1..] {
                assert!(!other.as_bytes().starts_with(one.as_bytes()) && !one.as_bytes().starts_with(other.as_bytes()));
                assert!(ordinal == other_ordinal || one < other);
            }
            // A split of `one` is ordered before all communicators with a later ordinal.
            let part = one.split(1, u32::MAX);
            assert!(orders.iter().all(|(later, other)| later <= ordinal || part < *other));
        }
    }

    #[test]
    fn a_grown_communicator_is_its_name_and_id() {
        let grown = |name, byte| CommOrder::grown(name, &UniqueId::from_bytes([byte; UniqueId::BYTES]));
        assert_eq!(grown("world", 7), grown("world", 7));
        assert!(grown("dp", 9) < grown("tp", 1) && grown("tp", 1) < grown("tp", 2));
        assert_ne!(grown("world", 7), world("world", 7));
    }

    #[test]
    fn communicators_of_one_id_differ_by_their_ordinal() {
        let id = UniqueId::from_bytes([3; UniqueId::BYTES]);
        assert!(CommOrder::connected("w", &id, 0) < CommOrder::connected("w", &id, 1));
    }

    #[test]
    fn a_borrowed_communicator_is_its_name() {
        assert_eq!(CommOrder::borrowed("tp"), CommOrder::borrowed("tp"));
        assert_ne!(CommOrder::borrowed("tp"), CommOrder::borrowed("tp2"));
        assert_ne!(CommOrder::borrowed("tp"), world("tp", 0));
    }
}
