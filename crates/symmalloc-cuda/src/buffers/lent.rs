//! Buffers lent as a `CudaSlice`, for interfaces that accept only that type.
//!
//! When a `CudaSlice` is dropped, it frees its memory through the driver. A buffer's memory, however, comes from this crate's allocator.
//! Therefore a guard holds the lent slice, and decomposes it instead of dropping it.
//!
//! ```text
//!  lend_on ── the stream waits for earlier uses, its use is recorded ── CudaSlice of that stream ── its users
//!  drop    ── the stream waits for uses that cudarc saw on others ── CudaSlice decomposed, nothing freed
//! ```
//!
//! The block counts its lent slices. If the program leaked a guard with `mem::forget`, the host synchronizes the context before the block
//! is freed.

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

/// A buffer, or a part of one, lent as a `CudaSlice` for reading. The guard never frees memory.
///
/// While cudarc's event tracking is on, cudarc tracks reads on other streams, as for any `CudaSlice`. cudarc remembers only the last
/// reading stream, so to read on several streams, lend the buffer once for each of them.
#[must_use = "the buffer is lent only while the guard is alive"]
pub struct LentSlice<'a, T> {
    /// Decomposed by `drop`.
    slice: ManuallyDrop<CudaSlice<T>>,
    device: &'a CudaDevice,
    /// The block's record of uses, which counts this slice as lent; `None` if the slice is empty.
    uses: Option<&'a Uses>,
    /// Dropped after the slice is decomposed, so that the recorded use covers all uses of the slice.
    _use_on_stream: SyncOnDrop<'a>,
}

/// A buffer, or a part of one, lent as a `CudaSlice` for writing. See [`LentSlice`].
#[must_use = "the buffer is lent only while the guard is alive"]
pub struct LentSliceMut<'a, T> {
    lent: LentSlice<'a, T>,
}

impl<T, A: StreamAllocatorRef<Memory = CudaBackend>> DeviceBuffer<T, A> {
    /// Lends the buffer as a `CudaSlice` of `stream`, for reading.
    ///
    /// Functions that take the `CudaSlice` by value, such as candle's `CudaStorage::wrap_cuda_slice`, are not supported: they would free
    /// the memory through the driver.
    ///
    /// # Errors
    /// Returns an error if the driver cannot create events.
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

    /// Lends the buffer as a `CudaSlice` of `stream`, for writing.
    ///
    /// # Safety
    /// The caller must not move the `CudaSlice` out of the guard, for example with `std::mem::swap` or `replace`. If the slice were dropped
    /// outside the guard, it would free memory that the driver did not allocate.
    ///
    /// # Errors
    /// Returns an error if the driver cannot create events.
    pub unsafe fn lend_mut_on<'a>(&'a mut self, stream: &'a Arc<CudaStream>) -> Result<LentSliceMut<'a, T>, CudaError> {
        // SAFETY: the caller's contract.
        unsafe { self.as_view_mut().lend_mut_on(stream) }
    }
}

impl<'b, T> BufferView<'b, T> {
    /// Like [`DeviceBuffer::lend_on`].
    ///
    /// # Errors
    /// Returns an error if the driver cannot create events.
    pub fn lend_on(self, stream: &'b Arc<CudaStream>) -> Result<LentSlice<'b, T>, CudaError> {
        let (block, pointer, len) = self.into_raw();
        LentSlice::new(block, pointer, len, stream, AccessMode::Read)
    }
}

impl<'b, T> BufferViewMut<'b, T> {
    /// Like [`DeviceBuffer::lend_mut_on`].
    ///
    /// # Safety
    /// See [`DeviceBuffer::lend_mut_on`].
    ///
    /// # Errors
    /// Returns an error if the driver cannot create events.
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
        // cudarc panics if the driver cannot create an event, so create one here first to detect the error.
        let event = stream.context().new_event(None);
        drop(event.map_err(|error| DriverError { call: "cuEventCreate", code: error.0 as i32 })?);
        let use_on_stream = block.begin(stream, access);
        // SAFETY: the memory is valid as long as the guard borrows it, and the guard never lets the slice free it. The elements are valid,
        // because the buffer's elements are.
        let mut slice = unsafe { stream.upgrade_device_ptr::<T>(pointer, len) };
        // cudarc treats the slice as freshly allocated, so other streams that use the slice would not wait for this stream's earlier work.
        // Taking the pointer and dropping its guard records this work as a use of the slice.
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
        // SAFETY: taken only here, and not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        // `leak` makes the slice's stream wait for uses on other streams, and destroys the slice's events.
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
