//! The host threads that simulate the ranks. No outcome depends on their number.
//!
//! A single thread drives allocators without locks ([`Exclusive`](symmalloc_core::lock::Exclusive)), and several
//! threads drive allocators with locks. Both kinds are therefore simulated, and must produce the same results.

use crate::job::schedule::Scheduler;
use std::num::NonZeroUsize;

/// Runs a function on every seat.
pub(crate) trait Crew<S> {
    /// Calls `work` for each seat and returns the results by seat.
    fn each<R: Send>(&self, seats: &mut [S], work: impl Fn(&mut S, &mut Scheduler) -> R + Sync) -> Vec<R>;
}

/// The calling thread.
pub(crate) struct Alone;

impl<S> Crew<S> for Alone {
    fn each<R: Send>(&self, seats: &mut [S], work: impl Fn(&mut S, &mut Scheduler) -> R + Sync) -> Vec<R> {
        let mut scheduler = Scheduler::default();
        seats.iter_mut().map(|seat| work(seat, &mut scheduler)).collect()
    }
}

/// The given number of threads.
pub(crate) struct Workers(pub(crate) NonZeroUsize);

impl<S: Send> Crew<S> for Workers {
    fn each<R: Send>(&self, seats: &mut [S], work: impl Fn(&mut S, &mut Scheduler) -> R + Sync) -> Vec<R> {
        let share = seats.len().div_ceil(self.0.get()).max(1);
        let work = &work;
        std::thread::scope(|scope| {
            let shares = seats.chunks_mut(share);
            let workers: Vec<_> = shares.map(|seats| scope.spawn(move || Alone.each(seats, work))).collect();
            let answers = workers.into_iter().map(|worker| worker.join().expect("panics are caught at the seat"));
            answers.flatten().collect()
        })
    }
}
