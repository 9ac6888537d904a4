//! What can be wrong with the text of a layout: a line, or a statement that contradicts those before it.

use super::line::KEYWORDS;
use super::{MAGIC, VERSION};
use crate::ids::{SegmentId, StreamId};
use crate::nearest::DidYouMean;
use crate::text::{LineError, NAME_BYTES_MAX};

/// Why a layout could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutTextError {
    /// A line by itself is wrong.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line is not a layout's.
    #[error("not a layout: the first line must be `{MAGIC} {VERSION}`; decompress a compressed layout first")]
    NotALayout,
    /// The layout was written by a later version of the format.
    #[error("the layout has version {found}, but this library reads version {VERSION}: use a newer one")]
    UnsupportedVersion {
        /// The version the layout states.
        found: u64,
    },
    /// A line starts with a word that says nothing here.
    #[error("line {line}, column {column}: unknown keyword{}; the keywords are {}",
        DidYouMean(*nearest), KEYWORDS.join(", "))]
    UnknownKeyword {
        /// The line.
        line: u64,
        /// Where the word starts.
        column: usize,
        /// The keyword that was probably meant.
        nearest: Option<&'static str>,
    },
    /// A line stands where it cannot.
    #[error("line {line}: misplaced; here must stand {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// What may stand there.
        expected: &'static str,
    },
    /// No heap can look like that.
    #[error("line {line}: {source}")]
    Contradiction {
        /// The line.
        line: u64,
        /// What contradicts what.
        source: Contradiction,
    },
    /// The input ends without an `end` line: whoever wrote it was stopped.
    #[error("line {line}: the layout is torn; save it again")]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states another number of lines than there are: some were lost, or edited.
    #[error(
        "line {line}: the layout states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The number stated.
        stated: u64,
        /// How many lines there are between the first one and this one.
        lines: u64,
    },
    /// Something follows the `end` line.
    #[error("line {line}: the layout ended before this line; a file holds one layout")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

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
    /// The segment was not born yet.
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
