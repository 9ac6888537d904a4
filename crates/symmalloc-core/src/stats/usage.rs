//! Statistics with the names and meanings of PyTorch's `memory_stats`.
//!
//! Every heap counts its own usage under its own lock. Sums over heaps are computed on request.
//!
//! ```text
//!  freed = allocated − current        all = small + large, except for the peak, which is counted separately
//! ```
//!
//! A [`StatScope`](crate::allocator::report::StatScope) measures the same numbers over a part of the program. Opening a
//! scope saves the counters and restarts the peaks. Closing it raises the peaks to those of the outer scope, where the
//! latter are higher. Scopes can be nested, and cost nothing between open and close.

use crate::config::size_rules::SizeClass;
use crate::types::units::{Units, bytes};

/// Implements the field-by-field sum of two values.
macro_rules! add_fields {
    ($name:ident { $($field:ident),* }) => {
        impl std::ops::Add for $name {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                $name { $($field: self.$field + other.$field),* }
            }
        }
    };
}
pub(crate) use add_fields;

/// A quantity over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// The current value.
    pub current: u64,
    /// The largest value so far.
    pub peak: u64,
    /// The total of all additions.
    pub allocated: u64,
    /// The total of all removals.
    pub freed: u64,
}

impl Stat {
    /// Creates a quantity with the given total of additions.
    pub(crate) fn new(current: u64, peak: u64, allocated: u64) -> Self {
        Stat { current, peak, allocated, freed: allocated.saturating_sub(current) }
    }
}

/// Usage by the program: allocations, and the bytes of their blocks and requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsageStats {
    /// Number of allocations of at least one byte.
    pub allocations: Stat,
    /// Bytes of their blocks.
    pub allocated_bytes: Stat,
    /// Requested bytes.
    pub requested_bytes: Stat,
}

/// Usage in total and by size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// All sizes.
    pub all: UsageStats,
    /// Blocks of at most 1 MiB.
    pub small: UsageStats,
    /// Larger blocks.
    pub large: UsageStats,
}

// Sums of peaks that may have occurred at different times are upper bounds.
add_fields!(Stat { current, peak, allocated, freed });
add_fields!(UsageStats { allocations, allocated_bytes, requested_bytes });
add_fields!(ClassStats { all, small, large });

/// Counts of rare events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RareCounts {
    /// Number of times that memory was acquired: new segments and growths of segments.
    pub(crate) growths: u64,
    pub(crate) trims: u64,
    /// Number of retries of requests after memory became available.
    pub(crate) retries: u64,
    /// Number of requests that failed for lack of memory.
    pub(crate) refusals: u64,
}

/// The current value and the peak of a quantity. It stores the peak, and the distance from the current value to the
/// peak. An addition reduces the distance. It raises the peak only if the added amount exceeds the distance.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    peak: u64,
    /// Peak minus current value.
    below_peak: u64,
}

impl Level {
    #[inline(always)]
    fn add(&mut self, amount: u64) {
        let (below_peak, is_above) = self.below_peak.overflowing_sub(amount);
        self.below_peak = below_peak;
        if is_above {
            self.raise_peak();
        }
    }

    /// Raises the peak by the amount by which the distance is below zero.
    #[cold]
    #[inline(never)]
    fn raise_peak(&mut self) {
        self.peak = self.current();
        self.below_peak = 0;
    }

    #[inline(always)]
    fn take(&mut self, amount: u64) {
        self.below_peak += amount;
    }

    fn current(&self) -> u64 {
        self.peak.wrapping_sub(self.below_peak)
    }

    /// Sets the peak to a value at or above the current one.
    fn set_peak(&mut self, peak: u64) {
        (self.peak, self.below_peak) = (peak, peak - self.current());
    }

    fn reset_peak(&mut self) {
        self.set_peak(self.current());
    }

    /// Closes a scope: sets the peak to the larger one of this peak and the outer peak.
    fn close(&mut self, outer: Level) {
        self.set_peak(self.peak.max(outer.peak));
    }
}

/// Levels of allocations, allocated bytes and requested bytes.
type Levels = [Level; 3];

/// The levels over all sizes: of one heap, or of all heaps if one thread drives the allocator.
#[derive(Clone, Debug, Default)]
pub(crate) struct TotalUsage {
    levels: Levels,
    /// The levels at the start of each open scope, outermost first.
    scopes: Vec<Levels>,
}

impl TotalUsage {
    #[inline(always)]
    pub(crate) fn allocate(&mut self, size: Units, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.levels;
        allocations.add(1);
        allocated.add(bytes(size));
        requested.add(requested_bytes);
    }

    #[inline]
    pub(crate) fn free(&mut self, size: Units, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.levels;
        allocations.take(1);
        allocated.take(bytes(size));
        requested.take(requested_bytes);
    }

