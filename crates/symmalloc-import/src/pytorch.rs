//! PyTorch memory snapshots: converts pickles that `torch.cuda.memory._dump_snapshot` writes to the ops of the recorded
//! program.
//!
//! Supports the pickles of Python's writer (any protocol from 2) and of PyTorch's C++ writer (protocol 2), with and
//! without stack frames.
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
//! | `oom` | [`Refuse`], by the driver; of the last one, the reader also reports what the allocator held ([`RecordedFailure`]) |
//! | `snapshot`, others | counted in the [`Summary`] |
//!
//! PyTorch completes a free within the same call unless another stream used the block. If a `free_completed` does not directly follow its
//! `free_requested`, it therefore implies a use by another stream. The snapshot does not state *which* stream it was. The importer assigns
//! the use to the lowest-numbered stream other than the allocation's own. If the recording has no second stream, the importer registers
//! one. In a replay, a stream therefore waits for another one wherever this happened in the job, but not always for the same one. PyTorch
//! also completes a free later if the free happens during the capture of a CUDA graph; the importer cannot distinguish this case.
//!
//! If the other stream finishes before the next allocation, PyTorch notices this at the allocation. The completion then directly follows
//! the request, as if no other stream had used the block. Recorded uses therefore depend on timing: **two ranks that run the same program
//! may differ in them** (of the 24,419 frees of one recorded job, 558 did), though not in allocations and frees.
//!
//! The allocations that are live at the beginning of the trace come first; see `before.rs`. Streams are numbered by the first appearance of
//! their handle in an allocation. The name of an allocation is its `user_metadata`, which a program sets with
//! `torch.cuda.memory._set_memory_metadata`. Without it, the name is the Python frame that requested the allocation; see `frames.rs`, which
//! also reads [`Stacks`](crate::Stacks). An entry names its mempool (`pool_id`). In older versions, the entry's segment does
//! (`segment_pool_id`). In symmalloc's [export](crate::export), the entry names its pool in `symmalloc_pool`. Pools get the default
//! configuration, because a snapshot does not contain their settings.
//!
//! [`Allocate`]: symmalloc_core::op::Op::Allocate
//! [`Free`]: symmalloc_core::op::Op::Free
//! [`Pending`]: symmalloc_core::op::Pending
//! [`Refuse`]: symmalloc_core::op::Op::Refuse
//! [`RecordedFailure`]: crate::RecordedFailure
//! [`RecordUse`]: symmalloc_core::op::Op::RecordUse
//! [`Summary`]: crate::Summary

use std::collections::BTreeMap;
use std::io::Read;

mod before;
mod error;
mod failure;
mod frames;
mod segments;
mod trace;
mod words;

pub use error::{DeviceContents, Found, SnapshotError};

use crate::held_memory::HeldMemory;
use crate::options::ReadOptions;
use crate::pickle::{self, Document, Item, List, Value, Vocabulary};
use crate::stacks::TooLarge;
use crate::transcript::{Address, Allocated, Overflow, Refused, Transcript};
use before::{Before, Lived, has_overflowed, live_bytes, segments_of};
use frames::StackReader;
use segments::LiveSegments;
use trace::{DeviceTrace, TraceEntry};
use words::{
    ACTION, ALLOC, DEVICE_FREE, DEVICE_TRACES, FILENAME, FRAMES, FREE_COMPLETED, FREE_REQUESTED, NAME, OOM, RECORD_USE,
    SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SIZE, SNAPSHOT, USER_METADATA, VOCABULARY,
};

/// Reads a snapshot and converts the trace of one device.
pub(crate) fn read(source: impl Read, options: &ReadOptions) -> Result<Transcript, SnapshotError> {
    let program = frames::Program::new(options);
    let mut vocabulary = Vocabulary {
        words: VOCABULARY,
        texts_of: &[USER_METADATA, FILENAME, NAME, ACTION],
        shared_lists_of: &[],
        keeps: &|values, dict| program.keeps(values, dict),
    };
    let keeps_stacks = |values: &pickle::Values, dict| program.keeps_stacks(values, dict);
    if options.stacks {
        vocabulary.shared_lists_of = &[FRAMES];
        vocabulary.keeps = &keeps_stacks;
    }
    let document = pickle::read(source, vocabulary, options.memory_limit())?;
    let mut traces = device_traces(&document)?;
    let live = live_bytes(&document);
    let empty = List::default();
    let devices = live.last_key_value().map_or(0, |(last, _)| last.saturating_add(1)).min(DEVICES_MAX);
    traces.resize(traces.len().max(devices), &empty);
    let device = select_device(&document, &traces, &live, options.device)?;
    DeviceTrace { document: &document, device, entries: traces[device] }.retell(options)
}

