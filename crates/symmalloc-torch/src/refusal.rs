//! What happens before an allocation fails: `out_of_memory:trim`.
//!
//! PyTorch's own allocator gives its whole cache back when the driver refuses, and programs run close to the limit because of
//! it. Here pools that all ranks share must not do so on one rank alone (rule D4). So the free memory of the *other* pools goes
//! back, in the order of their ids, and the allocation is tried again: symmetric pools keep their places, and private ones,
//! which ranks do not compare, make room.

use crate::private_pools::{ForeignPool, PrivatePools};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use symmalloc_core::errors::TrimError;
use symmalloc_core::{Retry, SharedAllocator};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaMemory};

/// How often memory was short.
#[derive(Default)]
pub(crate) struct Refusals {
    retries: AtomicU64,
    failures: AtomicU64,
}

impl Refusals {
    /// Answers the core's question.
    pub(crate) fn trim_when_refused<F: ForeignPool + Send + Sync + 'static>(
        refusals: &Arc<Self>,
        allocator: &CudaAllocator,
        private: &Arc<PrivatePools<F>>,
    ) {
        let (refusals, private) = (Arc::clone(refusals), Arc::clone(private));
        allocator.set_failure_callback(move |core, _| {
            let released_bytes = trim_private(core, &private);
            tracing::info!(name: "memory.trimmed", target: "symmalloc", released_bytes);
            if released_bytes == 0 {
                return Retry::GiveUp;
            }
            refusals.retries.fetch_add(1, Ordering::Relaxed);
            Retry::Again
        });
    }

    /// An allocation failed.
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

/// Gives back the free memory of all pools that are neither symmetric nor a graph's and have no quota. What cannot go back stays.
fn trim_private<F: ForeignPool>(core: &SharedAllocator<CudaBackend>, private: &PrivatePools<F>) -> u64 {
    let is_capturing = core.backend().device().is_capturing();
    // The core told of what failed.
    let mut released_bytes = private.give_back(core, None, || Ok(is_capturing)).released_bytes;
    // Counted first: a graph's pool that another thread begins meanwhile is not among them, or is in the list.
    let pools = core.pools();
    let in_use = private.list();
    for pool in pools {
        let stays = core.pool_config(pool).is_ok_and(|config| config.symmetric() || config.has_quota());
        if stays || in_use.iter().any(|entry| entry.own() == Some(pool)) {
            continue;
        }
        match core.trim(Some(pool)) {
            Ok(bytes) => released_bytes += bytes,
            // The core told of it.
            Err(TrimError::Backend { released_bytes: some, .. }) => released_bytes += some,
            Err(_) => {}
        }
    }
    released_bytes
}
