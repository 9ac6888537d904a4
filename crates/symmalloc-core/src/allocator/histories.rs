//! The histories of an allocator's symmetric pools, for ranks to compare.
//!
//! The core itself does not compare ranks (rule D6). The crate `symmalloc-agreement` reads the histories here and
//! reports back the state on which all ranks agreed. A pool is identified by its ordinal among the symmetric pools,
//! because ranks may create different private pools between them.

pub use crate::history::digest::{Mark, folded_multiply, op_word, unpack_op, unpack_placement};
pub use crate::history::journal::{CHECKPOINTS_MAX, Journal, JournalEntry, NAME_BYTES_MAX, ProgramOrder};

use super::Allocator;
use super::pool::{HeapCell, PoolSlot};
use crate::config::op::Op;
use crate::config::text::hash_of_text;
use crate::heap::Heap;
use crate::history::digest::Digest;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{HeapId, PoolId, StreamGroup};

/// The current history of one heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapHistory {
    /// The pool's ordinal among symmetric pools.
    pub pool: u32,
    /// The streams that share the heap.
    pub group: StreamGroup,
    /// The digest of all ops.
    pub digest: Digest,
    /// The smallest number of ops after which the journal knows the digest, apart from checkpoints.
    pub oldest: u64,
}

/// Access to the histories of an allocator, without its type parameters.
pub trait HistorySource {
    /// Returns the histories of all heaps of symmetric pools that have executed an op, by pool and stream. Omits heaps
    /// of destroyed pools once the ranks have agreed on their whole history.
    fn heap_histories(&self) -> Vec<HeapHistory>;
    /// Returns the digests of the configurations: first that of the settings for all pools, then that of each symmetric
    /// pool.
    fn policy_digests(&self) -> Vec<u64>;
    /// Returns the text of the configuration with this index in `policy_digests`.
    fn policy(&self, number: u32) -> Option<String>;
    /// Passes a heap's journal to `look`, if the heap has one.
    fn look_back(&self, pool: u32, group: StreamGroup, look: &mut dyn FnMut(&Journal));
    /// Returns the numbering of ops over all symmetric heaps.
    fn program_order(&self) -> &ProgramOrder;
    /// Records that all ranks reached this sync.
    fn pass_sync(&self);
    /// Records that all ranks had this digest in this heap, and forgets the history before it.
    fn settle(&self, pool: u32, group: StreamGroup, digest: Digest);
}

impl<B: Backend, L: Lock> HistorySource for Allocator<B, L> {
    fn heap_histories(&self) -> Vec<HeapHistory> {
        // Lists the live pools first: a pool that is destroyed in the meantime is then in both lists rather than in
        // neither.
        let pools = self.symmetric_pools().zip(0..).filter_map(|((_, slot), ordinal)| Some((slot.pool()?, ordinal)));
        let heaps = pools.flat_map(|(pool, ordinal)| pool.heaps().map(move |heap| (ordinal, heap.lock())));
        let lived = heaps.filter(|(_, heap)| heap.ledger().has_history() && !heap.ledger().is_settled());
        let lived = lived.map(|(pool, heap)| HeapHistory {
            pool,
            group: heap.id().group,
            digest: heap.ledger().digest(),
            oldest: heap.ledger().journal().map_or(heap.ledger().digest().ops, Journal::oldest),
        });
        let lived: Vec<_> = lived.collect();
        let destroyed = self.destroyed.lock();
        let mut symmetric = self.symmetric_pools().zip(0..).peekable();
        let ended = destroyed.histories().map(|(heap, digest)| {
            while symmetric.next_if(|((earlier, _), _)| *earlier < heap.pool).is_some() {}
            let (_, pool) = symmetric.peek().expect("only symmetric pools have histories");
            let oldest = destroyed.journal(heap).map_or(digest.ops, Journal::oldest);
            HeapHistory { pool: *pool, group: heap.group, digest, oldest }
        });
        let mut histories: Vec<_> = ended.chain(lived).collect();
        histories.sort_by_key(|history| (history.pool, history.group));
        histories.dedup_by_key(|history| (history.pool, history.group));
        histories
    }

