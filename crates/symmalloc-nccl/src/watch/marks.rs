//! Events that wait in the streams of a communicator.

use super::flight::Marked;
use cudarc::driver::CudaEvent;

/// Events that are kept to be used again.
const FREE_MAX: usize = 16;

/// What waits in the streams of a communicator.
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

    /// An event that nobody waits for.
    pub(super) fn free_event(&mut self) -> Option<CudaEvent> {
        self.free.pop()
    }

    /// Keeps it to be used again, if there are not enough.
    pub(super) fn keep(&mut self, event: CudaEvent) {
        if self.free.len() < FREE_MAX {
            self.free.push(event);
        }
    }
}
