//! Pending frees and their completions.
//!
//! Time is measured in entries, which are ops and completions. For each pending free, the entry before which it is due is known, so
//! completions occur in the recorded order.

use std::collections::BTreeMap;

use symmalloc_core::op::Pending;

use super::live::Live;

/// A pending free.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingFree {
    /// Index of the op that requested the free.
    pub(super) op: usize,
    pub(super) live: Live,
}

#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// Pending frees, by the number of entries at which they are due, then by the index of the op.
    frees: BTreeMap<(u64, usize), PendingFree>,
    /// Number of ops and completions so far.
    entries: u64,
}

impl PendingFrees {
    /// Adds the op that is being executed as a pending free.
    pub(super) fn push(&mut self, op: usize, live: Live, pending: Pending) {
        let due = (self.entries + 1).saturating_add(pending.entries());
        self.frees.insert((due, op), PendingFree { op, live });
    }

    /// Counts an op.
    pub(super) fn entry(&mut self) {
        self.entries += 1;
    }

    /// Returns the next free that is due, if any. With `all`, every pending free counts as due. Call it until it
    /// returns `None`.
    pub(super) fn pop(&mut self, all: bool) -> Option<PendingFree> {
        let next = self.frees.first_entry().filter(|next| all || next.key().0 <= self.entries)?;
        self.entries += 1;
        Some(next.remove())
    }
}
