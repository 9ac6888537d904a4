//! Virtual memory of a device: addresses first, physical chunks behind them as the allocator asks.
//!
//! A chunk's handle is released as soon as it is mapped; the mapping keeps the memory, and unmapping it gives it back. Who
//! needs the handle (NCCL does) gets it with `cuMemRetainAllocationHandle`.
//!
//! How large chunks are: a map of a whole range (fixed and reserved segments) is one chunk, because NCCL before 2.30.3 takes
//! one physical allocation per window. Growth of an expandable range is cut into chunks of at most `chunk_bytes`, since trimming
//! gives back whole chunks only. On an H200 a chunk of 2 to 64 MiB costs 34 to 38 us to make and 29 to 45 us to give
//! back: their number counts, not their size, and setting access for many in one call saves nothing (`docs/gpu.md`).

use super::Memory;
use super::addresses::{Addresses, Descending};
use crate::chunks::{Chunks, Part};
use crate::device::CudaDevice;
use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD, MemAccess, MemLocation, MemProperties};
use crate::error::{CudaError, DriverError, INVALID_VALUE, OUT_OF_MEMORY};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_ulonglong};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use symmalloc_core::backend::{BackendError, DeviceAddress, Range};

/// What growth is cut into unless the program says otherwise: what PyTorch maps at once for its large blocks.
const CHUNK_BYTES: u64 = 20 << 20;

pub(crate) struct Virtual {
    device: Arc<CudaDevice>,
    properties: MemProperties,
    /// Who may use the memory. Read under the lock of the range that is mapped, so that a range is either mapped with a new
    /// entry or there to be found when [`grant_access`](Memory::grant_access) goes through them.
    access: RwLock<SmallVec<[MemAccess; 1]>>,
    granularity_bytes: u64,
    chunk_bytes: u64,
    addresses: Addresses,
    /// By base address. Each has a lock of its own: mapping takes tens of microseconds.
    ranges: Mutex<BTreeMap<u64, Arc<Mutex<Chunks>>>>,
    /// Handles that the driver did not take back when it should have: tried again when memory goes back.
    unreleased: Mutex<Vec<c_ulonglong>>,
}

// SAFETY: the only pointer is `properties.win32`, which is null and unused here.
unsafe impl Send for Virtual {}
// SAFETY: as above.
unsafe impl Sync for Virtual {}

/// What a program may choose.
#[derive(Clone, Debug)]
pub(crate) struct VirtualOptions {
    pub(crate) chunk_bytes: Option<u64>,
    /// Size of the reservation whose addresses are handed out from its end.
    pub(crate) descending_bytes: Option<u64>,
    pub(crate) peers: Vec<usize>,
    /// Where the system shows its IMEX channels.
    pub(crate) imex_channels: PathBuf,
}

impl Default for VirtualOptions {
    fn default() -> Self {
        let imex_channels = PathBuf::from("/dev/nvidia-caps-imex-channels");
        VirtualOptions { chunk_bytes: None, descending_bytes: None, peers: Vec::new(), imex_channels }
    }
}

impl Virtual {
    pub(crate) fn new(device: Arc<CudaDevice>, options: &VirtualOptions) -> Result<Self, CudaError> {
        let location = MemLocation::device(device.raw_device());
        let mut access = SmallVec::from_slice(&[MemAccess { location, flags: 3 }]);
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
        let addresses = match options.descending_bytes {
            None => Addresses::Driver(Arc::clone(&device)),
            Some(size_bytes) if size_bytes == 0 || !size_bytes.is_multiple_of(granularity_bytes) => {
                return Err(CudaError::AddressSpace { size_bytes, granularity_bytes });
            }
            Some(size_bytes) => {
                Addresses::Descending(Descending::new(Arc::clone(&device), size_bytes, granularity_bytes)?)
            }
        };
        Ok(Virtual {
            device,
            properties,
            access: RwLock::new(access),
            granularity_bytes,
            chunk_bytes,
            addresses,
            ranges: Mutex::default(),
            unreleased: Mutex::default(),
        })
    }

    /// The kinds of handles that memory can be exported as.
    pub(crate) fn handle_types(&self) -> c_uint {
        self.properties.handle_types
    }

