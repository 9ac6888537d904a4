//! PyTorch memory snapshots: converts pickles from `torch.cuda.memory._dump_snapshot` to the ops of the recorded program.
//!
//! Supports Python's writer (any protocol from 2) and the C++ writer (protocol 2), with and without stack frames.
//!
//! ```text
//! { 'device_traces': [ [ {'action': 'alloc', 'addr': .., 'size': .., 'stream': .., 'frames': [..], ..}, .. ], .. ],
//!   'segments': [..], 'allocator_settings': {..}, 'external_annotations': [..] }        a list of entries per device
//! ```
//!
//! | action | becomes |
//! |---|---|
//! | `alloc` | [`Allocate`], with PyTorch's placement if the recording contains the creation of the segment |
//! | `free_requested` | [`Free`], preceded by a [`RecordUse`] unless `free_completed` follows at once |
//! | `free_completed` | the [`Pending`] duration of its free, which is due to PyTorch's event polling and not part of the program |
//! | `record_use` | [`RecordUse`]; written by symmalloc's [export](crate::export), which knows the stream |
//! | `segment_*` | placements |
//! | `oom`, `snapshot`, others | counted in the [`Summary`] |
//!
//! PyTorch completes a free within the same call unless another stream used the block. A `free_completed` that does not directly follow its
//! `free_requested` therefore implies such a use. The snapshot does not state *which* stream it was. The importer assigns the use to the
//! lowest-numbered stream other than the allocation's own; if the recording has no second stream, it registers one. Replays thus wait for
//! another stream wherever the job did, but not always for the same one. A free during CUDA graph capture, which PyTorch also completes
//! later, looks the same.
//!
//! If the other stream finishes before the next allocation, PyTorch notices then, and the completion directly follows the request, as if
//! there had been no other stream. Recorded uses therefore depend on timing: **two ranks that run the same program may differ in them** (of
//! the 24,419 frees of one recorded job, 558 did), though not in allocations and frees.
//!
//! Allocations live at the beginning of the trace come first, see `before.rs`. Streams are numbered by the first appearance of their handle
//! in an allocation. An allocation's name is its `user_metadata`, which a program sets with `torch.cuda.memory._set_memory_metadata`, or
//! else the Python frame that requested it, see `frames.rs`, which also reads [`Stacks`](crate::Stacks). An entry names its private pool
//! (`pool_id`), or its segment does in older versions (`segment_pool_id`); entries of symmalloc's [export](crate::export) have
//! `symmalloc_pool`. Pools get the default configuration, because a snapshot does not contain their settings.
//!
//! [`Allocate`]: symmalloc_core::op::Op::Allocate
//! [`Free`]: symmalloc_core::op::Op::Free
//! [`Pending`]: symmalloc_core::op::Pending
//! [`RecordUse`]: symmalloc_core::op::Op::RecordUse
//! [`Summary`]: crate::Summary

use std::collections::BTreeSet;
use std::io::Read;

mod before;
mod error;
mod frames;
mod segments;
mod trace;
mod words;

pub use error::{Found, SnapshotError};

use crate::options::ReadOptions;
use crate::pickle::{self, Document, Item, List, Value, Vocabulary};
use crate::stacks::TooLarge;
use crate::transcript::{Address, Allocated, Overflow, Transcript};
use before::{Before, Lived, has_live, has_overflowed};
use frames::StackReader;
use segments::LiveSegments;
use trace::DeviceTrace;
use words::{
    ACTION, ALLOC, DEVICE_TRACES, FILENAME, FRAMES, FREE_COMPLETED, FREE_REQUESTED, NAME, OOM, RECORD_USE,
    SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SEGMENTS, SIZE, SNAPSHOT, USER_METADATA, VOCABULARY,
};

