//! The two backends: device memory and pinned host memory. Each combines memory with a set of streams that order work.

use crate::call_counters::DeviceCall;
use crate::device::CudaDevice;
use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD};
use crate::error::CudaError;
use crate::memory::{
    AllocationKind, BackendMemory, BlockReports, DriverAllocations, ExportedHandle, HandleKind, Images, MemorySource,
    Prefetching, VirtualMemory, VirtualOptions,
};
use crate::streams::{BackendStreams, Comparisons};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use symmalloc_core::backend::{
    Backend, BackendError, Bytes, Compared, Comparison, DeviceAddress, Event, Image, Part, Range, RangeOffset,
};
use symmalloc_core::base::{Base, BaseError};
use symmalloc_core::ids::{PoolId, StreamId};

/// Granularity, in bytes, of memory without a granularity requirement.
const WHOLE_GRANULARITY_BYTES: u64 = 2 << 20;

/// The allocator's source of device memory. Created by [`CudaBackend::builder`].
pub struct CudaBackend {
    // Dropped first: it needs the device, but not the streams.
    memory: Box<dyn BackendMemory>,
    comparisons: Comparisons,
    streams: BackendStreams,
    traits: MemoryTraits,
    images: Images,
    listener: Option<Listener>,
    /// Reports of blocks to compute-sanitizer, if the process runs under it and memory comes from `cuMemAlloc`.
    reports: Option<BlockReports>,
}

/// A range of memory that a backend has mapped or is about to unmap, as passed to [`CudaBackendBuilder::listener`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryChange {
    /// `true` if the range is mapped now, `false` if it is about to be unmapped.
    pub is_mapped: bool,
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Callback for every change.
#[derive(Clone)]
struct Listener(Arc<dyn Fn(MemoryChange) + Send + Sync>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

/// Capabilities of the memory of a [`CudaBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTraits {
    /// Ranges can grow, so expandable segments work.
    pub virtual_memory: bool,
    /// Memory can be exported as a file descriptor, which NCCL's windows require.
    pub posix_fd: bool,
    /// Memory can be exported as a fabric handle.
    pub fabric: bool,
    /// Network cards can reach it.
    pub gpu_direct_rdma: bool,
}

/// Builder of a [`CudaBackend`].
#[derive(Clone, Debug)]
#[must_use]
pub struct CudaBackendBuilder {
    device: Arc<CudaDevice>,
    options: VirtualOptions,
    plain: bool,
    images_in: Option<PathBuf>,
    source: Option<Arc<dyn MemorySource>>,
    listener: Option<Listener>,
}

impl CudaBackendBuilder {
    /// Sets the size in bytes of the largest physical chunk that an expandable range grows by. Must be a multiple of the granularity. The
    /// default is 32 MiB until the range extends to 2 GiB, and then a power of two between 1/64 and 1/32 of the range's extent.
    /// Larger chunks make growing and sleeping faster (`docs/device-memory.md`), but trimming returns memory in whole chunks only.
    /// Placements do not depend on it.
    pub fn chunk_bytes(mut self, chunk_bytes: u64) -> Self {
        self.options.chunk_bytes = Some(chunk_bytes);
        self
    }

    /// Sets the maximum number of bytes that a background thread prefetches ahead of the growth of each expandable range. Must be a
    /// multiple of the granularity, and at least [`chunk_bytes`](Self::chunk_bytes). The default, 0, disables prefetching.
    ///
    /// After each growth the thread maps as much memory after the range's end as its current extent, up to this limit, so that the next
    /// growth finds its memory created and mapped. Prefetching changes no placement, digest, segment or reserved size.
    /// [`CudaMemory::spare_bytes`] reports the prefetched memory: it is device memory that no allocation uses yet. It is released when
    /// memory of its range is released, in [`CachingAllocator::trim_all`](crate::CachingAllocator::trim_all), and before an allocation fails
    /// because the device is full. After such a failure, prefetching pauses until memory is released.
    ///
    /// A prefetched chunk is as large as all growth steps of the range allow, so configure expandable pools with a growth step
    /// (`growth_mb`) to get few and large chunks. `docs/device-memory.md` describes the rule. This option has no effect if memory comes
    /// from `cuMemAlloc`. Dropping the backend waits for the thread's current driver call.
    pub fn prefetch_bytes(mut self, prefetch_bytes: u64) -> Self {
        self.options.prefetch_bytes = prefetch_bytes;
        self
    }

