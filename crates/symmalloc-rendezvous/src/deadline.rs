//! Time limits of waits for other ranks, and the pauses between attempts.

use std::time::{Duration, Instant};

/// The longest wait. A longer limit is shortened to it, so that its end can be represented.
const LIMIT_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// A time limit, and the start of the wait that it limits.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use symmalloc_rendezvous::Deadline;
///
/// let deadline = Deadline::after(Duration::from_secs(60));
/// assert!(!deadline.is_over() && deadline.left() <= Duration::from_secs(60));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    since: Instant,
    limit: Duration,
}

impl Deadline {
    /// Starts a wait that ends after `limit`, and after 136 years at the latest.
    pub fn after(limit: Duration) -> Self {
        Deadline { since: Instant::now(), limit: limit.min(LIMIT_MAX) }
    }

    /// Returns the time since the start, in whole milliseconds.
    pub fn waited(&self) -> Duration {
        Duration::from_millis(u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the remaining time; zero after the end.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.since.elapsed())
    }

    /// Returns `true` after the end.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns the deadline of a part of this wait, which ends after `limit` or with this wait.
    pub(crate) fn at_most(&self, limit: Duration) -> Self {
        Deadline::after(limit.min(self.left()))
    }

    /// Returns the moment of the end.
    pub(crate) fn end(&self) -> Instant {
        self.since + self.limit
    }
}

/// Pauses between attempts. Each is twice as long as the one before, up to the longest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Pauses {
    /// Creates pauses from the first and the longest one.
    pub(crate) fn new([first, longest]: [Duration; 2]) -> Self {
        Pauses { next: first, longest }
    }

    /// Returns the next pause without waiting.
    pub(crate) fn advance(&mut self) -> Duration {
        let pause = self.next;
        self.next = (self.next * 2).min(self.longest);
        pause
    }

    /// Waits for the next pause, or until the deadline.
    pub(crate) fn wait(&mut self, deadline: &Deadline) {
        std::thread::sleep(self.advance().min(deadline.left()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_ends_after_its_limit_and_a_part_not_later() {
        let deadline = Deadline::after(Duration::from_millis(20));
        let part = deadline.at_most(Duration::from_secs(60));
        assert!(deadline.left() <= Duration::from_millis(20) && part.left() <= Duration::from_millis(20));
        std::thread::sleep(Duration::from_millis(20));
        assert!(deadline.is_over() && deadline.waited() >= Duration::from_millis(20));
        assert!(!Deadline::after(Duration::MAX).is_over());
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pauses = Pauses::new([10, 35].map(Duration::from_millis));
        let millis: Vec<_> = (0..4).map(|_| pauses.advance().as_millis()).collect();
        assert_eq!(millis, [10, 20, 35, 35]);
    }
}
