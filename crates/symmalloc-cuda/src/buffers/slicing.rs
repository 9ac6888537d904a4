//! Parts of a buffer that borrow it, by the names that cudarc gives the same on `CudaSlice`.

use super::device_buffer::DeviceBuffer;
use super::view::{BufferView, BufferViewMut};
use crate::backend::CudaBackend;
use crate::pools::StreamAllocatorRef;
use std::ops::RangeBounds;

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// A part of it.
    ///
    /// # Panics
    /// When the bounds are not within the buffer, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'_, T> {
        self.as_view().slice(bounds)
    }

    /// A part of it; `None` when the bounds are not within the buffer.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<BufferView<'_, T>> {
        self.as_view().try_slice(bounds)
    }

    /// A part of it, to be written.
    ///
    /// # Panics
    /// When the bounds are not within the buffer, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        self.as_view_mut().into_slice(bounds)
    }

    /// A part of it, to be written; `None` when the bounds are not within the buffer.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<BufferViewMut<'_, T>> {
        self.as_view_mut().try_into_slice(bounds)
    }

    /// The elements before `mid`, and the others.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (BufferView<'_, T>, BufferView<'_, T>) {
        self.as_view().split_at(mid)
    }

    /// The elements before `mid`, and the others; `None` when `mid` is beyond the end.
    pub fn try_split_at(&self, mid: usize) -> Option<(BufferView<'_, T>, BufferView<'_, T>)> {
        self.as_view().try_split_at(mid)
    }

    /// The elements before `mid`, and the others, to be written.
    ///
    /// # Panics
    /// When `mid` is beyond the end.
    pub fn split_at_mut(&mut self, mid: usize) -> (BufferViewMut<'_, T>, BufferViewMut<'_, T>) {
        self.as_view_mut().into_split_at(mid)
    }

    /// The elements before `mid`, and the others, to be written; `None` when `mid` is beyond the end.
    pub fn try_split_at_mut(&mut self, mid: usize) -> Option<(BufferViewMut<'_, T>, BufferViewMut<'_, T>)> {
        (mid <= self.len()).then(|| self.split_at_mut(mid))
    }

    /// As [`BufferView::transmute`].
    ///
    /// # Safety
    /// As [`BufferView::transmute`].
    pub unsafe fn transmute<S>(&self, len: usize) -> Option<BufferView<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view().transmute(len) }
    }

    /// As [`BufferViewMut::transmute_mut`].
    ///
    /// # Safety
    /// As [`BufferViewMut::transmute_mut`].
    pub unsafe fn transmute_mut<S>(&mut self, len: usize) -> Option<BufferViewMut<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view_mut().into_transmuted(len) }
    }
}
