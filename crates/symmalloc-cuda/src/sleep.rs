//! Sleep and wake: a pool releases its device memory temporarily, keeps its contents on the host, and keeps its addresses. The file also
//! resizes pools with a quota, which release a part of their memory.

use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::graphs::GraphPool;
use crate::memory::{ImageStorage, SavedBytes};
use cudarc::driver::CudaStream;
use std::sync::Arc;
use symmalloc_core::backend::BackendError;
use symmalloc_core::lock::Shared;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{Phase, SleepCause, SleepError, Slept, Woken};
use symmalloc_core::{PoolId, Remapped};

impl CudaAllocator {
    /// Puts a pool to sleep: its memory returns to the device, while buffers, addresses and graphs stay valid for use after the pool wakes.
    /// Contents that [`Contents::Keep`] keeps are saved in the pool's [storage](Self::save_in), which is pinned host memory by default, or a
    /// file if the backend has a [folder](crate::CudaBackendBuilder::images_in) for them. Waits on the host for the streams that use the pool.
    ///
    /// Nothing may use the pool's memory until it is awake. Until then, allocating from it returns an error, but buffers may be dropped.
    ///
    /// NCCL may keep the former memory of plain buffers that a captured collective uses. Set `NCCL_GRAPH_REGISTER=0` before the first such
    /// capture (`docs/sleep.md`). Windows need no setting.
    ///
    /// # Errors
    /// Returns an error if the device has no virtual memory, or windows are registered on the pool's memory (use the registrar to sleep in
    /// that case), or as described in [`SleepError`]. The pool is unchanged, except after [`SleepCause::Held`].
    pub fn sleep(&self, pool: PoolId, contents: Contents) -> Result<Slept, CudaError> {
        if !self.core().backend().traits().virtual_memory {
            return Err(CudaError::NoSleep);
        }
        let observers = self.core().observer_count(pool) - self.state().own_observers(pool);
        if observers > 0 {
            return Err(SleepError { pool, cause: SleepCause::Observed { observers } }.into());
        }
        Ok(self.core().quiesce(pool, contents)?.unmap()?)
    }

    /// Wakes a pool: maps memory at the pool's previous addresses and restores the contents that were kept. If the device or a limit
    /// refuses memory, releases the free memory of private pools and tries again: see [`trim_private`](Self::trim_private).
    ///
    /// # Errors
    /// See [`SleepError`]. The pool stays asleep, nothing is lost, and another attempt may succeed.
    pub fn wake(&self, pool: PoolId) -> Result<Woken, CudaError> {
        Ok(self.remap(pool)?.resume())
    }

