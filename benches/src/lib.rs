//! Common parts of the benchmarks of symmalloc: workloads, and the allocators that they run on.
//!
//! ```text
//!  recorded job ─┐
//!                ├─► Workload: dense steps ─► run on a Subject ─┬─ Allocator: ours
//!  micro case ───┘                                              └─ Reference: straightforward
//! ```
//!
//! | bench | measures | requires |
//! |---|---|---|
//! | `ratios` | instructions and ns per op of each recorded job, compared with the reference and limits | valgrind, otherwise times only |
//! | `buffers` | a `DeviceBuffer` through the CUDA allocator, on the stub of libcuda; threads | valgrind, otherwise times only |
//! | `indexes` | free index designs, on the queries of each recorded job | |
//! | `efficiency` | memory that each recorded job reserves beyond its live memory, and ways to reduce it | |
//! | `time` | all cases by time | |
//!
//! Benchmarks measure the steady state: a workload frees everything that it allocates, and has already run once. The
//! device takes no time, so the results measure the allocator's own work, on one thread with exclusive access.

use crate::reference::Reference;
use std::sync::atomic::{AtomicU32, Ordering};
use symmalloc_core::config::{PlanPolicy, PoolConfigBuilder, StreamPolicy};
use symmalloc_core::{Allocator, Config, PoolConfig};
use symmalloc_import::{TraceFile, TraceFileOptions};
use symmalloc_sim::IdleBackend;

pub mod affinity;
pub mod clock;
pub mod fit_rules;
pub mod free_sets;
pub mod metered;
pub mod micro;
pub mod moving;
pub mod reference;
pub mod varying;
pub mod workload;

/// The policy for obtaining backing memory, with default parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segments {
    /// One growing range per heap.
    Expandable,
    /// Segments of PyTorch's sizes.
    Fixed,
}

/// The type of our allocator.
pub type Ours = Allocator<IdleBackend>;

/// Creates our allocator, used by one thread.
///
/// # Panics
/// Never panics, because the default parameters are valid.
pub fn ours(segments: Segments, streams: StreamPolicy) -> Ours {
    let pool = PoolConfig::builder().streams(streams);
    ours_with(match segments {
        Segments::Expandable => pool.expandable(),
        Segments::Fixed => pool.fixed(),
    })
}

/// Creates our allocator, used by one thread, with a symmetric pool, whose heaps keep a journal.
///
/// # Panics
/// Never panics, because the default parameters are valid.
pub fn ours_symmetric() -> Ours {
    ours_with(PoolConfig::builder().expandable().symmetric(true))
}

/// Creates our allocator, used by one thread, with a pool that learns plans for steps.
///
/// # Panics
/// Never panics, because the default parameters are valid.
pub fn ours_learning(streams: StreamPolicy) -> Ours {
    ours_with(PoolConfig::builder().expandable().streams(streams).plan(PlanPolicy::Learn))
}

/// Creates our allocator, used by one thread, that records its ops into a file. The file disappears when it is closed.
///
/// # Panics
/// Panics if no file can be created in the folder for temporary files.
pub fn ours_recorded() -> Ours {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let name = format!("symmalloc-{}-{}.trace.zst", std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = TraceFile::create(&path, TraceFileOptions::default()).expect("a folder for temporary files");
    std::fs::remove_file(&path).expect("the file should exist");
    let allocator = ours(Segments::Expandable, StreamPolicy::Separate);
    allocator.start_recording(file).expect("nothing should have been allocated");
    allocator
}

fn ours_with(default_pool: PoolConfigBuilder) -> Ours {
    let config = Config::builder()
        .default_pool(default_pool.build().expect("the configuration should be valid"))
        .build()
        .expect("the configuration should be valid");
    Allocator::new(IdleBackend::default(), config).expect("the granularity should be valid")
}

/// Creates the reference allocator, with a heap per stream.
pub fn reference(segments: Segments) -> Reference<IdleBackend> {
    Reference::new(IdleBackend::default(), segments)
}
