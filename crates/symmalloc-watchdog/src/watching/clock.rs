//! The watchdog's clock: cheap to read, and precise enough for deadlines of seconds.
//!
//! The clock stops while the process is stopped. If a whole job is stopped and resumed later, no rank exceeds a deadline because of the
//! pause.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Interval between two checks of the watchdog and of the marker.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum time by which one tick advances the clock. A longer interval means that the process was stopped.
const STEP_MAX: Duration = Duration::from_secs(1);

/// Time from the start of the watchdog to its last tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tick(u64);

static NOW: AtomicU64 = AtomicU64::new(0);

impl Tick {
    /// Returns the current tick with a single load. This function runs for every collective, and a system call would take 20 ns.
    #[inline]
    pub fn now() -> Self {
        Tick(NOW.load(Ordering::Relaxed))
    }

    /// Advances the clock. The watchdog's thread calls this at every tick.
    pub(super) fn advance() -> Self {
        static LAST: Mutex<Option<Instant>> = Mutex::new(None);
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let step = last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last)).min(STEP_MAX);
        *last = Some(now);
        let sum = NOW.load(Ordering::Relaxed) + step.as_micros() as u64;
        NOW.store(sum, Ordering::Relaxed);
        Tick(sum)
    }

    /// Returns the time from an earlier tick to this one.
    pub(super) fn since(self, earlier: Tick) -> Duration {
        self.time().saturating_sub(earlier.time())
    }

    /// Returns the time since the start of the watchdog, as lifelines measure it.
    pub(super) fn time(self) -> Duration {
        Duration::from_micros(self.0)
    }
}
