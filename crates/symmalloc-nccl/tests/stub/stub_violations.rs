//! Tests of violations that the stub detects and NCCL does not, and of behavior that depends on NCCL's version.

use crate::raw::{
    F32, MIB, Rank, SUCCESS, UniqueId, abort, all_gather, all_reduce, buffer_deregister, buffer_register,
};
use crate::raw::{destroy, group_end, group_start, grow_into, memory_free, ranks, revoke, split_into, version};
use crate::raw::{window_deregister, window_register};
use crate::stub_itself::{COUNT, input, sum};
use cudarc::driver::sys::{self, CUstreamCaptureMode};
use stub_process::{ExitOnPanic, nccl, nccl_test, until};

const CUDA_ERROR: i32 = 1;
const INTERNAL_ERROR: i32 = 3;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;
const SEGMENT: usize = 2 * MIB;

/// Asserts that exactly these violations were detected.
#[track_caller]
fn saw(expected: &[&str]) {
    let seen = nccl::violations();
    let is_each = expected.iter().all(|text| seen.iter().any(|line| line.contains(text)));
    let is_all = seen.iter().all(|line| expected.iter().any(|text| line.contains(text)));
    assert!(is_each && is_all, "{expected:?} expected, {seen:#?} seen");
    nccl::forget();
}

