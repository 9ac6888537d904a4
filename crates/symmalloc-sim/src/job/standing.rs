//! How a rank stands to the reference.
//!
//! ```text
//!  alike ───the driver refuses something───► followed ───another digest after a step───► departed, heap by heap
//!    │ another decision: a failure                │ the same digests: fine
//! ```
//! A rank to which nothing happened must decide as the reference does. A rank to which something happened may come to
//! differ; it is followed digest by digest, so that it is known at which step each of its heaps departed. The agreement
//! is held against that.

use crate::job::journal::{DecisionJournal, HeapDigest, HeapName, digest_of};
use std::collections::BTreeMap;
use std::ops::Range;

/// Whether a rank must be like the reference.
#[derive(Clone, Debug)]
pub(crate) enum RankStanding {
    Alike,
    /// Something happened to it. By heap that differs now, or did when its pool was given up: since when.
    Followed {
        departed: BTreeMap<HeapName, Departure>,
    },
}

/// Where a heap began to differ from the reference's.
#[derive(Clone, Debug)]
pub(crate) struct Departure {
    /// The step of the program.
    pub(crate) step: usize,
    /// Ops of the heap, counted from 0, among which the first that differs is: those that the step made.
    pub(crate) ops: Range<u64>,
}

impl RankStanding {
    pub(crate) fn followed() -> Self {
        RankStanding::Followed { departed: BTreeMap::new() }
    }

    /// Something happened to the rank.
    pub(crate) fn begin_to_follow(&mut self) {
        if let RankStanding::Alike = self {
            *self = RankStanding::followed();
        }
    }

    /// Notes which heaps differ after the step with this index in the journal, and this number in the program.
    pub(crate) fn follow(&mut self, digests: &[HeapDigest], journal: &DecisionJournal, index: usize, number: usize) {
        let RankStanding::Followed { departed } = self else { return };
        let expected = journal.digests(index);
        for (heap, _) in digests.iter().chain(expected) {
            let (own, theirs) = (digest_of(digests, *heap), digest_of(expected, *heap));
            if own == theirs {
                // Its neighbour took the same from it, only at another step: its history is the same again.
                departed.remove(heap);
            } else {
                departed.entry(*heap).or_insert_with(|| {
                    let before = journal.ops_before(*heap, index);
                    // A heap whose pool was given up on one side made one op more there.
                    let after = own.into_iter().chain(theirs).map(|digest| digest.ops).max().unwrap_or(0);
                    Departure { step: number, ops: before..after.max(before) + 1 }
                });
            }
        }
    }

    /// The heaps that differ, and since when.
    pub(crate) fn departed(&self) -> impl Iterator<Item = (&HeapName, &Departure)> {
        let departed = if let RankStanding::Followed { departed } = self { Some(departed) } else { None };
        departed.into_iter().flatten()
    }

    pub(crate) fn departure(&self, heap: HeapName) -> Option<&Departure> {
        self.departed().find(|(name, _)| **name == heap).map(|(_, departure)| departure)
    }

    pub(crate) fn first_departed(&self) -> Option<HeapName> {
        self.departed().next().map(|(heap, _)| *heap)
    }
}
