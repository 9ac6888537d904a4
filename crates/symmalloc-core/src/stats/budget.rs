//! Budgets: how much device memory may be held, in configured bytes (rule D4).
//!
//! A budget is one limit with what is reserved under it: a pool's, or the allocator's over all pools. A heap has one without
//! a limit, which counts. Only obtaining memory and giving it back touch a budget, so its lock is off the path of a cache hit.
//!
//! What the driver says is free plays no part: the same program meets the same limit at the same op on every rank.

use crate::config::PoolConfig;
use crate::config::errors::{LimitScope, OutOfMemoryCause};
use crate::stats::usage::Stat;
use crate::sync::lock::{Lock, LockCell};

/// One limit and what is reserved under it.
pub(crate) struct Budget<L: Lock>(L::Cell<Counts>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    limit_bytes: Option<u64>,
    /// Set aside or held; never above the limit but for a limit that was lowered.
    reserved_bytes: u64,
    reserved_bytes_peak: u64,
    /// Everything that was ever obtained.
    obtained_bytes: u64,
}

impl<L: Lock> Budget<L> {
    pub(crate) fn new(limit_bytes: Option<u64>) -> Self {
        Budget(LockCell::new(Counts { limit_bytes, ..Counts::default() }))
    }

    /// Counts from zero. Nothing is reserved.
    pub(crate) fn restart(&self, limit_bytes: Option<u64>) {
        *self.0.lock() = Counts { limit_bytes, ..Counts::default() };
    }

    fn counts(&self) -> Counts {
        *self.0.lock()
    }

    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.counts().limit_bytes
    }

    /// What is reserved beyond a lower limit stays; the next charge meets it.
    pub(crate) fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.0.lock().limit_bytes = limit_bytes;
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.counts().reserved_bytes
    }

    pub(crate) fn stat(&self) -> Stat {
        let Counts { reserved_bytes, reserved_bytes_peak, obtained_bytes, .. } = self.counts();
        Stat::new(reserved_bytes, reserved_bytes_peak, obtained_bytes)
    }

    pub(crate) fn reset_peak(&self) {
        let mut counts = self.0.lock();
        counts.reserved_bytes_peak = counts.reserved_bytes;
    }

    /// Bytes that may still be reserved.
    fn headroom_bytes(&self) -> u64 {
        let Counts { limit_bytes, reserved_bytes, .. } = self.counts();
        limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(reserved_bytes))
    }

    /// Sets bytes aside under the limit, or says which limit stands in the way.
    fn charge(&self, size_bytes: u64, scope: LimitScope) -> Result<(), OutOfMemoryCause> {
        let mut counts = self.0.lock();
        let sum = counts.reserved_bytes.checked_add(size_bytes);
        let limit_bytes = counts.limit_bytes.unwrap_or(u64::MAX);
        match sum.filter(|sum| *sum <= limit_bytes) {
            Some(sum) => {
                counts.reserved_bytes = sum;
                Ok(())
            }
            None => Err(OutOfMemoryCause::Limit { scope, limit_bytes }),
        }
    }

    /// The memory that was charged for is there.
    fn confirm(&self, size_bytes: u64) {
        let mut counts = self.0.lock();
        counts.obtained_bytes += size_bytes;
        counts.reserved_bytes_peak = counts.reserved_bytes_peak.max(counts.reserved_bytes);
    }

    fn refund(&self, size_bytes: u64) {
        let mut counts = self.0.lock();
        let left = counts.reserved_bytes.checked_sub(size_bytes);
        counts.reserved_bytes = left.expect("no more is refunded than was charged");
    }
}

/// The three budgets that every reservation of a heap is charged to.
pub(crate) struct Budgets<'a, L: Lock> {
    pub(crate) heap: &'a Budget<L>,
    pub(crate) pool: &'a Budget<L>,
    pub(crate) allocator: &'a Budget<L>,
}

impl<'a, L: Lock> Budgets<'a, L> {
    fn all(&self) -> [&'a Budget<L>; 3] {
        [self.heap, self.pool, self.allocator]
    }

    /// Sets bytes aside before the driver is asked for them. Dropping the charge gives them back.
    pub(crate) fn charge(self, size_bytes: u64) -> Result<Charge<'a, L>, OutOfMemoryCause> {
        self.pool.charge(size_bytes, LimitScope::Pool)?;
        if let Err(met) = self.allocator.charge(size_bytes, LimitScope::Allocator) {
            self.pool.refund(size_bytes);
            return Err(met);
        }
        // It has no limit.
        let _counted = self.heap.charge(size_bytes, LimitScope::Pool);
        Ok(Charge { budgets: self, size_bytes })
    }

    /// The memory that a charge was [kept](Charge::keep) for is there.
    pub(crate) fn confirm(&self, size_bytes: u64) {
        self.all().into_iter().for_each(|budget| budget.confirm(size_bytes));
    }

    /// The memory is back on the device, or the driver did not give what a charge was [kept](Charge::keep) for.
    pub(crate) fn refund(&self, size_bytes: u64) {
        self.all().into_iter().for_each(|budget| budget.refund(size_bytes));
    }

    /// Bytes that a pool of this policy may count on. A symmetric pool does not look at the allocator's limit, which pools
    /// that differ between ranks use up too: that limit can refuse it memory, but not shape what it takes (rule D8).
    pub(crate) fn headroom_bytes(&self, config: &PoolConfig) -> u64 {
        let pool = self.pool.headroom_bytes();
        if config.symmetric() { pool } else { pool.min(self.allocator.headroom_bytes()) }
    }
}

/// Bytes that are set aside until the driver has given them. A driver call that fails, or panics, gives them back.
#[must_use]
pub(crate) struct Charge<'a, L: Lock> {
    budgets: Budgets<'a, L>,
    size_bytes: u64,
}

impl<L: Lock> Charge<'_, L> {
    /// The memory is there.
    pub(crate) fn confirm(self) {
        self.budgets.confirm(self.size_bytes);
        self.keep();
    }

    /// Leaves the bytes set aside. The caller confirms or refunds them.
    pub(crate) fn keep(mut self) {
        self.size_bytes = 0;
    }
}

impl<L: Lock> Drop for Charge<'_, L> {
    fn drop(&mut self) {
        if self.size_bytes > 0 {
            self.budgets.refund(self.size_bytes);
        }
    }
}
