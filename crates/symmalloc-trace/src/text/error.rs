//! Errors in a single line.

use std::io;
use symmalloc_core::config_text::ConfigTextError;
use symmalloc_core::config_text::did_you_mean;

/// Maximum length of a line in bytes, including its line break. No valid line needs more.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// Error reading a line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// The underlying reader failed.
    #[error("line {line}: the text could not be read")]
    Io {
        /// The line being read.
        line: u64,
        /// The error that the underlying reader returned.
        source: io::Error,
    },
    /// A line is not UTF-8.
    #[error("line {line}, column {column}: not UTF-8; the file is damaged or compressed")]
    InvalidUtf8 {
        /// The line.
        line: u64,
        /// Column of the first byte that is not UTF-8.
        column: usize,
    },
    /// A line exceeds the maximum length.
    #[error("line {line}: longer than {LINE_BYTES_MAX} bytes, the maximum length of a line; the file is damaged")]
    TooLong {
        /// The line.
        line: u64,
    },
    /// A line starts with an unknown keyword.
    #[error("line {line}, column {column}: unknown keyword{}; the keywords are {}", did_you_mean(*nearest), keywords.join(", "))]
    UnknownKeyword {
        /// The line.
        line: u64,
        /// Column of the word.
        column: usize,
        /// The closest keyword.
        nearest: Option<&'static str>,
        /// The keywords that a line can start with.
        keywords: &'static [&'static str],
    },
    /// A field is missing or malformed.
    #[error("line {line}, column {column}: expected {expected}")]
    Expected {
        /// The line.
        line: u64,
        /// Column at which the field must start.
        column: usize,
        /// The expected field.
        expected: &'static str,
    },
    /// Nearly all lines are blank or comments.
    #[error("line {line}: nearly all lines so far are blank or comments; remove them")]
    Empty {
        /// The line.
        line: u64,
    },
    /// A number exceeds the maximum of its field.
    #[error("line {line}, column {column}: the number is too large; the largest here is {max}")]
    NumberTooLarge {
        /// The line.
        line: u64,
        /// Column of the number.
        column: usize,
        /// The maximum of the field.
        max: u64,
    },
    /// Text follows the last field of a line.
    #[error("line {line}, column {column}: the line is complete before this; remove the rest or comment it out with #")]
    TrailingField {
        /// The line.
        line: u64,
        /// Column of this text.
        column: usize,
    },
    /// The configuration of an allocator or of a pool is invalid.
    #[error("line {line}, column {column}: the configuration is not valid")]
    Config {
        /// The line.
        line: u64,
        /// Column of the configuration's text.
        column: usize,
        /// The error in the configuration; its offset is relative to `column`.
        source: ConfigTextError,
    },
}
