//! A first difference, with what the ranks answered about it.

use super::question::{Answer, HeapKey, Step};
use super::ranks::RankSet;
use symmalloc_core::histories::{Mark, unpack_op};

/// A first difference.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) heap: HeapKey,
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) earliest: Option<Earliest>,
    pub(crate) answers: Vec<Answered>,
}

impl Found {
    /// Its number in program order, the least over the ranks.
    pub(crate) fn order(&self) -> Option<u64> {
        self.earliest.map(|earliest| earliest.order)
    }
}

/// When a difference shows first, over all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Earliest {
    /// The number in program order.
    order: u64,
    /// What a rank did at that moment was to obtain memory, or to give it back: what came of another op.
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

/// Ranks that answered alike.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    pub(crate) ranks: RankSet,
    pub(crate) answer: Answer,
    pub(crate) name: Option<Box<str>>,
    /// What the ops from here on asked for.
    pub(crate) window: Vec<Step>,
}

/// Whether it is what came of another op: memory that was obtained or given back.
pub(crate) fn is_memory_moved(op: u64) -> bool {
    matches!(unpack_op(op), Some((Mark::Trim | Mark::Shrink | Mark::Death | Mark::Obtain, _, _)))
}
