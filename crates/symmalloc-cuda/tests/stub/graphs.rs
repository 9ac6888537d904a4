//! Stream captures: memory from the graph pool, only legal calls, and reproducible placements.

use crate::process::{calls, device, hold, live, stub_test};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use std::sync::Arc;
use symmalloc_core::Placement;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_cuda::{CudaAllocator, CudaError, DeviceBuffer, DeviceGraph, GraphPool};

fn allocator() -> CudaAllocator {
    CudaAllocator::new(&device(), Config::default()).expect("the stub supports it")
}

pub(crate) fn reserved() -> PoolConfig {
    PoolConfig::builder().reserved(64 << 20).build().expect("valid")
}

pub(crate) fn streams(allocator: &CudaAllocator) -> (Arc<CudaStream>, Arc<CudaStream>) {
    let context = allocator.device().context();
    (context.new_stream().expect("a stream"), context.new_stream().expect("a stream"))
}

/// Captures a program on two streams that writes `value` into the returned buffer, with temporary buffers in between.
pub(crate) fn capture(
    allocator: &CudaAllocator,
    pool: &GraphPool,
    (a, b): &(Arc<CudaStream>, Arc<CudaStream>),
) -> (DeviceGraph, DeviceBuffer<u8>, Vec<Placement>) {
    let capture = pool.begin(a).expect("begun");
    let mut places = Vec::new();
    let mut take = |stream: &Arc<CudaStream>, len: usize| {
        let buffer = allocator.alloc_zeroed::<u8>(stream, len).expect("allocated");
        places.push(buffer.placement());
        buffer
    };
    let output = take(a, 3 << 20);
    let temporary = take(a, 5 << 20);
    allocator.wait(b, a).expect("the second stream joins");
    let side = take(b, 4 << 20);
    let mut early = take(a, 1 << 20);
    b.memcpy_dtod(&temporary.slice(..1 << 20), &mut early).expect("copied on the second stream");
    drop((temporary, early));
    let later = take(a, 4 << 20);
    allocator.wait(a, b).expect("joined back");
    drop((side, later));
    let graph = capture.end().expect("the capture is valid");
    (graph, output, places)
}

stub_test!(memory_in_a_capture_comes_from_the_graph_pool_and_stays, {
    let allocator = allocator();
    let streams = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let outside = allocator.alloc_zeroed::<u8>(&streams.0, 1 << 20).expect("allocated");
    let (graph, mut output, _) = capture(&allocator, &pool, &streams);
    assert_eq!(allocator.core().pool_stats(pool.id()).expect("known").usage.all.allocations.current, 1);
    let before = live().device_bytes;
    allocator.trim_all().expect("trimmed");
    assert!(live().device_bytes + (2 << 20) > before, "the graph's memory stays");

    for value in [1_u8, 2] {
        streams.0.memcpy_htod(&vec![value; 3 << 20], &mut output).expect("copied");
        assert_eq!(streams.0.clone_dtoh(&output.slice(..4)).expect("copied"), [value; 4]);
        allocator.wait(&streams.1, &streams.0).expect("ordered");
        graph.launch(&streams.1).expect("launched");
        allocator.wait(&streams.0, &streams.1).expect("ordered");
        assert_eq!(streams.0.clone_dtoh(&output.slice(..4)).expect("copied"), [0; 4]);
    }
    // The graph keeps the memory after the pool and the buffers are dropped.
    drop((pool, output));
    allocator.trim_all().expect("trimmed");
    graph.launch(&streams.0).expect("launched");
    drop((graph, outside));
    allocator.trim_all().expect("trimmed");
    assert_eq!((live().device_bytes, live().graphs), (0, 0));
});

// The core does not know of launches, so the pool must wait for each stream that ran one of its graphs.
stub_test!(a_dropped_pool_waits_for_every_stream_that_launched_its_graphs, {
    let waits_after = |launches: usize| {
        let allocator = allocator();
        let streams = streams(&allocator);
        let pool = GraphPool::new(&allocator, reserved()).expect("made");
        let (graph, output, _) = capture(&allocator, &pool, &streams);
        let other = allocator.device().context().new_stream().expect("a stream");
        for stream in [&streams.0, &other, &streams.0].into_iter().take(launches) {
            graph.launch(stream).expect("launched");
        }
        drop((graph, output, pool));
        let before = calls("cuStreamSynchronize");
        allocator.trim_all().expect("trimmed");
        assert_eq!(live().graphs, 0);
        calls("cuStreamSynchronize") - before
    };
    let one = waits_after(1);
    assert!(one > 0);
    assert_eq!([waits_after(2), waits_after(3)], [one + 1; 2]);
});

