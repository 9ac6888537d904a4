//! A recording: the ops that some file holds, whatever kind of file it is.
//!
//! ```text
//! file or bytes ──► decompress ──► first bytes ──┬─► "symmalloc-trace"      trace reader of the core ──┐
//!                                                ├─► 0x80 (pickle)          pytorch ──► transcript ────┼─► Recording
//!                                                └─► "..,Action,Pointer,.." rmm ──────► transcript ────┘
//! ```
//!
//! Input is streamed; in memory are the records (80 bytes each) and, for a snapshot, what [`pickle`](crate::pickle)
//! keeps of it while it is read.

use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;

use symmalloc_core::config::Config;
use symmalloc_core::op::Record;
use symmalloc_trace::{LineError, TraceError, TraceReader};

use crate::compression::{self, Compression};
use crate::error::{ImportError, ImportErrorKind};
use crate::options::ReadOptions;
use crate::summary::Summary;
use crate::{pytorch, rmm};

/// The kinds of file that hold ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// symmalloc's text trace.
    Trace,
    /// A PyTorch memory snapshot.
    PyTorchSnapshot,
    /// An RMM log.
    RmmLog,
}

/// What a file holds. The same bytes give the same recording everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// The ops, consistent with each other: every stream and allocation is named before it is used.
    pub records: Vec<Record>,
    /// The kind of file.
    pub format: Format,
    /// How it was compressed.
    pub compression: Compression,
    /// The allocator's configuration, where a trace states one.
    pub config: Option<Config>,
    /// What was found, and what was left out.
    pub summary: Summary,
}

/// Reads the recording in a file.
///
/// # Errors
/// When the file cannot be read, or holds no recording or a damaged one. The error names the file.
pub fn read_path(path: &Path, options: &ReadOptions) -> Result<Recording, ImportError> {
    let file = File::open(path).map_err(|error| ImportError::new(Some(path), ImportErrorKind::Open(error)))?;
    read_any(file, options).map_err(|kind| ImportError::new(Some(path), kind))
}

/// Reads the recording in these bytes.
///
/// # Errors
/// When the bytes are no recording or a damaged one.
pub fn read_bytes(bytes: &[u8], options: &ReadOptions) -> Result<Recording, ImportError> {
    read_from(bytes, options)
}

/// Reads the recording that a source, such as a pipe, gives until its end.
///
/// # Errors
/// When the source fails, or what it gives is no recording or a damaged one.
pub fn read_from(source: impl Read, options: &ReadOptions) -> Result<Recording, ImportError> {
    read_any(source, options).map_err(|kind| ImportError::new(None, kind))
}

/// The most of a file that is read to tell its kind.
const START_BYTES_MAX: u64 = 4096;

fn read_any(mut source: impl Read, options: &ReadOptions) -> Result<Recording, ImportErrorKind> {
    let source: &mut dyn Read = &mut source;
    let mut source = compression::decompress(source)?;
    let compression = source.get_ref().compression();
    let mut start = Vec::new();
    let format = match format_of(source.fill_buf()?) {
        // The columns of a log come in any order, and the buffer may end before them.
        Err(ImportErrorKind::UnknownFormat) => {
            source.by_ref().take(START_BYTES_MAX).read_until(b'\n', &mut start)?;
            if rmm::is_log(&start) { Format::RmmLog } else { return Err(ImportErrorKind::UnknownFormat) }
        }
        format => format?,
    };
    let source = start.as_slice().chain(source);
    if options.device.is_some() && format != Format::PyTorchSnapshot {
        return Err(ImportErrorKind::NoDevices);
    }
    let (records, config, summary) = match format {
        Format::Trace => read_trace(source, compression, options)?,
        Format::PyTorchSnapshot => told(pytorch::read(source, options)?.finish()),
        Format::RmmLog => told(rmm::read(source, options)?.finish()),
    };
    Ok(Recording { records, format, compression, config, summary })
}

/// What a reader gives: records, a configuration, a summary.
type Parts = (Vec<Record>, Option<Config>, Summary);

fn told((records, summary): (Vec<Record>, Summary)) -> Parts {
    (records, None, summary)
}

/// The kind of file that starts so.
fn format_of(start: &[u8]) -> Result<Format, ImportErrorKind> {
    let header = |text: &[u8]| start.starts_with(text) || (!start.is_empty() && text.starts_with(start));
    match start {
        [] => Err(ImportErrorKind::Empty),
        [0x80, ..] => Ok(Format::PyTorchSnapshot),
        [b'P', b'K', 3, 4, ..] => Err(ImportErrorKind::ZipArchive),
        _ if header(symmalloc_trace::MAGIC.as_bytes()) => Ok(Format::Trace),
        _ if header(b"Thread,Time,Action") => Ok(Format::RmmLog),
        _ => Err(ImportErrorKind::UnknownFormat),
    }
}

fn read_trace(source: impl BufRead, compression: Compression, options: &ReadOptions) -> Result<Parts, ImportErrorKind> {
    let mut reader = TraceReader::new(source)?;
    let (mut records, mut summary) = (Vec::new(), Summary::default());
    let mut held_bytes = 0;
    for record in reader.by_ref() {
        match record {
            Ok(record) => {
                held_bytes += (size_of::<Record>() + record.name.as_ref().map_or(0, |name| name.len())) as u64;
                if held_bytes > options.memory_limit_bytes {
                    return Err(ImportErrorKind::TooLarge { limit_bytes: options.memory_limit_bytes });
                }
                summary.count(&record);
                records.push(record);
            }
            Err(error) => match torn_line(&error) {
                Some(line) if options.accept_torn => {
                    summary.torn_at_line = Some(line);
                    break;
                }
                Some(line) if matches!(error, TraceError::Line(LineError::Io { .. })) => {
                    return Err(ImportErrorKind::TornTrace { compression, records: records.len() as u64, line });
                }
                _ => return Err(error.into()),
            },
        }
    }
    Ok((records, reader.config().cloned(), summary))
}

/// The line at which a trace ends in the middle, if that is the error.
fn torn_line(error: &TraceError) -> Option<u64> {
    match error {
        TraceError::Torn { line, .. } => Some(*line),
        TraceError::Line(LineError::Io { line, source }) if compression::is_torn(source) => Some(*line),
        _ => None,
    }
}
