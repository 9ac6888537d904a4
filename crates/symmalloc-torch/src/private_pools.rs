//! Private pools: those that PyTorch names by a `MempoolId`, for graphs mostly.
//!
//! ```text
//!  begin ──► uses 1 ── end ──► uses 1 ── begin again ──► uses 2 ── release, release ──► uses 0 ──► empty_cache
//!            the same id is the same pool, as long as it has uses or memory                       memory goes back
//! ```
//!
//! A graph uses its memory without the allocator's knowledge, so nothing of a pool in use goes back, and the device is waited
//! for before anything of a released one does.

use crate::scopes::MempoolId;
use std::sync::{Mutex, MutexGuard, PoisonError};
use symmalloc_core::config::{PoolConfig, Reclaim};
use symmalloc_core::errors::{PoolError, TrimError};
use symmalloc_core::{PoolId, SharedAllocator};
use symmalloc_cuda::{CudaBackend, CudaError, CudaMemory};

/// The private pools of one allocator.
#[derive(Default)]
pub(crate) struct PrivatePools {
    /// In the order in which they were made.
    all: Mutex<Vec<PrivatePool>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PrivatePool {
    id: MempoolId,
    pub(crate) pool: PoolId,
    /// Begins without a release.
    pub(crate) uses: u32,
}

/// What went back. A failure stops neither the other pools nor the count.
#[derive(Debug, Default)]
pub(crate) struct GivenBack {
    pub(crate) released_bytes: u64,
    /// The first.
    pub(crate) failure: Option<CudaError>,
}

impl GivenBack {
    fn add(&mut self, trimmed: Result<u64, TrimError>) {
        match trimmed {
            Ok(bytes) => self.released_bytes += bytes,
            // Destroyed since: nothing is left of it.
            Err(TrimError::Unknown(_)) => {}
            Err(error) => {
                if let TrimError::Backend { released_bytes, .. } = error {
                    self.released_bytes += released_bytes;
                }
                self.failure.get_or_insert(error.into());
            }
        }
    }
}

impl PrivatePools {
    /// Takes a pool into use; makes it when there is none of this name.
    pub(crate) fn begin(&self, core: &SharedAllocator<CudaBackend>, id: MempoolId) -> Result<PoolId, CudaError> {
        let mut all = self.lock();
        if let Some(known) = all.iter_mut().find(|known| known.id == id) {
            known.uses += 1;
            return Ok(known.pool);
        }
        let pool = core.create_pool(policy(core.config().default_pool())?)?;
        all.push(PrivatePool { id, pool, uses: 1 });
        Ok(pool)
    }

    /// Gives up one use. Whether there was one.
    pub(crate) fn release(&self, id: MempoolId) -> bool {
        let mut all = self.lock();
        let known = all.iter_mut().find(|known| known.id == id && known.uses > 0);
        known.map(|known| known.uses -= 1).is_some()
    }

    /// The private pools now.
    pub(crate) fn list(&self) -> Vec<PrivatePool> {
        self.lock().clone()
    }

    /// Gives the free memory of released pools back, and destroys those of which nothing is allocated. Does nothing while
    /// `is_capturing`: the device cannot be waited for then.
    pub(crate) fn give_back(
        &self,
        core: &SharedAllocator<CudaBackend>,
        is_capturing: impl FnOnce() -> Result<bool, CudaError>,
    ) -> GivenBack {
        let mut given = GivenBack::default();
        let mut all = self.lock();
        if all.iter().all(|pool| pool.uses > 0) {
            return given;
        }
        match is_capturing() {
            Ok(false) => {}
            Ok(true) => return given,
            Err(error) => return GivenBack { failure: Some(error), ..given },
        }
        if let Err(error) = core.backend().device().synchronize() {
            return GivenBack { failure: Some(error.into()), ..given };
        }
        all.retain(|entry| {
            if entry.uses > 0 {
                return true;
            }
            given.add(core.trim(Some(entry.pool)));
            // What is still allocated, or registered, keeps its pool for the next time.
            matches!(core.destroy_pool(entry.pool), Err(PoolError::InUse { .. } | PoolError::Observed { .. }))
        });
        given
    }

    fn lock(&self) -> MutexGuard<'_, Vec<PrivatePool>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As the default pool, but its memory stays, under the addresses that a graph has captured, and ranks may capture what they like.
fn policy(default: &PoolConfig) -> Result<PoolConfig, CudaError> {
    let policy =
        default.to_builder().stitching(None).reclaim(Reclaim::Never).release_threshold_bytes(None).symmetric(false);
    Ok(policy.build()?)
}
