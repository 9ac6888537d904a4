//! Recordings: the ops of a file in any supported format.
//!
//! ```text
//! file or bytes ──► decompress ──► first bytes ──┬─► "symmalloc-trace"      trace reader ───────────────┐
//!                                                ├─► 0x80 (pickle)          pytorch ──► transcript ────┼─► Recording
//!                                                └─► "..,Action,Pointer,.." rmm ──────► transcript ────┘
//! ```
//!
//! Input is streamed. Memory holds the records (80 bytes each) and, for a snapshot, the parts that [`pickle`](crate::pickle) keeps while it
//! is read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;

use symmalloc_core::config::Config;
use symmalloc_core::op::{Op, Record};
use symmalloc_trace::{LineError, TraceError, TraceReader};

use crate::compression::{self, Compression};
use crate::error::{ImportError, ImportErrorKind};
use crate::held_memory::{HeldHeap, RecordedFailure};
use crate::held_records::{HeldRecords, LimitExceeded};
use crate::options::ReadOptions;
use crate::stacks::Stacks;
use crate::summary::Summary;
use crate::transcript::{RawStream, Transcript};
use crate::{pytorch, rmm};

/// The supported file formats.
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

/// The name of the default stream in [`Recording::stream_names`].
pub const DEFAULT_STREAM: &str = "the default stream";

/// The contents of a file. Equal bytes produce equal recordings everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// The ops, consistent with each other: every stream and allocation is declared before it is used.
    pub records: Vec<Record>,
    /// The file format.
    pub format: Format,
    /// The compression of the file.
    pub compression: Compression,
    /// The allocator's configuration, if a trace states one.
    pub config: Option<Config>,
    /// The Python stacks of the allocations, if the [options](ReadOptions::stacks) ask for them and the recording has any.
    pub stacks: Option<Stacks>,
    /// The address of each allocation in the recorded process, by its id, if the [options](ReadOptions::addresses) ask for them. `None` for
    /// a trace, which contains no addresses.
    pub addresses: Option<Vec<u64>>,
    /// The recorded program's name of each stream, by number: [`DEFAULT_STREAM`] or a handle. `None` for a stream without a handle. Empty
    /// for a trace that names no stream.
    pub stream_names: Vec<Option<String>>,
    /// The last request that the recorded allocator refused.
    pub failure: Option<RecordedFailure>,
    /// The memory of each heap then, if the recording shows it (PyTorch snapshots).
    pub failure_heaps: Vec<HeldHeap>,
    /// By index of a [`Refuse`](Op::Refuse) record: bytes that were free on the device, if the recording states it (PyTorch snapshots).
    pub device_free_bytes: BTreeMap<usize, u64>,
    /// Counts of the ops found and of the parts omitted.
    pub summary: Summary,
}

/// Reads the recording in a file.
///
/// # Errors
/// Returns an error if the file cannot be read, is not a recording, or is damaged. The error names the file.
pub fn read_path(path: &Path, options: &ReadOptions) -> Result<Recording, ImportError> {
    let file = File::open(path).map_err(|error| ImportError::new(Some(path), ImportErrorKind::Open(error)))?;
    read_any(file, options).map_err(|kind| ImportError::new(Some(path), kind))
}

/// Reads the recording in these bytes.
///
/// # Errors
/// Returns an error if the bytes are not a recording, or are damaged.
pub fn read_bytes(bytes: &[u8], options: &ReadOptions) -> Result<Recording, ImportError> {
    read_from(bytes, options)
}

/// Reads a recording from a source, such as a pipe, to its end.
///
/// # Errors
/// Returns an error if the source fails, is not a recording, or is damaged.
pub fn read_from(source: impl Read, options: &ReadOptions) -> Result<Recording, ImportError> {
    read_any(source, options).map_err(|kind| ImportError::new(None, kind))
}

/// Maximum number of bytes read to detect the format.
const START_BYTES_MAX: u64 = 4096;

