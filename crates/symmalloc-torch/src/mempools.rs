//! Mempools: the pools that PyTorch identifies by a `MempoolId`, for graphs and for its `MemPool`.
//!
//! ```text
//!  begin ──► uses 1 ── end ──► uses 1 ── begin again ──► uses 2 ── release, release ──► uses 0 ──► empty_cache
//!            the same id is the same pool, as long as it has uses or memory                       memory is released
//! ```
//!
//! | pool | its memory |
//! |---|---|
//! | a graph's | like the default pool's |
//! | a `MemPool` | fixed segments, which libraries can register one by one |
//! | a `MemPool(no_split)` | a separate segment for each allocation, of the allocation's size |
//! | a `MemPool` with the program's allocator | segments from that allocator's functions, cached by an instance of this allocator |
//!
//! A graph uses its memory without the allocator's knowledge. A pool in use therefore releases no memory, and a pool without uses releases
//! memory only after waiting for the device.

use crate::error::Error;
use crate::settings::without_groups;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::config::{FixedSegments, PlanPolicy, PoolConfig, Reclaim, SegmentPolicy};
use symmalloc_core::errors::{PoolError, TrimError};
use symmalloc_core::{PoolId, SharedAllocator};
use symmalloc_cuda::{CudaBackend, CudaError, CudaMemory, MemorySource};

/// PyTorch's id of a mempool.
pub(crate) type MempoolId = (u64, u64);

/// An allocator that gets its memory from functions of the program. The trait contains the operations that this file and `scopes.rs` need.
pub(crate) trait ForeignPool: Sized {
    /// The pool of all allocations of this allocator. Unlike the default pool, it can be destroyed, and afterwards no thread can allocate
    /// in it.
    const POOL: PoolId;
    /// Creates an allocator over the source's memory on a device, with this configuration.
    fn over(ordinal: usize, source: Arc<dyn MemorySource>, conf: &str) -> Result<Self, Error>;
    /// Returns the core of this allocator.
    fn core(&self) -> &SharedAllocator<CudaBackend>;
}

/// The pool to allocate from.
pub(crate) enum PoolTarget<F> {
    /// A pool of the device's allocator.
    Own(PoolId),
    /// An allocator over the program's memory.
    Foreign(Arc<F>),
}

impl<F> Clone for PoolTarget<F> {
    fn clone(&self) -> Self {
        match self {
            PoolTarget::Own(pool) => PoolTarget::Own(*pool),
            PoolTarget::Foreign(other) => PoolTarget::Foreign(Arc::clone(other)),
        }
    }
}

impl<F> PartialEq for PoolTarget<F> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (PoolTarget::Own(pool), PoolTarget::Own(other)) => pool == other,
            (PoolTarget::Foreign(allocator), PoolTarget::Foreign(other)) => Arc::ptr_eq(allocator, other),
            _ => false,
        }
    }
}

impl<F> PoolTarget<F> {
    /// Returns the pool's id if it belongs to the device's allocator.
    pub(crate) fn own(&self) -> Option<PoolId> {
        match self {
            PoolTarget::Own(pool) => Some(*pool),
            PoolTarget::Foreign(_) => None,
        }
    }
}

/// The options of a mempool.
#[derive(Clone, Default)]
pub(crate) struct PoolWishes {
    /// `true` for a `MemPool`, and `false` for a graph's pool.
    pub(crate) is_mem_pool: bool,
    /// `true` if segments are not split.
    pub(crate) is_unsplit: bool,
    /// `true` if allocations outside of the pool may use its free memory before they fail.
    pub(crate) helps_out: bool,
    /// The source of the pool's memory; `None` for device memory of this allocator.
    pub(crate) source: Option<Arc<dyn MemorySource>>,
}

/// The mempools of one allocator.
pub(crate) struct Mempools<F> {
    /// In order of creation.
    all: Mutex<Vec<Mempool<F>>>,
    /// Destroyed pools of the device's allocator whose memory the driver did not release.
    unreleased: Mutex<Vec<PoolId>>,
}

impl<F> Default for Mempools<F> {
    fn default() -> Self {
        Mempools { all: Mutex::default(), unreleased: Mutex::default() }
    }
}

