//! Export: a job or an allocator as a PyTorch memory snapshot, for PyTorch's viewer and everything else that reads one.
//!
//! ```text
//! { 'device_traces':      [[ {'action', 'addr', 'size', 'stream', 'time_us', 'frames', ..}, .. ]],
//!   'segments':            [ {'address', 'total_size', .., 'blocks': [{'address', 'size', 'state', ..}, ..]}, .. ],
//!   'allocator_settings':  {..},
//!   'external_annotations': [] }
//! ```
//!
//! The fields are those that PyTorch 2.11 writes. What ours mean:
//!
//! | field | is |
//! |---|---|
//! | `time_us` | the op's number in the program, counted from 0: a snapshot of the same job is the same bytes |
//! | `addr`, `address` | addresses that count upwards in the order in which segments were obtained |
//! | `stream` | the logical stream; of a shared heap's segment, the stream for which it was obtained |
//! | `segment_pool_id` | `(0, pool)` |
//! | `user_metadata` | the allocation's name |
//! | `frames` | one frame whose function is the allocation's name and whose file is its pool; none without a name |
//! | `symmalloc_pool` | ours: the pool of an allocation that is not in the default pool |
//! | `free_requested`, `free_completed` | both at the free: a block that other streams used is free at once (rule D3). Where the recording says how long a free was [pending], the memory stays taken until then |
//! | `state` | `active_allocated`, `inactive`, and `active_pending_free` for what is pending at the end |
//! | `record_use` | ours: `stream` uses the allocation at `addr`, too. PyTorch's tools pass over it |
//! | `oom` | an allocation that a limit refused; `device_free` is what the limit leaves |
//!
//! [pending]: symmalloc_core::op::Pending
//!
//! Ops that PyTorch's allocator does not know (`wait`, `sync`, ...) leave no entry, but their effect on memory does.
//! Allocations of no bytes leave none either. [`read_bytes`](crate::read_bytes) gives the program back: its streams
//! and pools are numbered by their first allocation then, and the pools have the default settings.
//!
//! A running allocator has no past. Let it record a trace, and export that: by rule D1 the rerun places as the job did.
//! Its present can be exported by itself, with [`export_allocator`].
//!
//! ```
//! use symmalloc_core::config::Config;
//! use symmalloc_trace::replay::Program;
//! use symmalloc_import::{ReadOptions, export::export, read_bytes};
//!
//! let trace = b"symmalloc-trace 1\nstream s0\na 0 1048576 s0 \"weights\"\nend 2\n";
//! let recording = read_bytes(trace, &ReadOptions::default())?;
//! let mut pickle = Vec::new();
//! let summary = export(&Program::new(&recording.records)?, &Config::default(), &mut pickle)?;
//! assert_eq!((summary.allocations, summary.segments), (1, 1));
//! assert_eq!(read_bytes(&pickle, &ReadOptions::default())?.summary.allocations, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod settings;
mod state;

pub use error::ExportError;

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};

use symmalloc_core::Allocator;
use symmalloc_core::backend::{Backend, DeviceAddress};
use symmalloc_core::config::Config;
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::lock::Lock;
use symmalloc_core::op::Op;
use symmalloc_trace::replay::Program;

use crate::pickle::{Memo, PickleWriter};
use crate::rerun::{Happened, Live, MemoryChange, Moment, Rerun};
use state::Origins;

/// What was exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportSummary {
    /// Entries of the trace.
    pub entries: u64,
    /// Allocations of at least one byte.
    pub allocations: u64,
    /// Allocations that a limit refused.
    pub refused: u64,
    /// Frees whose memory stayed taken for a while, as recorded.
    pub pending_frees: u64,
    /// Segments that are live at the end, as PyTorch counts them: each stretch of mapped memory.
    pub segments: u64,
    /// Blocks of these.
    pub blocks: u64,
    /// Ops that leave no entry because PyTorch has no such call.
    pub ops_without_entry: u64,
}

/// Carries a program out under a configuration and writes its history and its end as a snapshot.
///
/// Memory: the live allocations, and the program's names. The bytes follow from the program and the configuration alone.
///
/// # Errors
/// When the program cannot be carried out, or `sink` cannot be written.
pub fn export(program: &Program, config: &Config, sink: impl Write) -> Result<ExportSummary, ExportError> {
    let mut rerun = Rerun::new(program, config)?.with_pending_frees();
    let mut snapshot = SnapshotWriter::new(sink)?;
    let mut origins = Origins::default();
    snapshot.pickle.text("device_traces")?;
    snapshot.pickle.open_list()?;
    snapshot.pickle.open_list()?;
    rerun.run::<ExportError>(program.ops().len(), |moment| {
        origins.note(moment.memory);
        Ok(snapshot.moment(moment, program)?)
    })?;
    snapshot.pickle.close_list()?;
    snapshot.pickle.close_list()?;
    let pool_config = |pool| rerun.pool_config(pool).cloned();
    snapshot.state(&rerun.snapshot(), &origins, &pool_config)?;
    Ok(snapshot.finish(config)?)
}

