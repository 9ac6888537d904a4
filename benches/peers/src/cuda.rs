//! Our interfaces to CUDA memory, from the safest to the fastest.
//!
//! | subject | allocates with | frees with |
//! |---|---|---|
//! | [`Counted`] | `CudaAllocator::alloc` | the drop of a `DeviceBuffer` |
//! | [`Borrowed`] | `StreamAllocator::alloc` | the drop of a `DeviceBuffer` |
//! | [`Handles`] | `CudaAllocator::allocate` | `CudaAllocator::free` |
//!
//! They are inlined, so that the subject adds nothing to the call that a program makes.

use crate::subject::{Memory, Subject};
use cudarc::driver::CudaStream;
use std::sync::Arc;
use symmalloc_core::{Config, Handle, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaError, DeviceBuffer, StreamAllocator};

const ROOM: &str = "the device has enough memory";
const KNOWN: &str = "the stream belongs to the device and the allocation is live";

/// The device and the streams of the process, created before any measurement.
#[derive(Clone, Debug)]
pub(crate) struct Cuda {
    device: Arc<CudaDevice>,
    pub(crate) streams: Vec<Arc<CudaStream>>,
    prefetch_bytes: u64,
}

impl Cuda {
    /// Opens the first device and creates `streams` streams. Allocators create up to `prefetch_bytes` of memory ahead
    /// of growth.
    ///
    /// # Errors
    /// Returns an error if there is no device or a driver call fails.
    pub(crate) fn new(streams: usize, prefetch_bytes: u64) -> Result<Self, CudaError> {
        let device = CudaDevice::new(0)?;
        let streams = (0..streams).map(|_| device.context().new_stream().expect("the driver makes streams"));
        Ok(Cuda { streams: streams.collect(), device, prefetch_bytes })
    }

    /// Waits for all work, with a driver call that is not counted as ours.
    pub(crate) fn synchronize(&self) {
        self.device.context().synchronize().expect("no work failed");
    }

    /// Creates an allocator that has registered the streams and holds no memory.
    fn allocator(&self, config: &Config) -> CudaAllocator {
        let backend = CudaBackend::builder(&self.device).prefetch_bytes(self.prefetch_bytes).build();
        let backend = backend.expect("the prefetch is a multiple of a granule, and at least one chunk");
        let allocator =
            CudaAllocator::with_backend(backend, config.clone()).expect("the configuration fits the device");
        for stream in &self.streams {
            allocator.register_stream(stream).expect(KNOWN);
        }
        allocator
    }
}

fn memory(allocator: &CudaAllocator) -> Option<Memory> {
    let stats = allocator.stats();
    Some(Memory { reserved_peak_bytes: stats.reserved_bytes.peak, segments: stats.segment_count })
}

/// Buffers that borrow the allocator of their stream.
pub(crate) struct Borrowed(Counted);

impl Borrowed {
    pub(crate) fn new(cuda: &Cuda, config: &Config) -> Self {
        Borrowed(Counted::new(cuda, config))
    }
}

impl Subject for Borrowed {
    type Stream<'a> = &'a StreamAllocator;
    type Block<'a> = DeviceBuffer<u8, &'a StreamAllocator>;

    fn stream(&self, number: usize) -> &StreamAllocator {
        self.0.allocator.for_stream(&self.0.cuda.streams[number]).expect(KNOWN)
    }

    #[inline(always)]
    fn allocate<'a>(&'a self, on: &&'a StreamAllocator, size_bytes: u64) -> DeviceBuffer<u8, &'a StreamAllocator> {
        // SAFETY: nothing reads the memory.
        unsafe { on.alloc(size_bytes as usize) }.expect(ROOM)
    }

