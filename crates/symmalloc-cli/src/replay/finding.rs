//! What a replay finds out.

use crate::job::{Job, Outcome};
use std::path::Path;

/// What was found out about one trace.
pub(super) struct ReplayFinding<'a> {
    pub(super) path: &'a Path,
    pub(super) job: &'a Job,
    pub(super) outcome: Outcome,
    /// `None` for address order: the model is not made to be fast.
    pub(super) nanoseconds_per_op: Option<f64>,
}