/// Maps `chunks` chunks of memory into one range, exportable as file descriptors or not. Returns its base.
fn mapped(rank: &Rank, chunks: usize, is_exportable: bool) -> u64 {
    let mut base = 0;
    let device = rank.rank as i32;
    // SAFETY: all pointers are to locals that are valid during the call, and the ranges and handles have just been created.
    unsafe {
        sys::cuMemAddressReserve(&raw mut base, chunks * SEGMENT, 0, 0, 0)
            .result()
            .expect("the reservation should succeed");
        for chunk in 0..chunks {
            let at = base + (chunk * SEGMENT) as u64;
            let mut handle = 0;
            let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
            properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            properties.location.id = device;
            if is_exportable {
                properties.requestedHandleTypes =
                    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            }
            sys::cuMemCreate(&raw mut handle, SEGMENT, &raw const properties, 0)
                .result()
                .expect("the creation should succeed");
            sys::cuMemMap(at, SEGMENT, 0, handle, 0).result().expect("the mapping should succeed");
            let access = sys::CUmemAccessDesc {
                location: properties.location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            sys::cuMemSetAccess(at, SEGMENT, &raw const access, 1).result().expect("accessible");
            sys::cuMemRelease(handle).result().expect("it should be released");
        }
    }
    base
}

nccl_test!(invalid_registrations_are_violations, {
    ranks(1, |rank| {
        let segment = rank.segment(2 * SEGMENT);
        let mut plain = 0;
        // SAFETY: the pointer is valid for writing.
        unsafe { sys::cuMemAlloc_v2(&raw mut plain, SEGMENT) }.result().expect("the allocation should succeed");
        assert_eq!(rank.window(plain, SEGMENT), (CUDA_ERROR, 0));
        saw(&["not virtual memory management memory"]);
        assert_eq!(rank.window(segment + 512, SEGMENT), (INVALID_ARGUMENT, 0));
        saw(&["not at a multiple of 4096"]);
        let (code, part) = rank.window(segment + 4096, SEGMENT);
        assert_eq!(code, SUCCESS);
        saw(&["does not cover whole mappings"]);
        assert_eq!(window_deregister(rank.comm, part), SUCCESS);
        let private = mapped(rank, 1, false);
        assert_eq!(rank.window(private, SEGMENT), (CUDA_ERROR, 0));
        saw(&["cannot be exported as a file descriptor"]);

        let (_, window) = rank.window(segment, 2 * SEGMENT);
        nccl::assert_clean();
        let used = nccl::live().space_bytes;
        let (code, again) = rank.window(segment, 2 * SEGMENT);
        assert_eq!((code, nccl::live().space_bytes), (SUCCESS, used), "2.28 takes the memory once");
        saw(&["registered twice"]);
        let mut buffer = 0;
        assert_eq!(buffer_register(rank.comm, plain, SEGMENT, &raw mut buffer), SUCCESS);
        assert_eq!(window_deregister(rank.comm, buffer), INVALID_ARGUMENT);
        saw(&["ncclCommWindowDeregister of a registered buffer"]);
        assert_eq!(buffer_deregister(rank.comm, window), INVALID_ARGUMENT);
        saw(&["ncclCommDeregister of a window"]);
        assert_eq!(window_deregister(rank.comm, 1), INVALID_ARGUMENT);
        saw(&["ncclCommWindowDeregister of an unknown handle"]);
        // SAFETY: nothing uses the memory.
        unsafe { sys::cuMemFree_v2(plain) }.result().expect("the memory should be freed");
        saw(&["unmapped or freed under registered buffer"]);
        assert_eq!(buffer_deregister(rank.comm, buffer), SUCCESS);
        assert_eq!(window_deregister(rank.comm, again), SUCCESS);
        assert_eq!(memory_free(segment), SUCCESS);
        saw(&["unmapped or freed under window"]);
        assert_eq!((window_deregister(rank.comm, window), destroy(rank.comm)), (SUCCESS, SUCCESS));
        assert_eq!(window_deregister(rank.comm, window), INVALID_ARGUMENT);
        saw(&["ncclCommWindowDeregister on a communicator of rank 0 that is Destroyed"]);
    });
});

nccl_test!(collectives_that_differ_between_ranks_never_complete, {
    type Call = fn(&Rank, u64) -> i32;
    let differing: [(Call, Call); 3] = [
        (|rank, at| rank.sum(at, at, 8), |rank, at| rank.sum(at, at, 9)),
        (|rank, at| rank.sum(at, at, 8), |rank, at| all_reduce(at, at, 8, 2, 0, rank.comm, rank.raw_stream())),
        (|rank, at| rank.sum(at, at, 8), |rank, at| all_gather(at, at + 4096, 8, F32, rank.comm, rank.raw_stream())),
    ];
    for (zero, one) in differing {
        ranks(2, |rank| {
            let segment = rank.segment(SEGMENT);
            assert_eq!([zero, one][rank.rank](rank, segment), SUCCESS);
            rank.meet();
            assert_eq!(nccl::live().pending, 2);
            rank.meet();
            assert_eq!(abort(rank.comm), SUCCESS);
        });
        saw(&["collectives differ"]);
    }
});

nccl_test!(a_collective_on_windows_of_only_some_ranks_never_completes, {
    ranks(2, |rank| {
        let (windowed, other) = (rank.segment(SEGMENT), rank.segment(SEGMENT));
        assert_eq!(rank.window(windowed, SEGMENT).0, SUCCESS);
        let at = [windowed, other][rank.rank];
        assert_eq!(rank.sum(at, at, COUNT), SUCCESS);
        rank.meet();
        assert_eq!(nccl::live().pending, 2);
        rank.meet();
        assert_eq!(abort(rank.comm), SUCCESS);
    });
    saw(&["1 of 2 ranks have both buffers in windows"]);
});

nccl_test!(different_host_calls_wait_indefinitely, {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            let inside = scope.spawn(|| {
                let mut part = 0;
                match rank.rank {
                    0 => rank.window(segment, SEGMENT).0,
                    _ => split_into(rank.comm, 0, 0, &raw mut part, std::ptr::null_mut()),
                }
            });
            until(|| !nccl::violations().is_empty());
            rank.meet();
            assert!(!inside.is_finished());
            assert_eq!(abort(rank.comm), SUCCESS);
            assert_ne!(inside.join().expect("the call should return"), SUCCESS);
        });
    });
    saw(&["different host steps"]);
});

nccl_test!(calls_on_a_dead_or_busy_communicator_are_violations, {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        assert_eq!(rank.window(segment, SEGMENT).0, SUCCESS);
        assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        rank.stream.synchronize().expect("the stream should complete");
        rank.meet();
        if rank.rank == 0 {
            std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                let inside = scope.spawn(|| rank.window(segment, SEGMENT));
                // Two violations are expected: the window is registered twice, and the call below runs during another one.
                until(|| !nccl::violations().is_empty());
                until(|| {
                    let _busy = rank.sum(segment, segment, 0);
                    nccl::violations().len() > 1
                });
                assert_eq!(abort(rank.comm), SUCCESS);
                assert_ne!(inside.join().expect("the call should return").0, SUCCESS);
            });
            saw(&["registered twice", "while another thread is in a call"]);
            assert_eq!(rank.sum(segment, segment, COUNT), INVALID_ARGUMENT);
            saw(&["that is Aborted"]);
        }
        rank.meet();
        if rank.rank == 1 {
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
            std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                let inside = scope.spawn(|| destroy(rank.comm));
                until(|| !nccl::violations().is_empty());
                assert_eq!(abort(rank.comm), SUCCESS);
                inside.join().expect("the call should return");
            });
        }
    });
    saw(&["destroyed with 1 pending collectives"]);
});

