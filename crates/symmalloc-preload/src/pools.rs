//! CUDA memory pools, each served by a pool of the allocator.
//!
//! | the driver's pool | served by |
//! |---|---|
//! | a device's default pool | p1 |
//! | created by the program: on a device, not for export, without a size limit | p2 ..., from its first use |
//! | all others | the driver |
//!
//! The driver keeps its own pool, which holds the state that the program sets and queries: reuse policies, the release threshold, and peer
//! access. When the program queries its used or reserved memory, the result is the sum over the driver's pool and the allocator's pool.

use rustc_hash::FxHashMap;
use std::ffi::{c_int, c_ushort, c_void};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};
use symmalloc_core::PoolId;
use symmalloc_core::report::MemoryStats;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, Pool};

/// The identity of a served context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextId(usize);

impl ContextId {
    /// Returns the id of a context. Contexts are never freed, so their address is a unique id.
    pub(crate) fn of<T>(context: &'static T) -> Self {
        ContextId(std::ptr::from_ref(context).addr())
    }
}

/// The role of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolRole {
    /// A device's default pool.
    Default,
    /// A pool that the program created and that the allocator serves.
    Served,
    /// A pool that the program created and that the driver serves.
    Drivers,
}

/// `CUmemPoolProps`.
#[repr(C)]
pub(crate) struct PoolProperties {
    /// Kind of memory; 1 is pinned, the only kind of device memory.
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: *mut c_void,
    max_bytes: usize,
    usage: c_ushort,
}

impl PoolProperties {
    /// Returns the device if a pool with these properties is served.
    fn served_device(&self) -> Option<c_int> {
        let is_served = self.kind == 1 && self.handle_types == 0 && self.location_kind == 1 && self.max_bytes == 0;
        is_served.then_some(self.location)
    }
}

/// A memory pool of the driver that the program can refer to.
pub(crate) struct MemPool {
    /// Handle of the pool.
    raw: usize,
    device: c_int,
    role: PoolRole,
    /// The allocator's pool, set at the first use.
    made: OnceLock<Made>,
    is_destroyed: AtomicBool,
}

struct Made {
    context: ContextId,
    allocator: CudaAllocator,
    id: PoolId,
    /// The allocator's pool; `None` once the program has destroyed its own pool.
    owner: Mutex<Option<Pool<CudaBackend>>>,
}

/// Pools by handle.
static POOLS: RwLock<Option<FxHashMap<usize, &'static MemPool>>> = RwLock::new(None);

impl MemPool {
    fn note(pool: MemPool) -> &'static MemPool {
        let pool: &'static MemPool = Box::leak(Box::new(pool));
        pool.put_back();
        pool
    }

    /// Registers a pool of the driver.
    pub(crate) fn of_driver(raw: usize, device: c_int, role: PoolRole) -> &'static MemPool {
        Self::note(MemPool { raw, device, role, made: OnceLock::new(), is_destroyed: AtomicBool::new(false) })
    }

    /// Registers a pool that the program created.
    pub(crate) fn of_program(raw: usize, properties: &PoolProperties) {
        let served = properties.served_device();
        let role = if served.is_some() { PoolRole::Served } else { PoolRole::Drivers };
        Self::of_driver(raw, served.unwrap_or(-1), role);
    }

    /// Returns a known pool by its handle.
    #[inline]
    pub(crate) fn find(raw: usize) -> Option<&'static MemPool> {
        POOLS.read().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&raw).copied()
    }

    pub(crate) fn raw(&self) -> usize {
        self.raw
    }

    pub(crate) fn device(&self) -> c_int {
        self.device
    }

    pub(crate) fn is_served(&self) -> bool {
        self.role != PoolRole::Drivers && !self.is_destroyed.load(Ordering::Relaxed)
    }

    /// Creates the allocator's pool if there is none.
    pub(crate) fn make(&self, context: ContextId, allocator: &CudaAllocator) -> Result<(), CudaError> {
        if self.made.get().is_some() {
            return Ok(());
        }
        // A base belongs to one pool: the allocator's own.
        let config = allocator.core().config().default_pool().to_builder().base(None).build()?;
        let pool = allocator.create_pool(config)?;
        let made = Made { context, allocator: allocator.clone(), id: pool.id(), owner: Mutex::new(Some(pool)) };
        // If two threads create the pool concurrently, one of the two pools is dropped unused.
        let _first = self.made.set(made);
        // If another thread destroys the program's pool in the meantime, that thread may not see the allocator's pool that was just set.
        fence(Ordering::SeqCst);
        if self.is_destroyed.load(Ordering::Relaxed) {
            self.close();
        }
        Ok(())
    }

    /// Returns the allocator's pool for work in a context, or `None` if the driver serves the work.
    #[inline]
    pub(crate) fn id_in(&self, context: ContextId, device: c_int, allocator: &CudaAllocator) -> Option<PoolId> {
        match self.made.get() {
            Some(made) if made.context == context => Some(made.id),
            Some(_) => None,
            None if self.device == device && self.is_served() => {
                self.make(context, allocator).ok()?;
                self.made.get().filter(|made| made.context == context).map(|made| made.id)
            }
            None => None,
        }
    }

    fn living(&self) -> Option<&Made> {
        if self.is_destroyed.load(Ordering::Relaxed) { None } else { self.made.get() }
    }

    /// Returns the allocator's statistics for the pool.
    pub(crate) fn stats(&self) -> Option<MemoryStats> {
        let made = self.living()?;
        made.allocator.core().pool_stats(made.id).ok()
    }

    /// Resets the peaks to the current values.
    pub(crate) fn reset_peaks(&self) {
        if let Some(made) = self.living() {
            made.allocator.core().reset_peak_stats();
        }
    }

    /// Releases free memory if more than `keep_bytes` bytes are reserved.
    pub(crate) fn trim_to(&self, keep_bytes: u64) {
        let Some(made) = self.living() else { return };
        if self.stats().is_some_and(|stats| stats.reserved_bytes.current > keep_bytes) {
            let _refused = made.allocator.core().trim_pool(made.id);
        }
    }

    /// Removes a pool that the program destroys, before the driver can reuse its handle.
    pub(crate) fn take(raw: usize) -> Option<&'static MemPool> {
        POOLS.write().unwrap_or_else(PoisonError::into_inner).as_mut()?.remove(&raw)
    }

    /// Restores a pool that the driver did not destroy.
    pub(crate) fn put_back(&'static self) {
        let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
        pools.get_or_insert_with(FxHashMap::default).insert(self.raw, self);
    }

    /// Ends a pool that the program destroyed. Its allocations stay until they are freed.
    pub(crate) fn end(&self) {
        if !self.is_destroyed.swap(true, Ordering::Relaxed) {
            fence(Ordering::SeqCst);
            self.close();
        }
    }

    fn close(&self) {
        let Some(made) = self.made.get() else { return };
        let owner = made.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _refused = made.allocator.core().trim_pool(made.id);
        drop(owner);
    }
}

/// Ends all pools of a context that is gone.
pub(crate) fn end_all_of(context: ContextId) {
    let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
    let Some(pools) = pools.as_mut() else { return };
    pools.retain(|_, pool| {
        let is_gone = pool.made.get().is_some_and(|made| made.context == context);
        if is_gone {
            pool.is_destroyed.store(true, Ordering::Relaxed);
        }
        !is_gone
    });
}
