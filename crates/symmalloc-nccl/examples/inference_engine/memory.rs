//! The source of the engine's device memory: symmalloc, or cudarc's own allocator for comparison.

use super::Failure;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, SyncOnDrop};
use std::sync::Arc;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer};

/// An allocator of device memory.
pub(crate) trait Memory {
    /// A buffer of elements, which is freed when dropped.
    type Buffer<T: DeviceRepr>: DevicePtr<T> + DevicePtrMut<T>;

    /// Allocates uninitialized elements. The engine writes every element before it reads it.
    fn take<T: DeviceRepr>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<Self::Buffer<T>, Failure>;

    /// Like `take`, for memory that all ranks reduce and that therefore has the same offset on each rank.
    fn take_reduced(&self, stream: &Arc<CudaStream>, len: usize) -> Result<Self::Buffer<f32>, Failure>;
}

/// symmalloc's allocators.
pub(crate) struct Symmalloc {
    /// The allocator of memory that is private to this rank.
    pub(crate) private: CudaAllocator,
    /// The allocator of a symmetric pool.
    pub(crate) symmetric: CudaAllocator,
}

impl Memory for Symmalloc {
    type Buffer<T: DeviceRepr> = DeviceBuffer<T>;

    fn take<T: DeviceRepr>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<DeviceBuffer<T>, Failure> {
        // SAFETY: the memory is written before it is read.
        Ok(unsafe { self.private.alloc(stream, len) }?)
    }

    fn take_reduced(&self, stream: &Arc<CudaStream>, len: usize) -> Result<DeviceBuffer<f32>, Failure> {
        // SAFETY: as above.
        Ok(unsafe { self.symmetric.alloc(stream, len) }?)
    }
}

/// `cuMemAllocAsync`, as `CudaStream::alloc` calls it.
pub(crate) struct Cudarc;

impl Memory for Cudarc {
    type Buffer<T: DeviceRepr> = CudaSlice<T>;

    fn take<T: DeviceRepr>(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<T>, Failure> {
        // SAFETY: the memory is written before it is read.
        Ok(unsafe { stream.alloc(len) }?)
    }

    fn take_reduced(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CudaSlice<f32>, Failure> {
        self.take(stream, len)
    }
}

/// A part of a buffer that is given by its address. It is used for work in stream order, including captures, during which no event may be
/// recorded.
pub(crate) struct Span<'a> {
    /// Address of the first element.
    pub(crate) address: u64,
    /// Number of elements.
    pub(crate) len: usize,
    /// The stream that uses the memory.
    pub(crate) stream: &'a Arc<CudaStream>,
}

impl DeviceSlice<f32> for Span<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream
    }
}

impl DevicePtr<f32> for Span<'_> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

impl DevicePtrMut<f32> for Span<'_> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}
