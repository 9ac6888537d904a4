//! RMM logs: converts the CSV that `rmm::mr::logging_resource_adaptor` writes to the ops of the logged program.
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 1979932,14:21:19.998533,allocate,0x30a000000,256,0x2
//! 1979932,14:21:32.661875,free,0x30a000000,256,0x2
//! 1979932,14:21:33.000001,allocate failure,(nil),1099511627776,0x2
//! ```
//!
//! The first line names the columns, which may be in any order. Unneeded columns are ignored. Fields may be quoted, lines may end with CR
//! LF, and blank lines are skipped. Pointers and streams are hexadecimal, with or without `0x`.
//!
//! Streams are numbered by the first appearance of their handle. CUDA defines three special handles: 0x0 and 0x1 are the legacy default
//! stream, and 0x2 is the per-thread default stream, whose thread is in the `Thread` column. If an allocation is freed on a stream other
//! than its own, this becomes a use by that stream, followed by the free.
//!
//! A log that begins late contains frees of allocations that it does not contain. A free states the size and the stream, so these
//! allocations can be reconstructed. They come first, in the order of their frees. A log does not name segments, so allocations have no
//! recorded placement. Entries of several threads keep the order of the log.
//!
//! The `csv` crate parses the log. RMM ends every line with a line break. If the last line has none, it was truncated, perhaps within a
//! number, and is rejected.

use std::io::{self, BufRead, Read};

use std::collections::{HashMap, HashSet};

use csv::{ErrorKind, ReaderBuilder, StringRecord};

mod error;

pub use error::RmmError;

use self::error::LINE_BYTES_MAX;
use crate::options::{MemoryLimit, ReadOptions};
use crate::transcript::{Address, Allocated, Overflow, RawPool, RawStream, Refused, Transcript};

/// The required columns.
const COLUMNS: [&str; 4] = ["Action", "Pointer", "Size", "Stream"];

/// Returns `true` if text with this beginning is a log: its first line names most of the columns, in any order.
pub(crate) fn is_log(start: &[u8]) -> bool {
    let line = start.split(|byte| *byte == b'\n').next().unwrap_or(start);
    let name = |field: &[u8]| String::from_utf8_lossy(field).trim().trim_matches('"').to_owned();
    let names: Vec<String> = line.split(|byte| *byte == b',').take(64).map(name).collect();
    COLUMNS.iter().filter(|column| names.iter().any(|name| name == *column)).count() >= 3
}

/// Returns `true` if text with this beginning is RMM's debug log, which consists of spdlog's lines, such as
/// `[104507][08:24:53:517285][error ] [A][Stream 0xe8ece8008210][Upstream 2139648B][FAILURE maximum pool size exceeded]`.
pub(crate) fn is_debug_log(start: &[u8]) -> bool {
    let text = String::from_utf8_lossy(start);
    text.contains("RMM LOG BEGIN")
        || text.lines().any(|line| {
            line.starts_with('[') && line.contains("][Stream ") && (line.contains("[A]") || line.contains("[D]"))
                || line.starts_with('[') && line.contains("[Upstream ")
        })
}

/// Reads a log to its end.
pub(crate) fn read(source: impl BufRead, options: &ReadOptions) -> Result<Transcript, RmmError> {
    let source = LogText { source, line: 1, line_bytes: 0, blank: 0, ends_in_line: false };
    let mut reader = ReaderBuilder::new().flexible(true).from_reader(source);
    let columns = Columns::find(reader.headers().map_err(|error| explained(error, 1))?)?;
    let mut events = Events::new(options.memory_limit());
    // Holds each line back until it is known to have a line break, because the last line is valid only if it has one.
    let mut held: Option<(u64, StringRecord)> = None;
    let torn = loop {
        let mut record = StringRecord::new();
        let read = reader.read_record(&mut record);
        let at = reader.position().line();
        match read {
            Ok(true) => {
                if let Some((line, record)) = held.replace((at.saturating_sub(1), record)) {
                    columns.read(line, &record, &mut events)?;
                }
            }
            Ok(false) => match held {
                Some(_) if reader.get_ref().ends_in_line && options.accept_torn => break Some(at),
                Some(_) if reader.get_ref().ends_in_line => return Err(RmmError::Torn { line: at }),
                Some((line, record)) => {
                    columns.read(line, &record, &mut events)?;
                    break None;
                }
                None => break None,
            },
            Err(error) => {
                let error = explained(error, at);
                match error {
                    RmmError::Read { ref source, .. } if options.accept_torn && crate::compression::is_torn(source) => {
                        if let Some((line, record)) = held {
                            columns.read(line, &record, &mut events)?;
                        }
                        break Some(at);
                    }
                    error => return Err(error),
                }
            }
        }
    };
    let mut transcript = events.into_transcript(options)?;
    transcript.summary.torn_at_line = torn;
    Ok(transcript)
}

