//! The recorded jobs with real memory: compares digests with the simulator op by op, and peaks with the driver's numbers.

use crate::device;
use std::sync::Arc;
use symmalloc_core::config::{Config, PoolConfig, StreamPolicy};
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_cuda::{CudaBackend, CudaDevice, CudaMemory};
use symmalloc_harness::jobs;
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::{Program, Replay};

fn config(streams: StreamPolicy, fixed: bool) -> Config {
    let pool = PoolConfig::builder().streams(streams);
    let pool = if fixed { pool.fixed() } else { pool.expandable() };
    Config::builder().default_pool(pool.build().expect("valid")).build().expect("valid")
}

/// Creates a backend with as many streams as the program registers.
fn backend_for(device: &Arc<CudaDevice>, program: &Program) -> CudaBackend {
    let backend = CudaBackend::builder(device).build().expect("supported");
    for _ in program.ops().iter().filter(|op| matches!(op, Op::RegisterStream { .. })) {
        backend.add_stream(device.context().new_stream().expect("a stream"));
    }
    backend
}

/// Runs the job on the device and on the simulator in parallel.
fn run(device: &Arc<CudaDevice>, job: &str, config: &Config) {
    let program = jobs::program(job);
    let on_device: Allocator<_> = Allocator::new(backend_for(device, &program), config.clone()).expect("valid");
    let simulated: Allocator<_> = Allocator::new(
        SimBackend::builder().seed(3).granularity_bytes(on_device.backend().granularity()).build(),
        config.clone(),
    )
    .expect("valid");
    let free_bytes = || device.memory_info().expect("queried").free_bytes;
    // cudarc's streams and the first event allocate some memory, so the baseline is taken after the first op.
    let (mut free_before, mut free_least) = (None, u64::MAX);
    let (mut one, mut other) = (Replay::new(&on_device, &program), Replay::new(&simulated, &program));
    let mut reserved_before = 0;
    for (index, op) in program.ops().iter().enumerate() {
        if free_before.is_none() && matches!(op, Op::Allocate { .. }) {
            free_before = Some(free_bytes());
        }
        let (real, expected) = (one.step(op), other.step(op));
        let placement = |outcome: &Result<Option<symmalloc_core::Allocation>, _>| {
            outcome
                .as_ref()
                .map(|made| made.map(|made| made.placement))
                .map_err(|error: &symmalloc_trace::replay::StepError| error.clone())
        };
        assert_eq!(placement(&real), placement(&expected), "{job}, op {index}: {op:?}");
        let digests = (on_device.digest(PoolId::DEFAULT), simulated.digest(PoolId::DEFAULT));
        assert_eq!(digests.0, digests.1, "{job}, op {index}: {op:?}");
        // The query costs more than the op, so it runs only after memory is reserved.
        let reserved = on_device.stats().reserved_bytes.current;
        if reserved > reserved_before {
            free_least = free_least.min(free_bytes());
        }
        reserved_before = reserved;
    }
    let peak = on_device.stats().reserved_bytes.peak;
    let live_peak = on_device.stats().usage.all.requested_bytes.peak;
    let read = free_before.expect("the job allocates") - free_least;
    println!(
        "{job}: {} ops, digest {}, peak reserved {peak} by our counters, {read} by the driver, live/reserved {:.4}",
        program.ops().len(),
        on_device.digest(PoolId::DEFAULT).expect("known"),
        live_peak as f64 / read as f64
    );
    assert!(read.abs_diff(peak) <= peak / 100 + (64 << 20), "the driver's peak must match ours");
    one.free_all().expect("freed");
    on_device.trim_all().expect("trimmed");
    let left = free_before.expect("known").saturating_sub(free_bytes());
    assert!(left <= 64 << 20, "{job}: {left} bytes were not released");
}

trait Granularity {
    fn granularity(&self) -> u64;
}

impl<B: CudaMemory> Granularity for B {
    fn granularity(&self) -> u64 {
        self.granularity_bytes()
    }
}

#[test]
fn recorded_jobs_have_the_simulators_digests_op_for_op() {
    let Some(device) = device() else { return };
    for job in jobs::JOBS {
        run(&device, job, &config(StreamPolicy::Separate, false));
    }
}

#[test]
fn recorded_jobs_with_shared_streams_and_with_fixed_segments() {
    let Some(device) = device() else { return };
    for job in ["fsdp_train_rank0", "fsdp1_train_rank0"] {
        run(&device, job, &config(StreamPolicy::Shared, false));
        run(&device, job, &config(StreamPolicy::Separate, true));
    }
}
