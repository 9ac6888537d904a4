//! Waits for conditions that can only be polled.

use std::time::{Duration, Instant};

/// Time during which a wait polls continuously: most collectives complete within it.
const SPIN: Duration = Duration::from_micros(60);
/// Time, from the start of a wait, until which the wait yields the core between polls. After that, it sleeps.
const YIELD: Duration = Duration::from_micros(250);
/// Longest sleep between two polls.
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// A wait with a time limit and a growing polling interval. A wait overshoots by at most an eighth of its duration, and a wait of minutes
/// costs almost nothing.
#[derive(Debug)]
pub(crate) struct Backoff {
    since: Instant,
    limit: Duration,
}

impl Backoff {
    /// Starts a wait.
    pub(crate) fn new(limit: Duration) -> Self {
        Backoff { since: Instant::now(), limit }
    }

    /// Returns the time since the start.
    pub(crate) fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the time that remains until the limit, or zero after the limit.
    pub(crate) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.waited())
    }

    /// Pauses until the next poll is due. Returns `false`, without a pause, once the limit has passed.
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
    fn a_wait_ends_at_its_limit_and_polls_rarely_by_then() {
        let backoff = Backoff::new(Duration::from_millis(40));
        let since = Instant::now();
        let mut sleeps = 0;
        while backoff.pause() {
            sleeps += u32::from(backoff.waited() > YIELD);
        }
        assert!(since.elapsed() >= Duration::from_millis(40));
        assert!(sleeps < 120, "{sleeps} polls in 40 ms");
        assert_eq!(backoff.left(), Duration::ZERO);
    }

    #[test]
    fn no_time_is_no_pause() {
        assert!(!Backoff::new(Duration::ZERO).pause());
    }
}
