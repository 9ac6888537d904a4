//! Placements of the recorded allocator: maps each address to a segment and an offset.
//!
//! A segment is identified by its ordinal: the number of segments that the device created before it, counted from the beginning of the
//! recording. Ranks can compare ordinals and offsets, but not addresses.
//!
//! ```text
//! segment_alloc  addr, size     creates a fixed segment: [addr, addr + size)
//! segment_free   addr           ends it
//! segment_map    addr, size     extends or creates an expandable segment: pages at [addr, addr + size)
//! segment_unmap  addr, size     removes pages; the segment ends with its last one
//! ```
//!
//! PyTorch does not record which expandable segment a mapping belongs to. However, it maps a reserved range from its start upward. A
//! mapping therefore belongs to a segment of the same stream if it starts within, or right after, the pages that this segment has ever
//! mapped. Any other mapping creates a segment. If the recording began after a segment was created, offsets in the segment count from its
//! first recorded mapping.
//!
//! A segment whose creation was not recorded has no ordinal. The snapshot's list of segments cannot supply one, because the list is sorted
//! by address, and addresses differ between ranks.

use std::collections::BTreeMap;

use symmalloc_core::ids::{Placement, SegmentId};

use crate::transcript::{Address, RawStream};

/// The addresses from `start` up to `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressRange {
    start: Address,
    end: Address,
}

impl AddressRange {
    /// Creates a range of `size_bytes` from `start`. The range ends at the end of the address space if it would exceed
    /// it.
    pub(super) fn new(start: Address, size_bytes: u64) -> Self {
        AddressRange { start, end: Address(start.0.saturating_add(size_bytes)) }
    }

    fn size_bytes(self) -> u64 {
        self.end.0 - self.start.0
    }
}

/// An existing segment. Its start is the key under which it is stored.
#[derive(Clone, Copy, Debug)]
struct LiveSegment {
    id: SegmentId,
    end: Address,
    kind: SegmentKind,
}

#[derive(Clone, Copy, Debug)]
enum SegmentKind {
    Fixed,
    Expandable { stream: RawStream, mapped_bytes: u64 },
}

/// The segments that exist at one point of the recording. They do not overlap.
#[derive(Default)]
pub(super) struct LiveSegments {
    live: BTreeMap<Address, LiveSegment>,
    births: u32,
}

impl LiveSegments {
    pub(super) fn allocated(&mut self, range: AddressRange) {
        self.give_birth(range, SegmentKind::Fixed);
    }

    pub(super) fn freed(&mut self, start: Address) {
        self.live.remove(&start);
    }

    pub(super) fn mapped(&mut self, range: AddressRange, on: RawStream) {
        let below = self.live.range_mut(..=range.start).next_back();
        let Some((start, segment)) = below.filter(|(_, segment)| range.start <= segment.end) else {
            return self.give_birth(range, SegmentKind::Expandable { stream: on, mapped_bytes: range.size_bytes() });
        };
        match &mut segment.kind {
            SegmentKind::Expandable { stream, mapped_bytes } if *stream == on => {
                *mapped_bytes = mapped_bytes.saturating_add(range.size_bytes());
                segment.end = segment.end.max(range.end);
                let (start, segment) = (*start, *segment);
                self.forget_overlapped(AddressRange { start, end: segment.end });
                self.live.insert(start, segment);
            }
            _ => self.give_birth(range, SegmentKind::Expandable { stream: on, mapped_bytes: range.size_bytes() }),
        }
    }

    pub(super) fn unmapped(&mut self, range: AddressRange) {
        let Some((start, segment)) = self.live.range_mut(..=range.start).next_back() else { return };
        if let SegmentKind::Expandable { mapped_bytes, .. } = &mut segment.kind
            && range.start < segment.end
        {
            *mapped_bytes = mapped_bytes.saturating_sub(range.size_bytes());
            if *mapped_bytes == 0 {
                let start = *start;
                self.live.remove(&start);
            }
        }
    }

    /// Returns the placement of an address. Returns `None` if the creation of its segment was not recorded.
    pub(super) fn placement(&self, address: Address) -> Option<Placement> {
        let (start, segment) = self.live.range(..=address).next_back()?;
        let offset_bytes = address.0 - start.0;
        (address < segment.end).then_some(Placement { segment: segment.id, offset_bytes })
    }