    /// Replaces peaks that were added up over several parts with the peaks of the total.
    pub(crate) fn correct_peaks(&self, sum: &mut UsageStats) {
        let stats = [&mut sum.allocations, &mut sum.allocated_bytes, &mut sum.requested_bytes];
        stats.into_iter().zip(&self.levels).for_each(|(stat, level)| stat.peak = level.peak);
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.levels.iter_mut().for_each(Level::reset_peak);
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.levels);
        self.reset_peaks();
    }

    /// Corrects the peaks like [`correct_peaks`](Self::correct_peaks), since the innermost scope was opened, and closes
    /// it.
    pub(crate) fn close_scope(&mut self, sum: &mut UsageStats) {
        self.correct_peaks(sum);
        let outer = self.scopes.pop().unwrap_or_default();
        self.levels.iter_mut().zip(outer).for_each(|(level, outer)| level.close(outer));
    }
}

/// One quantity of one size class.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    level: Level,
    /// The total of all additions.
    allocated: u64,
}

impl Counter {
    #[inline(always)]
    fn add(&mut self, amount: u64) {
        self.allocated += amount;
        self.level.add(amount);
    }

    /// Returns the changes since an earlier moment.
    fn since(&self, then: &Counter) -> Stat {
        let (current, allocated) = (self.level.current(), self.allocated - then.allocated);
        // current = then.current + allocated - freed
        Stat { current, peak: self.level.peak, allocated, freed: then.level.current() + allocated - current }
    }
}

/// Counters of allocations, allocated bytes and requested bytes, for small blocks and for large ones.
type Counters = [[Counter; 3]; 2];

fn add_levels(sum: &mut Levels, levels: &Levels) {
    for (level, other) in sum.iter_mut().zip(levels) {
        level.peak += other.peak;
        level.below_peak += other.below_peak;
    }
}

fn add_counters(sum: &mut Counters, counters: &Counters) {
    for (counter, other) in sum.as_flattened_mut().iter_mut().zip(counters.as_flattened()) {
        counter.allocated += other.allocated;
        counter.level.peak += other.level.peak;
        counter.level.below_peak += other.level.below_peak;
    }
}

/// The usage of one heap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    counters: Counters,
    total: TotalUsage,
    /// The counters at the start of each open scope, outermost first.
    scopes: Vec<Counters>,
}

impl Usage {
    #[inline(always)]
    pub(crate) fn allocate(&mut self, size: Units, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.counters[SizeClass::of(size) as usize];
        allocations.add(1);
        allocated.add(bytes(size));
        requested.add(requested_bytes);
        self.total.allocate(size, requested_bytes);
    }

    #[inline]
    pub(crate) fn free(&mut self, size: Units, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.counters[SizeClass::of(size) as usize];
        allocations.level.take(1);
        allocated.level.take(bytes(size));
        requested.level.take(requested_bytes);
        self.total.free(size, requested_bytes);
    }

    /// Returns the bytes of currently allocated blocks.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.total.levels[1].current()
    }

    /// Returns the current number of allocations of at least one byte.
    pub(crate) fn allocations(&self) -> u64 {
        self.total.levels[0].current()
    }

    /// Returns the total number of allocations.
    pub(crate) fn allocations_made(&self) -> u64 {
        self.counters.iter().map(|[allocations, ..]| allocations.allocated).sum()
    }

    pub(crate) fn stats(&self) -> ClassStats {
        let mut stats = self.since(&Counters::default());
        self.total.correct_peaks(&mut stats.all);
        stats
    }

    /// Returns the changes since an earlier moment. Peaks over all sizes are sums.
    fn since(&self, then: &Counters) -> ClassStats {
        let [small, large] = [SizeClass::Small, SizeClass::Large].map(|class| {
            let [allocations, allocated_bytes, requested_bytes] = [0, 1, 2]
                .map(|quantity| self.counters[class as usize][quantity].since(&then[class as usize][quantity]));
            UsageStats { allocations, allocated_bytes, requested_bytes }
        });
        ClassStats { all: small + large, small, large }
    }

    /// Adds the usage of a removed heap, which has the same open scopes.
    pub(crate) fn absorb(&mut self, gone: &Usage) {
        add_counters(&mut self.counters, &gone.counters);
        add_levels(&mut self.total.levels, &gone.total.levels);
        self.scopes.iter_mut().zip(&gone.scopes).for_each(|(here, there)| add_counters(here, there));
        self.total.scopes.iter_mut().zip(&gone.total.scopes).for_each(|(here, there)| add_levels(here, there));
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.counters.as_flattened_mut().iter_mut().for_each(|counter| counter.level.reset_peak());
        self.total.reset_peaks();
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.counters);
        self.counters.as_flattened_mut().iter_mut().for_each(|counter| counter.level.reset_peak());
        self.total.open_scope();
    }

    /// Returns the changes since the innermost scope was opened, and closes it. `allocated` and `freed` count from
    /// there.
    pub(crate) fn close_scope(&mut self) -> ClassStats {
        let outer = self.scopes.pop().unwrap_or_default();
        let mut stats = self.since(&outer);
        self.total.close_scope(&mut stats.all);
        for (counter, outer) in self.counters.as_flattened_mut().iter_mut().zip(outer.as_flattened()) {
            counter.level.close(outer.level);
        }
        stats
    }
}
