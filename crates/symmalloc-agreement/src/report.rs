//! What ranks that disagree are told: for people as text, for programs as fields. The same on every rank.

use super::point::Point;
use super::question::Answer;
use super::ranks::RankSet;
use std::fmt;
use symmalloc_core::histories::{Mark, unpack_op, unpack_placement};
use symmalloc_core::ids::{Placement, SegmentId, StreamId};
use symmalloc_core::op::Contents;

/// How the ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disagreement {
    /// Number of ranks.
    pub ranks: u32,
    /// Rounds of messages that it took to find out.
    pub rounds: u32,
    /// In what.
    pub difference: Difference,
}

/// In what ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Difference {
    /// In their configurations: nothing else was compared.
    Configuration(Vec<PolicyDifference>),
    /// In what they did.
    History {
        /// The heap that differed first in program order. With several host threads, one of the first.
        first: HeapDifference,
        /// The other heaps that differ, in program order: often a consequence.
        others: Vec<HeapDifference>,
    },
    /// In nothing but that they came to different kinds of points of the program: one will come to an agreement that
    /// the others have had.
    Point(Vec<(RankSet, Point)>),
}

/// A key of a configuration that is not the same everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PolicyDifference {
    /// The symmetric pool, by ordinal; `None` for what holds over all pools.
    pub pool: Option<u32>,
    /// The key, as in `docs/configuration.md`, sizes in bytes; `pool` when the pool was not created everywhere.
    pub key: Box<str>,
    /// Its values, by the ranks that have them; `None` where it is not set.
    pub values: Vec<(RankSet, Option<Box<str>>)>,
}

/// The first difference in one heap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapDifference {
    /// The pool's ordinal among symmetric pools, see [`Allocator::symmetric_pool`](symmalloc_core::Allocator::symmetric_pool).
    pub pool: u32,
    /// The heap's stream; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// The first op of the heap that differs, counted from 0; or, when the histories do not go back so far, the first
    /// that may.
    pub first_op: u64,
    /// The same op; or the last that may be the first to differ.
    pub last_op: u64,
    /// Its number in program order over all symmetric pools, counted from the last agreement, if any rank remembers.
    pub order: Option<u64>,
    /// What was done, by the ranks that did it, in the order of their first ranks.
    pub groups: Vec<Group>,
    /// Why, most likely.
    pub cause: Cause,
}

/// Ranks that did the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Group {
    /// The ranks.
    pub ranks: RankSet,
    /// What they did.
    pub action: Action,
    /// What the program called the allocation, on the first of these ranks; at most 64 bytes of it.
    pub name: Option<Box<str>>,
}

/// What a rank did: an op of a heap, and the decision about it. Sizes are requested bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// An allocation.
    Allocated {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        size_bytes: u64,
        /// Where it lies.
        placement: Placement,
    },
    /// A free.
    Freed {
        /// The stream.
        stream: StreamId,
        /// Where it lies.
        placement: Placement,
    },
    /// The free of an allocation of zero bytes.
    FreedNothing,
    /// A use of an allocation by another stream.
    RecordedUse {
        /// The stream.
        stream: StreamId,
        /// Where it lies.
        placement: Placement,
    },
    /// Memory obtained for the op before.
    Obtained {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        size_bytes: u64,
    },
    /// A reservation of `target_bytes`, for which `obtained_bytes` were obtained.
    Reserved {
        /// The stream.
        stream: StreamId,
        /// Bytes that the heap was to hold.
        target_bytes: u64,
        /// Bytes that were missing.
        obtained_bytes: u64,
    },
    /// A trim, after all that it gave back.
    Trimmed {
        /// Bytes in all.
        given_up_bytes: u64,
    },
    /// Part of a trim: memory of a live segment went back.
    Shrunk {
        /// Where it lies.
        placement: Placement,
        /// Bytes.
        size_bytes: u64,
    },
    /// Part of a trim: a segment without allocations died.
    Died {
        /// The segment.
        segment: SegmentId,
        /// Bytes.
        size_bytes: u64,
    },
    /// A configured limit refused memory.
    RefusedByLimit {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        size_bytes: u64,
    },
    /// The driver refused memory; for 0 bytes, to take memory back.
    RefusedByDriver {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        size_bytes: u64,
    },
    /// The heap's only segment, or its range, was full.
    RefusedBySegment {
        /// The stream.
        stream: StreamId,
        /// Bytes.
        size_bytes: u64,
    },
    /// The pool was destroyed.
    Destroyed,
    /// Plans were adopted, or given up for 0 bytes.
    AdoptedPlans {
        /// Bytes of their memory.
        plan_bytes: u64,
    },
    /// A step began.
    BeganStep {
        /// What the program calls it.
        key: u64,
    },
    /// A step ended.
    EndedStep {
        /// Allocations that went where a plan says.
        planned: u64,
    },
    /// It was asked to sleep.
    Sleep {
        /// What was to become of its contents: the position in [`Contents::ALL`].
        contents: u64,
    },
    /// It was asked to wake.
    Wake,
    /// A step went another way than its plan.
    LeftPlan {
        /// The number of the allocation in the step.
        number: u64,
    },
    /// Nothing: the heap has no further op on these ranks.
    Nothing,
    /// It is older than these ranks' histories.
    Forgotten,
    /// An op that this version does not know.
    Unknown {
        /// The op as it is in digests.
        op: u64,
        /// The decision as it is in digests.
        decision: u64,
    },
}

