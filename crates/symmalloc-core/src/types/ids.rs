//! The names of things: streams, pools, heaps, segments, and where a block lies.
//!
//! Every id is a small number given in the order in which the *program* made the thing. None is derived from an
//! address, a raw handle or a clock, so the same program gives the same ids on every rank (rule D1).

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $visible:vis struct $name:ident($repr:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visible struct $name(pub $repr);

        impl $name {
            /// The id as an index into a dense table.
            #[inline]
            $visible fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id! {
    /// A logical stream, numbered in the order in which the program registers streams; never the raw handle.
    pub struct StreamId(u16), "s"
}

id! {
    /// A pool, numbered in the order in which the program creates pools. Pool 0 is the default pool. Never reused.
    pub struct PoolId(u32), "p"
}

id! {
    /// A heap: one (pool, stream), or one pool whose streams share. Numbered in creation order within an allocator.
    ///
    /// When several threads make heaps at once their numbers may differ from rank to rank; nothing is ordered by
    /// them. What ranks compare names a heap by its pool and stream.
    pub(crate) struct HeapId(u32), "h"
}

id! {
    /// A segment's birth ordinal in its heap. It is also the allocation-*sequence* counter of rule D2: given to
    /// backing memory when it is obtained and inherited by every block split from it. Never reused.
    pub struct SegmentId(u32), "g"
}

id! {
    /// The name of an allocation within one trace. Given by the program (or the recorder), unique in the trace.
    pub struct AllocationId(u64), "a"
}

id! {
    /// An observer of a pool's segments, numbered in the order in which observers come. Never reused.
    pub struct ObserverId(u32), "o"
}

impl PoolId {
    /// The pool that exists from the start.
    pub const DEFAULT: PoolId = PoolId(0);
}

/// Where a block lies: the part of a decision that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// The segment, by birth ordinal in its heap.
    pub segment: SegmentId,
    /// Bytes from the start of the segment.
    pub offset_bytes: u64,
}

impl Placement {
    /// Where allocations of zero bytes lie: in no segment.
    pub const NOWHERE: Placement = Placement { segment: SegmentId(u32::MAX), offset_bytes: 0 };
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.segment.0, self.offset_bytes)
    }
}
