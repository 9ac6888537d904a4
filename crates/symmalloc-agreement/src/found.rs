//! The first difference in a heap, together with the ranks' answers about it.

use super::question::{Answer, HeapKey, Step};
use super::ranks::RankSet;
use symmalloc_core::histories::{Mark, unpack_op};

/// The first difference in one heap.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) heap: HeapKey,
    /// First op that may be the first to differ.
    pub(crate) first: u64,
    /// Last op that may be the first to differ; equal to `first` if the difference is exact.
    pub(crate) last: u64,
    /// The difference's earliest occurrence over all ranks; `None` if no rank remembers it.
    pub(crate) earliest: Option<Earliest>,
    /// Groups of ranks that gave the same answer, ordered by their first rank.
    pub(crate) answers: Vec<Answered>,
}

impl Found {
    /// Returns the position of the difference in program order: the minimum over all ranks.
    pub(crate) fn order(&self) -> Option<u64> {
        self.earliest.map(|earliest| earliest.order)
    }
}

/// The earliest occurrence of a difference over all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earliest {
    /// Position in program order.
    order: u64,
    /// `true` if a rank acquired or released memory at that point, as a consequence of another op.
    pub(crate) is_memory_moved: bool,
}

impl Earliest {
    pub(crate) fn of(answer: Answer) -> Option<Self> {
        let is_memory_moved = matches!(answer, Answer::Op { op, .. } if is_memory_moved(op));
        Some(Earliest { order: answer.order()?, is_memory_moved })
    }

    pub(crate) fn or_before(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.order < self.order => other,
            Some(other) if other.order == self.order => {
                Earliest { is_memory_moved: self.is_memory_moved || other.is_memory_moved, ..self }
            }
            _ => self,
        }
    }
}

/// A group of ranks that gave the same answer.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    pub(crate) ranks: RankSet,
    pub(crate) answer: Answer,
    pub(crate) name: Option<Box<str>>,
    /// Requests from the op that differs on, at most [`WINDOW`](super::question::WINDOW).
    pub(crate) window: Vec<Step>,
}

/// Returns `true` if the op is a consequence of another op: memory was acquired or released.
pub(crate) fn is_memory_moved(op: u64) -> bool {
    matches!(unpack_op(op), Some((Mark::Trim | Mark::Shrink | Mark::Death | Mark::Obtain | Mark::Carve, _, _)))
}