/// Reads a snapshot and converts the trace of one device.
pub(crate) fn read(source: impl Read, options: &ReadOptions) -> Result<Transcript, SnapshotError> {
    let mut vocabulary = Vocabulary {
        words: VOCABULARY,
        texts_of: &[USER_METADATA, FILENAME, NAME],
        shared_lists_of: &[],
        keeps: frames::keeps,
    };
    if options.stacks {
        vocabulary.shared_lists_of = &[FRAMES];
        vocabulary.keeps = frames::keeps_stacks;
    }
    let document = pickle::read(source, vocabulary, options.memory_limit_bytes)?;
    let mut traces = device_traces(&document)?;
    let segments = has_live(&document)?;
    let empty = List::default();
    let devices = segments.last().map_or(0, |last| last + 1).min(DEVICES_MAX);
    traces.resize(traces.len().max(devices), &empty);
    let device = select_device(&document, &traces, &segments, options.device)?;
    DeviceTrace { document: &document, device, entries: traces[device] }.retell(options)
}

/// Returns the list of entries of each device.
fn device_traces(document: &Document) -> Result<Vec<&List>, SnapshotError> {
    let Value::Dict(root) = document.root else { return Err(SnapshotError::NotASnapshot) };
    let traces = match document.values.field(root, DEVICE_TRACES) {
        Some(Value::List(traces)) => traces,
        // `segments` alone contains the live allocations.
        None if document.values.field(root, SEGMENTS).is_some() => return Ok(Vec::new()),
        _ => return Err(SnapshotError::NotASnapshot),
    };
    let traces = document.values.list(traces);
    if !traces.is_whole() {
        return Err(SnapshotError::NotASnapshot);
    }
    let trace = |item: &Item| match item {
        Item::List(entries) => Ok(document.values.list(*entries)),
        Item::Dict(_) => Err(SnapshotError::NotASnapshot),
    };
    traces.items.iter().map(trace).collect()
}

/// Maximum number of devices of a snapshot without traces. No machine has more.
const DEVICES_MAX: usize = 1 << 10;

/// Returns the requested device, or else the only device with a trace, or else the only device with live memory in its segments.
/// PyTorch marks the taking of a snapshot on every device, used or not. Traces that contain only such marks are therefore ignored if
/// another trace contains other entries.
fn select_device(
    document: &Document,
    traces: &[&List],
    live: &BTreeSet<usize>,
    wanted: Option<usize>,
) -> Result<usize, SnapshotError> {
    let entries = || traces.iter().map(|trace| trace.len).collect::<Vec<u64>>();
    match wanted {
        Some(device) => match traces.get(device) {
            Some(trace) if trace.len > 0 || live.contains(&device) => Ok(device),
            _ => Err(SnapshotError::NoSuchTrace { device, entries: entries() }),
        },
        None => {
            let is_mark = |item: &Item| match item {
                Item::Dict(dict) => document.values.field(*dict, ACTION) == Some(Value::Word(SNAPSHOT)),
                Item::List(_) => false,
            };
            let is_more = |trace: &List| !trace.is_whole() || !trace.items.iter().all(is_mark);
            let any_is_more = traces.iter().any(|trace| is_more(trace));
            let is_recorded = |device: &usize| match any_is_more {
                true => is_more(traces[*device]),
                false if live.is_empty() => traces[*device].len > 0,
                false => live.contains(device),
            };
            let mut recorded = (0..traces.len()).filter(is_recorded);
            match (recorded.next(), recorded.next()) {
                (Some(device), None) => Ok(device),
                (None, _) => Err(SnapshotError::NothingRecorded { devices: traces.len() }),
                (Some(_), Some(_)) => Err(SnapshotError::SeveralDevices { entries: entries() }),
            }
        }
    }
}

