//! Virtual memory of a device: addresses are reserved first, and physical chunks are mapped when the allocator requests them.
//!
//! A chunk's handle is released as soon as the chunk is mapped. The mapping keeps the memory alive, and unmapping releases it. Code that
//! needs the handle (such as NCCL) gets it with `cuMemRetainAllocationHandle`.
//!
//! Chunk sizes: mapping a whole range (fixed and reserved segments) creates one chunk, because NCCL before 2.30.3 requires one physical
//! allocation per window. Growth of an expandable range is split into chunks, because trimming releases whole chunks only. Unless the
//! program configures the chunk size, it is 32 MiB until the range extends to 2 GiB, and then a power of two between 1/64 and 1/32 of the
//! extent. On an H200 a chunk of 2 to 64 MiB costs 34 to 38 us to create and 29 to 45 us to release, so the number of chunks matters more
//! than their size (`docs/device-memory.md`). Neither setting access for many chunks in one call nor unmapping from several threads saves
//! time.
//!
//! Memory that may be stitched (mapped a second time, into another range) is mapped with a separate chunk for each piece. To map a piece
//! into another range, the handle of its chunk is used, and such a mapping always begins at the start of the chunk. Memory returns to the
//! device when its last mapping is removed.
//!
//! Chunks may be prefetched ahead of growth (`prefetch_window.rs` decides which, `prefetch_thread.rs` creates them). Prefetched chunks are
//! already mapped and accessible at their final addresses, beyond the end of the memory that the allocator uses.

use super::addresses::{AddressSource, Descending};
use super::backing::{Backed, Backing};
use super::chunks::{Chunks, Part};
use super::exported::ExportedMemory;
use super::fills::Fills;
use super::handle::{DmaBufRefusal, ExportedHandle, HandleKind, HeldDmaBuf};
use super::interface::BackendMemory;
use super::prefetch_window::{PrefetchRule, PrefetchWindow};
use super::properties::{granularity_of, supported_properties};
use super::spaces::Spaces;
use super::spare::{Prefetched, with_spare};
use crate::device::CudaDevice;
use crate::driver::{ACCESS_READ_WRITE, MemAccess, MemLocation, MemProperties};
use crate::error::{CudaError, DriverError, INVALID_VALUE, OUT_OF_MEMORY};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use symmalloc_core::backend::{BackendError, DeviceAddress, Range, RangeOffset};
use symmalloc_core::base::{Base, BaseError};
use symmalloc_core::ids::PoolId;

/// Default size, in bytes, of the chunks that are mapped when a range grows.
const CHUNK_BYTES: u64 = 32 << 20;

/// Maximum number of chunks for one mapping of a range once chunks exceed [`CHUNK_BYTES`], unless the program configures the chunk size.
/// For example, waking a pool of 8 GiB maps 64 chunks of 128 MiB.
const CHUNKS_MAX: u64 = 64;

pub(crate) struct VirtualMemory {
    device: Arc<CudaDevice>,
    properties: MemProperties,
    /// The devices that may use the memory. Read under the lock of the range that is being mapped, so that
    /// [`grant_access`](BackendMemory::grant_access) misses no range: either the range is mapped with the new entry, or `grant_access`
    /// finds it.
    access: RwLock<SmallVec<[MemAccess; 1]>>,
    granularity_bytes: u64,
    chunk_bytes: u64,
    /// Maximum number of chunks for one mapping of a range. `None` if the program configured the chunk size: all chunks then have
    /// `chunk_bytes`.
    chunks_max: Option<u64>,
    addresses: AddressSource,
    /// `None` if prefetching is disabled.
    rule: Option<PrefetchRule>,
    /// Number of callers that found the device full. Prefetching pauses while it is not 0.
    paused: AtomicUsize,
    /// `true` if the driver ran out of memory and none has been released since. Nothing is prefetched in that case, because other requests
    /// need the memory.
    is_full: AtomicBool,
    /// Ranges by base address. Each has a separate lock, because mapping takes tens of microseconds.
    ranges: Mutex<BTreeMap<u64, Arc<Backing>>>,
    /// The addresses of pools with a base. Locked before `ranges`.
    spaces: Spaces,
    /// Handles that the driver failed to release. Releasing is retried when memory is released.
    unreleased: Mutex<Vec<c_ulonglong>>,
    /// Notified after memory becomes accessible and before it is unmapped.
    fills: Arc<Fills>,
}

