//! A pool of spare events. Creating an event costs a driver call, so events are reused.
//!
//! Recording an event again does not affect streams that already wait for its previous recording. Timing is disabled.

use crate::device::CudaDevice;
use crate::driver::EVENT_DISABLE_TIMING;
use crate::error::DriverError;
use cudarc::driver::sys::CUevent;
use std::sync::{Arc, Mutex, PoisonError};
use symmalloc_core::backend::Event;

/// The unused events of one backend.
pub(super) struct EventPool {
    device: Arc<CudaDevice>,
    spare: Mutex<Vec<Event>>,
}

impl EventPool {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        EventPool { device, spare: Mutex::default() }
    }

    /// Returns a spare event, or creates one.
    #[inline]
    pub(super) fn take(&self) -> Result<Event, DriverError> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| self.create(), Ok)
    }

    #[inline]
    pub(super) fn put_back(&self, event: Event) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    #[cold]
    fn create(&self) -> Result<Event, DriverError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is valid for writing, and a context is current.
        unsafe { self.device.driver().event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(Event(event as u64))
    }
}

impl Drop for EventPool {
    /// Destroys the spare events. The driver keeps those that streams still wait for. If the device is lost, so are its events.
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        for event in self.spare.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: created by this pool, and not used elsewhere.
            let _destroyed = unsafe { self.device.driver().event_destroy(event.0 as CUevent) };
        }
    }
}