    /// Sets the ordinals of other devices that may read and write the memory. The device itself may be included. The default is none,
    /// because mapping for peers slows launches.
    pub fn peers(mut self, peers: impl IntoIterator<Item = usize>) -> Self {
        self.options.peers = peers.into_iter().collect();
        self
    }

    /// Hands out addresses in descending order, from the end of one reservation of `space_bytes`. The size must be a multiple of the
    /// granularity, and the reservation must hold all ranges together (an expandable heap reserves 512 GiB unless configured). Drivers
    /// usually hand out addresses in ascending order. A test that runs one rank with this option and another rank without it shows that
    /// placements do not depend on addresses, and reveals code that does. The option changes nothing else.
    pub fn descending_addresses(mut self, space_bytes: u64) -> Self {
        self.options.descending_bytes = Some(space_bytes);
        self
    }

    /// Sets the folder in which the system lists IMEX channels, by default `/dev/nvidia-caps-imex-channels`. Memory gets fabric handles
    /// only if there is a channel, because the driver rejects them without one.
    pub fn imex_channels(mut self, folder: impl Into<PathBuf>) -> Self {
        self.options.imex_channels = folder.into();
        self
    }

    /// Keeps the contents of pools that [sleep](crate::CudaAllocator::sleep) in files in this folder. The files are unnamed and disappear
    /// when they are no longer needed. By default, contents are kept in pinned host memory.
    pub fn images_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.images_in = Some(folder.into());
        self
    }

    /// Allocates memory with `cuMemAlloc` even if the device supports virtual memory. NCCL windows and expandable segments do not work in
    /// this mode. The environment variable `SYMMALLOC_PLAIN_MEMORY=1` does the same, for compute-sanitizer, which accepts blocks of
    /// `cuMemAlloc` memory only (`docs/memory-errors.md`).
    pub fn plain(mut self) -> Self {
        self.plain = true;
        self
    }

    /// Allocates memory through functions of the program, with one call per segment. Pools must then use fixed or reserved segments.
    pub fn source(mut self, source: Arc<dyn MemorySource>) -> Self {
        self.source = Some(source);
        self
    }

    /// Registers a callback that is notified after memory is mapped and before memory is unmapped, for profilers and libraries that
    /// register memory. It runs under the lock of a heap, so it must not use the allocator. It cannot influence decisions.
    pub fn listener(mut self, listener: impl Fn(MemoryChange) + Send + Sync + 'static) -> Self {
        self.listener = Some(Listener(Arc::new(listener)));
        self
    }

    /// Returns the ordinal of the device.
    pub fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    /// Queries the device's capabilities and creates the backend.
    ///
    /// # Errors
    /// Returns an error if a peer cannot access the memory, a size is invalid, or a driver call fails.
    pub fn build(self) -> Result<CudaBackend, CudaError> {
        let CudaBackendBuilder { device, options, plain, images_in, source, listener } = self;
        let images = Images::new(Arc::clone(&device), images_in);
        let streams = BackendStreams::new(Arc::clone(&device));
        let comparisons = Comparisons::new(Arc::clone(&device));
        // compute-sanitizer rejects other memory, and counts each rejection as an error of the program.
        let is_plain = source.is_none() && (plain || !device.features().virtual_memory);
        let reports = is_plain.then(|| BlockReports::of_process(&device)).flatten();
        let none = MemoryTraits { virtual_memory: false, posix_fd: false, fabric: false, gpu_direct_rdma: false };
        if let Some(source) = source {
            let kind = AllocationKind::Source(source);
            let memory = Box::new(DriverAllocations::new(device, kind, WHOLE_GRANULARITY_BYTES));
            return Ok(CudaBackend { memory, comparisons, streams, traits: none, images, listener, reports });
        }
        if is_plain {
            if let Some(&peer) = options.peers.first() {
                return Err(CudaError::NoPeerAccess { ordinal: device.ordinal(), peer });
            }
            tracing::warn!(
                name: "memory.plain",
                target: "symmalloc",
                device = device.ordinal(),
                "device memory comes from cuMemAlloc: expandable segments and NCCL windows are unavailable",
            );
            let memory = Box::new(DriverAllocations::new(device, AllocationKind::Device, WHOLE_GRANULARITY_BYTES));
            return Ok(CudaBackend { memory, comparisons, streams, traits: none, images, listener, reports });
        }
        let memory = VirtualMemory::new(device, &options, Arc::clone(images.fills()))?;
        let traits = MemoryTraits {
            virtual_memory: true,
            posix_fd: memory.handle_types() & HANDLE_POSIX_FD != 0,
            fabric: memory.handle_types() & HANDLE_FABRIC != 0,
            gpu_direct_rdma: memory.is_gpu_direct_rdma_capable(),
        };
        tracing::debug!(name: "memory.virtual", target: "symmalloc", ?traits, chunk_bytes = options.chunk_bytes);
        let memory: Box<dyn BackendMemory> =
            if memory.is_prefetched() { Box::new(Prefetching::new(memory)) } else { Box::new(memory) };
        Ok(CudaBackend { memory, comparisons, streams, traits, images, listener, reports })
    }
}

