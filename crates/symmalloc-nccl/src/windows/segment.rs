//! The names of a segment.
//!
//! | type | fields | unique in | equal on all ranks |
//! |---|---|---|---|
//! | [`SegmentId`] | birth ordinal | its heap | of a symmetric pool: yes |
//! | [`HeapSegment`] | heap, ordinal | the allocator | no: ranks may number pools differently |
//! | [`SymmetricSegment`] | symmetric pool, streams, ordinal | the symmetric pools | yes: used in messages |
//! | [`SegmentKey`](crate::SegmentKey) | heap segment, address, size | the process | no: a cache key |

use std::fmt;
use symmalloc_core::SegmentId;
use symmalloc_core::ids::{HeapId, StreamGroup};
use symmalloc_core::segment_log::SegmentEvent;

/// The identity of a segment in its allocator. It is never reused, even if another segment gets the segment's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct HeapSegment {
    /// The segment's heap.
    pub heap: HeapId,
    /// The segment's number in its heap, in order of creation.
    pub id: SegmentId,
}

impl HeapSegment {
    /// Returns the segment of an event.
    pub(crate) fn of(event: &SegmentEvent) -> Self {
        HeapSegment { heap: event.heap, id: event.segment }
    }
}

impl fmt::Display for HeapSegment {
    /// Writes `p1 s0 g7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.heap, self.id)
    }
}

/// A segment of a symmetric pool, in terms that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct SymmetricSegment {
    /// Ordinal of the segment's pool among the symmetric pools.
    pub pool: u32,
    /// The streams that share the segment's heap.
    pub group: StreamGroup,
    /// The segment's number in its heap, in order of creation.
    pub id: SegmentId,
}

impl SymmetricSegment {
    /// Returns the name of a segment of the symmetric pool with this ordinal.
    pub(crate) fn of(pool: u32, segment: HeapSegment) -> Self {
        SymmetricSegment { pool, group: segment.heap.group, id: segment.id }
    }
}

impl fmt::Display for SymmetricSegment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {} of symmetric pool {}", self.id.0, self.pool)?;
        match self.group {
            StreamGroup::One(stream) => write!(f, ", stream {}", stream.0),
            StreamGroup::Group(first) => write!(f, ", group of stream {}", first.0),
            _ => Ok(()),
        }
    }
}
