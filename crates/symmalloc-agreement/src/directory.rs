//! The list of heaps that differ, built by merging the heap lists of all ranks one page at a time.
//!
//! Every rank sends its next heaps in order. After a full page, a rank may have more heaps, so the merged list is
//! complete only up to the smallest key at which a full page ends. Heaps beyond that key are requested again with the
//! next page.

use super::message::{HEAPS_PER_PAGE, HeapPage, messages};
use super::protocol::ProtocolError;
use super::question::{Ask, HeapKey, HeapSummary};
use super::transport::Gathered;
use std::collections::BTreeMap;
use symmalloc_core::Digest;

#[derive(Debug, Default)]
pub(crate) struct Directory {
    /// Heaps that differ, ascending by key, among those merged so far.
    differing: Vec<Differing>,
    /// Last heap up to which the lists of all ranks are merged; `None` before the first page.
    after: Option<HeapKey>,
}

/// The summaries of one heap, combined over all ranks that have it.
#[derive(Clone, Copy, Debug)]
struct HeapTally {
    ranks: u32,
    digest: Digest,
    differs: bool,
    ops_min: u64,
    ops_max: u64,
    oldest_max: u64,
}

/// A heap whose history is not the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Differing {
    pub(crate) key: HeapKey,
    /// A number of ops after which the histories are known to differ: either their digests differ, or one of the
    /// histories has ended.
    pub(crate) differs_after: u64,
    /// The smallest number of ops whose digest every journal still holds.
    pub(crate) oldest: u64,
}

impl HeapTally {
    fn new(heap: &HeapSummary) -> Self {
        let ops = heap.digest.ops;
        HeapTally { ranks: 0, digest: heap.digest, differs: false, ops_min: ops, ops_max: ops, oldest_max: heap.oldest }
    }

    fn add(&mut self, heap: &HeapSummary) {
        let ops = heap.digest.ops;
        self.ranks += 1;
        self.differs |= self.digest != heap.digest;
        (self.ops_min, self.ops_max) = (self.ops_min.min(ops), self.ops_max.max(ops));
        self.oldest_max = self.oldest_max.max(heap.oldest);
    }

    fn differing(&self, key: HeapKey, ranks: u32) -> Option<Differing> {
        let is_everywhere = self.ranks == ranks;
        if is_everywhere && !self.differs {
            return None;
        }
        let ops_min = if is_everywhere { self.ops_min } else { 0 };
        let differs_after = if is_everywhere && self.ops_max == ops_min { ops_min } else { ops_min + 1 };
        Some(Differing { key, differs_after, oldest: self.oldest_max })
    }
}

impl Directory {
    /// Merges one page of every rank's list. Returns the question for the next page, or `None` after the last one.
    pub(crate) fn page(&mut self, ranks: u32, gathered: &Gathered) -> Result<Option<Ask>, ProtocolError> {
        let mut tallies: BTreeMap<HeapKey, HeapTally> = BTreeMap::new();
        let mut complete_to: Option<HeapKey> = None;
        for page in messages::<HeapPage>(gathered) {
            let (rank, page) = page?;
            let heaps = page.entries(rank)?;
            let mut last = self.after;
            for heap in heaps {
                let heap = HeapSummary::decode(rank, heap)?;
                if Some(heap.key) <= last {
                    return Err(ProtocolError::Garbled { rank });
                }
                last = Some(heap.key);
                tallies.entry(heap.key).or_insert_with(|| HeapTally::new(&heap)).add(&heap);
            }
            if heaps.len() == HEAPS_PER_PAGE {
                complete_to = complete_to.map_or(last, |to| last.map(|last| last.min(to)));
            }
        }
        let is_complete = |key: &HeapKey| complete_to.is_none_or(|to| *key <= to);
        let complete = tallies.into_iter().filter(|(key, _)| is_complete(key));
        self.differing.extend(complete.filter_map(|(key, tally)| tally.differing(key, ranks)));
        self.after = complete_to;
        Ok(complete_to.map(|to| Ask::Heaps { after: Some(to) }))
    }

    /// Removes and returns the heaps that differ, in order. Call it after the last page.
    pub(crate) fn take_differing(&mut self) -> Vec<Differing> {
        std::mem::take(&mut self.differing)
    }
}
