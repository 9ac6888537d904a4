//! Prefetched memory: the thread that creates it, its visible effects, and its release when others need memory.

use crate::process::{calls, device, fail, fail_elsewhere, heal, live, own_calls, stub_test};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use std::sync::Arc;
use std::time::{Duration, Instant};
use symmalloc_core::backend::{Backend, Range, Reason};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::op::Op;
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};
use symmalloc_core::{Allocator, PoolId, SegmentId, StreamId};
use symmalloc_cuda::{CudaAllocator, CudaBackend, CudaDevice, CudaError, CudaMemory, DeviceBuffer, GraphPool};
use symmalloc_harness::conformance::conformance;
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::jobs;
use symmalloc_sim::SplitMix64;
use symmalloc_trace::replay::{Program, Replay};

const MIB: u64 = 1 << 20;

/// The driver calls that create memory.
const MAKING: [&str; 3] = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"];

/// Default number of random programs to compare; `SYMMALLOC_SEEDS` overrides it.
const SEEDS: u64 = 60;

/// Creates a backend that prefetches up to `prefetch_mib` MiB for each range, in chunks of 20 MiB.
fn prefetching(device: &Arc<CudaDevice>, prefetch_mib: u64) -> CudaBackend {
    let builder = CudaBackend::builder(device).chunk_bytes(20 * MIB);
    builder.prefetch_bytes(prefetch_mib * MIB).build().expect("the stub supports it")
}

/// Waits until `mib` MiB are prefetched. The thread's timing does not matter.
#[track_caller]
fn wait_for_spare(backend: &impl CudaMemory, mib: u64) {
    wait_until(|| backend.spare_bytes() == mib * MIB, &|| format!("{} bytes are prefetched", backend.spare_bytes()));
}

#[track_caller]
fn wait_until(is_so: impl Fn() -> bool, otherwise: &dyn Fn() -> String) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", otherwise());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the number of this thread's calls that create memory.
fn own_making_calls() -> u64 {
    MAKING.into_iter().map(own_calls).sum()
}

/// Maps `mib` MiB of a range at an offset; returns the number of this thread's calls.
#[track_caller]
fn map(backend: &CudaBackend, range: Range, at_mib: u64, mib: u64) -> u64 {
    let before = own_making_calls();
    backend.map(range, at_mib * MIB, mib * MIB).expect("map");
    own_making_calls() - before
}

fn give_back(backend: &CudaBackend, range: Range, mib: u64) {
    backend.unmap(range, 0, mib * MIB).expect("unmap");
    backend.release(range).expect("release");
}

