//! The two backends: device memory and pinned host memory. Each is memory and a set of streams that order work.

use crate::call_counters::DeviceCall;
use crate::device::CudaDevice;
use crate::driver::{HANDLE_FABRIC, HANDLE_POSIX_FD};
use crate::error::CudaError;
use crate::memory::{
    AllocationKind, BackendMemory, DriverAllocations, ExportedHandle, HandleKind, Images, MemorySource, Prefetching,
    VirtualMemory, VirtualOptions,
};
use crate::streams::BackendStreams;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use symmalloc_core::backend::{Backend, BackendError, Event, Image, Part, Place, Range};
use symmalloc_core::ids::StreamId;

/// Granularity of memory that has none of its own, in bytes.
const WHOLE_GRANULARITY_BYTES: u64 = 2 << 20;

/// Memory of a device, as the allocator takes it. Made by [`CudaBackend::builder`].
pub struct CudaBackend {
    // Dropped first: it does not need the streams, but it needs the device.
    memory: Box<dyn BackendMemory>,
    streams: BackendStreams,
    traits: MemoryTraits,
    images: Images,
    listener: Option<Listener>,
}

/// Memory that a backend maps or unmaps, as [`CudaBackendBuilder::listener`] hears of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryChange {
    /// Whether it is there now; otherwise it is about to go.
    pub is_mapped: bool,
    /// The first byte.
    pub address: u64,
    /// How many bytes.
    pub size_bytes: u64,
}

/// Is told of every change.
#[derive(Clone)]
struct Listener(Arc<dyn Fn(MemoryChange) + Send + Sync>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

/// What the memory of a [`CudaBackend`] is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryTraits {
    /// Ranges can grow: expandable segments work.
    pub virtual_memory: bool,
    /// Memory can be exported as a file descriptor; NCCL's windows need it.
    pub posix_fd: bool,
    /// Memory can be exported as a fabric handle.
    pub fabric: bool,
    /// Network cards can reach it.
    pub gpu_direct_rdma: bool,
}

