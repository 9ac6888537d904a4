//! Progress bars on stderr, on terminals only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};
use symmalloc_text::visible_line;

/// Duration before a bar appears.
const QUIET: Duration = Duration::from_secs(1);

/// A progress bar. It stays invisible if stderr is not a terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    begun: Instant,
}

impl Progress {
    /// Creates a bar for `total` units of work on a job. `unit` is the plural name of a unit.
    pub(crate) fn new(job: &str, total: u64, unit: &'static str) -> Self {
        let style = ProgressStyle::with_template("{prefix}  {bar:30} {human_pos} of {human_len} {msg}, {eta} left");
        let style = style.expect("the template is a part of the program").progress_chars("█▌░");
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        bar.set_style(style);
        bar.set_prefix(visible_line(job).into_owned());
        bar.set_message(unit);
        Progress { bar, begun: Instant::now() }
    }

    /// Advances by one unit.
    pub(crate) fn step(&self) {
        self.show();
        self.bar.inc(1);
    }

    /// Sets the finished and the total number of units.
    pub(crate) fn set(&self, done: u64, total: u64) {
        self.show();
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    fn show(&self) {
        if self.bar.is_hidden() && self.begun.elapsed() > QUIET {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
