//! Statistics, with the words and the meaning of PyTorch's `memory_stats`.
//!
//! Counting happens on the path of `allocate` and `free`, so nothing is computed there that can be computed when somebody
//! asks. A counter holds its peak and how far below it is: adding takes from that distance, and only when the distance does
//! not suffice, which in a steady state never happens, is there a new peak.
//!
//! ```text
//!  current = peak − below_peak            freed = allocated − current
//!  all     = small + large                (current, allocated, freed; a peak is its own)
//! ```
//!
//! A [`StatScope`](crate::report::StatScope) asks for the same numbers over a part of the program. Opening one saves the peaks and starts them
//! anew; closing one gives the outer scope the larger of both. Scopes nest, and cost nothing between open and close.

use crate::size_rules::{SizeClass, SizeRules};
use crate::units::{Units, bytes};

/// A quantity over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The most at any time.
    pub peak: u64,
    /// Everything that was ever added.
    pub allocated: u64,
    /// Everything that was ever taken away.
    pub freed: u64,
}

/// How high a quantity is, and was at most.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    peak: u64,
    /// Peak less current.
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

    /// The distance fell below zero: the peak is higher by as much.
    #[cold]
    #[inline(never)]
    fn raise_peak(&mut self) {
        self.peak += self.below_peak.wrapping_neg();
        self.below_peak = 0;
    }

    #[inline(always)]
    fn take(&mut self, amount: u64) {
        self.below_peak += amount;
    }

    #[inline(always)]
    fn current(self) -> u64 {
        self.peak - self.below_peak
    }

    /// Puts the peak elsewhere, at or above the current value.
    fn set_peak(&mut self, peak: u64) {
        *self = Level { peak, below_peak: peak - self.current() };
    }

    /// The sum over parts, of which this is the level.
    fn stat(self, sum: Stat) -> Stat {
        Stat { current: self.current(), peak: self.peak, ..sum }
    }
}

/// What programs hold: allocations, and the bytes of their blocks and of their requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UsageStats {
    /// Number of allocations of at least one byte.
    pub allocations: Stat,
    /// Bytes of their blocks.
    pub allocated_bytes: Stat,
    /// Bytes that the program asked for.
    pub requested_bytes: Stat,
}

impl UsageStats {
    /// The sum over two parts. Its peaks are sums of peaks that need not have been at the same time: upper bounds.
    pub(crate) fn plus(self, other: UsageStats) -> UsageStats {
        let sum = |a: Stat, b: Stat| Stat {
            current: a.current + b.current,
            peak: a.peak + b.peak,
            allocated: a.allocated + b.allocated,
            freed: a.freed + b.freed,
        };
        UsageStats {
            allocations: sum(self.allocations, other.allocations),
            allocated_bytes: sum(self.allocated_bytes, other.allocated_bytes),
            requested_bytes: sum(self.requested_bytes, other.requested_bytes),
        }
    }
}

/// The levels of allocations, allocated bytes and requested bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Levels([Level; 3]);

impl Levels {
    #[inline(always)]
    fn allocate(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.0;
        allocations.add(1);
        allocated.add(allocated_bytes);
        requested.add(requested_bytes);
    }

    #[inline(always)]
    fn free(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        let [allocations, allocated, requested] = &mut self.0;
        allocations.take(1);
        allocated.take(allocated_bytes);
        requested.take(requested_bytes);
    }

    fn restart_peaks(&mut self) {
        self.0.iter_mut().for_each(|level| level.set_peak(level.current()));
    }

    /// Takes the peaks of an outer scope over, where they are higher.
    fn raise_peaks(&mut self, outer: Levels) {
        self.0.iter_mut().zip(outer.0).for_each(|(level, outer)| level.set_peak(level.peak.max(outer.peak)));
    }
}

/// Quantities while they are counted: their levels, and everything that was ever added.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    levels: Levels,
    allocated: [u64; 3],
}

impl Usage {
    #[inline(always)]
    fn allocate(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        // One quantity after the other: two sums side by side become a vector, which takes longer to put together.
        for (quantity, amount) in [1, allocated_bytes, requested_bytes].into_iter().enumerate() {
            self.allocated[quantity] += amount;
            self.levels.0[quantity].add(amount);
        }
    }

    /// What happened since an earlier moment.
    fn since(&self, then: &Usage) -> UsageStats {
        let stat = |quantity: usize| {
            let (level, allocated) = (self.levels.0[quantity], self.allocated[quantity] - then.allocated[quantity]);
            // current = then.current + allocated - freed
            let freed = then.levels.0[quantity].current() + allocated - level.current();
            Stat { current: level.current(), peak: level.peak, allocated, freed }
        };
        UsageStats { allocations: stat(0), allocated_bytes: stat(1), requested_bytes: stat(2) }
    }
}

/// A [`Usage`] with nested scopes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScopedUsage {
    usage: Usage,
    /// What the usage was when each open scope began, peaks included; outermost first.
    scopes: Vec<Usage>,
}

impl ScopedUsage {
    #[inline(always)]
    pub(crate) fn allocate(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.usage.allocate(allocated_bytes, requested_bytes);
    }

    #[inline(always)]
    pub(crate) fn free(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.usage.levels.free(allocated_bytes, requested_bytes);
    }