/// Writes what an allocator holds now as a snapshot without history. Addresses are the device's.
///
/// # Errors
/// When `sink` cannot be written.
pub fn export_allocator<B: Backend, L: Lock>(
    allocator: &Allocator<B, L>,
    sink: impl Write,
) -> io::Result<ExportSummary> {
    let mut snapshot = SnapshotWriter::new(sink)?;
    snapshot.pickle.text("device_traces")?;
    snapshot.pickle.open_list()?;
    snapshot.pickle.open_list()?;
    snapshot.pickle.close_list()?;
    snapshot.pickle.close_list()?;
    let config = allocator.config();
    let pool_config = |pool| (pool == PoolId::DEFAULT).then(|| config.default_pool().clone());
    snapshot.state(&allocator.snapshot(), &Origins::default(), &pool_config)?;
    snapshot.finish(config)
}

/// The parts of a snapshot, one after the other.
struct SnapshotWriter<W> {
    pickle: PickleWriter<W>,
    /// Frames that were written. Looked up only.
    frames: HashMap<(PoolId, Box<str>), Memo>,
    no_frames: Option<Memo>,
    /// Names that were written. Looked up only.
    names: HashMap<Box<str>, Memo>,
    /// What is freed and still taken.
    pending: BTreeSet<DeviceAddress>,
    summary: ExportSummary,
}

/// What all entries have.
struct Entry<'a> {
    action: &'a str,
    address: DeviceAddress,
    size_bytes: u64,
    stream: StreamId,
    number: usize,
    /// Of an allocation.
    pool: Option<PoolId>,
    name: Option<(PoolId, &'a str)>,
}

impl<W: Write> SnapshotWriter<W> {
    fn new(sink: W) -> io::Result<Self> {
        let mut pickle = PickleWriter::new(sink)?;
        pickle.open_dict()?;
        Ok(SnapshotWriter {
            pickle,
            frames: HashMap::new(),
            no_frames: None,
            names: HashMap::new(),
            pending: BTreeSet::new(),
            summary: ExportSummary::default(),
        })
    }

    fn finish(mut self, config: &Config) -> io::Result<ExportSummary> {
        settings::write(&mut self.pickle, config)?;
        self.pickle.text("external_annotations")?;
        self.pickle.open_list()?;
        self.pickle.close_list()?;
        self.pickle.close_dict()?;
        self.pickle.finish()?.flush()?;
        Ok(self.summary)
    }

    /// The entries of one op: memory comes before an allocation and goes after anything else.
    fn moment(&mut self, moment: &Moment<'_>, program: &Program) -> io::Result<()> {
        let number = moment.number;
        let named = |live: &Live| program.name(live.id).map(|name| (live.owner.pool, name));
        let entry = |action, live: &Live| Entry {
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
                return self.entry(&Entry { pool: Some(live.owner.pool), ..entry("alloc", live) });
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
            Happened::Used { live, stream } => self.entry(&Entry { stream: *stream, ..entry("record_use", live) })?,
            Happened::Refused { requested_bytes, stream, left_bytes } => {
                self.memory(moment.memory, number, None)?;
                self.summary.refused += 1;
                return self.entry(&Entry {
                    action: "oom",
                    address: DeviceAddress(*left_bytes),
                    size_bytes: *requested_bytes,
                    stream: *stream,
                    number,
                    pool: None,
                    name: None,
                });
            }
            Happened::Nothing => {
                let is_known = matches!(moment.op, Op::Allocate { .. } | Op::Free { .. } | Op::RecordUse { .. });
                self.summary.ops_without_entry += u64::from(!is_known && moment.memory.is_empty());
            }
        }
        self.memory(moment.memory, number, None)
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
            self.entry(&Entry { action, address, size_bytes, stream, number, pool: None, name })?;
        }
        Ok(())
    }

    fn entry(&mut self, entry: &Entry<'_>) -> io::Result<()> {
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

    fn field(&mut self, key: &str, number: u64) -> io::Result<()> {
        self.pickle.text(key)?;
        self.pickle.integer(number)
    }

    /// A name as it is. It is spelt out where it comes first, because our reader keeps only such text.
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

    /// The field `frames`: a name as a stack of one function.
    fn frames(&mut self, name: Option<(PoolId, &str)>) -> io::Result<()> {
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
        self.pickle.text("name")?;
        // A stack is a line with semicolons to PyTorch's tools.
        self.pickle.text(&name.replace(|c: char| c.is_control() || c == ';', " "))?;
        self.pickle.text("filename")?;
        self.pickle.text(&pool.to_string())?;
        self.field("line", 0)?;
        self.pickle.close_dict()?;
        self.pickle.close_list()?;
        let memo = self.pickle.keep()?;
        self.frames.insert((pool, name.into()), memo);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
