//! Reads a text line by line, with one line in memory.

use super::error::{LINE_BYTES_MAX, LineError};
use std::io::{BufRead, Read};

/// A reader of lines.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    reader: R,
    /// Number of the line in `buffer`, from 1.
    line: u64,
    /// Number of blank lines and comments so far.
    empty: u64,
    buffer: Vec<u8>,
}

/// Number of blank lines and comments that a text may have even without any other line. The limit exists because a
/// gigabyte of them compresses to a megabyte.
const EMPTY_MAX: u64 = 1 << 20;
/// Number of further blank lines and comments that each other line allows.
const EMPTY_PER_LINE: u64 = 16;

/// The way in which a line ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With a line break.
    Whole,
    /// At the end of the input, so the line may be truncated.
    Cut,
    /// The line does not exist: the input ended before it.
    Missing,
}

/// The format that the first line declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstLine {
    /// The expected format, in this version.
    Version(u64),
    /// A different format.
    Foreign,
    /// A truncated first line of the expected format.
    Torn,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(reader: R) -> Self {
        Lines { reader, line: 0, empty: 0, buffer: Vec::new() }
    }

    /// Returns the number of the last line read, from 1.
    pub(crate) fn number(&self) -> u64 {
        self.line
    }

    /// Reads the next line.
    pub(crate) fn read(&mut self) -> Result<Ending, LineError> {
        self.buffer.clear();
        self.line += 1;
        let line = self.line;
        let mut bounded = self.reader.by_ref().take(LINE_BYTES_MAX as u64 + 1);
        bounded.read_until(b'\n', &mut self.buffer).map_err(|source| LineError::Io { line, source })?;
        if matches!(self.buffer.trim_ascii_start(), [] | [b'#', ..]) {
            self.empty += 1;
            if self.empty > EMPTY_MAX + (self.line - self.empty).saturating_mul(EMPTY_PER_LINE) {
                return Err(LineError::Empty { line });
            }
        }
        match self.buffer.last() {
            None => Ok(Ending::Missing),
            Some(b'\n') => Ok(Ending::Whole),
            Some(_) if self.buffer.len() > LINE_BYTES_MAX => Err(LineError::TooLong { line }),
            Some(_) => Ok(Ending::Cut),
        }
    }

    /// Returns the last line read, without its line break.
    pub(crate) fn text(&self) -> Result<&str, LineError> {
        std::str::from_utf8(self.bytes())
            .map_err(|error| LineError::InvalidUtf8 { line: self.line, column: error.valid_up_to() + 1 })
    }

    /// Same as [`text`](Self::text), but without the UTF-8 check.
    pub(crate) fn bytes(&self) -> &[u8] {
        let line = self.buffer.strip_suffix(b"\n").unwrap_or(&self.buffer);
        line.strip_suffix(b"\r").unwrap_or(line)
    }

    /// Reads the first line: `magic`, a space and a version.
    pub(crate) fn read_first(&mut self, magic: &str) -> Result<FirstLine, LineError> {
        let ending = match self.read() {
            // A file in another format, such as a compressed one, may have no line breaks.
            Err(LineError::TooLong { .. }) => return Ok(FirstLine::Foreign),
            ending => ending?,
        };
        let version = self.text().ok().and_then(|text| text.strip_prefix(magic)?.strip_prefix(' '));
        let Some(version) = version.map(str::trim_ascii_end) else { return Ok(FirstLine::Foreign) };
        if ending != Ending::Whole {
            return Ok(FirstLine::Torn);
        }
        if version.is_empty() || !version.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(FirstLine::Foreign);
        }
        Ok(FirstLine::Version(version.parse().unwrap_or(u64::MAX)))
    }
}
