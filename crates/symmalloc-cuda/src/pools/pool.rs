//! Pools that are destroyed after their last owner is dropped and their last buffer is freed.

use super::state::AllocatorState;
use super::stream_allocator::StreamAllocator;
use super::stream_table::StreamTable;
use crate::backend::CudaMemory;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use std::sync::Arc;
use std::{fmt, mem};
use symmalloc_core::{PoolId, StreamId};
use symmalloc_files::is_forked;

/// A pool of an allocator: memory with a separate policy. Returned by
/// [`CachingAllocator::create_pool`](crate::CachingAllocator::create_pool).
///
/// [`CachingAllocator::with_pool`](crate::CachingAllocator::with_pool) returns an allocator that allocates from the pool.
///
/// # Arenas
/// [`reset`](Self::reset) empties a pool for the next request and keeps its memory. [`destroy`](Self::destroy) returns its memory.
///
/// # Dropping
/// Dropping a pool does not destroy it, because releasing its memory can block until the device has finished using it. Once all of its
/// allocations and buffers are dropped as well, the pool is destroyed by the allocator's next
/// [`trim_all`](crate::CachingAllocator::trim_all). A private pool is also destroyed if the limit over all pools is about to refuse a
/// request. A symmetric pool is not destroyed in that case, because ranks compare its ops: destroy it explicitly.
///
/// # Examples
/// ```no_run
/// use symmalloc_core::{Config, PoolConfig};
/// use symmalloc_cuda::{CudaAllocator, CudaDevice};
///
/// let device = CudaDevice::new(0)?;
/// let allocator = CudaAllocator::new(&device, Config::default())?;
/// let stream = device.context().new_stream()?;
///
/// let pool = allocator.create_pool(PoolConfig::builder().reserved(1 << 30).build()?)?;
/// let cache = allocator.with_pool(&pool).alloc_zeroed::<f32>(&stream, 1 << 20)?;
/// drop(cache);
/// let released_bytes = pool.destroy()?;
/// assert_eq!(released_bytes, 1 << 30);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pool<B: CudaMemory> {
    lease: Arc<PoolLease<B>>,
}

impl<B: CudaMemory> Pool<B> {
    pub(crate) fn new(lease: PoolLease<B>) -> Self {
        Pool { lease: Arc::new(lease) }
    }

    /// Returns the pool's id, which is equal on all ranks.
    pub fn id(&self) -> PoolId {
        self.lease.pool
    }

    /// Ends the use of the pool's memory, for example by one request, and keeps the memory for the next use. Makes no driver call.
    ///
    /// Buffers own their allocations, so all of them must be dropped first. Allocations without an owner, from
    /// [`CachingAllocator::allocate`](crate::CachingAllocator::allocate), can be freed all at once with
    /// `allocator.core().reset_pool(pool.id())`. A reset is an op of the pool: recordings contain it, and ranks compare it in symmetric
    /// pools.
    ///
    /// # Errors
    /// Returns [`PoolError::InUse`](symmalloc_core::errors::PoolError::InUse) with the number and bytes of the live allocations if there
    /// are any, and a different error if the pool was destroyed. Nothing changes in that case.
    pub fn reset(&self) -> Result<(), CudaError> {
        Ok(self.lease.state.core().reset_unused_pool(self.lease.pool)?)
    }

    /// Destroys the pool: releases its memory to the device, including reserved segments, and blocks the host until the streams that used
    /// the memory are done with it. Returns the number of released bytes. Afterwards, allocators from
    /// [`with_pool`](crate::CachingAllocator::with_pool) return an error when they allocate.
    ///
    /// # Errors
    /// Returns [`PoolError::InUse`](symmalloc_core::errors::PoolError::InUse) if allocations or buffers of the pool are live, and a
    /// different error if the pool is observed; the pool is unchanged in these cases. If a driver call fails, the pool is destroyed and
    /// [`trim_all`](crate::CachingAllocator::trim_all) tries again to release the rest.
    pub fn destroy(&self) -> Result<u64, CudaError> {
        self.lease.state.destroy_pool(self.lease.pool)
    }

    pub(crate) fn lease(&self) -> &Arc<PoolLease<B>> {
        &self.lease
    }
}

impl<B: CudaMemory> fmt::Debug for Pool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.id()).finish()
    }
}

/// A reference that keeps a pool alive, and looks up the pool's allocator for each stream.
pub(crate) struct PoolLease<B: CudaMemory> {
    state: Arc<AllocatorState<B>>,
    pool: PoolId,
    /// Keyed by the address of the `CudaStream`; the host is keyed by [`HOST`].
    streams: StreamTable<Arc<StreamAllocator<B>>>,
}

/// Key of the host: no stream has this address.
const HOST: usize = 0;

impl<B: CudaMemory> PoolLease<B> {
    pub(crate) fn new(state: &Arc<AllocatorState<B>>, pool: PoolId) -> Self {
        PoolLease { state: Arc::clone(state), pool, streams: StreamTable::new() }
    }

    #[inline]
    pub(crate) fn state(&self) -> &Arc<AllocatorState<B>> {
        &self.state
    }

    pub(crate) fn pool(&self) -> PoolId {
        self.pool
    }

    /// Returns the pool's allocator for a stream, and registers the stream if necessary.
    #[inline]
    pub(crate) fn stream(&self, stream: &Arc<CudaStream>) -> Result<&Arc<StreamAllocator<B>>, CudaError> {
        match self.streams.get(Arc::as_ptr(stream) as usize) {
            Some(known) => Ok(known),
            None => self.register(stream),
        }
    }

    /// Registers a stream whose `CudaStream` is not in the table. The stream is new, or it is already registered through a different
    /// `CudaStream`.
    #[cold]
    fn register(&self, stream: &Arc<CudaStream>) -> Result<&Arc<StreamAllocator<B>>, CudaError> {
        Ok(self.registered_stream(self.state.register(stream, None)?))
    }

    /// Returns the pool's allocator for a registered stream, or for the host.
    pub(crate) fn registered_stream(&self, id: StreamId) -> &Arc<StreamAllocator<B>> {
        let key = self.state.streams().stream(id).map_or(HOST, |stream| Arc::as_ptr(stream) as usize);
        match self.streams.get(key) {
            Some(known) => known,
            None => self.streams.insert(key, Arc::new(StreamAllocator::new(&self.state, self.pool, id))),
        }
    }
}

impl<B: CudaMemory> Drop for PoolLease<B> {
    fn drop(&mut self) {
        if is_forked() {
            // The allocator belongs to the parent process, so a child keeps a reference forever and never drops the allocator.
            mem::forget(Arc::clone(&self.state));
        } else if self.pool != PoolId::DEFAULT {
            self.state.abandon(self.pool);
        }
    }
}
