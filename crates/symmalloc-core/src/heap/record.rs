//! The records of a heap other than its decisions: observers, histories, statistics. A part of [`Heap`]. Nothing here
//! affects placement.

use super::{DynContext, Heap, RequestMode};
use crate::config::op::Refusal;
use crate::heap::trim::Released;
use crate::history::digest::Digest;
use crate::history::journal::{Journal, ProgramOrder};
use crate::stats::usage::ClassStats;
use crate::sync::lock::Lock;
use crate::types::ids::{ObserverId, StreamId};
use std::sync::Arc;

impl<L: Lock> Heap<L> {
    /// Starts to remember the last ops, for agreement.
    pub(crate) fn enable_journal(&mut self, history_ops: u32, order: Arc<ProgramOrder>) {
        self.ledger.enable_journal(history_ops, order);
    }

    /// Removes and returns the journal of a heap that is about to be replaced.
    pub(crate) fn take_journal(&mut self) -> Option<Box<Journal>> {
        self.ledger.take_journal()
    }

    /// Starts to index allocations by address.
    pub(crate) fn enable_pointers(&mut self) {
        self.ledger.enable_pointers();
    }

    /// Records that all ranks had this digest.
    pub(crate) fn settle(&mut self, digest: Digest) {
        self.ledger.settle(digest);
    }

    /// Records that the pool was reset, after the frees of its live allocations.
    pub(crate) fn note_reset(&mut self) {
        self.ledger.note_reset();
    }

    /// Records the refusal of a request for `size_bytes`.
    pub(crate) fn note_refusal(&mut self, refusal: Refusal, stream: StreamId, size_bytes: u64) {
        self.ledger.fold_refusal(refusal, stream, size_bytes);
    }

    /// Records that the pool is destroyed: the heap refuses requests from now on.
    pub(crate) fn close(&mut self) {
        self.ledger.close();
        self.mode = RequestMode::Closed;
    }

    /// Adds an observer of the heap's segments, which reads the events from now on.
    pub(crate) fn observe(&mut self, observer: ObserverId) {
        self.log.observe(observer);
    }

    /// Records that an observer has processed every event before `end`, and releases memory that it held.
    pub(crate) fn acknowledge(&mut self, context: &DynContext<'_, L>, observer: ObserverId, end: u64) -> Released {
        self.log.acknowledge(observer, end);
        self.release_retired(context)
    }

    /// Removes an observer, and releases memory that it held.
    pub(crate) fn forget(&mut self, context: &DynContext<'_, L>, observer: ObserverId) -> Released {
        self.log.forget(observer);
        self.release_retired(context)
    }

    pub(crate) fn count_retry(&mut self) {
        self.ledger.count_retry();
    }

    pub(crate) fn open_stat_scope(&mut self) {
        self.ledger.usage_mut().open_scope();
    }

    /// Closes the innermost statistics scope and returns its statistics.
    pub(crate) fn close_stat_scope(&mut self) -> ClassStats {
        self.ledger.usage_mut().close_scope()
    }

    /// Resets all peaks to the current values.
    pub(crate) fn reset_peaks(&mut self) {
        self.ledger.usage_mut().reset_peaks();
        self.budget.reset_peak();
    }
}
