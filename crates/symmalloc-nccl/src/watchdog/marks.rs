//! Events that are pending in the streams of a communicator.

use crate::watchdog::flight::Marked;
use cudarc::driver::CudaEvent;

/// Maximum number of unused events that are kept for reuse.
const FREE_MAX: usize = 16;

/// The pending events of a communicator's streams.
#[derive(Default)]
pub(super) struct Marks {
    waiting: Vec<Mark>,
    free: Vec<CudaEvent>,
}

/// An event behind an entry.
pub(super) struct Mark {
    pub(super) upto: Marked,
    pub(super) event: CudaEvent,
}

impl Marks {
    pub(super) fn add(&mut self, mark: Mark) {
        self.waiting.push(mark);
    }

    pub(super) fn take_waiting(&mut self) -> Vec<Mark> {
        std::mem::take(&mut self.waiting)
    }

    /// Returns an unused event.
    pub(super) fn free_event(&mut self) -> Option<CudaEvent> {
        self.free.pop()
    }

    /// Keeps an event for reuse, unless there are [`FREE_MAX`] already.
    pub(super) fn keep(&mut self, event: CudaEvent) {
        if self.free.len() < FREE_MAX {
            self.free.push(event);
        }
    }
}
