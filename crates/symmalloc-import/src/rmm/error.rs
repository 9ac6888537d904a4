//! Errors in an RMM log.

use std::io;

use symmalloc_core::units::{Amount, SEGMENT_BYTES_MAX};

/// Maximum length of a line in bytes. RMM's lines have about 80 bytes.
pub(super) const LINE_BYTES_MAX: u64 = 4096;

/// Error converting an RMM log to ops. Lines count from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RmmError {
    /// The source failed.
    #[error("line {line} cannot be read")]
    Read {
        /// Line to be read.
        line: u64,
        /// The source's error.
        source: io::Error,
    },
    /// The last line has no line break.
    #[error(
        "line {line}, the last, has no line break: the log was cut off there; add a line break if the line is complete, \
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
    /// The number of fields in a line differs from the number of columns.
    #[error("line {line} has {found} fields, but the first line names {expected} columns")]
    FieldCount {
        /// The line.
        line: u64,
        /// Number of columns in the first line.
        expected: usize,
        /// Number of fields found.
        found: usize,
    },
    /// A line contains an action that RMM does not log.
    #[error("line {line} has an unknown action; the known actions are allocate, free and allocate failure")]
    UnknownAction {
        /// The line.
        line: u64,
    },
    /// A field is not a valid number.
    #[error(
        "line {line} has no valid {column} (pointers and streams are hexadecimal, sizes decimal, all of at most 64 bits)"
    )]
    Number {
        /// The line.
        line: u64,
        /// The column.
        column: &'static str,
    },
    /// A line is longer than any line in a log.
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes; the file is damaged or not a log")]
    LineTooLong {
        /// The line.
        line: u64,
    },
    /// Nearly all lines are blank.
    #[error("nearly all of the lines after line {line} are blank; remove these")]
    Blank {
        /// The line.
        line: u64,
    },
    /// A line is not UTF-8.
    #[error("line {line} is not UTF-8; the file is damaged or not a log")]
    NotUtf8 {
        /// The line.
        line: u64,
    },
    /// An allocation is larger than any device.
    #[error(
        "line {line} allocates {}, but the maximum is {}: the log is damaged",
        Amount(*size_bytes),
        Amount(SEGMENT_BYTES_MAX)
    )]
    Size {
        /// The line.
        line: u64,
        /// Size of the allocation in bytes.
        size_bytes: u64,
    },
    /// The log has more streams than there are ids.
    #[error("line {line} uses stream number 65,536; a trace can hold 65,535")]
    TooManyStreams {
        /// The line.
        line: u64,
    },
    /// The records of the log exceed the memory limit.
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
