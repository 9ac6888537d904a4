//! A count of the work that calls perform, for programs that replay recordings from untrusted sources.
//!
//! A cache hit costs the same whatever happened before. Rare calls do not: a trim visits the pool's free memory, and a
//! sleep visits all of its blocks. A recording that repeats such a call while the pool has many blocks costs (calls) ×
//! (blocks). The loops of rare calls therefore count their *work*, and a replay ends when its [`Allowance`] is
//! exhausted. Work depends only on the ops, like placements. No decision reads it.
//!
//! ```text
//! debt after an op  =  max(0, debt before + work of the op - WORK_PER_OP)            debt > WORK_AT_ONCE: too much
//! ```

use std::cell::Cell;

/// Units of work that each op may do on average.
pub const WORK_PER_OP: u64 = 1000;
/// Units of work that all ops together may do beyond this average. A unit takes a few nanoseconds.
pub const WORK_AT_ONCE: u64 = 50_000_000;

/// Units of work for each call that maps or unmaps memory.
pub(crate) const WORK_PER_MAP: usize = 16;
/// Units of work for each heap that a call visits.
pub(crate) const WORK_PER_HEAP: usize = 16;
/// Units of work for the trim of a heap, even if it releases nothing.
pub(crate) const WORK_PER_TRIM: usize = 64;

thread_local! {
    /// Work of this thread so far.
    static WORK: Cell<u64> = const { Cell::new(0) };
}

/// Counts units of work of the current thread.
#[inline]
pub fn count(units: usize) {
    WORK.set(WORK.get().wrapping_add(units as u64));
}

/// Counts a sort of `entries` entries.
#[inline]
pub fn count_sort(entries: usize) {
    count(entries.saturating_mul(search_steps(entries)));
}

/// Counts a binary search in `entries` entries.
#[inline]
pub fn count_search(entries: usize) {
    count(search_steps(entries));
}

fn search_steps(entries: usize) -> usize {
    entries.checked_ilog2().unwrap_or(0) as usize + 1
}

/// Returns the work of the current thread so far.
#[inline]
pub fn so_far() -> u64 {
    WORK.get()
}

/// Error of a program that does more work than its ops allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the program does more than {WORK_AT_ONCE} units of work in addition to {WORK_PER_OP} for each op: it repeats trims, sleeps, observers or \
     waits over too many blocks, heaps or streams"
)]
pub struct TooMuchWork;

/// The work that a program may still do.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    debt: u64,
    at_once: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Allowance::of(WORK_AT_ONCE)
    }
}

impl Allowance {
    /// Allows this much work in addition to [`WORK_PER_OP`].
    pub fn of(at_once: u64) -> Self {
        Allowance { debt: 0, at_once }
    }

    /// Executes one op.
    ///
    /// # Errors
    /// Returns an error if the program has exhausted its allowance. Even then, the op was executed.
    #[inline(always)]
    pub fn charge<T>(&mut self, op: impl FnOnce() -> T) -> Result<T, TooMuchWork> {
        let before = so_far();
        let done = op();
        self.debt = (self.debt + so_far().wrapping_sub(before)).saturating_sub(WORK_PER_OP);
        if self.debt <= self.at_once { Ok(done) } else { Err(TooMuchWork) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_earn_work_and_save_none() {
        let mut allowance = Allowance::default();
        for _ in 0..1000 {
            assert_eq!(allowance.charge(|| count(WORK_PER_OP as usize)), Ok(()));
        }
        assert_eq!(allowance.charge(|| count((WORK_AT_ONCE + WORK_PER_OP) as usize)), Ok(()));
        assert_eq!(allowance.charge(|| count(WORK_PER_OP as usize)), Ok(()), "the average remains allowed");
        assert_eq!(allowance.charge(|| count(WORK_PER_OP as usize + 1)), Err(TooMuchWork));
    }
}
