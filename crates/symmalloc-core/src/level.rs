//! Levels: how high a quantity is, and was at most.
//!
//! A level keeps its peak and how far below it is: adding takes from that distance, and only what the distance does not suffice
//! for is a new peak.

use std::cell::Cell;

/// The levels of allocations, allocated bytes and requested bytes.
#[derive(Clone, Debug, Default)]
pub struct Levels(pub(crate) [Level; 3]);

impl Levels {
    /// From peaks and current values.
    pub(crate) fn new(levels: [(u64, u64); 3]) -> Self {
        Levels(levels.map(|(peak, current)| Level { peak: Cell::new(peak), below_peak: Cell::new(peak - current) }))
    }

    pub(crate) fn set(&self, other: &Levels) {
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
}
