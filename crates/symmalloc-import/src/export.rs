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
mod summary;
mod writer;

pub use error::ExportError;
pub use summary::ExportSummary;

use std::io::{self, Write};

use symmalloc_core::Allocator;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::Config;
use symmalloc_core::ids::PoolId;
use symmalloc_core::lock::Lock;
use symmalloc_trace::replay::Program;

use crate::rerun::Rerun;
use state::Origins;
use writer::SnapshotWriter;

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

#[cfg(test)]
mod tests;
