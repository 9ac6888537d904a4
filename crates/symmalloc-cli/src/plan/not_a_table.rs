//! Reasons for which a table of rectangles cannot express a plan.

/// A reason for which a table cannot express the plan of a job.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotATable {
    #[error("the job has {0} plans")]
    Plans(usize),
    #[error("allocation {allocation} of a step does not end with the step")]
    EndsLater { allocation: usize },
}
