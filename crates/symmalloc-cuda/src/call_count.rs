//! How many driver calls this process made. Each thread counts in a place of its own.
//!
//! An atomic addition is no small part of the shortest calls, those of events. So a thread adds with a load and a
//! store to a place where no other thread writes, and whoever asks adds up all places.
//!
//! ```text
//!  thread ── its place ─┐
//!  thread ── its place ─┼─ sum        the place of a thread that ended keeps its count and serves the next thread
//!            vacant ────┘
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Alone on its cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Place(AtomicU64);

/// Never fewer: there are as many as there were threads at a time.
#[derive(Debug)]
struct Places {
    all: Vec<&'static Place>,
    vacant: Vec<&'static Place>,
}

static PLACES: Mutex<Places> = Mutex::new(Places { all: Vec::new(), vacant: Vec::new() });

/// Calls of threads that have left their places, while the rest of what is theirs is dropped.
static LATE: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static MINE: Mine = Mine::new();
}

/// This thread's place.
struct Mine(&'static Place);

impl Mine {
    fn new() -> Self {
        let mut places = places();
        Mine(places.vacant.pop().unwrap_or_else(|| {
            let place: &'static Place = Box::leak(Box::default());
            places.all.push(place);
            place
        }))
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        places().vacant.push(self.0);
    }
}

fn places() -> MutexGuard<'static, Places> {
    PLACES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call of this thread.
#[inline]
pub(crate) fn count() {
    let counted = MINE.try_with(|Mine(Place(count))| {
        // Nobody else writes here.
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    });
    if counted.is_err() {
        LATE.fetch_add(1, Ordering::Relaxed);
    }
}

/// The calls of all threads so far.
pub(crate) fn sum() -> u64 {
    let counted = places().all.iter().map(|place| place.0.load(Ordering::Relaxed)).sum::<u64>();
    counted + LATE.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::thread;

    struct CountsLate;

    impl Drop for CountsLate {
        fn drop(&mut self) {
            count();
        }
    }

    thread_local! {
        static LAST: RefCell<Option<CountsLate>> = const { RefCell::new(None) };
    }

    /// Nothing else in this process counts: the other unit tests call no driver.
    #[test]
    fn the_calls_of_all_threads_are_counted_and_their_places_used_again() {
        let before = sum();
        for _ in 0..3 {
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        // Dropped after the thread's place if that was made later.
                        LAST.with(|last| *last.borrow_mut() = Some(CountsLate));
                        (0..1000).for_each(|_| count());
                    });
                }
            });
        }
        // A scope waits for its threads' closures, and not for what they leave.
        while sum() < before + 12 * 1001 {
            thread::yield_now();
        }
        assert_eq!(sum(), before + 12 * 1001);
        assert!(places().all.len() <= 12);
    }
}
