//! Lookup of a buffer's position in a window, by which NCCL's device code and peer mappings address it.

use crate::ffi::handles::WindowHandle;
use crate::windows::keys::SegmentKey;
use crate::windows::segment::SymmetricSegment;

/// A position in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WindowSpan {
    /// The window.
    pub window: WindowHandle,
    /// Offset in bytes from the window's start; equal on all ranks.
    pub offset_bytes: u64,
    /// The segment of the window: the cache key for state that belongs to the window.
    pub segment: SegmentKey,
}

/// The kind of a segment's registration on a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegisteredAs {
    Window(WindowHandle),
    /// Registered locally on this rank.
    Plain,
}

/// A registered segment, as lookups see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) segment: SegmentKey,
    /// Name that all ranks share; `None` if it belongs to a private pool.
    pub(crate) name: Option<SymmetricSegment>,
    pub(crate) kind: RegisteredAs,
}

/// The registered segments of one communicator, by address. They do not overlap, because a dead segment keeps its addresses until its
/// window is deregistered.
#[derive(Debug, Default)]
pub(crate) struct WindowMap {
    /// In ascending order of base addresses.
    entries: Vec<Entry>,
}

impl WindowMap {
    /// Adds a segment, or replaces its entry.
    pub(crate) fn insert(&mut self, entry: Entry) {
        let at = self.entries.partition_point(|other| other.segment.base < entry.segment.base);
        match self.entries.get_mut(at) {
            Some(other) if other.segment.base == entry.segment.base => *other = entry,
            _ => self.entries.insert(at, entry),
        }
    }

    /// Removes the segment that starts at `base`.
    pub(crate) fn remove(&mut self, base: u64) {
        self.entries.retain(|entry| entry.segment.base != base);
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns the registered segment that contains all `size_bytes` bytes starting at the address.
    pub(crate) fn find(&self, address: u64, size_bytes: u64) -> Option<&Entry> {
        let at = self.entries.partition_point(|entry| entry.segment.base <= address);
        let entry = &self.entries[at.checked_sub(1)?];
        let offset_bytes = address - entry.segment.base;
        let room = entry.segment.size_bytes.checked_sub(offset_bytes)?;
        (room > 0 && size_bytes <= room).then_some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::windows::segment::HeapSegment;
    use symmalloc_core::ids::HeapId;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{PoolId, SegmentId};

    fn entry(segment: u32, base: u64, size_bytes: u64) -> Entry {
        let segment =
            HeapSegment { heap: HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All }, id: SegmentId(segment) };
        Entry { segment: SegmentKey { base, size_bytes, segment }, name: None, kind: RegisteredAs::Plain }
    }

    #[test]
    fn an_address_is_found_in_the_segment_that_holds_all_of_its_bytes() {
        let mut map = WindowMap::default();
        map.insert(entry(1, 0x4000, 0x1000));
        map.insert(entry(0, 0x1000, 0x1000));
        let found = |address, size_bytes| map.find(address, size_bytes).map(|entry| entry.segment.segment.id.0);
        assert_eq!(found(0x1000, 0x1000), Some(0));
        assert_eq!(found(0x1fff, 1), Some(0));
        assert_eq!(found(0x1fff, 2), None, "beyond the end");
        assert_eq!(found(0x2000, 0), None, "after the end");
        assert_eq!(found(0xfff, 1), None);
        assert_eq!(found(0x4800, 8), Some(1));
    }

    #[test]
    fn a_segment_that_grew_replaces_itself() {
        let mut map = WindowMap::default();
        map.insert(entry(0, 0x1000, 0x1000));
        map.insert(entry(0, 0x1000, 0x3000));
        assert_eq!(map.find(0x3000, 1).map(|entry| entry.segment.size_bytes), Some(0x3000));
        map.remove(0x1000);
        assert_eq!(map.find(0x1000, 1), None);
    }
}
