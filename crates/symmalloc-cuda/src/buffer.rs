//! Buffers of device memory that go wherever a `CudaSlice` goes.

use crate::allocator::CudaAllocator;
use crate::backend::CudaBackend;
use crate::block::{Block, free, free_behind_uses};
use crate::error::{CudaError, DriverError};
use crate::lane::Lane;
use crate::uses::{Access, Uses};
use crate::view::{BufferView, BufferViewMut};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop,
    ValidAsZeroBits,
};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::RangeBounds;
use std::sync::Arc;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::{Handle, StreamId};

/// `len` elements of device memory, freed when dropped: at once for the allocator, behind all uses for the device. Dropping
/// never blocks and never panics; errors are counted by [`CachingAllocator::drop_errors`](crate::CachingAllocator::drop_errors).
/// Memory goes back to the device, which may block, only where the program says so: in `trim`, above a release threshold that
/// a pool has, and with the last owner of the allocator.
///
/// It may be dropped on any thread: one that cannot enter the heap at once leaves the free to who comes next, who finds it
/// done.
///
/// A buffer that other streams used is fenced by an event on each of them, which stands for the work that they were given until
/// the drop; if more such buffers are dropped right behind it, until the last of these.
///
/// It implements cudarc's [`DeviceSlice`], [`DevicePtr`] and [`DevicePtrMut`], so copies, memset, cuBLAS and NCCL take it.
/// Taking its pointer on another stream than its own records the use and orders the streams. A kernel launch does not say
/// on which stream it is, so give it [`on`](DeviceBuffer::on) or [`read_on`](DeviceBuffer::read_on). On the buffer's own
/// stream the buffer itself is an argument as well: `&mut` when the kernel writes it, `&` when it only reads.
pub struct DeviceBuffer<T> {
    pub(crate) block: Block<CudaBackend>,
    pub(crate) uses: Uses,
    len: usize,
    elements: PhantomData<*const T>,
}

// SAFETY: like `CudaSlice`: the host never dereferences the memory, and the device's work is ordered by streams. The elements
// are plain data to the device, so `T` does not matter.
unsafe impl<T> Send for DeviceBuffer<T> {}
// SAFETY: as above; what changes through a shared buffer is behind a lock.
unsafe impl<T> Sync for DeviceBuffer<T> {}

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
        let block = match self.block_at_hand::<T>(stream, len) {
            Some(block) => block,
            None => self.block::<T>(stream, len)?,
        };
        Ok(DeviceBuffer::from_block(block, len))
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
        self.named_buffer(stream, len, name)
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
        // SAFETY: it is written before anything reads it.
        let buffer = unsafe { self.alloc(stream, len) }?;
        buffer.fill_with_zeros()?;
        Ok(buffer)
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
        let buffer = self.named_buffer(stream, len, name)?;
        buffer.fill_with_zeros()?;
        Ok(buffer)
    }

    fn named_buffer<T>(&self, stream: &Arc<CudaStream>, len: usize, name: &str) -> Result<DeviceBuffer<T>, CudaError> {
        Ok(DeviceBuffer::from_block(self.block_on::<T>(self.lane(stream)?, len, Some(name))?, len))
    }
}

impl<T> DeviceBuffer<T> {
    #[inline]
    fn from_block(block: Block<CudaBackend>, len: usize) -> Self {
        DeviceBuffer { block, uses: Uses::default(), len, elements: PhantomData }
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
        self.block.handle
    }

    /// Where it lies; equal on all ranks.
    pub fn placement(&self) -> symmalloc_core::Placement {
        let allocation = self.block.state().core.allocation(self.block.handle);
        allocation.map_or(symmalloc_core::Placement::NOWHERE, |it| it.placement)
    }

