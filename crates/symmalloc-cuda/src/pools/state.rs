//! The state that clones of an allocator and its buffers share: the core's allocator, called with CUDA streams instead of stream ids.

use crate::backend::CudaMemory;
use crate::device::CudaDevice;
use crate::error::{CudaError, DriverError, DropError, DropErrors};
use crate::memory::ExportedList;
use crate::streams::{BackendStreams, CaptureId, LentStream};
use cudarc::driver::CudaStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{Backend, BackendError};
use symmalloc_core::config::{Config, PoolConfig, SegmentPolicy};
use symmalloc_core::errors::{AllocateError, FreeError, PoolError, TrimError};
use symmalloc_core::{Handle, ObserverId, PoolId, SharedAllocator, StreamId};

/// See the [module documentation](self).
pub(crate) struct AllocatorState<B: CudaMemory> {
    core: SharedAllocator<B>,
    registration: Mutex<()>,
    /// Pools that [`trim_all`](Self::trim_all) trims, ascending: all except graph pools and pools with a quota.
    trimmable: Mutex<Vec<PoolId>>,
    abandoned_graphs: Mutex<Vec<AbandonedPool>>,
    /// Pools that a graph pool of this crate observes.
    of_graphs: Mutex<Vec<PoolId>>,
    /// Pools for allocations on streams that are being captured.
    capture_pools: Mutex<Vec<(CaptureId, PoolId)>>,
    drop_errors: Mutex<DropErrors>,
    exported: ExportedList,
}

/// A graph pool to destroy as soon as it has no allocations.
pub(crate) struct AbandonedPool {
    pub(crate) pool: PoolId,
    /// `None` once the observer was removed.
    pub(crate) observer: Option<ObserverId>,
    /// Streams whose work may use the pool's memory without the core's knowledge.
    pub(crate) streams: Vec<StreamId>,
}

impl<B: CudaMemory> AllocatorState<B> {
    pub(crate) fn new(backend: B, config: Config) -> Result<Self, CudaError> {
        let pool = fitting(&backend, config.default_pool().clone())?;
        let config =
            if pool == *config.default_pool() { config } else { config.to_builder().default_pool(pool).build()? };
        Ok(AllocatorState {
            core: SharedAllocator::new(backend, config)?,
            registration: Mutex::default(),
            trimmable: Mutex::new(vec![PoolId::DEFAULT]),
            abandoned_graphs: Mutex::default(),
            of_graphs: Mutex::default(),
            capture_pools: Mutex::default(),
            drop_errors: Mutex::default(),
            exported: ExportedList::default(),
        })
    }

    #[inline]
    pub(crate) fn core(&self) -> &SharedAllocator<B> {
        &self.core
    }

    #[inline]
    pub(crate) fn streams(&self) -> &BackendStreams {
        self.core.backend().streams()
    }

