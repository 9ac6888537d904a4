//! A count of the work that calls perform, for programs that replay recordings from strangers.
//!
//! A cache hit costs the same whatever happened before. Rare calls do not: a trim looks at the pool's free memory, a sleep at all of its
//! blocks. A recording that repeats such a call over much memory costs (calls) × (blocks). The loops of rare calls therefore count their
//! *steps*, and a replay ends when its [`Allowance`] is exhausted. Steps depend only on the ops, like placements. No decision reads them.
//!
//! ```text
//! debt after an op  =  max(0, debt before + steps of the op - STEPS_PER_OP)          debt > STEPS_AT_ONCE: too much
//! ```

use std::cell::Cell;

/// Steps that each op may take on average.
pub const STEPS_PER_OP: u64 = 1000;
/// Steps beyond the average that ops may take together. A step takes a few nanoseconds.
pub const STEPS_AT_ONCE: u64 = 50_000_000;

thread_local! {
    /// Steps of this thread so far.
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts steps of the current thread.
#[inline]
pub fn count(steps: usize) {
    STEPS.set(STEPS.get().wrapping_add(steps as u64));
}

/// Returns the number of steps of the current thread so far.
#[inline]
pub fn steps() -> u64 {
    STEPS.get()
}

/// Error of a program that takes more steps than its ops allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the program takes more than {STEPS_AT_ONCE} steps in addition to {STEPS_PER_OP} for each op: it repeats trims, sleeps, observers or \
     waits over too many blocks, heaps or streams"
)]
pub struct TooMuchWork;

/// The steps that a program may still take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    debt: u64,
    at_once: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Allowance::of(STEPS_AT_ONCE)
    }
}

impl Allowance {
    /// Allows this many steps in addition to [`STEPS_PER_OP`]. Tests use few.
    pub fn of(at_once: u64) -> Self {
        Allowance { debt: 0, at_once }
    }

    /// Executes one op.
    ///
    /// # Errors
    /// Returns an error if the program has exhausted its steps. The op was executed.
    #[inline(always)]
    pub fn charge<T>(&mut self, op: impl FnOnce() -> T) -> Result<T, TooMuchWork> {
        let before = steps();
        let done = op();
        self.debt = (self.debt + steps().wrapping_sub(before)).saturating_sub(STEPS_PER_OP);
        if self.debt <= self.at_once { Ok(done) } else { Err(TooMuchWork) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_earn_steps_and_save_none() {
        let mut allowance = Allowance::default();
        for _ in 0..1000 {
            assert_eq!(allowance.charge(|| count(STEPS_PER_OP as usize)), Ok(()));
        }
        assert_eq!(allowance.charge(|| count((STEPS_AT_ONCE + STEPS_PER_OP) as usize)), Ok(()));
        assert_eq!(allowance.charge(|| count(STEPS_PER_OP as usize)), Ok(()), "the average remains allowed");
        assert_eq!(allowance.charge(|| count(STEPS_PER_OP as usize + 1)), Err(TooMuchWork));
    }
}
