//! The address map: which heap an address is likely to be of, read without a lock.
//!
//! ```text
//!  address   │ ... │ leaf 10 bits │ granule 13 bits │ 21 bits, not looked at │
//!                        ▼                ▼
//!                     leaves ──► leaf: a heap per granule of 2 MiB
//! ```
//! An entry is what was found last near an address, and no more: the heap, asked under its own lock, says whether the
//! address is one of its allocations. If it is not, the directory of segments knows, and the entry is written anew. So nobody
//! has to keep the map true: not when segments die, not where two heaps share a granule, not where far addresses share an entry.
//!
//! Entries change when memory is used for the first time. After that threads only read them: those that free memory of
//! different streams write no cache line in common.

use crate::backend::DeviceAddress;
use crate::ids::HeapId;
use crate::sync::{AtomicU32, OnceLock};
use std::fmt;
use std::sync::atomic::Ordering;

const GRANULE_BITS: u32 = 21;
const LEAF_BITS: u32 = 13;
const LEAVES_BITS: u32 = 10;

/// No heap is known.
const UNKNOWN: u32 = u32::MAX;

type Leaf = Box<[AtomicU32; 1 << LEAF_BITS]>;

#[derive(Debug)]
pub(crate) struct AddressMap {
    /// None when no address is ever looked up.
    leaves: Option<Box<[OnceLock<Leaf>; 1 << LEAVES_BITS]>>,
}

#[inline(always)]
fn place_of(address: DeviceAddress) -> (usize, usize) {
    let granule = address.0 >> GRANULE_BITS;
    ((granule >> LEAF_BITS) as usize % (1 << LEAVES_BITS), granule as usize % (1 << LEAF_BITS))
}

impl AddressMap {
    pub(crate) fn new(is_used: bool) -> Self {
        AddressMap { leaves: is_used.then(|| boxed(OnceLock::new)) }
    }

    /// The heap that the address is likely to be of.
    #[inline(always)]
    pub(crate) fn find(&self, address: DeviceAddress) -> Option<HeapId> {
        let (leaf, granule) = place_of(address);
        let heap = self.leaves.as_ref()?[leaf].get()?[granule].load(Ordering::Relaxed);
        (heap != UNKNOWN).then_some(HeapId(heap))
    }

    /// The address was found to be of the heap.
    #[cold]
    pub(crate) fn note(&self, address: DeviceAddress, heap: HeapId) {
        let (leaf, granule) = place_of(address);
        if let Some(leaves) = &self.leaves {
            let leaf = leaves[leaf].get_or_init(|| boxed(|| AtomicU32::new(UNKNOWN)));
            leaf[granule].store(heap.0, Ordering::Relaxed);
        }
    }
}

/// As many as the array has, made where they stay.
fn boxed<T: fmt::Debug, const LEN: usize>(make: impl Fn() -> T) -> Box<[T; LEN]> {
    let all: Box<[T]> = (0..LEN).map(|_| make()).collect();
    all.try_into().expect("it has that many")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_of_the_heap_that_was_found_last_in_its_granule() {
        let map = AddressMap::new(true);
        let address = |granule: u64| DeviceAddress(0x7f12_3400_0000 + (granule << GRANULE_BITS));
        for granule in 0..3 << LEAF_BITS {
            assert_eq!(map.find(address(granule)), None);
            map.note(address(granule), HeapId(granule as u32));
        }
        for granule in 0..3 << LEAF_BITS {
            assert_eq!(map.find(DeviceAddress(address(granule).0 + 512)), Some(HeapId(granule as u32)));
        }
        map.note(DeviceAddress(address(1).0 + 1024), HeapId(7));
        assert_eq!(map.find(address(1)), Some(HeapId(7)));
    }

    #[test]
    fn a_map_that_is_not_used_knows_nothing() {
        let map = AddressMap::new(false);
        map.note(DeviceAddress(0x7f12_3400_0000), HeapId(1));
        assert_eq!(map.find(DeviceAddress(0x7f12_3400_0000)), None);
    }
}
