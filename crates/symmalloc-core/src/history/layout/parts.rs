//! The parts of a layout: heaps, segments, memory, allocations.

use crate::config::PoolConfig;
use crate::config::size_rules::SizeClass;
use crate::history::digest::Digest;
use crate::types::ids::{SegmentId, StreamGroup, StreamId};
use smallvec::SmallVec;

/// The state that determines a pool's future decisions. See the [module documentation](crate::history::layout).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    config: PoolConfig,
    granularity_bytes: u64,
    total_limit_bytes: Option<u64>,
    heaps: Vec<HeapLayout>,
}

/// One heap of a [`Layout`].
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// The streams that share it.
    pub group: StreamGroup,
    /// The digest of its history.
    pub digest: Digest,
    /// The id that its next segment gets.
    pub next_segment: SegmentId,
    /// Its live segments, by id.
    pub segments: Vec<SegmentLayout>,
}

/// One live segment of a [`HeapLayout`].
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    /// Ordinal in its heap.
    pub id: SegmentId,
    /// The size class of the requests that it serves. Only fixed segments separate small requests; all other segments
    /// are `Large`.
    pub class: SizeClass,
    /// Distance of its first address from the pool's base, in bytes; `None` if the pool has no base.
    pub base_offset_bytes: Option<u64>,
    /// The parts that are backed by memory, in offset order and separated by holes. At least one.
    pub extents: Vec<Extent>,
    /// The live allocations, by offset, each within one extent.
    pub allocations: Vec<AllocationLayout>,
}

/// A part of a segment.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the segment, in bytes.
    pub offset_bytes: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// One live allocation of a [`SegmentLayout`].
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocationLayout {
    /// Offset in the segment, in bytes.
    pub offset_bytes: u64,
    /// Bytes of its block.
    pub size_bytes: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The stream it was allocated for.
    pub stream: StreamId,
    /// The other streams that use it, ascending.
    pub used_by: SmallVec<[StreamId; 2]>,
    /// The program's name for the allocation.
    pub name: Option<Box<str>>,
}

impl Layout {
    /// Creates a layout of these parts without checking them, for code that reads layouts from text. Restoring an
    /// impossible layout panics.
    #[doc(hidden)]
    pub fn of_parts(
        config: PoolConfig,
        granularity_bytes: u64,
        total_limit_bytes: Option<u64>,
        heaps: Vec<HeapLayout>,
    ) -> Self {
        Layout { config, granularity_bytes, total_limit_bytes, heaps }
    }

    /// Returns the pool's configuration.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Returns the backend's granularity in bytes.
    pub fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    /// Returns the limit over all pools of the allocator, in bytes.
    pub fn total_limit_bytes(&self) -> Option<u64> {
        self.total_limit_bytes
    }

    /// Returns the heaps that were ever used, by stream.
    #[doc(hidden)]
    pub fn heaps(&self) -> &[HeapLayout] {
        &self.heaps
    }

    /// Returns the bytes of device memory that the pool held.
    pub fn reserved_bytes(&self) -> u64 {
        self.heaps.iter().fold(0, |sum, heap| sum.saturating_add(heap.reserved_bytes()))
    }

    /// Returns the number of live allocations of at least one byte.
    pub fn allocation_count(&self) -> usize {
        self.heaps.iter().flat_map(|heap| &heap.segments).map(|segment| segment.allocations.len()).sum()
    }
}

impl HeapLayout {
    /// Returns the bytes of device memory that the heap held.
    pub fn reserved_bytes(&self) -> u64 {
        let extents = self.segments.iter().flat_map(|segment| &segment.extents);
        extents.fold(0, |sum, extent| sum.saturating_add(extent.size_bytes))
    }
}

impl SegmentLayout {
    /// Returns the offset at which the segment's blocks end, in bytes.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.extents.last().map_or(0, |extent| extent.end_bytes())
    }
}

impl Extent {
    /// Returns the offset of its end, in bytes.
    pub fn end_bytes(self) -> u64 {
        self.offset_bytes + self.size_bytes
    }
}

impl AllocationLayout {
    /// Returns the offset of the end of its block, in bytes.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.size_bytes
    }
}
