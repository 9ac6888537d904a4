//! Pools: policy domains that a program makes, like PyTorch's `MemPool`. Pool 0 is there from the start.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::budget::Budget;
use crate::config::{PoolConfig, StreamPolicy};
use crate::errors::{PoolError, UnknownError};
use crate::held::HeapCell;
use crate::ids::{PoolId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::op::Op;
use crate::registry::Registry;
use crate::stats::UsageStats;
use crate::sync::{AtomicBool, AtomicU64};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[derive(Debug)]
pub(crate) struct Pool<L: Lock> {
    pub(crate) config: PoolConfig,
    /// Of the configuration: ranks compare it at every agreement.
    pub(crate) config_digest: u64,
    pub(crate) budget: Arc<Budget>,
    /// The heap of each stream, by stream; of all streams, at index 0, when they share.
    pub(crate) routes: Registry<L::HeapRef>,
    pub(crate) is_destroyed: AtomicBool,
    /// Entries so far in the segment logs of its heaps.
    pub(crate) log_entries: Arc<AtomicU64>,
}

impl<L: Lock> Pool<L> {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Pool {
            budget: Arc::new(Budget::new(config.limit_bytes())),
            config_digest: config.digest(),
            config,
            routes: Registry::new(),
            is_destroyed: AtomicBool::new(false),
            log_entries: Arc::new(AtomicU64::new(0)),
        }
    }

    /// The pool's heaps in stream order.
    pub(crate) fn heaps(&self) -> impl Iterator<Item = &HeapCell<L>> {
        self.routes.iter().map(|(_, heap)| &**heap)
    }

    /// Which route serves a stream.
    #[inline]
    pub(crate) fn route_index(&self, stream: StreamId) -> usize {
        match self.config.streams() {
            StreamPolicy::Separate => stream.index(),
            StreamPolicy::Shared => 0,
        }
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Makes the program's next pool. Create pools in the same order on every rank.
    ///
    /// # Errors
    /// None at present; reserved for policies that a backend cannot serve.
    pub fn create_pool(&self, config: PoolConfig) -> Result<PoolId, PoolError> {
        let mut tape = self.tape();
        let (symmetric, limit_bytes) = (config.symmetric(), config.limit_bytes());
        let entry = Box::new(Pool::new(config));
        let config = tape.is_recording().then(|| Box::new(entry.config.clone()));
        let pool = PoolId(self.pools.push(|_| entry) as u32);
        if let Some(config) = config {
            tape.note(Op::CreatePool { pool, config });
        }
        tracing::debug!(name: "pool.created", target: "symmalloc", pool = pool.0, symmetric, limit_bytes);
        Ok(pool)
    }

    /// Number of pools created so far, the default pool and destroyed ones included.
    pub fn pool_count(&self) -> u32 {
        self.pools.len() as u32
    }

    /// A pool's policy.
    ///
    /// # Errors
    /// When the pool is unknown.
    pub fn pool_config(&self, pool: PoolId) -> Result<&PoolConfig, UnknownError> {
        Ok(&self.pool(pool)?.config)
    }

    /// Gives a pool up: all of its memory goes back to the device, reserved segments too. Its id is not reused.
    ///
    /// # Errors
    /// When it does not exist, is the default pool, is observed, or has live allocations; it is as it was then. When the
    /// driver fails, the pool is destroyed and the next [`trim`](Self::trim) of all pools tries again.
    pub fn destroy_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        let mut tape = self.tape();
        let observers = self.observers.lock();
        let entry = self.pool(pool)?;
        if pool == PoolId::DEFAULT {
            return Err(PoolError::Default);
        }
        if observers.count(pool) > 0 {
            return Err(PoolError::Observed { pool, observers: observers.count(pool) });
        }
        // All heaps at once, so that no other thread allocates between the question and the answer.
        let mut heaps: Vec<_> = entry.heaps().map(HeapCell::lock).collect();
        let live = heaps.iter().map(|heap| heap.usage.stats().all).fold(UsageStats::default(), UsageStats::plus);
        if live.allocations.current > 0 {
            return Err(PoolError::InUse {
                pool,
                allocations: live.allocations.current,
                allocated_bytes: live.allocated_bytes.current,
            });
        }
        entry.is_destroyed.store(true, Ordering::Release);
        let mut first_error = None;
        for heap in &mut heaps {
            heap.close();
            heap.retire_all(&self.around);
            first_error = first_error.or(heap.release_retired(&self.around).1);
        }
        drop((heaps, observers));
        tape.note(Op::DestroyPool { pool });
        tracing::debug!(name: "pool.destroyed", target: "symmalloc", pool = pool.0);
        let Some(error) = first_error else { return Ok(()) };
        tape.driver_failed(error.clone());
        Err(error.into())
    }

    pub(crate) fn pool(&self, pool: PoolId) -> Result<&Pool<L>, UnknownError> {
        let Some(entry) = self.pools.get(pool.index()) else { return Err(self.unknown_pool(pool)) };
        if entry.is_destroyed.load(Ordering::Acquire) {
            return Err(UnknownError::DestroyedPool { pool });
        }
        Ok(entry)
    }

    #[cold]
    pub(crate) fn unknown_pool(&self, pool: PoolId) -> UnknownError {
        UnknownError::Pool { pool, pools: self.pool_count() }
    }
}