    fn policy_digests(&self) -> Vec<u64> {
        std::iter::once(hash_of_text(&self.shared_policy()))
            .chain(self.symmetric_pools().map(|(_, pool)| pool.config_digest()))
            .collect()
    }

    fn policy(&self, number: u32) -> Option<String> {
        match number.checked_sub(1) {
            None => Some(self.shared_policy()),
            Some(ordinal) => Some(self.symmetric_pools().nth(ordinal as usize)?.1.config().to_string()),
        }
    }

    fn look_back(&self, pool: u32, group: StreamGroup, look: &mut dyn FnMut(&Journal)) {
        if let Some(heap) = self.symmetric_heap(pool, group) {
            heap.lock().ledger().journal().into_iter().for_each(look);
        } else if let Some(id) = self.symmetric_pool(pool) {
            self.destroyed.lock().journal(HeapId { pool: id, group }).into_iter().for_each(look);
        }
    }

    fn program_order(&self) -> &ProgramOrder {
        &self.program_order
    }

    fn pass_sync(&self) {
        self.gate().note(Op::Sync);
    }

    fn settle(&self, pool: u32, group: StreamGroup, digest: Digest) {
        if let Some(heap) = self.symmetric_heap(pool, group) {
            heap.lock().settle(digest);
        } else if let Some(id) = self.symmetric_pool(pool) {
            self.destroyed.lock().settle(HeapId { pool: id, group }, digest);
        }
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the pool with this ordinal among the symmetric pools. Agreement identifies pools by this ordinal,
    /// because ranks may have different private pools, so the ids of pools differ between ranks.
    pub fn symmetric_pool(&self, ordinal: u32) -> Option<PoolId> {
        self.symmetric_pools().nth(ordinal as usize).map(|(pool, _)| pool)
    }

    /// Returns the ordinal of a pool among the symmetric pools; `None` for a pool that is not symmetric.
    pub fn symmetric_ordinal(&self, pool: PoolId) -> Option<u32> {
        self.symmetric_pools().zip(0..).find(|((id, _), _)| *id == pool).map(|(_, ordinal)| ordinal)
    }

    /// Returns the bytes of host memory that the histories of symmetric heaps take. See
    /// [`ConfigBuilder::history_ops`](crate::config::ConfigBuilder::history_ops).
    pub fn history_bytes(&self) -> u64 {
        let heaps: u64 = self.all_heaps().map(|heap| heap.lock().ledger().journal().map_or(0, Journal::bytes)).sum();
        heaps + self.destroyed.lock().history_bytes()
    }

    /// Returns the symmetric pools in the order of their creation, including destroyed ones.
    fn symmetric_pools(&self) -> impl Iterator<Item = (PoolId, &PoolSlot<L>)> {
        let slots = self.pools.iter().filter(|(_, slot)| slot.config().symmetric());
        slots.map(|(index, slot)| (PoolId(index as u32), slot))
    }

    fn symmetric_heap(&self, pool: u32, group: StreamGroup) -> Option<&HeapCell<L>> {
        let (_, slot) = self.symmetric_pools().nth(pool as usize)?;
        let is_meant = |heap: &Heap<L>| heap.id().group == group && heap.ledger().has_history();
        slot.pool()?.heaps().find(|heap| is_meant(&heap.lock()))
    }

    /// Returns the text of all settings that affect symmetric pools and that are not in the pools' own configurations.
    fn shared_policy(&self) -> String {
        let limit = self.total_limit_bytes().map_or_else(|| "none".to_owned(), |bytes| bytes.to_string());
        let retries_max = self.config().retries_max();
        format!("granularity_bytes:{},total_limit_bytes:{limit},retries_max:{retries_max}", self.granularity_bytes)
    }
}
