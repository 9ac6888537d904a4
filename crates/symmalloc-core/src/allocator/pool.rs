//! One pool with the heaps that serve it.
//!
//! Pools and heaps are found without a lock, so a destroyed pool cannot be deallocated. Instead, a later pool reuses
//! it, see [`super::destroyed`]: the object gets a new id, and each of its heaps is reset at the first request for its
//! stream. Until then the heap has the id of the earlier pool and counts as absent. The slot of an id keeps the id's
//! own configuration. [`PoolSlot::pool`] returns the pool only if the object has the slot's id, so a dead id does not
//! reach a later pool. A caller that then takes a lock of the pool looks it up once more:
//!
//! ```text
//!  table of pools   PoolSlot 1 (destroyed)    PoolSlot 2 (live)
//!                     policy 1  └──► Pool ◄──────┘  policy 2
//!                                  id 2, heaps
//! ```

use crate::arena::addresses::FixedAddresses;
use crate::config::errors::PoolSleeps;
use crate::config::restore_error::LayoutError;
use crate::config::{PoolConfig, StreamPolicy};
use crate::heap::Heap;
use crate::sleep::State;
use crate::stats::budget::Budget;
use crate::sync::lock::{Guard, Lock, LockCell};
use crate::sync::registry::Registry;
use crate::types::backend::{Backend, DeviceAddress, Range};
use crate::types::base::{BaseError, SLOT_BYTES};
use crate::types::ids::{PoolId, StreamGroup, StreamId};
use crate::types::work;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The addresses of a pool with a base; `None` for every other pool.
pub(super) type PoolAddresses<L> = Option<Arc<FixedAddresses<L>>>;

/// A heap behind its lock.
pub(super) type HeapCell<L> = <L as Lock>::Cell<Heap<L>>;

/// A heap, and its index in the table of its pool. The index is outside of the lock, which the reader may hold.
pub(super) struct PoolHeap<L: Lock> {
    index: u32,
    cell: HeapCell<L>,
}

impl<L: Lock> PoolHeap<L> {
    pub(super) fn new(heap: Heap<L>) -> Self {
        PoolHeap { index: heap.id().group.first().map_or(0, |first| first.0.into()), cell: LockCell::new(heap) }
    }

    #[inline(always)]
    pub(super) fn cell(&self) -> &HeapCell<L> {
        &self.cell
    }
}

/// A locked heap.
pub(super) type HeapGuard<'a, L> = Guard<'a, L, Heap<L>>;

/// The configuration of a pool.
struct Policy {
    config: PoolConfig,
    /// Digest of the configuration, which ranks compare at every agreement.
    digest: u64,
}

/// The slot of an id in the table of pools. Of a destroyed pool, it keeps only the configuration once another pool
/// reuses the object.
pub(super) struct PoolSlot<L: Lock> {
    id: PoolId,
    pool: Arc<Pool<L>>,
    policy: Arc<Policy>,
}

impl<L: Lock> PoolSlot<L> {
    /// Creates a pool.
    pub(super) fn new(id: PoolId, config: PoolConfig, addresses: PoolAddresses<L>) -> Self {
        let pool = Arc::new(Pool::new(id, &config, addresses));
        PoolSlot { id, pool, policy: Policy::new(config) }
    }

    /// Creates a pool that reuses the object of this destroyed one, without any heap or state of it. Both have the same
    /// [`StreamPolicy`].
    pub(super) fn reuse(self, id: PoolId, config: PoolConfig, addresses: PoolAddresses<L>) -> Self {
        let PoolSlot { pool, policy, .. } = self;
        pool.begin_as(id, &config, addresses);
        let policy = if policy.config == config { policy } else { Policy::new(config) };
        PoolSlot { id, pool, policy }
    }

    pub(super) fn config(&self) -> &PoolConfig {
        &self.policy.config
    }

    pub(super) fn config_digest(&self) -> u64 {
        self.policy.digest
    }

