//! Pools and streams: creation, look-up and destruction. Pool 0 always exists.

use super::Allocator;
use super::gate::Gate;
use super::pool::{HeapGuard, PoolRef, PoolSlot, reserve_addresses};
use super::recorder::RecordingEnd;
use crate::config::PoolConfig;
use crate::config::errors::{PoolError, StreamError, UnknownError};
use crate::config::op::Op;
use crate::heap::trim::Released;
use crate::heap::{Freed, Heap};
use crate::history::segment_log::SegmentLog;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError};
use crate::types::groups::Groups;
use crate::types::ids::{HeapId, HeapNumber, PoolId, StreamId};
use crate::types::work;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The allocations that a reset of a pool freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Emptied {
    /// Number of freed allocations, without those of zero bytes.
    pub allocations: u64,
    /// Bytes of their blocks.
    pub allocated_bytes: u64,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Creates the program's next pool. Create pools in the same order on every rank. Threads that create pools at the
    /// same time race for the ids: use [`create_pool_with_key`](Self::create_pool_with_key) there.
    ///
    /// # Errors
    /// Returns an error if the pool has a base whose addresses cannot be reserved; no pool is created then.
    pub fn create_pool(&self, config: PoolConfig) -> Result<PoolId, PoolError> {
        self.add_pool(None, config)
    }

    /// Creates a pool whose id is the key that the program chose, so that the id does not depend on the timing of
    /// threads that create pools. A key is from 1 to [`PoolId::KEY_MAX`], and is used once.
    ///
    /// # Determinism
    /// Pools are ordered by their ids, in trims, reports and agreement. [`create_pool`](Self::create_pool) uses the id
    /// after the highest one so far: create pools without a key before the threads start, or give every pool a key.
    ///
    /// # Errors
    /// Returns an error if the key is out of range or was used before, or the addresses of the base cannot be reserved.
    ///
    /// # Examples
    /// ```
    /// use std::thread;
    /// use symmalloc::{Config, PoolConfig, PoolId, SharedAllocator};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = SharedAllocator::new(SimBackend::builder().build(), Config::default())?;
    /// thread::scope(|scope| {
    ///     for worker in 1..=4 {
    ///         let allocator = &allocator;
    ///         scope.spawn(move || allocator.create_pool_with_key(PoolId(worker), PoolConfig::default()));
    ///     }
    /// });
    /// assert_eq!(allocator.pools(), [0, 1, 2, 3, 4].map(PoolId));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create_pool_with_key(&self, key: PoolId, config: PoolConfig) -> Result<PoolId, PoolError> {
        self.add_pool(Some(key), config)
    }

    fn add_pool(&self, key: Option<PoolId>, config: PoolConfig) -> Result<PoolId, PoolError> {
        let mut gate = self.gate();
        // No heap is created while this lock is held.
        let observers = self.observers.lock();
        if let Some(key) = key {
            if key == PoolId::DEFAULT || key > PoolId::KEY_MAX {
                return Err(PoolError::KeyOutOfRange { key });
            }
            if self.pools.get(key.index()).is_some() {
                return Err(PoolError::KeyInUse { key });
            }
        }
        let (symmetric, limit_bytes) = (config.symmetric(), config.limit_bytes());
        // Before the pool can be used. It has no id yet that a thread knows.
        if !config.debug().is_off() {
            self.recorder.begin_debugging();
        }
        let config = config.that_works(self.context.backend.can_alias());
        let recorded = gate.is_recording().then(|| Box::new(config.clone()));
        let next = key.unwrap_or(PoolId(self.pools.len() as u32));
        let addresses = reserve_addresses(&self.context.backend, next, &config)
            .map_err(|error| PoolError::Base(Box::new(error)))?;
        let spare = self.destroyed.lock().take_spare(&config);
        let make = |index| {
            let pool = PoolId(index as u32);
            match spare {
                Some(spare) => spare.reuse(pool, config, addresses),
                None => PoolSlot::new(pool, config, addresses),
            }
        };
        let pool = match key {
            Some(key) => {
                self.pools.get_or_make(key.index(), || make(key.index()));
                key
            }
            None => PoolId(self.pools.push(make) as u32),
        };
        self.destroyed.lock().list(pool);
        drop(observers);
        if let Some(config) = recorded {
            gate.note(Op::CreatePool { pool, config });
        }
        tracing::debug!(name: "pool.created", target: "symmalloc", pool = pool.0, symmetric, limit_bytes);
        Ok(pool)
    }

    /// Returns one more than the highest id of a pool so far. Without keys, this is the number of pools created so far,
    /// including the default pool and destroyed ones.
    pub fn pool_count(&self) -> u32 {
        self.pools.len() as u32
    }

    /// Returns the live pools in the order of their ids.
    pub fn pools(&self) -> Vec<PoolId> {
        self.listed_pools().filter(|entry| !entry.is_destroyed()).map(PoolRef::id).collect()
    }

    /// Returns a pool's policy.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    pub fn pool_config(&self, pool: PoolId) -> Result<&PoolConfig, UnknownError> {
        Ok(self.pool(pool)?.config())
    }

    /// Destroys a pool. All of its memory is released, including reserved segments. Its id is not reused. Returns the
    /// released bytes.
    ///
    /// A destroyed pool keeps at most 256 bytes of host memory, and about 60 if it was created like one that had been
    /// destroyed before. If the pool is symmetric, each heap beyond the first keeps up to 28 more until the ranks agree on
    /// its history.
    ///
    /// # Errors
    /// Returns an error if the pool does not exist, is the default pool, is observed, or has live allocations; it is
    /// unchanged then. When the driver fails, the pool is destroyed and the next [`trim_all`](Self::trim_all)
    /// tries again.
    pub fn destroy_pool(&self, pool: PoolId) -> Result<u64, PoolError> {
        self.destroy_recorded(pool, &mut self.gate())
    }

    fn destroy_recorded(&self, pool: PoolId, gate: &mut Gate<'_, L>) -> Result<u64, PoolError> {
        let observers = self.observers.lock();
        let entry = self.pool(pool)?;
        if pool == PoolId::DEFAULT {
            return Err(PoolError::Default);
        }
        if observers.count(pool) > 0 {
            return Err(PoolError::Observed { pool, observers: observers.count(pool) });
        }
        let mut sleep = entry.sleep().lock();
        if sleep.is_changing {
            return Err(PoolError::Sleeping { pool });
        }
        // Locks all heaps together, so that no other thread allocates between the check and the destruction.
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let (allocations, allocated_bytes) = live_in::<L>(&heaps);
        if allocations > 0 {
            return Err(PoolError::InUse { pool, allocations, allocated_bytes });
        }
        entry.set_destroyed();
        for heap in &mut heaps {
            heap.release_quarantine(&self.context, 0);
        }
        let mut released = Released::default();
        for heap in &mut heaps {
            released = released.plus(heap.destroy(&self.context));
        }
        self.end_sleep(&mut sleep);
        released = released.plus(self.remove_released(entry, &mut heaps));
        drop((heaps, sleep, observers));
        self.context.backend.forget_pool(pool);
        gate.note(Op::DestroyPool { pool });
        tracing::debug!(name: "pool.destroyed", target: "symmalloc", pool = pool.0);
        gate.note_released(&released);
        released.error.map_or(Ok(released.bytes), |error| Err(error.into()))
    }

    /// Records that the program has dropped its last reference to a pool. The pool is destroyed by
    /// [`destroy_abandoned`](Self::destroy_abandoned) or, if it is private and the limit over all pools would refuse a
    /// request, before that request is served. Until then, it serves requests. Has no effect on a destroyed pool.
    ///
    /// # Determinism
    /// Ranks do not compare private pools, so a program may drop them at different points on different ranks. Their
    /// memory counts toward the limit over all pools. Recordings contain each destruction as an op.
    pub fn abandon_pool(&self, pool: PoolId) {
        let mut abandoned = self.abandoned.lock();
        if pool != PoolId::DEFAULT
            && self.pool(pool).is_ok()
            && let Err(at) = abandoned.binary_search(&pool)
        {
            abandoned.insert(at, pool);
        }
    }

    /// Destroys the abandoned pools that have no live allocations and no observers, in the order of their ids. Returns
    /// the released bytes.
    ///
    /// # Errors
    /// Returns the first error of the driver. All of these pools are destroyed, and the next
    /// [`trim_all`](Self::trim_all) retries the release.
    pub fn destroy_abandoned(&self) -> Result<u64, PoolError> {
        self.destroy_some_abandoned(|_| true, &mut self.gate())
    }

    /// Destroys the abandoned pools like [`destroy_abandoned`](Self::destroy_abandoned), except symmetric ones, whose
    /// ops ranks compare.
    ///
    /// # Errors
    /// See [`destroy_abandoned`](Self::destroy_abandoned).
    pub fn destroy_abandoned_private(&self) -> Result<u64, PoolError> {
        self.destroy_some_abandoned(|entry| !entry.config().symmetric(), &mut self.gate())
    }

    /// Destroys private abandoned pools for a request of another pool that a limit refused. Returns the released bytes.
    pub(super) fn destroy_abandoned_for(&self, asking: PoolId, gate: &mut Gate<'_, L>) -> u64 {
        let is_selected = |entry: PoolRef<'_, L>| !entry.config().symmetric() && entry.id() != asking;
        self.destroy_some_abandoned(is_selected, gate).unwrap_or(0)
    }

    /// Returns `true` if the program has abandoned a pool that still exists.
    pub(super) fn has_abandoned(&self) -> bool {
        !self.abandoned.lock().is_empty()
    }

    fn destroy_some_abandoned(
        &self,
        is_selected: impl Fn(PoolRef<'_, L>) -> bool,
        gate: &mut Gate<'_, L>,
    ) -> Result<u64, PoolError> {
        let abandoned = self.abandoned.lock().clone();
        work::count(abandoned.len());
        let (mut released_bytes, mut outcome) = (0, Ok(()));
        for pool in abandoned {
            if self.pool(pool).is_ok_and(|entry| !is_selected(entry)) {
                continue;
            }
            match self.destroy_recorded(pool, gate) {
                Ok(bytes) => released_bytes += bytes,
                // The pool stays abandoned.
                Err(PoolError::InUse { .. } | PoolError::Observed { .. } | PoolError::Sleeping { .. }) => continue,
                Err(PoolError::Backend(error)) => outcome = outcome.and(Err(PoolError::Backend(error))),
                // The program destroyed it.
                Err(_) => {}
            }
            self.abandoned.lock().retain(|other| *other != pool);
        }
        outcome.map(|()| released_bytes)
    }

    /// Frees all live allocations of a pool at once, in the order of their placements. Their handles become stale, and their
    /// memory stays in the pool. Makes no driver call, unless the pool has a release threshold. Allocations of zero
    /// bytes stay live, because they have no memory.
    ///
    /// The memory can be reused at once: on the device, its next user waits for all work of other streams that used it.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown.
    ///
    /// # Examples
    /// ```
    /// use symmalloc::{Allocator, Config, PoolConfig};
    /// use symmalloc::sim::SimBackend;
    ///
    /// let allocator = Allocator::new(SimBackend::builder().build(), Config::default())?;
    /// let stream = allocator.register_stream()?;
    /// let arena = allocator.create_pool(PoolConfig::default())?;
    /// let first = allocator.allocate(arena, stream, 3 << 20)?;
    /// assert_eq!(allocator.reset_pool(arena)?.allocations, 1);
    /// assert!(allocator.free(first.handle).is_err(), "the handle is stale");
    /// assert_eq!(allocator.allocate(arena, stream, 3 << 20)?.placement, first.placement);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reset_pool(&self, pool: PoolId) -> Result<Emptied, UnknownError> {
        self.reset_pool_if(pool, |_, _| Ok(()))
    }

    /// Resets a pool like [`reset_pool`](Self::reset_pool), but only if it has no live allocations. This is the reset for
    /// programs whose buffers own their allocations.
    ///
    /// # Errors
    /// Returns an error if the pool is unknown or has live allocations; it is unchanged then.
    pub fn reset_unused_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        let reset = self.reset_pool_if(pool, |allocations, allocated_bytes| match allocations {
            0 => Ok(()),
            _ => Err(PoolError::InUse { pool, allocations, allocated_bytes }),
        });
        reset.map(drop)
    }

    /// Resets a pool if `check` accepts the number and the bytes of its live allocations.
    fn reset_pool_if<E: From<UnknownError>>(
        &self,
        pool: PoolId,
        check: impl FnOnce(u64, u64) -> Result<(), E>,
    ) -> Result<Emptied, E> {
        let mut gate = self.gate();
        let entry = self.pool(pool)?;
        // Locks all heaps together, so that no other thread allocates between the frees.
        let mut heaps: Vec<_> = entry.heaps().map(LockCell::lock).collect();
        let (allocations, allocated_bytes) = live_in::<L>(&heaps);
        check(allocations, allocated_bytes)?;
        let (mut freed, mut failure) = (Vec::new(), None);
        for heap in &mut heaps {
            if heap.release_quarantine(&self.context, 0) {
                failure = failure.or(heap.release_above_threshold(&self.context));
            }
            let live = heap.live_handles();
            work::count(live.len());
            for handle in &live {
                let Freed { size, requested_bytes } = heap.free_debugged_in_reset(&self.context, *handle);
                if L::IS_EXCLUSIVE {
                    self.usage.lock().free(size, requested_bytes);
                }
                failure = failure.or(heap.release_above_threshold(&self.context));
            }
            heap.note_reset();
            freed.extend(live);
        }
        drop(heaps);
        freed.iter().for_each(|handle| gate.note_free(*handle));
        gate.note(Op::ResetPool { pool });
        failure.into_iter().for_each(|error| gate.end(RecordingEnd::Driver(error)));
        tracing::debug!(name: "pool.reset", target: "symmalloc", pool = pool.0, freed = freed.len());
        Ok(Emptied { allocations, allocated_bytes })
    }

    #[inline(always)]
    pub(super) fn pool(&self, pool: PoolId) -> Result<PoolRef<'_, L>, UnknownError> {
        match self.pools.get(pool.index()) {
            Some(slot) => slot.live().ok_or(UnknownError::DestroyedPool { pool }),
            None => Err(UnknownError::Pool { pool, pools: self.pool_count() }),
        }
    }

    /// Registers the program's next stream, in a new group. Register streams in the same order on every rank.
    ///
    /// # Errors
    /// Returns an error if all 65,535 ids are in use.
    pub fn register_stream(&self) -> Result<StreamId, StreamError> {
        self.register(None)
    }

    /// Registers the program's next stream in the group with this first stream. In pools with `streams:grouped`, the
    /// streams of a group share a heap; other pools ignore groups. A stream stays in its group.
    ///
    /// Use one group for the streams that one thread drives, or several threads whose order is the same on every rank.
    /// Register streams in the same order, and in the same groups, on every rank.
    ///
    /// # Errors
    /// Returns an error if no group has this name, or all 65,535 ids are in use.
    pub fn register_stream_in(&self, group: StreamId) -> Result<StreamId, StreamError> {
        self.register(Some(group))
    }

    fn register(&self, group: Option<StreamId>) -> Result<StreamId, StreamError> {
        let mut gate = self.gate();
        let mut clocks = self.context.clocks.lock();
        let streams = self.streams.load(Ordering::Relaxed);
        if streams > StreamId::MAX.0.into() {
            return Err(StreamError::TooManyStreams { streams });
        }
        let registered = self.groups.lock().register(group);
        let stream = registered.ok_or(StreamError::UnknownGroup { group: group.unwrap_or_default() })?;
        let group = group.unwrap_or(stream);
        clocks.register();
        self.streams.store(streams + 1, Ordering::Release);
        drop(clocks);
        gate.note(Op::RegisterStream { stream, group });
        tracing::debug!(name: "stream.registered", target: "symmalloc", stream = stream.0, group = group.0);
        Ok(stream)
    }

    /// Returns the first stream of a stream's group, which names the group.
    ///
    /// # Errors
    /// Returns an error if the stream is unknown.
    pub fn group_of(&self, stream: StreamId) -> Result<StreamId, UnknownError> {
        self.known_stream(stream)?;
        Ok(self.groups.lock().first_of(stream))
    }

    /// Returns the groups of the registered streams.
    pub fn groups(&self) -> Groups {
        self.groups.lock().clone()
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
    pub fn note_stream_wait(&self, stream: StreamId, on: StreamId) -> Result<(), UnknownError> {
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
    pub fn note_synchronized(&self, stream: StreamId) -> Result<(), UnknownError> {
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
    pub(super) fn listed_pools(&self) -> impl Iterator<Item = PoolRef<'_, L>> {
        let listed = self.destroyed.lock().listed().to_vec();
        work::count(listed.len());
        listed.into_iter().filter_map(|id| self.pools.get(id.index())?.pool())
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
    pub fn listed_pool_count(&self) -> usize {
        self.destroyed.lock().listed().len()
    }

    /// Removes a destroyed pool whose memory was released, with its addresses if it has a base. Returns the driver's error
    /// if it keeps the addresses; a trim tries again.
    pub(super) fn remove_released(&self, entry: PoolRef<'_, L>, heaps: &mut [HeapGuard<'_, L>]) -> Released {
        if heaps.iter().any(|heap| heap.log().has_retired()) {
            return Released::default();
        }
        // Held until the end: another thread may have removed the pool already. A later pool then has its object, with
        // addresses of its own.
        let mut destroyed = self.destroyed.lock();
        if !destroyed.is_listed(entry.id()) {
            return Released::default();
        }
        match self.release_addresses(entry) {
            Ok(true) => {}
            Ok(false) => return Released::default(),
            Err(error) => return Released { bytes: 0, error: Some(error) },
        }
        destroyed.remove(entry.id());
        for heap in heaps {
            self.debug.keep(heap, &self.context);
            destroyed.absorb(heap, entry.config().symmetric());
            let (id, number) = (heap.id(), heap.number());
            heap.replace(self.empty_heap(entry, id, number));
            heap.close();
        }
        destroyed.add_spare(entry.slot().clone());
        Released::default()
    }

    /// Releases the addresses of a destroyed pool with a base. Returns `false` if a range is still in use, because the
    /// driver failed to release it.
    pub(super) fn release_addresses(&self, entry: PoolRef<'_, L>) -> Result<bool, BackendError> {
        let mut held = entry.addresses().lock();
        let Some(addresses) = held.as_ref() else { return Ok(true) };
        if !addresses.is_unused() {
            return Ok(false);
        }
        self.context.backend.release_space(addresses.space())?;
        *held = None;
        Ok(true)
    }

    /// Creates a heap without ops and observers.
    pub(super) fn empty_heap(&self, entry: PoolRef<'_, L>, id: HeapId, number: HeapNumber) -> Heap<L> {
        let log = SegmentLog::new(Arc::clone(entry.log_entries()));
        let addresses = entry.addresses().lock().clone();
        let shared = (Arc::clone(entry.budget()), addresses);
        Heap::new(id, number, entry.config().clone(), shared, self.granularity_bytes, log)
    }
}

/// Returns the number and the bytes of the live allocations in these heaps.
fn live_in<L: Lock>(heaps: &[HeapGuard<'_, L>]) -> (u64, u64) {
    let usages = heaps.iter().map(|heap| heap.ledger().usage());
    usages.fold((0, 0), |(count, bytes), usage| (count + usage.allocations(), bytes + usage.allocated_bytes()))
}
