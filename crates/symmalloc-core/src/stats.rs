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

/// A quantity while it is counted.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    allocated: u64,
    peak: u64,
    /// Peak less current.
    below_peak: u64,
}

impl Counter {
    #[inline(always)]
    fn add(&mut self, amount: u64) {
        self.allocated += amount;
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

    fn current(&self) -> u64 {
        self.peak - self.below_peak
    }

    /// Puts the peak elsewhere, at or above the current value.
    fn set_peak(&mut self, peak: u64) {
        (self.peak, self.below_peak) = (peak, peak - self.current());
    }

    fn stat(&self) -> Stat {
        let current = self.current();
        Stat { current, peak: self.peak, allocated: self.allocated, freed: self.allocated - current }
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

#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    allocations: Counter,
    allocated_bytes: Counter,
    requested_bytes: Counter,
}

impl Usage {
    #[inline(always)]
    fn allocate(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.allocations.add(1);
        self.allocated_bytes.add(allocated_bytes);
        self.requested_bytes.add(requested_bytes);
    }

    #[inline(always)]
    fn free(&mut self, allocated_bytes: u64, requested_bytes: u64) {
        self.allocations.take(1);
        self.allocated_bytes.take(allocated_bytes);
        self.requested_bytes.take(requested_bytes);
    }

    fn stats(&self) -> UsageStats {
        UsageStats {
            allocations: self.allocations.stat(),
            allocated_bytes: self.allocated_bytes.stat(),
            requested_bytes: self.requested_bytes.stat(),
        }
    }

    fn counters(&mut self) -> [&mut Counter; 3] {
        [&mut self.allocations, &mut self.allocated_bytes, &mut self.requested_bytes]
    }

    fn restart_peaks(&mut self) {
        self.counters().into_iter().for_each(|counter| counter.set_peak(counter.current()));
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
        self.usage.free(allocated_bytes, requested_bytes);
    }

    pub(crate) fn stats(&self) -> UsageStats {
        self.usage.stats()
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.usage.restart_peaks();
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.usage);
        self.usage.restart_peaks();
    }

    /// What happened since the innermost scope was opened; `allocated` and `freed` count from there.
    pub(crate) fn close_scope(&mut self) -> UsageStats {
        let Some(mut outer) = self.scopes.pop() else { return UsageStats::default() };
        let since = |now: Counter, then: Counter| {
            let allocated = now.allocated - then.allocated;
            // current = then.current + allocated - freed
            Stat {
                current: now.current(),
                peak: now.peak,
                allocated,
                freed: then.current() + allocated - now.current(),
            }
        };
        let (now, then) = (self.usage, outer);
        for (counter, outer) in self.usage.counters().into_iter().zip(outer.counters()) {
            counter.set_peak(counter.peak.max(outer.peak));
        }
        UsageStats {
            allocations: since(now.allocations, then.allocations),
            allocated_bytes: since(now.allocated_bytes, then.allocated_bytes),
            requested_bytes: since(now.requested_bytes, then.requested_bytes),
        }
    }
}

/// The usage of one heap, by size class.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapUsage {
    small: ScopedUsage,
    large: ScopedUsage,
    all: ScopedUsage,
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

    pub(crate) fn all(&self) -> &ScopedUsage {
        &self.all
    }

    pub(crate) fn stats(&self) -> ClassStats {
        ClassStats { all: self.all.stats(), small: self.small.stats(), large: self.large.stats() }
    }

    pub(crate) fn reset_peaks(&mut self) {
        [&mut self.small, &mut self.large, &mut self.all].into_iter().for_each(ScopedUsage::reset_peaks);
    }

    pub(crate) fn open_scope(&mut self) {
        [&mut self.small, &mut self.large, &mut self.all].into_iter().for_each(ScopedUsage::open_scope);
    }

    pub(crate) fn close_scope(&mut self) -> ClassStats {
        ClassStats { all: self.all.close_scope(), small: self.small.close_scope(), large: self.large.close_scope() }
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
