//! Histories: what agreement reads of an allocator's symmetric pools, and forgets once all ranks agree.

use super::pools::Pool;
use super::{Allocator, HeapCell};
use crate::history::digest::Digest;
use crate::history::journal::{Journal, ProgramOrder};
use crate::op::Op;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{PoolId, StreamId};

/// Where the history of a symmetric pool's heap stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeapHistory {
    /// The pool, among the symmetric ones.
    pub(crate) ordinal: u32,
    pub(crate) stream: Option<StreamId>,
    pub(crate) digest: Digest,
    /// The oldest op that its journal remembers.
    pub(crate) oldest: u64,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The pool with this ordinal among the symmetric ones, as agreement names pools. A rank may have private pools in
    /// between, so that its ids differ from another's.
    pub fn symmetric_pool(&self, ordinal: u32) -> Option<PoolId> {
        self.symmetric_pools().nth(ordinal as usize).map(|(pool, _)| pool)
    }

    /// The ordinal of a pool among the symmetric ones: the other way round. `None` for a pool that is not symmetric.
    pub fn symmetric_ordinal(&self, pool: PoolId) -> Option<u32> {
        self.symmetric_pools().zip(0..).find(|((id, _), _)| *id == pool).map(|(_, ordinal)| ordinal)
    }

    /// Bytes that the history of symmetric heaps takes now. See [`ConfigBuilder::history_ops`](crate::config::ConfigBuilder::history_ops).
    pub fn history_bytes(&self) -> u64 {
        self.all_heaps().map(|heap| heap.lock().journal().map_or(0, Journal::bytes)).sum()
    }

    /// In the order in which the program made them, destroyed ones included.
    fn symmetric_pools(&self) -> impl Iterator<Item = (PoolId, &Pool<L>)> {
        let pools = self.pools.iter().filter(|(_, pool)| pool.config.symmetric());
        pools.map(|(index, pool)| (PoolId(index as u32), pool.as_ref()))
    }

    fn symmetric_heap(&self, ordinal: u32, stream: Option<StreamId>) -> Option<&HeapCell<L>> {
        let (_, pool) = self.symmetric_pools().nth(ordinal as usize)?;
        pool.heaps().find(|heap| heap.lock().identity().stream == stream)
    }

    /// The heaps of symmetric pools that have carried out an op, ascending; not those of destroyed pools whose end was
    /// agreed on.
    pub(crate) fn heap_histories(&self) -> Vec<HeapHistory> {
        let pools = self.symmetric_pools().zip(0..);
        let heaps = pools.flat_map(|((_, pool), ordinal)| pool.heaps().map(move |heap| (ordinal, heap.lock())));
        let lived = heaps.filter(|(_, heap)| heap.has_history() && !heap.is_settled());
        let history = lived.map(|(ordinal, heap)| HeapHistory {
            ordinal,
            stream: heap.identity().stream,
            digest: heap.digest(),
            oldest: heap.journal().map_or(heap.digest().ops, Journal::oldest),
        });
        history.collect()
    }

    /// Digests of the configurations of the symmetric pools.
    pub(crate) fn symmetric_config_digests(&self) -> impl Iterator<Item = u64> {
        self.symmetric_pools().map(|(_, pool)| pool.config_digest)
    }

    /// The text of the configuration of a symmetric pool.
    pub(crate) fn symmetric_config_text(&self, ordinal: u32) -> Option<String> {
        Some(self.symmetric_pools().nth(ordinal as usize)?.1.config.to_string())
    }

    /// What decides in symmetric pools and is not in their own configurations.
    pub(crate) fn shared_policy(&self) -> String {
        let limit = self.limit_bytes().map_or_else(|| "none".to_owned(), |bytes| bytes.to_string());
        let retries_max = self.config.retries_max();
        format!("granularity_bytes:{},total_limit_bytes:{limit},retries_max:{retries_max}", self.granularity_bytes)
    }

    /// What the journal of a heap says, if it has one.
    pub(crate) fn look_back<T>(
        &self,
        ordinal: u32,
        stream: Option<StreamId>,
        look: impl FnOnce(&Journal) -> T,
    ) -> Option<T> {
        self.symmetric_heap(ordinal, stream)?.lock().journal().map(look)
    }

    /// The order of ops over the heaps.
    pub(crate) fn program_order(&self) -> &ProgramOrder {
        &self.program_order
    }

    /// All ranks are at this sync.
    pub(crate) fn pass_sync(&self) {
        self.gate().note(Op::Sync);
    }

    /// All ranks have this digest here: the history before it is forgotten.
    pub(crate) fn settle(&self, ordinal: u32, stream: Option<StreamId>, digest: Digest) {
        if let Some(heap) = self.symmetric_heap(ordinal, stream) {
            heap.lock().settle(digest);
        }
    }
}
