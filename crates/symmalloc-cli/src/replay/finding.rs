//! The result of a replay.

use crate::job::{Job, Outcome};
use std::path::Path;

/// Result of replaying one trace.
pub(super) struct ReplayFinding<'a> {
    pub(super) path: &'a Path,
    pub(super) job: &'a Job,
    pub(super) outcome: Outcome,
    /// Time per op of our allocator; `None` for address order, because the model is not built for speed.
    pub(super) nanoseconds_per_op: Option<f64>,
}
