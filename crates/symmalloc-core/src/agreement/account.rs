//! What an allocator can tell about its symmetric pools.

use super::question::{HeapKey, Standing};
use crate::allocator::{Allocator, HeapHistory};
use crate::backend::Backend;
use crate::config_text::hash_of_text;
use crate::history::digest::Digest;
use crate::history::journal::{Journal, ProgramOrder};
use crate::lock::Lock;

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
        let standing = |history: HeapHistory| Standing {
            key: HeapKey::new(history.ordinal, history.stream),
            digest: history.digest,
            oldest: history.oldest,
        };
        self.heap_histories().into_iter().map(standing).collect()
    }

    fn policy_digests(&self) -> Vec<u64> {
        std::iter::once(hash_of_text(&self.shared_policy())).chain(self.symmetric_config_digests()).collect()
    }

    fn policy(&self, number: u32) -> Option<String> {
        match number.checked_sub(1) {
            None => Some(self.shared_policy()),
            Some(ordinal) => self.symmetric_config_text(ordinal),
        }
    }

    fn look_back(&self, heap: HeapKey, look: &mut dyn FnMut(&Journal)) {
        self.look_back(heap.pool, heap.stream(), look);
    }

    fn order(&self) -> &ProgramOrder {
        self.program_order()
    }

    fn pass_sync(&self) {
        self.pass_sync();
    }

    fn settle(&self, heap: HeapKey, digest: Digest) {
        self.settle(heap.pool, heap.stream(), digest);
    }
}
