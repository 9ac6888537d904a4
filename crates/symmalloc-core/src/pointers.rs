//! Finds allocations by address, for programs that keep only the address, as C programs and PyTorch do.
//!
//! ```text
//!  address ──► hint ──► heap, locked ──► its pointer map ──► block
//!                │ none, or the heap does not have the address
//!                └────► directory ──► heap, locked ──► its pointer map
//! ```
//! The **directory** holds every live segment. The allocator always maintains it, because it changes only when a
//! segment is created or removed. A heap's **pointer map** holds its live allocations by their first address. A heap
//! has a pointer map only if the program configures it ([`PointerLookup`](crate::config::PointerLookup)). The heap
//! updates the map after each decision about an allocation or a free.
//!
//! A pointer resolves to a block, as a handle does, and the rest of the path is the same for both. Addresses are only
//! keys and influence no decision.

use crate::blocks::table::Slot;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::HeapNumber;
use crate::types::look_up::LookUp;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

/// The live segments of an allocator by address.
#[derive(Debug, Default)]
pub(crate) struct SegmentDirectory {
    by_base: BTreeMap<u64, DirectoryEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryEntry {
    size_bytes: u64,
    pub(crate) heap: HeapNumber,
    /// Slot of the segment in the heap's table.
    pub(crate) segment: u32,
}

impl SegmentDirectory {
    pub(crate) fn insert(&mut self, range: Range, heap: HeapNumber, segment: u32) {
        let entry = DirectoryEntry { size_bytes: range.size_bytes, heap, segment };
        let before = self.by_base.insert(range.base.0, entry);
        assert!(before.is_none(), "two segments have the same base");
    }

    pub(crate) fn remove(&mut self, range: Range) {
        self.by_base.remove(&range.base.0);
    }

    /// Returns the segment whose range contains the address.
    pub(crate) fn around(&self, address: DeviceAddress) -> Option<DirectoryEntry> {
        let (base, entry) = self.by_base.range(..=address.0).next_back()?;
        (address.0 - base < entry.size_bytes).then_some(*entry)
    }

    /// Returns `true` if a range overlaps a live segment.
    pub(crate) fn overlaps(&self, range: Range) -> bool {
        let last = range.base.0.saturating_add(range.size_bytes.saturating_sub(1));
        self.by_base.range(range.base.0..=last).next().is_some() || self.around(range.base).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_base.len()
    }
}

/// The live allocations of one heap by their first address. Each heap has its own map behind its lock.
pub(crate) type PointerMap = LookUp<DeviceAddress, Slot>;

/// Addresses that differ only below this bit share a hint.
const GRANULE_BITS: u32 = 21;
/// Number of hints. If two granules share a hint, each overwrites the hint of the other.
const HINTS: usize = 1 << 14;

/// For each granule of addresses, the heap in which an address was last found. With these hints, most look-ups do not
/// need the directory, whose lock all threads share. A wrong hint is harmless: the heap itself reports whether it has
/// the address.
pub(crate) struct HeapHints {
    /// The heap's number plus one; 0 if there is no hint.
    by_granule: Box<[AtomicU32]>,
}

impl HeapHints {
    pub(crate) fn new() -> Self {
        HeapHints { by_granule: (0..HINTS).map(|_| AtomicU32::new(0)).collect() }
    }

    #[inline]
    fn hint(&self, address: DeviceAddress) -> &AtomicU32 {
        // Fibonacci hashing: the multiplication mixes all bits into the highest ones.
        let hash = (address.0 >> GRANULE_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.by_granule[(hash >> (64 - HINTS.ilog2())) as usize]
    }

    #[inline]
    pub(crate) fn get(&self, address: DeviceAddress) -> Option<HeapNumber> {
        self.hint(address).load(Ordering::Relaxed).checked_sub(1).map(HeapNumber)
    }

    pub(crate) fn set(&self, address: DeviceAddress, heap: HeapNumber) {
        self.hint(address).store(heap.0 + 1, Ordering::Relaxed);
    }
}
