//! The last resort before an allocation fails: `out_of_memory:trim`.
//!
//! PyTorch's own allocator releases its whole cache if the driver is out of memory, and programs rely on it to run close to the limit. A
//! symmetric pool must not do so on one rank only, because that rank's later placements would then differ from those of the other ranks
//! (rule D4). Therefore only *private* pools, which ranks do not compare, release their free memory, in the order of their ids, and the
//! allocation is retried.

use crate::mempools::{ForeignPool, Mempools};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_core::{Retry, SharedAllocator};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaMemory, trim_private_pools};

/// Counters of memory shortages.
#[derive(Default)]
pub(crate) struct Refusals {
    retries: AtomicU64,
    failures: AtomicU64,
}

impl Refusals {
    /// Installs a callback that releases memory before an allocation fails, and retries the allocation if any memory was released.
    pub(crate) fn trim_when_refused<F: ForeignPool + Send + Sync + 'static>(
        refusals: &Arc<Self>,
        allocator: &CudaAllocator,
        mempools: &Arc<Mempools<F>>,
    ) {
        let (refusals, mempools) = (Arc::clone(refusals), Arc::clone(mempools));
        allocator.set_failure_callback(move |core, _| {
            let released_bytes = make_room(core, &mempools);
            tracing::info!(name: "memory.trimmed", target: "symmalloc", released_bytes);
            if released_bytes == 0 {
                return Retry::IfReleased;
            }
            refusals.retries.fetch_add(1, Ordering::Relaxed);
            Retry::Again
        });
    }

    /// Counts a failed allocation.
    pub(crate) fn count(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of allocations that were retried.
    pub(crate) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Returns the number of allocations that failed.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Releases the free memory of all private pools, except those that graphs use. Memory that cannot be released stays. Returns the bytes
/// released.
pub(crate) fn make_room<F: ForeignPool>(core: &SharedAllocator<CudaBackend>, mempools: &Mempools<F>) -> u64 {
    let is_capturing = core.backend().device().is_capturing();
    // The core logged the failure.
    let given_back = mempools.give_back(core, None, || Ok(is_capturing)).released_bytes;
    // The mempools are listed anew for each pool, because another thread may create one in the meantime.
    let is_of_graph = |pool| mempools.list().iter().any(|entry| entry.own() == Some(pool));
    given_back + trim_private_pools(core, is_of_graph)
}
