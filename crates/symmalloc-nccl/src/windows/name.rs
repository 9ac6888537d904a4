//! The name of a segment that all ranks share.

use crate::windows::keys::Generation;
use std::fmt;
use symmalloc_core::SegmentId;
use symmalloc_core::ids::StreamGroup;

/// A segment's name, identical on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct SegmentName {
    /// Ordinal of the segment's pool among the symmetric pools.
    pub pool: u32,
    /// The streams that share its heap.
    pub group: StreamGroup,
    /// Its birth ordinal in the heap.
    pub segment: SegmentId,
}

impl SegmentName {
    /// Returns the name of a segment of the symmetric pool with this ordinal.
    pub(crate) fn of(pool: u32, segment: Generation) -> Self {
        SegmentName { pool, group: segment.heap.group, segment: segment.segment }
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {} of symmetric pool {}", self.segment.0, self.pool)?;
        self.group.stream().map_or(Ok(()), |stream| write!(f, ", stream {}", stream.0))
    }
}
