//! The report of a disagreement, as text for people and as fields for programs. It is the same on every rank.

use super::point::Point;
use super::question::Answer;
use super::ranks::{RankSet, Ranks};
use std::fmt;
use symmalloc_core::histories::{Mark, unpack_op, unpack_placement};
use symmalloc_core::ids::{Placement, SegmentId, StreamGroup, StreamId};
use symmalloc_core::op::Contents;
use symmalloc_core::units::Amount;

/// A report of how the ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disagreement {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of message rounds that the comparison took.
    pub rounds: u32,
    /// The difference that was found.
    pub difference: Difference,
}

/// A difference between ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// The configurations differ. Nothing else was compared.
    Configuration(Vec<PolicyDifference>),
    /// The histories differ.
    History {
        /// The heap that differs first in program order. If several host threads use the pools, it is one of the first.
        first: HeapDifference,
        /// The other heaps that differ, in program order. They are often a consequence of the first.
        others: Vec<HeapDifference>,
    },
    /// The histories are equal, but the ranks reached different kinds of points in the program. A rank has skipped an
    /// agreement, or will run one that the others have already completed.
    Point(Vec<(RankSet, Point)>),
}

/// A configuration key whose value is not the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PolicyDifference {
    /// The symmetric pool, by ordinal; `None` for a setting that applies to all pools.
    pub pool: Option<u32>,
    /// The key, as in `docs/configuration.md`, with sizes in bytes; `pool` if some ranks did not create the pool.
    pub key: Box<str>,
    /// The values with the ranks that have them; `None` where the key is not set.
    pub values: Vec<(RankSet, Option<Box<str>>)>,
}

/// The first difference in one heap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapDifference {
    /// The pool's ordinal among symmetric pools; see
    /// [`Allocator::symmetric_pool`](symmalloc_core::Allocator::symmetric_pool).
    pub pool: u32,
    /// The streams that share the heap.
    pub streams: StreamGroup,
    /// The first op of the heap that differs, counted from 0. If the histories do not reach back far enough, the first
    /// op that may differ.
    pub first_op: u64,
    /// Equal to `first_op` if the difference is exact; otherwise the last op that may be the first to differ.
    pub last_op: u64,
    /// The op's number in program order over all symmetric pools, counted from the last agreement; `None` if no rank
    /// remembers it.
    pub order: Option<u64>,
    /// Groups of ranks that performed the same op, ordered by the first rank of each group.
    pub groups: Vec<Group>,
    /// The likely cause.
    pub cause: Cause,
}

/// A group of ranks that performed the same op.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The ranks.
    pub ranks: RankSet,
    /// The action that they performed.
    pub action: Action,
    /// The program's name for the allocation on the first of these ranks, truncated to 64 bytes.
    pub name: Option<Box<str>>,
}

/// An op of a heap with its decision. Sizes are in requested bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// An allocation.
    Allocated {
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
        /// The placement of the allocation.
        placement: Placement,
    },
    /// A free.
    Freed {
        /// The stream.
        stream: StreamId,
        /// The placement of the allocation.
        placement: Placement,
    },
    /// A free of a zero-byte allocation.
    FreedNothing,
    /// A recorded use of an allocation by another stream.
    RecordedUse {
        /// The stream that uses the allocation.
        stream: StreamId,
        /// The placement of the allocation.
        placement: Placement,
    },
    /// Memory acquired for the preceding op.
    Obtained {
        /// The stream.
        stream: StreamId,
        /// Acquired bytes.
        size_bytes: u64,
    },
    /// A reservation of `target_bytes`, for which `obtained_bytes` were acquired.
    Reserved {
        /// The stream.
        stream: StreamId,
        /// Bytes of reserved memory to reach.
        target_bytes: u64,
        /// Acquired bytes.
        obtained_bytes: u64,
    },
    /// A trim, recorded after the ops for everything that it released.
    Trimmed {
        /// Total number of released bytes.
        given_up_bytes: u64,
    },
    /// Part of a trim: some memory of a live segment was released.
    Shrunk {
        /// The placement of the memory.
        placement: Placement,
        /// Released bytes.
        size_bytes: u64,
    },
    /// Part of a trim: a segment without allocations was removed.
    Died {
        /// The segment.
        segment: SegmentId,
        /// Bytes of the segment.
        size_bytes: u64,
    },
    /// A configured limit refused memory.
    RefusedByLimit {
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
    },
    /// The driver failed to allocate memory or, if the size is 0, to release memory.
    RefusedByDriver {
        /// The stream.
        stream: StreamId,
        /// Requested bytes; 0 if the driver failed to release memory.
        size_bytes: u64,
    },
    /// The heap's only segment or address range was full.
    RefusedBySegment {
        /// The stream.
        stream: StreamId,
        /// Requested bytes.
        size_bytes: u64,
    },
    /// The pool was destroyed.
    Destroyed,
    /// The pool was reset. The frees of its live allocations precede this op.
    Reset,
    /// Plans were adopted or, if the size is 0, dropped.
    AdoptedPlans {
        /// Bytes that the plans reserve.
        plan_bytes: u64,
    },
    /// A step began.
    BeganStep {
        /// The key that the program gave to the step.
        key: u64,
    },
    /// A step ended.
    EndedStep {
        /// Number of allocations that were placed by the plan.
        planned: u64,
    },
    /// The pool was put to sleep.
    Sleep {
        /// The treatment of the contents, as an index into [`Contents::ALL`].
        contents: u64,
    },
    /// The pool was woken.
    Wake,
    /// A step deviated from its plan.
    LeftPlan {
        /// The index of the allocation within the step.
        number: u64,
    },
    /// A heap of a pool with a base acquired a range of addresses.
    Carved {
        /// Size of the range in bytes.
        range_bytes: u64,
        /// Distance from the base in bytes.
        base_offset_bytes: u64,
    },
    /// No op: the heap has no further op on these ranks.
    Nothing,
    /// The op is older than the histories of these ranks.
    Forgotten,
    /// An op that this version does not recognize.
    Unknown {
        /// The op, encoded as in digests.
        op: u64,
        /// The decision, encoded as in digests.
        decision: u64,
    },
}