    /// The buffer as an argument of a kernel that is launched on `stream`: records the use and orders the streams, as
    /// taking its pointer does.
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        let guard = self.uses.begin(&self.block, stream, Access::Write);
        KernelArg::new(self.block.address, guard)
    }

    /// As [`on`](Self::on), for kernels that only read it.
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let guard = self.uses.begin(&self.block, stream, Access::Read);
        KernelArg::new(self.block.address, guard)
    }

    /// All of it.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self, 0, self.len)
    }

    /// All of it, to be written.
    pub fn as_view_mut(&mut self) -> BufferViewMut<'_, T> {
        let len = self.len;
        BufferViewMut::new(self, 0, len)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the bounds are not within the buffer, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'_, T> {
        self.as_view().slice(bounds)
    }

    /// A part of it, to be written.
    ///
    /// # Panics
    /// When the bounds are not within the buffer, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        self.as_view_mut().into_slice(bounds)
    }

    /// Takes the buffer apart. It is not freed before [`from_raw`](Self::from_raw) puts it together again, or its handle is
    /// freed with the allocator.
    ///
    /// # Errors
    /// When uses by streams that are not registered cannot be ordered; the buffer is dropped then.
    pub fn into_raw(mut self) -> Result<RawDeviceBuffer, CudaError> {
        self.uses.settle(self.block.lane()).map_err(DriverError::from)?;
        let uses = self.uses.take();
        if !uses.are_none() {
            // Who puts it together again does not know of them, and must not leave the free to others.
            let Lane { state, heap, .. } = self.block.lane();
            state.core.close_mail(heap);
        }
        uses.forget();
        let Block { handle, address: pointer, .. } = self.block;
        let raw = RawDeviceBuffer { handle, pointer, len: self.len, stream: self.block.lane().stream };
        drop(self.block.let_go());
        Ok(raw)
    }

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
        let lane = allocator.lane_of(stream).expect("the buffer's stream is registered, and the pool not destroyed");
        let lane = ManuallyDrop::new(Some(lane));
        Self::from_block(Block::of(lane, handle, DeviceAddress(pointer)), len)
    }

    /// Never frees it, and returns its pointer. The memory stays in its segment until the allocator's last owner is gone.
    pub fn leak(mut self) -> CUdeviceptr {
        if let Some(lane) = self.block.let_go() {
            self.uses.take().end(&lane);
        }
        self.block.address
    }

    fn fill_with_zeros(&self) -> Result<(), CudaError> {
        let size_bytes = self.len * size_of::<T>();
        if size_bytes == 0 {
            return Ok(());
        }
        let stream = self.stream();
        let device = &self.block.state().order().device;
        let _current = device.enter()?;
        // SAFETY: the buffer has this many bytes, and the stream that it was allocated on is ordered behind earlier uses.
        Ok(unsafe { device.driver.memset_async(self.block.address, 0, size_bytes, stream.cu_stream()) }?)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(lane) = self.block.let_go() {
            free_used(lane, self.block.handle, self.uses.take());
        }
    }
}

/// Frees a buffer's allocation behind its uses. Takes words and no buffer, which then need not lie in memory to be dropped.
#[inline(never)]
fn free_used(lane: Arc<Lane<CudaBackend>>, handle: Handle, uses: Uses) {
    // If it fails, nothing orders the next user behind a stream that may still use the memory: it stays allocated.
    if uses.are_none() {
        free(lane, handle);
    } else if uses.end(&lane) {
        free_behind_uses(lane, handle);
    }
}

impl<T> DeviceSlice<T> for DeviceBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.block.lane().raw.as_ref().expect("device memory is not the host's")
    }
}

impl<T> DevicePtr<T> for DeviceBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.block.address, self.uses.begin(&self.block, stream, Access::Read))
    }
}

impl<T> DevicePtrMut<T> for DeviceBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.block.address, self.uses.begin(&self.block, stream, Access::Write))
    }
}

/// A buffer as a kernel's argument; keep it until the kernel is launched. See [`DeviceBuffer::on`].
#[derive(Debug)]
#[must_use]
pub struct KernelArg<'a> {
    pointer: CUdeviceptr,
    _guard: SyncOnDrop<'a>,
}

impl<'a> KernelArg<'a> {
    pub(crate) fn new(pointer: CUdeviceptr, guard: SyncOnDrop<'a>) -> Self {
        KernelArg { pointer, _guard: guard }
    }

    /// The first byte.
    pub fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }
}

// SAFETY: pushes the address of a pointer that lives as long as the arguments; kernels take pointers by value.
unsafe impl<'a, 'b: 'a, 'c: 'b> PushKernelArg<&'b KernelArg<'c>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b KernelArg<'c>) -> &mut Self {
        self.arg(&arg.pointer)
    }
}

// SAFETY: as above. `LaunchArgs` does not show its stream: part of the contract of `launch` is that it is the buffer's own,
// and that the kernel writes only what it got as `&mut`.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceBuffer<T>) -> &mut Self {
        arg.uses.on_own_stream(&arg.block, Access::Read);
        self.arg(&arg.block.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut DeviceBuffer<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBuffer<T>) -> &mut Self {
        arg.uses.on_own_stream(&arg.block, Access::Write);
        self.arg(&arg.block.address)
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("pointer", &format_args!("{:#x}", self.block.address))
            .field("len", &self.len)
            .field("stream", &self.block.lane().stream)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs keep thousands of them, and each is written once and read once.
    #[test]
    fn a_buffer_is_six_words_and_an_optional_one_is_no_larger() {
        assert_eq!(size_of::<DeviceBuffer<u8>>(), 6 * size_of::<u64>());
        assert_eq!(size_of::<Option<DeviceBuffer<u8>>>(), size_of::<DeviceBuffer<u8>>());
    }
}
