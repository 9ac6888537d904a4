//! RMM logs: from the CSV that `rmm::mr::logging_resource_adaptor` writes to the ops of the logged program.
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 1979932,14:21:19.998533,allocate,0x30a000000,256,0x2
//! 1979932,14:21:32.661875,free,0x30a000000,256,0x2
//! 1979932,14:21:33.000001,allocate failure,(nil),1099511627776,0x2
//! ```
//!
//! Columns go by the names in the first line, in any order; those not needed are not looked at. Fields may be quoted,
//! lines may end with CR LF, blank lines are passed over. Streams are numbered by the first appearance of their handle.
//! A free on another stream than the allocation's own is a use of that stream, then the free. A log says nothing of
//! segments, so allocations have no recorded placement. Several threads are taken in the order of the log.
//!
//! RMM ends every line. A last line without its end was therefore cut off, perhaps in a number, and is not believed.

use std::borrow::Cow;
use std::io::{BufRead, Read};

mod error;

pub use error::RmmError;

use self::error::LINE_BYTES_MAX;
use crate::options::ReadOptions;
use crate::transcript::{Address, Allocated, Overflow, RawPool, RawStream, Transcript};

/// How every log starts, which is how one is told from other text.
pub(crate) const HEADER_START: &[u8] = b"Thread,Time,Action";

/// Reads a log to its end.
pub(crate) fn read(source: impl BufRead, options: &ReadOptions) -> Result<Transcript, RmmError> {
    let mut lines = Lines { source, line: 0, buffer: Vec::new() };
    let mut transcript = Transcript::new(options.memory_limit_bytes);
    let columns = match lines.next()? {
        Some(header) => Columns::find(header)?,
        None => return Err(RmmError::MissingColumn { column: "Action" }),
    };
    let torn = loop {
        match lines.next() {
            Ok(None) => break None,
            Ok(Some(line)) => {
                if !line.text.trim_ascii().is_empty() {
                    columns.event(line)?.tell(&mut transcript)?;
                }
            }
            Err(error) if options.accept_torn && is_torn(&error) => break Some(lines.line),
            Err(error) => return Err(error),
        }
    };
    transcript.summary.torn_at_line = torn;
    Ok(transcript)
}

fn is_torn(error: &RmmError) -> bool {
    match error {
        RmmError::Torn { .. } => true,
        RmmError::Read { source, .. } => crate::compression::is_torn(source),
        _ => false,
    }
}

/// A line without its end.
#[derive(Clone, Copy)]
struct Line<'a> {
    /// From 1.
    number: u64,
    text: &'a str,
}

/// Line by line, in memory for one.
struct Lines<R> {
    source: R,
    /// The line in the buffer, from 1.
    line: u64,
    buffer: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    /// The next line, or none at the end of the source.
    fn next(&mut self) -> Result<Option<Line<'_>>, RmmError> {
        self.line += 1;
        let line = self.line;
        self.buffer.clear();
        let mut bounded = self.source.by_ref().take(LINE_BYTES_MAX);
        let length = bounded.read_until(b'\n', &mut self.buffer).map_err(|source| RmmError::Read { line, source })?;
        if length == 0 {
            return Ok(None);
        }
        match self.buffer.strip_suffix(b"\n") {
            Some(text) => {
                let text = text.strip_suffix(b"\r").unwrap_or(text);
                let text = std::str::from_utf8(text).map_err(|_| RmmError::NotUtf8 { line })?;
                Ok(Some(Line { number: line, text }))
            }
            None if length as u64 == LINE_BYTES_MAX => Err(RmmError::LineTooLong { line }),
            None => Err(RmmError::Torn { line }),
        }
    }
}

/// Which field of a line is what.
struct Columns {
    count: usize,
    action: usize,
    pointer: usize,
    size: usize,
    stream: usize,
}

