//! Identifiers of streams, pools, heaps and segments, and the placement of a block.
//!
//! Every id is a small number, assigned in the order in which the *program* creates the objects. None is derived from
//! an address, a raw handle or a clock, so the same program gets the same ids on every rank (rule D1).

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $visible:vis struct $name:ident($repr:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visible struct $name(pub $repr);

        impl $name {
            /// Returns the id as an index into a dense table.
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
    /// A logical stream, numbered in the order in which the program registers streams. Never a raw handle.
    pub struct StreamId(u16), "s"
}

impl StreamId {
    /// The largest id: an allocator has 65,535 streams.
    pub const MAX: StreamId = StreamId(u16::MAX - 1);
}

id! {
    /// A pool, numbered in the order in which the program creates pools, or by the key that the program chose. Pool 0 is
    /// the default pool. Never reused.
    pub struct PoolId(u32), "p"
}

id! {
    /// The number of a heap in its allocator, in creation order.
    ///
    /// If several threads create heaps at once, the numbers may differ from rank to rank. Nothing is ordered by them, and
    /// ranks compare heaps by [`HeapId`].
    pub(crate) struct HeapNumber(u32), "h"
}

id! {
    /// The ordinal of a segment in its heap. It is also the allocation-*sequence* counter of rule D2: backing memory
    /// receives it when it is acquired, and every block split from that memory inherits it. Never reused.
    pub struct SegmentId(u32), "g"
}

id! {
    /// The identifier of an allocation, unique within one trace. The program or the recorder assigns it.
    pub struct AllocationId(u64), "a"
}

id! {
    /// An observer of a pool's segments, numbered in registration order. Never reused.
    pub struct ObserverId(u32), "o"
}

/// The streams that share a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StreamGroup {
    /// All streams of the pool: `streams:shared`.
    All,
    /// One stream: `streams:separate`.
    One(StreamId),
    /// The streams of the group with this first stream: `streams:grouped`. Streams may join the group later.
    Group(StreamId),
}

impl StreamGroup {
    /// Returns the only stream of the heap, or `None` if several may share it.
    #[inline]
    pub const fn stream(self) -> Option<StreamId> {
        match self {
            StreamGroup::All | StreamGroup::Group(_) => None,
            StreamGroup::One(stream) => Some(stream),
        }
    }

    /// Returns the first of these streams, which identifies the heap in its pool. `None` if all streams share the heap,
    /// so that any of them identifies it.
    #[inline]
    pub const fn first(self) -> Option<StreamId> {
        match self {
            StreamGroup::All => None,
            StreamGroup::One(stream) | StreamGroup::Group(stream) => Some(stream),
        }
    }

    /// Returns `false` if these streams certainly do not include `stream`. A group does not list its members, but all
    /// of them are registered after its first stream.
    pub fn may_include(self, stream: StreamId) -> bool {
        match self {
            StreamGroup::All => true,
            StreamGroup::One(own) => own == stream,
            StreamGroup::Group(first) => first <= stream,
        }
    }
}

/// Numbers of groups in messages between ranks.
#[doc(hidden)]
impl StreamGroup {
    /// Added to the number of a group's first stream.
    const GROUP: u32 = 1 << 16;

    /// Returns the number that encodes these streams: the number of the stream, 65,536 plus the number of the first
    /// stream for a group, and `u32::MAX` for all streams.
    pub const fn code(self) -> u32 {
        match self {
            StreamGroup::All => u32::MAX,
            StreamGroup::One(stream) => stream.0 as u32,
            StreamGroup::Group(first) => Self::GROUP | first.0 as u32,
        }
    }

    /// Returns the streams with this number, if there are any.
    pub fn from_code(code: u32) -> Option<Self> {
        let stream = |number| u16::try_from(number).ok().map(StreamId).filter(|stream| *stream <= StreamId::MAX);
        match code {
            u32::MAX => Some(StreamGroup::All),
            Self::GROUP.. => stream(code - Self::GROUP).map(StreamGroup::Group),
            _ => stream(code).map(StreamGroup::One),
        }
    }
}

impl fmt::Display for StreamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamGroup::All => f.write_str("shared"),
            StreamGroup::One(stream) => write!(f, "{stream}"),
            StreamGroup::Group(first) => write!(f, "{first}+"),
        }
    }
}

/// Identifies a heap by its pool and the streams that share the heap. It is the same on every rank.
///
/// Displayed as `p1 s0`, as `p1 s0+` for the group of s0, and as `p1` if all streams share the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HeapId {
    /// The pool.
    pub pool: PoolId,
    /// The streams that share the heap.
    pub group: StreamGroup,
}

impl HeapId {
    /// Returns the only stream of the heap, or `None` if several may share it.
    #[inline]
    pub const fn stream(self) -> Option<StreamId> {
        self.group.stream()
    }
}

impl fmt::Display for HeapId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            StreamGroup::All => write!(f, "{}", self.pool),
            group => write!(f, "{} {group}", self.pool),
        }
    }
}

impl PoolId {
    /// The pool that always exists.
    pub const DEFAULT: PoolId = PoolId(0);
    /// The largest key that a program may choose for a pool.
    pub const KEY_MAX: PoolId = PoolId(u16::MAX as u32);
}

/// The position of a block: the part of a decision that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// The segment, by its ordinal in the heap.
    pub segment: SegmentId,
    /// Offset from the start of the segment, in bytes.
    pub offset_bytes: u64,
}

impl Placement {
    /// The placement of allocations of zero bytes, which are in no segment.
    pub const NOWHERE: Placement = Placement { segment: SegmentId(u32::MAX), offset_bytes: 0 };
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.segment.0, self.offset_bytes)
    }
}