    #[inline]
    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        self.streams().device()
    }

    /// Returns the allocator's exports to other processes.
    pub(crate) fn exported(&self) -> &ExportedList {
        &self.exported
    }

    /// Frees a live allocation. First notifies the processes that have mapped it.
    #[inline]
    pub(crate) fn free(&self, handle: Handle, address: u64) -> Result<(), FreeError> {
        if !self.exported.is_empty() {
            self.exported.note_free(address);
        }
        self.core.free(handle)
    }

    /// Returns the id of a stream, and registers the stream if necessary: in `group`, or in a group of its own if `group` is `None`.
    pub(crate) fn register(&self, stream: &Arc<CudaStream>, group: Option<StreamId>) -> Result<StreamId, CudaError> {
        if let Some(id) = self.streams().find(stream) {
            return Ok(id);
        }
        if stream.cu_stream() as usize == 2 {
            return Err(CudaError::PerThreadStream);
        }
        if stream.context().cu_ctx() != self.device().context().cu_ctx() {
            return Err(CudaError::ForeignStream);
        }
        let _one_at_a_time = lock(&self.registration);
        match self.streams().find(stream) {
            Some(id) => Ok(id),
            None => self.register_next(group, || self.streams().add_stream(Arc::clone(stream))),
        }
    }

    /// Registers the host as the next stream.
    pub(crate) fn register_host(&self) -> Result<StreamId, CudaError> {
        let _one_at_a_time = lock(&self.registration);
        self.register_next(None, || self.streams().add_host())
    }

    /// Registers a stream that its owner may destroy, see [`LentStream`].
    pub(crate) fn register_lent(&self, stream: LentStream) -> Result<StreamId, CudaError> {
        let _one_at_a_time = lock(&self.registration);
        self.register_next(None, || self.streams().add_lent(stream))
    }

    fn register_next(&self, group: Option<StreamId>, add: impl FnOnce() -> usize) -> Result<StreamId, CudaError> {
        let id = match group {
            None => self.core.register_stream()?,
            Some(group) => self.core.register_stream_in(group)?,
        };
        assert_eq!(add(), id.index(), "all streams of an allocator must be registered through it, not with its core");
        Ok(id)
    }

    /// Makes later work on `stream` wait for the work submitted to `on`, and notifies the core.
    pub(crate) fn wait(&self, stream: StreamId, on: StreamId) -> Result<(), BackendError> {
        if stream == on {
            return Ok(());
        }
        self.streams().order_behind(stream, on)?;
        if !self.device().is_capturing() {
            // During a capture, the wait may order only the work of a graph, so the core must not rely on it.
            let _known = self.core.note_stream_wait(stream, on);
        }
        Ok(())
    }

    pub(crate) fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
        self.streams().synchronize(stream)?;
        let _known = self.core.note_synchronized(stream);
        Ok(())
    }

    /// Returns the pool of the capture that the stream is part of, or `otherwise` if there is none.
    #[cold]
    pub(crate) fn capture_pool(&self, stream: StreamId, otherwise: PoolId) -> Result<PoolId, AllocateError> {
        let Some(raw) = self.streams().stream(stream).map(|stream| stream.cu_stream()) else { return Ok(otherwise) };
        let fence = |error: DriverError| AllocateError::Fence { stream, error: error.into() };
        let Some(capture) = self.streams().capture_of(raw).map_err(fence)? else { return Ok(otherwise) };
        let pools = lock(&self.capture_pools);
        Ok(pools.iter().find(|(id, _)| *id == capture).map_or(otherwise, |(_, pool)| *pool))
    }

    /// Directs later allocations on streams of the capture to this pool.
    pub(crate) fn set_capture_pool(&self, capture: CaptureId, pool: PoolId) {
        lock(&self.capture_pools).push((capture, pool));
    }

    pub(crate) fn forget_capture(&self, capture: CaptureId) {
        lock(&self.capture_pools).retain(|(id, _)| *id != capture);
    }

    #[cold]
    pub(crate) fn note_drop_error(&self, error: DropError) {
        tracing::warn!(name: "drop.failed", target: "symmalloc", %error);
        let mut errors = lock(&self.drop_errors);
        errors.count += 1;
        errors.last = Some(error);
    }

    pub(crate) fn drop_errors(&self) -> DropErrors {
        lock(&self.drop_errors).clone()
    }

    /// Creates a pool. [`trim_all`](Self::trim_all) trims it, unless it has a quota.
    pub(crate) fn create_pool(&self, key: Option<PoolId>, config: PoolConfig) -> Result<PoolId, CudaError> {
        let has_quota = config.has_quota();
        let pool = match key {
            Some(key) => self.core.create_pool_with_key(key, fitting(self.core.backend(), config)?)?,
            None => self.create_untrimmed_pool(config)?,
        };
        if !has_quota {
            let mut trimmable = lock(&self.trimmable);
            let at = trimmable.partition_point(|other| *other < pool);
            trimmable.insert(at, pool);
        }
        Ok(pool)
    }

    /// Creates a pool that keeps its free memory in a trim, until the pool is abandoned.
    pub(crate) fn create_untrimmed_pool(&self, config: PoolConfig) -> Result<PoolId, CudaError> {
        Ok(self.core.create_pool(fitting(self.core.backend(), config)?)?)
    }

    /// Records that a graph pool observes the pool to keep its memory.
    pub(crate) fn note_graph_pool(&self, pool: PoolId) {
        lock(&self.of_graphs).push(pool);
    }

    /// Returns the number of the pool's observers that hold no windows on it.
    pub(crate) fn own_observers(&self, pool: PoolId) -> u32 {
        u32::from(lock(&self.of_graphs).contains(&pool)).min(self.core.observer_count(pool))
    }

    /// See [`CachingAllocator::trim_all`](crate::CachingAllocator::trim_all).
    pub(crate) fn trim_all(&self) -> Result<u64, CudaError> {
        let (mut released_bytes, mut failure, mut outcome) = (0, None, Ok(()));
        // Retry the memory that the driver did not release when its pool was destroyed. If the driver keeps memory of a pool that is
        // destroyed below, the next trim retries it.
        let retried = self.core.trim_destroyed_pools();
        for destroyed in
            [self.core.destroy_abandoned().map_err(CudaError::from), self.destroy_abandoned_graphs(|_| true)]
        {
            match destroyed {
                Ok(bytes) => released_bytes += bytes,
                Err(CudaError::Pool(PoolError::Backend(error))) => drop(failure.get_or_insert(error)),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        let pools = lock(&self.trimmable).clone();
        let trims = pools.into_iter().map(|pool| (Some(pool), self.core.trim_pool(pool)));
        for (pool, trimmed) in std::iter::once((None, retried)).chain(trims) {
            match trimmed {
                Ok(bytes) => released_bytes += bytes,
                // It was destroyed, and all of its memory is released.
                Err(TrimError::Unknown(_)) => lock(&self.trimmable).retain(|known| Some(*known) != pool),
                Err(TrimError::Backend { released_bytes: bytes, error }) => {
                    released_bytes += bytes;
                    failure.get_or_insert(error);
                }
                Err(error) => return Err(error.into()),
            }
        }
        released_bytes += self.core.backend().memory().release_spare();
        outcome?;
        failure.map_or(Ok(released_bytes), |error| Err(TrimError::Backend { released_bytes, error }.into()))
    }

    /// Destroys abandoned private pools, and releases prefetched memory and the free memory of the other private pools. Returns the number
    /// of bytes released.
    pub(crate) fn trim_private(&self) -> u64 {
        let reserved_before = self.core.stats().reserved_bytes.current;
        // If the driver fails to release some memory, the next trim retries.
        let _failed = self.core.destroy_abandoned_private();
        let _failed = self.destroy_abandoned_graphs(|pool| may_trim_alone(&self.core, *pool));
        let destroyed_bytes = reserved_before.saturating_sub(self.core.stats().reserved_bytes.current);
        // Pools that are not in this list belong to graphs, which use their free memory when they run, or were created by the program
        // through the core.
        let trimmable = lock(&self.trimmable).clone();
        let released_bytes = trim_private_pools(&self.core, |pool| !trimmable.contains(&pool));
        destroyed_bytes + released_bytes + self.core.backend().memory().release_spare()
    }

    /// Marks a pool as having no owners. The next [`trim_all`](Self::trim_all) destroys it if possible. If the pool is private, the core
    /// also destroys it when a limit is about to refuse a request.
    pub(crate) fn abandon(&self, pool: PoolId) {
        lock(&self.trimmable).retain(|other| *other != pool);
        self.core.abandon_pool(pool);
    }

    /// Marks a graph pool as having no owners. The next [`trim_all`](Self::trim_all) destroys it if possible.
    pub(crate) fn abandon_graph_pool(&self, abandoned: AbandonedPool) {
        lock(&self.abandoned_graphs).push(abandoned);
    }

    /// Destroys an abandoned graph pool now, after the host has waited for its launches. If that fails, the next trim tries again.
    pub(crate) fn destroy_abandoned_graph(&self, pool: PoolId) {
        let _failed = self.destroy_abandoned_graphs(|abandoned| *abandoned == pool);
    }

    /// Destroys a pool that has owners. Returns the number of released bytes.
    pub(crate) fn destroy_pool(&self, pool: PoolId) -> Result<u64, CudaError> {
        let released_bytes = self.core.destroy_pool(pool)?;
        lock(&self.trimmable).retain(|other| *other != pool);
        Ok(released_bytes)
    }

    /// Destroys the selected abandoned graph pools that have neither allocations nor another observer. Returns the number of released
    /// bytes.
    fn destroy_abandoned_graphs(&self, is_selected: impl Fn(&PoolId) -> bool) -> Result<u64, CudaError> {
        let mut all = lock(&self.abandoned_graphs);
        let (abandoned, others): (Vec<_>, Vec<_>) = all.drain(..).partition(|entry| is_selected(&entry.pool));
        *all = others;
        drop(all);
        let (mut released_bytes, mut first_error) = (0, Ok(()));
        for mut entry in abandoned {
            match self.destroy(&mut entry) {
                Ok(bytes) => released_bytes += bytes,
                Err(CudaError::Pool(PoolError::InUse { .. } | PoolError::Observed { .. })) => {
                    lock(&self.abandoned_graphs).push(entry);
                }
                Err(error) => {
                    // If the driver fails to release some memory of a pool, the core considers the pool destroyed, and a trim retries.
                    if !matches!(error, CudaError::Pool(PoolError::Backend(_))) {
                        lock(&self.abandoned_graphs).push(entry);
                    }
                    first_error = first_error.and(Err(error));
                }
            }
        }
        first_error.map(|()| released_bytes)
    }

    fn destroy(&self, entry: &mut AbandonedPool) -> Result<u64, CudaError> {
        while let Some(stream) = entry.streams.last().copied() {
            self.synchronize(stream).map_err(DriverError::from)?;
            entry.streams.pop();
        }
        if let Some(observer) = entry.observer.take() {
            lock(&self.of_graphs).retain(|pool| *pool != entry.pool);
            self.core.forget(observer)?;
        }
        Ok(self.core.destroy_pool(entry.pool)?)
    }
}

/// Releases the free memory of the pools that ranks do not compare, except those for which `is_excluded` returns `true`, which must include
/// the pools of graphs. Skips symmetric pools, pools with a quota, and pools with an observer. Memory that the driver fails to release
/// stays reserved. Returns the number of bytes released.
pub fn trim_private_pools<B: Backend>(core: &SharedAllocator<B>, is_excluded: impl Fn(PoolId) -> bool) -> u64 {
    let pools = core.pools().into_iter().filter(|pool| may_trim_alone(core, *pool) && !is_excluded(*pool));
    let released = pools.map(|pool| match core.trim_pool(pool) {
        Ok(bytes) => bytes,
        // The core logged the failure.
        Err(TrimError::Backend { released_bytes, .. }) => released_bytes,
        // The pool has been destroyed in the meantime.
        Err(_) => 0,
    });
    released.sum()
}

/// Returns `true` if one rank alone may trim the pool: ranks do not compare it, and its memory is neither a quota nor
/// observed.
fn may_trim_alone<B: Backend>(core: &SharedAllocator<B>, pool: PoolId) -> bool {
    let stays = core.pool_config(pool).is_ok_and(|config| config.symmetric() || config.has_quota());
    !stays && core.observer_count(pool) == 0
}

impl<B: CudaMemory> Drop for AllocatorState<B> {
    fn drop(&mut self) {
        self.exported.end_all();
        // Pools that cannot be destroyed are released with the allocator.
        let _destroyed = self.core.destroy_abandoned();
        let abandoned = std::mem::take(&mut *lock(&self.abandoned_graphs));
        for mut entry in abandoned {
            let _destroyed = self.destroy(&mut entry);
        }
    }
}

/// Returns the policy, adapted to the backend if necessary.
fn fitting<B: CudaMemory>(backend: &B, config: PoolConfig) -> Result<PoolConfig, CudaError> {
    if backend.is_expandable() || !matches!(config.segments(), SegmentPolicy::Expandable(_)) {
        return Ok(config);
    }
    tracing::info!(
        name: "pool.fixed",
        target: "symmalloc",
        "this backend cannot grow ranges: the pool uses fixed segments instead of expandable ones",
    );
    Ok(config.to_builder().stitching(None).fixed().build()?)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
