//! Reader for traces. It holds one line in memory.
//!
//! ```text
//!   first line ──► [config] ──► record ──► record ──► ... ──► end N ──► nothing
//!                                  └── input ends here: truncated, all whole records were yielded
//! ```

use std::io::BufRead;
use std::iter::FusedIterator;

use super::error::{Inconsistency, TraceError};
use super::ledger::Ledger;
use super::line::{self, MAGIC, Statement, VERSION};
use crate::text::{Ending, FirstLine, Lines};
use symmalloc_core::config::Config;
use symmalloc_core::op::{Op, Record};

/// A trace reader: an iterator over the records. Each record is checked by itself and against earlier records.
///
/// The iterator ends after the first error. The records before an error are valid. Those before [`TraceError::Torn`] are the beginning of
/// the recorded trace.
///
/// ```
/// use symmalloc::trace::TraceReader;
///
/// let text = "symmalloc-trace 1\nstream s0\na 0 1048576 s0\nf 0\nend 3\n";
/// let reader = TraceReader::new(text.as_bytes())?;
/// assert_eq!(reader.collect::<Result<Vec<_>, _>>()?.len(), 3);
/// # Ok::<(), symmalloc::trace::TraceError>(())
/// ```
#[derive(Debug)]
pub struct TraceReader<R> {
    lines: Lines<R>,
    /// The version that the trace states.
    version: u64,
    config: Option<Config>,
    ledger: Ledger,
    /// A line that `new` read ahead.
    pending: Option<Ending>,
    records: u64,
    /// `true` once the iterator has ended.
    done: bool,
}

impl<R: BufRead> TraceReader<R> {
    /// Creates a reader. Reads the first line and the allocator's configuration, if the trace states one.
    ///
    /// # Errors
    /// Returns an error if the input is not a trace, has an unsupported version, or states an invalid configuration.
    pub fn new(reader: R) -> Result<Self, TraceError> {
        let mut trace = TraceReader {
            lines: Lines::new(reader),
            version: VERSION,
            config: None,
            ledger: Ledger::default(),
            pending: None,
            records: 0,
            done: false,
        };
        trace.read_version()?;
        trace.read_config()?;
        Ok(trace)
    }

    /// Returns the allocator's configuration, if the trace states one.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// Returns the number of records yielded so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Returns the line number of the last yielded record, from 1.
    pub fn line(&self) -> u64 {
        self.lines.number()
    }

    fn read_version(&mut self) -> Result<(), TraceError> {
        match self.lines.read_first(MAGIC)? {
            FirstLine::Version(version @ 1..=VERSION) => {
                self.version = version;
                Ok(())
            }
            FirstLine::Version(found) => Err(TraceError::UnsupportedVersion { found }),
            FirstLine::Foreign => Err(TraceError::NotATrace),
            FirstLine::Torn => Err(self.torn()),
        }
    }

    fn read_config(&mut self) -> Result<(), TraceError> {
        loop {
            let ending = self.lines.read()?;
            if ending == Ending::Whole {
                // `new` parses only the `config` line; the iterator reports errors in records.
                let text = self.lines.bytes().trim_ascii_start();
                if text.is_empty() || text[0] == b'#' {
                    continue;
                }
                if text.starts_with(b"config")
                    && let Statement::Config(config) = line::parse(self.line(), self.lines.text()?)?
                {
                    self.config = Some(config);
                    return Ok(());
                }
            }
            self.pending = Some(ending);
            return Ok(());
        }
    }

    /// Returns the next record, or `None` after the end.
    fn read_record(&mut self) -> Result<Option<Record>, TraceError> {
        loop {
            let ending = match self.pending.take() {
                Some(ending) => ending,
                None => self.lines.read()?,
            };
            if ending != Ending::Whole {
                return self.read_last(ending);
            }
            match line::parse(self.line(), self.lines.text()?)? {
                Statement::Nothing => {}
                Statement::Record(record) => {
                    let line = self.line();
                    let inconsistent = |source| TraceError::Inconsistent { line, source };
                    match record.op {
                        Op::RegisterStream { stream, group } if self.version < 2 && group != stream => {
                            return Err(inconsistent(Inconsistency::GroupInVersion1 { stream }));
                        }
                        _ => self.ledger.admit(&record).map_err(inconsistent)?,
                    }
                    self.records += 1;
                    return Ok(Some(record));
                }
                Statement::Config(_) => return Err(TraceError::MisplacedConfig { line: self.line() }),
                Statement::End { records } => {
                    self.check_count(records)?;
                    self.read_nothing_more()?;
                    return Ok(None);
                }
            }
        }
    }

    /// Handles the end of the input, in or before the current line. The line may be truncated (`end 1` of `end 12`), so it counts only if
    /// it is an `end` line with the correct number.
    fn read_last(&self, ending: Ending) -> Result<Option<Record>, TraceError> {
        let statement = match ending {
            Ending::Cut => self.lines.text().and_then(|text| line::parse(self.line(), text)),
            Ending::Whole | Ending::Missing => Ok(Statement::Nothing),
        };
        match statement {
            Ok(Statement::End { records }) if records == self.records => Ok(None),
            _ => Err(self.torn()),
        }
    }

    fn check_count(&self, stated: u64) -> Result<(), TraceError> {
        if stated == self.records {
            Ok(())
        } else {
            Err(TraceError::WrongCount { line: self.line(), stated, records: self.records })
        }
    }

    fn read_nothing_more(&mut self) -> Result<(), TraceError> {
        while self.lines.read()? != Ending::Missing {
            match self.lines.text().and_then(|text| line::parse(self.line(), text)) {
                Ok(Statement::Nothing) => {}
                _ => return Err(TraceError::AfterEnd { line: self.line() }),
            }
        }
        Ok(())
    }

    fn torn(&self) -> TraceError {
        TraceError::Torn { records: self.records, line: self.line() }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let record = self.read_record().transpose();
        self.done = !matches!(record, Some(Ok(_)));
        record
    }
}

impl<R: BufRead> FusedIterator for TraceReader<R> {}
