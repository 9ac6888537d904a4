//! What can be wrong with an RMM log.

use std::io;

use symmalloc_core::units::{Amount, SEGMENT_BYTES_MAX};

/// The longest line, in bytes. RMM's have some 80.
pub(super) const LINE_BYTES_MAX: u64 = 4096;

/// Why an RMM log could not be made into ops. Lines count from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RmmError {
    /// The source failed.
    #[error("line {line} cannot be read")]
    Read {
        /// The line wanted.
        line: u64,
        /// What the source said.
        source: io::Error,
    },
    /// The last line has no end.
    #[error(
        "line {line}, the last, has no line break: the log was cut off there; add a line break if the line is whole, \
         delete it if not, or accept torn input"
    )]
    Torn {
        /// The line.
        line: u64,
    },
    /// The first line lacks a column.
    #[error("the first line names no column '{column}': a log starts with Thread,Time,Action,Pointer,Size,Stream")]
    MissingColumn {
        /// The column.
        column: &'static str,
    },
    /// A line with more or fewer fields than the first line has columns.
    #[error("line {line} has {found} fields, but the first line names {expected} columns")]
    FieldCount {
        /// The line.
        line: u64,
        /// Columns in the first line.
        expected: usize,
        /// Fields found.
        found: usize,
    },
    /// An action that RMM does not log.
    #[error("line {line} has an unknown action; known are allocate, free and allocate failure")]
    UnknownAction {
        /// The line.
        line: u64,
    },
    /// A field that is not the number that it must be.
    #[error(
        "line {line} has no valid {column} (a pointer or stream is hexadecimal, a size decimal, of 64 bits at most)"
    )]
    Number {
        /// The line.
        line: u64,
        /// The column.
        column: &'static str,
    },
    /// A line longer than any in a log.
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes; the file is damaged or no log")]
    LineTooLong {
        /// The line.
        line: u64,
    },
    /// A line that is no text.
    #[error("line {line} is not UTF-8; the file is damaged or no log")]
    NotUtf8 {
        /// The line.
        line: u64,
    },
    /// An allocation that no device can hold.
    #[error(
        "line {line} allocates {}, and the most is {}: the log is damaged",
        Amount(*size_bytes),
        Amount(SEGMENT_BYTES_MAX)
    )]
    Size {
        /// The line.
        line: u64,
        /// What it allocates.
        size_bytes: u64,
    },
    /// More streams than ids.
    #[error("line {line} uses stream number 65,537; a trace has room for 65,536")]
    TooManyStreams {
        /// The line.
        line: u64,
    },
    /// The records made of the log take more memory than the caller allows.
    #[error(
        "the ops up to line {line} take more than {} of memory: raise the limit if you trust the log",
        Amount(*limit_bytes)
    )]
    TooLarge {
        /// The line.
        line: u64,
        /// The limit.
        limit_bytes: u64,
    },
}
