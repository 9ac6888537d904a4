//! A device that costs nothing, so that a measurement is the allocator's alone.
//!
//! Addresses are handed out upwards, memory is endless, and events are numbers. The simulator does all this properly, and
//! for its care takes longer than the allocators: the tests use that one.

use std::cell::Cell;
use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Range};
use symmalloc_core::ids::StreamId;

/// See the [module documentation](self).
#[derive(Debug)]
pub struct Weightless {
    next: Cell<u64>,
    events: Cell<u64>,
}

impl Default for Weightless {
    fn default() -> Self {
        Weightless { next: Cell::new(1 << 40), events: Cell::new(0) }
    }
}

impl Backend for Weightless {
    fn granularity_bytes(&self) -> u64 {
        2 << 20
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let base = self.next.replace(self.next.get() + size_bytes);
        Ok(Range { base: DeviceAddress(base), size_bytes })
    }

    fn map(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn unmap(&self, _: Range, _: u64, _: u64) -> Result<(), BackendError> {
        Ok(())
    }

    fn release(&self, _: Range) -> Result<(), BackendError> {
        Ok(())
    }

    fn record(&self, _: StreamId) -> Result<Event, BackendError> {
        Ok(Event(self.events.replace(self.events.get() + 1)))
    }

    fn wait(&self, _: StreamId, _: Event) -> Result<(), BackendError> {
        Ok(())
    }

    fn query(&self, _: Event) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn recycle(&self, _: Event) {}

    fn synchronize(&self, _: StreamId) -> Result<(), BackendError> {
        Ok(())
    }
}
