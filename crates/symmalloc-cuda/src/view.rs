//! Borrowed parts of a [`DeviceBuffer`]. They use the buffer's stream, and record uses with it.

use crate::buffer::{DeviceBuffer, KernelArg};
use crate::uses::Access;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop};
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

/// A part of a buffer.
#[derive(Debug)]
pub struct BufferView<'b, T> {
    buffer: &'b DeviceBuffer<T>,
    start: usize,
    len: usize,
}

/// A part of a buffer that may be written. No other view overlaps it.
#[derive(Debug)]
pub struct BufferViewMut<'b, T> {
    /// Shared by the disjoint parts of a split; each is borrowed from the one `&mut` that made the first.
    buffer: &'b DeviceBuffer<T>,
    start: usize,
    len: usize,
}

impl<T> Clone for BufferView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for BufferView<'_, T> {}

impl<'b, T> BufferView<'b, T> {
    pub(crate) fn new(buffer: &'b DeviceBuffer<T>, start: usize, len: usize) -> Self {
        BufferView { buffer, start, len }
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'b, T> {
        let part = within(self.len, bounds);
        BufferView { buffer: self.buffer, start: self.start + part.start, len: part.len() }
    }

    /// The elements before `mid`, and the others.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (BufferView<'b, T>, BufferView<'b, T>) {
        (self.slice(..mid), self.slice(mid..))
    }

    /// As [`DeviceBuffer::read_on`].
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr(stream);
        KernelArg::new(pointer, guard)
    }
}

impl<'b, T> BufferViewMut<'b, T> {
    pub(crate) fn new(buffer: &'b mut DeviceBuffer<T>, start: usize, len: usize) -> Self {
        BufferViewMut { buffer, start, len }
    }

    /// The same part, to be read.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView { buffer: self.buffer, start: self.start, len: self.len }
    }

    /// A part of it, for as long as this view is borrowed.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        let part = within(self.len, bounds);
        BufferViewMut { buffer: self.buffer, start: self.start + part.start, len: part.len() }
    }

    /// A part of it, in place of the whole.
    ///
    /// # Panics
    /// When the bounds are not within the view, as slices do.
    pub fn into_slice(self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'b, T> {
        let part = within(self.len, bounds);
        BufferViewMut { buffer: self.buffer, start: self.start + part.start, len: part.len() }
    }

    /// The elements before `mid`, and the others.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at_mut(self, mid: usize) -> (BufferViewMut<'b, T>, BufferViewMut<'b, T>) {
        assert!(mid <= self.len, "mid {mid} is beyond the end of a view of {} elements", self.len);
        let BufferViewMut { buffer, start, len } = self;
        (BufferViewMut { buffer, start, len: mid }, BufferViewMut { buffer, start: start + mid, len: len - mid })
    }

    /// As [`DeviceBuffer::on`].
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

fn pointer_at<T>(buffer: &DeviceBuffer<T>, index: usize) -> CUdeviceptr {
    buffer.block.address + (index * size_of::<T>()) as u64
}

impl<T> DeviceSlice<T> for BufferView<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.buffer.stream()
    }
}

impl<T> DeviceSlice<T> for BufferViewMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }
    fn stream(&self) -> &Arc<CudaStream> {
        self.buffer.stream()
    }
}

impl<T> DevicePtr<T> for BufferView<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let guard = self.buffer.uses.begin(&self.buffer.block, stream, Access::Read);
        (pointer_at(self.buffer, self.start), guard)
    }
}

impl<T> DevicePtr<T> for BufferViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let guard = self.buffer.uses.begin(&self.buffer.block, stream, Access::Read);
        (pointer_at(self.buffer, self.start), guard)
    }
}

impl<T> DevicePtrMut<T> for BufferViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        let guard = self.buffer.uses.begin(&self.buffer.block, stream, Access::Write);
        (pointer_at(self.buffer, self.start), guard)
    }
}
