//! A buffer as a `CudaSlice`, for interfaces that take nothing else.
//!
//! A `CudaSlice` frees its memory through the driver when it is dropped, and the driver has never heard of ours. So it is lent: it
//! stands in a guard that takes it apart instead of dropping it.
//!
//! ```text
//!  lend_on ── the stream waits for earlier uses, its use is noted ── CudaSlice of that stream ── its users
//!  drop    ── the stream waits for what cudarc saw on others ── CudaSlice taken apart, nothing freed
//! ```
//!
//! The block counts its lent slices. If one was forgotten, the host waits for the context before the block is freed.

use super::device_buffer::DeviceBuffer;
use super::tracked_block::TrackedBlockRef;
use super::uses::{AccessMode, Uses};
use super::view::{BufferView, BufferViewMut};
use crate::backend::CudaBackend;
use crate::device::{CudaDevice, RestoreCurrent};
use crate::error::{CudaError, DriverError};
use crate::pools::StreamAllocatorRef;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, SyncOnDrop};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A buffer, or a part of one, lent as a `CudaSlice` to be read. Never frees anything.
///
/// What is read on other streams than the one it was lent on, cudarc sees while its event tracking is on, as with any `CudaSlice`.
/// It remembers the last such reader only, so lend the buffer once for each stream.
#[must_use = "it is lent only as long as this lives"]
pub struct LentSlice<'a, T> {
    /// Taken apart by `drop`.
    slice: ManuallyDrop<CudaSlice<T>>,
    device: &'a CudaDevice,
    /// Counts this slice; `None` when there are no bytes.
    uses: Option<&'a Uses>,
    /// Dropped after the slice was taken apart: what this notes covers all of its uses.
    _use_on_stream: SyncOnDrop<'a>,
}

/// A buffer, or a part of one, lent as a `CudaSlice` to be written. See [`LentSlice`].
#[must_use = "it is lent only as long as this lives"]
pub struct LentSliceMut<'a, T> {
    lent: LentSlice<'a, T>,
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Lends it as a `CudaSlice` of `stream`, to be read.
    ///
    /// A function that takes the `CudaSlice` by value, as candle's `CudaStorage::wrap_cuda_slice` does, would free it through the
    /// driver, and cannot be served.
    ///
    /// # Errors
    /// When the driver makes no events.
    ///
    /// # Examples
    /// ```no_run
    /// # use cudarc::driver::CudaSlice;
    /// # use symmalloc_cuda::{CudaAllocator, CudaDevice};
    /// # let device = CudaDevice::new(0)?;
    /// # let allocator = CudaAllocator::new(&device, Default::default())?;
    /// fn sum(numbers: &CudaSlice<f32>) -> f32 {
    ///     numbers.stream().clone_dtoh(numbers).expect("copied").iter().sum()
    /// }
    /// let stream = device.context().new_stream()?;
    /// let buffer = allocator.clone_htod(&stream, &[1.0_f32, 2.0])?;
    /// assert_eq!(sum(&*buffer.lend_on(&stream)?), 3.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lend_on<'a>(&'a self, stream: &'a Arc<CudaStream>) -> Result<LentSlice<'a, T>, CudaError> {
        self.as_view().lend_on(stream)
    }

    /// Lends it as a `CudaSlice` of `stream`, to be written.
    ///
    /// # Safety
    /// The `CudaSlice` stays in the guard: nobody moves it out by `std::mem::swap` or `replace`. Dropped elsewhere, it would free
    /// memory that is not the driver's to free.
    ///
    /// # Errors
    /// When the driver makes no events.
    pub unsafe fn lend_mut_on<'a>(&'a mut self, stream: &'a Arc<CudaStream>) -> Result<LentSliceMut<'a, T>, CudaError> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view_mut().lend_mut_on(stream) }
    }
}

impl<'b, T> BufferView<'b, T> {
    /// As [`DeviceBuffer::lend_on`].
    ///
    /// # Errors
    /// When the driver makes no events.
    pub fn lend_on(self, stream: &'b Arc<CudaStream>) -> Result<LentSlice<'b, T>, CudaError> {
        let (block, pointer, len) = self.into_raw();
        LentSlice::new(block, pointer, len, stream, AccessMode::Read)
    }
}

impl<'b, T> BufferViewMut<'b, T> {
    /// As [`DeviceBuffer::lend_mut_on`].
    ///
    /// # Safety
    /// As [`DeviceBuffer::lend_mut_on`].
    ///
    /// # Errors
    /// When the driver makes no events.
    pub unsafe fn lend_mut_on(self, stream: &'b Arc<CudaStream>) -> Result<LentSliceMut<'b, T>, CudaError> {
        let (block, pointer, len) = self.into_view().into_raw();
        Ok(LentSliceMut { lent: LentSlice::new(block, pointer, len, stream, AccessMode::Write)? })
    }
}

impl<'a, T> LentSlice<'a, T> {
    fn new(
        block: TrackedBlockRef<'a>,
        pointer: u64,
        len: usize,
        stream: &'a Arc<CudaStream>,
        access: AccessMode,
    ) -> Result<Self, CudaError> {
        let device = block.device();
        let _restore = RestoreCurrent::of(device.driver())?;
        // cudarc panics where the driver makes no event, so it is asked for one first.
        let event = stream.context().new_event(None);
        drop(event.map_err(|error| DriverError { call: "cuEventCreate", code: error.0 as i32 })?);
        let use_on_stream = block.begin(stream, access);
        // SAFETY: the bytes are there as long as the guard borrows them, and it never lets the slice free them. What they hold is
        // what the buffer holds.
        let mut slice = unsafe { stream.upgrade_device_ptr::<T>(pointer, len) };
        // For cudarc the slice is fresh: whoever uses it elsewhere waits for nothing. This notes what the stream has behind it.
        drop(slice.device_ptr_mut(stream));
        Ok(LentSlice {
            slice: ManuallyDrop::new(slice),
            device,
            uses: block.begin_lend(),
            _use_on_stream: use_on_stream,
        })
    }
}

impl<T> Deref for LentSlice<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> Deref for LentSliceMut<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.lent
    }
}

impl<T> DerefMut for LentSliceMut<'_, T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.lent.slice
    }
}

impl<T> Drop for LentSlice<'_, T> {
    fn drop(&mut self) {
        let _restore = RestoreCurrent::of(self.device.driver());
        // SAFETY: taken here only, and not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // Makes its stream wait for uses on others, and frees the events.
        let _pointer = slice.leak();
        if let Some(uses) = self.uses {
            uses.end_lend();
        }
    }
}

impl<T> fmt::Debug for LentSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentSlice").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for LentSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentSliceMut").field("len", &self.lent.slice.len()).finish_non_exhaustive()
    }
}