/// The likely cause of a difference, guessed from the ops around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The ranks made different requests, such as different sizes.
    DifferentRequest,
    /// The ranks performed the same ops in a different order.
    DifferentOrder,
    /// Memory was refused on some ranks.
    RefusedMemory,
    /// Some ranks did not free an allocation, or freed it at a different time.
    MissingFree,
    /// Some ranks did not record that another stream uses an allocation.
    MissingRecordUse,
    /// Some ranks performed an op that the others did not.
    OpOnSomeRanks,
    /// Some ranks performed the op on a different stream, or registered an additional stream.
    DifferentStream,
    /// The same request in the same heap was placed differently. This indicates a bug in the allocator.
    DifferentDecision,
    /// The same request acquired a different amount of memory, because heaps used up a shared limit in a different
    /// order.
    DifferentGrowth,
    /// The ranks adopted different plans, or used different keys for a step.
    DifferentPlan,
    /// The histories do not reach back far enough to show the first difference.
    OlderThanHistory,
    /// Not determined, because other heaps differ earlier. The difference is often a consequence of theirs.
    Consequence,
    /// No cause could be determined.
    Unknown,
}

impl Action {
    pub(crate) fn new(answer: Answer) -> Self {
        let (op, decision) = match answer {
            Answer::Ended => return Action::Nothing,
            Answer::Forgotten { .. } => return Action::Forgotten,
            Answer::Op { op, decision, .. } => (op, decision),
        };
        let Some((mark, stream, size_bytes)) = unpack_op(op) else { return Action::Unknown { op, decision } };
        let placement = unpack_placement(decision);
        match mark {
            Mark::Allocate => Action::Allocated { stream, size_bytes, placement },
            Mark::AllocateNothing => Action::Allocated { stream, size_bytes: 0, placement: Placement::NOWHERE },
            Mark::Free => Action::Freed { stream, placement },
            Mark::FreeNothing => Action::FreedNothing,
            Mark::RecordUse => Action::RecordedUse { stream, placement },
            Mark::Reserve => Action::Reserved { stream, target_bytes: size_bytes, obtained_bytes: decision },
            Mark::Trim => Action::Trimmed { given_up_bytes: decision },
            Mark::Shrink => Action::Shrunk { placement, size_bytes },
            Mark::Death => Action::Died { segment: placement.segment, size_bytes },
            Mark::RefusedByLimit => Action::RefusedByLimit { stream, size_bytes },
            Mark::RefusedByDriver => Action::RefusedByDriver { stream, size_bytes },
            Mark::RefusedBySegment => Action::RefusedBySegment { stream, size_bytes },
            Mark::Destroy => Action::Destroyed,
            Mark::Obtain => Action::Obtained { stream, size_bytes },
            Mark::Adopt => Action::AdoptedPlans { plan_bytes: size_bytes },
            Mark::BeginStep => Action::BeganStep { key: decision },
            Mark::EndStep => Action::EndedStep { planned: decision },
            Mark::Differ => Action::LeftPlan { number: decision },
            Mark::Sleep => Action::Sleep { contents: size_bytes },
            Mark::Wake => Action::Wake,
            Mark::Reset => Action::Reset,
            Mark::Carve => Action::Carved { range_bytes: size_bytes, base_offset_bytes: decision },
        }
    }
}