// SAFETY: the only pointer is `properties.win32`, which is null and unused here.
unsafe impl Send for VirtualMemory {}
// SAFETY: as above.
unsafe impl Sync for VirtualMemory {}

/// Options that a program can set.
#[derive(Clone, Debug)]
pub(crate) struct VirtualOptions {
    pub(crate) chunk_bytes: Option<u64>,
    /// Maximum number of bytes to prefetch for one range.
    pub(crate) prefetch_bytes: u64,
    /// Size in bytes of the reservation for descending addresses.
    pub(crate) descending_bytes: Option<u64>,
    pub(crate) peers: Vec<usize>,
    /// Folder in which the system lists IMEX channels.
    pub(crate) imex_channels: PathBuf,
}

impl Default for VirtualOptions {
    fn default() -> Self {
        let imex_channels = PathBuf::from("/dev/nvidia-caps-imex-channels");
        VirtualOptions {
            chunk_bytes: None,
            prefetch_bytes: 0,
            descending_bytes: None,
            peers: Vec::new(),
            imex_channels,
        }
    }
}

impl VirtualMemory {
    pub(crate) fn new(device: Arc<CudaDevice>, options: &VirtualOptions, fills: Arc<Fills>) -> Result<Self, CudaError> {
        let location = MemLocation::device(device.raw_device());
        let mut access = SmallVec::from_slice(&[MemAccess { location, flags: ACCESS_READ_WRITE }]);
        for &peer in &options.peers {
            if peer != device.ordinal() {
                access.push(access_of(&device, peer)?);
            }
        }
        let properties = supported_properties(&device, location, &options.imex_channels)?;
        let granularity_bytes = granularity_of(&device, &properties)?;
        let chunk_bytes = options.chunk_bytes.unwrap_or_else(|| CHUNK_BYTES.next_multiple_of(granularity_bytes));
        if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(granularity_bytes) {
            return Err(CudaError::ChunkSize { chunk_bytes, granularity_bytes });
        }
        let prefetch_bytes = options.prefetch_bytes;
        let is_prefetched = prefetch_bytes >= chunk_bytes && prefetch_bytes.is_multiple_of(granularity_bytes);
        if prefetch_bytes > 0 && !is_prefetched {
            return Err(CudaError::PrefetchSize { prefetch_bytes, chunk_bytes, granularity_bytes });
        }
        let addresses = match options.descending_bytes {
            None => AddressSource::Driver(Arc::clone(&device)),
            Some(size_bytes) if size_bytes == 0 || !size_bytes.is_multiple_of(granularity_bytes) => {
                return Err(CudaError::AddressSpace { size_bytes, granularity_bytes });
            }
            Some(size_bytes) => {
                AddressSource::Descending(Descending::new(Arc::clone(&device), size_bytes, granularity_bytes)?)
            }
        };
        Ok(VirtualMemory {
            device,
            properties,
            access: RwLock::new(access),
            granularity_bytes,
            chunk_bytes,
            chunks_max: options.chunk_bytes.is_none().then_some(CHUNKS_MAX),
            addresses,
            rule: is_prefetched.then_some(PrefetchRule { most_bytes: prefetch_bytes, chunk_bytes }),
            paused: AtomicUsize::new(0),
            is_full: AtomicBool::new(false),
            ranges: Mutex::default(),
            spaces: Spaces::default(),
            unreleased: Mutex::default(),
            fills,
        })
    }

    /// Returns the handle types that memory can be exported as.
    pub(crate) fn handle_types(&self) -> c_uint {
        self.properties.handle_types
    }

