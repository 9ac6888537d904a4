//! The addresses of a pool with a base: one reservation, of which every range of the pool is a part.
//!
//! ```text
//!  base                                                              base + 1 TiB
//!  ├─ heap of s0 ─┬─ stitched ─┬╌╌ free ╌╌┬─ heap of s1 ─┬╌╌╌╌╌╌╌ free ╌╌╌╌╌╌╌┤
//! ```
//!
//! A pool without a base takes its ranges from the driver, whose addresses differ between processes. Here the program
//! alone decides: each range gets the lowest offset at which it fits. The result depends only on the sizes of the live
//! ranges and on the order in which the pool's heaps acquire them, so a saved and restored pool continues identically.
//! The heaps of a pool share the addresses. Each heap therefore adds the offsets of its ranges to its digest, so that
//! ranks whose threads acquired them in another order notice it.

use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{DeviceAddress, Range};
use std::collections::BTreeMap;

/// The addresses of one pool. No other lock is taken under their lock.
pub(crate) struct FixedAddresses<L: Lock> {
    space: Range,
    /// Parts in use: offset to end, in bytes. Disjoint.
    taken: L::Cell<BTreeMap<u64, u64>>,
}

impl<L: Lock> FixedAddresses<L> {
    pub(crate) fn new(space: Range) -> Self {
        FixedAddresses { space, taken: LockCell::new(BTreeMap::new()) }
    }

    /// Returns all addresses of the pool.
    pub(crate) fn space(&self) -> Range {
        self.space
    }

    /// Takes the lowest free part of this size. Returns `None` if there is none.
    pub(crate) fn take(&self, size_bytes: u64) -> Option<Range> {
        let mut taken = self.taken.lock();
        let offset = gaps(&taken, self.space.size_bytes).find(|(from, to)| to - from >= size_bytes)?.0;
        taken.insert(offset, offset + size_bytes);
        Some(self.part(offset, size_bytes))
    }

    /// Takes the part of a saved range. Returns `None` if it is not free.
    pub(crate) fn take_at(&self, offset_bytes: u64, size_bytes: u64) -> Option<Range> {
        let mut taken = self.taken.lock();
        let end = offset_bytes.checked_add(size_bytes)?;
        let is_around = |(from, to): &(u64, u64)| *from <= offset_bytes && end <= *to;
        gaps(&taken, self.space.size_bytes).find(is_around)?;
        taken.insert(offset_bytes, end);
        Some(self.part(offset_bytes, size_bytes))
    }

    /// Returns a part to the free addresses.
    pub(crate) fn give_back(&self, part: Range) {
        let taken = self.taken.lock().remove(&self.offset_of(part.base));
        assert!(taken.is_some(), "a part is returned only once");
    }

    /// Returns the distance of an address from the base, in bytes.
    pub(crate) fn offset_of(&self, address: DeviceAddress) -> u64 {
        address.0 - self.space.base.0
    }

    /// Returns the bytes of the largest free part.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        gaps(&self.taken.lock(), self.space.size_bytes).map(|(from, to)| to - from).max().unwrap_or(0)
    }

    /// Returns `true` if no part is in use.
    pub(crate) fn is_unused(&self) -> bool {
        self.taken.lock().is_empty()
    }

    fn part(&self, offset_bytes: u64, size_bytes: u64) -> Range {
        Range { base: self.space.base.plus(offset_bytes), size_bytes }
    }
}

/// Iterates over the free parts, as offset and end, in the order of their offsets.
fn gaps(taken: &BTreeMap<u64, u64>, size_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let starts = std::iter::once(0).chain(taken.values().copied());
    let ends = taken.keys().copied().chain(std::iter::once(size_bytes));
    starts.zip(ends).filter(|(from, to)| from < to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::lock::Exclusive;

    const BASE: u64 = 0x1000_0000_0000;

    fn addresses() -> FixedAddresses<Exclusive> {
        FixedAddresses::new(Range { base: DeviceAddress(BASE), size_bytes: 100 })
    }

    fn take(addresses: &FixedAddresses<Exclusive>, size_bytes: u64) -> Option<u64> {
        addresses.take(size_bytes).map(|part| part.base.0 - BASE)
    }

    #[test]
    fn a_range_gets_the_lowest_offset_at_which_it_fits() {
        let addresses = addresses();
        assert_eq!([10, 20, 30].map(|size| take(&addresses, size)), [Some(0), Some(10), Some(30)]);
        addresses.give_back(Range { base: DeviceAddress(BASE + 10), size_bytes: 20 });
        assert_eq!([25, 15, 5, 20].map(|size| take(&addresses, size)), [Some(60), Some(10), Some(25), None]);
        assert_eq!(addresses.largest_free_bytes(), 15);
        assert_eq!([15, 1].map(|size| take(&addresses, size)), [Some(85), None]);
    }

    #[test]
    fn a_saved_range_gets_its_offset_or_nothing() {
        let addresses = addresses();
        let at = |offset, size| addresses.take_at(offset, size).map(|part| part.base.0 - BASE);
        assert_eq!(at(40, 20), Some(40));
        for (offset, size) in [(40, 20), (30, 11), (59, 1), (45, 5), (90, 11), (100, 1), (u64::MAX, 2)] {
            assert_eq!(at(offset, size), None, "{offset} {size}");
        }
        assert_eq!((at(30, 10), at(60, 40), take(&addresses, 30)), (Some(30), Some(60), Some(0)));
        assert_eq!(addresses.largest_free_bytes(), 0);
    }

    #[test]
    fn the_next_offset_depends_only_on_the_live_ranges() {
        let (long, short) = (addresses(), addresses());
        for size in [30, 30, 30] {
            take(&long, size);
        }
        for offset in [0, 60] {
            long.give_back(Range { base: DeviceAddress(BASE + offset), size_bytes: 30 });
        }
        short.take_at(30, 30).expect("free");
        for size in [31, 5, 25, 9] {
            assert_eq!(take(&long, size), take(&short, size));
        }
        assert!(!long.is_unused() && addresses().is_unused());
    }
}
