//! A metric for the duration of syncs. Requires the feature `metrics`.

use metrics::Unit;
use std::time::Instant;
use symmalloc_cuda::metrics::{Metric, Publisher};

const SYNC_SECONDS: Metric =
    Metric::histogram("symmalloc_sync_seconds", Some(Unit::Seconds), "duration of syncs that were not quiet");

/// A sync in progress. Records its duration when dropped.
pub(crate) struct TimedSync {
    ordinal: usize,
    begun: Instant,
}

impl TimedSync {
    pub(crate) fn begin(ordinal: usize) -> Self {
        TimedSync { ordinal, begun: Instant::now() }
    }
}

impl Drop for TimedSync {
    fn drop(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64();
        Publisher::new().with_label("device", self.ordinal.to_string()).record(&SYNC_SECONDS, seconds);
    }
}
