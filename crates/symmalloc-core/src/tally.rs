//! The tally: usage over all heaps, for peaks of the sum. Everything else about the sum is added up when somebody asks.
//!
//! Only one thread can count exactly for nothing, so only [`Exclusive`](crate::lock::Exclusive) allocators have one; many threads
//! would meet at it. See [`crate::peak_shares`] for what those have.

use crate::stats::{Stat, UsageStats};
use std::cell::{Cell, RefCell};
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
            allocations: allocations.stat(sum.allocations),
            allocated_bytes: allocated.stat(sum.allocated_bytes),
            requested_bytes: requested.stat(sum.requested_bytes),
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
            level.set(level.peak.get().max(outer.peak.get()), level.current());
        }
        stats
    }
}

/// The levels of allocations, allocated bytes and requested bytes.
#[derive(Clone, Debug, Default)]
pub struct Levels([Level; 3]);

impl Levels {
    /// From peaks and current values.
    pub(crate) fn new(levels: [(u64, u64); 3]) -> Self {
        Levels(levels.map(|(peak, current)| Level { peak: Cell::new(peak), below_peak: Cell::new(peak - current) }))
    }

    fn set(&self, other: &Levels) {
        self.0.iter().zip(&other.0).for_each(|(level, other)| level.set(other.peak.get(), other.current()));
    }
}

/// How high a quantity is, and was at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level {
    peak: Cell<u64>,
    /// Peak less current.
    below_peak: Cell<u64>,
}

impl Level {
    #[inline(always)]
    pub(crate) fn add(&self, amount: u64) {
        let (below_peak, is_above) = self.below_peak.get().overflowing_sub(amount);
        self.below_peak.set(below_peak);
        if is_above {
            self.raise_peak();
        }
    }

    /// The distance fell below zero: the peak is higher by as much.
    #[cold]
    #[inline(never)]
    fn raise_peak(&self) {
        let current = self.peak.get().wrapping_sub(self.below_peak.get());
        self.set(current, current);
    }

    #[inline(always)]
    pub(crate) fn take(&self, amount: u64) {
        self.below_peak.set(self.below_peak.get() + amount);
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.get()
    }

    pub(crate) fn current(&self) -> u64 {
        self.peak.get() - self.below_peak.get()
    }

    /// Puts the peak elsewhere, at or above the current value.
    pub(crate) fn set(&self, peak: u64, current: u64) {
        self.peak.set(peak);
        self.below_peak.set(peak - current);
    }

    /// The sum over parts, of which this is the level.
    fn stat(&self, sum: Stat) -> Stat {
        Stat { current: self.current(), peak: self.peak.get(), ..sum }
    }
}
