//! Tracks the stream captures in progress, and the events that they recorded. [`crate::GraphPool`] describes the consequences for programs.
//!
//! Querying the capture state of a stream costs a driver call. It is queried only while a capture may be in progress
//! ([`CudaDevice::is_capturing`]), which takes a single load to check.
//!
//! During a stream capture, an event records a position in the graph rather than a point in time on the device. Such an event is meaningful
//! only within its own capture:
//!
//! | recorded in | waited for in | effect |
//! |---|---|---|
//! | no capture | no capture | `cuStreamWaitEvent` |
//! | a capture | the same capture | `cuStreamWaitEvent`: an edge of the graph |
//! | a capture | no capture, or a different capture | none: captured work runs when the graph is launched, and the program orders the launch |
//! | no capture | a capture | the host waits, so that the work is done before the graph runs |

use crate::device::CudaDevice;
use crate::driver::{CAPTURE_ACTIVE, CAPTURE_NONE, Driver};
use crate::error::{CAPTURE_IMPLICIT, DriverError};
use cudarc::driver::sys::CUstream;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use symmalloc_core::backend::Event;

/// The driver's id of a capture; unique in the process.
pub(crate) type CaptureId = u64;

/// The events in use that were recorded in captures.
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

    /// Returns the capture that recorded the event.
    #[inline]
    pub(super) fn capture_of(&self, event: Event) -> Option<CaptureId> {
        if self.is_empty() { None } else { self.lock().get(&event.0).copied() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, CaptureId>> {
        self.by_event.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that announces that other code may capture streams of the device. While it is alive, the driver is queried for the capture state
/// of streams, so that events are recorded, and waited for, only in the ways that a capture allows. Created by
/// [`CudaDevice::watch_captures`].
#[derive(Debug)]
#[must_use = "captures are watched only while the guard is alive"]
pub struct CaptureWatch {
    device: Arc<CudaDevice>,
}

impl CudaDevice {
    /// Announces that other code may capture streams of the device until the returned guard is dropped. Captures that a
    /// [`GraphPool`](crate::GraphPool) begins do not need this call.
    pub fn watch_captures(self: &Arc<Self>) -> CaptureWatch {
        self.begin_capture();
        CaptureWatch { device: Arc::clone(self) }
    }
}

impl CaptureWatch {
    /// Returns `true` if a stream is part of a capture that has not ended, even if the capture was invalidated.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Safety
    /// The stream must be alive and must belong to the device's primary context.
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

/// Queries the driver for the capture that a stream is part of.
///
/// # Safety
/// The stream must be alive.
pub(crate) unsafe fn capture_of(driver: &Driver, stream: CUstream) -> Result<Option<CaptureId>, DriverError> {
    // SAFETY: the caller's contract.
    let (status, id) = unsafe { capture_status(driver, stream) }?;
    Ok((status == CAPTURE_ACTIVE).then_some(id))
}

/// Queries the driver for a stream's capture status, one of the `CAPTURE_*` constants, and the id of its capture if there is one.
///
/// # Safety
/// The stream must be alive.
unsafe fn capture_status(driver: &Driver, stream: CUstream) -> Result<(c_int, CaptureId), DriverError> {
    let (mut status, mut id) = (0, 0);
    let (no_graph, no_nodes, no_count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: both results are valid for writing and the other pointers may be null; the stream is alive by the caller's contract.
    match unsafe { driver.capture_info(stream, &raw mut status, &raw mut id, no_graph, no_nodes, no_count) } {
        Ok(()) => Ok((status, id)),
        // The legacy default stream returns this error while a stream that synchronizes with it is captured. It is not part of the capture.
        Err(DriverError { code: CAPTURE_IMPLICIT, .. }) => Ok((CAPTURE_NONE, id)),
        Err(error) => Err(error),
    }
}
