//! A device on which every call succeeds and costs next to nothing.
//!
//! To time an allocator one needs something below it that takes no time: the simulator keeps a timeline of every
//! stream, which costs more than the allocator that calls it. Placements are the same on both, as on every device
//! (rule D1).

use std::cell::Cell;
use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Range};
use symmalloc_core::ids::StreamId;

const GRANULARITY_BYTES: u64 = 2 << 20;

/// The device. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct IdleDevice {
    /// Addresses are never handed out twice; below 2^48 there is room for 500 ranges of 512 GiB, and nobody looks.
    next: Cell<u64>,
}

impl IdleDevice {
    pub(crate) fn new() -> Self {
        IdleDevice { next: Cell::new(GRANULARITY_BYTES) }
    }
}

impl Backend for IdleDevice {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let base = DeviceAddress(self.next.get());
        self.next.set(base.0.wrapping_add(size_bytes));
        Ok(Range { base, size_bytes })
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
        Ok(Event(0))
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
