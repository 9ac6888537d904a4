//! From a device address to what lies there: the directory of segments, and the pointer index of a heap.
//!
//! The **directory** knows every live segment of an allocator. It changes only when a segment is born or dies, so it is
//! always kept. The **pointer index** knows the live allocations of one heap and changes with each.
//!
//! Handles need no index, so it is off unless configured. `exact` is a [pointer table](crate::pointer_table); `interior` is an
//! ordered map, which also finds the allocation that an address lies in. Addresses only go in as keys and never decide anything.

use crate::backend::{DeviceAddress, Range};
use crate::block_table::Slot;
use crate::config::PointerLookup;
use crate::ids::HeapId;
use crate::pointer_table::PointerTable;
use std::collections::BTreeMap;

/// The live segments of an allocator by address.
#[derive(Debug, Default)]
pub(crate) struct SegmentDirectory {
    by_base: BTreeMap<u64, DirectoryEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectoryEntry {
    size_bytes: u64,
    pub(crate) heap: HeapId,
    /// Slot of the segment in the heap's table.
    pub(crate) segment: u32,
}

impl SegmentDirectory {
    pub(crate) fn insert(&mut self, range: Range, heap: HeapId, segment: u32) {
        let entry = DirectoryEntry { size_bytes: range.size_bytes, heap, segment };
        let before = self.by_base.insert(range.base.0, entry);
        assert!(before.is_none(), "the backend reserved one range twice");
    }

    pub(crate) fn remove(&mut self, range: Range) {
        self.by_base.remove(&range.base.0);
    }

    /// The segment whose range holds the address.
    pub(crate) fn around(&self, address: DeviceAddress) -> Option<DirectoryEntry> {
        let (base, entry) = self.by_base.range(..=address.0).next_back()?;
        (address.0 - base < entry.size_bytes).then_some(*entry)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_base.len()
    }
}

#[derive(Debug)]
pub(crate) enum PointerIndex {
    Off,
    Exact(PointerTable),
    Interior(BTreeMap<u64, Slot>),
}

impl PointerIndex {
    pub(crate) fn new(lookup: PointerLookup) -> Self {
        match lookup {
            PointerLookup::Off => PointerIndex::Off,
            PointerLookup::Exact => PointerIndex::Exact(PointerTable::new()),
            PointerLookup::Interior => PointerIndex::Interior(BTreeMap::new()),
        }
    }

    #[inline(always)]
    pub(crate) fn is_off(&self) -> bool {
        matches!(self, PointerIndex::Off)
    }

    /// Whether first addresses are found, and no others.
    pub(crate) fn is_exact(&self) -> bool {
        matches!(self, PointerIndex::Exact(_))
    }

    /// Puts in the address of the block in a slot. `address_of` says where the block in any slot begins.
    #[inline(never)]
    pub(crate) fn insert(&mut self, address: DeviceAddress, slot: Slot, address_of: impl Fn(Slot) -> DeviceAddress) {
        match self {
            PointerIndex::Off => {}
            PointerIndex::Exact(table) => table.insert(address, slot, address_of),
            PointerIndex::Interior(map) => {
                let before = map.insert(address.0, slot);
                assert!(before.is_none(), "two live allocations at one address");
            }
        }
    }

    /// Takes out the address of the block in a slot.
    #[inline(never)]
    pub(crate) fn remove(&mut self, address: DeviceAddress, slot: Slot) {
        let is_removed = match self {
            PointerIndex::Off => return,
            PointerIndex::Exact(table) => {
                table.find(address, |there| there == slot).map(|(place, _)| table.remove(place)).is_some()
            }
            PointerIndex::Interior(map) => map.remove(&address.0) == Some(slot),
        };
        assert!(is_removed, "a live allocation is not in the pointer index");
    }

    /// The live allocation that starts at the address, or the last one that starts before it (`Interior` only). `is_at` says
    /// whether the block in a slot starts there.
    #[inline]
    pub(crate) fn at_or_before(&self, address: DeviceAddress, is_at: impl Fn(Slot) -> bool) -> Option<Slot> {
        match self {
            PointerIndex::Off => None,
            PointerIndex::Exact(table) => table.find(address, is_at).map(|(_, slot)| slot),
            PointerIndex::Interior(map) => map.range(..=address.0).next_back().map(|(_, slot)| *slot),
        }
    }

    pub(crate) fn len(&self) -> Option<usize> {
        match self {
            PointerIndex::Off => None,
            PointerIndex::Exact(table) => Some(table.len()),
            PointerIndex::Interior(map) => Some(map.len()),
        }
    }
}
