//! The standing of a rank relative to the reference.
//!
//! ```text
//!  alike ───a driver call fails──────────────► followed ───different digest after a step────► departed, heap by heap
//!    │ different decision: a failure              │ same digests: no failure
//! ```
//! A rank without faults must decide like the reference. A rank with faults may diverge. The simulator follows the
//! digests of such a rank, so that it knows the step at which each heap diverged. It checks the agreement's report
//! against this step.

use crate::job::journal::{DecisionJournal, HeapDigest, digest_of};
use std::collections::BTreeMap;
use std::ops::Range;
use symmalloc_core::ids::HeapId;

/// The standing of a rank relative to the reference.
#[derive(Clone, Debug)]
pub(crate) enum RankStanding {
    Alike,
    /// A fault occurred. Contains the departures of the heaps that differ now, and of those that differed when their
    /// pool was destroyed.
    Followed {
        departed: BTreeMap<HeapId, Departure>,
    },
}

/// The point at which a heap began to differ from the reference's heap.
#[derive(Clone, Debug)]
pub(crate) struct Departure {
    /// The step of the program.
    pub(crate) step: usize,
    /// Ops of the heap that the step made, counted from 0. They include the first op that differs.
    pub(crate) ops: Range<u64>,
}

impl RankStanding {
    pub(crate) fn followed() -> Self {
        RankStanding::Followed { departed: BTreeMap::new() }
    }

    /// Starts to follow the rank's digests after a fault.
    pub(crate) fn begin_to_follow(&mut self) {
        if let RankStanding::Alike = self {
            *self = RankStanding::followed();
        }
    }

    /// Updates the departures after the step at `index` in the journal. In the program, this step has the number
    /// `number`.
    pub(crate) fn follow(&mut self, digests: &[HeapDigest], journal: &DecisionJournal, index: usize, number: usize) {
        let RankStanding::Followed { departed } = self else { return };
        let expected = journal.digests(index);
        for (heap, _) in digests.iter().chain(expected) {
            let (own, theirs) = (digest_of(digests, *heap), digest_of(expected, *heap));
            if own == theirs {
                // On one of the ranks, another heap had taken memory from this heap at a different step. Now the
                // histories are equal again.
                departed.remove(heap);
            } else {
                departed.entry(*heap).or_insert_with(|| {
                    let before = journal.ops_before(*heap, index);
                    // If the pool was destroyed on one side only, its heap made one more op there.
                    let after = own.into_iter().chain(theirs).map(|digest| digest.ops).max().unwrap_or(0);
                    Departure { step: number, ops: before..after.max(before) + 1 }
                });
            }
        }
    }

    /// Returns the heaps that differ, with their departures.
    pub(crate) fn departed(&self) -> impl Iterator<Item = (&HeapId, &Departure)> {
        let departed = if let RankStanding::Followed { departed } = self { Some(departed) } else { None };
        departed.into_iter().flatten()
    }

    pub(crate) fn departure(&self, heap: HeapId) -> Option<&Departure> {
        self.departed().find(|(name, _)| **name == heap).map(|(_, departure)| departure)
    }

    pub(crate) fn first_departed(&self) -> Option<HeapId> {
        self.departed().next().map(|(heap, _)| *heap)
    }
}