    pub(crate) fn stats(&self) -> UsageStats {
        self.usage.since(&Usage::default())
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.usage.levels.restart_peaks();
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.usage);
        self.usage.levels.restart_peaks();
    }

    /// What happened since the innermost scope was opened; `allocated` and `freed` count from there.
    pub(crate) fn close_scope(&mut self) -> UsageStats {
        let Some(outer) = self.scopes.pop() else { return UsageStats::default() };
        let stats = self.usage.since(&outer);
        self.usage.levels.raise_peaks(outer.levels);
        stats
    }
}

/// The peaks of a sum over parts that count for themselves, with nested scopes. All else is added up when somebody asks.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScopedPeaks {
    levels: Levels,
    /// What the levels were when each open scope began; outermost first.
    scopes: Vec<Levels>,
}

impl ScopedPeaks {
    #[inline(always)]
    pub(crate) fn allocate(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.levels.allocate(allocated_bytes, requested_bytes);
    }

    #[inline(always)]
    pub(crate) fn free(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.levels.free(allocated_bytes, requested_bytes);
    }

    /// The sum over the parts with its own peaks.
    pub(crate) fn stats(&self, sum: UsageStats) -> UsageStats {
        let [allocations, allocated, requested] = self.levels.0;
        UsageStats {
            allocations: allocations.stat(sum.allocations),
            allocated_bytes: allocated.stat(sum.allocated_bytes),
            requested_bytes: requested.stat(sum.requested_bytes),
        }
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.levels.restart_peaks();
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.levels);
        self.reset_peaks();
    }

    /// What happened since the innermost scope was opened, of which `sum` is what happened in the parts.
    pub(crate) fn close_scope(&mut self, sum: UsageStats) -> UsageStats {
        let Some(outer) = self.scopes.pop() else { return UsageStats::default() };
        let stats = self.stats(sum);
        self.levels.raise_peaks(outer);
        stats
    }
}

/// What happens seldom, counted where it happens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RareCounts {
    /// Times that memory was obtained: births and growths of segments.
    pub(crate) growths: u64,
    pub(crate) trims: u64,
    /// Times that a request was tried again because memory was made available.
    pub(crate) retries: u64,
    /// Requests that ended without memory.
    pub(crate) refusals: u64,
}

/// The usage of one heap, by size class.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapUsage {
    small: ScopedUsage,
    large: ScopedUsage,
    all: ScopedPeaks,
}

impl HeapUsage {
    #[inline(always)]
    fn class(&mut self, class: SizeClass) -> &mut ScopedUsage {
        match class {
            SizeClass::Small => &mut self.small,
            SizeClass::Large => &mut self.large,
        }
    }

    #[inline(always)]
    pub(crate) fn allocate(&mut self, size: Units, requested_bytes: u64) {
        self.class(SizeRules::class_of(size)).allocate(bytes(size), requested_bytes);
        self.all.allocate(bytes(size), requested_bytes);
    }

    #[inline(always)]
    pub(crate) fn free(&mut self, size: Units, requested_bytes: u64) {
        self.class(SizeRules::class_of(size)).free(bytes(size), requested_bytes);
        self.all.free(bytes(size), requested_bytes);
    }

    pub(crate) fn peaks(&self) -> &ScopedPeaks {
        &self.all
    }

    /// Bytes of the blocks that are allocated now.
    #[inline(always)]
    pub(crate) fn allocated_bytes(&self) -> u64 {
        let [_, allocated, _] = &self.all.levels.0;
        allocated.current()
    }

    pub(crate) fn stats(&self) -> ClassStats {
        let (small, large) = (self.small.stats(), self.large.stats());
        ClassStats { all: self.all.stats(small.plus(large)), small, large }
    }

    pub(crate) fn reset_peaks(&mut self) {
        [&mut self.small, &mut self.large].into_iter().for_each(ScopedUsage::reset_peaks);
        self.all.reset_peaks();
    }

    pub(crate) fn open_scope(&mut self) {
        [&mut self.small, &mut self.large].into_iter().for_each(ScopedUsage::open_scope);
        self.all.open_scope();
    }

    pub(crate) fn close_scope(&mut self) -> ClassStats {
        let (small, large) = (self.small.close_scope(), self.large.close_scope());
        ClassStats { all: self.all.close_scope(small.plus(large)), small, large }
    }
}

/// Usage in all, and of the two size classes.
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

impl ClassStats {
    pub(crate) fn plus(self, other: ClassStats) -> ClassStats {
        ClassStats {
            all: self.all.plus(other.all),
            small: self.small.plus(other.small),
            large: self.large.plus(other.large),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_scope_sees_its_own_peak_and_the_outer_one_the_larger() {
        let mut usage = ScopedUsage::default();
        usage.allocate(1024, 1000);
        usage.open_scope();
        usage.free(1024, 1000);
        usage.allocate(512, 10);
        let scope = usage.close_scope().allocated_bytes;
        assert_eq!((scope.current, scope.peak, scope.allocated, scope.freed), (512, 1024, 512, 1024));
        usage.open_scope();
        usage.free(512, 10);
        usage.open_scope();
        usage.allocate(2048, 2048);
        usage.free(2048, 2048);
        assert_eq!(usage.close_scope().allocated_bytes.peak, 2048);
        assert_eq!(usage.close_scope().allocated_bytes.peak, 2048);
        assert_eq!(usage.stats().allocated_bytes.peak, 2048);
        assert_eq!(usage.stats().requested_bytes.current, 0);
    }

    #[test]
    fn closing_more_scopes_than_were_opened_counts_nothing() {
        assert_eq!(ScopedUsage::default().close_scope(), UsageStats::default());
    }
}