/// Converts an error that the CSV reader returned near this line.
fn explained(error: csv::Error, line: u64) -> RmmError {
    match error.into_kind() {
        ErrorKind::Io(source)
            if source.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<TooBlank>) =>
        {
            RmmError::Blank { line }
        }
        ErrorKind::Io(source) => match source.get_ref().and_then(|inner| inner.downcast_ref::<TooLong>()) {
            Some(TooLong { line }) => RmmError::LineTooLong { line: *line },
            None => RmmError::Read { line, source },
        },
        ErrorKind::Utf8 { pos, .. } => RmmError::NotUtf8 { line: pos.map_or(line, |position| position.line()) },
        other => RmmError::Read { line, source: io::Error::other(format!("{other:?}")) },
    }
}

/// The text of a log. It limits the length of lines, normalizes line breaks to LF, and tracks whether the last line has one.
struct LogText<R> {
    source: R,
    /// Current line, from 1.
    line: u64,
    line_bytes: u64,
    /// Number of blank lines so far.
    blank: u64,
    ends_in_line: bool,
}

/// Number of blank lines that a log may have even without any other line. Each other line allows further ones
/// (`BLANK_PER_LINE`).
const BLANK_MAX: u64 = 1 << 20;
const BLANK_PER_LINE: u64 = 16;

/// Error: nearly all lines of the log are blank.
#[derive(Debug, thiserror::Error)]
#[error("nearly all lines are blank")]
struct TooBlank;

/// Error: the line is longer than any line in a log.
#[derive(Debug, thiserror::Error)]
#[error("line {line} is too long")]
struct TooLong {
    line: u64,
}

impl<R: BufRead> Read for LogText<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let text = self.source.fill_buf()?;
            if text.is_empty() {
                return Ok(0);
            }
            let (mut read, mut written) = (0, 0);
            for byte in text.iter().take(buffer.len()) {
                read += 1;
                self.line_bytes += 1;
                if *byte == b'\n' {
                    self.blank += u64::from(self.line_bytes == 1);
                    if self.blank > BLANK_MAX + (self.line - self.blank.min(self.line)).saturating_mul(BLANK_PER_LINE) {
                        return Err(io::Error::new(io::ErrorKind::InvalidData, TooBlank));
                    }
                    (self.line, self.line_bytes) = (self.line + 1, 0);
                } else if self.line_bytes >= LINE_BYTES_MAX {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, TooLong { line: self.line }));
                }
                if *byte != b'\r' {
                    self.ends_in_line = *byte != b'\n';
                    buffer[written] = *byte;
                    written += 1;
                }
            }
            self.source.consume(read);
            if written > 0 {
                return Ok(written);
            }
        }
    }
}

/// Positions of the fields in a line.
struct Columns {
    count: usize,
    action: usize,
    pointer: usize,
    size: usize,
    stream: usize,
    thread: Option<usize>,
}

impl Columns {
    fn find(names: &StringRecord) -> Result<Self, RmmError> {
        let position = |column: &'static str| {
            names.iter().position(|name| name.trim() == column).ok_or(RmmError::MissingColumn { column })
        };
        Ok(Columns {
            count: names.len(),
            action: position("Action")?,
            pointer: position("Pointer")?,
            size: position("Size")?,
            stream: position("Stream")?,
            thread: position("Thread").ok(),
        })
    }

    /// Adds the event of a line. A blank line has no event.
    fn read(&self, line: u64, fields: &StringRecord, events: &mut Events) -> Result<(), RmmError> {
        if fields.iter().all(|field| field.trim().is_empty()) && fields.len() == 1 {
            return Ok(());
        }
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
        let thread = self.thread.map_or("", |thread| fields[thread].trim());
        let stream = events.stream(number("Stream", handle(&fields[self.stream]))?, thread);
        events.push(Event {
            line,
            action,
            address: Address(number("Pointer", handle(&fields[self.pointer]))?),
            size_bytes: number("Size", decimal(fields[self.size].trim()))?,
            stream,
        })
    }
}

