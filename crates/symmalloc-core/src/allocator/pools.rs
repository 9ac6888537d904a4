//! Pools and streams: creation, look-up and destruction. Pool 0 always exists.

use super::Allocator;
use super::pool::{HeapGuard, PoolEntry};
use crate::config::PoolConfig;
use crate::config::errors::{PoolError, StreamError, UnknownError};
use crate::config::op::Op;
use crate::heap::trim::Released;
use crate::heap::{Heap, HeapIdentity};
use crate::history::segment_log::SegmentLog;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::Backend;
use crate::types::ids::{PoolId, StreamId};
use crate::types::work;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Creates the program's next pool. Create pools in the same order on every rank.
    ///
    /// # Errors
    /// Currently returns no error. The type is reserved for policies that a backend cannot serve.
    pub fn create_pool(&self, config: PoolConfig) -> Result<PoolId, PoolError> {
        let mut gate = self.gate();
        // No heap is created while this lock is held.
        let observers = self.observers.lock();
        let (symmetric, limit_bytes) = (config.symmetric(), config.limit_bytes());
        let config = config.that_works(self.context.backend.can_alias());
        let recorded = gate.is_recording().then(|| Box::new(config.clone()));
        let spare = self.destroyed.lock().take_spare(&config);
        let make = |index| {
            let pool = PoolId(index as u32);
            match spare {
                Some(spare) => spare.reuse(pool, config),
                None => PoolEntry::new(pool, config),
            }
        };
        let pool = PoolId(self.pools.push(make) as u32);
        self.destroyed.lock().keep(pool);
        drop(observers);
        if let Some(config) = recorded {
            gate.note(Op::CreatePool { pool, config });
        }
        tracing::debug!(name: "pool.created", target: "symmalloc", pool = pool.0, symmetric, limit_bytes);
        Ok(pool)
    }

    /// Returns the number of pools created so far, including the default pool and destroyed ones.
    pub fn pool_count(&self) -> u32 {
        self.pools.len() as u32
    }

    /// Returns the live pools in the order of their ids.
    pub fn pools(&self) -> Vec<PoolId> {
        self.kept_pools().filter(|(_, entry)| !entry.is_destroyed()).map(|(pool, _)| pool).collect()
    }

    /// Returns a pool's policy.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn pool_config(&self, pool: PoolId) -> Result<&PoolConfig, UnknownError> {
        Ok(self.pool(pool)?.config())
    }

    /// Destroys a pool. All of its memory is released, including reserved segments. Its id is not reused.
    ///
    /// A destroyed pool keeps at most 256 bytes of host memory, and about 60 if it was created like one that had been
    /// destroyed before. If the pool is symmetric, each heap beyond the first keeps up to 28 more until the ranks agree on
    /// its history.
    ///
    /// # Errors
    /// Returns an error if the pool does not exist, is the default pool, is observed, or has live allocations; it is
    /// unchanged then. When the driver fails, the pool is destroyed and the next [`trim`](Self::trim) of all pools
    /// tries again.
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
        if sleep.is_changing {
            return Err(PoolError::Sleeping { pool });
        }
        // Locks all heaps together, so that no other thread allocates between the check and the destruction.
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let allocations = heaps.iter().map(|heap| heap.ledger().usage().allocations()).sum();
        if allocations > 0 {
            let allocated_bytes = heaps.iter().map(|heap| heap.ledger().usage().allocated_bytes()).sum();
            return Err(PoolError::InUse { pool, allocations, allocated_bytes });
        }
        entry.set_destroyed();
        let mut released = Released::default();
        for heap in &mut heaps {
            released = released.plus(heap.destroy(&self.context));
        }
        self.end_sleep(&mut sleep);
        self.bury(pool, entry, &mut heaps);
        drop((heaps, sleep, observers));
        self.context.backend.forget_pool(pool);
        gate.note(Op::DestroyPool { pool });
        tracing::debug!(name: "pool.destroyed", target: "symmalloc", pool = pool.0);
        gate.note_released(&released);
        released.error.map_or(Ok(()), |error| Err(error.into()))
    }

    #[inline(always)]
    pub(super) fn pool(&self, pool: PoolId) -> Result<&PoolEntry<L>, UnknownError> {
        match self.pools.get(pool.index()) {
            // The order matters: an entry gets the next pool's id before it counts as live.
            Some(entry) if entry.is_destroyed() || entry.id() != pool => Err(UnknownError::DestroyedPool { pool }),
            Some(entry) => Ok(entry),
            None => Err(UnknownError::Pool { pool, pools: self.pool_count() }),
        }
    }

    /// Registers the program's next stream. Register streams in the same order on every rank.
    ///
    /// # Errors
    /// Returns an error if all 65,535 ids are in use.
    pub fn register_stream(&self) -> Result<StreamId, StreamError> {
        let mut gate = self.gate();
        let mut clocks = self.context.clocks.lock();
        let streams = self.streams.load(Ordering::Relaxed);
        let id = u16::try_from(streams).ok().filter(|id| *id <= StreamId::MAX.0);
        let id = id.ok_or(StreamError::TooManyStreams { streams })?;
        clocks.register();
        self.streams.store(streams + 1, Ordering::Release);
        drop(clocks);
        gate.note(Op::RegisterStream { stream: StreamId(id) });
        tracing::debug!(name: "stream.registered", target: "symmalloc", stream = id);
        Ok(StreamId(id))
    }

    /// Returns the number of registered streams.
    pub fn stream_count(&self) -> u32 {
        self.streams.load(Ordering::Acquire)
    }

    /// Records that the program made `stream` wait, on the device, for all work submitted to `on` so far. Fences that
    /// this covers need no further wait. Call it before another thread submits more work to `on`; otherwise fences of
    /// that work count as covered too.
    ///
    /// # Errors
    /// Returns an error if a stream is unknown.
    pub fn stream_waits(&self, stream: StreamId, on: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        self.known_stream(on)?;
        let mut gate = self.gate();
        if stream != on {
            let mut clocks = self.context.clocks.lock();
            let moment = clocks.moment(on);
            clocks.waits_for(stream, &moment);
        }
        gate.note(Op::Wait { stream, on });
        Ok(())
    }

    /// Records that the host waited for all work submitted to `stream` so far. Call it before another thread submits
    /// more work to the stream.
    ///
    /// # Errors
    /// Returns an error if the stream is unknown.
    pub fn stream_synchronized(&self, stream: StreamId) -> Result<(), UnknownError> {
        self.known_stream(stream)?;
        let mut gate = self.gate();
        let mut clocks = self.context.clocks.lock();
        let moment = clocks.moment(stream);
        clocks.synchronized(&moment);
        drop(clocks);
        gate.note(Op::Synchronize { stream });
        Ok(())
    }

    #[inline(always)]
    pub(super) fn known_stream(&self, stream: StreamId) -> Result<(), UnknownError> {
        let streams = self.stream_count();
        if u32::from(stream.0) < streams { Ok(()) } else { Err(UnknownError::Stream { stream, streams }) }
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the pools that reports and trims visit, in the order of their ids: live pools, and destroyed pools whose
    /// memory the driver holds.
    pub(super) fn kept_pools(&self) -> impl Iterator<Item = (PoolId, &PoolEntry<L>)> {
        let kept = self.destroyed.lock().kept().to_vec();
        work::count(kept.len());
        kept.into_iter().filter_map(|id| Some((id, self.pools.get(id.index())?))).filter(|(id, pool)| pool.id() == *id)
    }

    /// Returns `true` if the driver still has to release memory or addresses of removed segments of a pool: after a failure, or because
    /// observers have not acknowledged the removal. A trim releases them.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn has_retired_segments(&self, pool: PoolId) -> Result<bool, UnknownError> {
        Ok(self.pool(pool)?.heaps().any(|heap| heap.lock().log().has_retired()))
    }

    /// Returns the number of pools that reports and trims visit. For tests.
    #[doc(hidden)]
    pub fn kept_pool_count(&self) -> usize {
        self.destroyed.lock().kept().len()
    }

    /// Removes a destroyed pool whose memory was released.
    pub(super) fn bury(&self, pool: PoolId, entry: &PoolEntry<L>, heaps: &mut [HeapGuard<'_, L>]) {
        if heaps.iter().any(|heap| heap.log().has_retired()) {
            return;
        }
        let mut destroyed = self.destroyed.lock();
        if !destroyed.remove(pool) {
            return;
        }
        for heap in heaps {
            destroyed.bury(heap, entry.config().symmetric());
            let HeapIdentity { id, stream, .. } = heap.identity();
            let past = heap.ledger_mut().take_past();
            **heap = self.empty_heap(entry, HeapIdentity { id, pool, stream });
            heap.ledger_mut().set_past(past);
            heap.close();
        }
        destroyed.add_spare(entry.clone());
    }

    /// Creates a heap without ops and observers.
    pub(super) fn empty_heap(&self, entry: &PoolEntry<L>, identity: HeapIdentity) -> Heap<L> {
        let log = SegmentLog::new(Arc::clone(&entry.log_entries));
        Heap::new(identity, entry.config().clone(), Arc::clone(&entry.budget), self.granularity_bytes, log)
    }
}
