//! The state that the debuggers of all heaps share: totals, and the findings of the debuggers of destroyed pools.

use crate::arena::fencing::DynContext;
use crate::config::damage::{DebugRecord, MemoryDamage};
use crate::heap::Heap;
use crate::heap::debugger::{DebugTotals, FreedBlock};
use crate::sync::lock::{Lock, LockCell};
use std::collections::VecDeque;
use std::sync::Arc;

/// Freed blocks of destroyed pools that are remembered.
const FREED_MAX: usize = 1 << 14;

/// The state that the debuggers of all heaps share.
pub(super) struct DebugState<L: Lock> {
    totals: Arc<DebugTotals>,
    /// The findings of the debuggers of destroyed pools. No other lock is taken under this one.
    destroyed: L::Cell<Destroyed>,
}

#[derive(Debug, Default)]
struct Destroyed {
    found: VecDeque<MemoryDamage>,
    /// Oldest first, by pool.
    freed: VecDeque<FreedBlock>,
}

impl<L: Lock> DebugState<L> {
    pub(super) fn new() -> Self {
        DebugState { totals: Arc::default(), destroyed: L::Cell::new(Destroyed::default()) }
    }

    pub(super) fn totals(&self) -> &Arc<DebugTotals> {
        &self.totals
    }

    /// Keeps what the debugger of a destroyed heap found. The device has completed the heap's work.
    pub(super) fn keep(&self, heap: &mut Heap<L>, context: &DynContext<'_, L>) {
        heap.collect_checks(context);
        let mut destroyed = self.destroyed.lock();
        destroyed.found.extend(std::iter::from_fn(|| heap.take_damage()));
        let freed: Vec<FreedBlock> = heap.freed_blocks().cloned().collect();
        destroyed.freed.extend(freed.into_iter().rev());
        let surplus = destroyed.freed.len().saturating_sub(FREED_MAX);
        destroyed.freed.drain(..surplus);
    }

    /// Removes and returns the oldest damage of a destroyed pool.
    pub(super) fn take_damage(&self) -> Option<MemoryDamage> {
        self.destroyed.lock().found.pop_front()
    }

    /// Returns the freed blocks of destroyed pools that `is_meant` accepts.
    pub(super) fn freed_blocks(&self, is_meant: impl Fn(&DebugRecord) -> bool) -> Vec<FreedBlock> {
        self.destroyed.lock().freed.iter().filter(|(_, record)| is_meant(record)).cloned().collect()
    }
}