stub_test!(a_second_capture_gets_the_same_placements, {
    let allocator = allocator();
    let streams = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let (first, output, places) = capture(&allocator, &pool, &streams);
    drop(output);
    let (second, _output, again) = capture(&allocator, &pool, &streams);
    assert_eq!(places, again, "graphs of one pool share its memory");
    let other = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
    let growing = capture(&allocator, &other, &streams).2;
    let fresh = GraphPool::new(&allocator, PoolConfig::default()).expect("made");
    assert_eq!(capture(&allocator, &fresh, &streams).2, growing, "a new pool has the same placements");
    first.launch(&streams.0).expect("launched");
    second.launch(&streams.0).expect("launched");
});

stub_test!(two_concurrent_captures_use_their_own_pools, {
    let allocator = allocator();
    let streams = streams(&allocator);
    let pools = [(); 2].map(|()| GraphPool::new(&allocator, reserved()).expect("made"));
    let first = pools[0].begin(&streams.0).expect("begun");
    let one = allocator.alloc_zeroed::<u8>(&streams.0, 1 << 20).expect("allocated");
    let second = pools[1].begin(&streams.1).expect("a second capture begins");
    let two = allocator.alloc_zeroed::<u8>(&streams.1, 1 << 20).expect("allocated");
    let eager = allocator.device().context().new_stream().expect("a stream");
    let three = allocator.alloc_zeroed::<u8>(&eager, 1 << 20).expect("allocated");
    let live_in = |pool| allocator.core().pool_stats(pool).expect("known").usage.all.allocations.current;
    assert_eq!((live_in(pools[0].id()), live_in(pools[1].id()), live_in(allocator.pool())), (1, 1, 1));
    first.end().expect("the capture is valid");
    second.end().expect("the capture is valid");
    drop((one, two, three));
    assert_eq!(allocator.drop_errors().count, 0);
});

stub_test!(a_capture_begins_after_earlier_work_has_finished, {
    let allocator = allocator();
    let (a, b) = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let shared = allocator.alloc_zeroed::<u8>(&a, 1 << 20).expect("allocated");
    allocator.register_stream(&b).expect("registered");
    let before = calls("cuStreamSynchronize");
    let under_way = pool.begin(&a).expect("begun");
    assert_eq!(calls("cuStreamSynchronize"), before + 2);
    // Reading an eager buffer in the capture adds no edge to work outside the capture, and causes no error.
    let mut copy = allocator.alloc_zeroed::<u8>(&a, 1 << 20).expect("allocated");
    a.memcpy_dtod(&shared, &mut copy).expect("captured");
    // Queries and trims during a capture do not invalidate it.
    allocator.core().drop_completed_fences().expect("queried");
    drop(allocator.alloc_zeroed::<u8>(&b, 9 << 20).expect("allocated outside the capture"));
    let graph = under_way.end().expect("the capture is valid");
    assert_eq!(allocator.drop_errors().count, 0);
    graph.launch(&a).expect("launched");
});

stub_test!(fences_of_a_capture_stay_inside_it, {
    let allocator = allocator();
    let streams = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    // The first capture leaves blocks that the other stream used; the second capture takes them.
    for _ in 0..3 {
        let (graph, output, _) = capture(&allocator, &pool, &streams);
        drop(output);
        graph.launch(&streams.0).expect("launched");
    }
    assert_eq!(allocator.drop_errors().count, 0);
    allocator.core().check().expect("consistent");
});

stub_test!(a_capture_that_is_dropped_captures_nothing, {
    let allocator = allocator();
    let (a, _) = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    drop(pool.begin(&a).expect("begun"));
    let again = pool.begin(&a).expect("begun again");
    assert_eq!(pool.begin(&a).expect_err("a capture is in progress"), CudaError::AlreadyCapturing);
    again.end().expect("an empty graph");
    allocator.synchronize(&a).expect("no capture is in progress");
});

stub_test!(a_rejected_host_wait_leaves_the_capture_valid, {
    let allocator = allocator();
    let (a, b) = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let under_way = pool.begin(&a).expect("begun");
    allocator.wait(&b, &a).expect("joins");
    drop(allocator.alloc_zeroed::<u8>(&a, 100).expect("allocated"));
    for captured in [&a, &b] {
        let error = allocator.synchronize(captured).expect_err("the work has not begun");
        assert!(matches!(error, CudaError::Driver(error) if error.code == 900), "{error}");
    }
    allocator.wait(&a, &b).expect("joins back");
    under_way.end().expect("the capture is valid");
});

