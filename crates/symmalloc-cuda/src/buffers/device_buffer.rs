//! Buffers of device memory that can be used wherever a `CudaSlice` can.

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

/// A buffer of `len` elements of device memory, freed when it is dropped.
///
/// The type implements cudarc's [`DeviceSlice`], [`DevicePtr`] and [`DevicePtrMut`], so copies, memset, cuBLAS and NCCL accept it like a
/// `CudaSlice`.
///
/// # Streams
/// Taking the buffer's pointer on a stream other than the buffer's stream records the use and orders the streams. The buffer cannot see on
/// which stream a kernel is launched, so pass the result of [`on`](DeviceBuffer::on) or [`read_on`](DeviceBuffer::read_on) to the kernel
/// instead of the buffer. A kernel that is launched on the buffer's stream can also take the buffer itself as its argument: `&mut` if the
/// kernel writes it, `&` if the kernel only reads it.
///
/// # Dropping
/// A buffer may be dropped on any thread. The allocator can reuse the memory immediately. If other streams used the buffer, the drop
/// records one event on each of them, and the stream of the memory's next user waits for these events, without blocking the host.
///
/// Dropping never waits for the device and never panics, but it may wait for another thread that holds the lock of the same heap.
/// [`CachingAllocator::drop_errors`](crate::CachingAllocator::drop_errors) counts errors. Memory is returned to the device only in `trim`,
/// when a pool holds more than its release threshold, and when the last owner of the allocator is dropped. Returning memory may block.
///
/// # Type parameters
/// `T` is the type of the elements, and `A` the reference to the allocator. Buffers of [`CudaAllocator`] hold a counted reference to the
/// allocator, which keeps its memory alive. Buffers of [`StreamAllocator`] borrow the allocator, which costs nothing. Both kinds of buffers
/// are placed and freed in the same way.
///
/// # Examples
/// ```no_run
/// use symmalloc_core::Config;
/// use symmalloc_cuda::{CudaAllocator, CudaDevice};
///
/// let device = CudaDevice::new(0)?;
/// let (compute, copies) = (device.context().new_stream()?, device.context().new_stream()?);
/// let allocator = CudaAllocator::new(&device, Config::default())?;
///
/// let mut input = allocator.alloc_zeroed::<f32>(&compute, 4096)?;
/// copies.memcpy_htod(&vec![1.0_f32; 4096], &mut input)?; // waits for `compute`, and is recorded as a use
/// let host = compute.clone_dtoh(&input)?; // waits for `copies`
/// drop(input); // the next user of the memory waits for `copies` on the device
/// compute.synchronize()?;
/// assert_eq!(host, vec![1.0_f32; 4096]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DeviceBuffer<T, A: StreamAllocatorRef<Memory = CudaBackend> = Arc<StreamAllocator>> {
    block: TrackedBlock<A>,
    len: usize,
    /// The host never touches the elements and the device treats them as plain data, so threads may share a buffer for any `T`.
    elements: PhantomData<fn() -> T>,
}

/// The raw parts of a [`DeviceBuffer`], for interfaces that carry only plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawDeviceBuffer {
    /// Handle of the allocation.
    pub handle: Handle,
    /// Address of the first byte; 0 if the buffer is empty.
    pub pointer: CUdeviceptr,
    /// Number of elements.
    pub len: usize,
    /// The stream that the buffer was allocated on.
    pub stream: StreamId,
}