impl CudaBackend {
    /// Returns a builder with the defaults: virtual memory if the device supports it, and no peers.
    pub fn builder(device: &Arc<CudaDevice>) -> CudaBackendBuilder {
        let (options, device) = (VirtualOptions::default(), Arc::clone(device));
        let plain = std::env::var_os("SYMMALLOC_PLAIN_MEMORY").is_some_and(|value| !value.is_empty() && value != "0");
        CudaBackendBuilder { device, options, plain, images_in: None, source: None, listener: None }
    }

    /// Lets another device read and write the memory that is mapped now or later. Like [`CudaBackendBuilder::peers`], for programs that
    /// only learn at run time which devices communicate. The device itself may be passed, and a peer may be passed twice.
    ///
    /// # Errors
    /// Returns an error if the peer cannot access the memory, or a driver call fails. In that case the peer may have access to a part of
    /// the currently mapped memory, and has no access to memory that is mapped later.
    pub fn grant_access(&self, peer: usize) -> Result<(), CudaError> {
        self.memory.grant_access(peer)
    }

    /// Returns the physical chunks behind a range of addresses of this backend, in order, as (address, size in bytes). Returns no chunks if
    /// memory cannot be exported as file descriptors.
    pub fn chunks_behind(&self, address: u64, size_bytes: u64) -> Vec<(u64, u64)> {
        let part = address..address.saturating_add(size_bytes);
        let chunks = self.memory.chunks_behind(std::slice::from_ref(&part), None);
        let chunks = chunks.filter(|_| self.traits.posix_fd).unwrap_or_default();
        chunks.into_iter().map(|chunk| (chunk.start, chunk.end - chunk.start)).collect()
    }

    /// Exports a chunk from [`chunks_behind`](Self::chunks_behind) for another process. The descriptor keeps the memory alive until it is
    /// closed.
    ///
    /// # Errors
    /// Returns an error if a driver call fails, or the chunk no longer exists.
    pub fn export_chunk(&self, address: u64, size_bytes: u64) -> Result<OwnedFd, CudaError> {
        match self.memory.export_chunk(&(address..address.saturating_add(size_bytes)), HandleKind::FileDescriptor)? {
            ExportedHandle::FileDescriptor(file) => Ok(file),
            ExportedHandle::Fabric(_) => unreachable!("a descriptor was requested"),
        }
    }

    fn notify(&self, is_mapped: bool, range: Range, offset_bytes: u64, size_bytes: u64) {
        if let Some(Listener(listener)) = &self.listener {
            listener(MemoryChange { is_mapped, address: range.base.0 + offset_bytes, size_bytes });
        }
    }

    fn note_mapped(&self, range: Range) {
        self.reports.iter().for_each(|reports| reports.mapped(range));
    }

    fn forget_range(&self, range: Range) {
        self.reports.iter().for_each(|reports| reports.released(range));
    }

