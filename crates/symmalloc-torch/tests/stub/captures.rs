//! CUDA graphs, captured as PyTorch does: begin a pool's scope, capture, end the scope, and replay.

use crate::library::*;
use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use std::ffi::c_void;

/// Accepts streams whose capture has begun, as PyTorch's filter does. Here, these are the streams in the list that is the context.
unsafe extern "C-unwind" fn is_captured(list: *mut c_void, stream: *mut c_void) -> bool {
    // SAFETY: the context of `begin`, a list that outlives the scope.
    let captured = unsafe { &*list.cast::<std::cell::RefCell<Vec<usize>>>() };
    captured.borrow().contains(&(stream as usize))
}

/// Begins a scope of a pool for the streams of a list, which outlives the scope.
fn begin(id: (u64, u64), list: &std::cell::RefCell<Vec<usize>>) {
    let (context, mut number) = (std::ptr::from_ref(list).cast_mut().cast(), 0);
    // SAFETY: the context is alive until the scope ends; an output pointer.
    done(unsafe {
        symmalloc_torch::symmalloc_torch_begin_scope(0, id.0, id.1, Some(is_captured), context, None, &raw mut number)
    });
}

/// Runs `body` inside a capture on the first stream, as PyTorch's `capture_begin` and `capture_end` do. Other streams join in the body.
fn captured(id: (u64, u64), streams: &Streams, body: impl FnOnce(&dyn Fn(usize))) -> CudaGraph {
    let list = std::cell::RefCell::new(Vec::new());
    begin(id, &list);
    let first = streams.stream(0);
    first.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).expect("begun");
    list.borrow_mut().push(streams.get(0) as usize);
    body(&|joined| {
        streams.stream(joined).join(first).expect("joined");
        list.borrow_mut().push(streams.get(joined) as usize);
    });
    for index in 1..list.borrow().len() {
        let joined = list.borrow()[index];
        let stream = (0..).map(|index| streams.stream(index)).find(|stream| stream.cu_stream() as usize == joined);
        first.join(stream.expect("a stream")).expect("joined back");
    }
    let graph = first.end_capture(CUgraphInstantiate_flags(0)).expect("legal");
    torch::end(id);
    graph.expect("something was captured")
}

stub_test!(a_capture_on_two_streams_takes_its_memory_from_its_pool, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(3));
    let pool = |pointer| allocator.placement(pointer).pool;
    let (a, b, c) = (streams.get(0), streams.get(1), streams.get(2));
    // The program has warmed up: it has used the streams, and a block with a use on another stream.
    let warm = [a, b, c].map(|stream| torch::allocate(4 * MIB, stream));
    torch::record_use(warm[0], b);
    torch::free(warm[0]);
    let before = calls("cuEventQuery");
    let mut output = 0;
    let graph = captured((1, 0), &streams, |join| {
        output = torch::allocate(3 * MIB, a);
        let temporary = torch::allocate(5 * MIB, a);
        join(1);
        let side = torch::allocate(2 * MIB, b);
        torch::record_use(temporary, b);
        torch::free(temporary);
        // The block is reused within the capture, so its fence is an edge of the graph.
        assert_eq!(torch::allocate(5 * MIB, a), temporary);
        // Use a stream that is not captured, and free earlier memory during the capture.
        let outside = torch::allocate(MIB, c);
        assert_eq!([output, temporary, side, outside].map(pool), [1, 1, 1, 0]);
        torch::record_use(warm[1], a);
        torch::free(warm[1]);
        torch::free(warm[2]);
        torch::free(side);
        torch::free(temporary);
    });
    assert_eq!(calls("cuEventQuery"), before);
    torch::empty_cache();
    graph.launch().expect("launched");
    // The block that a captured stream used earlier is reused outside the capture.
    assert_eq!(pool(torch::allocate(4 * MIB, b)), 0);
    torch::free(output);
    let reserved = |kind: &str| {
        let stats = allocator.stats();
        let pools = stats["pools"].as_array().expect("a list").clone();
        let pool = pools.iter().find(|pool| pool["kind"] == kind).expect("a pool");
        pool["stats"]["reserved_bytes"]["all"]["current"].as_u64()
    };
    assert_eq!(reserved("graph"), Some(10 << 20));
    torch::empty_cache();
    assert_eq!(reserved("graph"), Some(10 << 20), "the graph can be replayed");
    drop(graph);
    torch::release((1, 0));
    torch::empty_cache();
    assert_eq!(allocator.stats()["pools"].as_array().map(Vec::len), Some(1));
});

stub_test!(a_second_capture_of_a_pool_gets_the_same_placements, {
    let streams = Streams::new(2);
    let capture = |first: u64| {
        let mut places = Vec::new();
        let graph = captured((first, 0), &streams, |join| {
            join(1);
            let taken = [3, 1, 2, 5].map(|size| torch::allocate(size * MIB, streams.get(size % 2)));
            places.extend(taken);
            taken.into_iter().zip([3, 1, 2, 5]).for_each(|(pointer, size)| {
                torch::record_use(pointer, streams.get((size + 1) % 2));
                torch::free(pointer);
            });
        });
        (places, graph)
    };
    let (first, _first_graph) = capture(1);
    let (second, _second_graph) = capture(1);
    assert_eq!(first, second);
    let (other, _other_graph) = capture(2);
    assert!(other.iter().all(|place| !first.contains(place)));
    torch::empty_cache();
    assert_eq!(Allocator::of_torch().stats()["errors"]["failed_calls"], 0);
});

