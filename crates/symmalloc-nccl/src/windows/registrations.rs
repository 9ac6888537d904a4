//! The registered segments of one communicator: the only record of which segments have windows or registered buffers.
//!
//! ```text
//!   entries, by address   │ A: window 2 │ B: buffers x2 │ C: window 0 │ D: window 1 │
//!   lookup                address ──► the last entry that starts at or before it, if it contains all bytes
//!   order on all ranks    C, D, A     the numbers of the windows
//! ```
//! Addresses differ between ranks, so all operations that ranks perform together follow the numbers of the windows.

use crate::communicator::registration::{BufferRegistration, Registered};
use crate::ffi::handles::WindowHandle;
use crate::windows::keys::SegmentKey;
use crate::windows::segment::{HeapSegment, SymmetricSegment};
use crate::windows::table::Piece;
use smallvec::SmallVec;
use symmalloc_core::PoolId;

/// A position in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WindowSpan {
    /// NCCL's handle of the window.
    pub window: WindowHandle,
    /// Offset in bytes from the window's start; equal on all ranks.
    pub offset_bytes: u64,
    /// The segment of the window: the cache key for state that belongs to the window.
    pub segment: SegmentKey,
}

/// The pieces of a segment, each with a registration local to this rank.
pub(crate) type Buffers = SmallVec<[BufferRegistration; 1]>;

/// A registered segment.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The segment, with the extent that is registered.
    pub(crate) key: SegmentKey,
    kind: EntryKind,
}

#[derive(Debug)]
enum EntryKind {
    /// Registered by all ranks together.
    Window(WindowEntry),
    /// Registered on this rank only.
    Buffers(Buffers),
}

/// A segment of a pool that is attached for windows.
#[derive(Debug)]
pub(crate) struct WindowEntry {
    pub(crate) name: SymmetricSegment,
    /// Position in the order of registration.
    number: u64,
    registered: Registered,
}

/// The registered segments of one communicator.
///
/// # Invariants
/// - **R1**: The entries are in ascending order of addresses and do not overlap: a dead segment keeps its addresses until it is
///   deregistered.
/// - **R2**: There is at most one entry per segment, and an entry for buffers has at least one buffer.
/// - **R3**: `windows` and `window_bytes` are the number and the total size of the entries with a window.
/// - **R4**: The number of each window is less than `next_number`, and no two windows have the same number.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    entries: Vec<Entry>,
    next_number: u64,
    windows: u64,
    window_bytes: u64,
}

impl Entry {
    /// Returns the handle of the segment's window, or `None` if the segment is registered on this rank only.
    pub(crate) fn handle(&self) -> Option<WindowHandle> {
        self.window().and_then(WindowEntry::handle)
    }

    /// Returns the registration by all ranks, if the pool is attached for windows.
    pub(crate) fn window(&self) -> Option<&WindowEntry> {
        match &self.kind {
            EntryKind::Window(window) => Some(window),
            EntryKind::Buffers(_) => None,
        }
    }
}

impl WindowEntry {
    /// Returns the window's handle, or `None` if NCCL made a plain registration.
    pub(crate) fn handle(&self) -> Option<WindowHandle> {
        match &self.registered {
            Registered::Window(window) => Some(window.handle()),
            Registered::Plain(_) => None,
        }
    }
}

impl Registrations {
    /// Adds the registration of a segment by all ranks, with the next number.
    pub(crate) fn insert_window(&mut self, key: SegmentKey, name: SymmetricSegment, registered: Registered) {
        debug_assert_eq!((registered.base(), registered.size_bytes()), (key.base, key.size_bytes));
        let at = self.position(key.base);
        let number = self.next_number;
        self.next_number += 1;
        self.windows += 1;
        self.window_bytes += key.size_bytes;
        self.entries.insert(at, Entry { key, kind: EntryKind::Window(WindowEntry { name, number, registered }) });
    }

    /// Adds the registration of one piece of a segment, and sets the key of the segment's entry.
    pub(crate) fn insert_buffer(&mut self, key: SegmentKey, buffer: BufferRegistration) {
        let at = self.position(key.base);
        match self.entries.get_mut(at) {
            Some(Entry { key: known, kind: EntryKind::Buffers(buffers) }) if known.segment == key.segment => {
                *known = key;
                buffers.push(buffer);
            }
            _ => {
                let buffers = std::iter::once(buffer).collect();
                self.entries.insert(at, Entry { key, kind: EntryKind::Buffers(buffers) });
            }
        }
    }

    /// Removes and returns the registration of a segment by all ranks.
    pub(crate) fn remove_window(&mut self, segment: HeapSegment, base: u64) -> Option<Registered> {
        let at = self.find_at(segment, base)?;
        self.entries[at].window()?;
        let Entry { key, kind } = self.entries.remove(at);
        let EntryKind::Window(window) = kind else { return None };
        self.windows -= 1;
        self.window_bytes -= key.size_bytes;
        Some(window.registered)
    }

