//! What the benchmarks of symmalloc have in common: workloads, and the allocators that they run on.
//!
//! ```text
//!  recorded job ─┐
//!                ├─► Workload: dense steps ─► run on a Subject ─┬─ Allocator: ours
//!  micro case ───┘                                              └─ Reference: the obvious way
//! ```
//!
//! | bench | measures | needs |
//! |---|---|---|
//! | `ratios` | per recorded job: instructions and ns per op, ours beside the reference, against the bars | valgrind, else times only |
//! | `buffers` | a `DeviceBuffer` through the CUDA allocator, on the stub of libcuda; threads | valgrind, else times only |
//! | `indexes` | designs of a free index, on what each recorded job asks of one | |
//! | `efficiency` | per recorded job: what is reserved beyond what is live, and what could close it | |
//! | `time` | every case by time | |
//!
//! Steady state is measured: a workload frees everything that it allocates, and has run once before. The device costs
//! nothing, so what is measured is the allocator's own work, on one thread with exclusive access.

use crate::reference::Reference;
use std::sync::atomic::{AtomicU32, Ordering};
use symmalloc_core::config::{PlanPolicy, PoolConfigBuilder, StreamPolicy};
use symmalloc_core::{Allocator, Config, PoolConfig};
use symmalloc_import::{TraceFile, TraceFileOptions};
use symmalloc_sim::IdleBackend;

pub mod clock;
pub mod fit_rules;
pub mod free_sets;
pub mod metered;
pub mod micro;
pub mod moving;
pub mod reference;
pub mod varying;
pub mod workload;

/// How backing memory is obtained, with default knobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Segments {
    /// One growing range per heap.
    Expandable,
    /// PyTorch's sizes.
    Fixed,
}

/// Our allocator.
pub type Ours = Allocator<IdleBackend>;

/// Our allocator, driven by one thread.
///
/// # Panics
/// Never: the default knobs are valid.
pub fn ours(segments: Segments, streams: StreamPolicy) -> Ours {
    let pool = PoolConfig::builder().streams(streams);
    ours_with(match segments {
        Segments::Expandable => pool.expandable(),
        Segments::Fixed => pool.fixed(),
    })
}

/// Our allocator, driven by one thread, with a symmetric pool: its heaps keep a journal.
///
/// # Panics
/// Never: the default knobs are valid.
pub fn ours_symmetric() -> Ours {
    ours_with(PoolConfig::builder().expandable().symmetric(true))
}

/// Our allocator, driven by one thread, that learns plans for steps.
///
/// # Panics
/// Never: the default knobs are valid.
pub fn ours_learning(streams: StreamPolicy) -> Ours {
    ours_with(PoolConfig::builder().expandable().streams(streams).plan(PlanPolicy::Learn))
}

/// Our allocator, driven by one thread, that records what it does into a file, which is gone when it is closed.
///
/// # Panics
/// When no file can be made in the folder for temporary files.
pub fn ours_recorded() -> Ours {
    static FILES: AtomicU32 = AtomicU32::new(0);
    let name = format!("symmalloc-{}-{}.trace.zst", std::process::id(), FILES.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let file = TraceFile::create(&path, TraceFileOptions::default()).expect("a folder for temporary files");
    std::fs::remove_file(&path).expect("it was just made");
    let allocator = ours(Segments::Expandable, StreamPolicy::Separate);
    allocator.start_recording(file).expect("nothing was allocated");
    allocator
}

fn ours_with(default_pool: PoolConfigBuilder) -> Ours {
    let config = Config::builder().default_pool(default_pool.build().expect("valid")).build().expect("valid");
    Allocator::new(IdleBackend::default(), config).expect("a valid granularity")
}

/// The reference, with a heap per stream.
pub fn reference(segments: Segments) -> Reference<IdleBackend> {
    Reference::new(IdleBackend::default(), segments)
}
