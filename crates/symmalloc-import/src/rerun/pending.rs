//! Frees that are not completed yet, and when they are.
//!
//! What passes is counted in entries: ops, and the completions themselves. Each free knows the entry before which it is
//! due, so the completions of a recording come back in the order in which they were recorded.

use std::collections::BTreeMap;

use symmalloc_core::op::Pending;

use super::live::Live;

/// A free that is not completed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingFree {
    /// The number of its op.
    pub(super) op: usize,
    pub(super) live: Live,
}

#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// By the entries that there are when it is due, then by its op.
    frees: BTreeMap<(u64, usize), PendingFree>,
    /// Entries so far.
    entries: u64,
}

impl PendingFrees {
    /// The next op is a free that stays pending.
    pub(super) fn push(&mut self, op: usize, live: Live, pending: Pending) {
        let due = (self.entries + 1).saturating_add(pending.entries());
        self.frees.insert((due, op), PendingFree { op, live });
    }

    /// An op passed.
    pub(super) fn entry(&mut self) {
        self.entries += 1;
    }

    /// The free that completes now, if one does. With `all`, every one does.
    pub(super) fn pop(&mut self, all: bool) -> Option<PendingFree> {
        let next = self.frees.first_entry().filter(|next| all || next.key().0 <= self.entries)?;
        self.entries += 1;
        Some(next.remove())
    }
}
