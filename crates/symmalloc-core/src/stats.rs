//! Statistics, with the words and the meaning of PyTorch's `memory_stats`.
//!
//! Counting happens on the path of `allocate` and `free`, so nothing is computed there that can be computed when somebody
//! asks. A counter holds a mark, at most its peak, and how far below it is: adding takes from that distance, and only when
//! the distance does not suffice, which in a steady state happens seldom, may there be a new peak.
//!
//! ```text
//!  current = mark − below_mark            freed = allocated − current
//!  all     = small + large                (current, allocated, freed; a peak is its own)
//! ```
//!
//! A [`StatScope`](crate::report::StatScope) asks for the same numbers over a part of the program. Opening one saves the peaks and starts them
//! anew; closing one gives the outer scope the larger of both. Scopes nest, and cost nothing between open and close.

use crate::level::{Level, Levels};
use crate::size_rules::{SizeClass, SizeRules};
use crate::units::{Units, bytes, units};

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

/// One quantity of one size class while it is counted.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Everything that was ever added.
    allocated: u64,
    peak: u64,
    /// How high it may go unnoticed: not above its peak, and of bytes the two classes together not above the peak of their sum.
    mark: u64,
    /// Mark less current.
    below_mark: u64,
}

impl Count {
    /// Whether it is above its mark now.
    #[inline(always)]
    fn add(&mut self, amount: u64) -> bool {
        self.allocated += amount;
        let (below_mark, is_above) = self.below_mark.overflowing_sub(amount);
        self.below_mark = below_mark;
        is_above
    }

    #[inline(always)]
    fn take(&mut self, amount: u64) {
        self.below_mark += amount;
    }

    #[inline(always)]
    fn current(&self) -> u64 {
        // Above its mark it is further below than zero.
        self.mark.wrapping_sub(self.below_mark)
    }

    /// Puts the mark elsewhere, at or above the current value.
    fn set_mark(&mut self, mark: u64) {
        (self.mark, self.below_mark) = (mark, mark - self.current());
    }

    /// What happened since an earlier moment.
    fn since(&self, then: &Count) -> Stat {
        let (current, allocated) = (self.current(), self.allocated - then.allocated);
        // current = then.current + allocated - freed
        Stat { current, peak: self.peak, allocated, freed: then.current() + allocated - current }
    }
}

/// Small and large blocks, and of each: allocations, allocated bytes and requested bytes.
type Counts = [[Count; 3]; 2];

/// The usage of one heap, by size class. The peaks of the bytes of both classes together cost nothing on the way: each class
/// has a mark.
///
/// ```text
///  small   ████████──────        █ current    ─ up to its mark
///  large   ███████████───        Σ marks ≤ peak: a class that stays below its mark raises neither its peak nor the common one
/// ```
/// A class that passes its mark gets half of what is left up to the common peak, so that marks are passed seldom. Allocations
/// have a level of their own for both classes: a program that keeps as many as ever, and replaces small ones by large ones,
/// leaves nothing to share out.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapUsage {
    counts: Counts,
    /// Of both classes together.
    allocations: Level,
    /// Of both classes together: allocated and requested bytes.
    byte_peaks: [u64; 2],
    /// What the counts and the common peaks were when each open scope began; outermost first.
    scopes: Vec<(Counts, [u64; 3])>,
}

impl HeapUsage {
    #[inline(always)]
    pub(crate) fn allocate(&mut self, size: Units, requested_bytes: u64) {
        // One quantity after the other: two sums side by side become a vector, which takes longer to put together.
        let allocated_bytes = bytes(size);
        for (quantity, amount) in [1, allocated_bytes, requested_bytes].into_iter().enumerate() {
            if counts_of(&mut self.counts, size)[quantity].add(amount) {
                self.pass_mark(allocated_bytes, quantity);
            }
        }
        self.allocations.add(1);
    }

    #[inline(always)]
    pub(crate) fn free(&mut self, size: Units, requested_bytes: u64) {
        let [allocations, allocated, requested] = counts_of(&mut self.counts, size);
        allocations.take(1);
        allocated.take(bytes(size));
        requested.take(requested_bytes);
        self.allocations.take(1);
    }

