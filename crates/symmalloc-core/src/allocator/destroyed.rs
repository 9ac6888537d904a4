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

use super::Allocator;
use super::pool::{HeapGuard, Pool};
use crate::config::PoolConfig;
use crate::heap::view::MemoryStats;
use crate::heap::{Heap, HeapIdentity};
use crate::history::digest::Digest;
use crate::history::journal::Journal;
use crate::history::segment_log::SegmentLog;
use crate::stats::usage::Usage;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
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
    histories: BTreeMap<HistoryKey, FinalHistory>,
    /// Those that may have journals, in the order of destruction.
    with_journal: VecDeque<HistoryKey>,
    /// Usage of all heaps that are gone.
    pub(super) usage: Usage,
    /// Other statistics of them.
    counts: MemoryStats,
}

/// The pool of a heap, and its stream.
type HistoryKey = (PoolId, Option<StreamId>);

/// The history of a destroyed heap that ranks have not agreed on yet.
pub(super) struct FinalHistory {
    pub(super) digest: Digest,
    /// Ops until the pool was destroyed.
    closed_after_ops: u64,
    /// `None` when others are more recent, or there was none.
    pub(super) journal: Option<Box<Journal>>,
}

impl<L: Lock> Destroyed<L> {
    /// With the default pool.
    pub(super) fn new() -> Self {
        Destroyed {
            kept: vec![PoolId::DEFAULT],
            spare: BTreeMap::new(),
            histories: BTreeMap::new(),
            with_journal: VecDeque::new(),
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

    /// In the order of pools and streams.
    pub(super) fn histories(&self) -> impl Iterator<Item = (HistoryKey, &FinalHistory)> {
        self.histories.iter().map(|(key, history)| (*key, history))
    }

    pub(super) fn history(&self, pool: PoolId, stream: Option<StreamId>) -> Option<&FinalHistory> {
        self.histories.get(&(pool, stream))
    }

    /// All ranks had this digest: a history that it ends is forgotten.
    pub(super) fn settle(&mut self, pool: PoolId, stream: Option<StreamId>, digest: Digest) {
        let Some(history) = self.histories.get_mut(&(pool, stream)) else { return };
        if history.closed_after_ops <= digest.ops {
            self.histories.remove(&(pool, stream));
        } else if let Some(journal) = &mut history.journal {
            journal.agree(digest);
        }
    }

    pub(super) fn history_bytes(&self) -> u64 {
        self.histories.values().filter_map(|history| history.journal.as_deref()).map(Journal::bytes).sum()
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

    /// The heap is gone: keeps its sums and its history, and nothing else.
    fn bury(&mut self, heap: &mut Heap<L>, symmetric: bool) {
        heap.add_to(&mut self.counts);
        self.counts.usage = Default::default();
        self.usage.absorb(heap.usage());
        if symmetric && heap.has_history() && !heap.is_settled() {
            let HeapIdentity { pool, stream, .. } = heap.identity();
            let closed_after_ops = heap.closed_after_ops().expect("only destroyed pools are buried");
            let (digest, journal) = (heap.digest(), heap.take_journal());
            self.histories.insert((pool, stream), FinalHistory { digest, closed_after_ops, journal });
            self.with_journal.push_back((pool, stream));
            if self.with_journal.len() > JOURNALS_MAX
                && let Some(oldest) = self.with_journal.pop_front()
                && let Some(history) = self.histories.get_mut(&oldest)
            {
                history.journal = None;
            }
        }
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The pools that reports and trims visit, in the order of their ids: live ones, and those whose memory the driver holds.
    pub(super) fn kept_pools(&self) -> impl Iterator<Item = (PoolId, &Arc<Pool<L>>)> {
        let kept = self.destroyed.lock().kept().to_vec();
        kept.into_iter().filter_map(|id| Some((id, self.pools.get(id.index())?))).filter(|(id, pool)| pool.id() == *id)
    }

    /// Number of pools that reports and trims visit. For tests.
    #[doc(hidden)]
    pub fn kept_pool_count(&self) -> usize {
        self.destroyed.lock().kept().len()
    }

    /// A destroyed pool whose memory is back on the device gives its place up.
    pub(super) fn bury(&self, pool: PoolId, entry: &Arc<Pool<L>>, heaps: &mut [HeapGuard<'_, L>]) {
        if heaps.iter().any(|heap| heap.log().has_retired()) {
            return;
        }
        let mut destroyed = self.destroyed.lock();
        let Ok(at) = destroyed.kept.binary_search(&pool) else { return };
        destroyed.kept.remove(at);
        for heap in heaps {
            destroyed.bury(heap, entry.config.symmetric());
            let HeapIdentity { id, stream, .. } = heap.identity();
            let past = heap.take_past();
            **heap = self.empty_heap(entry, HeapIdentity { id, pool, stream });
            heap.set_past(past);
            heap.close();
        }
        destroyed.spare.entry(entry.config_digest).or_default().push(Arc::clone(entry));
    }

    /// A heap without ops and observers.
    pub(super) fn empty_heap(&self, entry: &Pool<L>, identity: HeapIdentity) -> Heap<L> {
        let log = SegmentLog::new(Arc::clone(&entry.log_entries));
        Heap::new(identity, entry.config.clone(), Arc::clone(&entry.budget), self.granularity_bytes, log)
    }
}
