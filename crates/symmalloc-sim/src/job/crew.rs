//! The host threads that simulate the ranks. Their number does not affect any outcome.
//!
//! A single thread drives allocators without locks ([`Exclusive`](symmalloc_core::lock::Exclusive)), and several
//! threads drive allocators with locks. The simulator therefore covers both kinds, and they must produce the same
//! results.

use crate::job::schedule::Scheduler;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};

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
        let shares = Mutex::new(seats.chunks_mut(share).enumerate());
        let next = || shares.lock().unwrap_or_else(PoisonError::into_inner).next();
        let answer = || std::iter::from_fn(next).map(|(number, seats)| (number, Alone.each(seats, &work))).collect();
        let answers: Vec<Vec<_>> = on_threads(self.0, answer);
        // The results are sorted by seat, because threads may take the shares in any order.
        let answers: BTreeMap<usize, Vec<R>> = answers.into_iter().flatten().collect();
        answers.into_values().flatten().collect()
    }
}

/// Calls `work` on the given number of threads, one of which is the calling thread, and returns the results. Uses fewer threads if the
/// system cannot create as many, so `work` must take its tasks from a shared queue until the queue is empty.
pub fn on_threads<T: Send>(count: NonZeroUsize, work: impl Fn() -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, &work).ok();
        let others: Vec<_> = (1..count.get()).map_while(start).collect();
        let own = work();
        let join = |thread: ScopedJoinHandle<'_, T>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        std::iter::once(own).chain(others.into_iter().map(join)).collect()
    })
}
