//! Live allocations by address.
//!
//! ```text
//!  addresses   │ region n       │ region n + 1   │ ...        32 MiB each
//!  small       ▼ a shard        ▼ another one                a map ordered by address, with a separate lock
//!  large       ──────────────── one map ────────────────     a region or more: they may begin in any earlier region
//! ```
//!
//! An allocation is found by any address within it. A small allocation can only be in two shards: those of the address's region and of the
//! region before it. A shard also contains other regions, but none of them lies between the first address of the allocation and the queried
//! address. Threads that use different heaps use different regions, and usually different locks. A hash assigns regions to shards: heaps
//! lie at equal distances, so a simpler rule could assign many of them to one shard.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

const REGION_BITS: u32 = 25;
const REGION_BYTES: u64 = 1 << REGION_BITS;
const SHARD_BITS: u32 = 7;
const SHARDS: usize = 1 << SHARD_BITS;

/// A map of allocations by address. `T` is the data stored for each allocation.
pub(crate) struct Ledger<T> {
    small: [Shard<T>; SHARDS],
    large: Shard<T>,
}

/// A part of the map with its own lock. The alignment keeps shards on separate cache lines.
#[repr(align(128))]
struct Shard<T>(Mutex<BTreeMap<u64, Entry<T>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry<T> {
    size_bytes: u64,
    known: T,
}

/// An allocation in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found<T> {
    /// Address of the first byte.
    pub(crate) address: u64,
    /// Size in bytes that the program requested.
    pub(crate) size_bytes: u64,
    /// The data stored for the allocation.
    pub(crate) known: T,
}

impl<T> Shard<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Copy> Ledger<T> {
    pub(crate) const fn new() -> Self {
        Ledger {
            small: [const { Shard(Mutex::new(BTreeMap::new())) }; SHARDS],
            large: Shard(Mutex::new(BTreeMap::new())),
        }
    }

    fn region(&self, address: u64) -> &Shard<T> {
        let scattered = (address >> REGION_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.small[(scattered >> (u64::BITS - SHARD_BITS)) as usize]
    }

    /// Inserts an allocation.
    pub(crate) fn insert(&self, address: u64, size_bytes: u64, known: T) {
        let shard = if size_bytes < REGION_BYTES { self.region(address) } else { &self.large };
        shard.lock().insert(address, Entry { size_bytes, known });
    }

    /// Removes and returns the allocation that begins at an address. If two threads free it concurrently, only one receives it.
    pub(crate) fn take(&self, address: u64) -> Option<Found<T>> {
        let taken = self.region(address).lock().remove(&address);
        let Entry { size_bytes, known } = taken.or_else(|| self.large.lock().remove(&address))?;
        Some(Found { address, size_bytes, known })
    }

    /// Returns the allocation that contains an address.
    pub(crate) fn around(&self, address: u64) -> Option<Found<T>> {
        let before = address.saturating_sub(REGION_BYTES);
        let shards = [self.region(address), self.region(before), &self.large];
        shards.into_iter().find_map(|shard| {
            let map = shard.lock();
            let (at, entry) = map.range(..=address).next_back()?;
            let found = Found { address: *at, size_bytes: entry.size_bytes, known: entry.known };
            (address - at < entry.size_bytes).then_some(found)
        })
    }

    /// Returns all allocations, ordered by address.
    pub(crate) fn all(&self) -> Vec<Found<T>> {
        let shards = self.small.iter().chain([&self.large]);
        let mut all: Vec<Found<T>> = shards
            .flat_map(|shard| {
                let map = shard.lock();
                let found = |(at, entry): (&u64, &Entry<T>)| Found {
                    address: *at,
                    size_bytes: entry.size_bytes,
                    known: entry.known,
                };
                map.iter().map(found).collect::<Vec<_>>()
            })
            .collect();
        all.sort_unstable_by_key(|found| found.address);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the ledger with a single map, for adjacent blocks of any size up to several regions.
        #[test]
        fn an_allocation_is_found_by_every_address_in_it(
            sizes in prop::collection::vec(1_u64..(80 << 20), 1..60), steps in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..80)
        ) {
            let (ledger, mut model) = (Ledger::new(), BTreeMap::new());
            let mut at = 7 << 30;
            for (number, size) in sizes.iter().enumerate() {
                ledger.insert(at, *size, number);
                model.insert(at, (*size, number));
                at += size;
            }
            let starts: Vec<u64> = model.keys().copied().collect();
            for (index, is_taken) in steps {
                let start = *index.get(&starts);
                if is_taken {
                    let expected = model.remove(&start).map(|(size_bytes, known)| Found { address: start, size_bytes, known });
                    prop_assert_eq!(ledger.take(start), expected);
                }
                for address in [start, start + 1, start.saturating_sub(1), start + (40 << 20)] {
                    let around = model.range(..=address).next_back().filter(|(at, (size, _))| address - **at < *size);
                    let around = around.map(|(at, (size_bytes, known))| Found { address: *at, size_bytes: *size_bytes, known: *known });
                    prop_assert_eq!(ledger.around(address), around);
                }
            }
            prop_assert_eq!(ledger.all().len(), model.len());
        }
    }
}