nccl_test!(a_graph_must_not_outlive_its_communicator_or_windows, {
    ranks(1, |rank| {
        let segment = rank.segment(SEGMENT);
        rank.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("the capture should begin");
        assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = rank.stream.end_capture(flags).expect("the capture should end").expect("a graph");
        assert_eq!(destroy(rank.comm), SUCCESS);
        graph.launch().expect("the graph should be launched");
        rank.stream.synchronize().expect("the stream should complete");
    });
    saw(&["a graph launched a collective of a communicator that has ended"]);
});

nccl_test!(a_registration_in_a_capture_fails_and_invalidates_it, {
    ranks(1, |rank| {
        let segment = rank.segment(SEGMENT);
        rank.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("the capture should begin");
        assert_eq!(rank.window(segment, SEGMENT).0, CUDA_ERROR);
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        assert!(rank.stream.end_capture(flags).is_err());
    });
    saw(&["during a capture"]);
});

nccl_test!(
    from_2_30_7_a_registration_keeps_a_capture_valid_and_repeated_ones_are_refused,
    ["STUB_NCCL_VERSION" = "23007"],
    {
        ranks(2, |rank| {
            let segment = rank.segment(SEGMENT);
            rank.stream
                .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                .expect("the capture should begin");
            let (code, window) = rank.window(segment, SEGMENT);
            assert_eq!(code, SUCCESS);
            let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            rank.stream.end_capture(flags).expect("the capture is still valid");
            nccl::assert_clean();
            let mut code = 0;
            assert_eq!((version(&raw mut code), code), (SUCCESS, 23_007));
            rank.meet();
            let used = nccl::live().space_bytes;
            rank.meet();
            let (code, again) = rank.window(segment, SEGMENT);
            assert_eq!(code, SUCCESS);
            rank.meet();
            assert_eq!(nccl::live().space_bytes, 2 * used);
            rank.meet();
            assert_eq!((window_deregister(rank.comm, again), window_deregister(rank.comm, window)), (SUCCESS, SUCCESS));
            assert_eq!(destroy(rank.comm), SUCCESS);
        });
        saw(&["registered twice"]);
    }
);

nccl_test!(windows_of_different_sizes_are_refused, {
    ranks(2, |rank| {
        let segment = rank.segment((1 + rank.rank) * SEGMENT);
        assert_eq!(rank.window(segment, (1 + rank.rank) * SEGMENT), (CUDA_ERROR, 0));
    });
    saw(&["windows of different sizes"]);
    assert_eq!(nccl::live().kept_rounds, 0);
});

/// All-reduces in the second of two mappings.
fn reduce_in_second_mapping(rank: &Rank) -> Vec<f32> {
    let base = mapped(rank, 2, true);
    let (code, window) = rank.window(base, 2 * SEGMENT);
    assert_eq!(code, SUCCESS);
    let at = base + SEGMENT as u64;
    rank.write(at, &input(rank.rank));
    rank.meet();
    assert_eq!(rank.sum(at, at, COUNT), SUCCESS);
    let answer = rank.read::<f32>(at, COUNT);
    assert_eq!((window_deregister(rank.comm, window), destroy(rank.comm)), (SUCCESS, SUCCESS));
    answer
}

nccl_test!(before_2_30_3_a_window_has_the_first_mapping_only, ["STUB_NCCL_VERSION" = "23002"], {
    ranks(2, |rank| assert_ne!(reduce_in_second_mapping(rank), sum(2)));
    saw(&["NCCL uses only the first", "beyond its memory"]);
});

nccl_test!(from_2_30_3_a_window_has_all_mappings, ["STUB_NCCL_VERSION" = "23003"], {
    ranks(2, |rank| assert_eq!(reduce_in_second_mapping(rank), sum(2)));
    nccl::assert_clean();
});