/// Returns the list of entries of each device.
fn device_traces(document: &Document) -> Result<Vec<&List>, SnapshotError> {
    let traces = match document.root {
        Value::Dict(root) => document.values.field(root, DEVICE_TRACES),
        _ => None,
    };
    let traces = match traces {
        Some(Value::List(traces)) => traces,
        // A snapshot that has only segments still contains the live allocations.
        None if segments_of(document).is_some() => return Ok(Vec::new()),
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

/// Maximum number of devices in a snapshot without traces. No machine has more.
const DEVICES_MAX: usize = 1 << 10;

/// Returns the requested device. If the caller requested none, returns the only device whose trace contains an allocation; otherwise the
/// only device with live memory in its segments; otherwise the only device with any entry. Entries alone are weak evidence, because PyTorch
/// also writes entries for devices that the program does not use, such as the mark of a snapshot.
fn select_device(
    document: &Document,
    traces: &[&List],
    live: &BTreeMap<usize, u64>,
    wanted: Option<usize>,
) -> Result<usize, SnapshotError> {
    let described = || {
        let of = |(device, trace): (usize, &&List)| DeviceContents {
            entries: trace.len,
            live_bytes: live.get(&device).copied().unwrap_or(0),
        };
        traces.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    if let Some(device) = wanted {
        return match traces.get(device) {
            Some(trace) if trace.len > 0 || live.contains_key(&device) => Ok(device),
            _ => Err(SnapshotError::NoSuchTrace { device, devices: described() }),
        };
    }
    let is_allocation = |item: &Item| match item {
        Item::Dict(dict) => {
            matches!(document.values.field(*dict, ACTION), Some(Value::Word(ALLOC | FREE_REQUESTED | OOM)))
        }
        Item::List(_) => false,
    };
    // A damaged trace is selected as well, so that reading it reports the error.
    let allocates = |device: &usize| !traces[*device].is_whole() || traces[*device].items.iter().any(is_allocation);
    let has_entries = |device: &usize| traces[*device].len > 0;
    let has_live = |device: &usize| live.contains_key(device);
    let evidence: [&dyn Fn(&usize) -> bool; 3] = [&allocates, &has_live, &has_entries];
    for shows_use in evidence {
        let mut used = (0..traces.len()).filter(|device| shows_use(device));
        match (used.next(), used.next()) {
            (Some(device), None) => return Ok(device),
            (Some(_), Some(_)) => return Err(SnapshotError::SeveralDevices { devices: described() }),
            (None, _) => {}
        }
    }
    Err(SnapshotError::NothingRecorded { devices: traces.len() })
}

impl<'a> DeviceTrace<'a> {
    fn retell(&self, options: &ReadOptions) -> Result<Transcript, SnapshotError> {
        let limit_bytes = options.memory_limit().bytes();
        let mut transcript = Transcript::new(options);
        let mut stacks = options.stacks.then(|| StackReader::new(self.document, limit_bytes));
        let mut segments = LiveSegments::default();
        transcript.summary.device = Some(self.device);
        let before = self.retell_before(&mut transcript, &mut stacks)?;
        let failed = failure::last(self);
        if !self.has_history() && !before.at_end.is_empty() {
            transcript.summary.state_only = Some(failure::held_at_end(&before));
        }
        let mut failure_heaps = BTreeMap::new();
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
                Value::Word(OOM) => {
                    let outcome = transcript.refuse(Refused {
                        size_bytes: entry.integer(SIZE)?,
                        stream: entry.stream()?,
                        pool: entry.pool()?.unwrap_or_default(),
                        name: entry.name().as_deref(),
                    });
                    outcome.map_err(|overflow| overflow_at(overflow, entry.device, entry.number))?;
                    let device_free_bytes = entry.integer(DEVICE_FREE).ok();
                    let record = transcript.failure.map(|failure| failure.record);
                    transcript.device_free_bytes.extend(record.zip(device_free_bytes));
                    if failed == Some(entry.number) {
                        let stack = stacks.as_mut().map(|stacks| stacks.stack_of(entry.frames())).transpose();
                        let too_large = |_| self.stacks_too_large(&stacks, entry.number);
                        let failure = transcript.failure.as_mut().expect("the request was refused above");
                        failure.stack = stack.map_err(too_large)?.flatten();
                        failure.device_free_bytes = device_free_bytes;
                        let heaps = failure::held_at(self, &before, entry.number)?;
                        let mut held = HeldMemory::default();
                        heaps.values().for_each(|heap| held.add(heap));
                        failure.held = Some(held);
                        failure_heaps = heaps;
                    }
                }
                Value::Word(SNAPSHOT) => transcript.summary.snapshot_marks += 1,
                Value::Word(word) => transcript.summary.count_unknown(words::text(word)),
                Value::Text(text) => transcript.summary.count_unknown(self.document.values.text(text)),
                Value::UnusedText => transcript.summary.count_unknown("(a long name)"),
                _ => return Err(entry.bad_field(ACTION)),
            }
        }
        transcript.set_failure_heaps(failure_heaps);
        transcript.stacks = stacks.and_then(StackReader::finish);
        Ok(transcript)
    }

    /// Adds the stack of the allocation that the transcript received last, if stacks are read.
    fn add_stack(
        &self,
        stacks: &mut Option<StackReader<'a>>,
        frames: Option<Value>,
        entry: u64,
    ) -> Result<(), SnapshotError> {
        let allocated = stacks.as_mut().map_or(Ok(()), |stacks| stacks.allocate(frames));
        allocated.map_err(|TooLarge| self.stacks_too_large(stacks, entry))
    }

    fn stacks_too_large(&self, stacks: &Option<StackReader<'a>>, entry: u64) -> SnapshotError {
        let limit_bytes = stacks.as_ref().map_or(0, StackReader::limit_bytes);
        SnapshotError::StacksTooLarge { device: self.device, entry, limit_bytes }
    }

    /// Returns `true` if the trace has an entry about memory. If it has none, the snapshot shows only a state.
    fn has_history(&self) -> bool {
        let is_of_memory = |entry: &TraceEntry<'_>| {
            let action = entry.field(ACTION);
            matches!(action, Some(Value::Word(word)) if word != SNAPSHOT)
        };
        self.entries().any(|entry| entry.as_ref().map_or(true, is_of_memory))
    }

    /// Converts the allocations that are live at the beginning of the trace. They precede everything else.
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