    pub(crate) fn is_gpu_direct_rdma_capable(&self) -> bool {
        self.properties.gpu_direct_rdma != 0
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Mutex<Chunks>>>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn chunks(&self, range: Range, call: &'static str) -> Result<Arc<Mutex<Chunks>>, DriverError> {
        self.ranges().get(&range.base.0).cloned().ok_or(DriverError { call, code: INVALID_VALUE })
    }

    /// Backs `gap` with new chunks, which are accessible; on an error none is left, but for what the driver did not take
    /// back, which stays as idle chunks.
    fn back(&self, chunks: &mut Chunks, range: Range, gap: &Part) -> Result<(), DriverError> {
        let step = if *gap == (0..range.size_bytes) { range.size_bytes } else { self.chunk_bytes };
        let mut at = gap.start;
        let mut outcome = Ok(());
        while at < gap.end && outcome.is_ok() {
            let chunk = at..gap.end.min(at + step);
            outcome = self.create_and_map(range, &chunk);
            if outcome.is_ok() {
                chunks.add_chunk(&chunk);
                at = chunk.end;
            }
        }
        let outcome = outcome.and_then(|()| self.set_access(range, gap));
        if outcome.is_err() && at > gap.start {
            self.give_back(chunks, range, &(gap.start..at));
        }
        outcome
    }

    fn create_and_map(&self, range: Range, chunk: &Part) -> Result<(), DriverError> {
        let driver = self.device.driver;
        let size = (chunk.end - chunk.start) as usize;
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing, the properties are valid, and the size is a multiple of the granularity.
        unsafe { driver.create(&raw mut handle, size, &raw const self.properties, 0) }?;
        // SAFETY: the addresses are reserved and no chunk covers them; the handle has this size.
        let mapped = unsafe { driver.map(range.base.0 + chunk.start, size, 0, handle, 0) };
        self.release_handle(handle);
        mapped
    }

    /// Gives a handle up; the mapping, if there is one, keeps the memory.
    fn release_handle(&self, handle: c_ulonglong) {
        // SAFETY: the handle is ours, and not used again once this succeeds.
        if let Err(error) = unsafe { self.device.driver.release(handle) } {
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
        unsafe { self.device.driver.set_access(range.base.0 + part.start, size, access.as_ptr(), access.len()) }
    }

    fn unmap_run(&self, range: Range, run: &Part) -> Result<(), DriverError> {
        // SAFETY: chunks tile the run exactly, none of them is used by the allocator, and by the contract of `Backend` no
        // stream uses it any more.
        unsafe { self.device.driver.unmap(range.base.0 + run.start, (run.end - run.start) as usize) }
    }

    /// Gives unused chunks back; what the driver refuses stays as idle chunks, which later maps use first.
    fn give_back(&self, chunks: &mut Chunks, range: Range, run: &Part) {
        match self.unmap_run(range, run) {
            Ok(()) => chunks.remove_chunks(run),
            Err(error) => tracing::warn!(
                name: "memory.chunks_kept",
                target: "symmalloc",
                size_bytes = run.end - run.start,
                %error,
            ),
        }
    }
}

impl Memory for Virtual {
    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        let base = self.addresses.reserve(size_bytes, self.granularity_bytes)?;
        self.ranges().insert(base, Arc::default());
        Ok(Range { base: DeviceAddress(base), size_bytes })
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let chunks = self.chunks(range, "cuMemMap")?;
        let mut chunks = lock(&chunks);
        let part = offset_bytes..offset_bytes + size_bytes;
        debug_assert!(!chunks.is_any_mapped(&part));
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        let gaps = chunks.gaps(&part);
        for (index, gap) in gaps.iter().enumerate() {
            if let Err(error) = self.back(&mut chunks, range, gap) {
                gaps[..index].iter().for_each(|gap| self.give_back(&mut chunks, range, gap));
                return Err(error.into());
            }
        }
        chunks.map(&part);
        Ok(())
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        let chunks = self.chunks(range, "cuMemUnmap")?;
        let mut chunks = lock(&chunks);
        let part = offset_bytes..offset_bytes + size_bytes;
        debug_assert!(chunks.is_mapped(&part));
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        self.release_handles_again();
        chunks.unmap(&part);
        let mut runs = chunks.unused_runs(&part).into_iter();
        if let Some(run) = runs.next() {
            if let Err(error) = self.unmap_run(range, &run) {
                chunks.map(&part);
                return Err(error.into());
            }
            chunks.remove_chunks(&run);
        }
        // Too late to change nothing: what the driver keeps from here on is idle, and said in the log.
        runs.for_each(|run| self.give_back(&mut chunks, range, &run));
        Ok(())
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        let chunks = self.chunks(range, "cuMemAddressFree")?;
        let mut chunks = lock(&chunks);
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        for run in chunks.unused_runs(&(0..range.size_bytes)) {
            self.unmap_run(range, &run)?;
            chunks.remove_chunks(&run);
        }
        // Before the driver has it back: from then on it may give the address to another thread's `reserve`.
        let removed = self.ranges().remove(&range.base.0);
        let freed = self.addresses.free(range.base.0, range.size_bytes);
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
        let ranges: Vec<_> = self.ranges().iter().map(|(base, chunks)| (*base, Arc::clone(chunks))).collect();
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver.relax_capture();
        let set = ranges.iter().try_for_each(|(base, chunks)| {
            let chunks = lock(chunks);
            let range = Range { base: DeviceAddress(*base), size_bytes: 0 };
            chunks.runs().iter().try_for_each(|run| self.set_access(range, run))
        });
        if set.is_err() {
            // What was set stays set, and does no harm.
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            access.retain(|entry| entry.location != granted.location);
        }
        Ok(set?)
    }

    fn idle_bytes(&self) -> u64 {
        let ranges: Vec<_> = self.ranges().values().cloned().collect();
        ranges.iter().map(|chunks| lock(chunks).idle_bytes()).sum()
    }
}

/// Access for another device's kernels and copies.
fn access_of(device: &CudaDevice, peer: usize) -> Result<MemAccess, CudaError> {
    let ordinal = device.ordinal();
    let reached = device.can_be_accessed_by(peer)?.ok_or(CudaError::NoPeerAccess { ordinal, peer })?;
    Ok(MemAccess { location: MemLocation::device(reached), flags: 3 })
}

fn lock(chunks: &Mutex<Chunks>) -> MutexGuard<'_, Chunks> {
    chunks.lock().unwrap_or_else(PoisonError::into_inner)
}