impl Cause {
    /// Returns a short, stable name for use in programs.
    pub fn name(self) -> &'static str {
        match self {
            Cause::DifferentRequest => "different_request",
            Cause::DifferentOrder => "different_order",
            Cause::RefusedMemory => "refused_memory",
            Cause::MissingFree => "missing_free",
            Cause::MissingRecordUse => "missing_record_use",
            Cause::OpOnSomeRanks => "op_on_some_ranks",
            Cause::DifferentStream => "different_stream",
            Cause::DifferentDecision => "different_decision",
            Cause::DifferentGrowth => "different_growth",
            Cause::DifferentPlan => "different_plan",
            Cause::OlderThanHistory => "older_than_history",
            Cause::Consequence => "consequence",
            Cause::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::DifferentRequest => "the ranks made different requests",
            Cause::DifferentOrder => "the ranks performed the same ops in a different order",
            Cause::RefusedMemory => {
                "memory was refused on some ranks: make all ranks handle the refusal in the same way, or fail together"
            }
            Cause::MissingFree => "some ranks did not free an allocation at this point",
            Cause::MissingRecordUse => "some ranks did not record the use of an allocation by another stream",
            Cause::OpOnSomeRanks => "some ranks performed an op that the others did not",
            Cause::DifferentStream => {
                "some ranks performed the op on a different stream: register all streams in the same order on every rank"
            }
            Cause::DifferentDecision => {
                "the same request was placed differently: please report this bug, with the traces of two of the ranks"
            }
            Cause::DifferentGrowth => {
                "the ranks obtained different amounts of memory: check whether heaps used up a shared limit in another order"
            }
            Cause::DifferentPlan => {
                "the ranks follow different plans or step keys: use the same plan file and keys on every rank"
            }
            Cause::OlderThanHistory => "the difference is older than the recorded history: agree more often, or raise history_ops",
            Cause::Consequence => "not determined",
            Cause::Unknown => "unknown",
        })
    }
}

impl Disagreement {
    /// Returns the heap that differs first, if the histories differ.
    pub fn first_heap(&self) -> Option<&HeapDifference> {
        match &self.difference {
            Difference::History { first, .. } => Some(first),
            _ => None,
        }
    }

    /// Emits the report as a `tracing` error event for rank `rank`. The names of the event and its fields are stable.
    pub fn trace(&self, rank: u32) {
        let first = self.first_heap();
        tracing::error!(
            name: "ranks.diverged",
            target: "symmalloc",
            rank,
            ranks = self.ranks,
            rounds = self.rounds,
            difference = match self.difference {
                Difference::Configuration(_) => "configuration",
                Difference::History { .. } => "history",
                Difference::Point(_) => "point",
            },
            pool = first.map(|first| first.pool),
            stream = first.and_then(|first| first.streams.first()).map(|stream| stream.0),
            op = first.map(|first| first.first_op),
            cause = first.map(|first| first.cause.name()),
            report = %self,
        );
    }
}

impl std::error::Error for Disagreement {}

/// Maximum number of entries that a list displays.
const SHOWN: usize = 6;

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |count: usize| count.checked_sub(SHOWN).filter(|hidden| *hidden > 0);
        match &self.difference {
            Difference::Configuration(policies) => {
                write!(f, "the {} ranks are configured differently", self.ranks)?;
                policies.iter().take(SHOWN).try_for_each(|policy| write!(f, "\n  {policy}"))?;
                hidden(policies.len()).map_or(Ok(()), |hidden| write!(f, "\n  and {hidden} more"))
            }
            Difference::Point(points) => {
                write!(f, "the {} ranks reached different points of the program", self.ranks)?;
                points.iter().try_for_each(|(ranks, point)| write!(f, "\n  {}: {point}", Ranks(ranks)))
            }
            Difference::History { first, others } => {
                write!(f, "the {} ranks differ in {first}", self.ranks)?;
                first.groups.iter().take(SHOWN).try_for_each(|group| write!(f, "\n  {group}"))?;
                if let Some(hidden) = hidden(first.groups.len()) {
                    write!(f, "\n  and {hidden} more groups")?;
                }
                write!(f, "\nlikely cause: {}", first.cause)?;
                others.iter().take(SHOWN).try_for_each(|other| write!(f, "\nlater, they also differ in {other}"))?;
                hidden(others.len()).map_or(Ok(()), |hidden| write!(f, "\nand {hidden} more heaps"))
            }
        }
    }
}

