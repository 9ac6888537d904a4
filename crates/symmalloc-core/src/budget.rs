//! Budgets: how much device memory may be held, in configured bytes (rule D4).
//!
//! A budget is one limit with what is reserved under it: a pool's, or the allocator's over all pools. Only segment
//! birth, growth and death touch it, so its atomics are off the path of `allocate` and `free`.
//!
//! What the driver says is free plays no part: the same program meets the same limit at the same op on every rank.

use crate::config::PoolConfig;
use crate::stats::Stat;
use crate::sync::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Which limit was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitScope {
    /// `limit` of the pool.
    Pool,
    /// `limit` of the allocator, over all pools.
    Allocator,
}

/// A limit that a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitMet {
    pub(crate) scope: LimitScope,
    pub(crate) limit_bytes: u64,
}

/// Stands for no limit: nobody has so much.
const UNLIMITED: u64 = u64::MAX;

/// One limit and what is reserved under it.
#[derive(Debug)]
pub(crate) struct Budget {
    /// [`UNLIMITED`] when there is none.
    limit_bytes: AtomicU64,
    reserved_bytes: AtomicU64,
    reserved_bytes_peak: AtomicU64,
    /// Everything that was ever charged and not undone.
    charged_bytes: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit_bytes: Option<u64>) -> Self {
        Budget {
            limit_bytes: AtomicU64::new(limit_bytes.unwrap_or(UNLIMITED)),
            reserved_bytes: AtomicU64::new(0),
            reserved_bytes_peak: AtomicU64::new(0),
            charged_bytes: AtomicU64::new(0),
        }
    }

    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        let limit_bytes = self.limit_bytes.load(Relaxed);
        (limit_bytes != UNLIMITED).then_some(limit_bytes)
    }

    /// What is reserved beyond a lower limit stays; the next charge meets it.
    pub(crate) fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.limit_bytes.store(limit_bytes.unwrap_or(UNLIMITED), Relaxed);
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes.load(Relaxed)
    }

    pub(crate) fn stat(&self) -> Stat {
        let (current, allocated) = (self.reserved_bytes(), self.charged_bytes.load(Relaxed));
        // What another thread is asking the driver for is reserved already and not yet allocated.
        let freed = allocated.saturating_sub(current);
        Stat { current, peak: self.reserved_bytes_peak.load(Relaxed), allocated, freed }
    }

    pub(crate) fn reset_peak(&self) {
        self.reserved_bytes_peak.store(self.reserved_bytes(), Relaxed);
    }

    /// Bytes that may still be reserved.
    fn headroom_bytes(&self) -> u64 {
        self.limit_bytes().map_or(u64::MAX, |limit| limit.saturating_sub(self.reserved_bytes()))
    }

    fn try_charge(&self, size_bytes: u64) -> bool {
        let charge = |reserved: u64| {
            let sum = reserved.checked_add(size_bytes)?;
            self.limit_bytes().is_none_or(|limit| sum <= limit).then_some(sum)
        };
        self.reserved_bytes.fetch_update(Relaxed, Relaxed, charge).is_ok()
    }

    /// The memory that was charged for is there.
    fn confirm(&self, size_bytes: u64) {
        self.charged_bytes.fetch_add(size_bytes, Relaxed);
        self.reserved_bytes_peak.fetch_max(self.reserved_bytes(), Relaxed);
    }

    fn refund(&self, size_bytes: u64) {
        let before = self.reserved_bytes.fetch_sub(size_bytes, Relaxed);
        assert!(before >= size_bytes, "more was refunded than charged");
    }
}

/// The three budgets that every reservation of a heap is charged to. The heap's own has no limit; it counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budgets<'a> {
    pub(crate) heap: &'a Budget,
    pub(crate) pool: &'a Budget,
    pub(crate) allocator: &'a Budget,
}

impl Budgets<'_> {
    /// Sets bytes aside before the driver is asked for them: [`confirm`](Self::confirm) or [`refund`](Self::refund) follows.
    pub(crate) fn charge(self, size_bytes: u64) -> Result<(), LimitMet> {
        let met = |scope, budget: &Budget| LimitMet { scope, limit_bytes: budget.limit_bytes().unwrap_or(UNLIMITED) };
        if !self.pool.try_charge(size_bytes) {
            return Err(met(LimitScope::Pool, self.pool));
        }
        if !self.allocator.try_charge(size_bytes) {
            self.pool.refund(size_bytes);
            return Err(met(LimitScope::Allocator, self.allocator));
        }
        self.heap.try_charge(size_bytes);
        Ok(())
    }

    pub(crate) fn confirm(self, size_bytes: u64) {
        [self.heap, self.pool, self.allocator].into_iter().for_each(|budget| budget.confirm(size_bytes));
    }

    pub(crate) fn refund(self, size_bytes: u64) {
        [self.heap, self.pool, self.allocator].into_iter().for_each(|budget| budget.refund(size_bytes));
    }

    /// Bytes that a pool of this policy may count on. A symmetric pool does not look at the allocator's limit, which pools
    /// that differ between ranks use up too: that limit can refuse it memory, but not shape what it takes (rule D8).
    pub(crate) fn headroom_bytes(self, config: &PoolConfig) -> u64 {
        let pool = self.pool.headroom_bytes();
        if config.symmetric() { pool } else { pool.min(self.allocator.headroom_bytes()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_charge_leaves_all_budgets_as_they_were() {
        let (heap, pool, allocator) = (Budget::new(None), Budget::new(Some(100)), Budget::new(Some(60)));
        let budgets = Budgets { heap: &heap, pool: &pool, allocator: &allocator };
        assert_eq!(budgets.charge(60), Ok(()));
        budgets.confirm(60);
        assert_eq!(budgets.charge(1), Err(LimitMet { scope: LimitScope::Allocator, limit_bytes: 60 }));
        assert_eq!(budgets.charge(41), Err(LimitMet { scope: LimitScope::Pool, limit_bytes: 100 }));
        assert_eq!([&heap, &pool, &allocator].map(Budget::reserved_bytes), [60; 3]);
        budgets.refund(60);
        assert_eq!(pool.stat(), Stat { current: 0, peak: 60, allocated: 60, freed: 60 });
    }

    #[test]
    fn what_the_driver_refused_shows_in_no_peak() {
        let budget = Budget::new(None);
        let budgets = Budgets { heap: &budget, pool: &Budget::new(None), allocator: &Budget::new(None) };
        assert_eq!(budgets.charge(10), Ok(()));
        budgets.refund(10);
        assert_eq!(budget.stat(), Stat::default());
    }

    #[test]
    fn a_lower_limit_takes_nothing_back_and_refuses_more() {
        let budget = Budget::new(None);
        assert!(budget.try_charge(100));
        budget.set_limit_bytes(Some(60));
        assert!(!budget.try_charge(1));
        assert_eq!((budget.limit_bytes(), budget.reserved_bytes(), budget.headroom_bytes()), (Some(60), 100, 0));
        budget.refund(50);
        assert!(budget.try_charge(10) && !budget.try_charge(1));
        budget.set_limit_bytes(None);
        assert!(budget.try_charge(1));
    }
}
