//! The journal: what the reference rank decided between two syncs. It is all that the other ranks are compared with, and
//! it is forgotten at the sync.

use crate::decision::Decision;
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
pub(crate) struct Journal {
    /// By step of the stretch.
    entries: Vec<Entry>,
    digests: Vec<HeapDigest>,
    /// Of all compared heaps, after the stretch.
    pub(crate) last: Vec<HeapDigest>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    decision: Decision,
    /// Where in `digests` those of the heaps stand that the step touched.
    digests: (u32, u32),
}

impl Journal {
    /// An empty journal of a stretch of so many steps.
    pub(crate) fn of(steps: usize) -> Self {
        let entry = Entry { decision: Decision::Done, digests: (0, 0) };
        Journal { entries: vec![entry; steps], ..Journal::default() }
    }

    /// Enters a step.
    pub(crate) fn enter(&mut self, step: usize, decision: Decision, digests: impl IntoIterator<Item = HeapDigest>) {
        let start = self.digests.len() as u32;
        self.digests.extend(digests);
        self.entries[step] = Entry { decision, digests: (start, self.digests.len() as u32) };
    }

    /// What the reference decided.
    pub(crate) fn decision(&self, step: usize) -> Decision {
        self.entries[step].decision
    }

    /// The digests of the heaps that the step touched, after it.
    pub(crate) fn digests(&self, step: usize) -> &[HeapDigest] {
        let (start, end) = self.entries[step].digests;
        &self.digests[start as usize..end as usize]
    }
}
