//! From an address to an allocation, for programs that keep the address and nothing else, as C and PyTorch do.
//!
//! Two maps. The **directory** knows every live segment; it changes only when a segment is created or removed, so it is always
//! kept. The **pointer map** knows every live allocation by its first address. It is told of allocations and frees after they
//! are decided, and only where it is configured ([`PointerLookup`](crate::config::PointerLookup)).
//!
//! A pointer is resolved to a handle, and from there on there is one way. Addresses go in as keys and decide nothing.

use crate::history::names::{SlotMap, slot_map};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{DeviceAddress, Range};
use crate::types::handle::Handle;
use crate::types::ids::HeapId;
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
        assert!(before.is_none(), "ranges are checked before they become segments");
    }

    pub(crate) fn remove(&mut self, range: Range) {
        self.by_base.remove(&range.base.0);
    }

    /// The segment whose range holds the address.
    pub(crate) fn around(&self, address: DeviceAddress) -> Option<DirectoryEntry> {
        let (base, entry) = self.by_base.range(..=address.0).next_back()?;
        (address.0 - base < entry.size_bytes).then_some(*entry)
    }

    /// Whether a range shares an address with a live segment.
    pub(crate) fn overlaps(&self, range: Range) -> bool {
        let last = range.base.0.saturating_add(range.size_bytes.saturating_sub(1));
        self.by_base.range(range.base.0..=last).next().is_some() || self.around(range.base).is_some()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_base.len()
    }
}

/// Parts of the pointer map. Threads that use different memory rarely meet at one.
const SHARDS: usize = 64;
/// Addresses that differ only below this bit share a part.
const GRANULE_BITS: u32 = 21;

/// The live allocations of an allocator by their first address, each part behind a lock of its own.
pub(crate) struct PointerMap<L: Lock> {
    shards: Box<[L::Cell<SlotMap<u64, Handle>>]>,
}

impl<L: Lock> PointerMap<L> {
    pub(crate) fn new() -> Self {
        PointerMap { shards: (0..SHARDS).map(|_| LockCell::new(slot_map())).collect() }
    }

    fn shard(&self, address: DeviceAddress) -> &L::Cell<SlotMap<u64, Handle>> {
        // Fibonacci hashing: the multiplication carries all bits to the highest ones.
        let hash = (address.0 >> GRANULE_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(hash >> (64 - SHARDS.ilog2())) as usize]
    }

    /// The live allocation that starts here.
    pub(crate) fn find(&self, address: DeviceAddress) -> Option<Handle> {
        self.shard(address).lock().get(&address.0).copied()
    }

    /// An allocation starts here. One that another thread has just freed may still be known here: it is no more.
    pub(crate) fn insert(&self, address: DeviceAddress, handle: Handle) {
        self.shard(address).lock().insert(address.0, handle);
    }

    /// The allocation was freed. Another thread may have got its place already, and then that one stays known.
    pub(crate) fn remove(&self, address: DeviceAddress, handle: Handle) {
        let mut shard = self.shard(address).lock();
        if shard.get(&address.0) == Some(&handle) {
            shard.remove(&address.0);
        }
    }

    /// Number of allocations that are known.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }
}

impl<L: Lock> std::fmt::Debug for PointerMap<L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PointerMap({})", self.len())
    }
}
