//! Destroyed pools: their remaining state, and the list of pools that reports and trims visit.
//!
//! ```text
//!  live ── destroy_pool ──► destroyed, the driver holds memory ── trim ──┐
//!    ▲            └──────── all memory released ─────────────────────────┴──► spare ── create_pool ──► live
//!    └ listed ───────────────────────────────────────────────┘
//! ```
//! Reports and trims visit *listed* pools only. For each destroyed pool, the table of pools keeps a slot with the
//! pool's configuration. Statistics are summed over all destroyed pools. If a destroyed pool was symmetric, the
//! allocator keeps the last digest of each of its heaps until all ranks have agreed on the digest. The heaps that were
//! destroyed most recently also keep their journals, so that agreement can still name the op that differs.

use super::pool::PoolSlot;
use crate::config::{PoolConfig, StreamPolicy};
use crate::heap::Heap;
use crate::heap::view::MemoryStats;
use crate::history::digest::Digest;
use crate::history::journal::Journal;
use crate::stats::usage::Usage;
use crate::sync::lock::Lock;
use crate::types::ids::{HeapId, PoolId};
use std::collections::{BTreeMap, VecDeque};

/// Maximum number of histories of destroyed pools that keep their journals.
const JOURNALS_MAX: usize = 64;

/// The list of visited pools, and the remaining state of destroyed pools.
pub(super) struct Destroyed<L: Lock> {
    /// Pools that are live, or whose memory the driver has not released yet, in the order of their ids.
    listed: Vec<PoolId>,
    /// Slots of removed pools that new pools can reuse, by the pool's stream policy and the digest of its
    /// configuration. No list is empty.
    spare: BTreeMap<(StreamPolicy, u64), Vec<PoolSlot<L>>>,
    /// Last digests of destroyed heaps, ascending by pool and stream. The capacity grows by an eighth, because a
    /// program that never syncs keeps the history of every symmetric pool. It shrinks when three quarters are unused.
    histories: VecDeque<(HeapId, Digest)>,
    /// The journals of the most recent histories, in the order of destruction.
    journals: VecDeque<(HeapId, Box<Journal>)>,
    /// Usage of all removed heaps.
    pub(super) usage: Usage,
    /// Other statistics of removed heaps.
    counts: MemoryStats,
}

impl<L: Lock> Destroyed<L> {
    /// Creates the list with the default pool.
    pub(super) fn new() -> Self {
        Destroyed {
            listed: vec![PoolId::DEFAULT],
            spare: BTreeMap::new(),
            histories: VecDeque::new(),
            journals: VecDeque::new(),
            usage: Usage::default(),
            counts: MemoryStats::default(),
        }
    }

    /// Removes and returns a slot that a pool of this configuration can reuse, preferably the slot of a pool with the
    /// same configuration.
    pub(super) fn take_spare(&mut self, config: &PoolConfig) -> Option<PoolSlot<L>> {
        let same = (config.streams(), config.digest());
        let usable = (config.streams(), 0)..=(config.streams(), u64::MAX);
        let key = if self.spare.contains_key(&same) { same } else { *self.spare.range(usable).next()?.0 };
        let alike = self.spare.get_mut(&key)?;
        let slot = alike.pop();
        if alike.is_empty() {
            self.spare.remove(&key);
        }
        slot
    }

    /// Lists a new pool.
    pub(super) fn list(&mut self, pool: PoolId) {
        let at = self.listed.partition_point(|other| *other < pool);
        self.listed.insert(at, pool);
    }

    pub(super) fn listed(&self) -> &[PoolId] {
        &self.listed
    }

    /// Returns the histories that ranks have not agreed on yet, in the order of pools and streams. A history is the
    /// heap and its last digest.
    pub(super) fn histories(&self) -> impl Iterator<Item = (HeapId, Digest)> {
        self.histories.iter().copied()
    }

    /// Returns the journal of a history; `None` if it had no journal, or if too many histories are more recent.
    pub(super) fn journal(&self, key: HeapId) -> Option<&Journal> {
        self.journals.iter().find(|(known, _)| *known == key).map(|(_, journal)| &**journal)
    }

    /// Records that all ranks had this digest, and forgets the history if it ends there.
    pub(super) fn settle(&mut self, key: HeapId, digest: Digest) {
        let Ok(at) = self.histories.binary_search_by_key(&key, |(known, _)| *known) else { return };
        if self.histories[at].1.ops <= digest.ops {
            self.histories.remove(at);
            if self.histories.len() < self.histories.capacity() / 4 {
                self.histories.shrink_to_fit();
            }
            self.journals.retain(|(known, _)| *known != key);
        } else if let Some((_, journal)) = self.journals.iter_mut().find(|(known, _)| *known == key) {
            journal.agree(digest);
        }
    }

    pub(super) fn history_bytes(&self) -> u64 {
        self.journals.iter().map(|(_, journal)| journal.bytes()).sum()
    }

    /// Adds the statistics of the heaps of destroyed pools.
    pub(super) fn add_to(&self, stats: &mut MemoryStats) {
        let MemoryStats { segments_born, growth_count, trim_count, retry_count, out_of_memory_count, steps, .. } =
            self.counts;
        let usage = self.usage.stats();
        stats.usage = stats.usage + usage;
        stats.peaks_are_exact &= usage.all.allocations.peak == 0;
        stats.segments_born += segments_born;
        stats.growth_count += growth_count;
        stats.trim_count += trim_count;
        stats.retry_count += retry_count;
        stats.out_of_memory_count += out_of_memory_count;
        stats.steps = stats.steps + steps;
    }

    pub(super) fn is_listed(&self, pool: PoolId) -> bool {
        self.listed.binary_search(&pool).is_ok()
    }

    /// Stops visiting a pool.
    pub(super) fn remove(&mut self, pool: PoolId) {
        if let Ok(at) = self.listed.binary_search(&pool) {
            self.listed.remove(at);
        }
    }

    /// Adds the statistics of a removed heap to the sums, and keeps the heap's history.
    pub(super) fn absorb(&mut self, heap: &mut Heap<L>, symmetric: bool) {
        heap.add_to(&mut self.counts);
        // Usage is summed separately. Plans no longer exist after the removal of their heap.
        (self.counts.usage, self.counts.steps.plans) = (Default::default(), 0);
        self.usage.absorb(heap.ledger().usage());
        if symmetric && heap.ledger().has_history() && !heap.ledger().is_settled() {
            self.add_history(heap.id(), heap.ledger().digest());
            if self.journals.len() == JOURNALS_MAX {
                self.journals.pop_front();
            }
            self.journals.extend(heap.take_journal().map(|journal| (heap.id(), journal)));
        }
    }

    fn add_history(&mut self, key: HeapId, digest: Digest) {
        let len = self.histories.len();
        if len == self.histories.capacity() {
            self.histories.reserve_exact((len / 8).max(16));
        }
        let at = self.histories.partition_point(|(known, _)| *known < key);
        self.histories.insert(at, (key, digest));
    }

    /// Keeps the slot of a removed pool for reuse by a later pool.
    pub(super) fn add_spare(&mut self, slot: PoolSlot<L>) {
        self.spare.entry((slot.config().streams(), slot.config_digest())).or_default().push(slot);
    }
}
