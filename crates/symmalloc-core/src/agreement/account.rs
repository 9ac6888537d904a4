//! What an allocator can tell about its symmetric pools.

use super::question::{HeapKey, Standing};
use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::config_text::hash_of_text;
use crate::digest::Digest;
use crate::held::HeapCell;
use crate::ids::PoolId;
use crate::journal::{Journal, ProgramOrder};
use crate::lock::Lock;
use crate::op::Op;
use crate::pool::Pool;

/// An allocator without its type parameters.
pub(crate) trait Account {
    /// The heaps of symmetric pools that have carried out an op, ascending; not those of destroyed pools whose end was
    /// agreed on.
    fn standings(&self) -> Vec<Standing>;
    /// Digests of the configurations: the allocator's, then each symmetric pool's.
    fn policy_digests(&self) -> Vec<u64>;
    /// The text of one of them.
    fn policy(&self, number: u32) -> Option<String>;
    /// Shows a heap's journal, if it has one.
    fn look_back(&self, heap: HeapKey, look: &mut dyn FnMut(&Journal));
    /// The order of ops over the heaps.
    fn order(&self) -> &ProgramOrder;
    /// All ranks are at this sync.
    fn pass_sync(&self);
    /// All ranks have this digest here.
    fn settle(&self, heap: HeapKey, digest: Digest);
}

impl<B: Backend, L: Lock> Account for Allocator<B, L> {
    fn standings(&self) -> Vec<Standing> {
        let mut standings = Vec::new();
        for ((_, pool), ordinal) in self.symmetric_pools().zip(0..) {
            for heap in pool.heaps() {
                let heap = heap.lock();
                if heap.digest.ops > 0 && !heap.is_settled {
                    let oldest = heap.journal.as_ref().map_or(heap.digest.ops, |journal| journal.oldest());
                    let key = HeapKey::new(ordinal, heap.stream);
                    standings.push(Standing { key, digest: heap.digest, oldest });
                }
            }
        }
        standings
    }

    fn policy_digests(&self) -> Vec<u64> {
        let pools = self.symmetric_pools().map(|(_, pool)| pool.config_digest);
        std::iter::once(hash_of_text(&self.shared_policy())).chain(pools).collect()
    }

    fn policy(&self, number: u32) -> Option<String> {
        match number.checked_sub(1) {
            None => Some(self.shared_policy()),
            Some(ordinal) => Some(self.symmetric_pools().nth(ordinal as usize)?.1.config.to_string()),
        }
    }

    fn look_back(&self, heap: HeapKey, look: &mut dyn FnMut(&Journal)) {
        let Some(heap) = self.symmetric_heap(heap) else { return };
        if let Some(journal) = &heap.lock().journal {
            look(journal);
        }
    }

    fn order(&self) -> &ProgramOrder {
        &self.program_order
    }

    fn pass_sync(&self) {
        self.tape().note(Op::Sync);
    }

    fn settle(&self, heap: HeapKey, digest: Digest) {
        let Some(heap) = self.symmetric_heap(heap) else { return };
        let mut heap = heap.lock();
        // Told by what was agreed on, and not by what happened since on this rank alone.
        heap.is_settled = heap.closed_after_ops.is_some_and(|ops| ops <= digest.ops);
        let is_settled = heap.is_settled;
        if let Some(journal) = &mut heap.journal {
            journal.agree(digest);
            if is_settled {
                journal.close();
            }
        }
    }
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
        let heaps =
            self.heaps.iter().map(|(_, heap)| heap.lock().journal.as_ref().map_or(0, |journal| journal.bytes()));
        heaps.sum()
    }

    /// In the order in which the program made them, destroyed ones included.
    fn symmetric_pools(&self) -> impl Iterator<Item = (PoolId, &Pool<L>)> {
        let pools = self.pools.iter().filter(|(_, pool)| pool.config.symmetric());
        pools.map(|(index, pool)| (PoolId(index as u32), pool.as_ref()))
    }

    fn symmetric_heap(&self, key: HeapKey) -> Option<&HeapCell<L>> {
        let (_, pool) = self.symmetric_pools().nth(key.pool as usize)?;
        pool.heaps().find(|heap| heap.lock().stream == key.stream())
    }

    /// What decides in symmetric pools and is not in their own configurations.
    fn shared_policy(&self) -> String {
        let limit = self.limit_bytes().map_or_else(|| "none".to_owned(), |bytes| bytes.to_string());
        let retries_max = self.config().retries_max();
        format!("granularity_bytes:{},total_limit_bytes:{limit},retries_max:{retries_max}", self.granularity_bytes)
    }
}