    /// Returns the pool, live or destroyed, unless a later pool reuses the object.
    pub(super) fn pool(&self) -> Option<PoolRef<'_, L>> {
        (self.pool.id() == self.id).then_some(PoolRef { slot: self })
    }

    /// Returns the pool if it is live.
    #[inline(always)]
    pub(super) fn live(&self) -> Option<PoolRef<'_, L>> {
        // The order matters: an object gets the next pool's id before it counts as live.
        let is_destroyed = self.pool.is_destroyed.load(Ordering::Acquire);
        if is_destroyed { None } else { self.pool() }
    }

    /// Returns the heap that serves a stream, if it exists. The heap may belong to another pool: the caller compares its
    /// identity after locking it.
    #[inline(always)]
    pub(super) fn unchecked_heap(&self, stream: StreamId) -> Option<&HeapCell<L>> {
        self.pool.heaps.get(self.pool.index(stream)).map(|heap| &heap.cell)
    }
}

impl<L: Lock> Clone for PoolSlot<L> {
    fn clone(&self) -> Self {
        PoolSlot { id: self.id, pool: Arc::clone(&self.pool), policy: Arc::clone(&self.policy) }
    }
}

impl Policy {
    fn new(config: PoolConfig) -> Arc<Self> {
        Arc::new(Policy { digest: config.digest(), config })
    }
}

/// The object of a pool, and of later pools after its destruction.
struct Pool<L: Lock> {
    /// Policy of this pool and of all that reuse the object, because it determines the indices of heaps.
    streams: StreamPolicy,
    budget: Arc<Budget<L>>,
    log_entries: Arc<AtomicU64>,
    /// The addresses, until they are released. No other lock is taken under this one.
    addresses: L::Cell<PoolAddresses<L>>,
    /// The heap of each stream, by stream. If all streams share a heap, only index 0 is in use. The heap of a group is
    /// at the index of each member that has used it, and always at that of the first.
    heaps: Registry<Arc<PoolHeap<L>>>,
    /// The current id, or the last one.
    id: AtomicU32,
    is_destroyed: AtomicBool,
    step: L::Cell<Option<u64>>,
    sleep: L::Cell<State>,
}

impl<L: Lock> Pool<L> {
    fn new(id: PoolId, config: &PoolConfig, addresses: PoolAddresses<L>) -> Self {
        Pool {
            id: AtomicU32::new(id.0),
            streams: config.streams(),
            budget: Arc::new(Budget::new(config.limit_bytes())),
            heaps: Registry::new(),
            is_destroyed: AtomicBool::new(false),
            step: L::Cell::new(None),
            sleep: L::Cell::new(State::default()),
            log_entries: Arc::new(AtomicU64::new(0)),
            addresses: L::Cell::new(addresses),
        }
    }

    /// Turns this into another pool, without any heap or state of the earlier one.
    fn begin_as(&self, id: PoolId, config: &PoolConfig, addresses: PoolAddresses<L>) {
        debug_assert_eq!(self.streams, config.streams(), "the policy determines the indices of heaps");
        self.budget.restart(config.limit_bytes());
        self.log_entries.store(0, Ordering::Release);
        *self.addresses.lock() = addresses;
        *self.step.lock() = None;
        *self.sleep.lock() = State::default();
        self.id.store(id.0, Ordering::Release);
        self.is_destroyed.store(false, Ordering::Release);
    }

    fn id(&self) -> PoolId {
        PoolId(self.id.load(Ordering::Acquire))
    }

    #[inline(always)]
    fn index(&self, stream: StreamId) -> usize {
        match self.streams {
            StreamPolicy::Separate | StreamPolicy::Grouped => stream.index(),
            StreamPolicy::Shared => 0,
        }
    }
}

/// A pool, live or destroyed.
pub(super) struct PoolRef<'a, L: Lock> {
    slot: &'a PoolSlot<L>,
}

impl<L: Lock> Clone for PoolRef<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lock> Copy for PoolRef<'_, L> {}

impl<'a, L: Lock> PoolRef<'a, L> {
    pub(super) fn id(self) -> PoolId {
        self.slot.id
    }