impl CudaAllocator {
    /// Allocates a buffer with uninitialized contents.
    ///
    /// # Safety
    /// Nothing may read elements before they are written, unless every bit pattern is a valid `T`.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered or the allocation fails.
    #[inline]
    pub unsafe fn alloc<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, len, None)
    }

    /// Like [`alloc`](Self::alloc), with a name for snapshots and reports.
    ///
    /// # Safety
    /// See [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// See [`alloc`](Self::alloc).
    pub unsafe fn alloc_named<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate(self.for_stream(stream)?, len, Some(name))
    }

    /// Allocates a buffer and fills it with zeros on the stream.
    ///
    /// # Errors
    /// Returns an error if the stream cannot be registered, or the allocation or a driver call fails.
    pub fn alloc_zeroed<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<DeviceBuffer<T>, CudaError> {
        DeviceBuffer::allocate_zeroed(self.for_stream(stream)?, len, None)
    }

    /// Like [`alloc_zeroed`](Self::alloc_zeroed), with a name for snapshots and reports.
    ///
    /// # Errors
    /// See [`alloc_zeroed`](Self::alloc_zeroed).
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
    /// Like [`CudaAllocator::alloc`], on the stream of this allocator. The buffer borrows the allocator.
    ///
    /// # Safety
    /// See [`CudaAllocator::alloc`].
    ///
    /// # Errors
    /// Returns an error if the allocation fails.
    #[inline]
    pub unsafe fn alloc<T: DeviceRepr>(&self, len: usize) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, len, None)
    }

    /// Like [`CudaAllocator::alloc_named`], on the stream of this allocator. The buffer borrows the allocator.
    ///
    /// # Safety
    /// See [`CudaAllocator::alloc`].
    ///
    /// # Errors
    /// Returns an error if the allocation fails.
    pub unsafe fn alloc_named<T: DeviceRepr>(
        &self,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate(&self, len, Some(name))
    }

    /// Like [`CudaAllocator::alloc_zeroed`], on the stream of this allocator. The buffer borrows the allocator.
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn alloc_zeroed<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate_zeroed(&self, len, None)
    }

    /// Like [`CudaAllocator::alloc_zeroed_named`], on the stream of this allocator. The buffer borrows the allocator.
    ///
    /// # Errors
    /// Returns an error if the allocation or a driver call fails.
    pub fn alloc_zeroed_named<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
        name: &str,
    ) -> Result<DeviceBuffer<T, &Self>, CudaError> {
        DeviceBuffer::allocate_zeroed(&self, len, Some(name))
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Allocates a buffer with uninitialized contents.
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

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the handle of the allocation, for the core's reports.
    pub fn handle(&self) -> Handle {
        self.block.block().handle()
    }

    /// Returns the buffer's placement, which is equal on all ranks.
    pub fn placement(&self) -> Placement {
        let allocation = self.block.block().state().core().allocation(self.handle());
        allocation.map_or(Placement::NOWHERE, |it| it.placement)
    }

    /// Returns the buffer as an argument for a kernel that is launched on `stream`. Records the use and orders the streams, as taking the
    /// pointer does.
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        KernelArg::new(self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Write))
    }

    /// Like [`on`](Self::on), for kernels that only read the buffer.
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        KernelArg::new(self.block.block().address(), self.block.as_ref().begin(stream, AccessMode::Read))
    }

    /// Returns the reference to the buffer's allocator.
    #[inline]
    pub(super) fn allocator(&self) -> &A {
        self.block.block().allocator_ref()
    }

    /// Returns a read-only view of the whole buffer.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.block.as_ref(), 0, self.len)
    }

    /// Returns a writable view of the whole buffer.
    pub fn as_view_mut(&mut self) -> BufferViewMut<'_, T> {
        BufferViewMut::new(self.block.as_ref(), 0, self.len)
    }

    /// Converts the buffer into an owned part. Parts outlive this call, can be [split](BufferPart::split_off) and
    /// [shared](BufferPart::into_shared), and free the memory together.
    pub fn into_part(self) -> BufferPart<T, A> {
        BufferPart::of(self.block.into_part(), self.len)
    }

    /// Decomposes the buffer into its raw parts. The memory stays allocated until [`from_raw`](Self::from_raw) restores the buffer and the
    /// buffer is dropped, or the program passes the handle to the allocator's `free`.
    ///
    /// # Errors
    /// Returns an error if the buffer's stream cannot be ordered after uses by unregistered streams. The buffer is dropped in that case.
    pub fn into_raw(mut self) -> Result<RawDeviceBuffer, CudaError> {
        let block = self.block.block();
        let (handle, pointer, stream) = (block.handle(), block.address(), block.allocator().stream_id());
        self.block.disown().map_err(DriverError::from)?;
        Ok(RawDeviceBuffer { handle, pointer, len: self.len, stream })
    }

    /// Leaks the buffer and returns its pointer. The memory stays allocated until the last owner of the allocator is dropped.
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
        // SAFETY: the buffer has this many bytes, and its stream is ordered after earlier uses of the memory.
        Ok(unsafe {
            device.driver().memset_async(block.address(), 0, size_bytes, self.block.as_ref().stream().cu_stream())
        }?)
    }
}

impl<T> DeviceBuffer<T> {
    /// Restores a buffer from its raw parts.
    ///
    /// # Safety
    /// `raw` must come from [`into_raw`](Self::into_raw) of a buffer of this allocator whose elements have the same size, and may be
    /// restored only once. If streams other than the buffer's stream have used the memory since then, the program must have made the
    /// buffer's stream wait for them with [`CachingAllocator::wait`].
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

// SAFETY: pushes the address of a pointer that lives as long as the arguments; kernels take pointers by value. `LaunchArgs` does not reveal
// the stream of the launch. The contract of `launch` requires that it is the buffer's stream, and that the kernel writes only arguments
// that were passed as `&mut`.
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

    /// Programs keep thousands of buffers, so their size matters.
    #[test]
    fn a_buffer_is_four_words_and_a_handle_and_an_optional_one_is_no_larger() {
        assert_eq!(size_of::<DeviceBuffer<u8>>(), 4 * size_of::<u64>() + size_of::<Handle>());
        assert_eq!(size_of::<Option<DeviceBuffer<u8>>>(), size_of::<DeviceBuffer<u8>>());
        assert_eq!(size_of::<Option<DeviceBuffer<u8, &StreamAllocator>>>(), size_of::<DeviceBuffer<u8>>());
    }
}
