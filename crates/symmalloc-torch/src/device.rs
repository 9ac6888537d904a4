//! The allocator of one device, with raw streams and raw pointers instead of ids and handles.
//!
//! ```text
//!   raw stream ──► StreamRegistry ──► stream id ─┐
//!                                                ├─► symmalloc_core ──► raw pointer
//!   scopes, pools ───────────────────► pool id ──┘
//!   raw pointer ──► symmalloc_core ──► free, record_use
//! ```
//!
//! The core makes all decisions and finds allocations by pointer. This file resolves the stream and the pool of a call.

use crate::error::{Error, complain};
use crate::memory_events;
use crate::mempools::{Mempools, PoolTarget};
use crate::peak::BytesPeak;
use crate::refusal::{Refusals, make_room};
use crate::registrations::{PoolRegistration, Registrations};
use crate::scopes::Scopes;
use crate::settings::{OutOfMemoryPolicy, TorchSettings, without_groups};
use crate::streams::{Grouping, Joins, KnownStream, RawStream, StreamRegistry};
use crate::trace;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::{Backend, DeviceAddress};
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::errors::{AllocateError, FreeError, RecordUseError};
use symmalloc_core::{Allocation, Emptied, PoolId, SegmentPosition, SharedAllocator, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaBackendBuilder, CudaDevice, CudaError, DriverError, Pool};
use symmalloc_import::OnOutOfMemory;
use symmalloc_import::compression;
use symmalloc_trace::plan::{self, PlanTextError};

/// The allocator of one device.
pub struct DeviceAllocator {
    streams: StreamRegistry,
    scopes: Scopes<DeviceAllocator>,
    allocator: CudaAllocator,
    settings: TorchSettings,
    tracing: Tracing,
    peak: BytesPeak,
    /// Pools that the program created, by id.
    user_pools: Mutex<BTreeMap<PoolId, Pool<CudaBackend>>>,
    mempools: Arc<Mempools<DeviceAllocator>>,
    refusals: Arc<Refusals>,
    pub(crate) unordered: UnorderedPool,
    pub(crate) registrations: Registrations,
    pub(crate) failures: Failures,
}

/// The pool to allocate from on a device.
pub(crate) type Target = PoolTarget<DeviceAllocator>;

/// Threads share these types through raw pointers, which the compiler does not check.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<DeviceAllocator>();
    is_shared::<KnownStream>();
    is_shared::<PoolRegistration>();
};

/// The event that starts an allocator's recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tracing {
    /// The first use, if `SYMMALLOC_TRACE` requests a recording.
    FromFirstUse,
    /// Only a request.
    OnRequest,
}

/// Counts of errors in calls that cannot return them.
#[derive(Default)]
pub(crate) struct Failures {
    pub(crate) unknown_frees: AtomicU64,
    pub(crate) failed_calls: AtomicU64,
    pub(crate) last: Mutex<Option<String>>,
}

/// The properties of a live allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundAllocation {
    pub(crate) pool: PoolId,
    pub(crate) allocation: Allocation,
    pub(crate) position: SegmentPosition,
    pub(crate) requested_bytes: u64,
    /// The stream for which it was allocated.
    pub(crate) stream: StreamId,
}

impl DeviceAllocator {
    pub(crate) fn new(ordinal: usize, settings: TorchSettings, tracing: Tracing) -> Result<Self, Error> {
        let device = CudaDevice::new(ordinal)?;
        let mut backend = CudaBackend::builder(&device).peers(settings.peers.iter().copied());
        if let Some(chunk_bytes) = settings.chunk_bytes {
            backend = backend.chunk_bytes(chunk_bytes);
        }
        if let Some(prefetch_bytes) = settings.prefetch_bytes {
            backend = backend.prefetch_bytes(prefetch_bytes);
        }
        DeviceAllocator::with_backend(backend, settings, tracing)
    }

    pub(crate) fn with_backend(
        backend: CudaBackendBuilder,
        settings: TorchSettings,
        tracing: Tracing,
    ) -> Result<Self, Error> {
        let config = findable(&settings.config)?;
        let ordinal = backend.ordinal();
        let backend = backend.listener(move |change| memory_events::notify(ordinal, change));
        let allocator = CudaAllocator::with_backend(backend.build()?, config)?;
        let grouping = match tracing {
            Tracing::FromFirstUse => Grouping::ByThread,
            Tracing::OnRequest => Grouping::Alone,
        };
        let (mempools, refusals) = (Arc::<Mempools<_>>::default(), Arc::<Refusals>::default());
        if settings.out_of_memory == OutOfMemoryPolicy::Trim {
            Refusals::trim_when_refused(&refusals, &allocator, &mempools);
        }
        Ok(DeviceAllocator {
            streams: StreamRegistry::new(allocator.clone(), grouping),
            scopes: Scopes::new(),
            registrations: Registrations::new(&allocator),
            allocator,
            settings,
            tracing,
            peak: BytesPeak::default(),
            user_pools: Mutex::default(),
            mempools,
            refusals,
            unordered: UnorderedPool::default(),
            failures: Failures::default(),
        })
    }

