//! Pools: policy domains that a program makes, like PyTorch's `MemPool`. Pool 0 is there from the start.

use super::Allocator;
use super::pool::Pool;
use crate::config::PoolConfig;
use crate::config::errors::{PoolError, UnknownError};
use crate::config::op::Op;
use crate::sleep::state::State;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::PoolId;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Makes the program's next pool. Create pools in the same order on every rank.
    ///
    /// # Errors
    /// None at present; reserved for policies that a backend cannot serve.
    pub fn create_pool(&self, config: PoolConfig) -> Result<PoolId, PoolError> {
        let mut gate = self.gate();
        let (symmetric, limit_bytes) = (config.symmetric(), config.limit_bytes());
        let entry = Box::new(Pool::new(config.that_works(self.context.backend.can_alias())));
        let config = gate.is_recording().then(|| Box::new(entry.config.clone()));
        let pool = PoolId(self.pools.push(|_| entry) as u32);
        if let Some(config) = config {
            gate.note(Op::CreatePool { pool, config });
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
        let mut gate = self.gate();
        let observers = self.observers.lock();
        let entry = self.pool(pool)?;
        if pool == PoolId::DEFAULT {
            return Err(PoolError::Default);
        }
        if observers.count(pool) > 0 {
            return Err(PoolError::Observed { pool, observers: observers.count(pool) });
        }
        let mut sleep = entry.sleep.lock();
        if matches!(*sleep, State::Changing(_)) {
            return Err(PoolError::Sleeping { pool });
        }
        // All heaps at once, so that no other thread allocates between the question and the answer.
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let allocations = heaps.iter().map(|heap| heap.usage().allocations()).sum();
        if allocations > 0 {
            let allocated_bytes = heaps.iter().map(|heap| heap.usage().allocated_bytes()).sum();
            return Err(PoolError::InUse { pool, allocations, allocated_bytes });
        }
        entry.set_destroyed();
        let mut first_error = None;
        for heap in &mut heaps {
            heap.close();
            heap.retire_all(&self.context);
            first_error = first_error.or(heap.release_retired(&self.context).1);
        }
        self.end_sleep(&mut sleep);
        drop((heaps, sleep, observers));
        gate.note(Op::DestroyPool { pool });
        tracing::debug!(name: "pool.destroyed", target: "symmalloc", pool = pool.0);
        let Some(error) = first_error else { return Ok(()) };
        gate.driver_failed(error.clone());
        Err(error.into())
    }

    #[inline(always)]
    pub(super) fn pool(&self, pool: PoolId) -> Result<&Pool<L>, UnknownError> {
        match self.pools.get(pool.index()) {
            Some(entry) if entry.is_destroyed() => Err(UnknownError::DestroyedPool { pool }),
            Some(entry) => Ok(entry),
            None => Err(UnknownError::Pool { pool, pools: self.pool_count() }),
        }
    }
}
