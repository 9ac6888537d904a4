//! Pools as scopes: a pool is destroyed when nobody can allocate from it any more and its last buffer is freed.
//!
//! Destroying a pool gives memory back, which blocks until the device is done with it. A `Drop` must not block, so it leaves
//! the pool to the allocator's next `trim`.

use crate::allocator::{Abandoned, State};
use crate::backend::CudaMemory;
use crate::lane::Lanes;
use std::fmt;
use std::sync::Arc;
use symmalloc_core::PoolId;

/// Owns a pool. See [`CachingAllocator::create_pool`](crate::CachingAllocator::create_pool).
pub struct Pool<B: CudaMemory> {
    pub(crate) lease: Arc<Lease<B>>,
}

impl<B: CudaMemory> Pool<B> {
    /// The pool's id, equal on all ranks.
    pub fn id(&self) -> PoolId {
        self.lease.pool
    }
}

impl<B: CudaMemory> fmt::Debug for Pool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.id()).finish()
    }
}

/// While it lives, the pool is not destroyed. It has the pool's lanes, and lanes may lie beside their heaps.
pub(crate) struct Lease<B: CudaMemory> {
    state: Arc<State<B>>,
    pub(crate) pool: PoolId,
    pub(crate) lanes: Lanes<B>,
}

impl<B: CudaMemory> Lease<B> {
    pub(crate) fn new(state: &Arc<State<B>>, pool: PoolId) -> Self {
        Lease { state: Arc::clone(state), pool, lanes: Lanes::new() }
    }
}

impl<B: CudaMemory> Drop for Lease<B> {
    fn drop(&mut self) {
        self.lanes.close_spares();
        if self.pool != PoolId::DEFAULT {
            self.state.abandon(Abandoned { pool: self.pool, observer: None, streams: Vec::new() });
        }
    }
}
