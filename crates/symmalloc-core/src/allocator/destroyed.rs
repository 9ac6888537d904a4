//! Destroyed pools: what is kept of them, and which are iterated.
//!
//! ```text
//!  live ── destroy_pool ──► destroyed, the driver holds memory ── trim ──┐
//!    ▲            └──────── everything is back ──────────────────────────┴──► spare ── create_pool, same config ──► live
//!    └ kept ─────────────────────────────────────────────────┘
//! ```
//! Reports and trims visit *kept* pools only. Of a destroyed pool the allocator keeps an entry in its table of pools, sums of
//! statistics over all destroyed pools, and, of a symmetric pool, a digest per heap until all ranks have agreed on it. The most
//! recent of these keep their journals, so that agreement can still name the op that differs.

use super::pool::Pool;
use crate::config::PoolConfig;
use crate::heap::view::MemoryStats;
use crate::heap::{Heap, HeapIdentity};
use crate::history::digest::Digest;
use crate::history::journal::Journal;
use crate::stats::usage::Usage;
use crate::sync::lock::Lock;
use crate::types::ids::{PoolId, StreamId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Histories of destroyed pools that keep their journals.
const JOURNALS_MAX: usize = 64;

/// The pools that are iterated, and what is kept of the others.
pub(super) struct Destroyed<L: Lock> {
    /// Pools that are live, or whose memory the driver still holds, in the order of their ids.
    kept: Vec<PoolId>,
    /// Pools that are gone, for pools of the same configuration to take their places. By the digest of the configuration.
    spare: BTreeMap<u64, Vec<Arc<Pool<L>>>>,
    /// By pool and stream.
    histories: BTreeMap<HistoryKey, Digest>,
    /// The journals of the most recent ones, in the order of destruction.
    journals: VecDeque<(HistoryKey, Box<Journal>)>,
    /// Usage of all heaps that are gone.
    pub(super) usage: Usage,
    /// Other statistics of them.
    counts: MemoryStats,
}

/// The pool of a heap, and its stream.
pub(super) type HistoryKey = (PoolId, Option<StreamId>);

impl<L: Lock> Destroyed<L> {
    /// With the default pool.
    pub(super) fn new() -> Self {
        Destroyed {
            kept: vec![PoolId::DEFAULT],
            spare: BTreeMap::new(),
            histories: BTreeMap::new(),
            journals: VecDeque::new(),
            usage: Usage::default(),
            counts: MemoryStats::default(),
        }
    }

    /// A place for a pool of this configuration.
    pub(super) fn take_spare(&mut self, config: &PoolConfig) -> Option<Arc<Pool<L>>> {
        let alike = self.spare.get_mut(&config.digest())?;
        alike.pop_if(|pool| pool.config == *config)
    }

    /// A pool was made.
    pub(super) fn keep(&mut self, pool: PoolId) {
        let at = self.kept.partition_point(|kept| *kept < pool);
        self.kept.insert(at, pool);
    }

    pub(super) fn kept(&self) -> &[PoolId] {
        &self.kept
    }

    /// The histories that ranks have not agreed on yet, in the order of pools and streams: the last digest of each heap.
    pub(super) fn histories(&self) -> impl Iterator<Item = (HistoryKey, Digest)> {
        self.histories.iter().map(|(key, digest)| (*key, *digest))
    }

    /// The journal of a history; `None` when others are more recent, or there was none.
    pub(super) fn journal(&self, key: HistoryKey) -> Option<&Journal> {
        self.journals.iter().find(|(known, _)| *known == key).map(|(_, journal)| &**journal)
    }

    /// All ranks had this digest: a history that it ends is forgotten.
    pub(super) fn settle(&mut self, key: HistoryKey, digest: Digest) {
        let Some(last) = self.histories.get(&key) else { return };
        if last.ops <= digest.ops {
            self.histories.remove(&key);
            self.journals.retain(|(known, _)| *known != key);
        } else if let Some((_, journal)) = self.journals.iter_mut().find(|(known, _)| *known == key) {
            journal.agree(digest);
        }
    }

    pub(super) fn history_bytes(&self) -> u64 {
        self.journals.iter().map(|(_, journal)| journal.bytes()).sum()
    }

    /// Adds what the heaps of destroyed pools did.
    pub(super) fn add_to(&self, stats: &mut MemoryStats) {
        let MemoryStats { segments_born, growth_count, trim_count, retry_count, out_of_memory_count, steps, .. } =
            self.counts;
        stats.usage = stats.usage + self.usage.stats();
        stats.segments_born += segments_born;
        stats.growth_count += growth_count;
        stats.trim_count += trim_count;
        stats.retry_count += retry_count;
        stats.out_of_memory_count += out_of_memory_count;
        stats.steps = stats.steps + steps;
    }

    /// A pool is visited no more. Returns `false` if it was not.
    pub(super) fn remove(&mut self, pool: PoolId) -> bool {
        let at = self.kept.binary_search(&pool);
        at.map(|at| self.kept.remove(at)).is_ok()
    }

    /// The heap of a destroyed pool is gone: keeps its sums and its history.
    pub(super) fn bury(&mut self, heap: &mut Heap<L>, symmetric: bool) {
        heap.add_to(&mut self.counts);
        self.counts.usage = Default::default();
        self.usage.absorb(heap.usage());
        if symmetric && heap.has_history() && !heap.is_settled() {
            let HeapIdentity { pool, stream, .. } = heap.identity();
            self.histories.insert((pool, stream), heap.digest());
            if self.journals.len() == JOURNALS_MAX {
                self.journals.pop_front();
            }
            self.journals.extend(heap.take_journal().map(|journal| ((pool, stream), journal)));
        }
    }

    /// A place for a later pool of the same configuration.
    pub(super) fn add_spare(&mut self, pool: Arc<Pool<L>>) {
        self.spare.entry(pool.config_digest).or_default().push(pool);
    }
}
