//! A recording that begins in the middle of a job, in words.

use crate::quantity::{counted, memory};
use symmalloc_import::Summary;

/// What lived when the recording began, if anything did.
pub(crate) fn lived_before(found: &Summary) -> Option<String> {
    (found.lived_before > 0).then(|| {
        format!(
            "the recording begins in the middle of a job: {} of {} lived by then and are allocated first",
            counted(found.lived_before, "allocation"),
            memory(found.lived_before_bytes)
        )
    })
}
