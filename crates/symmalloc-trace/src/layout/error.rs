//! Errors in the text of a layout: an invalid line, or a statement that contradicts earlier ones.

use super::contradiction::Contradiction;
use super::line::{MAGIC, VERSION};
use crate::text::LineError;

/// Error reading a layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutTextError {
    /// A line is invalid by itself.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line does not identify a layout.
    #[error("not a layout: the first line must be `{MAGIC} {VERSION}`; decompress a compressed layout first")]
    NotALayout,
    /// The layout has a later version of the format.
    #[error("the layout has version {found}, but this library reads version {VERSION}: use a newer one")]
    UnsupportedVersion {
        /// The version that the layout states.
        found: u64,
    },
    /// A statement is out of order.
    #[error("line {line}: misplaced; expected {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// The statements allowed there.
        expected: &'static str,
    },
    /// No heap can satisfy the statement.
    #[error("line {line}: {source}")]
    Contradiction {
        /// The line.
        line: u64,
        /// The contradiction.
        source: Contradiction,
    },
    /// The input ends without an `end` line: its writer was interrupted.
    #[error("line {line}: the layout is torn; save it again")]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states a different number of lines: some were lost, or edited.
    #[error(
        "line {line}: the layout states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`"
    )]
    WrongCount {
        /// The line of the `end`.
        line: u64,
        /// The stated number.
        stated: u64,
        /// Number of lines between the first one and this one.
        lines: u64,
    },
    /// Text follows the `end` line.
    #[error("line {line}: the layout ended before this line; a file holds one layout")]
    AfterEnd {
        /// The line.
        line: u64,
    },
}