nccl_test!(
    symmetric_address_space_runs_out,
    ["STUB_NCCL_WIN_STRIDE" = "4294967296", "STUB_MEMORY_BYTES" = "8589934592"],
    {
        ranks(2, |rank| {
            let half = rank.segment(2 << 30);
            let more = rank.segment((2 << 30) + SEGMENT);
            assert_eq!(rank.window(half, 2 << 30).0, SUCCESS);
            assert_eq!(rank.window(more, (2 << 30) + SEGMENT), (INTERNAL_ERROR, 0));
        });
        nccl::assert_clean();
    }
);

nccl_test!(without_symmetric_support_2_28_lets_a_registration_pose_as_a_window, ["STUB_NCCL_NO_SYMMETRIC" = "1"], {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        let (code, window) = rank.window(segment, SEGMENT);
        assert!(code == SUCCESS && window != 0);
        rank.write(segment, &input(rank.rank));
        // It is not a symmetric window, so offsets may differ.
        let at = segment + 4096 * (1 + rank.rank as u64);
        assert_eq!(rank.sum(segment, at, COUNT), SUCCESS);
        assert_eq!(rank.read::<f32>(at, COUNT), sum(2));
        assert_eq!((window_deregister(rank.comm, window), destroy(rank.comm)), (SUCCESS, SUCCESS));
    });
    nccl::assert_clean();
});

nccl_test!(
    without_symmetric_support_2_29_gives_no_window,
    ["STUB_NCCL_NO_SYMMETRIC" = "1", "STUB_NCCL_VERSION" = "22900"],
    {
        ranks(1, |rank| {
            let segment = rank.segment(SEGMENT);
            assert_eq!(rank.window(segment, SEGMENT), (SUCCESS, 0));
            assert_eq!((window_deregister(rank.comm, 0), destroy(rank.comm)), (SUCCESS, SUCCESS));
        });
        nccl::assert_clean();
    }
);