    /// Returns the capabilities of the memory.
    pub fn traits(&self) -> MemoryTraits {
        self.traits
    }

    pub(crate) fn images(&self) -> &Images {
        &self.images
    }
}

/// The allocator's source of page-locked host memory.
pub struct PinnedBackend {
    memory: DriverAllocations,
    streams: BackendStreams,
}

impl PinnedBackend {
    /// Creates a backend of pinned memory that every context of the process can use.
    pub fn new(device: &Arc<CudaDevice>) -> Self {
        PinnedBackend {
            memory: DriverAllocations::new(Arc::clone(device), AllocationKind::PinnedHost, WHOLE_GRANULARITY_BYTES),
            streams: BackendStreams::new(Arc::clone(device)),
        }
    }
}

impl PinnedBackend {
    /// Pinned memory is not reported to tools.
    fn note_mapped(&self, _range: Range) {}

    fn forget_range(&self, _range: Range) {}

    /// Pinned memory has no listener.
    fn notify(&self, _is_mapped: bool, _range: Range, _offset_bytes: u64, _size_bytes: u64) {}
}

/// A backend of this crate: [`Backend`] and the parts that an allocator with streams needs. Sealed.
pub trait CudaMemory: Backend + sealed::BackendParts + Send + Sync + 'static {
    /// Returns the device.
    fn device(&self) -> &Arc<CudaDevice> {
        self.streams().device()
    }

    /// Registers a stream with the backend only, for programs that call the core's allocator directly. Add streams in the order in which
    /// they are registered with that allocator.
    fn add_stream(&self, stream: Arc<cudarc::driver::CudaStream>) -> StreamId {
        StreamId(self.streams().add_stream(stream) as u16)
    }

    /// Returns the number of bytes that the allocator has released but that still occupy device memory: parts of larger chunks, and memory
    /// that the driver failed to release.
    fn idle_bytes(&self) -> u64 {
        self.memory().idle_bytes()
    }

    /// Returns the number of bytes that were prefetched for growth and that no range uses yet, see [`CudaBackendBuilder::prefetch_bytes`].
    /// They are neither idle nor reserved, but they occupy device memory.
    fn spare_bytes(&self) -> u64 {
        self.memory().spare_bytes()
    }

    /// Returns `true` if ranges can be larger than the memory behind them.
    fn is_expandable(&self) -> bool;
}

impl CudaMemory for CudaBackend {
    fn is_expandable(&self) -> bool {
        self.traits.virtual_memory
    }
}

impl CudaMemory for PinnedBackend {
    fn is_expandable(&self) -> bool {
        false
    }
}

pub(crate) mod sealed {
    use super::{BackendMemory, BackendStreams, CudaBackend, PinnedBackend};

    /// The parts that both backends have in common.
    pub trait BackendParts {
        /// Kind of memory, for labels.
        #[doc(hidden)]
        const KIND: &'static str;
        #[doc(hidden)]
        fn streams(&self) -> &BackendStreams;
        #[doc(hidden)]
        fn memory(&self) -> &dyn BackendMemory;
    }

    impl BackendParts for CudaBackend {
        const KIND: &'static str = "device";
        fn streams(&self) -> &BackendStreams {
            &self.streams
        }
        fn memory(&self) -> &dyn BackendMemory {
            self.memory.as_ref()
        }
    }

    impl BackendParts for PinnedBackend {
        const KIND: &'static str = "pinned";
        fn streams(&self) -> &BackendStreams {
            &self.streams
        }
        fn memory(&self) -> &dyn BackendMemory {
            &self.memory
        }
    }
}

