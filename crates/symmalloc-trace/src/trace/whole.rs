//! A whole trace in memory.

use super::error::{TraceError, TraceWriteError};
use super::ledger::Ledger;
use super::line::{MAGIC, VERSION};
use super::reader::TraceReader;
use super::writer::RecordLine;
use std::fmt;
use std::io::BufRead;
use std::str::FromStr;
use symmalloc_core::config::Config;
use symmalloc_core::op::Record;

/// A whole trace in memory: a configuration and consistent records.
///
/// # Examples
/// ```
/// use symmalloc::trace::Trace;
///
/// let trace = Trace::parse("symmalloc-trace 1\nstream s0\na 0 512 s0\nf 0\nend 3\n")?;
/// assert_eq!(trace.records().len(), 3);
/// assert_eq!(Trace::parse(&trace.to_text())?, trace);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    config: Option<Config>,
    records: Vec<Record>,
}

impl Trace {
    /// Creates a trace from records.
    ///
    /// # Errors
    /// Returns [`TraceWriteError::Inconsistent`], with the index of the record, if a record contradicts earlier ones.
    pub fn new(config: Option<Config>, records: Vec<Record>) -> Result<Self, TraceWriteError> {
        let mut ledger = Ledger::default();
        for (record, number) in records.iter().zip(0..) {
            ledger.admit(record).map_err(|source| TraceWriteError::Inconsistent { record: number, source })?;
        }
        Ok(Trace { config, records })
    }

    /// Reads a whole trace.
    ///
    /// # Errors
    /// Same as [`TraceReader`]. To use the beginning of a truncated trace, read the trace record by record with a
    /// [`TraceReader`].
    pub fn read(reader: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = TraceReader::new(reader)?;
        let records = reader.by_ref().collect::<Result<_, _>>()?;
        Ok(Trace { config: reader.config().cloned(), records })
    }

    /// Parses a trace from text.
    ///
    /// # Errors
    /// Same as [`TraceReader`].
    pub fn parse(text: &str) -> Result<Self, TraceError> {
        Self::read(text.as_bytes())
    }

    /// Returns the trace as text, which [`parse`](Trace::parse) reads back to an equal trace.
    pub fn to_text(&self) -> String {
        self.to_string()
    }

    /// Returns the allocator's configuration, if the trace states one.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// Returns the records, in order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Returns the configuration and the records.
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
            writeln!(f, "{}", RecordLine(record))?;
        }
        writeln!(f, "end {}", self.records.len())
    }
}
