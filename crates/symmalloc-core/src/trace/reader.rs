//! Reads a trace line by line, in memory for one line.
//!
//! ```text
//!   first line ──► [config] ──► record ──► record ──► ... ──► end N ──► nothing
//!                                  └── input ends here: torn, all whole records were yielded
//! ```

use std::io::{BufRead, Read};
use std::iter::FusedIterator;

use super::ledger::Ledger;
use super::line::{self, Statement};
use super::{LINE_BYTES_MAX, MAGIC, TraceError, VERSION};
use crate::config::Config;
use crate::op::Record;

/// Reads a trace: an iterator over its records, each checked by itself and against those before it.
///
/// After the first error the iterator ends. Records that were yielded before an error are sound: those before
/// [`TraceError::Torn`] are the beginning of the trace as it was recorded.
///
/// ```
/// use symmalloc_core::trace::TraceReader;
///
/// let text = "symmalloc-trace 1\nstream s0\na 0 1048576 s0\nf 0\nend 3\n";
/// let reader = TraceReader::new(text.as_bytes())?;
/// assert_eq!(reader.collect::<Result<Vec<_>, _>>()?.len(), 3);
/// # Ok::<(), symmalloc_core::trace::TraceError>(())
/// ```
#[derive(Debug)]
pub struct TraceReader<R> {
    reader: R,
    config: Option<Config>,
    ledger: Ledger,
    /// The line in `buffer`, counted from 1.
    line: u64,
    buffer: Vec<u8>,
    /// A line that `new` read and did not use.
    pending: Option<Line>,
    records: u64,
    /// Nothing is to be read any more.
    done: bool,
}

/// How the line in the buffer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// With a line break.
    Whole,
    /// With the input: its end may be missing.
    Cut,
    /// There is no line: the input ended before it.
    Missing,
}

impl<R: BufRead> TraceReader<R> {
    /// Starts to read: the first line and the allocator's configuration, if the trace has one.
    ///
    /// # Errors
    /// When the input is no trace, one of an unknown version, or its configuration is not valid.
    pub fn new(reader: R) -> Result<Self, TraceError> {
        let mut trace = TraceReader {
            reader,
            config: None,
            ledger: Ledger::default(),
            line: 0,
            buffer: Vec::new(),
            pending: None,
            records: 0,
            done: false,
        };
        trace.read_version()?;
        trace.read_config()?;
        Ok(trace)
    }

    /// The allocator's configuration, if the trace states one.
    pub fn config(&self) -> Option<&Config> {
        self.config.as_ref()
    }

    /// How many records were yielded so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The line of the record that was yielded last, counted from 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    fn read_version(&mut self) -> Result<(), TraceError> {
        let ending = match self.read_line() {
            // A file of another kind, such as a compressed one, may well have no line breaks.
            Err(TraceError::LineTooLong { .. }) => return Err(TraceError::NotATrace),
            ending => ending?,
        };
        let text = std::str::from_utf8(without_break(&self.buffer)).map_err(|_| TraceError::NotATrace)?;
        let version = text.strip_prefix(MAGIC).and_then(|rest| rest.strip_prefix(' ')).ok_or(TraceError::NotATrace)?;
        let version = version.trim_ascii_end();
        if ending != Line::Whole {
            return Err(self.torn());
        }
        if version.is_empty() || !version.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(TraceError::NotATrace);
        }
        match version.parse().unwrap_or(u64::MAX) {
            VERSION => Ok(()),
            found => Err(TraceError::UnsupportedVersion { found }),
        }
    }

    fn read_config(&mut self) -> Result<(), TraceError> {
        loop {
            let ending = self.read_line()?;
            if ending == Line::Whole {
                // Not parsed further: an error in a record is the iterator's to tell.
                let text = without_break(&self.buffer).trim_ascii_start();
                if text.is_empty() || text[0] == b'#' {
                    continue;
                }
                if text.starts_with(b"config")
                    && let Statement::Config(config) = line::parse(self.line, self.text()?)?
                {
                    self.config = Some(config);
                    return Ok(());
                }
            }
            self.pending = Some(ending);
            return Ok(());
        }
    }

    /// The next record, or nothing after the end.
    fn read_record(&mut self) -> Result<Option<Record>, TraceError> {
        loop {
            let ending = match self.pending.take() {
                Some(ending) => ending,
                None => self.read_line()?,
            };
            if ending != Line::Whole {
                return self.read_last(ending);
            }
            match line::parse(self.line, self.text()?)? {
                Statement::Nothing => {}
                Statement::Record(record) => {
                    let line = self.line;
                    self.ledger.admit(&record).map_err(|source| TraceError::Inconsistent { line, source })?;
                    self.records += 1;
                    return Ok(Some(record));
                }
                Statement::Config(_) => return Err(TraceError::MisplacedConfig { line: self.line }),
                Statement::End { records } => {
                    self.check_count(records)?;
                    self.read_nothing_more()?;
                    return Ok(None);
                }
            }
        }
    }

    /// The input ended in this line or before it. The line may lack its end (`end 1` of `end 12`), so it counts only when
    /// it is an `end` with the right number.
    fn read_last(&self, ending: Line) -> Result<Option<Record>, TraceError> {
        let statement = match ending {
            Line::Cut => self.text().and_then(|text| line::parse(self.line, text)),
            Line::Whole | Line::Missing => Ok(Statement::Nothing),
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
            Err(TraceError::WrongCount { line: self.line, stated, records: self.records })
        }
    }

    fn read_nothing_more(&mut self) -> Result<(), TraceError> {
        while self.read_line()? != Line::Missing {
            match self.text().and_then(|text| line::parse(self.line, text)) {
                Ok(Statement::Nothing) => {}
                _ => return Err(TraceError::AfterEnd { line: self.line }),
            }
        }
        Ok(())
    }

    fn torn(&self) -> TraceError {
        TraceError::Torn { records: self.records, line: self.line }
    }

    /// Reads the next line into the buffer.
    fn read_line(&mut self) -> Result<Line, TraceError> {
        self.buffer.clear();
        self.line += 1;
        let line = self.line;
        let mut bounded = self.reader.by_ref().take(LINE_BYTES_MAX as u64 + 1);
        bounded.read_until(b'\n', &mut self.buffer).map_err(|source| TraceError::Io { line, source })?;
        match self.buffer.last() {
            None => Ok(Line::Missing),
            Some(b'\n') => Ok(Line::Whole),
            Some(_) if self.buffer.len() > LINE_BYTES_MAX => Err(TraceError::LineTooLong { line }),
            Some(_) => Ok(Line::Cut),
        }
    }

    /// The line in the buffer, without its line break.
    fn text(&self) -> Result<&str, TraceError> {
        std::str::from_utf8(without_break(&self.buffer))
            .map_err(|error| TraceError::InvalidUtf8 { line: self.line, column: error.valid_up_to() + 1 })
    }
}

/// The line without `\n` or `\r\n`.
fn without_break(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
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