/// Makes a [`CudaBackend`].
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
    /// Size of the largest physical chunk that an expandable range grows by, in bytes; a multiple of the granularity. By default
    /// 32 MiB, or from 2 GiB on a power of two between a 64th and a 32nd of what the range reaches. Larger chunks make growing and
    /// sleeping faster (`docs/device-memory.md`), but trimming gives memory back in whole chunks only. Placements do not depend on it.
    pub fn chunk_bytes(mut self, chunk_bytes: u64) -> Self {
        self.options.chunk_bytes = Some(chunk_bytes);
        self
    }

    /// The most memory that a thread of the backend makes ahead of the growth of each expandable range, in bytes; a multiple
    /// of the granularity, and at least [`chunk_bytes`](Self::chunk_bytes). 0, the default: none.
    ///
    /// After each growth the thread maps as much behind the range as the range reaches, up to this, so that the next growth finds
    /// its memory made and mapped. Placements, digests, segments and what counts as reserved are the same
    /// with and without. [`CudaMemory::spare_bytes`] says how much is ahead: it is device memory that is not handed out
    /// yet. It goes back when memory of its range does, in [`CachingAllocator::trim`](crate::CachingAllocator::trim), and
    /// before an allocation fails because the device is full; after that nothing is made ahead until memory goes back.
    ///
    /// Chunks that are made ahead are as large as all growths of the range allow, so give expandable pools a growth step (`growth_mb`)
    /// for few and large ones. `docs/device-memory.md` has the rule. Has no effect where memory comes from `cuMemAlloc`. Dropping
    /// the backend waits for the driver call that the thread is in.
    pub fn prefetch_bytes(mut self, prefetch_bytes: u64) -> Self {
        self.options.prefetch_bytes = prefetch_bytes;
        self
    }

    /// Other devices that may read and write the memory, by ordinal; the device itself may be among them. None by default:
    /// mapping for peers slows launches.
    pub fn peers(mut self, peers: impl IntoIterator<Item = usize>) -> Self {
        self.options.peers = peers.into_iter().collect();
        self
    }

    /// Hands out addresses in descending order, from the end of one reservation of `space_bytes`, a multiple of the
    /// granularity that must hold all ranges together (an expandable heap reserves 512 GiB unless configured). Drivers hand
    /// them out in ascending order mostly, so a test that runs one rank with this and another without shows that placements
    /// do not depend on addresses, and what breaks where they do. Nothing else changes.
    pub fn descending_addresses(mut self, space_bytes: u64) -> Self {
        self.options.descending_bytes = Some(space_bytes);
        self
    }

    /// Folder in which the system shows IMEX channels, `/dev/nvidia-caps-imex-channels` by default. Memory gets fabric
    /// handles only where there is a channel: the driver refuses them otherwise.
    pub fn imex_channels(mut self, folder: impl Into<PathBuf>) -> Self {
        self.options.imex_channels = folder.into();
        self
    }

    /// Folder of files for the contents of pools that [sleep](crate::CudaAllocator::sleep). They have no names there and are gone when
    /// they are not needed. Contents are kept in pinned host memory unless this says otherwise.
    pub fn images_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.images_in = Some(folder.into());
        self
    }

    /// Takes memory from `cuMemAlloc` even where the device has virtual memory. Neither NCCL windows nor expandable
    /// segments work then.
    pub fn plain(mut self) -> Self {
        self.plain = true;
        self
    }

    /// Takes memory from functions of the program, one call per segment: pools need fixed or reserved segments then.
    pub fn source(mut self, source: Arc<dyn MemorySource>) -> Self {
        self.source = Some(source);
        self
    }

    /// Tells of memory that was mapped, and of memory before it is unmapped: for profilers and libraries that register it. Called
    /// under the lock of a heap, so it must not use the allocator. It decides nothing.
    pub fn listener(mut self, listener: impl Fn(MemoryChange) + Send + Sync + 'static) -> Self {
        self.listener = Some(Listener(Arc::new(listener)));
        self
    }

    /// The number of the device.
    pub fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    /// Asks the device what it can do.
    ///
    /// # Errors
    /// When a peer cannot access the memory, a size does not fit, or the driver refuses.
    pub fn build(self) -> Result<CudaBackend, CudaError> {
        let CudaBackendBuilder { device, options, plain, images_in, source, listener } = self;
        let images = Images::new(Arc::clone(&device), images_in);
        let streams = BackendStreams::new(Arc::clone(&device));
        let none = MemoryTraits { virtual_memory: false, posix_fd: false, fabric: false, gpu_direct_rdma: false };
        if let Some(source) = source {
            let kind = AllocationKind::Source(source);
            let memory = Box::new(DriverAllocations::new(device, kind, WHOLE_GRANULARITY_BYTES));
            return Ok(CudaBackend { memory, streams, traits: none, images, listener });
        }
        if plain || !device.features().virtual_memory {
            if let Some(&peer) = options.peers.first() {
                return Err(CudaError::NoPeerAccess { ordinal: device.ordinal(), peer });
            }
            tracing::warn!(
                name: "memory.plain",
                target: "symmalloc",
                device = device.ordinal(),
                "device memory comes from cuMemAlloc: no expandable segments, no NCCL windows",
            );
            let memory = Box::new(DriverAllocations::new(device, AllocationKind::Device, WHOLE_GRANULARITY_BYTES));
            return Ok(CudaBackend { memory, streams, traits: none, images, listener });
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
        Ok(CudaBackend { memory, streams, traits, images, listener })
    }
}

impl CudaBackend {
    /// Starts from the defaults: virtual memory where the device has it, no peers.
    pub fn builder(device: &Arc<CudaDevice>) -> CudaBackendBuilder {
        let (options, device) = (VirtualOptions::default(), Arc::clone(device));
        CudaBackendBuilder { device, options, plain: false, images_in: None, source: None, listener: None }
    }

    /// Lets another device read and write the memory: what is mapped already, and what will be. As
    /// [`CudaBackendBuilder::peers`], for programs that learn later which devices talk to each other. The device itself may be
    /// named, and a peer twice.
    ///
    /// # Errors
    /// When the peer cannot access the memory, or the driver refuses; the peer may have access to a part of what is mapped
    /// then, and will have none to what comes.
    pub fn grant_access(&self, peer: usize) -> Result<(), CudaError> {
        self.memory.grant_access(peer)
    }

    /// The physical chunks behind some addresses of this backend, as (address, size in bytes), in order. None where memory cannot
    /// be exported as file descriptors.
    pub fn chunks_behind(&self, address: u64, size_bytes: u64) -> Vec<(u64, u64)> {
        let part = address..address.saturating_add(size_bytes);
        let chunks = self.memory.chunks_behind(std::slice::from_ref(&part), None);
        let chunks = chunks.filter(|_| self.traits.posix_fd).unwrap_or_default();
        chunks.into_iter().map(|chunk| (chunk.start, chunk.end - chunk.start)).collect()
    }

