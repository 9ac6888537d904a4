//! The message about a recording that begins in the middle of a job.

use crate::quantity::{counted, memory};
use symmalloc_import::{HeldMemory, Summary};

/// Returns a sentence about a recording that begins late or lost entries.
pub(crate) fn lived_before(found: &Summary) -> Option<String> {
    if let Some(state) = &found.state_only {
        return Some(state_without_history(found, state));
    }
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

/// Describes the memory of the recorded allocator in a snapshot that has no history.
fn state_without_history(found: &Summary, state: &HeldMemory) -> String {
    let mut parts = Vec::new();
    if state.free_segments > 0 {
        let (bytes, number) = (memory(state.free_segment_bytes), counted(state.free_segments, "whole segment"));
        parts.push(format!("{bytes} free in {number}, which torch.cuda.empty_cache() returns"));
    }
    if state.free_blocks > 0 {
        let (bytes, number) = (memory(state.free_block_bytes), counted(state.free_blocks, "block"));
        parts.push(format!("{bytes} free in {number} of used segments, which it cannot return"));
    }
    if parts.is_empty() {
        parts.push("nothing of it free".to_owned());
    }
    format!(
        "the snapshot shows a state and no history (torch.cuda.memory._record_memory_history() records one): {} of {} live; the \
         recorded allocator holds {}: {}",
        counted(found.lived_before, "allocation"),
        memory(found.lived_before_bytes),
        memory(state.reserved_bytes),
        parts.join(", and "),
    )
}
