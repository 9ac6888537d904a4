//! What a file holds, as its name says.

use std::path::Path;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Trace,
    Snapshot,
    Timeline,
    Plan,
    Picture,
    Page,
    Log,
}

impl Content {
    /// What a file's name says that it holds.
    pub(crate) fn of_name(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_lowercase();
        let plain = [".gz", ".zst"].into_iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(&name);
        Some(match plain.rsplit_once('.')?.1 {
            "trace" => Content::Trace,
            "pickle" | "pkl" => Content::Snapshot,
            "json" => Content::Timeline,
            "plan" => Content::Plan,
            "svg" | "png" => Content::Picture,
            "html" | "htm" => Content::Page,
            "csv" => Content::Log,
            _ => return None,
        })
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Content::Trace => "a trace",
            Content::Snapshot => "a snapshot",
            Content::Timeline => "a time line",
            Content::Plan => "a plan",
            Content::Picture => "a picture",
            Content::Page => "a page",
            Content::Log => "a log",
        }
    }
}
