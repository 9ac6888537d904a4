//! The journal of the reference rank's decisions between two syncs. The decisions of all other ranks are compared with
//! it. It is discarded at the sync.

use crate::job::decision::Decision;
use symmalloc_core::Digest;
use symmalloc_core::ids::HeapId;

/// A heap and its digest. Lists of them are in ascending order of heaps.
pub(crate) type HeapDigest = (HeapId, Digest);

/// The decisions of a stretch (the steps between two syncs), and the digests of the touched heaps after each step.
#[derive(Clone, Debug, Default)]
pub(crate) struct DecisionJournal {
    /// Indexed by step of the stretch.
    entries: Vec<DecisionEntry>,
    digests: Vec<HeapDigest>,
    /// Digests of all compared heaps before the stretch.
    pub(crate) first: Vec<HeapDigest>,
    /// Digests of all compared heaps after the stretch.
    pub(crate) last: Vec<HeapDigest>,
}

#[derive(Clone, Copy, Debug)]
struct DecisionEntry {
    decision: Decision,
    /// Range in `digests` of the heaps that the step touched.
    digests: (u32, u32),
}

impl DecisionJournal {
    /// Creates a journal for a stretch of `steps` steps, without entries yet.
    pub(crate) fn new(steps: usize, first: Vec<HeapDigest>) -> Self {
        let entry = DecisionEntry { decision: Decision::Done, digests: (0, 0) };
        DecisionJournal { entries: vec![entry; steps], first, ..DecisionJournal::default() }
    }

    /// Records a step.
    pub(crate) fn enter(&mut self, step: usize, decision: Decision, digests: impl IntoIterator<Item = HeapDigest>) {
        let start = self.digests.len() as u32;
        self.digests.extend(digests);
        self.entries[step] = DecisionEntry { decision, digests: (start, self.digests.len() as u32) };
    }

    /// Returns the reference's decision about a step.
    pub(crate) fn decision(&self, step: usize) -> Decision {
        self.entries[step].decision
    }

    /// Returns the number of ops of a heap before the step. Every rank runs steps that touch the same heap in program
    /// order.
    pub(crate) fn ops_before(&self, heap: HeapId, step: usize) -> u64 {
        let earlier = (0..step).rev().find_map(|earlier| digest_of(self.digests(earlier), heap));
        earlier.or_else(|| digest_of(&self.first, heap)).map_or(0, |digest| digest.ops)
    }

    /// Returns the digests of the heaps that the step touched, after the step.
    pub(crate) fn digests(&self, step: usize) -> &[HeapDigest] {
        let (start, end) = self.entries[step].digests;
        &self.digests[start as usize..end as usize]
    }
}

/// Returns a heap's digest, or `None` if the heap has no ops or its pool is destroyed.
pub(crate) fn digest_of(digests: &[HeapDigest], heap: HeapId) -> Option<Digest> {
    digests.binary_search_by_key(&heap, |(name, _)| *name).ok().map(|at| digests[at].1)
}

/// Returns the first heap whose digest differs.
pub(crate) fn first_difference(digests: &[HeapDigest], expected: &[HeapDigest]) -> Option<HeapId> {
    if digests == expected {
        return None;
    }
    let differs = |one: &[HeapDigest], other: &[HeapDigest]| {
        one.iter().find(|(heap, digest)| digest_of(other, *heap) != Some(*digest)).map(|(heap, _)| *heap)
    };
    differs(expected, digests).or_else(|| differs(digests, expected))
}
