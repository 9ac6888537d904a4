//! Contradictions: statements of a layout that no heap can satisfy.

use symmalloc_core::ids::{SegmentId, StreamId};
use symmalloc_core::op::NAME_BYTES_MAX;

/// A statement of a layout that no heap can satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Contradiction {
    /// The granularity is not a power of two, or is out of range.
    #[error("the granularity must be a power of two from 512 to 2^30 bytes")]
    Granularity,
    /// The heaps do not match the pool's stream policy: one shared heap, one heap per group, or one heap per stream.
    #[error(
        "a pool with shared streams has one heap, `shared`; with grouped streams, one heap per group, such as `s0+`; any \
         other pool has one heap per stream"
    )]
    HeapPolicy,
    /// Heaps are not in ascending order of their streams.
    #[error("the heap of {stream} follows one of the same or a later stream; order heaps by stream")]
    HeapOutOfOrder {
        /// The heap's stream, or the first of its group.
        stream: StreamId,
    },
    /// A heap without any history is listed.
    #[error("a heap without ops and segments must be omitted")]
    FreshHeap,
    /// A heap's op count exceeds the maximum.
    #[error("a heap has at most {max} ops")]
    TooManyOps {
        /// The maximum.
        max: u64,
    },
    /// The number of segments that a heap has ever created exceeds the maximum.
    #[error("a heap creates at most {max} segments")]
    TooManySegments {
        /// The maximum.
        max: u32,
    },
    /// Segments are not in ascending order of their ids.
    #[error("{segment} follows a segment of the same or a higher id; order segments by id")]
    SegmentOutOfOrder {
        /// The segment.
        segment: SegmentId,
    },
    /// The segment's id is not below the id that the heap's next segment gets.
    #[error("{segment} does not exist yet: the heap's next segment is {next}")]
    SegmentNotBorn {
        /// The segment.
        segment: SegmentId,
        /// The id that the next segment gets.
        next: SegmentId,
    },
    /// A small segment in a pool without fixed segments. Only pools with fixed segments serve small requests from
    /// separate segments.
    #[error("{segment} is small, but only a pool with fixed segments has small ones")]
    SegmentClass {
        /// The segment.
        segment: SegmentId,
    },
    /// A segment of a pool with a base has no offset from the base, an invalid one, or that of another segment. A segment
    /// of any other pool has an offset.
    #[error(
        "{segment} must have its own offset from the base, a multiple of the granularity below 1 TiB, exactly if the pool \
         has a base"
    )]
    BaseOffset {
        /// The segment.
        segment: SegmentId,
    },
    /// A second segment in a heap of a reserved pool.
    #[error("a heap of a reserved pool has one segment, g0")]
    SecondSegment,
    /// A segment without memory.
    #[error("{segment} has no memory")]
    NoMemory {
        /// The segment.
        segment: SegmentId,
    },
    /// An extent is empty, or not aligned to the granularity.
    #[error("memory must be aligned to the granularity and not empty")]
    MemoryGranule,
    /// Extents are not in ascending order, or two of them touch.
    #[error("memory must begin after the preceding memory, with a gap between them")]
    MemoryOutOfOrder,
    /// An extent exceeds the segment's range.
    #[error(
        "a segment of this pool has at most {expected_bytes} bytes, with memory from offset 0 on unless it is expandable"
    )]
    MemoryOutOfRange {
        /// Maximum size in bytes; for a reserved segment, its exact size.
        expected_bytes: u64,
    },
    /// An allocation's offset or size is not a multiple of 512 bytes.
    #[error("a block must be aligned to 512 bytes and not empty")]
    Unaligned,
    /// Allocations overlap, or are not in ascending order.
    #[error("an allocation must begin at or after the end of the preceding one")]
    AllocationOutOfOrder,
    /// An allocation does not lie inside a single extent.
    #[error("an allocation must lie within one extent of its segment's memory")]
    AllocationOutside,
    /// The requested size does not fit the block.
    #[error("the requested size must be from 1 to {size_bytes} bytes")]
    Request {
        /// Size of the block in bytes.
        size_bytes: u64,
    },
    /// An allocation belongs to a different stream than its heap.
    #[error("the allocation belongs to {stream}, but its heap belongs to another stream")]
    DifferentStream {
        /// The allocation's stream.
        stream: StreamId,
    },
    /// The additional users of an allocation are not in ascending order, or include its owner.
    #[error("{stream} owns the allocation, or is repeated or out of order; list the other users in ascending order")]
    UserOutOfOrder {
        /// The user.
        stream: StreamId,
    },
    /// The name exceeds the maximum length.
    #[error("the allocation's name has {bytes} bytes, but at most {NAME_BYTES_MAX} are allowed; shorten it")]
    NameTooLong {
        /// Length of the name in bytes.
        bytes: usize,
    },
}
