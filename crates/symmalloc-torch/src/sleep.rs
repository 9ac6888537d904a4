//! Sleep, wake and resize of pools, directly or through the registrar that has windows on them.

use crate::device::DeviceAllocator;
use crate::error::Error;
use crate::streams::RawStream;
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaError, DeviceMemory};
use symmalloc_nccl::{Slept, Woken};

impl DeviceAllocator {
    /// Puts a pool to sleep. A registered pool is put to sleep on every rank of its communicators.
    pub(crate) fn sleep(&self, pool: PoolId, contents: Contents) -> Result<Slept, Error> {
        if let Some(slept) = self.registrations.sleep(pool, contents)? {
            return Ok(slept);
        }
        if self.allocator().is_capturing()? {
            return Err(Error::Capturing);
        }
        // The program may have used the memory on streams that it did not record.
        self.allocator().device().synchronize().map_err(CudaError::from)?;
        Ok(self.allocator().sleep(pool, contents)?.into())
    }

    /// Puts a pool to sleep, and suspends the communicators that it is registered on.
    pub(crate) fn sleep_and_suspend(&self, pool: PoolId, contents: Contents) -> Result<Slept, Error> {
        match self.registrations.sleep_and_suspend(pool, contents)? {
            Some(slept) => Ok(slept),
            None => self.sleep(pool, contents),
        }
    }

    /// Suspends the communicators of sleeping pools, except for a pool that shares a communicator with an awake pool. Returns the bytes
    /// that NCCL released.
    pub(crate) fn suspend(&self) -> Result<u64, Error> {
        // `Held` counts as asleep, because a pool whose sleep failed on one rank sleeps on the others.
        self.registrations.suspend(|pool| self.phase(pool).is_ok_and(|phase| phase != Phase::Awake))
    }

    /// Returns the used memory of the device by owner.
    pub(crate) fn device_memory(&self) -> Result<DeviceMemory, Error> {
        let mempools = self.mempools().list();
        let memory =
            self.allocator().device_memory_with(|pool| mempools.iter().any(|entry| entry.own() == Some(pool)))?;
        Ok(memory.with_communicators(self.registrations.held_bytes()))
    }

    /// Wakes a pool. A registered pool is woken on every rank of its communicators.
    pub(crate) fn wake(&self, pool: PoolId) -> Result<Woken, Error> {
        match self.registrations.wake(pool)? {
            Some(woken) => Ok(woken),
            None => Ok(self.allocator().wake(pool)?.into()),
        }
    }

    /// Puts the pools with a tag to sleep, in order of their ids. Stops at the first failure; the pools before the failed one stay asleep.
    pub(crate) fn sleep_tagged(&self, tag: &str, contents: Contents) -> Result<Slept, Error> {
        let mut all = Slept::default();
        self.tagged(tag)?.into_iter().try_for_each(|pool| self.sleep(pool, contents).map(|slept| all += slept))?;
        Ok(all)
    }

    /// Wakes the pools with a tag, in order of their ids. Stops at the first failure; the pools before the failed one stay awake.
    pub(crate) fn wake_tagged(&self, tag: &str) -> Result<Woken, Error> {
        let mut all = Woken::default();
        self.tagged(tag)?.into_iter().try_for_each(|pool| self.wake(pool).map(|woken| all += woken))?;
        Ok(all)
    }

    fn tagged(&self, tag: &str) -> Result<Vec<PoolId>, Error> {
        let pools = self.core().pools_tagged(tag);
        if pools.is_empty() {
            Err(Error::UnknownTag { tag: tag.to_owned(), device: self.ordinal() })
        } else {
            Ok(pools)
        }
    }

    pub(crate) fn phase(&self, pool: PoolId) -> Result<Phase, Error> {
        Ok(self.core().phase(pool).map_err(CudaError::from)?)
    }

    /// Sets the memory of a pool with a quota, in bytes. Returns the bytes that it holds.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn resize(&self, pool: PoolId, stream: RawStream, quota_bytes: u64) -> Result<u64, Error> {
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream_id(stream) }?;
        Ok(symmalloc_cuda::resize(self.core(), pool, stream, quota_bytes).map_err(CudaError::from)?)
    }
}
