//! A progress bar for work that takes long, on stderr, for people only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Once;
use std::time::{Duration, Instant};

/// What is done sooner than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts what is done; draws nothing where stderr is no terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    start: Instant,
    shown: Once,
}

impl Progress {
    /// `total` of what `unit` names are to be done.
    pub(crate) fn new(job: &str, total: u64, unit: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(&format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {unit}, {{eta}} left"));
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(job.to_owned());
        Progress { bar, start: Instant::now(), shown: Once::new() }
    }

    /// One more is done.
    pub(crate) fn step(&self) {
        self.show();
        self.bar.inc(1);
    }

    /// So many are done, of so many.
    pub(crate) fn set(&self, done: u64, total: u64) {
        self.show();
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    fn show(&self) {
        if self.start.elapsed() > PATIENCE {
            self.shown.call_once(|| self.bar.set_draw_target(ProgressDrawTarget::stderr()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
