//! Parts that borrow a buffer, with the same method names as cudarc's `CudaSlice`.

use super::device_buffer::DeviceBuffer;
use super::view::{BufferView, BufferViewMut};
use crate::backend::CudaBackend;
use crate::pools::StreamAllocatorRef;
use std::ops::RangeBounds;

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Returns a read-only view of a subrange.
    ///
    /// # Panics
    /// Panics if the bounds are not within the buffer, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'_, T> {
        self.as_view().slice(bounds)
    }

    /// Returns a read-only view of a subrange, or `None` if the bounds are not within the buffer.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<BufferView<'_, T>> {
        self.as_view().try_slice(bounds)
    }

    /// Returns a writable view of a subrange.
    ///
    /// # Panics
    /// Panics if the bounds are not within the buffer, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        self.as_view_mut().into_slice(bounds)
    }

    /// Returns a writable view of a subrange, or `None` if the bounds are not within the buffer.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<BufferViewMut<'_, T>> {
        self.as_view_mut().try_into_slice(bounds)
    }

    /// Returns views of the elements before `mid` and of the elements from `mid` on.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (BufferView<'_, T>, BufferView<'_, T>) {
        self.as_view().split_at(mid)
    }

    /// Returns views of the elements before `mid` and of the elements from `mid` on, or `None` if `mid` is beyond the end.
    pub fn try_split_at(&self, mid: usize) -> Option<(BufferView<'_, T>, BufferView<'_, T>)> {
        self.as_view().try_split_at(mid)
    }

    /// Returns writable views of the elements before `mid` and of the elements from `mid` on.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn split_at_mut(&mut self, mid: usize) -> (BufferViewMut<'_, T>, BufferViewMut<'_, T>) {
        self.as_view_mut().into_split_at(mid)
    }

    /// Returns writable views of the elements before `mid` and of the elements from `mid` on, or `None` if `mid` is beyond the end.
    pub fn try_split_at_mut(&mut self, mid: usize) -> Option<(BufferViewMut<'_, T>, BufferViewMut<'_, T>)> {
        (mid <= self.len()).then(|| self.split_at_mut(mid))
    }

    /// Like [`BufferView::transmute`].
    ///
    /// # Safety
    /// See [`BufferView::transmute`].
    pub unsafe fn transmute<S>(&self, len: usize) -> Option<BufferView<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view().transmute(len) }
    }

    /// Like [`BufferViewMut::transmute_mut`].
    ///
    /// # Safety
    /// See [`BufferViewMut::transmute_mut`].
    pub unsafe fn transmute_mut<S>(&mut self, len: usize) -> Option<BufferViewMut<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view_mut().into_transmuted(len) }
    }
}
