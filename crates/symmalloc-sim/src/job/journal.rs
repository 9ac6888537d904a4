//! The journal: what the reference rank decided between two syncs. It is all that the other ranks are compared with, and
//! it is forgotten at the sync.

use crate::job::decision::Decision;
use std::fmt;
use symmalloc_core::{Digest, PoolId, StreamId};

/// A heap, in the program's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeapName {
    /// Its pool.
    pub pool: PoolId,
    /// Its stream; `None` where the pool's streams share.
    pub stream: Option<StreamId>,
}

impl fmt::Display for HeapName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stream {
            Some(stream) => write!(f, "{} {stream}", self.pool),
            None => write!(f, "{}", self.pool),
        }
    }
}

/// A heap's digest.
pub(crate) type HeapDigest = (HeapName, Digest);

/// The decisions of a stretch, and the digests after each step.
#[derive(Clone, Debug, Default)]
pub(crate) struct DecisionJournal {
    /// By step of the stretch.
    entries: Vec<DecisionEntry>,
    digests: Vec<HeapDigest>,
    /// Of all compared heaps, before the stretch.
    pub(crate) first: Vec<HeapDigest>,
    /// Of all compared heaps, after the stretch.
    pub(crate) last: Vec<HeapDigest>,
}

#[derive(Clone, Copy, Debug)]
struct DecisionEntry {
    decision: Decision,
    /// Where in `digests` those of the heaps stand that the step touched.
    digests: (u32, u32),
}

impl DecisionJournal {
    /// An empty journal of a stretch of so many steps.
    pub(crate) fn new(steps: usize, first: Vec<HeapDigest>) -> Self {
        let entry = DecisionEntry { decision: Decision::Done, digests: (0, 0) };
        DecisionJournal { entries: vec![entry; steps], first, ..DecisionJournal::default() }
    }

    /// Enters a step.
    pub(crate) fn enter(&mut self, step: usize, decision: Decision, digests: impl IntoIterator<Item = HeapDigest>) {
        let start = self.digests.len() as u32;
        self.digests.extend(digests);
        self.entries[step] = DecisionEntry { decision, digests: (start, self.digests.len() as u32) };
    }

    /// What the reference decided.
    pub(crate) fn decision(&self, step: usize) -> Decision {
        self.entries[step].decision
    }

    /// How many ops a heap had carried out before the step. Steps that touch one heap are in the program's order.
    pub(crate) fn ops_before(&self, heap: HeapName, step: usize) -> u64 {
        let earlier = (0..step).rev().find_map(|earlier| digest_of(self.digests(earlier), heap));
        earlier.or_else(|| digest_of(&self.first, heap)).map_or(0, |digest| digest.ops)
    }

    /// The digests of the heaps that the step touched, after it.
    pub(crate) fn digests(&self, step: usize) -> &[HeapDigest] {
        let (start, end) = self.entries[step].digests;
        &self.digests[start as usize..end as usize]
    }
}

/// A heap's digest; `None` if it has done nothing, or its pool is gone.
pub(crate) fn digest_of(digests: &[HeapDigest], heap: HeapName) -> Option<Digest> {
    digests.iter().find(|(name, _)| *name == heap).map(|(_, digest)| *digest)
}

/// The first heap that is not the same in both.
pub(crate) fn first_difference(digests: &[HeapDigest], expected: &[HeapDigest]) -> Option<HeapName> {
    if digests == expected {
        return None;
    }
    let differs = |one: &[HeapDigest], other: &[HeapDigest]| one.iter().find(|entry| !other.contains(entry)).copied();
    differs(expected, digests).or_else(|| differs(digests, expected)).map(|(heap, _)| heap)
}
