//! Export: a job or an allocator as a PyTorch memory snapshot, for PyTorch's viewer and other tools that read snapshots.
//!
//! ```text
//! { 'device_traces':      [[ {'action', 'addr', 'size', 'stream', 'time_us', 'frames', ..}, .. ]],
//!   'segments':            [ {'address', 'total_size', .., 'blocks': [{'address', 'size', 'state', ..}, ..]}, .. ],
//!   'allocator_settings':  {..},
//!   'external_annotations': [] }
//! ```
//!
//! The fields are those that PyTorch 2.11 writes. In an export they mean:
//!
//! | field | meaning |
//! |---|---|
//! | `time_us` | the op's index in the program, from 0, so snapshots of equal jobs have equal bytes |
//! | `addr`, `address` | addresses that ascend in the order in which segments were obtained |
//! | `stream` | the logical stream; of a shared heap's segment, the stream for which it was obtained |
//! | `segments` | memory that is held: a pool that sleeps has none |
//! | `segment_pool_id` | `(0, pool)` |
//! | `user_metadata` | the allocation's name |
//! | `frames` | one frame, with the allocation's name as function and its pool as file; none without a name |
//! | `symmalloc_pool` | symmalloc only: the pool of an allocation that is not in the default pool |
//! | `free_requested`, `free_completed` | both at the free, because a block used by other streams is free at once (rule D3). If the recording states how long a free was [pending], the memory stays in use until then |
//! | `state` | `active_allocated`, `inactive`, and `active_pending_free` for frees still pending at the end |
//! | `record_use` | symmalloc only: `stream` also uses the allocation at `addr`. PyTorch's tools ignore it |
//! | `oom` | a request that a limit refuses, or that the recording shows as refused. `device_free` is what the recording states, or else the remainder of the limit, or else 0 |
//!
//! [pending]: symmalloc_core::op::Pending
//!
//! Ops that PyTorch's allocator does not know (`wait`, `sync`, ...) leave no entry, but their effects on memory do. Allocations of zero
//! bytes leave no entry either. [`read_bytes`](crate::read_bytes) restores the program, with two changes: streams and pools are numbered by
//! their first allocation, and pools have the default settings.
//!
//! A running allocator keeps no history. To export its history, record a trace and export the trace: by rule D1, executing the trace gives
//! the same placements as the job had. [`export_allocator`] exports only the current state.
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

use std::collections::BTreeMap;
use std::io::{self, Write};

use symmalloc_core::backend::Backend;
use symmalloc_core::config::Config;
use symmalloc_core::generic;
use symmalloc_core::ids::PoolId;
use symmalloc_core::lock::Lock;
use symmalloc_core::report::Snapshot;
use symmalloc_core::sleep::Phase;
use symmalloc_trace::replay::Program;

use crate::rerun::Rerun;
use state::Origins;
use writer::SnapshotWriter;

/// Executes a program under a configuration, and writes its history and final state as a snapshot.
///
/// Memory: proportional to the live allocations and the program's names. The output depends only on the program and the
/// configuration.
///
/// # Errors
/// Returns an error if the program cannot be executed, or `sink` cannot be written.
pub fn export(program: &Program, config: &Config, sink: impl Write) -> Result<ExportSummary, ExportError> {
    export_with(program, config, &BTreeMap::new(), sink)
}

/// Exports a program like [`export`]. `device_free_bytes` states how many bytes were free on the device at each request that the recording
/// shows as refused. Its keys are op indices, as in [`Recording::device_free_bytes`](crate::Recording::device_free_bytes).
///
/// # Errors
/// Returns an error if the program cannot be executed, or `sink` cannot be written.
pub fn export_with(
    program: &Program,
    config: &Config,
    device_free_bytes: &BTreeMap<usize, u64>,
    sink: impl Write,
) -> Result<ExportSummary, ExportError> {
    let mut rerun = Rerun::new(program, config)?.with_pending_frees();
    let mut snapshot = SnapshotWriter::new(sink, device_free_bytes)?;
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
    let segments = with_memory(rerun.snapshot(), |pool| rerun.is_asleep(pool));
    snapshot.state(&segments, &origins, &pool_config)?;
    Ok(snapshot.finish(config)?)
}

/// Writes the current state of an allocator as a snapshot without history. Addresses are those of the device.
///
/// # Errors
/// Returns an error if `sink` cannot be written.
pub fn export_allocator<B: Backend, L: Lock>(
    allocator: &generic::Allocator<B, L>,
    sink: impl Write,
) -> io::Result<ExportSummary> {
    let none = BTreeMap::new();
    let mut snapshot = SnapshotWriter::new(sink, &none)?;
    snapshot.pickle.text("device_traces")?;
    snapshot.pickle.open_list()?;
    snapshot.pickle.open_list()?;
    snapshot.pickle.close_list()?;
    snapshot.pickle.close_list()?;
    let config = allocator.config();
    let pool_config = |pool| (pool == PoolId::DEFAULT).then(|| config.default_pool().clone());
    let is_asleep = |pool| allocator.phase(pool).is_ok_and(|phase| phase == Phase::Asleep);
    snapshot.state(&with_memory(allocator.snapshot(), is_asleep), &Origins::default(), &pool_config)?;
    snapshot.finish(config)
}

/// Removes the segments of pools that sleep, because these segments have no memory, and every segment in a PyTorch
/// snapshot has memory.
fn with_memory(mut snapshot: Snapshot, is_asleep: impl Fn(PoolId) -> bool) -> Snapshot {
    snapshot.segments.retain(|segment| !is_asleep(segment.heap.pool));
    snapshot
}

#[cfg(test)]
mod tests;
