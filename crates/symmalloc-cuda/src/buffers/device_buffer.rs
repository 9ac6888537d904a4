//! Buffers of device memory that go wherever a `CudaSlice` goes.

use super::block::OwnedBlock;
use super::part::BufferPart;
use super::tracked_block::TrackedBlock;
use super::uses::AccessMode;
use super::view::{BufferView, BufferViewMut, KernelArg};
use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::error::{CudaError, DriverError};
use crate::pools::{StreamAllocator, StreamAllocatorRef};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
    ValidAsZeroBits,
};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use symmalloc_core::{Handle, Placement, StreamId};

/// `len` elements of device memory, freed when dropped: at once for the allocator, behind all uses for the device. Dropping
/// never waits for the device and never panics, but it may wait for another thread that holds the lock of the same heap.
/// Errors are counted by [`CachingAllocator::drop_errors`](crate::CachingAllocator::drop_errors).
/// Memory goes back to the device, which may block, only where the program says so: in `trim`, above a release threshold that
/// a pool has, and with the last owner of the allocator.
///
/// It may be dropped on any thread. If other streams used it, the drop records one event on each of them. The next user of
/// the memory waits for these events on the device.
///
/// It implements cudarc's [`DeviceSlice`], [`DevicePtr`] and [`DevicePtrMut`], so copies, memset, cuBLAS and NCCL take it.
/// Taking its pointer on another stream than its own records the use and orders the streams. A kernel launch does not say
/// on which stream it is, so give it [`on`](DeviceBuffer::on) or [`read_on`](DeviceBuffer::read_on). On the buffer's own
/// stream the buffer itself is an argument as well: `&mut` when the kernel writes it, `&` when it only reads.
///
/// `A` says how it refers to where it was allocated. A buffer of [`CudaAllocator`] counts it, and keeps the memory of the
/// allocator; one of a [`StreamAllocator`] borrows it, which costs nothing. They are placed and freed alike.
pub struct DeviceBuffer<T, A: StreamAllocatorRef<Memory = CudaBackend> = Arc<StreamAllocator>> {
    block: TrackedBlock<A>,
    len: usize,
    /// The host never touches the elements, which are plain data to the device: threads may share a buffer whatever `T` is.
    elements: PhantomData<fn() -> T>,
}

/// A [`DeviceBuffer`] taken apart: plain numbers, for interfaces that carry nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawDeviceBuffer {
    /// The allocation.
    pub handle: Handle,
    /// Its first byte; 0 when there are no bytes.
    pub pointer: CUdeviceptr,
    /// Number of elements.
    pub len: usize,
    /// The stream it was allocated on.
    pub stream: StreamId,
}

impl CudaAllocator {
    /// A buffer whose content is whatever was there before.
    ///
    /// # Safety
    /// Nothing may read elements before they are written, unless any bits make a `T`.
    ///
    /// # Errors
    /// When the stream cannot be registered or the allocator refuses.
    #[inline]
    pub unsafe fn alloc<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, len, None)
    }

    /// As [`alloc`](Self::alloc), with a name for snapshots and reports.
    ///
    /// # Safety
    /// As [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub unsafe fn alloc_named<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, len, Some(name))
    }

    /// A buffer of zeros, written on the stream.
    ///
    /// # Errors
    /// When the stream cannot be registered, or the allocator or the driver refuses.
    pub fn alloc_zeroed<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate_zeroed(self.for_stream(stream)?, len, None)
    }

    /// As [`alloc_zeroed`](Self::alloc_zeroed), with a name for snapshots and reports.
    ///
    /// # Errors
    /// As [`alloc_zeroed`](Self::alloc_zeroed).
    pub fn alloc_zeroed_named<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate_zeroed(self.for_stream(stream)?, len, Some(name))
    }
}