    pub(crate) fn is_gpu_direct_rdma_capable(&self) -> bool {
        self.properties.gpu_direct_rdma != 0
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Backing>>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn backing(&self, range: Range, call: &'static str) -> Result<Arc<Backing>, DriverError> {
        self.ranges().get(&range.base.0).cloned().ok_or(DriverError { call, code: INVALID_VALUE })
    }

    pub(super) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Returns the range that contains an address.
    pub(super) fn backing_around(&self, address: u64) -> Option<Arc<Backing>> {
        let ranges = self.ranges();
        let (base, backing) = ranges.range(..=address).next_back()?;
        (address - base < backing.range.size_bytes).then(|| Arc::clone(backing))
    }

    /// Maps a part. If `piece_bytes` is given, each chunk has this size.
    fn map_once(&self, range: Range, part: &Part, piece_bytes: Option<u64>) -> Result<(), DriverError> {
        let backing = self.backing(range, "cuMemMap")?;
        let mut backed = backing.lock();
        let Backed { chunks, window, .. } = &mut *backed;
        debug_assert!(!chunks.is_any_mapped(part));
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        if window.is_cut_at(part.end) {
            self.give_back(chunks, range, &window.take());
        }
        while let Some(closed) = chunks.first_closed(part) {
            self.set_access(range, &closed)?;
            chunks.open(&closed);
        }
        // Chunks end where they would without prefetching, and possibly at additional offsets.
        let cut_from = |gap: &Part| if gap.start == window.made().end { window.made().start } else { gap.start };
        let gaps = chunks.gaps(part);
        for (index, gap) in gaps.iter().enumerate() {
            let (step, cut_from) = match piece_bytes {
                Some(piece_bytes) => (piece_bytes, 0),
                None => (self.step(range, chunks, gap), cut_from(gap)),
            };
            if let Err(error) = self.back(chunks, range, gap, step, cut_from) {
                gaps[..index].iter().for_each(|gap| self.give_back(chunks, range, gap));
                return Err(error);
            }
        }
        let is_growth = chunks.mapped_end() < part.end;
        chunks.map(part);
        if let Some(rule) = self.rule.as_ref().filter(|_| is_growth) {
            window.grow(part, chunks.backed_end(part.end), range.size_bytes, rule);
        }
        Ok(())
    }

    /// Returns the size of the chunks in a gap. A whole range is one chunk.
    fn step(&self, range: Range, chunks: &Chunks, gap: &Part) -> u64 {
        let size_bytes = gap.end - gap.start;
        if size_bytes == range.size_bytes {
            return size_bytes;
        }
        let reach_bytes = gap.end.max(chunks.mapped_end());
        let few = |chunks_max| reach_bytes.div_ceil(chunks_max).next_power_of_two();
        self.chunk_bytes.max(self.chunks_max.map_or(0, few))
    }

    /// Backs `gap` with new accessible chunks that end every `step` bytes after `cut_from`. On error no new chunk remains, except for
    /// chunks that the driver did not release, which become idle.
    fn back(&self, chunks: &mut Chunks, range: Range, gap: &Part, step: u64, cut_from: u64) -> Result<(), DriverError> {
        let mut at = gap.start;
        let mut outcome = Ok(());
        while at < gap.end && outcome.is_ok() {
            let chunk = at..gap.end.min(at + step - (at - cut_from) % step);
            outcome = self.create_and_map(range, &chunk).and_then(|()| {
                chunks.add_chunk(&chunk);
                at = chunk.end;
                self.set_access(range, &chunk)?;
                self.fills.mapped(&addresses_of(range, &(gap.start..at)));
                Ok(())
            });
        }
        if outcome.is_err() && at > gap.start {
            chunks.close(&(gap.start..at));
            self.give_back(chunks, range, &(gap.start..at));
        }
        outcome
    }

    fn create_and_map(&self, range: Range, chunk: &Part) -> Result<(), DriverError> {
        let driver = self.device.driver();
        let size = (chunk.end - chunk.start) as usize;
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing, the properties are valid, and the size is a multiple of the granularity.
        unsafe { driver.create(&raw mut handle, size, &raw const self.properties, 0) }?;
        // SAFETY: the addresses are reserved and no chunk covers them; the handle has this size.
        let mapped = unsafe { driver.map(range.base.0 + chunk.start, size, 0, handle, 0) };
        self.release_handle(handle);
        mapped
    }

    /// Maps the chunk at the address `source` a second time.
    fn map_again(&self, range: Range, part: &Part, source: u64) -> Result<(), DriverError> {
        let driver = self.device.driver();
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing; `source` is only looked up.
        unsafe { driver.retain(&raw mut handle, source as *mut c_void) }?;
        let size = (part.end - part.start) as usize;
        // SAFETY: the addresses are reserved and no chunk covers them; the call fails for a handle of another size.
        let mapped = unsafe { driver.map(range.base.0 + part.start, size, 0, handle, 0) };
        self.release_handle(handle);
        mapped
    }

    /// Releases a handle. The mapping, if there is one, keeps the memory alive.
    pub(super) fn release_handle(&self, handle: c_ulonglong) {
        // SAFETY: this value owns the handle, and does not use it again once this succeeds.
        if let Err(error) = unsafe { self.device.driver().release(handle) } {
            tracing::warn!(name: "memory.handle_kept", target: "symmalloc", %error);
            self.unreleased.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
        }
    }

    fn release_handles_again(&self) {
        let handles = std::mem::take(&mut *self.unreleased.lock().unwrap_or_else(PoisonError::into_inner));
        handles.into_iter().for_each(|handle| self.release_handle(handle));
    }

    fn set_access(&self, range: Range, part: &Part) -> Result<(), DriverError> {
        let size = (part.end - part.start) as usize;
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the part is mapped, and the descriptors are valid for reading.
        unsafe { self.device.driver().set_access(range.base.0 + part.start, size, access.as_ptr(), access.len()) }
    }

    fn unmap_run(&self, range: Range, run: &Part) -> Result<(), DriverError> {
        self.fills.unmapping(&addresses_of(range, run));
        // SAFETY: chunks tile the run exactly, the allocator uses none of them, and by the contract of `Backend` no stream uses it anymore.
        unsafe { self.device.driver().unmap(range.base.0 + run.start, (run.end - run.start) as usize) }
    }

    /// Releases unused chunks. Chunks that the driver fails to release become idle, and later maps use them first.
    fn give_back(&self, chunks: &mut Chunks, range: Range, run: &Part) {
        if run.is_empty() {
            return;
        }
        match self.unmap_run(range, run) {
            Ok(()) => chunks.remove_chunks(run),
            Err(error) => {
                let size_bytes = run.end - run.start;
                tracing::warn!(name: "memory.chunks_kept", target: "symmalloc", size_bytes, %error);
            }
        }
    }
}

/// Prefetching.
impl VirtualMemory {
    /// Returns the range if prefetching for it is requested and not paused.
    pub(crate) fn wants_prefetch(&self, range: Range) -> Option<Arc<Backing>> {
        let backing = self.ranges().get(&range.base.0).cloned()?;
        let wants = backing.look().window.next().is_some();
        (wants && self.may_prefetch()).then_some(backing)
    }