    pub(crate) fn allocator(&self) -> &CudaAllocator {
        &self.allocator
    }

    pub(crate) fn core(&self) -> &SharedAllocator<CudaBackend> {
        self.allocator.core()
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.allocator.device().ordinal()
    }

    pub(crate) fn settings(&self) -> &TorchSettings {
        &self.settings
    }

    pub(crate) fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    pub(crate) fn mempools(&self) -> &Mempools<DeviceAllocator> {
        &self.mempools
    }

    /// Returns a stream, and registers it at its first use.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    #[inline]
    unsafe fn stream(&self, stream: RawStream) -> Result<&KnownStream, Error> {
        match self.streams.cached(stream) {
            Some(known) => Ok(known),
            // SAFETY: the caller's contract.
            None => unsafe { self.streams.find_or_register(stream, Joins::Default, || self.begin()) },
        }
    }

    /// Returns the number of a stream, and registers it at its first use.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn stream_id(&self, stream: RawStream) -> Result<StreamId, Error> {
        // SAFETY: the caller's contract.
        Ok(unsafe { self.stream(stream) }?.id)
    }

    /// Registers a stream in a new group, or in the group of the stream `with`, which is registered first if necessary.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate), for both streams.
    pub(crate) unsafe fn register_stream(&self, stream: RawStream, with: Option<RawStream>) -> Result<(), Error> {
        let group_of = |id| self.core().group_of(id).expect("the stream is registered");
        let joins = match with {
            // SAFETY: the caller's contract.
            Some(member) if member != stream => Joins::Group(group_of(unsafe { self.stream_id(member) }?)),
            _ => Joins::None,
        };
        // SAFETY: the caller's contract.
        let id = unsafe { self.streams.find_or_register(stream, joins, || self.begin()) }?.id;
        let is_as_wanted = match joins {
            Joins::Group(first) => group_of(id) == first,
            _ => group_of(id) == id && !self.streams.others_may_join(id),
        };
        if is_as_wanted {
            return Ok(());
        }
        let expected = "a stream that has no other group: register it before its first use";
        Err(Error::Argument { argument: "stream", value: stream.handle() as i64, expected })
    }

    /// Starts the recording that the environment requests, if any. Must be called before the first stream is registered.
    fn begin(&self) -> Result<(), Error> {
        match self.tracing {
            Tracing::FromFirstUse => trace::start_from_environment(&self.allocator),
            Tracing::OnRequest => Ok(()),
        }
    }

    /// Returns the open scopes, which select the pool of an allocation without an explicit one.
    #[inline]
    pub(crate) fn scopes(&self) -> &Scopes<DeviceAllocator> {
        &self.scopes
    }

    /// Allocates memory for work on a stream. Snapshots and reports show the name, if there is one. For zero bytes, returns a null pointer
    /// and records no op.
    ///
    /// # Safety
    /// The stream belongs to the device's primary context and lives as long as the allocator.
    #[inline]
    pub(crate) unsafe fn allocate(
        &self,
        pool: PoolId,
        stream: RawStream,
        size_bytes: u64,
        name: Option<&str>,
    ) -> Result<*mut c_void, Error> {
        if size_bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream(stream) }?.id;
        let outcome = match name {
            Some(name) => self.core().allocate_named(pool, stream, size_bytes, name),
            None => self.core().allocate(pool, stream, size_bytes),
        };
        match outcome {
            Ok(allocation) => {
                self.peak.add(allocation.size_bytes);
                Ok(allocation.address.0 as *mut c_void)
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    #[cold]
    fn refused(&self, error: AllocateError) -> Error {
        if matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. }) {
            self.refusals.count();
        }
        if let AllocateError::OutOfMemory(error) = &error
            && let Some(action) = self.settings.on_out_of_memory.as_ref().or(OnOutOfMemory::of_process())
        {
            action.report(self.core(), error, self.ordinal());
        }
        error.into()
    }

    /// Frees an allocation. Ignores a null pointer.
    #[inline]
    pub(crate) fn free(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        self.free_block(pointer).map(drop)
    }

    /// Frees an allocation. Returns the bytes of its block.
    #[inline]
    pub(crate) fn free_block(&self, pointer: *mut c_void) -> Result<u64, Error> {
        match self.core().free_at(DeviceAddress(pointer as u64)) {
            Ok(size_bytes) => {
                self.peak.subtract(size_bytes);
                Ok(size_bytes)
            }
            Err(error) => self.not_freed(pointer, error),
        }
    }

    #[cold]
    #[inline(never)]
    fn not_freed(&self, pointer: *mut c_void, error: FreeError) -> Result<u64, Error> {
        match (error, self.foreign_owner(pointer)) {
            (FreeError::Handle(_), Some(other)) => other.free_block(pointer),
            (FreeError::Handle(_), None) => Err(self.unknown_pointer(pointer as u64)),
            (error, _) => Err(error.into()),
        }
    }

    #[cold]
    pub(crate) fn unknown_pointer(&self, address: u64) -> Error {
        Error::UnknownPointer { address, device: self.ordinal() }
    }

    /// Returns `true` if the pointer is a live allocation.
    pub(crate) fn owns(&self, pointer: *const c_void) -> bool {
        self.core().handle_at(DeviceAddress(pointer as u64)).is_ok()
    }

    /// Records that work on the stream uses the allocation.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn record_use(&self, pointer: *const c_void, stream: RawStream) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        let address = pointer as u64;
        // A rejected call must not register a stream.
        if self.streams.cached(stream).is_none() && !self.owns(pointer) {
            // SAFETY: the caller's contract.
            return unsafe { self.record_foreign_use(pointer, stream) };
        }
        // SAFETY: the caller's contract.
        let id = unsafe { self.stream(stream) }?.id;
        match self.core().record_use_at(DeviceAddress(address), id) {
            Ok(()) => Ok(()),
            // SAFETY: the caller's contract.
            Err(RecordUseError::Handle(_)) => unsafe { self.record_foreign_use(pointer, stream) },
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the streams used so far, ordered by id.
    pub(crate) fn known_streams(&self) -> Vec<(StreamId, RawStream)> {
        self.streams.all()
    }

    /// Returns the raw handle of a stream; null for an unknown id, and for the default stream.
    pub(crate) fn raw_stream(&self, id: StreamId) -> *mut c_void {
        let known = self.known_streams().into_iter().find(|(known, _)| *known == id);
        known.map_or(std::ptr::null_mut(), |(_, raw)| raw.handle())
    }

    /// Adds allocations that a restore made live again to the bytes in use.
    pub(crate) fn count_revived(&self, size_bytes: u64) {
        self.peak.add(size_bytes);
    }

    /// Returns the maximum number of bytes of blocks in use, over all heaps, since the last reset.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak.bytes()
    }

    /// Resets all peaks to the current values.
    pub(crate) fn reset_peaks(&self) {
        self.core().reset_peak_stats();
        self.peak.reset();
    }

    /// Returns the live allocation at a pointer.
    pub(crate) fn find(&self, pointer: *const c_void) -> Result<FoundAllocation, Error> {
        let address = pointer as u64;
        let (core, unknown) = (self.core(), |_| self.unknown_pointer(address));
        let handle = core.handle_at(DeviceAddress(address)).map_err(unknown)?;
        let allocation = core.allocation(handle).map_err(unknown)?;
        let requested_bytes = core.requested_bytes(handle).map_err(unknown)?;
        let position = core.segment_at(DeviceAddress(address)).ok_or_else(|| self.unknown_pointer(address))?;
        let stream = core.stream_of(handle).map_err(unknown)?;
        Ok(FoundAllocation { pool: position.heap.pool, allocation, position, requested_bytes, stream })
    }

    /// Creates a pool. If there is a key, it is the pool's id. Without `text`, the pool has the settings of the default pool, but is
    /// private and has neither groups of streams nor a base.
    pub(crate) fn create_pool(&self, key: Option<PoolId>, text: Option<&str>) -> Result<PoolId, Error> {
        let config = match text {
            None => {
                let default = self.core().config().default_pool();
                let private =
                    default.to_builder().base(None).symmetric(false).streams(without_groups(default.streams()));
                private.build().map_err(CudaError::from)?
            }
            Some(text) => text.parse::<PoolConfig>().map_err(crate::settings::SettingsError::from)?,
        };
        let pool = match key {
            Some(key) => self.allocator.create_pool_with_key(key.0, config)?,
            None => self.allocator.create_pool(config)?,
        };
        let id = pool.id();
        self.user_pools().insert(id, pool);
        Ok(id)
    }

    /// Frees all allocations of a pool. Returns their number.
    pub(crate) fn reset_pool(&self, pool: PoolId) -> Result<u64, Error> {
        let Emptied { allocations, allocated_bytes, .. } = self.core().reset_pool(pool).map_err(CudaError::from)?;
        self.peak.subtract(allocated_bytes);
        Ok(allocations)
    }

    /// Destroys a pool. Further allocations in it fail, and the first trim after its last block was freed releases its memory.
    pub(crate) fn destroy_pool(&self, pool: PoolId) -> Result<(), Error> {
        let owner = self.user_pools().remove(&pool);
        // The pool is dropped after the list is unlocked.
        owner.map(drop).ok_or(Error::UnknownPool { pool: pool.0 })?;
        // A later trim may release the pool's memory. The pool's saved contents are discarded now.
        self.core().backend().forget_pool(pool);
        Ok(())
    }

    /// Returns the id of a pool that is available to the program: the default pool, or one that the program created.
    #[inline]
    pub(crate) fn known_pool(&self, pool: u32) -> Result<PoolId, Error> {
        let id = PoolId(pool);
        if id == PoolId::DEFAULT || self.is_user_pool(id) { Ok(id) } else { Err(Error::UnknownPool { pool }) }
    }

    #[inline(never)]
    fn is_user_pool(&self, pool: PoolId) -> bool {
        self.user_pools().contains_key(&pool)
    }

    /// Returns the ids of the pools that the program created.
    pub(crate) fn user_pool_ids(&self) -> Vec<PoolId> {
        self.user_pools().keys().copied().collect()
    }

    fn user_pools(&self) -> MutexGuard<'_, BTreeMap<PoolId, Pool<CudaBackend>>> {
        self.user_pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves memory for a stream ahead of its allocations.
    ///
    /// # Safety
    /// Same as for [`allocate`](Self::allocate).
    pub(crate) unsafe fn reserve(&self, pool: PoolId, stream: RawStream, size_bytes: u64) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream(stream) }?.id;
        self.core().reserve(pool, stream, size_bytes).map_err(|error| self.refused(error))
    }

    /// Loads the plans of a file for a pool. Returns their number.
    pub(crate) fn adopt_plans(&self, pool: PoolId, path: &str) -> Result<u32, Error> {
        let opened = compression::open(Path::new(path));
        let opened = opened.map_err(|source| Error::OpenPlan { path: path.to_owned(), source })?;
        let failed = |source: PlanTextError| Error::PlanFile { path: path.to_owned(), source: Box::new(source) };
        let file = plan::read(opened).map_err(failed)?;
        let mut count = 0;
        for plan in file.plans_of(pool) {
            self.core().adopt_plan(pool, plan.clone())?;
            count += 1;
        }
        Ok(count)
    }

    /// Releases all free memory, except that of mempools in use. Returns the bytes released.
    pub(crate) fn trim(&self) -> Result<u64, Error> {
        let mempools = self.mempools.give_back(self.core(), None, || self.allocator.is_capturing());
        let others = self.allocator.trim_all()?;
        mempools.failure.map_or(Ok(mempools.released_bytes + others), |failure| Err(failure.into()))
    }

    /// Releases the free memory of pools that are neither symmetric nor a graph's. Returns the bytes released.
    pub(crate) fn trim_private(&self) -> u64 {
        make_room(self.core(), &self.mempools)
    }

    /// Grants another device read and write access to present and future memory.
    pub(crate) fn grant_access(&self, peer: usize) -> Result<(), Error> {
        Ok(self.core().backend().grant_access(peer)?)
    }

    /// Limits all pools together to a fraction of the device's total memory. Unlike the free memory, the total memory is equal on equal
    /// devices, so their limits are equal, too (rule D4).
    pub(crate) fn set_memory_fraction(&self, fraction: f64) -> Result<(), Error> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction });
        }
        let total_bytes = self.allocator.device().memory_info().map_err(CudaError::from)?.total_bytes;
        self.core().set_total_limit_bytes(Some((fraction * total_bytes as f64) as u64));
        Ok(())
    }

    /// Counts and logs an error of a call that cannot return it, and reports the first one on standard error.
    #[cold]
    pub(crate) fn note(&self, error: &Error) {
        if matches!(error, Error::UnknownPointer { .. }) {
            self.failures.unknown_frees.fetch_add(1, Ordering::Relaxed);
        }
        self.failures.failed_calls.fetch_add(1, Ordering::Relaxed);
        *self.failures.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        complain(error);
    }
}

/// The pool for memory without a stream, see `unordered.rs`. Created at its first allocation.
#[derive(Default)]
pub(crate) struct UnorderedPool(Mutex<Option<PoolId>>);

impl UnorderedPool {
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<PoolId, Error>) -> Result<PoolId, Error> {
        let mut pool = self.pool();
        match *pool {
            Some(pool) => Ok(pool),
            None => Ok(*pool.insert(make()?)),
        }
    }

    pub(crate) fn is(&self, pool: PoolId) -> bool {
        *self.pool() == Some(pool)
    }

    fn pool(&self) -> MutexGuard<'_, Option<PoolId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the configuration, with the lookup of allocations by pointer turned on.
fn findable(config: &Config) -> Result<Config, CudaError> {
    match config.pointer_lookup() {
        PointerLookup::Off => Ok(config.to_builder().pointer_lookup(PointerLookup::Exact).build()?),
        _ => Ok(config.clone()),
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Error::Cuda(error.into())
    }
}