/// The events of a log.
struct Events {
    events: Vec<Event>,
    /// Threads that use their default streams, numbered by first appearance. Never iterated.
    threads: HashMap<String, u128>,
    /// Total bytes of the threads' names.
    name_bytes: usize,
    limit: MemoryLimit,
}

impl Events {
    fn new(limit: MemoryLimit) -> Self {
        Events { events: Vec::new(), threads: HashMap::new(), name_bytes: 0, limit }
    }

    /// Returns the stream that a handle denotes in a thread.
    fn stream(&mut self, handle: u64, thread: &str) -> RawStream {
        match handle {
            // `cudaStreamLegacy`, a second handle of the default stream.
            1 => RawStream(0),
            // `cudaStreamPerThread`.
            2 => {
                let next = (1 << 64) + self.threads.len() as u128;
                let number = self.threads.get(thread).copied();
                RawStream(number.unwrap_or_else(|| {
                    self.name_bytes += thread.len() + size_of::<(String, u128)>();
                    self.threads.insert(thread.to_owned(), next);
                    next
                }))
            }
            handle => RawStream(handle.into()),
        }
    }

    fn push(&mut self, event: Event) -> Result<(), RmmError> {
        let limit_bytes = self.limit.bytes();
        if (self.events.len() * size_of::<Event>() + self.name_bytes) as u64 >= limit_bytes {
            return Err(RmmError::TooLarge { line: event.line, limit_bytes });
        }
        self.events.push(event);
        Ok(())
    }

    /// Converts first the allocations that are live at the beginning of the log, and then the log.
    fn into_transcript(self, options: &ReadOptions) -> Result<Transcript, RmmError> {
        let mut transcript = Transcript::new(options);
        // Addresses that occurred so far. Only the first event of an address can reveal an allocation from before the
        // log; a second free of the same address indicates a damaged log. Never iterated.
        let mut known: HashSet<Address> = HashSet::new();
        for event in self.events.iter().filter(|event| event.has_memory()) {
            if known.insert(event.address) && matches!(event.action, Action::Free) && event.size_bytes > 0 {
                let outcome = transcript.allocate_before(event.allocated());
                outcome.map_err(|overflow| event.overflow(overflow))?;
            }
        }
        self.events.into_iter().try_for_each(|event| event.append_to(&mut transcript))?;
        Ok(transcript)
    }
}

enum Action {
    Allocate,
    Free,
    Fail,
}

/// The event of one line.
struct Event {
    line: u64,
    action: Action,
    address: Address,
    size_bytes: u64,
    stream: RawStream,
}

impl Event {
    fn append_to(&self, transcript: &mut Transcript) -> Result<(), RmmError> {
        let outcome = match self.action {
            Action::Fail => transcript.refuse(Refused {
                size_bytes: self.size_bytes,
                stream: self.stream,
                pool: RawPool::default(),
                name: None,
            }),
            Action::Allocate | Action::Free if !self.has_memory() => {
                transcript.summary.empty_allocations += 1;
                Ok(())
            }
            Action::Allocate => transcript.allocate(self.allocated()),
            Action::Free => transcript.free(self.address, Some(self.stream)),
        };
        outcome.map_err(|overflow| self.overflow(overflow))
    }

    /// Returns `true` unless the event's pointer is null.
    fn has_memory(&self) -> bool {
        self.address != Address(0) && !matches!(self.action, Action::Fail)
    }

    fn allocated(&self) -> Allocated<'static> {
        Allocated {
            address: self.address,
            size_bytes: self.size_bytes,
            stream: self.stream,
            pool: RawPool::default(),
            name: None,
            placement: None,
        }
    }

    fn overflow(&self, overflow: Overflow) -> RmmError {
        match overflow {
            Overflow::Size { size_bytes } => RmmError::Size { line: self.line, size_bytes },
            Overflow::Streams => RmmError::TooManyStreams { line: self.line },
            Overflow::Memory { limit_bytes } => RmmError::TooLarge { line: self.line, limit_bytes },
        }
    }
}

/// Parses a pointer or a stream: hexadecimal, with or without `0x`. C's `(nil)` is the null pointer.
fn handle(text: &str) -> Option<u64> {
    let digits = match text.trim() {
        "(nil)" => return Some(0),
        text => text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text),
    };
    // The standard parser would also accept a sign.
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, 16).ok())?
}

fn decimal(digits: &str) -> Option<u64> {
    digits.bytes().all(|digit| digit.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests;
