//! Formats of recordings, in words.

use symmalloc_import::{Format, Recording};

/// Returns the kind of recording and its device.
pub(crate) fn describe(recording: &Recording) -> String {
    let kind = name(recording);
    match recording.summary.device {
        Some(device) => format!("{kind}, device {device}"),
        None => kind.to_owned(),
    }
}

/// Returns the name of the recording's format.
pub(crate) fn name(recording: &Recording) -> &'static str {
    match recording.format {
        Format::PyTorchSnapshot => "PyTorch snapshot",
        Format::RmmLog => "RMM log",
        Format::Trace => "symmalloc trace",
        _ => "recording",
    }
}
