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
        let mut ledger = Ledger::default();
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
            writeln!(f, "{}", RecordLine(record))?;
        }
        writeln!(f, "end {}", self.records.len())
    }
}
