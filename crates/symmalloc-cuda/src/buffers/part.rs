//! Owned parts of a buffer.
//!
//! ```text
//!  DeviceBuffer ── into_part ──► BufferPart ── split_off ──► BufferPart, BufferPart     disjoint, written by their owners
//!                                    │ ▲
//!                        into_shared ▼ │ try_into_part, by the last one
//!                                SharedPart ── clone, slice ──► SharedPart, ...         may overlap, read-only
//! ```
//! All parts of a buffer belong to one allocation, which is freed when the last part is dropped. Each [`BufferPart`] tracks separately
//! which streams used it, so streams that work on different parts do not wait for each other.

use super::tracked_block::{TrackedBlockRef, TrackedPart};
use super::uses::AccessMode;
use super::view::{BufferView, BufferViewMut, KernelArg, try_within, within};
use crate::backend::CudaBackend;
use crate::pools::{StreamAllocator, StreamAllocatorRef};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

/// An exclusively owned part of a buffer. [`DeviceBuffer::into_part`](crate::DeviceBuffer::into_part) creates the first part.
///
/// # Examples
/// ```no_run
/// # use symmalloc_cuda::{CudaAllocator, CudaDevice};
/// # let device = CudaDevice::new(0)?;
/// # let allocator = CudaAllocator::new(&device, Default::default())?;
/// let (a, b) = (device.context().new_stream()?, device.context().new_stream()?);
/// allocator.register_stream(&b)?;
/// let mut keys = allocator.alloc_zeros::<f32>(&a, 8192)?.into_part();
/// let mut values = keys.split_off(4096); // both have 4096 elements now
/// std::thread::scope(|scope| {
///     scope.spawn(|| a.memcpy_htod(&[1.0; 4096], &mut keys));
///     scope.spawn(|| b.memcpy_htod(&[2.0; 4096], &mut values)); // waits for the zeros, not for the other copy
/// });
/// let values = values.into_shared();
/// let (first, second) = values.split_at(2048); // owned as well, and only read
/// drop(values);
/// # let _ = (first, second);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BufferPart<T, A: StreamAllocatorRef<Memory = CudaBackend> = Arc<StreamAllocator>> {
    part: TrackedPart<A>,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

/// A read-only, reference-counted part of a buffer. Each clone and each slice holds one reference.
pub struct SharedPart<T, A: StreamAllocatorRef<Memory = CudaBackend> = Arc<StreamAllocator>> {
    part: Arc<TrackedPart<A>>,
    /// Address of the first byte; 0 if the buffer is empty.
    pointer: CUdeviceptr,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> BufferPart<T, A> {
    pub(super) fn of(part: TrackedPart<A>, len: usize) -> Self {
        BufferPart { part, len, elements: PhantomData }
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes the elements from `at` on and returns them, as `Vec::split_off` does.
    ///
    /// If other streams used the part, the buffer's stream waits for them.
    ///
    /// # Panics
    /// Panics if `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let len = self.len;
        self.try_split_off(at).unwrap_or_else(|| panic!("{at} is beyond the end of a part of {len} elements"))
    }

    /// Like [`split_off`](Self::split_off), but returns `None` if `at` is beyond the end.
    pub fn try_split_off(&mut self, at: usize) -> Option<Self> {
        let len = self.len.checked_sub(at)?;
        let others = self.part.behind((at * size_of::<T>()) as u64);
        self.len = at;
        Some(Self::of(others, len))
    }

    /// Converts the part into a read-only part with any number of owners.
    pub fn into_shared(self) -> SharedPart<T, A> {
        let pointer = self.part.as_ref().address();
        SharedPart { part: Arc::new(self.part), pointer, len: self.len, elements: PhantomData }
    }

    /// Returns a read-only view of the whole part.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.part.as_ref(), 0, self.len)
    }

