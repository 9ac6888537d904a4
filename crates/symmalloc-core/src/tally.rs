//! The tally: usage over all heaps, for peaks of the sum. Everything else about the sum is added up when somebody asks.
//!
//! Only one thread can count exactly for nothing, so only [`Exclusive`](crate::lock::Exclusive) allocators have one; many threads
//! would meet at it. See [`crate::peak_shares`] for what those have.

use crate::level::{Level, Levels};
use crate::stats::{Stat, UsageStats};
use std::cell::RefCell;
use std::fmt::Debug;

/// What counts usage over all heaps, or does not.
pub trait Tally: Debug + Default {
    /// Goes on from the levels of the first heap, where a second one comes: now, and when each open scope began.
    fn begin(&self, first: (Levels, Vec<Levels>));

    /// Counts an allocation.
    fn allocate(&self, allocated_bytes: u64, requested_bytes: u64);

    /// Counts a free.
    fn free(&self, allocated_bytes: u64, requested_bytes: u64);

    /// The sum over the heaps with its own peaks.
    fn stats(&self, sum: UsageStats) -> UsageStats;

    /// Starts the peaks anew at the current values.
    fn reset_peaks(&self);

    /// A scope begins, with peaks of its own.
    fn open_scope(&self);

    /// What happened since the innermost scope was opened, of which `sum` is what happened in the heaps.
    fn close_scope(&self, sum: UsageStats) -> UsageStats;
}

/// Nothing is counted.
impl Tally for () {
    fn begin(&self, _: (Levels, Vec<Levels>)) {}

    fn allocate(&self, _: u64, _: u64) {}

    fn free(&self, _: u64, _: u64) {}

    fn stats(&self, sum: UsageStats) -> UsageStats {
        sum
    }

    fn reset_peaks(&self) {}

    fn open_scope(&self) {}

    fn close_scope(&self, sum: UsageStats) -> UsageStats {
        sum
    }
}

/// The tally of one thread.
#[derive(Debug, Default)]
pub struct ExclusiveTally {
    levels: Levels,
    /// What the levels were when each open scope began; outermost first.
    scopes: RefCell<Vec<Levels>>,
}

impl Tally for ExclusiveTally {
    fn begin(&self, (levels, scopes): (Levels, Vec<Levels>)) {
        self.levels.set(&levels);
        *self.scopes.borrow_mut() = scopes;
    }

    #[inline(always)]
    fn allocate(&self, allocated_bytes: u64, requested_bytes: u64) {
        let [allocations, allocated, requested] = &self.levels.0;
        allocations.add(1);
        allocated.add(allocated_bytes);
        requested.add(requested_bytes);
    }

    #[inline(always)]
    fn free(&self, allocated_bytes: u64, requested_bytes: u64) {
        let [allocations, allocated, requested] = &self.levels.0;
        allocations.take(1);
        allocated.take(allocated_bytes);
        requested.take(requested_bytes);
    }

    fn stats(&self, sum: UsageStats) -> UsageStats {
        let [allocations, allocated, requested] = &self.levels.0;
        UsageStats {
            allocations: stat(allocations, sum.allocations),
            allocated_bytes: stat(allocated, sum.allocated_bytes),
            requested_bytes: stat(requested, sum.requested_bytes),
        }
    }

    fn reset_peaks(&self) {
        self.levels.0.iter().for_each(|level| level.set(level.current(), level.current()));
    }

    fn open_scope(&self) {
        self.scopes.borrow_mut().push(self.levels.clone());
        self.reset_peaks();
    }

    fn close_scope(&self, sum: UsageStats) -> UsageStats {
        let Some(outer) = self.scopes.borrow_mut().pop() else { return UsageStats::default() };
        let stats = self.stats(sum);
        for (level, outer) in self.levels.0.iter().zip(outer.0) {
            level.set(level.peak().max(outer.peak()), level.current());
        }
        stats
    }
}

/// The sum over parts, of which this is the level.
fn stat(level: &Level, sum: Stat) -> Stat {
    Stat { current: level.current(), peak: level.peak(), ..sum }
}