    /// The class of blocks with so many bytes is above its mark: there may be new peaks, and there are new marks.
    #[cold]
    #[inline(never)]
    fn pass_mark(&mut self, allocated_bytes: u64, quantity: usize) {
        let class = SizeRules::class_of(units(allocated_bytes)) as usize;
        let [mut this, mut other] = [self.counts[class][quantity], self.counts[1 - class][quantity]];
        this.peak = this.peak.max(this.current());
        match quantity.checked_sub(1) {
            None => this.set_mark(this.peak),
            Some(of_bytes) => {
                let sum = this.current() + other.current();
                let peak = self.byte_peaks[of_bytes].max(sum);
                this.set_mark(this.peak.min(this.current() + (peak - sum).div_ceil(2)));
                other.set_mark(other.peak.min(peak - this.mark));
                self.byte_peaks[of_bytes] = peak;
            }
        }
        (self.counts[class][quantity], self.counts[1 - class][quantity]) = (this, other);
    }

    /// The levels of both classes together: now, and when each open scope began, outermost first.
    pub(crate) fn levels(&self) -> (Levels, Vec<Levels>) {
        let levels = |counts: &Counts, peaks: &[u64; 3]| {
            Levels::new([0, 1, 2].map(|quantity| (peaks[quantity], current(counts, quantity))))
        };
        (levels(&self.counts, &self.peaks()), self.scopes.iter().map(|(counts, peaks)| levels(counts, peaks)).collect())
    }

    /// Bytes of the blocks that are allocated now.
    #[inline(always)]
    pub(crate) fn allocated_bytes(&self) -> u64 {
        current(&self.counts, 1)
    }

    /// Of both classes together.
    fn peaks(&self) -> [u64; 3] {
        let [allocated, requested] = self.byte_peaks;
        [self.allocations.peak(), allocated, requested]
    }

    fn set_peaks(&mut self, [allocations, allocated, requested]: [u64; 3]) {
        self.allocations.set(allocations, self.allocations.current());
        self.byte_peaks = [allocated, requested];
    }

    pub(crate) fn stats(&self) -> ClassStats {
        self.since(&Counts::default())
    }

    /// What happened since an earlier moment.
    fn since(&self, then: &Counts) -> ClassStats {
        let class = |class: usize| {
            let [allocations, allocated_bytes, requested_bytes] =
                [0, 1, 2].map(|quantity| self.counts[class][quantity].since(&then[class][quantity]));
            UsageStats { allocations, allocated_bytes, requested_bytes }
        };
        let (small, large) = (class(SizeClass::Small as usize), class(SizeClass::Large as usize));
        let mut all = small.plus(large);
        [all.allocations.peak, all.allocated_bytes.peak, all.requested_bytes.peak] = self.peaks();
        ClassStats { all, small, large }
    }

    pub(crate) fn reset_peaks(&mut self) {
        for count in self.counts.as_flattened_mut() {
            count.peak = count.current();
            count.set_mark(count.peak);
        }
        self.set_peaks([0, 1, 2].map(|quantity| current(&self.counts, quantity)));
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push((self.counts, self.peaks()));
        self.reset_peaks();
    }

    /// What happened since the innermost scope was opened; `allocated` and `freed` count from there.
    pub(crate) fn close_scope(&mut self) -> ClassStats {
        let Some((outer, outer_peaks)) = self.scopes.pop() else { return ClassStats::default() };
        let stats = self.since(&outer);
        for (count, outer) in self.counts.as_flattened_mut().iter_mut().zip(outer.as_flattened()) {
            count.peak = count.peak.max(outer.peak);
        }
        let inner_peaks = self.peaks();
        self.set_peaks([0, 1, 2].map(|quantity| inner_peaks[quantity].max(outer_peaks[quantity])));
        stats
    }
}

/// The counts of a block's class.
#[inline(always)]
fn counts_of(counts: &mut Counts, size: Units) -> &mut [Count; 3] {
    let [small, large] = counts;
    match SizeRules::class_of(size) {
        SizeClass::Small => small,
        SizeClass::Large => large,
    }
}

