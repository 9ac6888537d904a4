//! One pool with the heaps that serve it.
//!
//! Pools and heaps are found without a lock, so a destroyed pool cannot be deallocated. Instead, the next pool of the
//! same configuration replaces it, see [`super::destroyed`]: the object gets a new id, and each of its heaps is
//! recreated at the first request for its stream. Until then the heap has the id of the earlier pool and counts as
//! absent.

use crate::config::errors::PoolSleeps;
use crate::config::restore_error::LayoutError;
use crate::config::{PoolConfig, StreamPolicy};
use crate::heap::Heap;
use crate::sleep::state::State;
use crate::stats::budget::Budget;
use crate::sync::lock::{Guard, Lock, LockCell};
use crate::sync::registry::Registry;
use crate::types::ids::{PoolId, StreamId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A heap behind its lock.
pub(super) type HeapCell<L> = <L as Lock>::Cell<Heap<L>>;

/// A locked heap.
pub(super) type HeapGuard<'a, L> = Guard<'a, L, Heap<L>>;

/// A pool with the heaps that serve it.
pub(super) struct Pool<L: Lock> {
    pub(super) config: PoolConfig,
    /// Digest of the configuration, which ranks compare at every agreement.
    pub(super) config_digest: u64,
    pub(super) budget: Arc<Budget<L>>,
    /// Number of entries so far in the segment logs of its heaps.
    pub(super) log_entries: Arc<AtomicU64>,
    /// The heap of each stream, by stream; if streams share a heap, the heap of all streams at index 0.
    heaps: Registry<Arc<HeapCell<L>>>,
    /// The current id, or the last one.
    id: AtomicU32,
    is_destroyed: AtomicBool,
    /// The key of the open step. Locked while a step begins or ends, and while a heap is created, before any heap's
    /// lock.
    pub(super) step: L::Cell<Option<u64>>,
    /// Locked after the step and before any heap's lock.
    pub(super) sleep: L::Cell<State>,
}

impl<L: Lock> Pool<L> {
    pub(super) fn new(id: PoolId, config: PoolConfig) -> Self {
        Pool {
            id: AtomicU32::new(id.0),
            budget: Arc::new(Budget::new(config.limit_bytes())),
            config_digest: config.digest(),
            config,
            heaps: Registry::new(),
            is_destroyed: AtomicBool::new(false),
            step: L::Cell::new(None),
            sleep: L::Cell::new(State::default()),
            log_entries: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Returns the pool's heaps in stream order.
    pub(super) fn heaps(&self) -> impl Iterator<Item = &HeapCell<L>> {
        let id = self.id();
        self.heaps.iter().map(|(_, heap)| &**heap).filter(move |heap| heap.lock().identity().pool == id)
    }

    /// Returns the heap that serves a stream, if it exists. The heap may belong to an earlier pool: the caller compares
    /// its identity.
    #[inline(always)]
    pub(super) fn heap(&self, stream: StreamId) -> Option<&HeapCell<L>> {
        self.heaps.get(self.index(stream)).map(|heap| &**heap)
    }

    /// Returns the heap that serves a stream. Creates it if necessary.
    pub(super) fn make_heap(&self, stream: StreamId, make: impl FnOnce() -> Arc<HeapCell<L>>) -> &HeapCell<L> {
        self.heaps.get_or_make(self.index(stream), make)
    }

    #[inline(always)]
    fn index(&self, stream: StreamId) -> usize {
        match self.config.streams() {
            StreamPolicy::Separate => stream.index(),
            StreamPolicy::Shared => 0,
        }
    }

    /// Returns an error if the pool sleeps. Everything that needs memory checks this first.
    pub(super) fn check_awake(&self, pool: PoolId) -> Result<(), PoolSleeps> {
        if self.sleep.lock().is_awake() { Ok(()) } else { Err(PoolSleeps { pool }) }
    }

    /// Returns an error if a layout cannot represent the pool: it has plans or a step, or sleeps.
    pub(super) fn check_layout_holds(&self, pool: PoolId) -> Result<(), LayoutError> {
        self.check_awake(pool)?;
        let is_planned = self.step.lock().is_some() || self.heaps().any(|heap| heap.lock().remembers_steps());
        if is_planned { Err(LayoutError::Planned { pool }) } else { Ok(()) }
    }

    pub(super) fn id(&self) -> PoolId {
        PoolId(self.id.load(Ordering::Acquire))
    }

    /// Turns this into another pool of the same configuration, without any heap or state of the earlier pool.
    pub(super) fn begin_as(&self, id: PoolId) {
        self.budget.restart(self.config.limit_bytes());
        self.log_entries.store(0, Ordering::Release);
        *self.step.lock() = None;
        *self.sleep.lock() = State::default();
        self.id.store(id.0, Ordering::Release);
        self.is_destroyed.store(false, Ordering::Release);
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::Acquire)
    }

    /// Marks the pool as destroyed: no heap is created any more, and none serves a request.
    pub(super) fn set_destroyed(&self) {
        self.is_destroyed.store(true, Ordering::Release);
    }
}
