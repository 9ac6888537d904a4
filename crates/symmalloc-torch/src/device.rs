//! One device's allocator: raw streams and raw pointers in place of ids and handles.
//!
//! ```text
//!   raw stream ──► StreamRegistry ──► stream id ─┐
//!                                                ├─► symmalloc_core ──► raw pointer
//!   scopes, pools ───────────────────► pool id ──┘
//!   raw pointer ──► symmalloc_core ──► free, record_use
//! ```
//!
//! Everything that decides is the core's, and it finds allocations by pointer. What stands here are names: which stream, and
//! which pool is meant.

use crate::complaints;
use crate::error::Error;
use crate::memory_events;
use crate::peak::BytesPeak;
use crate::private_pools::{PoolPlace, PrivatePools};
use crate::refusal::Refusals;
use crate::registrations::{PoolRegistration, Registrations};
use crate::scopes::Scopes;
use crate::settings::{OutOfMemoryPolicy, TorchSettings};
use crate::streams::{KnownStream, RawStream, StreamRegistry};
use crate::trace;
use crate::unordered_pool::UnorderedPool;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::errors::{AllocateError, FreeError, RecordUseError};
use symmalloc_core::{Allocation, PoolId, SegmentPosition, SharedAllocator, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaBackendBuilder, CudaDevice, CudaError, DriverError, Pool};
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
    /// Pools that the program made, by id.
    user_pools: Mutex<BTreeMap<PoolId, Pool<CudaBackend>>>,
    private_pools: Arc<PrivatePools<DeviceAllocator>>,
    refusals: Arc<Refusals>,
    pub(crate) unordered: UnorderedPool,
    pub(crate) registrations: Registrations,
    pub(crate) failures: Failures,
}

/// Where an allocation of a device goes.
pub(crate) type Place = PoolPlace<DeviceAllocator>;

/// Found by every thread through a pointer, which the compiler does not look behind.
const _: () = {
    const fn is_shared<T: Send + Sync>() {}
    is_shared::<DeviceAllocator>();
    is_shared::<KnownStream>();
    is_shared::<PoolRegistration>();
};

/// When an allocator is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tracing {
    /// As `SYMMALLOC_TRACE` says, from its first use on.
    FromFirstUse,
    /// When the program asks for it.
    OnRequest,
}

