//! Which stream captures are under way. See [`crate::graph`] for what follows from them.
//!
//! Asking the driver whether a stream is being captured costs a call, so it is asked only while a capture that was begun
//! through this crate is under way: in all other moments one relaxed load answers.

use crate::device::CudaDevice;
use crate::driver::{CAPTURE_ACTIVE, CAPTURE_NONE, Driver};
use crate::error::{CAPTURE_IMPLICIT, DriverError};
use cudarc::driver::sys::CUstream;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A capture, as the driver numbers them; unique in the process.
pub(crate) type CaptureId = u64;

/// The captures under way on one device, and whether [rows](crate::rows) of frees are open there: what an allocation looks at.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    /// The number of captures, and [`ROWS`].
    active: AtomicU64,
}

/// Set while a row is open.
const ROWS: u64 = 1 << 63;

impl Captures {
    /// Called under the lock of the rows, as whatever writes here.
    pub(crate) fn begin(&self) {
        self.change(|active| active + 1);
    }

    /// Called under the lock of the rows.
    pub(crate) fn end(&self) {
        self.change(|active| active - 1);
    }

    fn change(&self, change: impl FnOnce(u64) -> u64) {
        self.active.store(change(self.active.load(Ordering::Relaxed)), Ordering::Release);
    }

    /// Whether there is no capture and no row: nothing for an allocation to mind.
    #[inline(always)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.active.load(Ordering::Acquire) == 0
    }

    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.active.load(Ordering::Acquire) & !ROWS != 0
    }

    #[inline]
    pub(crate) fn are_rows_open(&self) -> bool {
        self.active.load(Ordering::Acquire) & ROWS != 0
    }

    /// Called under the lock of the rows.
    pub(crate) fn set_rows_open(&self, are_open: bool) {
        self.change(|active| if are_open { active | ROWS } else { active & !ROWS });
    }

    /// The capture that the stream is part of, if any capture is under way.
    ///
    /// # Safety
    /// The stream is alive.
    #[inline]
    pub(crate) unsafe fn of(&self, driver: &Driver, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
        if !self.any() {
            return Ok(None);
        }
        // SAFETY: the caller's contract.
        unsafe { capture_of(driver, stream) }
    }
}

/// Streams of the device may be in a capture that other code began. While this lives, the driver is asked which streams
/// are, so that events are recorded and waited for as a capture allows. Made by [`CudaDevice::watch_captures`].
#[derive(Debug)]
#[must_use = "captures are watched as long as this lives"]
pub struct CaptureWatch {
    device: Arc<CudaDevice>,
}

impl CudaDevice {
    /// Tells that other code may capture streams of the device from now on, until the returned value is dropped. A capture
    /// that a [`GraphPool`](crate::GraphPool) begins needs no such call.
    pub fn watch_captures(self: &Arc<Self>) -> CaptureWatch {
        self.begin_capture();
        CaptureWatch { device: Arc::clone(self) }
    }
}

impl CaptureWatch {
    /// Whether a stream is part of a capture that was not ended yet, be it spoiled.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Safety
    /// The stream is alive, and of the device's primary context.
    pub unsafe fn is_captured(&self, stream: CUstream) -> Result<bool, DriverError> {
        let _current = self.device.enter()?;
        // SAFETY: the caller's contract.
        let (status, _) = unsafe { capture_status(self.device.driver, stream) }?;
        Ok(status != CAPTURE_NONE)
    }
}

impl Drop for CaptureWatch {
    fn drop(&mut self) {
        self.device.end_capture();
    }
}

/// Asks the driver which capture a stream is part of.
///
/// # Safety
/// The stream is alive.
pub(crate) unsafe fn capture_of(driver: &Driver, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
    // SAFETY: the caller's contract.
    let (status, id) = unsafe { capture_status(driver, stream) }?;
    Ok((status == CAPTURE_ACTIVE).then_some(id))
}

/// What the driver says of a stream: one of its `CAPTURE_*`, and the capture if it is in one.
///
/// # Safety
/// The stream is alive.
unsafe fn capture_status(driver: &Driver, stream: CUstream) -> Result<(c_int, CaptureId), DriverError> {
    let (mut status, mut id) = (0, 0);
    let (no_graph, no_nodes, no_count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: both answers are valid for writing, the others may be null; the stream is alive by the caller's contract.
    match unsafe { driver.capture_info(stream, &raw mut status, &raw mut id, no_graph, no_nodes, no_count) } {
        Ok(()) => Ok((status, id)),
        // The legacy default stream, while a stream that synchronises with it is captured: it is not part of the capture.
        Err(DriverError { code: CAPTURE_IMPLICIT, .. }) => Ok((CAPTURE_NONE, id)),
        Err(error) => Err(error),
    }
}