    /// Starts a wake: maps memory at the pool's previous addresses and restores the contents that were kept. Until
    /// [`Remapped::resume`], allocations are refused. Obtains memory like [`wake`](Self::wake).
    ///
    /// # Errors
    /// See [`SleepError`]. The pool stays asleep.
    pub fn remap(&self, pool: PoolId) -> Result<Remapped<'_, CudaBackend, Shared>, SleepError> {
        self.core().remap_with(pool, || self.trim_private())
    }

    /// Releases the free memory of private pools, and prefetched memory. Symmetric pools, graph pools, pools with a
    /// quota and pools with windows or registered buffers are unchanged. One rank alone can therefore call it, unlike
    /// [`trim_all`](Self::trim_all). Returns the number of bytes released.
    ///
    /// Blocks the host until the streams that used this memory have completed their work, which must therefore not wait for a rank that is
    /// in a collective wake.
    pub fn trim_private(&self) -> u64 {
        self.state().trim_private()
    }

    /// Puts all pools with a tag to sleep, in the order of their ids. Pools that are already asleep stay asleep. Returns an empty list if
    /// no pool has the tag.
    ///
    /// # Errors
    /// Returns the error of the first pool that cannot be put to sleep, see [`sleep`](Self::sleep). The pools before it are asleep, and
    /// another call continues with the rest.
    pub fn sleep_tagged(&self, tag: &str, contents: Contents) -> Result<Vec<(PoolId, Slept)>, CudaError> {
        let pools = self.core().pools_tagged(tag).into_iter();
        pools.map(|pool| Ok((pool, self.sleep(pool, contents)?))).collect()
    }

    /// Wakes all pools with a tag, in the order of their ids. Pools that are already awake stay awake.
    ///
    /// # Errors
    /// Returns the error of the first pool that cannot be woken, see [`wake`](Self::wake). The pools before it are awake, and another call
    /// continues with the rest.
    pub fn wake_tagged(&self, tag: &str) -> Result<Vec<(PoolId, Woken)>, CudaError> {
        let pools = self.core().pools_tagged(tag).into_iter();
        pools.map(|pool| Ok((pool, self.wake(pool)?))).collect()
    }

    /// Returns the sleep phase of a pool.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, CudaError> {
        Ok(self.core().phase(pool)?)
    }

    /// Makes a pool with a [quota](symmalloc_core::PoolConfig::has_quota) hold `quota_bytes` bytes. See [`resize`](crate::resize()).
    ///
    /// Memory returns to the device in the chunks in which it was mapped. If `chunk_bytes` is one granule, all released memory is returned.
    /// Otherwise `CudaMemory::idle_bytes` reports the memory that the backend still holds.
    ///
    /// # Errors
    /// See [`ResizeError`](crate::ResizeError).
    pub fn resize(&self, pool: PoolId, stream: &Arc<CudaStream>, quota_bytes: u64) -> Result<u64, CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(crate::resize::resize(self.core(), pool, stream, quota_bytes)?)
    }

    /// Sets the storage for a pool's saved contents, from its next sleep on. The default is the backend's. It ends with the pool.
    pub fn save_in(&self, pool: PoolId, storage: ImageStorage) {
        self.core().backend().images().set_storage(pool, storage);
    }

    /// Sets whether the saved contents of a pool stay in host memory after its next wake. They remain readable with
    /// [`saved_at`](Self::saved_at), and the next sleep reuses their memory. The next sleep that saves contents
    /// replaces them. Files are never retained. The setting and retained contents end with the pool.
    pub fn retain_saved(&self, pool: PoolId, is_retained: bool) {
        self.core().backend().images().set_retained(pool, is_retained);
    }

    /// Returns the saved bytes of device memory of a sleeping pool, or of a pool that retains them. Returns `None` if there are none.
    /// Retained contents are those of the last sleep that saved any.
    pub fn saved_at(&self, address: u64, size_bytes: u64) -> Option<SavedBytes> {
        self.core().backend().images().saved_at(address, size_bytes)
    }

    /// Copies the saved bytes of device memory to `to`. Returns `false` if there are none.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or was modified.
    pub fn copy_saved(&self, address: u64, to: &mut [u8]) -> Result<bool, BackendError> {
        self.core().backend().images().copy_saved(address, to)
    }

    /// Allocates pinned host memory in advance for the contents of sleeping pools, so that the first sleep does not have to: locking pages
    /// takes longer than copying to them.
    ///
    /// # Errors
    /// Returns an error if the host does not have enough lockable memory.
    pub fn reserve_host_memory(&self, size_bytes: u64) -> Result<(), CudaError> {
        Ok(self.core().backend().images().reserve(size_bytes).map_err(crate::error::DriverError::from)?)
    }

    /// Releases pinned host memory that contains no saved contents. Returns the number of bytes released.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. The remaining memory can be released by another call.
    pub fn release_host_memory(&self) -> Result<u64, CudaError> {
        Ok(self.core().backend().images().release_idle().map_err(crate::error::DriverError::from)?)
    }

    /// Returns the size in bytes of the pinned host memory that is held for the contents of sleeping pools, including reserved memory.
    pub fn host_bytes(&self) -> u64 {
        self.core().backend().images().host_bytes()
    }
}

impl GraphPool {
    /// Puts the pool to sleep, like [`CudaAllocator::sleep`]. Its live allocations are kept or dropped as requested. Memory that graphs
    /// allocate and free while they run has no contents between runs. Launching a graph of the pool returns an error until the pool is
    /// awake.
    ///
    /// # Errors
    /// See [`CudaAllocator::sleep`].
    pub fn sleep(&self, contents: Contents) -> Result<Slept, CudaError> {
        CudaAllocator::of_state(self.state()).sleep(self.id(), contents)
    }

    /// Wakes the pool, after which its graphs can be launched unchanged.
    ///
    /// # Errors
    /// See [`CudaAllocator::wake`].
    pub fn wake(&self) -> Result<Woken, CudaError> {
        CudaAllocator::of_state(self.state()).wake(self.id())
    }
}