    /// Exports a chunk of [`chunks_behind`](Self::chunks_behind) for another process. The descriptor keeps the memory until it is
    /// closed.
    ///
    /// # Errors
    /// When the driver refuses, or there is no such chunk any more.
    pub fn export_chunk(&self, address: u64, size_bytes: u64) -> Result<OwnedFd, CudaError> {
        match self.memory.export_chunk(&(address..address.saturating_add(size_bytes)), HandleKind::FileDescriptor)? {
            ExportedHandle::FileDescriptor(file) => Ok(file),
            ExportedHandle::Fabric(_) => unreachable!("a descriptor was asked for"),
        }
    }

    fn tell(&self, is_mapped: bool, range: Range, offset_bytes: u64, size_bytes: u64) {
        if let Some(Listener(listener)) = &self.listener {
            listener(MemoryChange { is_mapped, address: range.base.0 + offset_bytes, size_bytes });
        }
    }

    /// What the memory is like.
    pub fn traits(&self) -> MemoryTraits {
        self.traits
    }

    pub(crate) fn images(&self) -> &Images {
        &self.images
    }
}

/// Page-locked memory of the host, as the allocator takes it.
pub struct PinnedBackend {
    memory: DriverAllocations,
    streams: BackendStreams,
}

impl PinnedBackend {
    /// Pinned memory that every context of the process can use.
    pub fn new(device: &Arc<CudaDevice>) -> Self {
        PinnedBackend {
            memory: DriverAllocations::new(Arc::clone(device), AllocationKind::PinnedHost, WHOLE_GRANULARITY_BYTES),
            streams: BackendStreams::new(Arc::clone(device)),
        }
    }
}

impl PinnedBackend {
    /// Nobody listens.
    fn tell(&self, _is_mapped: bool, _range: Range, _offset_bytes: u64, _size_bytes: u64) {}
}

/// A backend of this crate: what an allocator with streams needs besides [`Backend`]. Sealed.
pub trait CudaMemory: Backend + sealed::BackendParts + Send + Sync + 'static {
    /// The device.
    fn device(&self) -> &Arc<CudaDevice> {
        self.streams().device()
    }

    /// Registers a stream with the backend alone, for a core allocator that is driven directly. Streams must be added in the
    /// order in which they are registered with that allocator.
    fn add_stream(&self, stream: Arc<cudarc::driver::CudaStream>) -> StreamId {
        StreamId(self.streams().add_stream(stream) as u16)
    }

    /// Bytes that the allocator gave up and the device could not take back yet: parts of larger chunks, and what the
    /// driver refused.
    fn idle_bytes(&self) -> u64 {
        self.memory().idle_bytes()
    }

    /// Bytes that were made ahead of growth and that no range has yet, see [`CudaBackendBuilder::prefetch_bytes`]. Neither
    /// idle nor reserved, but memory of the device.
    fn spare_bytes(&self) -> u64 {
        self.memory().spare_bytes()
    }

    /// Whether ranges can be larger than the memory behind them.
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

    /// What both backends consist of.
    pub trait BackendParts {
        /// What the memory is, for labels.
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
            fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
                self.watch(DeviceCall::Map, || self.memory.map(range, offset_bytes, size_bytes))?;
                self.tell(true, range, offset_bytes, size_bytes);
                Ok(())
            }
            fn map_pieces(&self, at: Place, size_bytes: u64, piece_bytes: u64) -> Result<(), BackendError> {
                let map = || self.memory.map_pieces(at, size_bytes, piece_bytes);
                self.watch(DeviceCall::Map, map)?;
                self.tell(true, at.0, at.1, size_bytes);
                Ok(())
            }
            fn can_alias(&self) -> bool {
                self.memory.can_alias()
            }
            fn alias(&self, at: Place, source: Place, piece_bytes: u64) -> Result<(), BackendError> {
                let alias = || self.memory.alias(at, source, piece_bytes);
                self.watch(DeviceCall::Map, alias)
            }
            fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
                self.tell(false, range, offset_bytes, size_bytes);
                self.watch(DeviceCall::Unmap, || self.memory.unmap(range, offset_bytes, size_bytes))
            }
            fn release(&self, range: Range) -> Result<(), BackendError> {
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
            /// Does what is counted, and measured where metrics are wanted.
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
    fn save(&self, parts: &[Part]) -> Result<Image, BackendError> {
        self.images.save(parts)
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
    fn zero(&self, parts: &[Part]) -> Result<(), BackendError> {
        self.images.zero(parts)
    }
}
backend!(PinnedBackend);