impl fmt::Display for HeapDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "symmetric pool {}, ", self.pool)?;
        match self.streams {
            StreamGroup::One(stream) => write!(f, "stream {}, ", stream.0)?,
            StreamGroup::Group(first) => write!(f, "the group of stream {}, ", first.0)?,
            _ => write!(f, "shared streams, ")?,
        }
        if self.first_op == self.last_op {
            write!(f, "at op {}", Grouped(self.first_op))
        } else {
            write!(f, "between op {} and op {}", Grouped(self.first_op), Grouped(self.last_op))
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", Ranks(&self.ranks))?;
        let name = Name(self.name.as_deref());
        match self.action {
            Action::Allocated { stream, size_bytes, placement: Placement::NOWHERE } => {
                write!(f, "allocated {size_bytes} bytes{name} on {stream}")
            }
            Action::Allocated { stream, size_bytes, placement } => {
                write!(f, "allocated {} bytes{name} on {stream} at {placement}", Grouped(size_bytes))
            }
            Action::Freed { placement, .. } => write!(f, "freed{name} the block at {placement}"),
            Action::FreedNothing => write!(f, "freed an allocation of 0 bytes"),
            Action::RecordedUse { stream, placement } => {
                write!(f, "recorded the use{name} of the block at {placement} by {stream}")
            }
            Action::Obtained { stream, size_bytes } => write!(f, "obtained {} bytes for {stream}", Grouped(size_bytes)),
            Action::Reserved { stream, target_bytes, obtained_bytes } => {
                write!(
                    f,
                    "reserved {} bytes for {stream}, obtaining {}",
                    Grouped(target_bytes),
                    Grouped(obtained_bytes)
                )
            }
            Action::AdoptedPlans { plan_bytes: 0 } => write!(f, "dropped their plans"),
            Action::AdoptedPlans { plan_bytes } => write!(f, "adopted plans of {} bytes", Grouped(plan_bytes)),
            Action::BeganStep { key } => write!(f, "began step {key}"),
            Action::EndedStep { planned } => {
                write!(f, "ended a step with {} allocations placed as planned", Grouped(planned))
            }
            Action::Sleep { contents } => {
                let contents = Contents::ALL.get(contents as usize).map_or("?", |contents| contents.word());
                write!(f, "put the pool to sleep (contents: {contents})")
            }
            Action::Wake => write!(f, "woke the pool"),
            Action::LeftPlan { number } => write!(f, "left the plan at allocation {} of the step", Grouped(number)),
            Action::Trimmed { given_up_bytes } => {
                write!(f, "trimmed, giving back {} bytes in total", Grouped(given_up_bytes))
            }
            Action::Shrunk { placement, size_bytes } => {
                write!(f, "trimmed, giving back {} bytes at {placement}", Grouped(size_bytes))
            }
            Action::Died { segment, size_bytes } => {
                write!(f, "trimmed, releasing segment {} of {} bytes", segment.0, Grouped(size_bytes))
            }
            Action::RefusedByLimit { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream} by a configured limit", Grouped(size_bytes))
            }
            Action::RefusedByDriver { size_bytes: 0, .. } => write!(f, "could not trim because the driver failed"),
            Action::RefusedByDriver { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream} by the driver", Grouped(size_bytes))
            }
            Action::RefusedBySegment { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream}: the segment is full", Grouped(size_bytes))
            }
            Action::Destroyed => write!(f, "destroyed the pool"),
            Action::Reset => write!(f, "reset the pool"),
            Action::Carved { range_bytes, base_offset_bytes } => {
                write!(f, "took addresses for {} at {base_offset_bytes:#x} from the base", Amount(range_bytes))
            }
            Action::Nothing => write!(f, "had no further op in this heap"),
            Action::Forgotten => write!(f, "no longer remember the op"),
            Action::Unknown { op, decision } => write!(f, "did unknown op {op:#x} with decision {decision:#x}"),
        }
    }
}

impl fmt::Display for PolicyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pool {
            Some(pool) => write!(f, "symmetric pool {pool}, {}:", self.key)?,
            None => write!(f, "all pools, {}:", self.key)?,
        }
        for (index, (ranks, value)) in self.values.iter().take(SHOWN).enumerate() {
            let separator = if index > 0 { ";" } else { "" };
            write!(f, "{separator} {} on {}", value.as_deref().unwrap_or("not set"), Ranks(ranks))?;
        }
        match self.values.len().checked_sub(SHOWN).filter(|hidden| *hidden > 0) {
            Some(hidden) => write!(f, "; and {hidden} more"),
            None => Ok(()),
        }
    }
}

/// An optional name, displayed as ` "name"` or as nothing.
struct Name<'a>(Option<&'a str>);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, " {name:?}"))
    }
}

/// A number, displayed with thousands separators.
struct Grouped(u64);

impl fmt::Display for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (index, digit) in digits.chars().enumerate() {
            let comma = if index > 0 && (digits.len() - index).is_multiple_of(3) { "," } else { "" };
            write!(f, "{comma}{digit}")?;
        }
        Ok(())
    }
}