nccl_test!(a_check_of_all_arguments_finds_different_offsets, ["STUB_NCCL_CHECK_MODE" = "1"], {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        assert_eq!(rank.window(segment, SEGMENT).0, SUCCESS);
        assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        let at = segment + 4096 * rank.rank as u64;
        assert_eq!(rank.sum(at, at, COUNT), INVALID_ARGUMENT);
        assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        rank.stream.synchronize().expect("the stream should complete");
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

nccl_test!(the_first_collective_can_be_made_to_wait_for_the_peers_on_the_host, ["STUB_NCCL_CONNECT_BLOCKS" = "1"], {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            if rank.rank == 0 {
                let inside = scope.spawn(|| rank.sum(segment, segment, COUNT));
                until(|| nccl::calls("ncclAllReduce") != 0);
                assert!(!inside.is_finished(), "rank 1 has not joined yet");
                rank.meet();
                assert_eq!(inside.join().expect("the call should return"), SUCCESS);
            } else {
                rank.meet();
                assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
            }
        });
        rank.meet();
        // The second collective does not wait.
        if rank.rank == 0 {
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        }
        rank.meet();
        assert_eq!(abort(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

nccl_test!(before_2_29_a_communicator_leaks_the_memory_of_its_windows, {
    ranks(2, |rank| {
        let segment = rank.segment(SEGMENT);
        assert_eq!(rank.window(segment, SEGMENT).0, SUCCESS);
        assert_eq!((destroy(rank.comm), memory_free(segment)), (SUCCESS, SUCCESS));
    });
    nccl::assert_clean();
    assert_eq!((nccl::live().leaked, stub_process::cuda::live().device_bytes), (2, 2 * SEGMENT as u64));
});

nccl_test!(one_thread_makes_host_calls_of_several_ranks_in_a_group, {
    let id = crate::raw::unique_id();
    let streams: Vec<_> = (0..2)
        .map(|rank| {
            cudarc::driver::CudaContext::new(rank)
                .expect("the stub should have a device")
                .new_stream()
                .expect("the driver should create a stream")
        })
        .collect();
    let mut comms = [0; 2];
    assert_eq!(group_start(), SUCCESS);
    for (rank, stream) in streams.iter().enumerate() {
        stream.context().bind_to_thread().expect("the context can be current");
        let (code, comm) = crate::raw::init(2, id, rank, true);
        assert_eq!(code, SUCCESS);
        comms[rank] = comm;
    }
    assert_eq!(group_end(), SUCCESS);
    let mut segments = [0; 2];
    let mut windows = [0; 2];
    assert_eq!(group_start(), SUCCESS);
    for rank in 0..2 {
        streams[rank].context().bind_to_thread().expect("the context can be current");
        assert_eq!(crate::raw::memory_allocate(&raw mut segments[rank], SEGMENT), SUCCESS);
        let code = window_register(comms[rank], segments[rank], SEGMENT, &raw mut windows[rank], 1);
        assert_eq!((code, windows[rank]), (SUCCESS, 0), "not before the group ends");
    }
    assert_eq!(group_end(), SUCCESS);
    assert!(windows.iter().all(|window| *window != 0));
    nccl::assert_clean();
});

/// Grows a rank's communicator to `ranks` with an id.
fn grow(rank: &Rank, ranks: i32, id: Option<&UniqueId>) -> i32 {
    let (mut new, id) = (0, id.map_or(std::ptr::null(), std::ptr::from_ref));
    grow_into(rank.comm, ranks, id, -1, &raw mut new, std::ptr::null_mut())
}

nccl_test!(grows_in_the_wrong_order_are_violations, ["STUB_NCCL_VERSION" = "23203"], {
    ranks(2, |rank| {
        if rank.rank == 0 {
            let (code, id) = rank.grow_id();
            assert_eq!(code, SUCCESS);
            assert_eq!(rank.grow_id().0, INVALID_USAGE);
            saw(&["before the last id was used"]);
            assert_eq!(grow(rank, 2, Some(&id)), INVALID_ARGUMENT, "not more ranks");
            nccl::assert_clean();
            assert_eq!(grow(rank, 3, None), INVALID_ARGUMENT);
            saw(&["with another id than its last one"]);
        }
        rank.meet();
        // No rank passes an id.
        assert_eq!(grow(rank, 3, None), INVALID_ARGUMENT);
        rank.meet();
        if rank.rank == 0 {
            saw(&["0 ranks have an id for a grow"]);
            assert_eq!(revoke(rank.comm, 0), SUCCESS);
            assert_eq!(revoke(rank.comm, 0), INVALID_ARGUMENT, "only once");
            assert_eq!(rank.grow_id().0, INVALID_USAGE);
            saw(&["ncclCommGetUniqueId on a communicator that is Revoked"]);
        }
        rank.meet();
        assert_eq!(abort(rank.comm), SUCCESS);
    });
});

nccl_test!(an_old_version_does_not_grow, ["STUB_NCCL_VERSION" = "22809"], {
    ranks(1, |rank| {
        assert_eq!(rank.grow_id().0, INVALID_USAGE);
        assert_eq!(grow(rank, 2, None), INVALID_USAGE);
        saw(&["ncclCommGetUniqueId", "ncclCommGrow"]);
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
});

fn flags_are_known(known: i32) {
    ranks(1, |rank| {
        let segment = rank.segment(SEGMENT);
        let register = |flags| {
            let mut window = 0;
            (window_register(rank.comm, segment, SEGMENT, &raw mut window, flags), window)
        };
        // NCCL_WIN_COLL_SYMMETRIC cannot be combined with NCCL_WIN_GIN_ONLY.
        for flags in [0x03, 0x04, 0x11] {
            let (code, window) = register(flags);
            if known & flags == flags {
                assert_eq!((code, window_deregister(rank.comm, window)), (SUCCESS, SUCCESS));
            } else {
                assert_eq!(code, INVALID_ARGUMENT);
                saw(&["has no window flags"]);
            }
        }
        if known & 0x04 != 0 {
            assert_eq!(register(0x05).0, INVALID_ARGUMENT);
            saw(&["a symmetric window with restrictions"]);
        }
        assert_eq!((destroy(rank.comm), memory_free(segment)), (SUCCESS, SUCCESS));
    });
    nccl::assert_clean();
}

nccl_test!(version_2_28_knows_no_window_flags, ["STUB_NCCL_VERSION" = "22809"], {
    flags_are_known(0x01);
});

nccl_test!(version_2_30_knows_strict_ordering, ["STUB_NCCL_VERSION" = "23007"], {
    flags_are_known(0x03);
});

nccl_test!(version_2_32_knows_gin_only, ["STUB_NCCL_VERSION" = "23203"], {
    flags_are_known(0x07);
});