/// Why ranks differ, most likely: a guess from the ops around the first difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// The ranks asked for different things, such as other sizes.
    OtherRequest,
    /// The ranks did the same in another order.
    OtherOrder,
    /// Memory was refused on some ranks.
    RefusedMemory,
    /// Some ranks did not free an allocation, or freed it at another time.
    MissingFree,
    /// Some ranks did not record that another stream uses an allocation.
    MissingRecordUse,
    /// Some ranks did an op that the others did not do.
    OpOnSomeRanks,
    /// Some ranks did it on another stream, or have a stream more.
    OtherStream,
    /// The same request in the same heap was placed differently: what must not happen.
    OtherDecision,
    /// The same request obtained another amount of memory: a limit that several heaps share was used up in another order.
    OtherGrowth,
    /// The ranks adopted other plans, or called a step by another key.
    OtherPlan,
    /// The histories do not go back so far.
    OlderThanHistory,
    /// Not looked into: another heap differed before.
    Consequence,
    /// Nothing is known.
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
        }
    }
}

impl Cause {
    /// A short name, stable, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Cause::OtherRequest => "other_request",
            Cause::OtherOrder => "other_order",
            Cause::RefusedMemory => "refused_memory",
            Cause::MissingFree => "missing_free",
            Cause::MissingRecordUse => "missing_record_use",
            Cause::OpOnSomeRanks => "op_on_some_ranks",
            Cause::OtherStream => "other_stream",
            Cause::OtherDecision => "other_decision",
            Cause::OtherGrowth => "other_growth",
            Cause::OtherPlan => "other_plan",
            Cause::OlderThanHistory => "older_than_history",
            Cause::Consequence => "consequence",
            Cause::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::OtherRequest => "the ranks asked for different things",
            Cause::OtherOrder => "the ranks did the same ops in another order",
            Cause::RefusedMemory => "memory was refused on some ranks: they must fail, or go on, together",
            Cause::MissingFree => "some ranks did not free an allocation there",
            Cause::MissingRecordUse => "some ranks did not record the use of an allocation by another stream",
            Cause::OpOnSomeRanks => "some ranks did an op that the others did not do",
            Cause::OtherStream => "some ranks did it on another stream; are all streams registered in the same order?",
            Cause::OtherDecision => {
                "the same request was placed differently: please report it, with the traces of two of the ranks"
            }
            Cause::OtherGrowth => {
                "the ranks obtained different amounts of memory: was a limit that several heaps share used up in another order?"
            }
            Cause::OtherPlan => {
                "the ranks follow other plans, or call a step by another key: use the same plan file and keys on every rank"
            }
            Cause::OlderThanHistory => "older than what is remembered: agree more often, or raise history_ops",
            Cause::Consequence => "not looked into",
            Cause::Unknown => "unknown",
        })
    }
}

