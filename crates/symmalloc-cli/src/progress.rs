//! How far long work is, in one line on stderr, for people only.

use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Work that ends sooner than this shows nothing.
const QUIET: Duration = Duration::from_secs(1);
/// Between two lines.
const REDRAW: Duration = Duration::from_millis(100);

/// Counts what is done; draws nothing where stderr is no terminal.
pub(crate) struct ProgressLine {
    job: String,
    unit: &'static str,
    is_shown: bool,
    begun: Instant,
    count: Mutex<Count>,
}

struct Count {
    done: u64,
    total: u64,
    drawn: Option<Instant>,
}

impl ProgressLine {
    /// `total` of what `unit` names are to be done.
    pub(crate) fn new(job: &str, total: u64, unit: &'static str) -> Self {
        let count = Mutex::new(Count { done: 0, total, drawn: None });
        ProgressLine { job: job.to_owned(), unit, is_shown: io::stderr().is_terminal(), begun: Instant::now(), count }
    }

    /// One more is done.
    pub(crate) fn step(&self) {
        self.update(|count| count.done += 1);
    }

    /// So many are done, of so many.
    pub(crate) fn set(&self, done: u64, total: u64) {
        self.update(|count| (count.done, count.total) = (done, total));
    }

    fn update(&self, change: impl FnOnce(&mut Count)) {
        let (Ok(mut count), elapsed) = (self.count.lock(), self.begun.elapsed()) else { return };
        change(&mut count);
        let is_due = count.drawn.is_none_or(|drawn| drawn.elapsed() > REDRAW);
        if self.is_shown && elapsed > QUIET && is_due {
            count.drawn = Some(Instant::now());
            let (done, total) = (count.done.max(1), count.total.max(count.done));
            let left = elapsed.as_secs() * (total - count.done) / done;
            let _ = write!(io::stderr(), "\r{}  {}/{total} {}, {left} s left\x1b[K", self.job, count.done, self.unit);
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.count.get_mut().is_ok_and(|count| count.drawn.is_some()) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