stub_test!(a_stream_that_is_not_joined_invalidates_the_capture, {
    let allocator = allocator();
    let (a, b) = streams(&allocator);
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let under_way = pool.begin(&a).expect("begun");
    allocator.wait(&b, &a).expect("joins");
    drop(allocator.alloc_zeroed::<u8>(&b, 100).expect("allocated"));
    let error = under_way.end().expect_err("not joined back");
    assert!(matches!(error, CudaError::Driver(error) if error.code == 904), "{error}");
    allocator.synchronize(&a).expect("no capture is in progress");
});

stub_test!(the_host_waits_for_an_earlier_fence_during_a_foreign_capture, {
    let allocator = allocator();
    let (a, b) = streams(&allocator);
    let ids = [&a, &b].map(|stream| allocator.register_stream(stream).expect("registered"));
    let block = allocator.allocate(&a, 1 << 20).expect("allocated");
    allocator.core().record_use(block.handle, ids[1]).expect("live");
    allocator.free(block.handle).expect("live");
    let watch = allocator.device().watch_captures();
    a.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
    let before = calls("cuEventSynchronize");
    let again = allocator.allocate(&a, 1 << 20).expect("the host waits");
    assert_eq!((again.placement, calls("cuEventSynchronize") - before), (block.placement, 1));
    let graph = a.end_capture(CUgraphInstantiate_flags(0)).expect("the capture stays valid");
    drop(watch);
    assert!(graph.is_some() && !allocator.device().is_capturing());
    allocator.free(again.handle).expect("live");
});

stub_test!(captures_begun_by_other_code_are_detected, {
    let allocator = allocator();
    let (stream, other) = streams(&allocator);
    allocator.register_stream(&stream).expect("registered");
    assert!(!allocator.is_capturing().expect("queried"));
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let ours = pool.begin(&other).expect("begun");
    assert!(allocator.is_capturing().expect("queried"));
    drop(ours);
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    stream.begin_capture(mode).expect("begun");
    assert!(allocator.is_capturing().expect("queried"), "cudarc captures a registered stream");
    stream.end_capture(CUgraphInstantiate_flags(0)).expect("ended");
    assert!(!allocator.is_capturing().expect("queried"));
});

stub_test!(uses_in_a_capture_do_not_hide_work_for_which_they_did_not_wait, {
    let allocator = allocator();
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let (captured, other) = streams(&allocator);
    let third = allocator.device().context().new_stream().expect("a stream");
    for stream in [&captured, &other, &third] {
        allocator.register_stream(stream).expect("registered");
    }
    for (writes, reader) in [(false, &captured), (true, &captured), (true, &third)] {
        let mut buffer = allocator.alloc_zeroed::<u8>(&other, 1 << 20).expect("allocated");
        let mut copy = allocator.alloc_zeroed::<u8>(reader, 1 << 20).expect("allocated");
        other.memcpy_htod(&vec![9; 1 << 20], &mut buffer).expect("copied");
        let capture = pool.begin(&captured).expect("begun");
        let slow = hold(other.cu_stream() as u64);
        other.memset_zeros(&mut buffer).expect("submitted outside of the capture");
        if writes {
            let _ = buffer.device_ptr_mut(&captured);
        } else {
            let _ = buffer.device_ptr(&captured);
        }
        drop(capture.end().expect("the capture is valid"));
        reader.memcpy_dtod(&buffer, &mut copy).expect("submitted");
        drop(slow);
        let found = reader.clone_dtoh(&copy).expect("copied");
        assert!(found.iter().all(|byte| *byte == 0), "the copy waits for the memset if the capture writes: {writes}");
    }
});

stub_test!(a_part_that_is_split_off_in_a_capture_keeps_the_uses_for_which_it_did_not_wait, {
    let allocator = allocator();
    let pool = GraphPool::new(&allocator, reserved()).expect("made");
    let (captured, other) = streams(&allocator);
    allocator.register_stream(&other).expect("registered");
    let mut copy = allocator.alloc_zeroed::<u8>(&captured, 1 << 19).expect("allocated");
    let mut front = allocator.alloc_zeroed::<u8>(&captured, 1 << 20).expect("allocated").into_part();
    captured.memcpy_htod(&vec![9; 1 << 20], &mut front).expect("copied");
    let capture = pool.begin(&captured).expect("begun");
    let slow = hold(other.cu_stream() as u64);
    other.memset_zeros(&mut front).expect("submitted outside of the capture");
    let back = front.split_off(1 << 19);
    drop(capture.end().expect("the capture is valid"));
    captured.memcpy_dtod(&back, &mut copy).expect("submitted");
    drop(slow);
    assert_eq!(captured.clone_dtoh(&copy).expect("copied"), vec![0; 1 << 19]);
});
