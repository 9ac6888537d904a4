//! Views: borrowed parts of a [`DeviceBuffer`](crate::DeviceBuffer). They belong to the buffer's stream, and their uses are recorded with
//! the buffer.

use super::tracked_block::TrackedBlockRef;
use super::uses::AccessMode;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};
use std::sync::Arc;

/// A read-only view of a buffer. It has the methods of a `CudaView`.
pub struct BufferView<'b, T> {
    block: TrackedBlockRef<'b>,
    start_bytes: u64,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

/// A writable view of a buffer. No other view overlaps it. It has the methods of a `CudaViewMut`.
///
/// Streams are ordered for the buffer as a whole. If several streams write disjoint parts at the same time, submit the work on one stream
/// before taking the pointer for the next one. Alternatively, convert the buffer into a [part](crate::DeviceBuffer::into_part) and split
/// it: parts are ordered independently of each other.
pub struct BufferViewMut<'b, T> {
    /// Shared by the disjoint parts of a split. Each part derives from the `&mut` borrow that created the first view.
    block: TrackedBlockRef<'b>,
    start_bytes: u64,
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
    pub(super) fn new(block: TrackedBlockRef<'b>, start_bytes: u64, len: usize) -> Self {
        BufferView { block, start_bytes, len, elements: PhantomData }
    }

    fn part(&self, part: Range<usize>) -> Self {
        Self::new(self.block, offset_of::<T>(self.start_bytes, part.start), part.len())
    }

    /// Returns a view of a subrange.
    ///
    /// # Panics
    /// Panics if the bounds are not within the view, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'b, T> {
        self.part(within(self.len, bounds))
    }

    /// Returns a view of a subrange, or `None` if the bounds are not within the view.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<BufferView<'b, T>> {
        Some(self.part(try_within(self.len, bounds)?))
    }

    /// Returns views of the elements before `mid` and of the elements from `mid` on.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> (BufferView<'b, T>, BufferView<'b, T>) {
        (self.slice(..mid), self.slice(mid..))
    }

    /// Returns views of the elements before `mid` and of the elements from `mid` on, or `None` if `mid` is beyond the end.
    pub fn try_split_at(&self, mid: usize) -> Option<(BufferView<'b, T>, BufferView<'b, T>)> {
        Some((self.try_slice(..mid)?, self.try_slice(mid..)?))
    }

    /// Returns an iterator over consecutive views of `chunk_size` elements each.
    ///
    /// # Panics
    /// Panics if the chunks do not divide the view evenly, as `CudaView::chunks_exact` does.
    pub fn chunks_exact(&self, chunk_size: usize) -> impl Iterator<Item = BufferView<'b, T>> + 'b
    where
        T: 'b,
    {
        let view = *self;
        chunks(self.len, chunk_size).map(move |part| view.part(part))
    }

    /// Returns a view of the same memory as `len` elements of type `S`. Returns `None` if the view has fewer bytes, or its first byte is
    /// not aligned for `S`.
    ///
    /// # Safety
    /// The bytes must be valid elements of `S` wherever they are read as such.
    pub unsafe fn transmute<S>(&self, len: usize) -> Option<BufferView<'b, S>> {
        can_be::<T, S>(self.block, self.start_bytes, self.len, len)
            .then(|| BufferView::new(self.block, self.start_bytes, len))
    }

    /// Like [`DeviceBuffer::read_on`](crate::DeviceBuffer::read_on).
    pub fn read_on<'a>(&'a self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr(stream);
        KernelArg::new(pointer, guard)
    }

    /// Like [`DevicePtr::device_ptr`], but consumes the view, so that the guard can live as long as the buffer is borrowed.
    pub fn view_ptr(self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        (self.pointer(), self.block.begin(stream, AccessMode::Read))
    }

    /// Returns the block of the view, the address of the first byte, and the number of elements.
    pub(super) fn into_raw(self) -> (TrackedBlockRef<'b>, CUdeviceptr, usize) {
        (self.block, self.pointer(), self.len)
    }

    #[inline]
    fn pointer(&self) -> CUdeviceptr {
        self.block.address() + self.start_bytes
    }
}

impl<'b, T> BufferViewMut<'b, T> {
    /// Creates a view of a part that the caller has borrowed mutably.
    #[inline]
    pub(super) fn new(block: TrackedBlockRef<'b>, start_bytes: u64, len: usize) -> Self {
        BufferViewMut { block, start_bytes, len, elements: PhantomData }
    }