    pub(super) fn config(self) -> &'a PoolConfig {
        self.slot.config()
    }

    /// Returns the digest of the configuration, which ranks compare at every agreement.
    pub(super) fn config_digest(self) -> u64 {
        self.slot.config_digest()
    }

    pub(super) fn slot(self) -> &'a PoolSlot<L> {
        self.slot
    }

    pub(super) fn budget(self) -> &'a Arc<Budget<L>> {
        &self.slot.pool.budget
    }

    /// Returns the addresses, if the pool has a base and they were not released.
    pub(super) fn addresses(self) -> &'a L::Cell<PoolAddresses<L>> {
        &self.slot.pool.addresses
    }

    /// Returns the number of entries so far in the segment logs of the pool's heaps.
    pub(super) fn log_entries(self) -> &'a Arc<AtomicU64> {
        &self.slot.pool.log_entries
    }

    /// Returns the key of the open step. It is locked while a step begins or ends, and while a heap is created, before
    /// any heap's lock.
    pub(super) fn step(self) -> &'a L::Cell<Option<u64>> {
        &self.slot.pool.step
    }

    /// Returns the state of the pool's sleep. It is locked after the step and before any heap's lock.
    pub(super) fn sleep(self) -> &'a L::Cell<State> {
        &self.slot.pool.sleep
    }

    /// Returns the pool's heaps in stream order.
    pub(super) fn heaps(self) -> impl Iterator<Item = &'a HeapCell<L>> {
        let id = self.id();
        let heaps = self.slot.pool.heaps.iter().inspect(|_| work::count(work::WORK_PER_HEAP));
        let once = heaps.filter(|(index, heap)| heap.index as usize == *index);
        once.map(|(_, heap)| &heap.cell).filter(move |heap| heap.lock().id().pool == id)
    }

    /// Returns the heap that these streams share, if it exists.
    pub(super) fn heap(self, group: StreamGroup) -> Option<&'a HeapCell<L>> {
        let heap = self.slot.unchecked_heap(group.first().unwrap_or_default());
        heap.filter(|heap| heap.lock().id().pool == self.id())
    }

    /// Returns the heap of a group, at the index of one of its streams. Creates it if necessary.
    pub(super) fn make_heap(
        self,
        stream: StreamId,
        group: StreamGroup,
        make: impl FnOnce() -> Arc<PoolHeap<L>>,
    ) -> &'a HeapCell<L> {
        let pool = &self.slot.pool;
        let heap = pool.heaps.get_or_make(pool.index(group.first().unwrap_or_default()), make);
        &pool.heaps.get_or_make(pool.index(stream), || Arc::clone(heap)).cell
    }

    /// Returns an error if the pool sleeps. Everything that needs memory checks this first.
    pub(super) fn check_awake(self) -> Result<(), PoolSleeps> {
        if self.sleep().lock().is_awake() { Ok(()) } else { Err(PoolSleeps { pool: self.id() }) }
    }

    /// Returns an error if a layout cannot represent the pool: it has plans or a step, or sleeps.
    pub(super) fn check_layout_holds(self) -> Result<(), LayoutError> {
        self.check_awake()?;
        if self.config().debug().quarantine_bytes > 0 {
            return Err(LayoutError::Quarantined { pool: self.id() });
        }
        let is_planned = self.step().lock().is_some() || self.heaps().any(|heap| heap.lock().remembers_steps());
        if is_planned { Err(LayoutError::Planned { pool: self.id() }) } else { Ok(()) }
    }

    pub(super) fn is_destroyed(self) -> bool {
        self.slot.pool.is_destroyed.load(Ordering::Acquire)
    }

    /// Marks the pool as destroyed: no heap is created any more, and none serves a request.
    pub(super) fn set_destroyed(self) {
        self.slot.pool.is_destroyed.store(true, Ordering::Release);
    }
}

/// Reserves the addresses of a new pool, if it has a base.
pub(super) fn reserve_addresses<L: Lock>(
    backend: &impl Backend,
    pool: PoolId,
    config: &PoolConfig,
) -> Result<PoolAddresses<L>, BaseError> {
    let Some(base) = config.base() else { return Ok(None) };
    let space = backend.reserve_at(base, pool)?;
    let asked = Range { base: DeviceAddress(base.address()), size_bytes: SLOT_BYTES };
    if space != asked {
        let _taken_back = backend.release_space(space);
        return Err(BaseError::Driver { base, call: "Backend::reserve_at", code: 0 });
    }
    Ok(Some(Arc::new(FixedAddresses::new(space))))
}
