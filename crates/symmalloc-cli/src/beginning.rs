//! The message about a recording that begins in the middle of a job.

use crate::quantity::{counted, memory};
use symmalloc_import::Summary;

/// Describes the allocations that were live when the recording began, or returns `None` if there were none.
pub(crate) fn lived_before(found: &Summary) -> Option<String> {
    (found.lived_before > 0).then(|| {
        format!(
            "the recording begins in the middle of a job: {} of {} already live (allocated first)",
            counted(found.lived_before, "allocation"),
            memory(found.lived_before_bytes)
        )
    })
}
