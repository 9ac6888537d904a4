//! Memory pools of CUDA, each a pool of the allocator.
//!
//! | the driver's pool | here |
//! |---|---|
//! | a device's default pool | p1 |
//! | made by the program: on a device, not for export, without a size limit | p2 ..., at its first use |
//! | all others | the driver's |
//!
//! The driver keeps its pool, and with it what the program sets and asks about: reuse policies, the release threshold, which devices
//! have access. Memory in use and reserved are the sum of both.

use rustc_hash::FxHashMap;
use std::ffi::{c_int, c_ushort, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};
use symmalloc_core::PoolId;
use symmalloc_core::report::MemoryStats;
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaError, Pool};

/// A context that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContextId(usize);

impl ContextId {
    /// What lives for ever is told from all others by its address.
    pub(crate) fn of<T>(context: &'static T) -> Self {
        ContextId(std::ptr::from_ref(context).addr())
    }
}

/// What a pool is to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolRole {
    /// A device's default pool.
    Default,
    /// Made by the program, and served here.
    Served,
    /// Made by the program, and served by the driver.
    Drivers,
}

/// `CUmemPoolProps`.
#[repr(C)]
pub(crate) struct PoolProperties {
    /// 1: pinned, the only kind of device memory.
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    security: *mut c_void,
    max_bytes: usize,
    usage: c_ushort,
}

impl PoolProperties {
    /// The device, if a pool like this is served.
    fn served_device(&self) -> Option<c_int> {
        let is_served = self.kind == 1 && self.handle_types == 0 && self.location_kind == 1 && self.max_bytes == 0;
        is_served.then_some(self.location)
    }
}

/// A memory pool of the driver's that the program may name.
pub(crate) struct MemPool {
    /// Its handle.
    raw: usize,
    device: c_int,
    role: PoolRole,
    /// The allocator's pool, once it was used.
    made: OnceLock<Made>,
    is_destroyed: AtomicBool,
}

struct Made {
    context: ContextId,
    allocator: CudaAllocator,
    id: PoolId,
    /// Dropped when the program destroys its pool.
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

    /// A pool that the driver has.
    pub(crate) fn of_driver(raw: usize, device: c_int, role: PoolRole) -> &'static MemPool {
        Self::note(MemPool { raw, device, role, made: OnceLock::new(), is_destroyed: AtomicBool::new(false) })
    }

    /// The program made a pool.
    pub(crate) fn of_program(raw: usize, properties: &PoolProperties) {
        let served = properties.served_device();
        let role = if served.is_some() { PoolRole::Served } else { PoolRole::Drivers };
        Self::of_driver(raw, served.unwrap_or(-1), role);
    }

    /// A pool that is known by its handle.
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

    /// Makes the allocator's pool, if there is none.
    pub(crate) fn make(&self, context: ContextId, allocator: &CudaAllocator) -> Result<(), CudaError> {
        if self.made.get().is_some() {
            return Ok(());
        }
        let pool = allocator.create_pool(allocator.core().config().default_pool().clone())?;
        let made = Made { context, allocator: allocator.clone(), id: pool.id(), owner: Mutex::new(Some(pool)) };
        // Of two threads that make it at the same time, one's is dropped unused.
        let _first = self.made.set(made);
        Ok(())
    }

    /// The allocator's pool for work in a context; `None` if the driver serves it there.
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

    /// What the allocator has for the pool.
    pub(crate) fn stats(&self) -> Option<MemoryStats> {
        let made = self.living()?;
        made.allocator.core().pool_stats(made.id).ok()
    }

    /// Starts the peaks anew at the current values.
    pub(crate) fn reset_peaks(&self) {
        if let Some(made) = self.living() {
            made.allocator.core().reset_peak_stats();
        }
    }

    /// Gives free memory back if more than this is reserved.
    pub(crate) fn trim_to(&self, keep_bytes: u64) {
        let Some(made) = self.living() else { return };
        if self.stats().is_some_and(|stats| stats.reserved_bytes.current > keep_bytes) {
            let _refused = made.allocator.core().trim(Some(made.id));
        }
    }

    /// Takes a pool out that the program destroys, before the driver can give its handle to another one.
    pub(crate) fn take(raw: usize) -> Option<&'static MemPool> {
        POOLS.write().unwrap_or_else(PoisonError::into_inner).as_mut()?.remove(&raw)
    }

    /// The driver did not destroy it.
    pub(crate) fn put_back(&'static self) {
        let mut pools = POOLS.write().unwrap_or_else(PoisonError::into_inner);
        pools.get_or_insert_with(FxHashMap::default).insert(self.raw, self);
    }

    /// The program destroyed the pool. What is allocated stays until it is freed.
    pub(crate) fn end(&self) {
        let made = self.living();
        self.is_destroyed.store(true, Ordering::Relaxed);
        let Some(made) = made else { return };
        let owner = made.owner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _refused = made.allocator.core().trim(Some(made.id));
        drop(owner);
    }
}

/// A context is gone, and its pools are.
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