fn read_any(mut source: impl Read, options: &ReadOptions) -> Result<Recording, ImportErrorKind> {
    let source: &mut dyn Read = &mut source;
    let mut source = compression::decompress(source)?;
    let compression = source.get_ref().compression();
    let options = &ReadOptions { compressed: source.get_ref().compressed(), ..options.clone() };
    let mut start = Vec::new();
    let format = match format_of(source.fill_buf()?) {
        // The columns of a log may be in any order, and the buffer may end before them.
        Err(ImportErrorKind::UnknownFormat) => {
            source.by_ref().take(START_BYTES_MAX).read_until(b'\n', &mut start)?;
            if !rmm::is_log(&start) {
                source.by_ref().take(START_BYTES_MAX).read_to_end(&mut start)?;
                let is_debug_log = rmm::is_debug_log(&start);
                return Err(if is_debug_log { ImportErrorKind::RmmDebugLog } else { ImportErrorKind::UnknownFormat });
            }
            Format::RmmLog
        }
        format => format?,
    };
    let source = start.as_slice().chain(source);
    if options.device.is_some() && format != Format::PyTorchSnapshot {
        return Err(ImportErrorKind::NoDevices);
    }
    let (mut stacks, mut failure, mut addresses) = (None, None, None);
    let stream_names;
    let (mut device_free_bytes, mut failure_heaps) = (BTreeMap::new(), Vec::new());
    let (records, config, summary) = match format {
        Format::Trace => {
            let parts = read_trace(source, compression, options)?;
            stream_names = named_streams(&parts.0);
            parts
        }
        Format::PyTorchSnapshot => {
            let mut transcript = pytorch::read(source, options)?;
            (stacks, failure) = (transcript.stacks.take(), transcript.failure.take());
            addresses = transcript.addresses.take();
            device_free_bytes = std::mem::take(&mut transcript.device_free_bytes);
            failure_heaps = std::mem::take(&mut transcript.failure_heaps);
            stream_names = names_of(&transcript);
            without_config(transcript.finish())
        }
        Format::RmmLog => {
            let mut transcript = rmm::read(source, options)?;
            addresses = transcript.addresses.take();
            failure = transcript.failure.take();
            stream_names = names_of(&transcript);
            without_config(transcript.finish())
        }
    };
    failure = failure.or_else(|| last_refusal(&records));
    Ok(Recording {
        records,
        format,
        compression,
        config,
        stacks,
        addresses,
        stream_names,
        failure,
        failure_heaps,
        device_free_bytes,
        summary,
    })
}

/// Returns what the recorded program calls its streams. A number of more than 64 bits is the per-thread default stream of a thread.
fn names_of(transcript: &Transcript) -> Vec<Option<String>> {
    let name = |RawStream(raw): RawStream| match u64::try_from(raw) {
        Ok(0) => DEFAULT_STREAM.to_owned(),
        Ok(handle) => format!("{handle:#x}"),
        Err(_) => format!("the default stream of thread {}", raw & u128::from(u64::MAX)),
    };
    transcript.raw_streams().into_iter().map(|raw| raw.map(name)).collect()
}

/// Returns the names of the streams that a trace registers. Empty if none has a name.
fn named_streams(records: &[Record]) -> Vec<Option<String>> {
    let registered = records.iter().filter(|record| matches!(record.op, Op::RegisterStream { .. }));
    let names: Vec<Option<String>> = registered.map(|record| record.name.as_deref().map(str::to_owned)).collect();
    if names.iter().all(Option::is_none) { Vec::new() } else { names }
}

/// Returns the last request that a trace shows as refused.
fn last_refusal(records: &[Record]) -> Option<RecordedFailure> {
    let record = records.iter().rposition(|record| matches!(record.op, Op::Refuse { .. }))?;
    Some(RecordedFailure { record, held: None, device_free_bytes: None, stack: None })
}

/// Result of a reader: records, a configuration, a summary.
type Parts = (Vec<Record>, Option<Config>, Summary);

fn without_config((records, summary): (Vec<Record>, Summary)) -> Parts {
    (records, None, summary)
}

/// Returns the format of data that starts with these bytes.
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
    let mut records = HeldRecords::new(options.memory_limit(), options.copies);
    let mut summary = Summary::default();
    for record in reader.by_ref() {
        match record {
            Ok(record) => {
                summary.count(&record);
                let pushed = records.push(record);
                pushed.map_err(|LimitExceeded { limit_bytes }| ImportErrorKind::TooLarge { limit_bytes })?;
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
    Ok((records.into_records(), reader.config().cloned(), summary))
}

/// Returns the line at which a trace is truncated, if that is the error.
fn torn_line(error: &TraceError) -> Option<u64> {
    match error {
        TraceError::Torn { line, .. } => Some(*line),
        TraceError::Line(LineError::Io { line, source }) if compression::is_torn(source) => Some(*line),
        _ => None,
    }
}
