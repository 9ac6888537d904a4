//! Spare events: making an event costs a driver call, so events are kept and used again.
//!
//! Recording an event again does not disturb streams that were told to wait for what it stood for before. Timing is off.

use crate::device::CudaDevice;
use crate::driver::EVENT_DISABLE_TIMING;
use crate::error::DriverError;
use cudarc::driver::sys::CUevent;
use std::sync::{Arc, Mutex, PoisonError};
use symmalloc_core::backend::Event;

/// The events of one backend that are not in use.
pub(super) struct EventPool {
    device: Arc<CudaDevice>,
    spare: Mutex<Vec<Event>>,
}

impl EventPool {
    pub(super) fn new(device: Arc<CudaDevice>) -> Self {
        EventPool { device, spare: Mutex::default() }
    }

    /// A spare event, or a new one. A new one counts as done until it is recorded.
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
    pub(super) fn create(&self) -> Result<Event, DriverError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: `event` is valid for writing, and a context is current.
        unsafe { self.device.driver().event_create(&raw mut event, EVENT_DISABLE_TIMING) }?;
        Ok(Event(event as u64))
    }
}

impl Drop for EventPool {
    /// Destroys the spare events; the driver keeps what streams still wait for. A lost device has lost them already.
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        for event in self.spare.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: made by this pool, and not used elsewhere.
            let _destroyed = unsafe { self.device.driver().event_destroy(event.0 as CUevent) };
        }
    }
}