/// Errors of calls that can return none.
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
        let backend = backend.listener(move |change| memory_events::tell(ordinal, change));
        let allocator = CudaAllocator::with_backend(backend.build()?, config)?;
        let (private_pools, refusals) = (Arc::<PrivatePools<_>>::default(), Arc::<Refusals>::default());
        if settings.out_of_memory == OutOfMemoryPolicy::Trim {
            Refusals::trim_when_refused(&refusals, &allocator, &private_pools);
        }
        Ok(DeviceAllocator {
            streams: StreamRegistry::new(allocator.clone()),
            scopes: Scopes::new(),
            registrations: Registrations::new(&allocator),
            allocator,
            settings,
            tracing,
            peak: BytesPeak::default(),
            user_pools: Mutex::default(),
            private_pools,
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

    pub(crate) fn private_pools(&self) -> &PrivatePools<DeviceAllocator> {
        &self.private_pools
    }

    /// A stream, which is registered if this is its first use.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    #[inline]
    unsafe fn stream(&self, stream: RawStream) -> Result<&KnownStream, Error> {
        match self.streams.cached(stream) {
            Some(known) => Ok(known),
            // SAFETY: the caller's contract.
            None => unsafe { self.streams.find_or_register(stream, || self.begin()) },
        }
    }

    /// The number of a stream, which is registered if this is its first use.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn stream_id(&self, stream: RawStream) -> Result<StreamId, Error> {
        // SAFETY: the caller's contract.
        Ok(unsafe { self.stream(stream) }?.id)
    }

    /// Before the first stream is used.
    fn begin(&self) -> Result<(), Error> {
        match self.tracing {
            Tracing::FromFirstUse => trace::start_from_environment(&self.allocator),
            Tracing::OnRequest => Ok(()),
        }
    }

    /// What the open scopes say of an allocation that names no pool.
    #[inline]
    pub(crate) fn scopes(&self) -> &Scopes<DeviceAllocator> {
        &self.scopes
    }

    /// Allocates. Zero bytes are a null pointer and no op.
    ///
    /// # Safety
    /// The stream belongs to the device's primary context and lives as long as the allocator.
    #[inline]
    pub(crate) unsafe fn allocate(
        &self,
        pool: PoolId,
        size_bytes: u64,
        stream: RawStream,
    ) -> Result<*mut c_void, Error> {
        if size_bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream(stream) }?.id;
        self.made(self.core().allocate(pool, stream, size_bytes))
    }

    /// Counts what was allocated, and gives its pointer.
    #[inline]
    fn made(&self, outcome: Result<Allocation, AllocateError>) -> Result<*mut c_void, Error> {
        match outcome {
            Ok(allocation) => {
                self.peak.add(allocation.size_bytes);
                Ok(allocation.address.0 as *mut c_void)
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    /// As [`allocate`](Self::allocate), with a name for snapshots and reports.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn allocate_named(
        &self,
        pool: PoolId,
        size_bytes: u64,
        stream: RawStream,
        name: &str,
    ) -> Result<*mut c_void, Error> {
        if size_bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream(stream) }?.id;
        self.made(self.core().allocate_named(pool, stream, size_bytes, name))
    }

    #[cold]
    fn refused(&self, error: AllocateError) -> Error {
        if matches!(error, AllocateError::OutOfMemory(_) | AllocateError::TooLarge { .. }) {
            self.refusals.count();
        }
        error.into()
    }

    /// Frees. A null pointer is no op.
    #[inline]
    pub(crate) fn free(&self, pointer: *mut c_void) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        self.free_block(pointer).map(drop)
    }

    /// Frees. Returns the bytes of the block.
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

    /// Whether the pointer is a live allocation.
    pub(crate) fn owns(&self, pointer: *const c_void) -> bool {
        self.core().handle_at(DeviceAddress(pointer as u64)).is_ok()
    }

    /// Tells that work on the stream, too, uses the allocation.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn record_use(&self, pointer: *const c_void, stream: RawStream) -> Result<(), Error> {
        if pointer.is_null() {
            return Ok(());
        }
        let address = pointer as u64;
        // A call that is refused registers no stream.
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

    /// The streams that were used, by id.
    pub(crate) fn known_streams(&self) -> Vec<(StreamId, RawStream)> {
        self.streams.all()
    }

    /// The raw handle of a stream that was used.
    pub(crate) fn raw_stream(&self, id: StreamId) -> *mut c_void {
        let known = self.known_streams().into_iter().find(|(known, _)| *known == id);
        known.map_or(std::ptr::null_mut(), |(_, raw)| raw.handle())
    }

    /// Counts allocations that came back to life.
    pub(crate) fn count_revived(&self, size_bytes: u64) {
        self.peak.add(size_bytes);
    }

    /// The most bytes of blocks in use over all heaps since the peaks were reset.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak.bytes()
    }

    /// Resets all peaks to the current values.
    pub(crate) fn reset_peaks(&self) {
        self.core().reset_peak_stats();
        self.peak.reset();
    }

    /// The live allocation at a pointer.
    pub(crate) fn find(&self, pointer: *const c_void) -> Result<FoundAllocation, Error> {
        let address = pointer as u64;
        let (core, unknown) = (self.core(), |_| self.unknown_pointer(address));
        let handle = core.handle_at(DeviceAddress(address)).map_err(unknown)?;
        let allocation = core.allocation(handle).map_err(unknown)?;
        let requested_bytes = core.requested_bytes(handle).map_err(unknown)?;
        let position = core.segment_at(DeviceAddress(address)).ok_or_else(|| self.unknown_pointer(address))?;
        Ok(FoundAllocation { pool: position.pool, allocation, position, requested_bytes })
    }

    /// Makes a pool. Without a text it is as the default pool, but private.
    pub(crate) fn create_pool(&self, text: Option<&str>) -> Result<PoolId, Error> {
        let config = match text {
            None => {
                let default = self.core().config().default_pool().to_builder();
                default.symmetric(false).build().map_err(CudaError::from)?
            }
            Some(text) => text.parse::<PoolConfig>().map_err(crate::settings::SettingsError::from)?,
        };
        let pool = self.allocator.create_pool(config)?;
        let id = pool.id();
        self.user_pools().insert(id, pool);
        Ok(id)
    }

    /// Gives a pool up: nothing can be allocated in it any more, and its memory goes back at the first trim after its last
    /// block was freed.
    pub(crate) fn destroy_pool(&self, pool: PoolId) -> Result<(), Error> {
        let owner = self.user_pools().remove(&pool);
        // Dropped when the list is unlocked.
        owner.map(drop).ok_or(Error::UnknownPool { pool: pool.0 })
    }

    /// A pool that a program may name.
    #[inline]
    pub(crate) fn known_pool(&self, pool: u32) -> Result<PoolId, Error> {
        let id = PoolId(pool);
        if id == PoolId::DEFAULT || self.is_user_pool(id) { Ok(id) } else { Err(Error::UnknownPool { pool }) }
    }

    #[inline(never)]
    fn is_user_pool(&self, pool: PoolId) -> bool {
        self.user_pools().contains_key(&pool)
    }

    /// The ids of the pools that the program made.
    pub(crate) fn user_pool_ids(&self) -> Vec<PoolId> {
        self.user_pools().keys().copied().collect()
    }

    fn user_pools(&self) -> MutexGuard<'_, BTreeMap<PoolId, Pool<CudaBackend>>> {
        self.user_pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Obtains memory for a stream ahead of its allocations.
    ///
    /// # Safety
    /// As [`allocate`](Self::allocate).
    pub(crate) unsafe fn reserve(&self, pool: PoolId, stream: RawStream, size_bytes: u64) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        let stream = unsafe { self.stream(stream) }?.id;
        self.core().reserve(pool, stream, size_bytes).map_err(|error| self.refused(error))
    }

    /// Adopts the plans of a file for a pool. Returns how many there are.
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

    /// Gives all free memory back but that of private pools in use. Returns the bytes that went back.
    pub(crate) fn trim(&self) -> Result<u64, Error> {
        let private = self.private_pools.give_back(self.core(), None, || self.allocator.is_capturing());
        let others = self.allocator.trim()?;
        private.failure.map_or(Ok(private.released_bytes + others), |failure| Err(failure.into()))
    }

    /// Lets another device read and write the memory: what there is, and what will be.
    pub(crate) fn grant_access(&self, peer: usize) -> Result<(), Error> {
        Ok(self.core().backend().grant_access(peer)?)
    }

    /// Limits all pools together to a share of the device's memory. The share is of what the device has, not of what is
    /// free (rule D4): equal devices get equal limits.
    pub(crate) fn set_memory_fraction(&self, fraction: f64) -> Result<(), Error> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::Fraction { fraction });
        }
        let total_bytes = self.allocator.device().memory_info().map_err(CudaError::from)?.total_bytes;
        self.core().set_limit_bytes(Some((fraction * total_bytes as f64) as u64));
        Ok(())
    }

    /// Notes an error of a call that can return none. The first one is also written to the error output.
    #[cold]
    pub(crate) fn note(&self, error: &Error) {
        if matches!(error, Error::UnknownPointer { .. }) {
            self.failures.unknown_frees.fetch_add(1, Ordering::Relaxed);
        }
        self.failures.failed_calls.fetch_add(1, Ordering::Relaxed);
        *self.failures.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        complaints::complain(error);
    }
}

/// The configuration, with allocations that can be found by pointer.
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