    #[inline(always)]
    fn free<'a>(&'a self, _: &&'a StreamAllocator, block: DeviceBuffer<u8, &'a StreamAllocator>) {
        drop(block);
    }

    #[inline(always)]
    fn free_at<'a>(&'a self, _: &&'a StreamAllocator, place: &mut Option<DeviceBuffer<u8, &'a StreamAllocator>>) {
        // Drops the buffer in place, without a move.
        *place = None;
    }

    fn record_use(&self, block: &DeviceBuffer<u8, &StreamAllocator>, by: &&StreamAllocator) {
        self.0.allocator.core().record_use(block.handle(), by.stream_id()).expect(KNOWN);
    }

    fn synchronize(&self) {
        self.0.synchronize();
    }

    fn memory(&self) -> Option<Memory> {
        self.0.memory()
    }

    fn driver_calls(&self) -> Option<u64> {
        self.0.driver_calls()
    }
}

/// Buffers that hold a reference count of their allocator, used through clones of it.
pub(crate) struct Counted {
    allocator: CudaAllocator,
    cuda: Cuda,
}

impl Counted {
    pub(crate) fn new(cuda: &Cuda, config: &Config) -> Self {
        Counted { allocator: cuda.allocator(config), cuda: cuda.clone() }
    }
}

/// A thread's clone of the allocator with a stream.
pub(crate) struct Registered {
    allocator: CudaAllocator,
    stream: Arc<CudaStream>,
    id: StreamId,
}

impl Subject for Counted {
    type Stream<'a> = Registered;
    type Block<'a> = DeviceBuffer<u8>;

    fn stream(&self, number: usize) -> Registered {
        let (allocator, stream) = (self.allocator.clone(), Arc::clone(&self.cuda.streams[number]));
        let id = allocator.register_stream(&stream).expect(KNOWN);
        Registered { allocator, stream, id }
    }

    #[inline(always)]
    fn allocate(&self, on: &Registered, size_bytes: u64) -> DeviceBuffer<u8> {
        // SAFETY: nothing reads the memory.
        unsafe { on.allocator.alloc(&on.stream, size_bytes as usize) }.expect(ROOM)
    }

    #[inline(always)]
    fn free(&self, _: &Registered, block: DeviceBuffer<u8>) {
        drop(block);
    }

    #[inline(always)]
    fn free_at(&self, _: &Registered, place: &mut Option<DeviceBuffer<u8>>) {
        // Drops the buffer in place, without a move.
        *place = None;
    }

    fn record_use(&self, block: &DeviceBuffer<u8>, by: &Registered) {
        by.allocator.core().record_use(block.handle(), by.id).expect(KNOWN);
    }

    fn synchronize(&self) {
        self.cuda.synchronize();
    }

    fn memory(&self) -> Option<Memory> {
        memory(&self.allocator)
    }

    fn driver_calls(&self) -> Option<u64> {
        Some(CudaDevice::driver_calls())
    }
}

/// Handles, used through clones of the allocator.
pub(crate) struct Handles(Counted);

impl Handles {
    pub(crate) fn new(cuda: &Cuda, config: &Config) -> Self {
        Handles(Counted::new(cuda, config))
    }
}

impl Subject for Handles {
    type Stream<'a> = Registered;
    type Block<'a> = Handle;

    fn stream(&self, number: usize) -> Registered {
        self.0.stream(number)
    }

    #[inline(always)]
    fn allocate(&self, on: &Registered, size_bytes: u64) -> Handle {
        on.allocator.allocate(&on.stream, size_bytes).expect(ROOM).handle
    }

    #[inline(always)]
    fn free(&self, on: &Registered, block: Handle) {
        on.allocator.free(block).expect(KNOWN);
    }

    fn record_use(&self, block: &Handle, by: &Registered) {
        by.allocator.core().record_use(*block, by.id).expect(KNOWN);
    }

    fn synchronize(&self) {
        self.0.synchronize();
    }

    fn memory(&self) -> Option<Memory> {
        self.0.memory()
    }

    fn driver_calls(&self) -> Option<u64> {
        self.0.driver_calls()
    }
}
