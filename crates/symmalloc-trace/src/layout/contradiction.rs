//! What no heap can look like.

use symmalloc_core::ids::{SegmentId, StreamId};
use symmalloc_core::op::NAME_BYTES_MAX;

/// Something that no heap can look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Contradiction {
    /// The granularity is not one.
    #[error("a granularity is a power of two from 512 to 2^30 bytes")]
    Granularity,
    /// The pool's streams share one heap, or have one each.
    #[error("a pool whose streams share has one heap, `shared`; any other has one for each stream")]
    HeapPolicy,
    /// Heaps stand in the order of their streams, each once.
    #[error("the heap of {stream} stands behind one of the same or a later stream")]
    HeapOutOfOrder {
        /// The heap's stream.
        stream: StreamId,
    },
    /// A heap stands in the layout when it has a history.
    #[error("a heap without ops and segments is left out")]
    FreshHeap,
    /// A heap counts more ops than there can be.
    #[error("a heap has at most {max} ops")]
    TooManyOps {
        /// The largest number.
        max: u64,
    },
    /// A heap counts more births than there can be.
    #[error("a heap has at most {max} births of segments")]
    TooManySegments {
        /// The largest number.
        max: u32,
    },
    /// Segments stand in the order of their ids, each once.
    #[error("{segment} stands behind a segment of the same or a higher id")]
    SegmentOutOfOrder {
        /// The segment.
        segment: SegmentId,
    },
    /// The segment was not created yet.
    #[error("{segment} is not born yet: the heap's next one is {next}")]
    SegmentNotBorn {
        /// The segment.
        segment: SegmentId,
        /// The id that the next segment gets.
        next: SegmentId,
    },
    /// Only fixed segments serve small requests apart.
    #[error("{segment} is small, but only fixed segments are")]
    SegmentClass {
        /// The segment.
        segment: SegmentId,
    },
    /// A reserved heap has one segment.
    #[error("a heap of a reserved pool has one segment, g0")]
    SecondSegment,
    /// A segment is backed by memory somewhere.
    #[error("{segment} has no memory")]
    NoMemory {
        /// The segment.
        segment: SegmentId,
    },
    /// Memory begins and ends at granules.
    #[error("memory begins and ends at multiples of the granularity, and is not empty")]
    MemoryGranule,
    /// Extents stand in order, with a hole between each two.
    #[error("memory begins behind the memory before it, with a hole between them")]
    MemoryOutOfOrder,
    /// A segment ends within its range.
    #[error("a segment of this pool has {expected_bytes} bytes at most, with memory from 0 on unless it is expandable")]
    MemoryOutOfRange {
        /// The largest size, in bytes; of a reserved segment, its size.
        expected_bytes: u64,
    },
    /// An allocation's place and size are not a block's.
    #[error("a block begins and ends at multiples of 512 bytes, and is not empty")]
    Unaligned,
    /// Allocations stand in order.
    #[error("an allocation begins behind the end of the one before it")]
    AllocationOutOfOrder,
    /// An allocation lies in memory.
    #[error("an allocation lies within one piece of memory of its segment")]
    AllocationOutside,
    /// A request fits its block.
    #[error("an allocation was asked for with 1 to {size_bytes} bytes")]
    Request {
        /// Bytes of the block.
        size_bytes: u64,
    },
    /// A heap of one stream has allocations of that stream.
    #[error("{stream} has a heap of its own")]
    OtherStream {
        /// The allocation's stream.
        stream: StreamId,
    },
    /// The other users of an allocation stand in order, each once.
    #[error("{stream} allocated it, or stands behind the same or a later stream")]
    UserOutOfOrder {
        /// The user.
        stream: StreamId,
    },
    /// The name is longer than a layout can hold.
    #[error("the allocation's name has {bytes} bytes, but at most {NAME_BYTES_MAX} are allowed; shorten it")]
    NameTooLong {
        /// Length of the name in bytes.
        bytes: usize,
    },
}
