//! Budgets limit the device memory that heaps may hold. The limits are configured in bytes (rule D4).
//!
//! A budget is one limit and the memory reserved under it. Each pool has a budget, and the allocator has one for all
//! pools together. The budget of a heap has no limit and only counts. Only acquiring and releasing memory touches a
//! budget, so its lock is not on the path of a cache hit.
//!
//! The amount of memory that is free on the device has no influence. The same program therefore reaches the same limit
//! at the same op on every rank.

use crate::config::PoolConfig;
use crate::config::errors::{LimitScope, OutOfMemoryCause};
use crate::stats::usage::Stat;
use crate::sync::lock::{Lock, LockCell};

/// One limit and the memory reserved under it.
pub(crate) struct Budget<L: Lock>(L::Cell<Counts>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    limit_bytes: Option<u64>,
    /// Bytes that are charged or held. They exceed the limit only if the limit was lowered afterward.
    reserved_bytes: u64,
    reserved_bytes_peak: u64,
    /// Total of all memory acquired so far.
    obtained_bytes: u64,
    /// Total of all memory released so far.
    released_bytes: u64,
}

impl Counts {
    fn take(&mut self, size_bytes: u64) {
        let left = self.reserved_bytes.checked_sub(size_bytes);
        self.reserved_bytes = left.expect("a refund must not exceed the charged bytes");
    }
}

impl<L: Lock> Budget<L> {
    pub(crate) fn new(limit_bytes: Option<u64>) -> Self {
        Budget(LockCell::new(Counts { limit_bytes, ..Counts::default() }))
    }

    /// Sets the limit and resets the counts. Nothing may be reserved at this time.
    pub(crate) fn restart(&self, limit_bytes: Option<u64>) {
        *self.0.lock() = Counts { limit_bytes, ..Counts::default() };
    }

    fn counts(&self) -> Counts {
        *self.0.lock()
    }

    pub(crate) fn limit_bytes(&self) -> Option<u64> {
        self.counts().limit_bytes
    }

    /// Changes the limit. Memory that already exceeds it stays; the next charge is refused.
    pub(crate) fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.0.lock().limit_bytes = limit_bytes;
    }

    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.counts().reserved_bytes
    }

    /// Returns the total of all memory released so far.
    pub(crate) fn released_bytes(&self) -> u64 {
        self.counts().released_bytes
    }

    pub(crate) fn stat(&self) -> Stat {
        let Counts { reserved_bytes, reserved_bytes_peak, obtained_bytes, .. } = self.counts();
        Stat::new(reserved_bytes, reserved_bytes_peak, obtained_bytes)
    }

    pub(crate) fn reset_peak(&self) {
        let mut counts = self.0.lock();
        counts.reserved_bytes_peak = counts.reserved_bytes;
    }

    /// Returns the bytes that may still be reserved.
    fn headroom_bytes(&self) -> u64 {
        let Counts { limit_bytes, reserved_bytes, .. } = self.counts();
        limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(reserved_bytes))
    }

    /// Charges bytes to the limit, or returns the limit that refuses them.
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

    /// Records that charged memory was acquired.
    fn confirm(&self, size_bytes: u64) {
        let mut counts = self.0.lock();
        counts.obtained_bytes += size_bytes;
        counts.reserved_bytes_peak = counts.reserved_bytes_peak.max(counts.reserved_bytes);
    }

    /// Refunds memory that was never acquired.
    fn refund(&self, size_bytes: u64) {
        self.0.lock().take(size_bytes);
    }

    /// Refunds memory that was released.
    fn release(&self, size_bytes: u64) {
        let mut counts = self.0.lock();
        counts.take(size_bytes);
        counts.released_bytes += size_bytes;
    }
}

/// The three budgets to which every reservation of a heap is charged.
pub(crate) struct Budgets<'a, L: Lock> {
    pub(crate) heap: &'a Budget<L>,
    pub(crate) pool: &'a Budget<L>,
    pub(crate) allocator: &'a Budget<L>,
}

impl<'a, L: Lock> Budgets<'a, L> {
    fn all(&self) -> [&'a Budget<L>; 3] {
        [self.heap, self.pool, self.allocator]
    }

    /// Charges bytes before memory is requested from the driver. Dropping the charge refunds them.
    pub(crate) fn charge(self, size_bytes: u64) -> Result<Charge<'a, L>, OutOfMemoryCause> {
        self.pool.charge(size_bytes, LimitScope::Pool)?;
        if let Err(met) = self.allocator.charge(size_bytes, LimitScope::Allocator) {
            self.pool.refund(size_bytes);
            return Err(met);
        }
        // The heap's budget has no limit.
        let _counted = self.heap.charge(size_bytes, LimitScope::Pool);
        Ok(Charge { budgets: self, size_bytes })
    }

    /// Records that the memory of a charge that was [left in place](Charge::leave_charged) was acquired.
    pub(crate) fn confirm(&self, size_bytes: u64) {
        self.all().into_iter().for_each(|budget| budget.confirm(size_bytes));
    }

    /// Refunds memory that was released, or that the driver failed to provide for a charge that was [left in
    /// place](Charge::leave_charged).
    pub(crate) fn release(&self, size_bytes: u64) {
        self.all().into_iter().for_each(|budget| budget.release(size_bytes));
    }

    /// Returns the bytes that a pool of this policy may still reserve. A symmetric pool ignores the allocator's limit,
    /// because pools that differ between ranks count toward that limit too. The limit can refuse memory to a symmetric
    /// pool, but must not influence how much memory the pool takes (rule D8).
    pub(crate) fn headroom_bytes(&self, config: &PoolConfig) -> u64 {
        let pool = self.pool.headroom_bytes();
        if config.symmetric() { pool } else { pool.min(self.allocator.headroom_bytes()) }
    }
}

/// Bytes that are charged before the driver provides the memory. If the driver call fails or panics, dropping the
/// charge refunds the bytes.
#[must_use]
pub(crate) struct Charge<'a, L: Lock> {
    budgets: Budgets<'a, L>,
    size_bytes: u64,
}

impl<L: Lock> Charge<'_, L> {
    /// Records that the memory was acquired.
    pub(crate) fn confirm(self) {
        self.budgets.confirm(self.size_bytes);
        self.leave_charged();
    }

    /// Keeps the bytes charged. The caller confirms or refunds them.
    pub(crate) fn leave_charged(mut self) {
        self.size_bytes = 0;
    }
}

impl<L: Lock> Drop for Charge<'_, L> {
    fn drop(&mut self) {
        if self.size_bytes > 0 {
            self.budgets.all().into_iter().for_each(|budget| budget.refund(self.size_bytes));
        }
    }
}
