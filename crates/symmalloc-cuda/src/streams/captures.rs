//! Which stream captures are under way, and which events they recorded. [`crate::GraphPool`] says what follows from them.
//!
//! Asking the driver whether a stream is being captured costs a call. So it is asked only while a capture may be under way
//! ([`CudaDevice::is_capturing`]): otherwise one load answers.
//!
//! During a stream capture an event records a place in the graph and not a moment of the device. Such an event means
//! something in its own capture only:
//!
//! | recorded in | waited for in | what happens |
//! |---|---|---|
//! | no capture | no capture | `cuStreamWaitEvent` |
//! | a capture | the same capture | `cuStreamWaitEvent`: an edge of the graph |
//! | a capture | anything else | nothing: captured work runs when the graph is launched, which the program orders |
//! | no capture | a capture | the host waits: the graph runs later, and then that work is over |

use crate::device::CudaDevice;
use crate::driver::{CAPTURE_ACTIVE, CAPTURE_NONE, Driver};
use crate::error::{CAPTURE_IMPLICIT, DriverError};
use cudarc::driver::sys::CUstream;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::Event;

/// A capture, as the driver numbers them; unique in the process.
pub(crate) type CaptureId = u64;

/// The events of captures that are in use.
#[derive(Debug, Default)]
pub(super) struct CapturedEvents {
    by_event: Mutex<BTreeMap<u64, CaptureId>>,
    /// Size of `by_event`, readable without its lock.
    count: AtomicUsize,
}

impl CapturedEvents {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    pub(super) fn insert(&self, event: Event, capture: CaptureId) {
        self.lock().insert(event.0, capture);
        self.count.fetch_add(1, Ordering::Release);
    }

    #[inline]
    pub(super) fn remove(&self, event: Event) {
        if !self.is_empty() && self.lock().remove(&event.0).is_some() {
            self.count.fetch_sub(1, Ordering::Release);
        }
    }

    /// The capture that recorded the event.
    #[inline]
    pub(super) fn capture_of(&self, event: Event) -> Option<CaptureId> {
        if self.is_empty() { None } else { self.lock().get(&event.0).copied() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, CaptureId>> {
        self.by_event.lock().unwrap_or_else(PoisonError::into_inner)
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
        let (status, _) = unsafe { capture_status(self.device.driver(), stream) }?;
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