fn seeds() -> u64 {
    std::env::var("SYMMALLOC_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

stub_test!(a_prefetching_backend_keeps_the_contract, {
    let device = device();
    for chunk_mib in [2, 8, 20] {
        conformance(|| {
            let backend = CudaBackend::builder(&device).chunk_bytes(chunk_mib * MIB).prefetch_bytes(40 * MIB);
            let backend = backend.build().expect("the stub supports it");
            for id in 0..4 {
                let stream = device.context().new_stream().expect("a stream");
                assert_eq!(backend.add_stream(stream), StreamId(id));
            }
            backend
        });
        let left = live();
        assert_eq!((left.device_bytes, left.ranges, left.events, left.mappings), (0, 0, 0, 0), "{left:?}");
    }
});

stub_test!(growth_uses_prefetched_memory_without_driver_calls, {
    let device = device();
    let plain = CudaBackend::builder(&device).build().expect("the stub supports it");
    let range = plain.reserve(1 << 30).expect("reserve");
    let without: u64 = (0..6).map(|step| map(&plain, range, 20 * step, 20)).sum();
    assert_eq!(without, 6 * 3);
    give_back(&plain, range, 120);

    let backend = prefetching(&device, 40);
    let range = backend.reserve(1 << 30).expect("reserve");
    assert_eq!(map(&backend, range, 0, 20), 3, "nothing was prefetched yet");
    wait_for_spare(&backend, 20);
    for step in 1..6 {
        assert_eq!(map(&backend, range, 20 * step, 20), 0, "step {step}");
        wait_for_spare(&backend, 40);
        assert_eq!((live().device_bytes, backend.idle_bytes()), ((20 * step + 60) * MIB, 0));
    }
    // The growth exceeds the prefetched memory, so the caller creates one more chunk.
    assert_eq!(map(&backend, range, 120, 60), 3);
    wait_for_spare(&backend, 40);
    give_back(&backend, range, 180);
    assert_eq!((live().device_bytes, live().ranges, backend.spare_bytes()), (0, 0, 0));
});

stub_test!(prefetched_chunks_shrink_to_divide_every_growth, {
    let backend = prefetching(&device(), 40);
    let range = backend.reserve(1 << 30).expect("reserve");
    map(&backend, range, 0, 60);
    wait_for_spare(&backend, 40);
    assert_eq!(live().mappings, 3 + 2, "chunks of 20 MiB each");
    // The growth takes no whole chunk, so the prefetched memory is released, and units are 2 MiB from then on.
    assert_eq!(map(&backend, range, 60, 6), 3);
    wait_for_spare(&backend, 40);
    assert_eq!((live().mappings, live().device_bytes), (3 + 1 + 20, 106 * MIB));
    for (at, mib) in [(66, 2), (68, 10), (78, 22)] {
        assert_eq!(map(&backend, range, at, mib), 0);
        wait_for_spare(&backend, 40);
    }
    assert_eq!(live().device_bytes, 140 * MIB, "no chunk is partially used");
    // A growth of 70 MiB ends chunks at 20, 40 and 60, with and without prefetching.
    assert_eq!(map(&backend, range, 100, 70), 2 * 3, "two chunks");
    wait_for_spare(&backend, 40);
    give_back(&backend, range, 170);
    assert_eq!(live().device_bytes, 0);
});

stub_test!(prefetching_does_not_change_the_ends_of_chunks, {
    let device = device();
    let builder = || CudaBackend::builder(&device).chunk_bytes(20 * MIB);
    for (builder, chunks) in [(builder(), [2, 20, 2].as_slice()), (builder().prefetch_bytes(40 * MIB), &[2, 2, 18, 2])]
    {
        let backend = builder.build().expect("the stub supports it");
        let range = backend.reserve(1 << 30).expect("reserve");
        map(&backend, range, 0, 2);
        wait_for_spare(&backend, if chunks.len() == 4 { 2 } else { 0 });
        map(&backend, range, 2, 22);
        backend.unmap(range, 22 * MIB, 2 * MIB).expect("unmap");
        assert_eq!((backend.idle_bytes(), live().device_bytes), (0, 22 * MIB), "in chunks of {chunks:?} MiB");
        give_back(&backend, range, 22);
    }
});

stub_test!(full_ranges_and_holes_are_not_prefetched, {
    let backend = prefetching(&device(), 40);
    let whole = backend.reserve(64 * MIB).expect("reserve");
    map(&backend, whole, 0, 64);
    let range = backend.reserve(1 << 30).expect("reserve");
    map(&backend, range, 0, 20);
    wait_for_spare(&backend, 20);
    map(&backend, range, 20, 20);
    map(&backend, range, 40, 20);
    backend.unmap(range, 20 * MIB, 20 * MIB).expect("unmap");
    assert_eq!(backend.spare_bytes(), 0, "the prefetched memory was released with it");
    assert_eq!(map(&backend, range, 20, 20), 3, "a hole");
    assert_eq!((live().device_bytes, backend.spare_bytes()), (124 * MIB, 0));
    map(&backend, range, 60, 20);
    wait_for_spare(&backend, 40);
});

stub_test!(a_caller_waits_for_the_chunk_that_is_being_created, ["STUB_MAPPING_MICROSECONDS" = "30000"], {
    let backend = prefetching(&device(), 20);
    let range = backend.reserve(1 << 30).expect("reserve");
    let created = calls("cuMemCreate");
    map(&backend, range, 0, 20);
    wait_until(|| calls("cuMemCreate") == created + 2, &|| "the thread creates no chunk".to_owned());
    assert_eq!(map(&backend, range, 20, 20), 0, "the caller uses the chunk after waiting for it");
    wait_for_spare(&backend, 20);
});

stub_test!(with_slow_calls_the_caller_makes_fewer_of_them, ["STUB_MAPPING_MICROSECONDS" = "1000"], {
    let device = device();
    let grow = |backend: &CudaBackend| {
        let range = backend.reserve(1 << 30).expect("reserve");
        let calls = (0..20).map(|step| {
            // Simulates other work of the program.
            std::thread::sleep(Duration::from_millis(10));
            map(backend, range, 20 * step, 20)
        });
        let calls: u64 = calls.sum();
        give_back(backend, range, 400);
        calls
    };
    let without = grow(&CudaBackend::builder(&device).build().expect("the stub supports it"));
    let with = grow(&prefetching(&device, 40));
    assert!(without == 60 && with < without, "{without} calls without, {with} with");
});

stub_test!(spare_memory_is_released_before_an_allocation_fails, ["STUB_MEMORY_BYTES" = "104857600"], {
    let device = device();
    let (backend, plain) = (prefetching(&device, 40), CudaBackend::builder(&device).build().expect("supported"));
    let whole = CudaBackend::builder(&device).plain().build().expect("supported");
    let backends: [&CudaBackend; 3] = [&backend, &plain, &whole];
    for (index, other) in backends.into_iter().enumerate() {
        let range = backend.reserve(1 << 30).expect("reserve");
        map(&backend, range, 0, 20);
        wait_for_spare(&backend, 20);
        map(&backend, range, 20, 20);
        wait_for_spare(&backend, 40);
        assert_eq!(live().device_bytes, 80 * MIB);
        let rest = other.reserve(60 * MIB).expect("60 MiB are left for other users");
        other.map(rest, 0, 60 * MIB).expect("60 MiB are available");
        assert_eq!((live().device_bytes, backend.spare_bytes()), (100 * MIB, 0), "backend {index}");
        let error = backend.map(range, 40 * MIB, 2 * MIB).expect_err("the device is full");
        assert_eq!((error.call, error.reason), ("cuMemCreate", Reason::OutOfMemory));
        give_back(other, rest, 60);
        // Growth alone does not resume prefetching; a release of memory does.
        backend.unmap(range, 20 * MIB, 20 * MIB).expect("unmap");
        map(&backend, range, 20, 20);
        wait_for_spare(&backend, 40);
        give_back(&backend, range, 40);
        assert_eq!((live().device_bytes, backend.spare_bytes()), (0, 0));
    }
});

stub_test!(
    a_full_device_leaves_the_spare_memory_of_another_one,
    ["STUB_DEVICES" = "2", "STUB_MEMORY_BYTES" = "104857600"],
    {
        let devices = [0, 1].map(|ordinal| CudaDevice::new(ordinal).expect("a stub device"));
        for (full, other) in [(&devices[0], &devices[1]), (&devices[1], &devices[0])] {
            let (backend, range) = grown(other);
            let plain = CudaBackend::builder(full).build().expect("supported");
            let prefetched = grown(full);
            let rest = plain.reserve(1 << 30).expect("reserve");
            // The spare memory of the full device suffices, then nothing does.
            plain.map(rest, 0, 60 * MIB).expect("60 MiB are available");
            let error = plain.map(rest, 60 * MIB, 2 * MIB).expect_err("the device is full");
            assert_eq!(error.reason, Reason::OutOfMemory);
            assert_eq!((prefetched.0.spare_bytes(), backend.spare_bytes()), (0, 40 * MIB));
            // Prefetching continues on the other device.
            assert_eq!(map(&backend, range, 40, 20), 0);
            wait_for_spare(&backend, 40);
            give_back(&plain, rest, 60);
            give_back(&prefetched.0, prefetched.1, 40);
            give_back(&backend, range, 60);
        }
        assert_eq!(live().device_bytes, 0);
    }
);

/// Returns a backend that has prefetched 40 MiB behind a range of 40 MiB.
fn grown(device: &Arc<CudaDevice>) -> (CudaBackend, Range) {
    let backend = prefetching(device, 40);
    let range = backend.reserve(1 << 30).expect("reserve");
    map(&backend, range, 0, 20);
    wait_for_spare(&backend, 20);
    map(&backend, range, 20, 20);
    wait_for_spare(&backend, 40);
    (backend, range)
}

stub_test!(prefetching_pauses_on_a_full_device_until_memory_is_released, ["STUB_MEMORY_BYTES" = "104857600"], {
    let device = device();
    let backend = prefetching(&device, 40);
    let (range, other) = (backend.reserve(1 << 30).expect("reserve"), backend.reserve(1 << 30).expect("reserve"));
    map(&backend, range, 0, 20);
    wait_for_spare(&backend, 20);
    map(&backend, other, 0, 64);
    assert_eq!(backend.spare_bytes(), 0, "the spare memory was released");
    map(&backend, range, 20, 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((backend.spare_bytes(), live().device_bytes), (0, 86 * MIB));
    give_back(&backend, other, 64);
    map(&backend, range, 22, 2);
    wait_for_spare(&backend, 24);
    give_back(&backend, range, 24);
});

/// Allocates until the device is full, and continues beyond that. Returns the result of each allocation. Nothing is trimmed.
fn fill(device: &Arc<CudaDevice>, backend: CudaBackend, seed: u64) -> Vec<Result<symmalloc_core::Placement, String>> {
    let allocator = CudaAllocator::with_backend(backend, Config::default()).expect("made");
    let streams: Vec<_> = (0..3).map(|_| device.context().new_stream().expect("a stream")).collect();
    let fixed = allocator.create_pool(PoolConfig::builder().fixed().build().expect("valid")).expect("made");
    let mut draw = SplitMix64::new(seed);
    let mut below = |limit: u64| draw.next_u64() % limit;
    let mut kept = Vec::new();
    let taken = (0..120).map(|_| {
        let stream = &streams[below(3) as usize];
        let size = [MIB / 2, 2 * MIB, 3 * MIB, 6 * MIB, 20 * MIB, 34 * MIB][below(6) as usize];
        let from = if below(4) == 0 { allocator.with_pool(&fixed) } else { allocator.clone() };
        if below(3) == 0 && !kept.is_empty() {
            kept.swap_remove(below(kept.len() as u64) as usize);
        }
        // SAFETY: nothing reads it.
        let taken = unsafe { from.alloc::<u8>(stream, size as usize) };
        let outcome = taken.as_ref().map(DeviceBuffer::placement).map_err(ToString::to_string);
        kept.extend(taken.ok());
        outcome
    });
    taken.collect()
}

stub_test!(prefetching_never_causes_out_of_memory, ["STUB_MEMORY_BYTES" = "272629760"], {
    let device = device();
    let mut refused = 0;
    for seed in 0..seeds().div_ceil(4) {
        let without = fill(&device, CudaBackend::builder(&device).build().expect("supported"), seed);
        let with = fill(&device, prefetching(&device, 60), seed);
        assert_eq!(with, without, "seed {seed}");
        refused += with.iter().filter(|outcome| outcome.is_err()).count();
        assert_eq!((live().device_bytes, live().ranges), (0, 0), "seed {seed}");
    }
    assert!(refused > 0, "the device was never full");
});

stub_test!(trim_releases_spare_memory, {
    let device = device();
    let allocator = CudaAllocator::with_backend(prefetching(&device, 40), Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let buffer = allocator.alloc_zeroed::<u8>(&stream, 20 << 20).expect("allocated");
    wait_for_spare(allocator.core().backend(), 20);
    assert_eq!(allocator.stats().reserved_bytes.current, 20 * MIB, "no allocation uses it");
    assert_eq!(allocator.trim_all().expect("trimmed"), 20 * MIB, "the prefetched memory");
    assert_eq!((allocator.core().backend().spare_bytes(), live().device_bytes), (0, 20 * MIB));
    drop(buffer);
    let buffer = allocator.alloc_zeroed::<u8>(&stream, 40 << 20).expect("allocated");
    wait_for_spare(allocator.core().backend(), 40);
    drop(buffer);
    assert_eq!(allocator.core().trim_all().expect("trimmed"), 40 * MIB);
    assert_eq!(live().device_bytes, 0, "a trim of the core also releases the prefetched memory of its ranges");
});

stub_test!(growth_creates_memory_itself_if_the_prefetch_thread_fails, {
    let device = device();
    for (call, code) in MAKING.into_iter().flat_map(|call| [(call, 2), (call, 999)]).chain([
        ("cuCtxGetCurrent", 999),
        ("cuCtxPushCurrent_v2", 999),
        ("cuThreadExchangeStreamCaptureMode", 999),
        ("cuMemRelease", 999),
    ]) {
        let backend = prefetching(&device, 40);
        let range = backend.reserve(1 << 30).expect("reserve");
        fail_elsewhere(call, 0, code);
        for step in 0..4 {
            map(&backend, range, 20 * step, 20);
            std::thread::sleep(Duration::from_millis(2));
        }
        heal();
        backend.unmap(range, 60 * MIB, 20 * MIB).expect("unmap");
        map(&backend, range, 60, 20);
        wait_for_spare(&backend, 40);
        assert_eq!(map(&backend, range, 80, 20), 0, "{call}: prefetching resumes after the fault is cleared");
        give_back(&backend, range, 100);
        drop(backend);
        let left = live();
        assert_eq!((left.device_bytes, left.ranges, left.mappings), (0, 0, 0), "{call}: {left:?}");
    }
});

stub_test!(spare_memory_that_the_driver_keeps_is_used_by_growth, {
    let backend = prefetching(&device(), 40);
    let range = backend.reserve(1 << 30).expect("reserve");
    map(&backend, range, 0, 40);
    wait_for_spare(&backend, 40);
    fail("cuMemUnmap", 1, 999);
    assert_eq!(map(&backend, range, 40, 6), 0, "the growth splits a chunk that could not be released");
    // The target is 40 MiB after offset 46 MiB. Of these, 34 MiB are already backed by idle memory.
    wait_for_spare(&backend, 6);
    assert_eq!((backend.idle_bytes(), live().device_bytes), (34 * MIB, 86 * MIB));
    assert_eq!(map(&backend, range, 46, 34), 0);
    wait_for_spare(&backend, 40);
    give_back(&backend, range, 80);
    assert_eq!((backend.idle_bytes(), live().device_bytes), (0, 0));
});

stub_test!(the_thread_ends_with_the_backend_also_when_the_device_is_lost, {
    let threads = || std::fs::read_dir("/proc/self/task").expect("Linux").count();
    let (device, before) = (device(), threads());
    for is_lost in [false, true] {
        let backend = prefetching(&device, 40);
        assert_eq!(threads(), before, "prefetching was not requested yet");
        let range = backend.reserve(1 << 30).expect("reserve");
        map(&backend, range, 0, 40);
        assert_eq!(threads(), before + 1);
        if is_lost {
            MAKING.into_iter().chain(["cuMemUnmap", "cuMemRelease"]).for_each(|call| fail(call, 0, 700));
            let error = backend.map(range, 200 * MIB, 40 * MIB).expect_err("the device is lost");
            assert_eq!(error.reason, Reason::DeviceLost);
        }
        drop(backend);
        wait_until(|| threads() == before, &|| format!("{} threads", threads()));
    }
});

stub_test!(prefetching_does_not_invalidate_a_capture, {
    let device = device();
    let allocator = CudaAllocator::with_backend(prefetching(&device, 40), Config::default()).expect("made");
    let stream = device.context().new_stream().expect("a stream");
    let graphs = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
    let capture = graphs.begin(&stream).expect("begun");
    let first = allocator.alloc_zeroed::<u8>(&stream, 20 << 20).expect("allocated");
    wait_for_spare(allocator.core().backend(), 20);
    let before = own_making_calls();
    let second = allocator.alloc_zeroed::<u8>(&stream, 20 << 20).expect("allocated");
    assert_eq!(own_making_calls(), before);
    let graph = capture.end().expect("the capture is valid");
    drop((first, second));
    graph.launch(&stream).expect("launched");
    stream.synchronize().expect("done");
});

stub_test!(prefetching_does_not_invalidate_a_global_capture, {
    let device = device();
    let backend = prefetching(&device, 40);
    let stream = device.context().new_stream().expect("a stream");
    let range = backend.reserve(1 << 30).expect("reserve");
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
    map(&backend, range, 0, 20);
    wait_for_spare(&backend, 20);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    stream.end_capture(flags).expect("the capture is valid");
});

stub_test!(peers_can_access_prefetched_memory, ["STUB_DEVICES" = "2"], {
    let backend = prefetching(&device(), 40);
    let range = backend.reserve(1 << 30).expect("reserve");
    map(&backend, range, 0, 20);
    wait_for_spare(&backend, 20);
    let before = calls("cuMemSetAccess");
    backend.grant_access(1).expect("granted");
    assert_eq!(calls("cuMemSetAccess"), before + 1, "one run, including prefetched memory");
    assert_eq!(map(&backend, range, 20, 20), 0);
});

stub_test!(invalid_prefetch_sizes_are_rejected, {
    let device = device();
    for (prefetch_bytes, chunk_bytes) in [(2 * MIB, 20 * MIB), (21 * MIB, 20 * MIB), (2 * MIB, 4 * MIB), (1, 2 * MIB)] {
        let builder = CudaBackend::builder(&device).chunk_bytes(chunk_bytes).prefetch_bytes(prefetch_bytes);
        let expected = CudaError::PrefetchSize { prefetch_bytes, chunk_bytes, granularity_bytes: 2 * MIB };
        assert_eq!(builder.build().expect_err("too little"), expected);
    }
    let none = CudaBackend::builder(&device).prefetch_bytes(0).build().expect("0 disables prefetching");
    let range = none.reserve(1 << 30).expect("reserve");
    map(&none, range, 0, 20);
    assert_eq!((none.spare_bytes(), live().device_bytes), (0, 20 * MIB));
});

/// The visible results of a program: every outcome, every segment event, the reserved memory, every digest.
#[derive(Debug, PartialEq)]
struct Seen {
    outcomes: Vec<Result<Option<symmalloc_core::Placement>, String>>,
    events: Vec<(SegmentEventKind, Option<StreamId>, SegmentId, u64, u64)>,
    reserved: Vec<(u64, u64)>,
    digests: Vec<Option<symmalloc_core::Digest>>,
}

/// Runs a program; calls `before` before each op.
fn seen(backend: CudaBackend, config: &Config, program: &Program, mut before: impl FnMut()) -> Seen {
    let device = Arc::clone(backend.device());
    for _ in program.ops().iter().filter(|op| matches!(op, Op::RegisterStream { .. })) {
        backend.add_stream(device.context().new_stream().expect("a stream"));
    }
    let allocator: Allocator<_> = Allocator::new(backend, config.clone()).expect("valid");
    let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool exists");
    let mut replay = Replay::new(&allocator, program);
    let mut seen = Seen { outcomes: Vec::new(), events: Vec::new(), reserved: Vec::new(), digests: Vec::new() };
    for op in program.ops() {
        before();
        let outcome = replay.step(op);
        seen.outcomes.push(outcome.map(|made| made.map(|made| made.placement)).map_err(|error| error.to_string()));
        let unread = allocator.unread(observer);
        let event = |event: &SegmentEvent| {
            (event.kind, event.heap.stream(), event.segment, event.offset_bytes, event.size_bytes)
        };
        seen.events.extend(unread.events.iter().map(event));
        allocator.acknowledge(observer, &unread).expect("faults spare this thread");
        let stats = allocator.stats();
        seen.reserved.push((stats.reserved_bytes.current, stats.retired_bytes));
    }
    allocator.check().expect("consistent");
    seen.digests = (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect();
    seen
}

stub_test!(
    random_programs_have_equal_placements_with_and_without_prefetching,
    ["STUB_MEMORY_BYTES" = "1099511627776"],
    {
        let device = device();
        for seed in 0..seeds() {
            // Stitching is not available with prefetching.
            let scenario = Scenario::from_seed(seed, 150).with_layouts();
            let run = |backend, before: &mut dyn FnMut()| seen(backend, &scenario.config, &scenario.program, before);
            let chunk_mib = [2, 20, 8][seed as usize % 3];
            let builder = || CudaBackend::builder(&device).chunk_bytes(chunk_mib * MIB);
            let without = run(builder().build().expect("supported"), &mut || ());
            let mut draw = SplitMix64::new(seed);
            let mut faults = || {
                // The faults affect only the prefetch thread: a call fails once, is out of memory once, or fails until the fault is cleared.
                let call = MAKING.into_iter().chain(["cuMemUnmap", "cuMemRelease", "cuCtxGetCurrent"]);
                let call = call.collect::<Vec<_>>()[draw.next_u64() as usize % 6];
                match draw.next_u64() % 12 {
                    0 => fail_elsewhere(call, 1 + draw.next_u64() % 5, 999),
                    1 => fail_elsewhere(call, 1, 2),
                    2 => fail_elsewhere(call, 0, 999),
                    3..6 => heal(),
                    _ => {}
                }
            };
            let with = run(builder().prefetch_bytes(60 * MIB).build().expect("supported"), &mut faults);
            heal();
            assert_eq!(with, without, "seed {seed}\n{}", scenario.trace());
            assert_eq!((live().device_bytes, live().ranges, live().mappings), (0, 0, 0), "seed {seed}");
        }
    }
);

stub_test!(
    a_recorded_job_has_equal_placements_with_and_without_prefetching,
    ["STUB_MEMORY_BYTES" = "1099511627776"],
    {
        let device = device();
        let program = jobs::program("fsdp1_train_rank0");
        for conf in ["", "growth_mb:16"] {
            let config: Config = conf.parse().expect("valid");
            let builder = || CudaBackend::builder(&device).chunk_bytes(16 * MIB);
            let before = own_making_calls();
            let without = seen(builder().build().expect("supported"), &config, &program, || ());
            let between = own_making_calls();
            let with = seen(builder().prefetch_bytes(64 * MIB).build().expect("supported"), &config, &program, || ());
            assert!(with == without, "{conf}");
            assert!(
                own_making_calls() - between <= between - before,
                "{conf}: prefetching must not add calls on this thread"
            );
            assert_eq!((live().device_bytes, live().ranges), (0, 0));
        }
    }
);
