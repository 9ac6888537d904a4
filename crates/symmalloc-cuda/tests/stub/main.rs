//! The CUDA backend on a stub of libcuda, which replaces only the device. The tests run on any machine, each in a separate process (see
//! `process.rs`).

mod accesses;
mod arenas;
mod backend;
mod bases;
mod buffers;
mod captures;
mod debugging;
mod dma_buf;
mod driver_errors;
mod drops;
mod forgotten;
mod forks;
mod graphs;
mod groups;
mod interleavings;
mod lazy;
mod lent;
#[cfg(feature = "metrics")]
mod metrics;
mod missing;
mod pinned;
mod prefetch;
mod process;
mod recording;
mod repetition;
mod resize;
mod sharing;
mod single_failures;
mod sleep;
mod slices;
#[path = "../soak/mod.rs"]
mod soak;
mod stitching;

process::stub_test!(memory_descriptors_events_and_threads_do_not_leak, {
    soak::run(&process::device(), || {
        let live = process::live();
        live.ranges + live.events + live.streams + live.graphs + live.mappings
    });
});
