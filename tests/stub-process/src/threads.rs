//! Ranks as threads, and waits that end.
//!
//! No wait of a test is without an end: a thread of a rank that panics ends the process, because the others may be inside a
//! call that waits for it; a barrier and [`until`] panic after [`WAIT_MAX`]; and a process is killed after its
//! [limit](crate::limit).

use std::io::Write;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a wait counts as endless. Longer than the deadlines of all communicators in tests.
pub const WAIT_MAX: Duration = Duration::from_secs(120);

/// Exit code of a process in which the thread of a rank panicked, as that of a failed test.
const PANICKED: i32 = 101;

/// Ends the process if it is dropped by a panic.
///
/// Unwinding would leave the other ranks at a barrier, or in a call of the stub's that no deadline ends. The panic's
/// message is printed by then.
#[derive(Debug)]
pub struct ExitOnPanic;

impl Drop for ExitOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _flushed = std::io::stdout().flush();
            // SAFETY: ends this process. Destructors do not run: other threads are inside the stubs.
            unsafe { libc::_exit(PANICKED) };
        }
    }
}

/// Runs `body` on one thread per rank, and returns what it returned, by rank. A panic ends the process.
pub fn threads<R: Send>(count: usize, body: impl Fn(usize) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let start = |rank| {
            let body = &body;
            scope.spawn(move || {
                let _exit = ExitOnPanic;
                body(rank)
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a panic ends the process")).collect()
    })
}

/// A barrier for the threads of ranks, as the standard library's, whose wait ends.
#[derive(Debug)]
pub struct Barrier {
    count: usize,
    /// Threads that wait, and the number of times that all have come.
    state: Mutex<(usize, u64)>,
    all_came: Condvar,
}

impl Barrier {
    /// A barrier for so many threads.
    pub fn new(count: usize) -> Self {
        Barrier { count, state: Mutex::default(), all_came: Condvar::new() }
    }

    /// Waits until all threads have come.
    ///
    /// # Panics
    /// If one does not come within [`WAIT_MAX`].
    #[track_caller]
    pub fn wait(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        if state.0 >= self.count {
            *state = (0, state.1 + 1);
            self.all_came.notify_all();
            return;
        }
        let turn = state.1;
        let waited = self.all_came.wait_timeout_while(state, WAIT_MAX, |state| state.1 == turn);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        assert!(!timeout.timed_out(), "{} of {} threads came to the barrier within {WAIT_MAX:?}", state.0, self.count);
    }
}

/// Waits until it is so.
///
/// # Panics
/// If it is not within [`WAIT_MAX`].
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    let value = || is_so().then_some(());
    until_some(value);
}

/// Waits until there is a value, and returns it.
///
/// # Panics
/// If there is none within [`WAIT_MAX`].
#[track_caller]
pub fn until_some<T>(mut value: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(begun.elapsed() < WAIT_MAX, "it did not come within {WAIT_MAX:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
