//! Borrowed parts of a [`DeviceBuffer`](crate::DeviceBuffer). They use the buffer's stream, and record uses with it.

use super::tracked_block::TrackedBlockRef;
use super::uses::AccessMode;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

/// A part of a buffer.
pub struct BufferView<'b, T> {
    block: TrackedBlockRef<'b>,
    start: usize,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

/// A part of a buffer that may be written. No other view overlaps it.
pub struct BufferViewMut<'b, T> {
    /// Shared by the disjoint parts of a split; each is borrowed from the one `&mut` that made the first.
    block: TrackedBlockRef<'b>,
    start: usize,
    len: usize,
    elements: PhantomData<fn(T) -> T>,
}

impl<T> Clone for BufferView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for BufferView<'_, T> {}

impl<'b, T> BufferView<'b, T> {
    #[inline]
    pub(super) fn new(block: TrackedBlockRef<'b>, start: usize, len: usize) -> Self {
        BufferView { block, start, len, elements: PhantomData }
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'b, T> {
        let part = within(self.len, bounds);
        BufferView::new(self.block, self.start + part.start, part.len())
    }

    /// The elements before `mid`, and the others.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (BufferView<'b, T>, BufferView<'b, T>) {
        (self.slice(..mid), self.slice(mid..))
    }

    /// As [`DeviceBuffer::read_on`](crate::DeviceBuffer::read_on).
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr(stream);
        KernelArg::new(pointer, guard)
    }
}

impl<'b, T> BufferViewMut<'b, T> {
    /// The caller has borrowed the part mutably.
    #[inline]
    pub(super) fn new(block: TrackedBlockRef<'b>, start: usize, len: usize) -> Self {
        BufferViewMut { block, start, len, elements: PhantomData }
    }

    /// The same part, to be read.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.block, self.start, self.len)
    }

    /// A part of it, for as long as this view is borrowed.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        let part = within(self.len, bounds);
        BufferViewMut::new(self.block, self.start + part.start, part.len())
    }

    /// A part of it, in place of the whole.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn into_slice(self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'b, T> {
        let part = within(self.len, bounds);
        BufferViewMut::new(self.block, self.start + part.start, part.len())
    }

    /// The elements before `mid`, and the others.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at_mut(self, mid: usize) -> (BufferViewMut<'b, T>, BufferViewMut<'b, T>) {
        assert!(mid <= self.len, "mid {mid} is beyond the end of a view of {} elements", self.len);
        let BufferViewMut { block, start, len, .. } = self;
        (Self::new(block, start, mid), Self::new(block, start + mid, len - mid))
    }

    /// As [`DeviceBuffer::on`](crate::DeviceBuffer::on).
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr_mut(stream);
        KernelArg::new(pointer, guard)
    }
}

/// The part of `0..len` that the bounds mean.
#[track_caller]
fn within(len: usize, bounds: impl RangeBounds<usize>) -> Range<usize> {
    let start = match bounds.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match bounds.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "{start}..{end} is not within a view of {len} elements");
    start..end
}

/// The first byte of an element; 0 when there are no bytes.
#[inline]
fn pointer_at<T>(block: TrackedBlockRef<'_>, index: usize) -> CUdeviceptr {
    block.address() + (index * size_of::<T>()) as u64
}

impl<T> DeviceSlice<T> for BufferView<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.block.stream()
    }
}

impl<T> DeviceSlice<T> for BufferViewMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.block.stream()
    }
}

impl<T> DevicePtr<T> for BufferView<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (pointer_at::<T>(self.block, self.start), self.block.begin(stream, AccessMode::Read))
    }
}

impl<T> DevicePtr<T> for BufferViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (pointer_at::<T>(self.block, self.start), self.block.begin(stream, AccessMode::Read))
    }
}

impl<T> DevicePtrMut<T> for BufferViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (pointer_at::<T>(self.block, self.start), self.block.begin(stream, AccessMode::Write))
    }
}

impl<T> fmt::Debug for BufferView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferView").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for BufferViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferViewMut").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

/// A buffer as a kernel's argument; keep it until the kernel is launched. See [`DeviceBuffer::on`](crate::DeviceBuffer::on).
#[derive(Debug)]
#[must_use]
pub struct KernelArg<'a> {
    pointer: CUdeviceptr,
    _guard: SyncOnDrop<'a>,
}

impl<'a> KernelArg<'a> {
    pub(super) fn new(pointer: CUdeviceptr, guard: SyncOnDrop<'a>) -> Self {
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