impl<'a> DeviceTrace<'a> {
    fn retell(&self, options: &ReadOptions) -> Result<Transcript, SnapshotError> {
        let limit_bytes = options.memory_limit_bytes;
        let mut transcript = Transcript::new(options);
        let mut stacks = options.stacks.then(|| StackReader::new(self.document, limit_bytes));
        let mut segments = LiveSegments::default();
        transcript.summary.device = Some(self.device);
        let before = self.retell_before(&mut transcript, &mut stacks)?;
        let mut entries = self.entries().peekable();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            match entry.action()? {
                Value::Word(ALLOC) => {
                    let address = entry.address()?;
                    let name = entry.name();
                    let outcome = transcript.allocate(Allocated {
                        address,
                        size_bytes: entry.integer(SIZE)?,
                        stream: entry.stream()?,
                        pool: before.pool(&entry)?,
                        name: name.as_deref(),
                        placement: segments.placement(address),
                    });
                    outcome.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                    self.add_stack(&mut stacks, entry.frames(), entry.number)?;
                }
                Value::Word(FREE_REQUESTED) => {
                    let address = entry.address()?;
                    let completed = matches!(entries.peek(), Some(Ok(next)) if next.completes_free_of(address));
                    let outcome = if completed {
                        transcript.free(address, None)
                    } else {
                        transcript.free_used_elsewhere(address)
                    };
                    outcome.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                }
                Value::Word(FREE_COMPLETED) => transcript.complete(entry.address()?),
                Value::Word(RECORD_USE) => {
                    let outcome = transcript.record_use(entry.address()?, entry.stream()?);
                    outcome.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                }
                Value::Word(SEGMENT_ALLOC) => segments.allocated(entry.range()?),
                Value::Word(SEGMENT_FREE) => segments.freed(entry.address()?),
                Value::Word(SEGMENT_MAP) => segments.mapped(entry.range()?, entry.stream()?),
                Value::Word(SEGMENT_UNMAP) => segments.unmapped(entry.range()?),
                Value::Word(OOM) => transcript.summary.failed_allocations += 1,
                Value::Word(SNAPSHOT) => transcript.summary.snapshot_marks += 1,
                Value::Word(_) | Value::Text(_) | Value::OtherText => transcript.summary.unknown_actions += 1,
                _ => return Err(entry.bad_field(ACTION)),
            }
        }
        transcript.stacks = stacks.and_then(StackReader::finish);
        Ok(transcript)
    }

    /// Adds the stack of the allocation that the transcript got last, if stacks are read.
    fn add_stack(
        &self,
        stacks: &mut Option<StackReader<'a>>,
        frames: Option<Value>,
        entry: u64,
    ) -> Result<(), SnapshotError> {
        let Some(stacks) = stacks else { return Ok(()) };
        let (device, limit_bytes) = (self.device, stacks.limit_bytes());
        stacks.allocate(frames).map_err(|TooLarge| SnapshotError::StacksTooLarge { device, entry, limit_bytes })
    }

    /// Converts the allocations live at the beginning of the trace; they come first.
    fn retell_before(
        &self,
        transcript: &mut Transcript,
        stacks: &mut Option<StackReader<'a>>,
    ) -> Result<Before, SnapshotError> {
        let before = Before::of(self)?;
        transcript.summary.recorded_reserved_bytes_peak = before.reserved_bytes_peak;
        transcript.summary.is_overwritten = has_overflowed(self.document);
        for Lived { pool, stream, size_bytes, name, address, frames } in &before.lived {
            let outcome = transcript.allocate_before(Allocated {
                address: Address(*address),
                size_bytes: *size_bytes,
                stream: *stream,
                pool: *pool,
                name: name.as_deref(),
                placement: None,
            });
            outcome.map_err(|overflow| overflow_at(overflow, self.device, 0))?;
            self.add_stack(stacks, frames.map(Value::List), 0)?;
        }
        Ok(before)
    }
}

fn overflow_at(overflow: Overflow, device: usize, entry: u64) -> SnapshotError {
    match overflow {
        Overflow::Streams => SnapshotError::TooManyStreams { device, entry },
        Overflow::Memory { limit_bytes } => SnapshotError::TooLarge { device, entry, limit_bytes },
        Overflow::Size { size_bytes } => SnapshotError::Size { device, entry, size_bytes },
    }
}

#[cfg(test)]
mod tests;
