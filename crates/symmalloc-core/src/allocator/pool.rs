//! One pool, with the heaps that serve it.
//!
//! Pools and heaps are found without a lock, so a destroyed pool cannot be deallocated. Instead the next pool of the same
//! configuration takes its place, see [`super::destroyed`]: the object gets a new id, and each of its heaps is made anew at the
//! first request for its stream. Until then the heap still has the id of the pool before, and counts as not made.

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

/// A heap that is locked.
pub(super) type HeapGuard<'a, L> = Guard<'a, L, Heap<L>>;

/// A pool, with the heaps that serve it.
pub(super) struct Pool<L: Lock> {
    pub(super) config: PoolConfig,
    /// Of the configuration: ranks compare it at every agreement.
    pub(super) config_digest: u64,
    pub(super) budget: Arc<Budget<L>>,
    /// Entries so far in the segment logs of its heaps.
    pub(super) log_entries: Arc<AtomicU64>,
    /// The heap of each stream, by stream; of all streams, at index 0, when they share.
    heaps: Registry<Arc<HeapCell<L>>>,
    /// The pool that this is now, or was last.
    id: AtomicU32,
    is_destroyed: AtomicBool,
    /// The key of the step that is open. Held while a step begins or ends, and while a heap is made, before any heap's lock.
    pub(super) step: L::Cell<Option<u64>>,
    /// Taken after the step, before any heap's lock.
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

    /// The pool's heaps in stream order.
    pub(super) fn heaps(&self) -> impl Iterator<Item = &HeapCell<L>> {
        let id = self.id();
        self.heaps.iter().map(|(_, heap)| &**heap).filter(move |heap| heap.lock().identity().pool == id)
    }

    /// The heap that serves a stream, if it was made already. It may be of an earlier pool: compare its identity.
    #[inline(always)]
    pub(super) fn heap(&self, stream: StreamId) -> Option<&HeapCell<L>> {
        self.heaps.get(self.index(stream)).map(|heap| &**heap)
    }

    /// The heap that serves a stream, made now if it was not made before.
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

    /// What needs memory asks first.
    pub(super) fn check_awake(&self, pool: PoolId) -> Result<(), PoolSleeps> {
        if self.sleep.lock().is_awake() { Ok(()) } else { Err(PoolSleeps { pool }) }
    }

    /// A layout cannot hold plans, nor a step, and is of a pool that is awake.
    pub(super) fn check_layout_holds(&self, pool: PoolId) -> Result<(), LayoutError> {
        self.check_awake(pool)?;
        let is_planned = self.step.lock().is_some() || self.heaps().any(|heap| heap.lock().remembers_steps());
        if is_planned { Err(LayoutError::Planned { pool }) } else { Ok(()) }
    }

    pub(super) fn id(&self) -> PoolId {
        PoolId(self.id.load(Ordering::Acquire))
    }

    /// Becomes another pool of the same configuration. Nothing of the pool before is left, and no heap is made yet.
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

    /// No heap is made any more, and none serves a request.
    pub(super) fn set_destroyed(&self) {
        self.is_destroyed.store(true, Ordering::Release);
    }
}
