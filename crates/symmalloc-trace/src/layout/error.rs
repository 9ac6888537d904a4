//! What can be wrong with the text of a layout: a line, or a statement that contradicts those before it.

use super::contradiction::Contradiction;
use super::line::{MAGIC, VERSION};
use crate::text::LineError;

/// Why a layout could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutTextError {
    /// A line by itself is wrong.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line is not a layout's.
    #[error("not a layout: the first line must be `{MAGIC} {VERSION}`; decompress a compressed layout first")]
    NotALayout,
    /// The layout was written by a later version of the format.
    #[error("the layout has version {found}, but this library reads version {VERSION}: use a newer one")]
    UnsupportedVersion {
        /// The version the layout states.
        found: u64,
    },
    /// A line stands where it cannot.
    #[error("line {line}: misplaced; here must stand {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// What may stand there.
        expected: &'static str,
    },
    /// No heap can look like that.
    #[error("line {line}: {source}")]
    Contradiction {
        /// The line.
        line: u64,
        /// What contradicts what.
        source: Contradiction,
    },
    /// The input ends without an `end` line: whoever wrote it was stopped.
    #[error("line {line}: the layout is torn; save it again")]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states another number of lines than there are: some were lost, or edited.
    #[error(
        "line {line}: the layout states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The number stated.
        stated: u64,
        /// How many lines there are between the first one and this one.
        lines: u64,
    },
    /// Something follows the `end` line.
    #[error("line {line}: the layout ended before this line; a file holds one layout")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}
