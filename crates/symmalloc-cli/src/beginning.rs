//! The message about a recording that begins in the middle of a job.

use crate::quantity::{counted, memory};
use symmalloc_import::Summary;

/// Returns a sentence about a recording that begins late or lost entries.
pub(crate) fn lived_before(found: &Summary) -> Option<String> {
    if found.lived_before == 0 && !found.is_overwritten {
        return None;
    }
    let mut text = "the recording begins in the middle of a job: ".to_owned();
    if found.lived_before > 0 {
        let (count, bytes) = (counted(found.lived_before, "allocation"), memory(found.lived_before_bytes));
        text += &format!("{count} of {bytes} already live (allocated first)");
    } else {
        text += "no allocation is known to be live already";
    }
    if found.is_overwritten {
        text += "; its oldest entries were overwritten, which a larger max_entries of _record_memory_history prevents";
    }
    Some(text)
}
