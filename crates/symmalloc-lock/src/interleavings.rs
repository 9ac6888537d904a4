//! Every interleaving of threads at one lock, by loom: `bash .ci/run loom`.
//!
//! The value behind the lock is a counter that is read and written apart, without order: two threads inside at a time, or one
//! that does not see what the last one did, lose a count.

use crate::bias::Bias;
use crate::thread_number::STEP;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

struct Counter {
    bias: Bias,
    count: AtomicUsize,
}

impl Counter {
    /// A lock that gives the bias to whoever comes the second time in a row.
    fn new() -> Arc<Self> {
        Arc::new(Counter { bias: Bias::new(1), count: AtomicUsize::new(0) })
    }

    fn bump(&self, thread: u32) {
        let thread = thread * STEP;
        if !self.bias.enter_by_bias(thread) {
            self.bias.enter(thread);
        }
        self.count_inside();
    }

    /// As [`bump`](Self::bump), if that takes no waiting. Whether it did.
    fn try_bump(&self, thread: u32) -> bool {
        let thread = thread * STEP;
        let is_inside = self.bias.enter_by_bias(thread) || self.bias.try_enter(thread);
        if is_inside {
            self.count_inside();
        }
        is_inside
    }

    fn count_inside(&self) {
        let count = self.count.load(Ordering::Relaxed);
        self.count.store(count + 1, Ordering::Relaxed);
        self.bias.leave();
    }
}

/// Tries every order with at most so many preemptions.
fn explore(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_branches = 10_000;
    model.check(test);
}

#[test]
fn a_thread_that_has_the_bias_and_one_that_takes_it_away() {
    explore(6, || {
        let counter = Counter::new();
        (0..2).for_each(|_| counter.bump(1));
        assert!(counter.bias.is_biased());
        let theirs = Arc::clone(&counter);
        let other = thread::spawn(move || theirs.bump(2));
        counter.bump(1);
        other.join().expect("no panic");
        counter.bump(1);
        assert_eq!(counter.count.load(Ordering::Relaxed), 5);
    });
}

#[test]
fn the_bias_goes_to_another_thread_while_its_last_owner_comes() {
    explore(5, || {
        let counter = Counter::new();
        (0..2).for_each(|_| counter.bump(1));
        let theirs = Arc::clone(&counter);
        let other = thread::spawn(move || (0..3).for_each(|_| theirs.bump(2)));
        counter.bump(1);
        other.join().expect("no panic");
        assert_eq!(counter.count.load(Ordering::Relaxed), 6);
    });
}

#[test]
fn two_threads_take_the_bias_away_from_a_third() {
    explore(2, || {
        let counter = Counter::new();
        (0..2).for_each(|_| counter.bump(1));
        let others = [2, 3].map(|thread| {
            let theirs = Arc::clone(&counter);
            thread::spawn(move || (0..2).for_each(|_| theirs.bump(thread)))
        });
        counter.bump(1);
        others.into_iter().for_each(|other| other.join().expect("no panic"));
        assert_eq!(counter.count.load(Ordering::Relaxed), 7);
    });
}

#[test]
fn a_thread_that_tries_enters_or_has_changed_nothing() {
    for comes in [1, 2] {
        explore(5, move || {
            let counter = Counter::new();
            (0..comes).for_each(|_| counter.bump(1));
            let theirs = Arc::clone(&counter);
            let other = thread::spawn(move || (0..2).filter(|_| theirs.try_bump(2)).count());
            counter.bump(1);
            let entered = other.join().expect("no panic");
            assert!(comes == 1 || entered == 0, "it takes no bias away");
            assert_eq!(counter.count.load(Ordering::Relaxed), comes + 1 + entered);
        });
    }
}