impl StreamAllocator {
    /// As [`CudaAllocator::alloc`], on this stream. The buffer borrows.
    ///
    /// # Safety
    /// As [`CudaAllocator::alloc`].
    ///
    /// # Errors
    /// When the allocator refuses.
    #[inline]
    pub unsafe fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, len, None)
    }

    /// As [`CudaAllocator::alloc_named`], on this stream. The buffer borrows.
    ///
    /// # Safety
    /// As [`CudaAllocator::alloc`].
    ///
    /// # Errors
    /// When the allocator refuses.
    pub unsafe fn alloc_named<T: DeviceRepr>(
        &self,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, len, Some(name))
    }

    /// As [`CudaAllocator::alloc_zeroed`], on this stream. The buffer borrows.
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
    pub fn alloc_zeroed<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate_zeroed(&self, len, None)
    }

    /// As [`CudaAllocator::alloc_zeroed_named`], on this stream. The buffer borrows.
    ///
    /// # Errors
    /// When the allocator or the driver refuses.
    pub fn alloc_zeroed_named<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate_zeroed(&self, len, Some(name))
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// The elements are whatever was there before.
    #[inline]
    pub(super) fn allocate(allocator: &A, len: usize, name: Option<&str>) -> Result<Self, CudaError> {
        Ok(Self::of(OwnedBlock::allocate::<T>(allocator, len, name)?, len))
    }

    fn allocate_zeroed(allocator: &A, len: usize, name: Option<&str>) -> Result<Self, CudaError> {
        let buffer = Self::allocate(allocator, len, name)?;
        buffer.fill_with_zeros()?;
        Ok(buffer)
    }

    #[inline]
    fn of(block: OwnedBlock<A>, len: usize) -> Self {
        DeviceBuffer { block: TrackedBlock::new(block), len, elements: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The allocation, for the core's reports.
    pub fn handle(&self) -> Handle {
        self.block.block().handle()
    }

    /// Where it lies; equal on all ranks.
    pub fn placement(&self) -> Placement {
        let allocation = self.block.block().state().core().allocation(self.handle());
        allocation.map_or(Placement::NOWHERE, |it| it.placement)
    }

    /// The buffer as an argument of a kernel that is launched on `stream`: records the use and orders the streams, as
    /// taking its pointer does.
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        KernelArg::new(self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Write))
    }

    /// As [`on`](Self::on), for kernels that only read it.
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        KernelArg::new(self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Read))
    }

    /// How it refers to where it was allocated.
    #[inline]
    pub(super) fn allocator(&self) -> &A {
        self.block.block().allocator_ref()
    }

    /// All of it, to be read.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.block.as_ref(), 0, self.len)
    }

    /// All of it, to be written.
    pub fn as_view_mut(&mut self) -> BufferViewMut<'_, T> {
        BufferViewMut::new(self.block.as_ref(), 0, self.len)
    }

    /// The same memory as parts that are owned: they outlive this call, can be [split](BufferPart::split_off) and
    /// [shared](BufferPart::into_shared), and free the memory together.
    pub fn into_part(self) -> BufferPart<T, A> {
        BufferPart::of(self.block.into_part(), self.len)
    }

    /// Takes the buffer apart. It is not freed before [`from_raw`](Self::from_raw) puts it together again, or its handle is
    /// freed with the allocator.
    ///
    /// # Errors
    /// When uses by streams that are not registered cannot be ordered; the buffer is dropped then.
    pub fn into_raw(mut self) -> Result<RawDeviceBuffer, CudaError> {
        let block = self.block.block();
        let (handle, pointer, stream) = (block.handle(), block.address(), block.allocator().stream_id());
        self.block.disown().map_err(DriverError::from)?;
        Ok(RawDeviceBuffer { handle, pointer, len: self.len, stream })
    }

    /// Never frees it, and returns its pointer. The memory stays in its segment until the allocator's last owner is gone.
    pub fn leak(mut self) -> CUdeviceptr {
        self.block.leak();
        self.block.block().address()
    }

    fn fill_with_zeros(&self) -> Result<(), CudaError> {
        let size_bytes = self.len * size_of::<T>();
        if size_bytes == 0 {
            return Ok(());
        }
        let block = self.block.block();
        let device = block.state().device();
        let _current = device.enter()?;
        // SAFETY: the buffer has this many bytes, and the stream that it was allocated on is ordered behind earlier uses.
        Ok(unsafe {
            device.driver().memset_async(block.address(), 0, size_bytes, self.block.as_ref().stream().cu_stream())
        }?)
    }
}

impl<T> DeviceBuffer<T> {
    /// Puts a buffer together again.
    ///
    /// # Safety
    /// `raw` came from [`into_raw`](Self::into_raw) of a buffer of this allocator and of elements of the same size, and is
    /// put together once. If other streams than the buffer's own used it since, [`CachingAllocator::wait`] made its own
    /// stream wait for them.
    ///
    /// [`CachingAllocator::wait`]: crate::CachingAllocator::wait
    pub unsafe fn from_raw(allocator: &CudaAllocator, raw: RawDeviceBuffer) -> Self {
        let RawDeviceBuffer { handle, pointer, len, stream } = raw;
        Self::of(OwnedBlock::of(allocator.lease().registered_stream(stream), handle, pointer), len)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceSlice<T> for DeviceBuffer<T, A> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.block.as_ref().stream()
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DevicePtr<T> for DeviceBuffer<T, A> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Read))
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DevicePtrMut<T> for DeviceBuffer<T, A> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Write))
    }
}

// SAFETY: pushes the address of a pointer that lives as long as the arguments; kernels take pointers by value.
// `LaunchArgs` does not show its stream: part of the contract of `launch` is that it is the buffer's own,
// and that the kernel writes only what it got as `&mut`.
unsafe impl<'a, 'b: 'a, T, A: StreamAllocatorRef<Memory = CudaBackend>> PushKernelArg<&'b DeviceBuffer<T, A>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceBuffer<T, A>) -> &mut Self {
        arg.block.as_ref().use_on_own_stream(AccessMode::Read);
        self.arg(arg.block.block().address_ref())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T, A: StreamAllocatorRef<Memory = CudaBackend>> PushKernelArg<&'b mut DeviceBuffer<T, A>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBuffer<T, A>) -> &mut Self {
        arg.block.as_ref().use_on_own_stream(AccessMode::Write);
        self.arg(arg.block.block().address_ref())
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> fmt::Debug for DeviceBuffer<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("pointer", &format_args!("{:#x}", self.block.block().address()))
            .field("len", &self.len)
            .field("stream", &self.block.block().allocator().stream_id())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs keep thousands of them.
    #[test]
    fn a_buffer_is_four_words_and_a_handle_and_an_optional_one_is_no_larger() {
        assert_eq!(size_of::<DeviceBuffer<u8>>(), 4 * size_of::<u64>() + size_of::<Handle>());
        assert_eq!(size_of::<Option<DeviceBuffer<u8>>>(), size_of::<DeviceBuffer<u8>>());
        assert_eq!(size_of::<Option<DeviceBuffer<u8, &StreamAllocator>>>(), size_of::<DeviceBuffer<u8>>());
    }
}
