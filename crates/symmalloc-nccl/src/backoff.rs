//! Waiting for something that only a question can tell.

use std::time::{Duration, Instant};

/// For so long a wait asks again at once: most collectives are through by then.
const SPIN: Duration = Duration::from_micros(60);
/// For so long it lets other threads have the core in between.
const YIELD: Duration = Duration::from_micros(250);
/// The longest sleep between two questions.
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// A wait with an end. It asks often at first and seldom later: what takes long is late by an eighth of its time at most,
/// and a wait of minutes costs next to nothing.
#[derive(Debug)]
pub(crate) struct Backoff {
    since: Instant,
    limit: Duration,
}

impl Backoff {
    /// Begins to wait.
    pub(crate) fn new(limit: Duration) -> Self {
        Backoff { since: Instant::now(), limit }
    }

    /// How long it has been.
    pub(crate) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// What is left; zero when the time is up.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.waited())
    }

    /// Lets some time pass. `false` when the time is up.
    pub(crate) fn pause(&self) -> bool {
        let waited = self.waited();
        if waited >= self.limit {
            return false;
        }
        if waited < SPIN {
            std::hint::spin_loop();
        } else if waited < YIELD {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / 8).min(LONGEST_SLEEP).min(self.limit - waited));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_its_time_is_up_and_asks_seldom_by_then() {
        let backoff = Backoff::new(Duration::from_millis(40));
        let since = Instant::now();
        let mut sleeps = 0;
        while backoff.pause() {
            sleeps += u32::from(backoff.waited() > YIELD);
        }
        assert!(since.elapsed() >= Duration::from_millis(40));
        assert!(sleeps < 120, "{sleeps} questions in 40 ms");
        assert_eq!(backoff.left(), Duration::ZERO);
    }

    #[test]
    fn no_time_is_no_pause() {
        assert!(!Backoff::new(Duration::ZERO).pause());
    }
}