/// A quantity of both classes together.
#[inline(always)]
fn current(counts: &Counts, quantity: usize) -> u64 {
    let [small, large] = counts;
    small[quantity].current() + large[quantity].current()
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
    use proptest::prelude::*;

    #[test]
    fn an_inner_scope_sees_its_own_peak_and_the_outer_one_the_larger() {
        let mut usage = HeapUsage::default();
        usage.allocate(2, 1000);
        usage.open_scope();
        usage.free(2, 1000);
        usage.allocate(1, 10);
        let scope = usage.close_scope().small.allocated_bytes;
        assert_eq!((scope.current, scope.peak, scope.allocated, scope.freed), (512, 1024, 512, 1024));
        usage.open_scope();
        usage.free(1, 10);
        usage.open_scope();
        usage.allocate(4, 2048);
        usage.free(4, 2048);
        assert_eq!(usage.close_scope().all.allocated_bytes.peak, 2048);
        assert_eq!(usage.close_scope().all.allocated_bytes.peak, 2048);
        assert_eq!(usage.stats().all.allocated_bytes.peak, 2048);
        assert_eq!(usage.stats().all.requested_bytes.current, 0);
    }

    #[test]
    fn allocations_of_both_classes_have_a_peak_of_their_own_in_each_scope() {
        const LARGE: Units = 5000;
        let (mut usage, peak) = (HeapUsage::default(), |stats: ClassStats| stats.all.allocations.peak);
        (0..3).for_each(|_| usage.allocate(1, 10));
        usage.open_scope();
        usage.free(1, 10);
        usage.free(1, 10);
        usage.allocate(LARGE, 10);
        assert_eq!(peak(usage.close_scope()), 3, "as many as there were when it began");
        usage.open_scope();
        (0..2).for_each(|_| usage.allocate(LARGE, 10));
        assert_eq!(peak(usage.close_scope()), 4);
        assert_eq!(peak(usage.stats()), 4, "the outer scope gets the larger one");
        (0..4).for_each(|small| if small == 0 { usage.free(1, 10) } else { usage.free(LARGE, 10) });
        usage.open_scope();
        usage.allocate(1, 10);
        assert_eq!((peak(usage.close_scope()), peak(usage.stats())), (1, 4), "and keeps its own if that is larger");
    }

    #[test]
    fn closing_more_scopes_than_were_opened_counts_nothing() {
        assert_eq!(HeapUsage::default().close_scope(), ClassStats::default());
    }

    /// Frees one of those that are live, or allocates a small or a large size.
    fn steps() -> impl Strategy<Value = Vec<(bool, Units)>> {
        prop::collection::vec((any::<bool>(), prop_oneof![1..9u32, 2000..2100u32, 5000..5009u32]), 0..200)
    }

    proptest! {
        #[test]
        fn the_peaks_of_a_class_and_of_both_are_the_highest_they_ever_were(steps in steps(), reset in 0..200usize) {
            let (mut usage, mut live) = (HeapUsage::default(), Vec::new());
            let (mut currents, mut peaks) = ([[0; 3]; 3], [[0; 3]; 3]);
            for (step, (frees, size)) in steps.into_iter().enumerate() {
                if step == reset {
                    usage.reset_peaks();
                    peaks = currents;
                }
                let requested = |size: Units| bytes(size) - 1;
                if frees && !live.is_empty() {
                    let size = live.swap_remove(size as usize % live.len());
                    usage.free(size, requested(size));
                } else {
                    live.push(size);
                    usage.allocate(size, requested(size));
                }
                let is_small = |size: &Units| SizeRules::class_of(*size) == SizeClass::Small;
                let of = |counts: fn(bool) -> bool| {
                    let sizes = || live.iter().filter(|size| counts(is_small(size)));
                    let allocated: u64 = sizes().map(|size| bytes(*size)).sum();
                    let requested: u64 = sizes().map(|size| requested(*size)).sum();
                    [sizes().count() as u64, allocated, requested]
                };
                currents = [of(|small| small), of(|small| !small), of(|_| true)];
                for (peak, current) in peaks.as_flattened_mut().iter_mut().zip(currents.as_flattened()) {
                    *peak = (*peak).max(*current);
                }
                let stats = usage.stats();
                for ((stats, peaks), currents) in [stats.small, stats.large, stats.all].into_iter().zip(peaks).zip(currents) {
                    let counted = [stats.allocations, stats.allocated_bytes, stats.requested_bytes];
                    prop_assert_eq!(counted.map(|stat| stat.current), currents);
                    prop_assert_eq!(counted.map(|stat| stat.peak), peaks);
                }
            }
        }
    }
}
