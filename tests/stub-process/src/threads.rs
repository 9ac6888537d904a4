//! Ranks as threads, and waits with a time limit.
//!
//! Every wait of a test is bounded. A rank's thread that panics ends the process, because the others may be inside a call that waits for it. A
//! barrier and [`until`] panic after [`WAIT_MAX`]. A process is killed after its [limit](crate::limit).

use std::io::Write;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after which a wait fails. Longer than the deadlines of all communicators in tests.
pub const WAIT_MAX: Duration = Duration::from_secs(120);

/// Multiplies a time limit by the load per processor, rounded up because messages between ranks have whole milliseconds. Returns at most half
/// of [`WAIT_MAX`].
pub fn scaled_to_load(limit: Duration) -> Duration {
    let Ok(text) = std::fs::read_to_string("/proc/loadavg") else { return limit };
    // The average of the last minute, and the number of threads that can run now: `4.66 2.58 1.67 9/312 4711`.
    let mut words = text.split_whitespace();
    let average: f64 = words.next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
    let now: f64 = words.nth(2).and_then(|word| word.split('/').next()?.parse().ok()).unwrap_or(0.0);
    let processors = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let factor = (average.max(now) / processors).ceil().max(1.0);
    (limit * factor as u32).min(WAIT_MAX / 2)
}

/// Exit status of a process in which a rank's thread panicked, the same as that of a failed test.
const PANICKED: i32 = 101;

/// A guard that ends the process if it is dropped during a panic.
///
/// Unwinding would leave the other ranks at a barrier, or in a stub call that no deadline ends. The panic's message has been printed by
/// then.
#[derive(Debug)]
pub struct ExitOnPanic;

impl Drop for ExitOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _flushed = std::io::stdout().flush();
            // SAFETY: ends this process without destructors, because other threads are inside the stubs.
            unsafe { libc::_exit(PANICKED) };
        }
    }
}

/// Runs `body` on one thread per rank. Returns the results by rank. A panic ends the process.
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

/// A barrier for the threads of ranks, like the standard library's but with a time limit.
#[derive(Debug)]
pub struct Barrier {
    count: usize,
    /// Number of waiting threads, and number of times that all threads have arrived.
    state: Mutex<(usize, u64)>,
    all_came: Condvar,
}

impl Barrier {
    /// Creates a barrier for `count` threads.
    pub fn new(count: usize) -> Self {
        Barrier { count, state: Mutex::default(), all_came: Condvar::new() }
    }

    /// Waits until all threads have arrived.
    ///
    /// # Panics
    /// Panics if a thread does not arrive within [`WAIT_MAX`].
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
        assert!(!timeout.timed_out(), "{} of {} threads reached the barrier within {WAIT_MAX:?}", state.0, self.count);
    }
}

/// Waits until the predicate holds.
///
/// # Panics
/// Panics if it does not hold within [`WAIT_MAX`].
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    let value = || is_so().then_some(());
    until_some(value);
}

/// Waits until `value` returns a value, and returns it.
///
/// # Panics
/// Panics if there is no value within [`WAIT_MAX`].
#[track_caller]
pub fn until_some<T>(mut value: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(begun.elapsed() < WAIT_MAX, "the condition does not hold within {WAIT_MAX:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