    fn may_prefetch(&self) -> bool {
        self.paused.load(Ordering::Relaxed) == 0 && !self.is_full.load(Ordering::Relaxed)
    }

    /// Creates the next prefetched chunk of the range. Returns `true` if the thread may create another one. Returns `false` after an error,
    /// and while a caller waits for the range, because that caller then requests more prefetching itself.
    pub(crate) fn prefetch_chunk(&self, backing: &Backing) -> bool {
        let Some(mut backed) = backing.lock_behind_callers() else { return false };
        // Checked under the lock, which a caller that pauses prefetching takes afterwards to release all prefetched memory.
        if !self.may_prefetch() {
            return false;
        }
        let Backed { chunks, window, .. } = &mut *backed;
        let Some(chunk) = window.next() else { return false };
        let made = self.device.enter().and_then(|_current| {
            let _relaxed = self.device.driver().relax_capture();
            // If the addresses are not free, the driver kept memory there, and growth uses that memory first.
            let is_free = chunks.gaps(&chunk) == [chunk.clone()];
            if is_free {
                let step = self.step(backing.range, chunks, &chunk);
                self.back(chunks, backing.range, &chunk, step, chunk.start).map(|()| true)
            } else {
                Ok(false)
            }
        });
        match made {
            Ok(true) => {
                window.add(&chunk);
                return true;
            }
            Ok(false) => {}
            Err(error) => {
                let size_bytes = chunk.end - chunk.start;
                tracing::debug!(name: "memory.prefetch_failed", target: "symmalloc", size_bytes, %error);
                self.is_full.fetch_or(error.code == OUT_OF_MEMORY, Ordering::Relaxed);
            }
        }
        window.want_nothing();
        false
    }

