//! A progress bar for work that takes long, on stderr, for people only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Once;
use std::time::{Duration, Instant};

/// What is done sooner than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts ranks that are done; draws nothing where stderr is no terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    start: Instant,
    shown: Once,
}

impl Progress {
    pub(crate) fn new(job: &str, ranks: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(ranks), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} ranks, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(job.to_owned());
        Progress { bar, start: Instant::now(), shown: Once::new() }
    }

    pub(crate) fn rank_done(&self) {
        if self.start.elapsed() > PATIENCE {
            self.shown.call_once(|| self.bar.set_draw_target(ProgressDrawTarget::stderr()));
        }
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
