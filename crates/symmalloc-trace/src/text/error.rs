//! What can be wrong with a line by itself.

use std::io;
use symmalloc_core::config_text::ConfigTextError;
use symmalloc_core::config_text::did_you_mean;

/// The longest line, in bytes, its line break included. No line needs more.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// Why a line could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LineError {
    /// The reader below failed.
    #[error("line {line}: the text could not be read")]
    Io {
        /// The line that was being read.
        line: u64,
        /// What the reader below said.
        source: io::Error,
    },
    /// A line is not UTF-8.
    #[error("line {line}, column {column}: not UTF-8; the file is damaged or compressed")]
    InvalidUtf8 {
        /// The line.
        line: u64,
        /// The first byte that is not UTF-8.
        column: usize,
    },
    /// A line is longer than any needs to be.
    #[error("line {line}: longer than {LINE_BYTES_MAX} bytes; no line is, so the file is damaged")]
    TooLong {
        /// The line.
        line: u64,
    },
    /// A line starts with a word that says nothing here.
    #[error("line {line}, column {column}: unknown keyword{}; the keywords are {}", did_you_mean(*nearest), keywords.join(", "))]
    UnknownKeyword {
        /// The line.
        line: u64,
        /// Where the word starts.
        column: usize,
        /// The keyword that was probably meant.
        nearest: Option<&'static str>,
        /// The words that a line can start with.
        keywords: &'static [&'static str],
    },
    /// Something else stands where a field must be, or nothing.
    #[error("line {line}, column {column}: expected {expected}")]
    Expected {
        /// The line.
        line: u64,
        /// Where the field must start.
        column: usize,
        /// What the field must be.
        expected: &'static str,
    },
    /// A number is larger than the field can hold.
    #[error("line {line}, column {column}: the number is too large; the largest here is {max}")]
    NumberTooLarge {
        /// The line.
        line: u64,
        /// Where the number starts.
        column: usize,
        /// The largest number the field can hold.
        max: u64,
    },
    /// The line goes on after it is complete.
    #[error("line {line}, column {column}: the line is complete before this; remove the rest or comment it out with #")]
    TrailingField {
        /// The line.
        line: u64,
        /// Where the rest starts.
        column: usize,
    },
    /// The configuration of an allocator or of a pool is not one.
    #[error("line {line}, column {column}: the configuration is not valid")]
    Config {
        /// The line.
        line: u64,
        /// Where the configuration's text starts.
        column: usize,
        /// What is wrong with it; its offset counts from `column`.
        source: ConfigTextError,
    },
}