pub(crate) struct Mempool<F> {
    pub(crate) id: MempoolId,
    /// `None` until the first `begin`, which creates the pool.
    pub(crate) target: Option<PoolTarget<F>>,
    /// The number of uses: `begin` and `retain` add one, and `release` removes one.
    pub(crate) uses: u32,
    pub(crate) wishes: PoolWishes,
}

impl<F> Clone for Mempool<F> {
    fn clone(&self) -> Self {
        Mempool { id: self.id, target: self.target.clone(), uses: self.uses, wishes: self.wishes.clone() }
    }
}

impl<F> Mempool<F> {
    /// Returns the id of its pool in the device's allocator, if it has one.
    pub(crate) fn own(&self) -> Option<PoolId> {
        self.target.as_ref().and_then(PoolTarget::own)
    }
}

/// The result of releasing memory. A failure does not prevent the release of other pools' memory.
#[derive(Debug, Default)]
pub(crate) struct GivenBack {
    pub(crate) released_bytes: u64,
    /// The first error.
    pub(crate) failure: Option<CudaError>,
}

impl GivenBack {
    fn add(&mut self, trimmed: Result<u64, TrimError>) {
        match trimmed {
            Ok(bytes) => self.released_bytes += bytes,
            // The pool was destroyed meanwhile and has no memory left.
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

impl<F: ForeignPool> Mempools<F> {
    /// Adds a use to a pool, and creates the pool if there is none with this id.
    pub(crate) fn begin(&self, core: &SharedAllocator<CudaBackend>, id: MempoolId) -> Result<PoolTarget<F>, Error> {
        let mut all = self.lock();
        let at = find_or_add(&mut all, id, PoolWishes::default());
        let target = match &all[at].target {
            Some(target) => target.clone(),
            None => match make(core, &all[at].wishes) {
                Ok(target) => all[at].target.insert(target).clone(),
                Err(error) => {
                    all.retain(|known| known.id != id || known.uses > 0);
                    return Err(error);
                }
            },
        };
        all[at].uses += 1;
        Ok(target)
    }

    /// Adds a use to a `MemPool`, and stores the source of its memory.
    pub(crate) fn retain(&self, id: MempoolId, source: Option<Arc<dyn MemorySource>>) {
        let mut all = self.lock();
        let wishes = PoolWishes { is_mem_pool: true, source, ..PoolWishes::default() };
        let at = find_or_add(&mut all, id, wishes);
        all[at].uses += 1;
    }

    /// Changes the options of a pool. All options but `helps_out` take effect only if they change before the first `begin`. Returns `true`
    /// if there is a pool with this id.
    pub(crate) fn wish(&self, id: MempoolId, change: impl FnOnce(&mut PoolWishes)) -> bool {
        let mut all = self.lock();
        let known = all.iter_mut().find(|known| known.id == id);
        known.map(|known| change(&mut known.wishes)).is_some()
    }

    /// Returns the number of uses of a pool.
    pub(crate) fn uses(&self, id: MempoolId) -> u32 {
        self.lock().iter().find(|known| known.id == id).map_or(0, |known| known.uses)
    }

    /// Releases one use. Returns `true` if there was one.
    pub(crate) fn release(&self, id: MempoolId) -> bool {
        let mut all = self.lock();
        let known = all.iter_mut().find(|known| known.id == id && known.uses > 0);
        known.map(|known| known.uses -= 1).is_some()
    }

    /// Returns the current mempools.
    pub(crate) fn list(&self) -> Vec<Mempool<F>> {
        self.lock().clone()
    }

    /// Returns the allocators over the program's memory, with their pools' ids.
    pub(crate) fn foreign(&self) -> Vec<(MempoolId, Arc<F>)> {
        let foreign = |known: &Mempool<F>| match &known.target {
            Some(PoolTarget::Foreign(allocator)) => Some((known.id, Arc::clone(allocator))),
            _ => None,
        };
        self.lock().iter().filter_map(foreign).collect()
    }

    /// Releases the free memory of pools without uses, and destroys those of them that have no allocations. With `only`, does so for a
    /// single pool. Does nothing during a capture, because a capture does not allow it to wait for the device.
    pub(crate) fn give_back(
        &self,
        core: &SharedAllocator<CudaBackend>,
        only: Option<MempoolId>,
        is_capturing: impl FnOnce() -> Result<bool, CudaError>,
    ) -> GivenBack {
        let mut given = GivenBack::default();
        self.retry(core, &mut given);
        let mut all = self.lock();
        let is_meant = |entry: &Mempool<F>| entry.uses == 0 && only.is_none_or(|id| entry.id == id);
        if !all.iter().any(is_meant) {
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
            if !is_meant(entry) {
                return true;
            }
            let (core, pool) = match &entry.target {
                None => return false,
                Some(PoolTarget::Own(pool)) => (core, *pool),
                Some(PoolTarget::Foreign(allocator)) => (allocator.core(), F::POOL),
            };
            given.add(core.trim_pool(pool));
            let reserved_before = core.stats().reserved_bytes.current;
            let destroyed = core.destroy_pool(pool);
            given.released_bytes += reserved_before.saturating_sub(core.stats().reserved_bytes.current);
            match destroyed {
                // A pool with live or registered memory stays until the next release.
                Err(PoolError::InUse { .. } | PoolError::Observed { .. }) => return true,
                Err(PoolError::Backend(error)) => {
                    given.failure.get_or_insert(PoolError::Backend(error).into());
                    // An allocator over the program's memory is dropped together with its entry.
                    if let Some(PoolTarget::Own(pool)) = entry.target {
                        self.unreleased().push(pool);
                    }
                }
                _ => {}
            }
            false
        });
        given
    }

    /// Releases the memory of destroyed pools that the driver did not release before.
    fn retry(&self, core: &SharedAllocator<CudaBackend>, given: &mut GivenBack) {
        self.unreleased().retain(|pool| {
            let trimmed = core.trim_pool(*pool);
            let is_held = matches!(trimmed, Err(TrimError::Backend { .. }));
            given.add(trimmed);
            is_held
        });
    }

    fn unreleased(&self) -> MutexGuard<'_, Vec<PoolId>> {
        self.unreleased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Mempool<F>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find_or_add<F>(all: &mut Vec<Mempool<F>>, id: MempoolId, wishes: PoolWishes) -> usize {
    all.iter().position(|known| known.id == id).unwrap_or_else(|| {
        all.push(Mempool { id, target: None, uses: 0, wishes });
        all.len() - 1
    })
}

fn make<F: ForeignPool>(core: &SharedAllocator<CudaBackend>, wishes: &PoolWishes) -> Result<PoolTarget<F>, Error> {
    if let Some(source) = &wishes.source {
        let ordinal = core.backend().device().ordinal();
        let conf = if wishes.is_unsplit { "segments:fixed,unsplit:true" } else { "segments:fixed" };
        return Ok(PoolTarget::Foreign(Arc::new(F::over(ordinal, Arc::clone(source), conf)?)));
    }
    let pool = core.create_pool(policy(core.config().default_pool(), wishes)?).map_err(CudaError::from)?;
    Ok(PoolTarget::Own(pool))
}

/// Returns the policy of a mempool, which is that of the default pool with some changes. There is no reclaim and no stitching, because
/// graphs have captured the addresses. The pool is not symmetric, because ranks can capture different graphs. Streams form no groups. The base of the default
/// pool is its own.
fn policy(default: &PoolConfig, wishes: &PoolWishes) -> Result<PoolConfig, CudaError> {
    let policy = default
        .to_builder()
        .base(None)
        .stitching(None)
        .reclaim(Reclaim::Never)
        .release_threshold_bytes(None)
        .symmetric(false);
    let policy = policy.streams(without_groups(default.streams()));
    let mut fixed = match default.segments() {
        SegmentPolicy::Fixed(fixed) => fixed.clone(),
        _ => FixedSegments::default(),
    };
    fixed.unsplit = wishes.is_unsplit;
    let policy = match wishes {
        // No plans, because a plan puts many allocations into one segment.
        PoolWishes { is_unsplit: true, .. } => policy.segments(SegmentPolicy::Fixed(fixed)).plan(PlanPolicy::Off),
        PoolWishes { is_mem_pool: true, .. } => policy.segments(SegmentPolicy::Fixed(fixed)),
        _ => policy,
    };
    Ok(policy.build()?)
}

#[cfg(test)]
mod tests;
