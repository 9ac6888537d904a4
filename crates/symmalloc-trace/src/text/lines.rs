//! A text line by line, in memory for one line.

use super::error::{LINE_BYTES_MAX, LineError};
use std::io::{BufRead, Read};

/// Reads lines.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    reader: R,
    /// The line in `buffer`, counted from 1.
    line: u64,
    buffer: Vec<u8>,
}

/// How a line ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With a line break.
    Whole,
    /// With the input: its end may be missing.
    Cut,
    /// There is no line: the input ended before it.
    Missing,
}

/// What the first line says about the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstLine {
    /// Something of this version.
    Version(u64),
    /// Nothing that we know.
    Foreign,
    /// Its end is missing.
    Torn,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(reader: R) -> Self {
        Lines { reader, line: 0, buffer: Vec::new() }
    }

    /// The number of the line that was read last, from 1.
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
        match self.buffer.last() {
            None => Ok(Ending::Missing),
            Some(b'\n') => Ok(Ending::Whole),
            Some(_) if self.buffer.len() > LINE_BYTES_MAX => Err(LineError::TooLong { line }),
            Some(_) => Ok(Ending::Cut),
        }
    }

    /// The line that was read last, without its line break.
    pub(crate) fn text(&self) -> Result<&str, LineError> {
        std::str::from_utf8(self.bytes())
            .map_err(|error| LineError::InvalidUtf8 { line: self.line, column: error.valid_up_to() + 1 })
    }

    /// As [`text`](Self::text), but not checked to be text.
    pub(crate) fn bytes(&self) -> &[u8] {
        let line = self.buffer.strip_suffix(b"\n").unwrap_or(&self.buffer);
        line.strip_suffix(b"\r").unwrap_or(line)
    }

    /// Reads the first line: `magic`, a space and a version.
    pub(crate) fn read_first(&mut self, magic: &str) -> Result<FirstLine, LineError> {
        let ending = match self.read() {
            // A file of another kind, such as a compressed one, may well have no line breaks.
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