    /// Returns a read-only view of the same part.
    pub fn as_view(&self) -> BufferView<'_, T> {
        BufferView::new(self.block, self.start_bytes, self.len)
    }

    /// Converts the view into a read-only view of the same part.
    pub fn into_view(self) -> BufferView<'b, T> {
        BufferView::new(self.block, self.start_bytes, self.len)
    }

    /// Returns a read-only view of a subrange.
    ///
    /// # Panics
    /// Panics if the bounds are not within the view, as slices do.
    pub fn slice(&self, bounds: impl RangeBounds<usize>) -> BufferView<'_, T> {
        self.as_view().slice(bounds)
    }

    /// Returns a read-only view of a subrange, or `None` if the bounds are not within the view.
    pub fn try_slice(&self, bounds: impl RangeBounds<usize>) -> Option<BufferView<'_, T>> {
        self.as_view().try_slice(bounds)
    }

    /// Returns a writable view of a subrange, which borrows this view.
    ///
    /// # Panics
    /// Panics if the bounds are not within the view, as slices do.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'_, T> {
        self.reborrow().into_slice(bounds)
    }

    /// Returns a writable view of a subrange, which borrows this view, or `None` if the bounds are not within the view.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<BufferViewMut<'_, T>> {
        self.reborrow().try_into_slice(bounds)
    }

    /// Converts the view into a view of a subrange.
    ///
    /// # Panics
    /// Panics if the bounds are not within the view, as slices do.
    pub fn into_slice(self, bounds: impl RangeBounds<usize>) -> BufferViewMut<'b, T> {
        let part = within(self.len, bounds);
        self.into_part(part)
    }

    /// Converts the view into a view of a subrange. Returns `None` if the bounds are not within the view.
    pub fn try_into_slice(self, bounds: impl RangeBounds<usize>) -> Option<BufferViewMut<'b, T>> {
        let part = try_within(self.len, bounds)?;
        Some(self.into_part(part))
    }

    /// Returns writable views of the elements before `mid` and of the elements from `mid` on, which borrow this view.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn split_at_mut(&mut self, mid: usize) -> (BufferViewMut<'_, T>, BufferViewMut<'_, T>) {
        self.reborrow().into_split_at(mid)
    }

    /// Returns writable views of the elements before `mid` and of the elements from `mid` on, which borrow this view, or `None` if `mid` is
    /// beyond the end.
    pub fn try_split_at_mut(&mut self, mid: usize) -> Option<(BufferViewMut<'_, T>, BufferViewMut<'_, T>)> {
        (mid <= self.len).then(|| self.split_at_mut(mid))
    }

    /// Converts the view into views of the elements before `mid` and of the elements from `mid` on.
    ///
    /// # Panics
    /// Panics if `mid` is beyond the end.
    pub fn into_split_at(self, mid: usize) -> (BufferViewMut<'b, T>, BufferViewMut<'b, T>) {
        assert!(mid <= self.len, "mid {mid} is beyond the end of a view of {} elements", self.len);
        let BufferViewMut { block, start_bytes, len, .. } = self;
        (Self::new(block, start_bytes, mid), Self::new(block, offset_of::<T>(start_bytes, mid), len - mid))
    }

    /// Converts the view into an iterator over consecutive views of `chunk_size` elements each.
    ///
    /// # Panics
    /// Panics if the chunks do not divide the view evenly, as `CudaViewMut::chunks_exact_mut` does.
    pub fn chunks_exact_mut(self, chunk_size: usize) -> impl Iterator<Item = BufferViewMut<'b, T>>
    where
        T: 'b,
    {
        let BufferViewMut { block, start_bytes, len, .. } = self;
        chunks(len, chunk_size)
            .map(move |part| BufferViewMut::new(block, offset_of::<T>(start_bytes, part.start), part.len()))
    }

    /// Like [`BufferView::transmute`].
    ///
    /// # Safety
    /// See [`BufferView::transmute`].
    pub unsafe fn transmute<S>(&self, len: usize) -> Option<BufferView<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view().transmute(len) }
    }

    /// Like [`BufferView::transmute`], for writing.
    ///
    /// # Safety
    /// See [`BufferView::transmute`]. In addition, values written as `S` must be valid elements of `T` wherever they are read as such.
    pub unsafe fn transmute_mut<S>(&mut self, len: usize) -> Option<BufferViewMut<'_, S>> {
        // SAFETY: the caller's contract.
        unsafe { self.reborrow().into_transmuted(len) }
    }

    /// Like [`transmute_mut`](Self::transmute_mut), but consumes this view.
    ///
    /// # Safety
    /// See [`transmute_mut`](Self::transmute_mut).
    pub(super) unsafe fn into_transmuted<S>(self, len: usize) -> Option<BufferViewMut<'b, S>> {
        can_be::<T, S>(self.block, self.start_bytes, self.len, len)
            .then(|| BufferViewMut::new(self.block, self.start_bytes, len))
    }

    /// Like [`DeviceBuffer::on`](crate::DeviceBuffer::on).
    pub fn on<'a>(&'a mut self, stream: &'a CudaStream) -> KernelArg<'a> {
        let (pointer, guard) = self.device_ptr_mut(stream);
        KernelArg::new(pointer, guard)
    }

    /// Like [`DevicePtr::device_ptr`], but consumes the view, so that the guard can live as long as the buffer is borrowed.
    pub fn view_ptr(self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        self.into_view().view_ptr(stream)
    }

    /// Like [`DevicePtrMut::device_ptr_mut`], but consumes the view, so that the guard can live as long as the buffer is borrowed.
    pub fn view_ptr_mut(self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        (self.pointer(), self.block.begin(stream, AccessMode::Write))
    }

    fn reborrow(&mut self) -> BufferViewMut<'_, T> {
        BufferViewMut::new(self.block, self.start_bytes, self.len)
    }

    fn into_part(self, part: Range<usize>) -> BufferViewMut<'b, T> {
        Self::new(self.block, offset_of::<T>(self.start_bytes, part.start), part.len())
    }

    #[inline]
    fn pointer(&self) -> CUdeviceptr {
        self.block.address() + self.start_bytes
    }
}

