//! One pool with the heaps that serve it.
//!
//! Pools and heaps are found without a lock, so a destroyed pool cannot be deallocated. Instead, a later pool reuses
//! it, see [`super::destroyed`]: the object gets a new id, and each of its heaps is recreated at the first request for
//! its stream. Until then the heap has the id of the earlier pool and counts as absent. The entry of an id keeps the
//! id's own configuration:
//!
//! ```text
//!  table of pools   PoolEntry 1 (destroyed)   PoolEntry 2 (live)
//!                     policy 1  └──► Pool ◄──────┘  policy 2
//!                                  id 2, heaps
//! ```

use crate::config::errors::PoolSleeps;
use crate::config::restore_error::LayoutError;
use crate::config::{PoolConfig, StreamPolicy};
use crate::heap::Heap;
use crate::sleep::state::State;
use crate::stats::budget::Budget;
use crate::sync::lock::{Guard, Lock, LockCell};
use crate::sync::registry::Registry;
use crate::types::ids::{PoolId, StreamId};
use crate::types::work;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A heap behind its lock.
pub(super) type HeapCell<L> = <L as Lock>::Cell<Heap<L>>;

/// A locked heap.
pub(super) type HeapGuard<'a, L> = Guard<'a, L, Heap<L>>;

/// The configuration of a pool.
struct Policy {
    config: PoolConfig,
    /// Digest of the configuration, which ranks compare at every agreement.
    digest: u64,
}

/// The entry of an id in the table of pools. All that remains of a destroyed pool once another one reuses its object.
pub(super) struct PoolEntry<L: Lock> {
    pool: Arc<Pool<L>>,
    policy: Arc<Policy>,
}

impl<L: Lock> PoolEntry<L> {
    /// Creates a pool.
    pub(super) fn new(id: PoolId, config: PoolConfig) -> Self {
        let pool = Arc::new(Pool::new(id, &config));
        PoolEntry { pool, policy: Policy::new(config) }
    }

    /// Creates a pool that reuses the object of this destroyed one, without any heap or state of it. Both have the same
    /// [`StreamPolicy`].
    pub(super) fn reuse(self, id: PoolId, config: PoolConfig) -> Self {
        let PoolEntry { pool, policy } = self;
        pool.begin_as(id, &config);
        let policy = if policy.config == config { policy } else { Policy::new(config) };
        PoolEntry { pool, policy }
    }

    pub(super) fn config(&self) -> &PoolConfig {
        &self.policy.config
    }

    pub(super) fn config_digest(&self) -> u64 {
        self.policy.digest
    }
}

impl<L: Lock> Clone for PoolEntry<L> {
    fn clone(&self) -> Self {
        PoolEntry { pool: Arc::clone(&self.pool), policy: Arc::clone(&self.policy) }
    }
}

impl<L: Lock> Deref for PoolEntry<L> {
    type Target = Pool<L>;

    #[inline(always)]
    fn deref(&self) -> &Pool<L> {
        &self.pool
    }
}

impl Policy {
    fn new(config: PoolConfig) -> Arc<Self> {
        Arc::new(Policy { digest: config.digest(), config })
    }
}

/// A pool with the heaps that serve it.
pub(super) struct Pool<L: Lock> {
    /// Policy of this pool and of all that reuse the object, because it determines the indices of heaps.
    streams: StreamPolicy,
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
    fn new(id: PoolId, config: &PoolConfig) -> Self {
        Pool {
            id: AtomicU32::new(id.0),
            streams: config.streams(),
            budget: Arc::new(Budget::new(config.limit_bytes())),
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
        self.heaps
            .iter()
            .inspect(|_| work::count(1))
            .map(|(_, heap)| &**heap)
            .filter(move |heap| heap.lock().identity().pool == id)
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
        match self.streams {
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

    /// Turns this into another pool, without any heap or state of the earlier one.
    fn begin_as(&self, id: PoolId, config: &PoolConfig) {
        debug_assert_eq!(self.streams, config.streams(), "the policy determines the indices of heaps");
        self.budget.restart(config.limit_bytes());
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
