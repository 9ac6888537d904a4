//! Kinds of file content, as file extensions indicate them.

use std::path::Path;

/// Kind of content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    Trace,
    Snapshot,
    Timeline,
    Plan,
    Picture,
    Page,
    /// A log of RMM or a table of rectangles (CSV).
    Table,
    /// A container or a compression that this program does not write.
    Archive,
}

impl Content {
    /// Returns the kind of content that a file's extension indicates.
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
            "csv" => Content::Table,
            "zip" | "tar" | "tgz" | "7z" | "rar" | "bz2" | "xz" | "lz4" => Content::Archive,
            _ => return None,
        })
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Content::Trace => "a trace",
            Content::Snapshot => "a snapshot",
            Content::Timeline => "a timeline",
            Content::Plan => "a plan",
            Content::Picture => "a picture",
            Content::Page => "a page",
            Content::Table => "a table",
            Content::Archive => "an archive",
        }
    }
}
