//! PyTorch memory snapshots: from what `torch.cuda.memory._dump_snapshot` pickled to the ops of the recorded program.
//!
//! Python's writer (any protocol from 2) and the one in C++ (protocol 2) are read alike, with stack frames or without.
//!
//! ```text
//! { 'device_traces': [ [ {'action': 'alloc', 'addr': .., 'size': .., 'stream': .., 'frames': [..], ..}, .. ], .. ],
//!   'segments': [..], 'allocator_settings': {..}, 'external_annotations': [..] }        a list of entries per device
//! ```
//!
//! | action | becomes |
//! |---|---|
//! | `alloc` | [`Allocate`], with the placement that PyTorch chose where its segment's birth is in the recording |
//! | `free_requested` | [`Free`]; before it a [`RecordUse`] if no `free_completed` follows at once |
//! | `free_completed` | how long its free was [`Pending`]: that is PyTorch's event polling, no part of the program |
//! | `record_use` | [`RecordUse`]: written by our [export](crate::export), which knows the stream |
//! | `segment_*` | placements |
//! | `oom`, `snapshot`, others | counted in the [`Summary`] |
//!
//! PyTorch completes a free within the same call unless another stream used the block, so a `free_completed` that does
//! not come right after its `free_requested` means just that. The snapshot does not say *which* stream. The use is
//! given to the lowest-numbered stream other than the allocation's own, and if the recording has no second stream, to
//! one more that is registered for the purpose. Replays thus wait for some other stream wherever the job did, but not
//! always for the same one; and a free during CUDA graph capture, which PyTorch also completes later, looks the same.
//!
//! When the other stream is done by the next allocation, PyTorch notices then, and the completion comes right after the
//! request as if there had been no other stream. So recorded uses depend on timing: **two ranks that run the same
//! program may differ in them** (of the 24,419 frees of one recorded job, 558 did), though not in allocations and frees.
//!
//! What lived when the trace begins is allocated first, see `before.rs`. Streams are numbered by the first appearance of their
//! handle in an allocation. An allocation's name is its `user_metadata`, which a program sets with
//! `torch.cuda.memory._set_memory_metadata`, else the Python frame that asked for it, see `frames.rs`. PyTorch's entries do not name the
//! pool, so its allocations are put in the default pool; those of our [export](crate::export) do (`symmalloc_pool`).
//!
//! [`Allocate`]: symmalloc_core::op::Op::Allocate
//! [`Free`]: symmalloc_core::op::Op::Free
//! [`Pending`]: symmalloc_core::op::Pending
//! [`RecordUse`]: symmalloc_core::op::Op::RecordUse
//! [`Summary`]: crate::Summary

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
use crate::transcript::{Address, Allocated, Overflow, RawPool, RawStream, Transcript};
use before::{Before, Lived};
use segments::LiveSegments;
use trace::DeviceTrace;
use words::{
    ACTION, ALLOC, DEVICE_TRACES, FILENAME, FREE_COMPLETED, FREE_REQUESTED, NAME, OOM, RECORD_USE, SEGMENT_ALLOC,
    SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SIZE, SNAPSHOT, USER_METADATA, VOCABULARY,
};

/// Reads a snapshot and retells the trace of one device.
pub(crate) fn read(source: impl Read, options: &ReadOptions) -> Result<Transcript, SnapshotError> {
    let vocabulary = Vocabulary { words: VOCABULARY, texts_of: &[USER_METADATA, FILENAME, NAME], keeps: frames::keeps };
    let document = pickle::read(source, vocabulary, options.memory_limit_bytes)?;
    let traces = device_traces(&document)?;
    let device = select_device(&document, &traces, options.device)?;
    DeviceTrace { document: &document, device, entries: traces[device] }.retell(options.memory_limit_bytes)
}

/// The list of entries of each device.
fn device_traces(document: &Document) -> Result<Vec<&List>, SnapshotError> {
    let Value::Dict(root) = document.root else { return Err(SnapshotError::NotASnapshot) };
    let Some(Value::List(traces)) = document.values.field(root, DEVICE_TRACES) else {
        return Err(SnapshotError::NotASnapshot);
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

/// The device asked for, or the only one with a trace. PyTorch marks the taking of a snapshot on every device, used or not: a trace of
/// nothing but marks is none, where another one is more.
fn select_device(document: &Document, traces: &[&List], wanted: Option<usize>) -> Result<usize, SnapshotError> {
    let entries = || traces.iter().map(|trace| trace.len).collect::<Vec<u64>>();
    match wanted {
        Some(device) => match traces.get(device) {
            Some(trace) if trace.len > 0 => Ok(device),
            _ => Err(SnapshotError::NoSuchTrace { device, entries: entries() }),
        },
        None => {
            let is_mark = |item: &Item| match item {
                Item::Dict(dict) => document.values.field(*dict, ACTION) == Some(Value::Word(SNAPSHOT)),
                Item::List(_) => false,
            };
            let is_more = |trace: &List| !trace.is_whole() || !trace.items.iter().all(is_mark);
            let any_is_more = traces.iter().any(|trace| is_more(trace));
            let is_recorded = |device: &usize| traces[*device].len > 0 && (!any_is_more || is_more(traces[*device]));
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
    fn retell(&self, limit_bytes: u64) -> Result<Transcript, SnapshotError> {
        let mut transcript = Transcript::new(limit_bytes);
        let mut segments = LiveSegments::default();
        transcript.summary.device = Some(self.device);
        self.retell_before(&mut transcript)?;
        let mut entries = self.entries().peekable();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            match entry.action()? {
                Value::Word(ALLOC) => {
                    let address = entry.address()?;
                    let name = entry.name();
                    let told = transcript.allocate(Allocated {
                        address,
                        size_bytes: entry.integer(SIZE)?,
                        stream: entry.stream()?,
                        pool: entry.pool()?,
                        name: name.as_deref(),
                        placement: segments.placement(address),
                    });
                    told.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                }
                Value::Word(FREE_REQUESTED) => {
                    let address = entry.address()?;
                    let completed = matches!(entries.peek(), Some(Ok(next)) if next.completes_free_of(address));
                    let told = if completed {
                        transcript.free(address, None)
                    } else {
                        transcript.free_used_elsewhere(address)
                    };
                    told.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                }
                Value::Word(FREE_COMPLETED) => transcript.complete(entry.address()?),
                Value::Word(RECORD_USE) => {
                    let told = transcript.record_use(entry.address()?, entry.stream()?);
                    told.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
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
        Ok(transcript)
    }

    /// What lived when the trace begins is allocated first.
    fn retell_before(&self, transcript: &mut Transcript) -> Result<(), SnapshotError> {
        let before = Before::of(self)?;
        transcript.summary.recorded_reserved_bytes_peak = before.reserved_bytes_peak;
        for Lived { stream, size_bytes, name, address } in &before.lived {
            transcript.summary.lived_before += 1;
            transcript.summary.lived_before_bytes = transcript.summary.lived_before_bytes.saturating_add(*size_bytes);
            let told = transcript.allocate(Allocated {
                address: Address(*address),
                size_bytes: *size_bytes,
                stream: RawStream(*stream),
                pool: RawPool::default(),
                name: name.as_deref(),
                placement: None,
            });
            told.map_err(|overflow| overflow_at(overflow, self.device, 0))?;
        }
        Ok(())
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
