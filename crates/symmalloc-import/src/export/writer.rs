//! The entries of a snapshot, and the state that all parts of the writer share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Write};

use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::config::Config;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_trace::replay::Program;

use super::settings;
use super::summary::ExportSummary;
use crate::pickle::{Memo, PickleWriter};
use crate::rerun::{Happened, Live, MemoryChange, Moment};

/// Writes the parts of a snapshot, one after the other.
pub(super) struct SnapshotWriter<'a, W> {
    pub(super) pickle: PickleWriter<W>,
    /// Bytes that were free on the device at each request that the recording shows as refused, by op index.
    device_free_bytes: &'a BTreeMap<usize, u64>,
    /// Frames that were already written. Never iterated.
    frames: HashMap<(PoolId, Box<str>), Memo>,
    no_frames: Option<Memo>,
    /// Names that were already written. Never iterated.
    names: HashMap<Box<str>, Memo>,
    /// Freed memory whose free is still pending, so that it is still in use.
    pub(super) pending: BTreeSet<DeviceAddress>,
    pub(super) summary: ExportSummary,
}

/// Fields common to all entries.
struct EntryFields<'a> {
    action: &'a str,
    address: DeviceAddress,
    size_bytes: u64,
    stream: StreamId,
    number: usize,
    /// Pool of an allocation.
    pool: Option<PoolId>,
    name: Option<(PoolId, &'a str)>,
}

impl<'a, W: Write> SnapshotWriter<'a, W> {
    pub(super) fn new(sink: W, device_free_bytes: &'a BTreeMap<usize, u64>) -> io::Result<Self> {
        let mut pickle = PickleWriter::new(sink)?;
        pickle.open_dict()?;
        Ok(SnapshotWriter {
            pickle,
            device_free_bytes,
            frames: HashMap::new(),
            no_frames: None,
            names: HashMap::new(),
            pending: BTreeSet::new(),
            summary: ExportSummary::default(),
        })
    }

    pub(super) fn finish(mut self, config: &Config) -> io::Result<ExportSummary> {
        settings::write(&mut self.pickle, config)?;
        self.pickle.text("external_annotations")?;
        self.pickle.open_list()?;
        self.pickle.close_list()?;
        self.pickle.close_dict()?;
        self.pickle.finish()?.flush()?;
        Ok(self.summary)
    }

    /// Writes the entries of one op. Memory changes come before the entry of an allocation or a refused request, and
    /// after the entries of any other op.
    pub(super) fn moment(&mut self, moment: &Moment<'_>, program: &Program) -> io::Result<()> {
        let number = moment.number;
        let named = |live: &Live| program.name(live.id).map(|name| (live.heap.pool, name));
        let entry = |action, live: &Live| EntryFields {
            action,
            address: live.address,
            size_bytes: live.requested_bytes,
            stream: live.stream,
            number,
            pool: None,
            name: named(live),
        };
        match &moment.happened {
            Happened::Allocated(live) => {
                self.memory(moment.memory, number, named(live))?;
                self.summary.allocations += 1;
                return self.entry(&EntryFields { pool: Some(live.heap.pool), ..entry("alloc", live) });
            }
            Happened::Freed(live) => {
                self.entry(&entry("free_requested", live))?;
                self.entry(&entry("free_completed", live))?;
            }
            Happened::FreeRequested(live) => {
                self.summary.pending_frees += 1;
                self.pending.insert(live.address);
                self.entry(&entry("free_requested", live))?;
            }
            Happened::FreeCompleted(live) => {
                self.pending.remove(&live.address);
                self.entry(&entry("free_completed", live))?;
            }
            Happened::Used { live, stream } => {
                self.entry(&EntryFields { stream: *stream, ..entry("record_use", live) })?;
            }
            Happened::Refused { requested_bytes, stream, left_bytes } => {
                return self.refused(moment, program, *left_bytes, (*requested_bytes, *stream));
            }
            Happened::WasRefused { requested_bytes, stream, left_bytes } => {
                let left_bytes = self.device_free_bytes.get(&number).copied().or(*left_bytes).unwrap_or(0);
                return self.refused(moment, program, left_bytes, (*requested_bytes, *stream));
            }
            Happened::Nothing => {
                let is_known = matches!(moment.op, Op::Allocate { .. } | Op::Free { .. } | Op::RecordUse { .. });
                self.summary.ops_without_entry += u64::from(!is_known && moment.memory.is_empty());
            }
        }
        self.memory(moment.memory, number, None)
    }

