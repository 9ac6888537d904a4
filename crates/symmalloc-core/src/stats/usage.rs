//! Statistics, with the words and the meaning of PyTorch's `memory_stats`.
//!
//! Every heap counts its own usage under its own lock. Sums over heaps are made when somebody asks.
//!
//! ```text
//!  freed = allocated − current        all = small + large, but for the peak, which is counted by itself
//! ```
//!
//! A [`StatScope`](crate::allocator::report::StatScope) asks for the same numbers over a part of the program. Opening one saves the
//! counters and starts the peaks anew. Closing one gives the outer scope the larger of both peaks. Scopes nest, and cost
//! nothing between open and close.

use crate::config::size_rules::SizeClass;
use crate::types::units::{Units, bytes};

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

impl Stat {
    /// A quantity of which so much was ever added.
    pub(crate) fn new(current: u64, peak: u64, allocated: u64) -> Self {
        Stat { current, peak, allocated, freed: allocated.saturating_sub(current) }
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

/// What happens seldom, counted where it happens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RareCounts {
    /// Times that memory was obtained: new segments and growths of segments.
    pub(crate) growths: u64,
    pub(crate) trims: u64,
    /// Times that a request was tried again because memory was made available.
    pub(crate) retries: u64,
    /// Requests that ended without memory.
    pub(crate) refusals: u64,
}

/// One quantity while it is counted.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    current: u64,
    peak: u64,
    /// Everything that was ever added.
    allocated: u64,
}

impl Counter {
    #[inline]
    fn add(&mut self, amount: u64) {
        self.allocated += amount;
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    fn take(&mut self, amount: u64) {
        self.current -= amount;
    }

    /// What happened since an earlier moment.
    fn since(&self, then: &Counter) -> Stat {
        let allocated = self.allocated - then.allocated;
        Stat {
            current: self.current,
            peak: self.peak,
            allocated,
            // current = then.current + allocated - freed
            freed: then.current + allocated - self.current,
        }
    }
}

/// Allocations, allocated bytes and requested bytes.
type Counters = [Counter; 3];

/// Small and large blocks, and both together.
#[derive(Clone, Copy, Debug, Default)]
struct ClassCounters([Counters; 3]);

const SMALL: usize = 0;
const LARGE: usize = 1;
const ALL: usize = 2;

impl ClassCounters {
    /// What happened since an earlier moment.
    fn since(&self, then: &ClassCounters) -> ClassStats {
        let [small, large, all] = [SMALL, LARGE, ALL].map(|class| {
            let [allocations, allocated_bytes, requested_bytes] =
                [0, 1, 2].map(|quantity| self.0[class][quantity].since(&then.0[class][quantity]));
            UsageStats { allocations, allocated_bytes, requested_bytes }
        });
        ClassStats { all, small, large }
    }

    fn counters_mut(&mut self) -> impl Iterator<Item = &mut Counter> {
        self.0.as_flattened_mut().iter_mut()
    }
}

/// The usage of one heap, or of all heaps where one thread drives the allocator.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    counters: ClassCounters,
    /// What the counters were when each open scope began; outermost first.
    scopes: Vec<ClassCounters>,
}

impl Usage {
    #[inline]
    pub(crate) fn allocate(&mut self, size: Units, requested_bytes: u64) {
        let amounts = [1, bytes(size), requested_bytes];
        for class in [class_of(size), ALL] {
            for (counter, amount) in self.counters.0[class].iter_mut().zip(amounts) {
                counter.add(amount);
            }
        }
    }

    #[inline]
    pub(crate) fn free(&mut self, size: Units, requested_bytes: u64) {
        let amounts = [1, bytes(size), requested_bytes];
        for class in [class_of(size), ALL] {
            for (counter, amount) in self.counters.0[class].iter_mut().zip(amounts) {
                counter.take(amount);
            }
        }
    }

    /// Bytes of the blocks that are allocated now.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.counters.0[ALL][1].current
    }

    /// Number of allocations of at least one byte now.
    pub(crate) fn allocations(&self) -> u64 {
        self.counters.0[ALL][0].current
    }

    pub(crate) fn stats(&self) -> ClassStats {
        self.counters.since(&ClassCounters::default())
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.counters.counters_mut().for_each(|counter| counter.peak = counter.current);
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(self.counters);
        self.reset_peaks();
    }

    /// What happened since the innermost scope was opened; `allocated` and `freed` count from there.
    pub(crate) fn close_scope(&mut self) -> ClassStats {
        let Some(mut outer) = self.scopes.pop() else { return ClassStats::default() };
        let stats = self.counters.since(&outer);
        for (counter, outer) in self.counters.counters_mut().zip(outer.counters_mut()) {
            counter.peak = counter.peak.max(outer.peak);
        }
        stats
    }
}

#[inline]
fn class_of(size: Units) -> usize {
    match SizeClass::of(size) {
        SizeClass::Small => SMALL,
        SizeClass::Large => LARGE,
    }
}