    /// Removes and returns the registered pieces of a segment.
    pub(crate) fn remove_buffers(&mut self, segment: HeapSegment, base: u64) -> Buffers {
        let Some(at) = self.find_at(segment, base).filter(|at| self.entries[*at].window().is_none()) else {
            return Buffers::new();
        };
        match self.entries.remove(at).kind {
            EntryKind::Buffers(buffers) => buffers,
            EntryKind::Window(_) => Buffers::new(),
        }
    }

    /// Removes and returns all registrations: windows in order of registration, then buffers.
    pub(crate) fn take(&mut self) -> Vec<Registered> {
        let mut entries = std::mem::take(self).entries;
        entries.sort_by_key(|entry| entry.window().map_or(u64::MAX, |window| window.number));
        let mut all = Vec::with_capacity(entries.len());
        for entry in entries {
            match entry.kind {
                EntryKind::Window(window) => all.push(window.registered),
                EntryKind::Buffers(buffers) => all.extend(buffers.into_iter().map(Registered::Plain)),
            }
        }
        all
    }

    /// Returns the registered segment that contains all `size_bytes` bytes starting at the address.
    pub(crate) fn find(&self, address: u64, size_bytes: u64) -> Option<&Entry> {
        let at = self.entries.partition_point(|entry| entry.key.base <= address);
        let entry = &self.entries[at.checked_sub(1)?];
        let offset_bytes = address - entry.key.base;
        let room = entry.key.size_bytes.checked_sub(offset_bytes)?;
        (room > 0 && size_bytes <= room).then_some(entry)
    }

    /// Returns the entry of a segment.
    pub(crate) fn get(&self, segment: HeapSegment, base: u64) -> Option<&Entry> {
        self.find_at(segment, base).map(|at| &self.entries[at])
    }

    /// Returns the entries of the segments with windows, in order of registration.
    pub(crate) fn in_order(&self) -> Vec<(&SegmentKey, &WindowEntry)> {
        let mut all: Vec<_> = self.entries.iter().filter_map(|entry| Some((&entry.key, entry.window()?))).collect();
        all.sort_by_key(|(_, window)| window.number);
        all
    }

    /// Returns the segments of a pool that have registered buffers, each with its registered pieces.
    pub(crate) fn buffers_of(&self, pool: PoolId) -> Vec<(SegmentKey, Vec<Piece>)> {
        let pieces = |entry: &Entry| match &entry.kind {
            EntryKind::Buffers(buffers) if entry.key.segment.heap.pool == pool => {
                let piece =
                    |buffer: &BufferRegistration| Piece { base: buffer.base(), size_bytes: buffer.size_bytes() };
                let pieces = buffers.iter().map(piece).collect();
                Some((entry.key, pieces))
            }
            _ => None,
        };
        self.entries.iter().filter_map(pieces).collect()
    }

    /// Returns the keys of the registered segments, in order of addresses.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &SegmentKey> {
        self.entries.iter().map(|entry| &entry.key)
    }

    /// Returns the pools of the registered segments, in ascending order.
    pub(crate) fn pools(&self) -> Vec<PoolId> {
        let mut pools: Vec<PoolId> = self.entries.iter().map(|entry| entry.key.segment.heap.pool).collect();
        pools.sort_unstable();
        pools.dedup();
        pools
    }

    /// Returns the number of NCCL registrations of a pool's memory.
    pub(crate) fn handles_of(&self, pool: PoolId) -> usize {
        let of_pool = self.entries.iter().filter(|entry| entry.key.segment.heap.pool == pool);
        of_pool
            .map(|entry| match &entry.kind {
                EntryKind::Window(window) => usize::from(window.registered.has_handle()),
                EntryKind::Buffers(buffers) => buffers.iter().filter(|buffer| buffer.has_handle()).count(),
            })
            .sum()
    }

    /// Returns the number of segments with a window.
    pub(crate) fn windows(&self) -> u64 {
        self.windows
    }

    /// Returns the total size of the windows in bytes.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Returns the number of registered buffers.
    pub(crate) fn buffers(&self) -> u64 {
        let of = |entry: &Entry| match &entry.kind {
            EntryKind::Window(_) => 0,
            EntryKind::Buffers(buffers) => buffers.len() as u64,
        };
        self.entries.iter().map(of).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the first invariant that does not hold.
    pub(crate) fn violation(&self) -> Option<&'static str> {
        let end = |entry: &Entry| entry.key.base + entry.key.size_bytes;
        let mut segments: Vec<HeapSegment> = self.entries.iter().map(|entry| entry.key.segment).collect();
        segments.sort_unstable();
        let windows = self.in_order();
        let has_buffers = |entry: &Entry| !matches!(&entry.kind, EntryKind::Buffers(buffers) if buffers.is_empty());
        let checks = [
            ("R1", self.entries.windows(2).all(|pair| end(&pair[0]) <= pair[1].key.base)),
            ("R2", segments.windows(2).all(|pair| pair[0] != pair[1]) && self.entries.iter().all(has_buffers)),
            (
                "R3",
                windows.len() as u64 == self.windows
                    && windows.iter().map(|(key, _)| key.size_bytes).sum::<u64>() == self.window_bytes,
            ),
            (
                "R4",
                windows.windows(2).all(|pair| pair[0].1.number < pair[1].1.number)
                    && windows.last().is_none_or(|(_, window)| window.number < self.next_number),
            ),
        ];
        checks.into_iter().find(|(_, holds)| !holds).map(|(name, _)| name)
    }

    fn position(&self, base: u64) -> usize {
        self.entries.partition_point(|entry| entry.key.base < base)
    }

    fn find_at(&self, segment: HeapSegment, base: u64) -> Option<usize> {
        let at = self.position(base);
        self.entries.get(at).is_some_and(|entry| entry.key.segment == segment).then_some(at)
    }
}