    /// Writes the entry of a refused request, with its bytes and its stream. Entries for memory that the request
    /// obtained or released come first.
    fn refused(
        &mut self,
        moment: &Moment<'_>,
        program: &Program,
        left_bytes: u64,
        (size_bytes, stream): (u64, StreamId),
    ) -> io::Result<()> {
        self.memory(moment.memory, moment.number, None)?;
        self.summary.refused += 1;
        let (pool, name) = match moment.op {
            Op::Allocate { id, pool, .. } => (Some(*pool), program.name(*id)),
            Op::Refuse { pool, .. } => (Some(*pool), program.refused_name(moment.number)),
            _ => (None, None),
        };
        self.entry(&EntryFields {
            action: "oom",
            address: DeviceAddress(left_bytes),
            size_bytes,
            stream,
            number: moment.number,
            pool,
            name: pool.zip(name),
        })
    }

    fn memory(&mut self, changes: &[MemoryChange], number: usize, name: Option<(PoolId, &str)>) -> io::Result<()> {
        for change in changes {
            let action = match (change.is_mapped, change.is_expandable) {
                (true, true) => "segment_map",
                (true, false) => "segment_alloc",
                (false, true) => "segment_unmap",
                (false, false) => "segment_free",
            };
            let MemoryChange { address, size_bytes, stream, .. } = *change;
            self.entry(&EntryFields { action, address, size_bytes, stream, number, pool: None, name })?;
        }
        Ok(())
    }

    fn entry(&mut self, entry: &EntryFields<'_>) -> io::Result<()> {
        self.pickle.item(self.summary.entries as usize)?;
        self.summary.entries += 1;
        self.pickle.open_dict()?;
        self.pickle.text("action")?;
        self.pickle.text(entry.action)?;
        self.pickle.text(if entry.action == "oom" { "device_free" } else { "addr" })?;
        self.pickle.integer(entry.address.0)?;
        self.field("size", entry.size_bytes)?;
        self.field("stream", entry.stream.0.into())?;
        self.field("time_us", entry.number as u64)?;
        self.pickle.text("compile_context")?;
        self.pickle.text("N/A")?;
        self.pickle.text("user_metadata")?;
        self.name(entry.name.map_or("", |(_, name)| name))?;
        if let Some(pool) = entry.pool.filter(|pool| *pool != PoolId::DEFAULT) {
            self.field("symmalloc_pool", pool.0.into())?;
        }
        self.frames(entry.name)?;
        self.pickle.close_dict()
    }

    pub(super) fn field(&mut self, key: &str, number: u64) -> io::Result<()> {
        self.pickle.text(key)?;
        self.pickle.integer(number)
    }

    /// Writes a name verbatim. The first occurrence is written in full rather than fetched from the memo, because the
    /// reader keeps only text that is written in full.
    fn name(&mut self, name: &str) -> io::Result<()> {
        match self.names.get(name) {
            Some(memo) => self.pickle.fetch(*memo),
            None => {
                let memo = self.pickle.text_in_full(name)?;
                self.names.insert(name.into(), memo);
                Ok(())
            }
        }
    }

    /// Writes the field `frames`: the name becomes a stack with one function.
    pub(super) fn frames(&mut self, name: Option<(PoolId, &str)>) -> io::Result<()> {
        self.pickle.text("frames")?;
        let Some((pool, name)) = name else {
            return match self.no_frames {
                Some(memo) => self.pickle.fetch(memo),
                None => {
                    self.pickle.open_list()?;
                    self.pickle.close_list()?;
                    self.no_frames = Some(self.pickle.keep()?);
                    Ok(())
                }
            };
        };
        if let Some(memo) = self.frames.get(&(pool, Box::from(name))) {
            return self.pickle.fetch(*memo);
        }
        self.pickle.open_list()?;
        self.pickle.open_dict()?;
        // PyTorch's tools treat a stack as one line in which semicolons separate the frames.
        let clean = |text: &str| text.replace(|c: char| c.is_control() || c == ';', " ");
        let (file, line, function) = python_frame(name).map_or_else(
            || (pool.to_string(), 0, clean(name)),
            |(file, line, function)| (clean(file), line, clean(function)),
        );
        self.pickle.text("name")?;
        self.pickle.text(&function)?;
        self.pickle.text("filename")?;
        self.pickle.text(&file)?;
        self.field("line", line)?;
        self.pickle.close_dict()?;
        self.pickle.close_list()?;
        let memo = self.pickle.keep()?;
        self.frames.insert((pool, name.into()), memo);
        Ok(())
    }
}

/// Splits the name of a Python frame (`model/block.py:12 make`) into file, line and function. Imports, and recordings under PyTorch, write
/// such names.
fn python_frame(name: &str) -> Option<(&str, u64, &str)> {
    let (place, function) = name.split_once(".py:")?;
    let (line, function) = function.split_once(' ')?;
    let is_frame = !place.is_empty() && !function.is_empty() && line.bytes().all(|byte| byte.is_ascii_digit());
    let line = line.parse().ok().filter(|_| is_frame)?;
    Some((&name[..place.len() + ".py".len()], line, function))
}