    pub(crate) fn is_prefetched(&self) -> bool {
        self.rule.is_some()
    }

    fn all_ranges(&self) -> Vec<Arc<Backing>> {
        self.ranges().values().cloned().collect()
    }

    /// Returns the sum of `of` over all ranges.
    fn sum(&self, of: impl Fn(&Chunks, &PrefetchWindow) -> u64) -> u64 {
        let of = |backing: &Arc<Backing>| {
            let backed = backing.look();
            of(&backed.chunks, &backed.window)
        };
        self.all_ranges().iter().map(of).sum()
    }
}

impl Prefetched for VirtualMemory {
    fn is_on(&self, device: &CudaDevice) -> bool {
        self.device.raw_device() == device.raw_device()
    }

    fn pause(&self) {
        self.paused.fetch_add(1, Ordering::Relaxed);
        self.is_full.store(true, Ordering::Relaxed);
    }

    fn resume(&self) {
        self.paused.fetch_sub(1, Ordering::Relaxed);
    }

    fn release_prefetched(&self) -> u64 {
        let Ok(_current) = self.device.enter() else { return 0 };
        let _relaxed = self.device.driver().relax_capture();
        let mut released_bytes = 0;
        for backing in self.all_ranges() {
            let mut backed = backing.lock();
            let Backed { chunks, window, .. } = &mut *backed;
            let backed_bytes = chunks.backed_bytes();
            self.give_back(chunks, backing.range, &window.take());
            released_bytes += backed_bytes - chunks.backed_bytes();
        }
        self.release_handles_again();
        released_bytes
    }
}

impl BackendMemory for VirtualMemory {
    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let base = self.addresses.reserve(size_bytes, self.granularity_bytes)?;
        let range = Range { base: DeviceAddress(base), size_bytes };
        self.ranges().insert(base, Arc::new(Backing::new(range, false)));
        Ok(range)
    }

    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        let driver = |error: DriverError| BaseError::Driver { base, call: error.call, code: error.code };
        let _current = self.device.enter().map_err(driver)?;
        let _relaxed = self.device.driver().relax_capture();
        self.spaces.reserve(&self.device, base, pool, self.granularity_bytes)
    }

    fn carve(&self, part: Range) -> Result<(), BackendError> {
        Ok(self.spaces.carve(&self.ranges, part, self.granularity_bytes)?)
    }

    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        Ok(self.spaces.release(&self.ranges, &self.device, space)?)
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let part = offset_bytes..offset_bytes + size_bytes;
        Ok(with_spare(&self.device, || self.map_once(range, &part, None))?)
    }

    fn map_pieces(&self, at: RangeOffset, size_bytes: u64, piece_bytes: u64) -> Result<(), BackendError> {
        let part = at.1..at.1 + size_bytes;
        Ok(with_spare(&self.device, || self.map_once(at.0, &part, Some(piece_bytes)))?)
    }

    /// Returns `true` if prefetching is disabled: the sizes of prefetched chunks do not match pieces.
    fn can_alias(&self) -> bool {
        self.rule.is_none()
    }

    fn alias(&self, at: RangeOffset, source: RangeOffset, piece_bytes: u64) -> Result<(), BackendError> {
        let (range, part) = (at.0, at.1..at.1 + piece_bytes);
        let backing = self.backing(range, "cuMemMap")?;
        let mut backed = backing.lock();
        let chunks = &mut backed.chunks;
        debug_assert!(!chunks.is_any_mapped(&part));
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        self.map_again(range, &part, source.0.base.0 + source.1)?;
        chunks.add_chunk(&part);
        if let Err(error) = self.set_access(range, &part) {
            chunks.close(&part);
            self.give_back(chunks, range, &part);
            return Err(error.into());
        }
        chunks.map(&part);
        Ok(())
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let backing = self.backing(range, "cuMemUnmap")?;
        let mut backed = backing.lock();
        let part = offset_bytes..offset_bytes + size_bytes;
        debug_assert!(backed.chunks.is_mapped(&part));
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        self.release_handles_again();
        backed.note_unmapped(&part);
        let Backed { chunks, window, .. } = &mut *backed;
        self.give_back(chunks, range, &window.take());
        chunks.unmap(&part);
        let mut runs = chunks.unused_runs(&part).into_iter();
        if let Some(run) = runs.next() {
            if let Err(error) = self.unmap_run(range, &run) {
                chunks.map(&part);
                return Err(error.into());
            }
            chunks.remove_chunks(&run);
        }
        // The first run is already unmapped, so no error is returned: memory that the driver keeps is idle, and a warning is logged.
        runs.for_each(|run| self.give_back(chunks, range, &run));
        self.is_full.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        let backing = self.backing(range, "cuMemAddressFree")?;
        let mut backed = backing.lock();
        backed.note_unmapped(&(0..range.size_bytes));
        let Backed { chunks, window, .. } = &mut *backed;
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        // Prefetched memory is released with all other unused memory, and prefetching for the range ends.
        window.take();
        for run in chunks.unused_runs(&(0..range.size_bytes)) {
            self.unmap_run(range, &run)?;
            chunks.remove_chunks(&run);
        }
        // Remove the range first: once the driver has the addresses back, it may return them to another thread's `reserve`.
        let removed = self.ranges().remove(&range.base.0);
        let freed = if backing.is_carved { Ok(()) } else { self.addresses.free(range.base.0, range.size_bytes) };
        if let (Err(_), Some(removed)) = (freed, removed) {
            self.ranges().insert(range.base.0, removed);
        }
        Ok(freed?)
    }

    fn grant_access(&self, peer: usize) -> Result<(), CudaError> {
        if peer == self.device.ordinal() {
            return Ok(());
        }
        let granted = access_of(&self.device, peer)?;
        {
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            if access.iter().any(|entry| entry.location == granted.location) {
                return Ok(());
            }
            access.push(granted);
        }
        let ranges = self.all_ranges();
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let set = ranges.iter().try_for_each(|backing| {
            let backed = backing.look();
            backed.chunks.runs().iter().try_for_each(|run| self.set_access(backing.range, run))
        });
        if set.is_err() {
            // On error, access that was already set for some ranges stays set, which is harmless.
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            access.retain(|entry| entry.location != granted.location);
        }
        Ok(set?)
    }

    fn chunks_behind(&self, parts: &[Part], memory: Option<&Arc<ExportedMemory>>) -> Option<Vec<Part>> {
        self.find_chunks(parts, memory)
    }

    fn export_chunk(&self, chunk: &Part, kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        self.export_one(chunk, kind)
    }

    fn hold_dma_buf(&self, part: &Part, memory: &Arc<ExportedMemory>) -> Result<HeldDmaBuf, DmaBufRefusal> {
        self.make_dma_buf(part, memory)
    }

    fn release_held(&self, handles: &[c_ulonglong]) {
        self.release_all(handles);
    }

    fn idle_bytes(&self) -> u64 {
        self.sum(|chunks, window| chunks.idle_bytes() - window.bytes())
    }

    fn spare_bytes(&self) -> u64 {
        self.sum(|_, window| window.bytes())
    }

    fn release_spare(&self) -> u64 {
        self.release_prefetched()
    }
}

fn addresses_of(range: Range, part: &Part) -> Part {
    range.base.0 + part.start..range.base.0 + part.end
}

/// Returns an access entry for another device's kernels and copies.
fn access_of(device: &CudaDevice, peer: usize) -> Result<MemAccess, CudaError> {
    let ordinal = device.ordinal();
    let reached = device.can_be_accessed_by(peer)?.ok_or(CudaError::NoPeerAccess { ordinal, peer })?;
    Ok(MemAccess { location: MemLocation::device(reached), flags: ACCESS_READ_WRITE })
}