impl Disagreement {
    /// The heap that differed first, when histories differ.
    pub fn first_heap(&self) -> Option<&HeapDifference> {
        match &self.difference {
            Difference::History { first, .. } => Some(first),
            _ => None,
        }
    }

    /// Tells `tracing`, as rank `rank`. Names and fields are stable.
    pub fn tell(&self, rank: u32) {
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
            stream = first.and_then(|first| first.stream).map(|stream| stream.0),
            op = first.map(|first| first.first_op),
            cause = first.map(|first| first.cause.name()),
            report = %self,
        );
    }
}

impl std::error::Error for Disagreement {}

/// Entries of a list that are shown.
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
                write!(f, "the {} ranks came to different points of the program", self.ranks)?;
                points.iter().try_for_each(|(ranks, point)| write!(f, "\n  {}: {point}", Ranks(ranks)))
            }
            Difference::History { first, others } => {
                write!(f, "the {} ranks differ in {first}", self.ranks)?;
                first.groups.iter().take(SHOWN).try_for_each(|group| write!(f, "\n  {group}"))?;
                if let Some(hidden) = hidden(first.groups.len()) {
                    write!(f, "\n  and {hidden} more groups")?;
                }
                write!(f, "\nlikely cause: {}", first.cause)?;
                others.iter().take(SHOWN).try_for_each(|other| write!(f, "\nalso, and later: {other}"))?;
                hidden(others.len()).map_or(Ok(()), |hidden| write!(f, "\nand {hidden} more heaps"))
            }
        }
    }
}

impl fmt::Display for HeapDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "symmetric pool {}, ", self.pool)?;
        match self.stream {
            Some(stream) => write!(f, "stream {}, ", stream.0)?,
            None => write!(f, "shared streams, ")?,
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
            Action::Freed { placement, .. } => write!(f, "freed{name} what lay at {placement}"),
            Action::FreedNothing => write!(f, "freed an allocation of 0 bytes"),
            Action::RecordedUse { stream, placement } => {
                write!(f, "recorded the use{name} of what lay at {placement} by {stream}")
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
                write!(f, "ended a step of which {} allocations were as planned", Grouped(planned))
            }
            Action::Sleep { contents } => {
                let contents = Contents::ALL.get(contents as usize).map_or("?", |contents| contents.word());
                write!(f, "put the pool to sleep (contents: {contents})")
            }
            Action::Wake => write!(f, "woke the pool"),
            Action::LeftPlan { number } => write!(f, "left the plan at allocation {} of the step", Grouped(number)),
            Action::Trimmed { given_up_bytes } => write!(f, "trimmed, giving up {} bytes", Grouped(given_up_bytes)),
            Action::Shrunk { placement, size_bytes } => {
                write!(f, "trimmed, giving back {} bytes at {placement}", Grouped(size_bytes))
            }
            Action::Died { segment, size_bytes } => {
                write!(f, "trimmed, giving up segment {} with {} bytes", segment.0, Grouped(size_bytes))
            }
            Action::RefusedByLimit { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream} by a configured limit", Grouped(size_bytes))
            }
            Action::RefusedByDriver { size_bytes: 0, .. } => write!(f, "were refused by the driver in a trim"),
            Action::RefusedByDriver { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream} by the driver", Grouped(size_bytes))
            }
            Action::RefusedBySegment { stream, size_bytes } => {
                write!(f, "were refused {} bytes for {stream}: the segment is full", Grouped(size_bytes))
            }
            Action::Destroyed => write!(f, "destroyed the pool"),
            Action::Nothing => write!(f, "did nothing more in this heap"),
            Action::Forgotten => write!(f, "no longer know"),
            Action::Unknown { op, decision } => write!(f, "op {op:#x} with decision {decision:#x}"),
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

/// `rank 3`, `ranks 0-2`.
struct Ranks<'a>(&'a RankSet);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", if self.0.len() == 1 { "rank" } else { "ranks" }, self.0)
    }
}

/// ` "name"`, or nothing.
struct Name<'a>(Option<&'a str>);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, " {name:?}"))
    }
}

/// A number with its thousands apart.
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