stub_test!(captures_hold_what_the_first_one_held, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(2));
    let [a, b] = [0, 1].map(|index| streams.get(index));
    // The program has used the streams.
    [a, b].into_iter().for_each(|stream| torch::free(torch::allocate(MIB, stream)));
    steady(5, |_| {
        let mut places = Vec::new();
        let graphs = [1, 1, 2].map(|pool| {
            captured((pool, 0), &streams, |join| {
                join(1);
                let output = torch::allocate(3 * MIB, a);
                let temporary = torch::allocate(2 * MIB, b);
                torch::record_use(temporary, a);
                places.extend([output, temporary].map(|pointer| allocator.placement(pointer).offset_bytes));
                torch::free(temporary);
                torch::free(output);
            })
        });
        graphs.iter().for_each(|graph| graph.launch().expect("launched"));
        drop(graphs);
        [1, 1, 2].into_iter().for_each(|pool| torch::release((pool, 0)));
        torch::empty_cache();
        streams.stream(0).context().synchronize().expect("done");
        (places, allocator.held(&[]).without_peaks())
    });
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 0);
});

stub_test!(the_next_begin_ends_the_scope_of_a_failed_capture, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(2));
    let pool = |pointer| allocator.placement(pointer).pool;
    let (first, stream) = (streams.stream(0), streams.get(0));
    torch::free(torch::allocate(MIB, stream));
    // PyTorch's filter rejects all streams after the capture. This filter does not, which shows whether it is called.
    let list = std::cell::RefCell::new(Vec::new());
    begin((1, 0), &list);
    first.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("begun");
    list.borrow_mut().push(stream as usize);
    let lost = torch::allocate(8 * MIB, stream);
    assert_eq!(pool(lost), 1);
    // SAFETY: the stream is alive.
    let synchronized = unsafe { cudarc::driver::result::stream::synchronize(stream.cast()) };
    assert!(synchronized.is_err(), "synchronizing invalidates the capture");
    // Another scope begins before the failed capture has ended.
    let other = std::cell::RefCell::new(Vec::new());
    begin((2, 0), &other);
    torch::end((2, 0));
    assert_eq!(pool(torch::allocate(MIB, stream)), 1);
    assert!(first.end_capture(CUgraphInstantiate_flags(0)).is_err());
    assert_eq!(pool(torch::allocate(MIB, stream)), 1, "the scope is open until PyTorch ends it");
    let mut kept = 0;
    let graph = captured((3, 0), &streams, |_| kept = torch::allocate(MIB, stream));
    assert_eq!(pool(kept), 3);
    assert_eq!(pool(torch::allocate(MIB, stream)), 0);
    torch::free(lost);
    drop(graph);
    // Later versions of PyTorch still end the scope. That is not an error, but a second end is.
    torch::end((1, 0));
    assert_eq!(symmalloc_torch::symmalloc_torch_end_scope(0, 1, 0), SYMMALLOC_INVALID_STATE);
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 0);
});

// The scopes have one pool and different filters, so it shows which of them is open.
stub_test!(of_two_scopes_of_one_pool_the_inner_one_ends_first, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(2));
    let pool = |stream: usize| allocator.placement(torch::allocate(MIB, streams.get(stream))).pool;
    let [outer, inner] = [0, 1].map(|stream| std::cell::RefCell::new(vec![streams.get(stream) as usize]));
    begin((1, 0), &outer);
    begin((1, 0), &inner);
    let mempool = pool(0);
    assert_eq!((mempool != 0, pool(1)), (true, mempool));
    torch::end((1, 0));
    assert_eq!([pool(0), pool(1)], [mempool, 0], "the outer scope is open");
    torch::end((1, 0));
    assert_eq!([pool(0), pool(1)], [0, 0]);
    assert_eq!(allocator.stats()["errors"]["failed_calls"], 0);
});

stub_test!(a_capture_within_a_pushed_pool_has_its_own_memory, {
    let (allocator, streams) = (Allocator::of_torch(), Streams::new(2));
    let pool = |pointer| allocator.placement(pointer).pool;
    let [a, b] = [0, 1].map(|index| streams.get(index));
    let _known = [a, b].map(|stream| torch::allocate(MIB, stream));
    let (outer, inner) = (allocator.create_pool(None), allocator.create_pool(None));
    done(symmalloc_torch::symmalloc_torch_push_pool(0, outer));
    let _graph = captured((1, 0), &streams, |_| {
        let taken = [a, b].map(|stream| pool(torch::allocate(MIB, stream)));
        assert_eq!(taken, [3, outer], "the capture's pool serves only captured streams");
        // A pool that is pushed within the capture takes precedence over the capture's pool.
        done(symmalloc_torch::symmalloc_torch_push_pool(0, inner));
        assert_eq!([a, b].map(|stream| pool(torch::allocate(MIB, stream))), [inner; 2]);
        done(symmalloc_torch::symmalloc_torch_pop_pool(0));
        assert_eq!(pool(torch::allocate(MIB, a)), 3);
    });
    assert_eq!([a, b].map(|stream| pool(torch::allocate(MIB, stream))), [outer; 2]);
    done(symmalloc_torch::symmalloc_torch_pop_pool(0));
});