    fn give_birth(&mut self, range: AddressRange, kind: SegmentKind) {
        self.forget_overlapped(range);
        let id = SegmentId(self.births);
        // A recording of 2^32 segments would take 100 GB. All further segments share the last ordinal.
        self.births = self.births.saturating_add(1);
        self.live.insert(range.start, LiveSegment { id, end: range.end, kind });
    }

    /// Removes the segments that overlap the range. Live segments never overlap, so the recording must lack the release
    /// of the removed ones.
    fn forget_overlapped(&mut self, range: AddressRange) {
        while let Some((start, segment)) = self.live.range(..range.end).next_back()
            && segment.end > range.start
        {
            let start = *start;
            self.live.remove(&start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, size_bytes: u64) -> AddressRange {
        AddressRange::new(Address(start), size_bytes)
    }

    fn place(segments: &LiveSegments, address: u64) -> Option<(u32, u64)> {
        segments.placement(Address(address)).map(|placement| (placement.segment.0, placement.offset_bytes))
    }

    #[test]
    fn fixed_segments_are_numbered_by_birth_and_numbers_are_never_reused() {
        let mut segments = LiveSegments::default();
        segments.allocated(range(5000, 100));
        segments.allocated(range(1000, 100));
        assert_eq!(place(&segments, 1050), Some((1, 50)));
        assert_eq!(place(&segments, 5000), Some((0, 0)));
        assert_eq!(place(&segments, 1100), None);
        assert_eq!(place(&segments, 999), None);
        segments.freed(Address(5000));
        assert_eq!(place(&segments, 5000), None);
        segments.allocated(range(5000, 100));
        assert_eq!(place(&segments, 5000), Some((2, 0)));
    }

    #[test]
    fn an_expandable_segment_keeps_its_number_while_it_grows_and_has_holes() {
        let mut segments = LiveSegments::default();
        let (stream, other) = (RawStream(0), RawStream(9));
        segments.mapped(range(1000, 20), stream);
        segments.mapped(range(1020, 20), stream);
        segments.mapped(range(3000, 20), other);
        assert_eq!(place(&segments, 1030), Some((0, 30)));
        assert_eq!(place(&segments, 3001), Some((1, 1)));
        segments.unmapped(range(1000, 20));
        segments.mapped(range(1000, 20), stream);
        segments.mapped(range(1040, 20), stream);
        assert_eq!(place(&segments, 1059), Some((0, 59)));
        segments.unmapped(range(1000, 60));
        assert_eq!(place(&segments, 1000), None);
        segments.mapped(range(1000, 20), stream);
        assert_eq!(place(&segments, 1000), Some((2, 0)));
    }

    #[test]
    fn a_mapping_adjacent_to_another_streams_segment_is_a_birth() {
        let mut segments = LiveSegments::default();
        segments.mapped(range(1000, 20), RawStream(0));
        segments.mapped(range(1020, 20), RawStream(1));
        segments.allocated(range(1040, 20));
        segments.mapped(range(1060, 20), RawStream(1));
        assert_eq!([1000, 1020, 1040, 1060].map(|address| place(&segments, address).unwrap().0), [0, 1, 2, 3]);
    }

    #[test]
    fn a_new_segment_replaces_those_that_it_overlaps() {
        let mut segments = LiveSegments::default();
        segments.allocated(range(1000, 100));
        segments.allocated(range(1100, 100));
        segments.allocated(range(1050, 100));
        assert_eq!(place(&segments, 1000), None);
        assert_eq!(place(&segments, 1149), Some((2, 99)));
        assert_eq!(place(&segments, 1150), None);
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_do_not_overflow() {
        let mut segments = LiveSegments::default();
        segments.allocated(range(u64::MAX - 10, u64::MAX));
        segments.mapped(range(u64::MAX, 5), RawStream(0));
        segments.unmapped(range(u64::MAX, u64::MAX));
        assert_eq!(place(&segments, u64::MAX - 1), Some((0, 9)));
    }
}