/// A registration without a handle, as NCCL returns it with `NCCL_LOCAL_REGISTER=0`.
#[cfg(test)]
pub(crate) fn buffer_without_handle(base: u64, size_bytes: u64) -> BufferRegistration {
    let memory = crate::communicator::registration::Memory { base, size_bytes, owner: 0, owner_name: "".into() };
    BufferRegistration { raw: crate::ffi::handles::NewHandle::unnamed().registration(), memory }
}

#[cfg(test)]
mod tests {
    use super::buffer_without_handle as buffer;
    use super::*;
    use symmalloc_core::SegmentId;
    use symmalloc_core::ids::{HeapId, StreamGroup};

    fn key(segment: u32, base: u64, size_bytes: u64) -> SegmentKey {
        let heap = HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All };
        SegmentKey { base, size_bytes, segment: HeapSegment { heap, id: SegmentId(segment) } }
    }

    fn insert_window(all: &mut Registrations, segment: u32, base: u64, size_bytes: u64) {
        let key = key(segment, base, size_bytes);
        all.insert_window(key, SymmetricSegment::of(0, key.segment), Registered::Plain(buffer(base, size_bytes)));
        assert_eq!(all.violation(), None);
    }

    #[test]
    fn an_address_is_found_in_the_segment_that_holds_all_of_its_bytes() {
        let mut all = Registrations::default();
        insert_window(&mut all, 1, 0x4000, 0x1000);
        insert_window(&mut all, 0, 0x1000, 0x1000);
        let found = |address, size_bytes| all.find(address, size_bytes).map(|entry| entry.key.segment.id.0);
        assert_eq!(found(0x1000, 0x1000), Some(0));
        assert_eq!(found(0x1fff, 1), Some(0));
        assert_eq!(found(0x1fff, 2), None, "beyond the end");
        assert_eq!(found(0x2000, 0), None, "after the end");
        assert_eq!(found(0xfff, 1), None);
        assert_eq!(found(0x4800, 8), Some(1));
    }

    #[test]
    fn windows_are_in_order_of_registration_whatever_their_addresses() {
        let mut all = Registrations::default();
        for (segment, base) in [(0, 0x3000), (1, 0x1000), (2, 0x2000)] {
            insert_window(&mut all, segment, base, 0x1000);
        }
        let first = key(0, 0x3000, 0x1000).segment;
        assert_eq!(all.remove_window(first, 0x3000).map(|registered| registered.base()), Some(0x3000));
        assert!(all.remove_window(first, 0x3000).is_none(), "it was removed");
        assert_eq!(all.violation(), None);
        insert_window(&mut all, 0, 0x3000, 0x2000);
        let order: Vec<u32> = all.in_order().iter().map(|(key, _)| key.segment.id.0).collect();
        assert_eq!((order, all.windows(), all.window_bytes()), (vec![1, 2, 0], 3, 0x4000));
        assert_eq!(all.find(0x4000, 1).map(|entry| entry.key.size_bytes), Some(0x2000), "the larger window");
        assert_eq!(all.take().iter().map(Registered::base).collect::<Vec<_>>(), [0x1000, 0x2000, 0x3000]);
        assert!(all.is_empty() && all.violation().is_none());
    }

    #[test]
    fn the_pieces_of_a_segment_share_an_entry_that_has_no_window() {
        let mut all = Registrations::default();
        all.insert_buffer(key(0, 0x1000, 0x1000), buffer(0x1000, 0x1000));
        all.insert_buffer(key(0, 0x1000, 0x3000), buffer(0x2000, 0x2000));
        all.insert_buffer(key(1, 0x8000, 0x1000), buffer(0x8000, 0x1000));
        assert_eq!((all.violation(), all.buffers(), all.windows()), (None, 3, 0));
        let entry = all.find(0x3fff, 1).expect("it is in the second piece");
        assert!(entry.handle().is_none() && entry.window().is_none());
        let piece = |base, size_bytes| Piece { base, size_bytes };
        assert_eq!(all.buffers_of(PoolId::DEFAULT)[0].1, [piece(0x1000, 0x1000), piece(0x2000, 0x2000)]);
        assert!(all.remove_window(key(0, 0, 0).segment, 0x1000).is_none(), "it has no window");
        assert_eq!(all.remove_buffers(key(0, 0, 0).segment, 0x1000).len(), 2);
        assert_eq!((all.violation(), all.buffers(), all.pools()), (None, 1, vec![PoolId::DEFAULT]));
    }
}
