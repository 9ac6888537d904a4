//! Pools that are destroyed after their last owner is dropped and their last buffer is freed.

use super::state::{AbandonedPool, AllocatorState};
use super::stream_allocator::StreamAllocator;
use super::stream_table::StreamTable;
use crate::backend::CudaMemory;
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use std::fmt;
use std::sync::Arc;
use symmalloc_core::{PoolId, StreamId};

/// A pool of an allocator: memory with a separate policy. Returned by
/// [`CachingAllocator::create_pool`](crate::CachingAllocator::create_pool).
///
/// [`CachingAllocator::with_pool`](crate::CachingAllocator::with_pool) returns an allocator that allocates from the pool.
///
/// # Dropping
/// Dropping a pool does not destroy it, because releasing its memory can block until the device has finished using it. The allocator's next
/// [`trim`](crate::CachingAllocator::trim) destroys the pool, once all of its allocators and buffers are dropped as well.
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
/// drop(pool);
/// allocator.trim()?; // destroys the pool
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

    pub(crate) fn lease(&self) -> &Arc<PoolLease<B>> {
        &self.lease
    }
}

impl<B: CudaMemory> fmt::Debug for Pool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.id()).finish()
    }
}

/// Keeps a pool alive and looks up the pool's state for a stream.
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

    /// Registers a stream that is new, or known by another wrapper.
    #[cold]
    fn register(&self, stream: &Arc<CudaStream>) -> Result<&Arc<StreamAllocator<B>>, CudaError> {
        Ok(self.registered_stream(self.state.register(stream)?))
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
        if self.pool != PoolId::DEFAULT {
            self.state.abandon(AbandonedPool { pool: self.pool, observer: None, streams: Vec::new() });
        }
    }
}