/// Returns the offset in bytes of the element at `index`.
#[inline]
fn offset_of<T>(start_bytes: u64, index: usize) -> u64 {
    start_bytes + (index * size_of::<T>()) as u64
}

/// Returns `true` if `elements` elements of `T` at this offset have room for `len` aligned elements of `S`.
fn can_be<T, S>(block: TrackedBlockRef<'_>, start_bytes: u64, elements: usize, len: usize) -> bool {
    let fits = len.checked_mul(size_of::<S>()).is_some_and(|bytes| bytes <= elements * size_of::<T>());
    fits && (block.address() + start_bytes).is_multiple_of(align_of::<S>() as u64)
}

/// Returns the consecutive ranges of `size` elements each in `0..len`.
#[track_caller]
fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    assert!(size > 0 && len.is_multiple_of(size), "chunks of {size} do not divide a view of {len} elements evenly");
    (0..len / size).map(move |index| index * size..(index + 1) * size)
}

/// Resolves bounds to a range within `0..len`, and panics if they are not within it.
#[track_caller]
pub(super) fn within(len: usize, bounds: impl RangeBounds<usize>) -> Range<usize> {
    let Range { start, end } = range_of(len, bounds);
    assert!(start <= end && end <= len, "{start}..{end} is not within a view of {len} elements");
    start..end
}

/// Resolves bounds to a range within `0..len`, or returns `None` if they are not within it.
pub(super) fn try_within(len: usize, bounds: impl RangeBounds<usize>) -> Option<Range<usize>> {
    Some(range_of(len, bounds)).filter(|range| range.start <= range.end && range.end <= len)
}

fn range_of(len: usize, bounds: impl RangeBounds<usize>) -> Range<usize> {
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
    start..end
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
        (self.pointer(), self.block.begin(stream, AccessMode::Read))
    }
}

impl<T> DevicePtr<T> for BufferViewMut<'_, T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.pointer(), self.block.begin(stream, AccessMode::Read))
    }
}

impl<T> DevicePtrMut<T> for BufferViewMut<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (self.pointer(), self.block.begin(stream, AccessMode::Write))
    }
}

impl<T> fmt::Debug for BufferView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferView")
            .field("start_bytes", &self.start_bytes)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for BufferViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferViewMut")
            .field("start_bytes", &self.start_bytes)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A buffer as a kernel argument. Keep it alive until the kernel is launched. See [`DeviceBuffer::on`](crate::DeviceBuffer::on).
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

    /// Returns the address of the first byte.
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
