//! Sleep and wake: a pool's device memory for others, its contents on the host, its addresses as they were. And pools of which a part
//! is for others.

use crate::allocator::CudaAllocator;
use crate::error::CudaError;
use crate::graphs::GraphPool;
use cudarc::driver::CudaStream;
use std::sync::Arc;
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::{Phase, SleepCause, SleepError, Slept, Woken};

impl CudaAllocator {
    /// Puts a pool to sleep: its memory goes back to the device, and buffers, addresses and graphs stay what they are, to be used when
    /// it is awake again. What [`Contents::Keep`] keeps goes to pinned host memory, or to a file where the backend has a
    /// [folder](crate::CudaBackendBuilder::images_in). Waits on the host for the streams that use the pool.
    ///
    /// Nothing may use the pool's memory until it is awake. Allocating from it is an error until then, and dropping buffers is not.
    ///
    /// # Errors
    /// When the device has no virtual memory, somebody has windows on the pool's memory (then sleep by way of the registrar), or as
    /// [`SleepError`] says. The pool is as it was, except after [`SleepCause::Held`].
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

    /// Wakes a pool: it has memory at the addresses that it had, with what was kept.
    ///
    /// # Errors
    /// See [`SleepError`]: the pool sleeps on, nothing is lost, and another attempt may succeed.
    pub fn wake(&self, pool: PoolId) -> Result<Woken, CudaError> {
        Ok(self.core().wake(pool)?)
    }

    /// Puts the pools of a tag to sleep, in the order of their ids. Those that sleep already sleep on.
    ///
    /// # Errors
    /// That of the first pool that does not fall asleep, as [`sleep`](Self::sleep). Those before it sleep: another call goes on.
    pub fn sleep_tagged(&self, tag: &str, contents: Contents) -> Result<Vec<(PoolId, Slept)>, CudaError> {
        let pools = self.core().pools_tagged(tag).into_iter();
        pools.map(|pool| Ok((pool, self.sleep(pool, contents)?))).collect()
    }

    /// Wakes the pools of a tag, in the order of their ids. Those that are awake stay so.
    ///
    /// # Errors
    /// That of the first pool that does not wake, as [`wake`](Self::wake). Those before it are awake: another call goes on.
    pub fn wake_tagged(&self, tag: &str) -> Result<Vec<(PoolId, Woken)>, CudaError> {
        let pools = self.core().pools_tagged(tag).into_iter();
        pools.map(|pool| Ok((pool, self.wake(pool)?))).collect()
    }

    /// Whether a pool is awake.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn phase(&self, pool: PoolId) -> Result<Phase, CudaError> {
        Ok(self.core().phase(pool)?)
    }

    /// Makes a pool with a [quota](symmalloc_core::PoolConfig::has_quota) hold so many bytes. See [`resize`](crate::resize()).
    ///
    /// Memory goes back to the device in the chunks in which it came: with `chunk_bytes` of one granule it is exactly what is given up,
    /// otherwise `CudaMemory::idle_bytes` says how much the device holds beyond.
    ///
    /// # Errors
    /// See [`ResizeError`](crate::ResizeError).
    pub fn resize(&self, pool: PoolId, stream: &Arc<CudaStream>, quota_bytes: u64) -> Result<u64, CudaError> {
        let stream = self.register_stream(stream)?;
        Ok(crate::resize::resize(self.core(), pool, stream, quota_bytes)?)
    }

    /// Obtains pinned host memory for the contents of pools that will sleep, so that the first sleep does not: locking pages takes
    /// longer than copying to them.
    ///
    /// # Errors
    /// When the host has not enough memory that can be locked.
    pub fn reserve_host_memory(&self, size_bytes: u64) -> Result<(), CudaError> {
        Ok(self.core().backend().images().reserve(size_bytes).map_err(crate::error::DriverError::from)?)
    }

    /// Gives pinned host memory back that no sleeping pool needs. Returns its bytes.
    ///
    /// # Errors
    /// When the driver refuses; the rest can be given back by another call.
    pub fn release_host_memory(&self) -> Result<u64, CudaError> {
        Ok(self.core().backend().images().release_idle().map_err(crate::error::DriverError::from)?)
    }

    /// Pinned host memory that is held for the contents of pools that sleep, or will, in bytes.
    pub fn host_bytes(&self) -> u64 {
        self.core().backend().images().host_bytes()
    }
}

impl GraphPool {
    /// Puts the pool to sleep, as [`CudaAllocator::sleep`]. What is live in it is kept or not; what graphs allocate and free while
    /// they run has no contents between their runs. Launching a graph of the pool is an error until it is awake.
    ///
    /// # Errors
    /// As [`CudaAllocator::sleep`].
    pub fn sleep(&self, contents: Contents) -> Result<Slept, CudaError> {
        CudaAllocator::of_state(self.state()).sleep(self.id(), contents)
    }

    /// Wakes the pool: its graphs can be launched as they are.
    ///
    /// # Errors
    /// As [`CudaAllocator::wake`].
    pub fn wake(&self) -> Result<Woken, CudaError> {
        CudaAllocator::of_state(self.state()).wake(self.id())
    }
}
