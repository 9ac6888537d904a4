//! Names of streams. Ops number streams by first appearance, so stream 0 need not be the default stream of the program.

use symmalloc_core::ids::StreamId;
use symmalloc_core::op::Op;
use symmalloc_import::Recording;
use symmalloc_text::visible_line;

/// Maximum number of streams that a legend lists.
const LISTED_MAX: usize = 8;

/// Returns the name of a stream: its number, and the program's name for it if the recording states one.
pub(crate) fn name(recording: &Recording, stream: StreamId) -> String {
    match recording.stream_names.get(stream.index()).and_then(Option::as_deref) {
        Some(name) => format!("stream {} ({})", stream.0, visible_line(name)),
        None => format!("stream {}", stream.0),
    }
}

/// Adds the names of streams to the records that register them, if the numbers alone may mislead.
pub(crate) fn name_records(recording: &mut Recording) {
    if legend(recording).is_none() {
        return;
    }
    let registrations = recording.records.iter_mut().filter(|record| matches!(record.op, Op::RegisterStream { .. }));
    for (record, name) in registrations.zip(&recording.stream_names) {
        record.name = name.as_deref().map(Into::into);
    }
}

/// Returns a sentence about the streams, if the recording names them and the numbers alone may mislead.
pub(crate) fn legend(recording: &Recording) -> Option<String> {
    let names = &recording.stream_names;
    let is_plain = names.len() == 1 && names[0].as_deref() == Some(symmalloc_import::DEFAULT_STREAM);
    if is_plain || names.iter().all(Option::is_none) {
        return None;
    }
    let of = |(number, name): (usize, &Option<String>)| {
        let name = name.as_deref().map_or("not named by the recording", |name| name);
        format!("{number} is {}", visible_line(name))
    };
    let mut listed: Vec<String> = names.iter().enumerate().take(LISTED_MAX).map(of).collect();
    if names.len() > LISTED_MAX {
        listed.push(format!("and {} more", names.len() - LISTED_MAX));
    }
    Some(format!("streams, by first use: {}", listed.join(", ")))
}
