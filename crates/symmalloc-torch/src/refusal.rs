//! The last resort before an allocation fails: `out_of_memory:trim`.
//!
//! PyTorch's own allocator releases its whole cache if the driver is out of memory, and programs rely on it to run close to the limit.
//! Symmetric pools must not do so on one rank only (rule D4). Therefore only the *other* pools release their free memory, in order of
//! their ids, and the allocation is retried. Symmetric pools keep their placements; ranks do not compare private pools.

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
    /// Installs a callback that releases memory before an allocation fails, and retries the allocation if that released any.
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

    /// Allocations that were retried.
    pub(crate) fn retries(&self) -> u64 {
        self.retries.load(Ordering::Relaxed)
    }

    /// Allocations that failed.
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
    // The graphs' pools are listed for each pool: another thread may create one meanwhile.
    let is_of_graph = |pool| mempools.list().iter().any(|entry| entry.own() == Some(pool));
    given_back + trim_private_pools(core, is_of_graph)
}