fn granularity_of(device: &CudaDevice, properties: &MemProperties) -> Result<u64, DriverError> {
    let _current = device.enter()?;
    let mut bytes = 0_usize;
    // SAFETY: `bytes` is valid for writing, the properties for reading. 1: the recommended granularity.
    unsafe { device.driver.granularity(&raw mut bytes, &raw const *properties, 1) }?;
    Ok(bytes as u64)
}

/// The most capable memory that the device really gives. A device may say that it supports a kind of handle which the
/// system then refuses, so each kind is tried with one granule. Fabric handles are tried only where the process can see an
/// IMEX channel: the driver makes none without, and compute-sanitizer reports every call that it refuses.
fn supported_properties(
    device: &CudaDevice,
    location: MemLocation,
    imex_channels: &Path,
) -> Result<MemProperties, CudaError> {
    let features = device.features();
    let posix_fd = if features.posix_fd { HANDLE_POSIX_FD } else { 0 };
    let fabric = if features.fabric && is_inhabited(imex_channels) { HANDLE_FABRIC } else { 0 };
    let rdma = u8::from(features.gpu_direct_rdma);
    let properties = |handle_types, gpu_direct_rdma| MemProperties {
        kind: 1,
        handle_types,
        location,
        win32: std::ptr::null_mut(),
        compression: 0,
        gpu_direct_rdma,
        usage: 0,
        reserved: [0; 4],
    };
    let candidates = [(posix_fd | fabric, rdma), (posix_fd, rdma), (posix_fd, 0), (0, 0)];
    let _current = device.enter()?;
    let mut refusal = None;
    for (handle_types, gpu_direct_rdma) in candidates {
        let candidate = properties(handle_types, gpu_direct_rdma);
        match try_one_granule(device, &candidate) {
            Ok(()) => return Ok(candidate),
            // A full device says nothing about kinds of handles.
            Err(DriverError { code: OUT_OF_MEMORY, .. }) => return Ok(properties(posix_fd, rdma)),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.map_or(CudaError::Driver(DriverError { call: "cuMemCreate", code: INVALID_VALUE }), Into::into))
}

fn is_inhabited(folder: &Path) -> bool {
    folder.read_dir().is_ok_and(|mut entries| entries.next().is_some())
}

fn try_one_granule(device: &CudaDevice, properties: &MemProperties) -> Result<(), DriverError> {
    let size = granularity_of(device, properties)? as usize;
    let mut handle = 0;
    // SAFETY: `handle` is valid for writing, the properties are valid, the size is one granule.
    unsafe { device.driver.create(&raw mut handle, size, &raw const *properties, 0) }?;
    // SAFETY: just made, and not used again.
    unsafe { device.driver.release(handle) }
}