    /// Returns a writable view of the whole part.
    pub fn as_view_mut(&mut self) -> BufferViewMut<'_, T> {
        BufferViewMut::new(self.part.as_ref(), 0, self.len)
    }

    /// Like [`DeviceBuffer::on`](crate::DeviceBuffer::on).
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr_mut(stream);
        KernelArg::new(pointer, guard)
    }

    /// Like [`DeviceBuffer::read_on`](crate::DeviceBuffer::read_on).
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr(stream);
        KernelArg::new(pointer, guard)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> SharedPart<T, A> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a subrange as an owned part.
    ///
    /// # Panics
    /// Panics if the bounds are not within the part, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> Self {
        self.within(within(self.len, bounds))
    }

    /// Returns a subrange as an owned part, or `None` if the bounds are not within the part.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<Self> {
        Some(self.within(try_within(self.len, bounds)?))
    }

    /// Returns the elements before `mid` and the elements from `mid` on.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (Self, Self) {
        (self.slice(..mid), self.slice(mid..))
    }

    /// Returns the elements before `mid` and the elements from `mid` on, or `None` if `mid` is beyond the end.
    pub fn try_split_at(&self, mid: usize) -> Option<(Self, Self)> {
        Some((self.try_slice(..mid)?, self.try_slice(mid..)?))
    }

    /// Converts the part back into an exclusively owned part, if it holds the last reference to the part that was shared.
    ///
    /// # Errors
    /// Returns the part itself if other clones or slices still hold references.
    pub fn try_into_part(self) -> Result<BufferPart<T, A>, Self> {
        let (pointer, len) = (self.pointer, self.len);
        match Arc::try_unwrap(self.part) {
            Ok(mut part) => {
                part.begin_at(pointer);
                Ok(BufferPart::of(part, len))
            }
            Err(part) => Err(SharedPart { part, pointer, len, elements: PhantomData }),
        }
    }

    /// Returns a view of the whole part.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.block(), self.pointer - self.block().address(), self.len)
    }

    /// Like [`DeviceBuffer::read_on`](crate::DeviceBuffer::read_on).
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr(stream);
        KernelArg::new(pointer, guard)
    }

    fn within(&self, range: Range<usize>) -> Self {
        let pointer = match self.pointer {
            0 => 0,
            pointer => pointer + (range.start * size_of::<T>()) as u64,
        };
        SharedPart { part: Arc::clone(&self.part), pointer, len: range.len(), elements: PhantomData }
    }

    fn block(&self) -> TrackedBlockRef<'_> {
        self.part.as_ref().as_ref()
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> Clone for SharedPart<T, A> {
    fn clone(&self) -> Self {
        self.within(0..self.len)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceSlice<T> for BufferPart<T, A> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.part.as_ref().stream()
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceSlice<T> for SharedPart<T, A> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.block().stream()
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DevicePtr<T> for BufferPart<T, A> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.as_view().view_ptr(stream)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DevicePtrMut<T> for BufferPart<T, A> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.as_view_mut().view_ptr_mut(stream)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DevicePtr<T> for SharedPart<T, A> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.as_view().view_ptr(stream)
    }
}

// SAFETY: pushes the address of a pointer that lives as long as the arguments; kernels take pointers by value. `LaunchArgs` does not reveal
// the stream of the launch. The contract of `launch` requires that it is the buffer's stream, and that the kernel writes only arguments
// that were passed as `&mut`.
unsafe impl<'a, 'b: 'a, T, A: StreamAllocatorRef<Memory = CudaBackend>> PushKernelArg<&'b BufferPart<T, A>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, arg: &'b BufferPart<T, A>) -> &mut Self {
        arg.part.as_ref().use_on_own_stream(AccessMode::Read);
        self.arg(arg.part.address_ref())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T, A: StreamAllocatorRef<Memory = CudaBackend>> PushKernelArg<&'b mut BufferPart<T, A>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut BufferPart<T, A>) -> &mut Self {
        arg.part.as_ref().use_on_own_stream(AccessMode::Write);
        self.arg(arg.part.address_ref())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T, A: StreamAllocatorRef<Memory = CudaBackend>> PushKernelArg<&'b SharedPart<T, A>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, arg: &'b SharedPart<T, A>) -> &mut Self {
        arg.block().use_on_own_stream(AccessMode::Read);
        self.arg(&arg.pointer)
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> fmt::Debug for BufferPart<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pointer = self.part.as_ref().address();
        f.debug_struct("BufferPart").field("pointer", &format_args!("{pointer:#x}")).field("len", &self.len).finish()
    }
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> fmt::Debug for SharedPart<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pointer = self.pointer;
        f.debug_struct("SharedPart").field("pointer", &format_args!("{pointer:#x}")).field("len", &self.len).finish()
    }
}
