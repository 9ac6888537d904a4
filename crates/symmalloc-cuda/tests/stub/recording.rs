//! Recordings of jobs on a device, replayed on the simulator.

use crate::process::{device, stub_test};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::{Allocator, Backend, PoolId};
use symmalloc_cuda::{CudaAllocator, GraphPool};
use symmalloc_import::{ReadOptions, TraceFile, TraceFileOptions, read_path};
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::{Program, Replay};

stub_test!(recordings_of_buffers_pools_and_graphs_replay_on_the_simulator, {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("job.trace.zst");
    let allocator = CudaAllocator::new(&device(), Config::default()).expect("the stub supports it");
    let core = allocator.core();
    core.start_recording(TraceFile::create(&path, TraceFileOptions::default()).expect("created"))
        .expect("the allocator is unused");
    let context = allocator.device().context();
    let (a, b) = (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"));
    let pool = allocator.create_pool(PoolConfig::builder().fixed().build().expect("valid")).expect("made");
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("made");

    let weights = allocator.alloc_zeroed::<u8>(&a, 5 << 20).expect("allocated");
    let mut target = allocator.with_pool(&pool).alloc_zeroed::<u8>(&b, 3 << 20).expect("allocated");
    allocator.wait(&b, &a).expect("ordered");
    b.memcpy_dtod(&weights.slice(..3 << 20), &mut target).expect("copied");
    drop(weights);
    let capture = graphs.begin(&a).expect("begun");
    let captured = allocator.alloc_zeroed::<u8>(&a, 4 << 20).expect("allocated");
    let graph = capture.end().expect("the capture is valid");
    let named = allocator.allocate_named(&a, 7 << 20, "activations").expect("allocated");
    allocator.synchronize(&a).expect("done");
    allocator.free(named.handle).expect("live");
    drop((captured, graph, graphs, target, pool));
    allocator.trim_all().expect("trimmed");
    let recorded = core.stop_recording().expect("the recording is complete").records;

    let recording = read_path(&path, &ReadOptions::default()).expect("a trace");
    assert_eq!(recording.records.len() as u64, recorded);
    let program = Program::new(&recording.records).expect("a program");
    let device = SimBackend::builder().granularity_bytes(core.backend().granularity_bytes()).build();
    let again: Allocator<_> =
        Allocator::new(device, recording.config.expect("the trace has a configuration")).expect("valid");
    let placements: Vec<_> = recording.records.iter().filter_map(|record| record.placement).collect();
    let mut replayed = Vec::new();
    Replay::new(&again, &program).run(|_, made| replayed.push(made.placement)).expect("the replay succeeds");
    assert_eq!(replayed, placements);
    assert_eq!(again.pool_count(), core.pool_count());
    for pool in (0..core.pool_count()).map(PoolId) {
        assert_eq!(again.digest(pool).ok(), core.digest(pool).ok(), "{pool}");
    }
});