impl Columns {
    fn find(header: Line<'_>) -> Result<Self, RmmError> {
        let names = fields(header.text).ok_or(RmmError::Quotes { line: header.number })?;
        let position = |column: &'static str| {
            names.iter().position(|name| name.trim() == column).ok_or(RmmError::MissingColumn { column })
        };
        Ok(Columns {
            count: names.len(),
            action: position("Action")?,
            pointer: position("Pointer")?,
            size: position("Size")?,
            stream: position("Stream")?,
        })
    }

    fn event(&self, Line { number: line, text }: Line<'_>) -> Result<Event, RmmError> {
        let fields = fields(text).ok_or(RmmError::Quotes { line })?;
        if fields.len() != self.count {
            return Err(RmmError::FieldCount { line, expected: self.count, found: fields.len() });
        }
        let number = |column, value: Option<u64>| value.ok_or(RmmError::Number { line, column });
        let action = match fields[self.action].trim() {
            "allocate" => Action::Allocate,
            "free" | "deallocate" => Action::Free,
            "allocate failure" => Action::Fail,
            _ => return Err(RmmError::UnknownAction { line }),
        };
        Ok(Event {
            line,
            action,
            address: Address(number("Pointer", pointer(&fields[self.pointer]))?),
            size_bytes: number("Size", decimal(fields[self.size].trim()))?,
            stream: RawStream(number("Stream", handle(&fields[self.stream]))?),
        })
    }
}

enum Action {
    Allocate,
    Free,
    Fail,
}

/// What one line says.
struct Event {
    line: u64,
    action: Action,
    address: Address,
    size_bytes: u64,
    stream: RawStream,
}

impl Event {
    fn tell(self, transcript: &mut Transcript) -> Result<(), RmmError> {
        let told = match self.action {
            Action::Fail => {
                transcript.summary.failed_allocations += 1;
                Ok(())
            }
            Action::Allocate | Action::Free if self.address == Address(0) => {
                transcript.summary.empty_allocations += 1;
                Ok(())
            }
            Action::Allocate => transcript.allocate(Allocated {
                address: self.address,
                size_bytes: self.size_bytes,
                stream: self.stream,
                pool: RawPool::default(),
                name: None,
                placement: None,
            }),
            Action::Free => transcript.free(self.address, Some(self.stream)),
        };
        told.map_err(|overflow| match overflow {
            Overflow::Size { size_bytes } => RmmError::Size { line: self.line, size_bytes },
            Overflow::Streams => RmmError::TooManyStreams { line: self.line },
            Overflow::Memory { limit_bytes } => RmmError::TooLarge { line: self.line, limit_bytes },
        })
    }
}

/// The fields of a line, unquoted; none if the quotes do not match.
fn fields(line: &str) -> Option<Vec<Cow<'_, str>>> {
    let mut fields = Vec::with_capacity(6);
    let mut rest = line;
    loop {
        let field = match rest.strip_prefix('"') {
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                let (field, after) = rest.split_at(end);
                rest = after;
                Cow::Borrowed(field)
            }
            Some(quoted) => {
                let (field, after) = unquote(quoted)?;
                rest = after;
                field
            }
        };
        fields.push(field);
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None => return rest.is_empty().then_some(fields),
        }
    }
}

/// A quoted field from behind its opening quote, and what follows it. A doubled quote stands for one.
fn unquote(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut field = Cow::Borrowed("");
    let mut rest = text;
    loop {
        let (part, after) = rest.split_once('"')?;
        field += part;
        match after.strip_prefix('"') {
            Some(after) => {
                field += "\"";
                rest = after;
            }
            None => return Some((field, after)),
        }
    }
}

/// A pointer: hexadecimal with or without `0x`; C's `(nil)` is the null pointer.
fn pointer(text: &str) -> Option<u64> {
    match text.trim() {
        "(nil)" => Some(0),
        text => hexadecimal(text.strip_prefix("0x").unwrap_or(text)),
    }
}

/// A stream: a pointer with `0x`, or a small number in decimal, as RMM's versions differ.
fn handle(text: &str) -> Option<u64> {
    match text.trim() {
        "(nil)" => Some(0),
        text => text.strip_prefix("0x").map_or_else(|| decimal(text), hexadecimal),
    }
}

fn hexadecimal(digits: &str) -> Option<u64> {
    // The parser of std takes a sign too.
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, 16).ok())?
}

fn decimal(digits: &str) -> Option<u64> {
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests;
