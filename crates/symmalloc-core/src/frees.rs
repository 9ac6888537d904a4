//! Frees: how what was allocated becomes free again.
//!
//! A free takes the first of these ways that serves it, and most end with the first:
//!
//! ```text
//!  1. nothing but the block is to be freed: it is free, merged with its neighbours          (heap.rs)
//!  2. other streams used the block of a plain heap: their uses are fenced before         (fencing.rs)
//!  3. the heap is recorded: the gate first, then the heap                               (recording.rs)
//!  4. events for uses in any heap, books, a release above the threshold, a refusal
//! ```
//!
//! Whoever keeps something beside the heap frees through an [`Entrance`](crate::Entrance), which leads to the same ways.

use crate::allocator::{Allocator, NO_SLOT};
use crate::backend::{Backend, BackendError};
use crate::digest::{Mark, op_word};
use crate::errors::{FreeError, HandleError};
use crate::fencing::Fencing;
use crate::handle::Handle;
use crate::heap::{Freed, Heap, Live};
use crate::held::{HeapCell, HeapGuard};
use crate::ids::StreamId;
use crate::lock::Lock;
use crate::plain::Way;
use crate::recording::Tape;
use crate::tally::Tally;
use crate::trim::{TrimFailure, TrimGoal};

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Frees an allocation: other work may use the memory at once, ordered behind this one's uses on the device.
    ///
    /// # Errors
    /// When the handle is not live here, or the driver cannot fence the uses; the allocation is still live then.
    #[inline]
    pub fn free(&self, handle: Handle) -> Result<(), FreeError> {
        self.free_by_call(self.heap_of(handle)?, handle)
    }

    #[inline(never)]
    fn free_by_call(&self, heap: &HeapCell<L>, handle: Handle) -> Result<(), FreeError> {
        self.free_from(heap, handle)
    }

    /// Frees an allocation of the heap.
    #[inline(always)]
    pub(crate) fn free_from(&self, heap: &HeapCell<L>, handle: Handle) -> Result<(), FreeError> {
        let mut heap = heap.lock();
        match heap.free_at_hand(handle, |allocated, requested| self.tally(|tally| tally.free(allocated, requested))) {
            Freed::Now => Ok(()),
            Freed::Used(live) => self.free_used(&mut heap, live, Fencing::Apart),
            Freed::NotYet if heap.is_recorded => self.free_recorded(heap, handle),
            Freed::NotYet => self.free_by_all_means(&mut heap, handle, Fencing::Apart),
        }
    }

    /// As [`free`](Self::free), for a program that may free more right away and gives streams no work before it calls its
    /// backend in another way: frees in a row may share an event ([`Backend::record_in_row`]), which costs less.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn free_in_row(&self, handle: Handle) -> Result<(), FreeError> {
        let mut heap = self.heap_of(handle)?.lock();
        if heap.is_recorded {
            self.free_recorded(heap, handle)
        } else {
            self.free_by_all_means(&mut heap, handle, Fencing::InRow)
        }
    }

    /// As [`free`](Self::free), where the heap is entered already: for [`Keepsake::free_late`](crate::held::Keepsake::free_late).
    ///
    /// # Errors
    /// As [`free`](Self::free), and when the heap is another allocator's.
    pub fn free_late(&self, heap: &mut Heap, handle: Handle) -> Result<(), FreeError> {
        if heap.tags.owner() != self.owner {
            return Err(HandleError::Foreign { handle }.into());
        }
        self.free_by_all_means(heap, handle, Fencing::Apart)
    }

    /// Frees an allocation of a plain heap that other streams used.
    #[inline(never)]
    fn free_used(&self, heap: &mut Heap, live: Live, fencing: Fencing) -> Result<(), FreeError> {
        let tally = |allocated, requested| self.tally(|tally| tally.free(allocated, requested));
        Ok(heap.free_used(&self.around, live, fencing, tally)?)
    }

    /// Whatever [`free`](Self::free) may need besides the block: events, books, a release, a refusal.
    #[inline(never)]
    pub(crate) fn free_by_all_means(&self, heap: &mut Heap, handle: Handle, fencing: Fencing) -> Result<(), FreeError> {
        if heap.way == Way::Plain
            && let Some(live) = heap.find_live(handle)
        {
            return self.free_used(heap, live, fencing);
        }
        if handle.slot() == NO_SLOT {
            return Ok(free_nothing(heap, handle)?);
        }
        heap.free(&self.around, (handle, fencing), |allocated, requested| {
            self.tally(|tally| tally.free(allocated, requested));
        })?;
        heap.recycle_spent(&self.around);
        if let Some(threshold) = heap.config.release_threshold_bytes() {
            let _told = self.release_above(heap, threshold);
        }
        Ok(())
    }

    /// Frees an allocation of a heap that is recorded: the gate comes before the heap, which is let go.
    #[cold]
    #[inline(never)]
    fn free_recorded(&self, heap: HeapGuard<'_, L>, handle: Handle) -> Result<(), FreeError> {
        drop(heap);
        self.free_behind_gate(handle)
    }

    #[inline(never)]
    fn free_behind_gate(&self, handle: Handle) -> Result<(), FreeError> {
        let mut tape = self.tape_of_recorded();
        let mut heap = self.heap_of(handle)?.lock();
        let tally = |allocated, requested| self.tally(|tally| tally.free(allocated, requested));
        let freed = match heap.way {
            Way::PlainRecorded => heap.free_at_once(handle, tally),
            _ => heap.free_at_once_by_rule(handle, tally),
        };
        if !matches!(freed, Freed::Now) {
            return self.free_behind_gate_by_all_means(heap, handle, tape);
        }
        drop(heap);
        tape.note_free(handle);
        Ok(())
    }

    /// As [`free_by_all_means`](Self::free_by_all_means), in a heap that is recorded.
    #[inline(never)]
    fn free_behind_gate_by_all_means(
        &self,
        mut heap: HeapGuard<'_, L>,
        handle: Handle,
        mut tape: Tape<'_, B, L>,
    ) -> Result<(), FreeError> {
        let mut failure = None;
        if handle.slot() == NO_SLOT {
            free_nothing(&mut heap, handle)?;
        } else {
            heap.free(&self.around, (handle, Fencing::Apart), |allocated, requested| {
                self.tally(|tally| tally.free(allocated, requested));
            })?;
            heap.recycle_spent(&self.around);
            let threshold = heap.config.release_threshold_bytes();
            failure = threshold.and_then(|threshold| self.release_above(&mut heap, threshold));
        }
        drop(heap);
        if let Some(error) = failure {
            tape.driver_failed(error);
        }
        tape.note_free(handle);
        Ok(())
    }

    /// The configured trigger of rule D5: a heap that holds more free bytes than the threshold gives them back. Returns why the
    /// driver did not take them.
    #[cold]
    fn release_above(&self, heap: &mut Heap, threshold_bytes: u64) -> Option<BackendError> {
        let free_bytes = heap.mapped - heap.usage.stats().all.allocated_bytes.current;
        if free_bytes <= threshold_bytes {
            return None;
        }
        let TrimFailure { error, .. } = heap.trim(&self.around, TrimGoal::Everything).err()?;
        Some(error)
    }
}

#[cold]
fn free_nothing(heap: &mut Heap, handle: Handle) -> Result<(), HandleError> {
    if !heap.tags.gave(handle.tag()) {
        return Err(HandleError::Foreign { handle });
    }
    heap.fold(op_word(Mark::FreeNothing, StreamId(0), 0), 0);
    Ok(())
}
