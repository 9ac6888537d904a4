//! The trace: recorded ops as text, one record per line.
//!
//! A trace is at once the step list of a test, the input of a fuzzer, what `replay` runs and what a bug report
//! consists of. It is made to be read, cut and compared by people and by `diff`, and it compresses well. Compression
//! itself is left to others: reader and writer work on any [`BufRead`] and [`Write`](std::io::Write).
//!
//! ```
//! # use symmalloc_core::trace::Trace;
//! let trace = Trace::parse(r#"symmalloc-trace 1
//! config segments:expandable,limit_mb:4096      # optional: the allocator's configuration
//! stream s0                                     # streams and pools are declared, in order
//! stream s1
//! pool p1 segments:reserved,segment_mb:64
//! a 0 1048576 s0                                # allocate id 0: 1048576 bytes, on s0, in p0
//! a 1 512 s0 p1 "kv cache" -> 0@1048576         # in p1, named, recorded in segment 0 at that offset
//! u 0 s1                                        # s1 uses it too
//! f 0                                           # free
//! end 7                                         # how many records there are
//! "#)?;
//! assert_eq!(trace.records()[3].to_string(), "a 0 1048576 s0");
//! # Ok::<(), symmalloc_core::trace::TraceError>(())
//! ```
//!
//! The whole format stands in `docs/trace-format.md`. A reader checks everything that a trace can be checked for by
//! itself ([`TraceError`], [`Inconsistency`]); a writer refuses what a reader would refuse.

mod error;
mod ledger;
mod line;
#[cfg(test)]
mod properties;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use error::{Inconsistency, TraceError, TraceWriteError};
pub use reader::TraceReader;
pub use writer::TraceWriter;

use std::fmt;
use std::io::BufRead;
use std::str::FromStr;

use crate::config::Config;
use crate::op::Record;
use crate::text;

/// The first word of every trace.
pub const MAGIC: &str = "symmalloc-trace";

/// The version of the format that this library writes, and the only one it reads.
pub const VERSION: u64 = 1;

/// The longest line, in bytes, its line break included. No record needs more.
pub const LINE_BYTES_MAX: usize = text::LINE_BYTES_MAX;

/// The longest name of an allocation, in bytes of UTF-8. Escaped it takes at most six times as many.
pub const NAME_BYTES_MAX: usize = text::NAME_BYTES_MAX;

/// A whole trace in memory: a configuration and records that are consistent with each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    config: Option<Config>,
    records: Vec<Record>,
}

impl Trace {
    /// A trace of these records.
    ///
    /// # Errors
    /// When a record contradicts those before it ([`TraceWriteError::Inconsistent`], with the record's number).
    pub fn new(config: Option<Config>, records: Vec<Record>) -> Result<Self, TraceWriteError> {
        let mut ledger = ledger::Ledger::default();
        for (record, number) in records.iter().zip(0..) {
            ledger.admit(record).map_err(|source| TraceWriteError::Inconsistent { record: number, source })?;
        }
        Ok(Trace { config, records })
    }

    /// Reads a whole trace.
    ///
    /// # Errors
    /// As [`TraceReader`]. To use the beginning of a torn trace, read it record by record.
    pub fn read(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = TraceReader::new(reader)?;
        let records = reader.by_ref().collect::<Result<_, _>>()?;
        Ok(Trace { config: reader.config().cloned(), records })
    }

    /// Reads a trace from its text.
    ///
    /// # Errors
    /// As [`TraceReader`].
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        Self::read(text.as_bytes())
    }

    /// The trace as text, which [`parse`](Trace::parse) reads back to an equal trace.
    pub fn to_text(&self) -> String {
        self.to_string()
    }

    /// The allocator's configuration, if the trace states one.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// The records, in order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Configuration and records.
    pub fn into_parts(self) -> (Option<Config>, Vec<Record>) {
        (self.config, self.records)
    }
}

impl FromStr for Trace {
    type Err = TraceError;

    fn from_str(text: &str) -> Result<Self, TraceError> {
        Self::parse(text)
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{MAGIC} {VERSION}")?;
        if let Some(config) = &self.config {
            writeln!(f, "config {config}")?;
        }
        for record in &self.records {
            writeln!(f, "{record}")?;
        }
        writeln!(f, "end {}", self.records.len())
    }
}

impl fmt::Display for Record {
    /// The record's line in a trace, without the line break.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writer::write_record(f, self)
    }
}