macro_rules! backend {
    ($name:ident $($copies:item)*) => {
        impl Backend for $name {
            fn granularity_bytes(&self) -> u64 {
                self.memory.granularity_bytes()
            }
            fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
                self.watch(DeviceCall::Reserve, || self.memory.reserve(size_bytes))
            }
            fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
                self.watch(DeviceCall::Reserve, || self.memory.reserve_at(base, pool))
            }
            fn carve(&self, _space: Range, part: Range) -> Result<(), BackendError> {
                self.memory.carve(part)
            }
            fn release_space(&self, space: Range) -> Result<(), BackendError> {
                self.watch(DeviceCall::Release, || self.memory.release_space(space))
            }
            fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
                self.watch(DeviceCall::Map, || self.memory.map(range, offset_bytes, size_bytes))?;
                self.note_mapped(range);
                self.notify(true, range, offset_bytes, size_bytes);
                Ok(())
            }
            fn map_pieces(&self, at: RangeOffset, size_bytes: u64, piece_bytes: u64) -> Result<(), BackendError> {
                let map = || self.memory.map_pieces(at, size_bytes, piece_bytes);
                self.watch(DeviceCall::Map, map)?;
                self.note_mapped(at.0);
                self.notify(true, at.0, at.1, size_bytes);
                Ok(())
            }
            fn can_alias(&self) -> bool {
                self.memory.can_alias()
            }
            fn alias(&self, at: RangeOffset, source: RangeOffset, piece_bytes: u64) -> Result<(), BackendError> {
                let alias = || self.memory.alias(at, source, piece_bytes);
                self.watch(DeviceCall::Map, alias)?;
                self.note_mapped(at.0);
                Ok(())
            }
            fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
                self.notify(false, range, offset_bytes, size_bytes);
                self.watch(DeviceCall::Unmap, || self.memory.unmap(range, offset_bytes, size_bytes))
            }
            fn release(&self, range: Range) -> Result<(), BackendError> {
                self.forget_range(range);
                self.watch(DeviceCall::Release, || self.memory.release(range))
            }
            fn record(&self, stream: StreamId) -> Result<Event, BackendError> {
                self.streams.record(stream)
            }
            fn wait(&self, stream: StreamId, event: Event) -> Result<(), BackendError> {
                self.streams.wait(stream, event)
            }
            fn query(&self, event: Event) -> Result<bool, BackendError> {
                self.streams.query(event)
            }
            fn recycle(&self, event: Event) {
                self.streams.recycle(event);
            }
            fn synchronize(&self, stream: StreamId) -> Result<(), BackendError> {
                self.streams.synchronize(stream)
            }
            $($copies)*
        }

        impl $name {
            /// Performs and counts a call. Also measures its duration if metrics are enabled.
            fn watch<T>(&self, call: DeviceCall, work: impl FnOnce() -> T) -> T {
                self.streams.watch(call, work)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("device", self.streams.device()).finish_non_exhaustive()
            }
        }
    };
}

backend! {
    CudaBackend
    fn save(&self, pool: PoolId, parts: &[Part]) -> Result<Image, BackendError> {
        self.images.save(pool, parts)
    }
    fn expect_load(&self, image: Image, parts: &[Part]) {
        self.images.expect_load(image, parts);
    }
    fn load(&self, image: Image, parts: &[Part]) -> Result<(), BackendError> {
        self.images.load(image, parts)
    }
    fn discard(&self, image: Image) {
        self.images.discard(image);
    }
    fn forget_pool(&self, pool: PoolId) {
        self.images.forget_pool(pool);
    }
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        self.images.zero(parts)
    }
    fn reports_blocks(&self) -> bool {
        self.reports.is_some()
    }
    fn block_allocated(&self, stream: StreamId, bytes: Bytes, name: Option<&str>) {
        self.reports.iter().for_each(|reports| reports.allocated(bytes, name, self.streams.is_captured(stream)));
    }
    fn block_freed(&self, address: DeviceAddress) {
        self.reports.iter().for_each(|reports| reports.freed(address));
    }
    fn is_captured(&self, stream: StreamId) -> bool {
        self.streams.is_captured(stream)
    }
    fn fill(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<(), BackendError> {
        self.comparisons.fill(&self.streams, stream, bytes, pattern)
    }
    fn compare(&self, stream: StreamId, bytes: Bytes, pattern: u32) -> Result<Option<Comparison>, BackendError> {
        self.comparisons.compare(&self.streams, stream, bytes, pattern)
    }
    fn compared(&self, comparison: Comparison) -> Result<Compared, BackendError> {
        self.comparisons.compared(&self.streams, comparison)
    }
}
backend!(PinnedBackend);
