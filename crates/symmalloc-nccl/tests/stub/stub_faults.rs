//! Tests of the stub of libnccl under faults: ranks that are missing, stop or die, and calls that fail.

use crate::raw::{IN_PROGRESS, MIB, Rank, SUCCESS, UniqueId, abort, async_error, destroy, init, memory_free, ranks};
use crate::raw::{all_reduce, revoke, unique_id, window_deregister};
use crate::stub_itself::{COUNT, input, sum};
use cudarc::driver::sys::{self, CUresult};
use stub_process::{ExitOnPanic, cuda, nccl, nccl_test, until, until_some};

const REMOTE_ERROR: i32 = 6;
const INTERNAL_ERROR: i32 = 3;

fn query(event: &cudarc::driver::CudaEvent) -> CUresult {
    // SAFETY: the event is alive.
    unsafe { sys::cuEventQuery(event.cu_event()) }
}

nccl_test!(a_collective_whose_peer_never_arrives_never_completes_and_blocks_no_thread, {
    ranks(2, |rank| {
        let segment = rank.segment(2 * MIB);
        if rank.rank == 0 {
            rank.write(segment, &input(0));
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
            let event = rank.stream.record_event(None).expect("the event should be recorded");
            for _ in 0..10 {
                assert_eq!(query(&event), CUresult::CUDA_ERROR_NOT_READY);
                assert_eq!(async_error(rank.comm), SUCCESS);
            }
            assert_eq!(abort(rank.comm), SUCCESS);
            until(|| query(&event) == CUresult::CUDA_SUCCESS);
            assert_eq!(rank.read::<f32>(segment, COUNT), input(0), "aborted: nothing was written");
        }
        rank.meet();
    });
    nccl::assert_clean();
});

nccl_test!(work_after_a_collective_waits_for_it_even_on_other_streams, {
    ranks(2, |rank| {
        let segment = rank.segment(2 * MIB);
        rank.write(segment, &input(rank.rank));
        let other = rank.stream.context().new_stream().expect("the driver should create a stream");
        if rank.rank == 0 {
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
            other
                .wait(&rank.stream.record_event(None).expect("the event should be recorded"))
                .expect("the work should be submitted");
            let copy = segment + MIB as u64;
            // SAFETY: the segment contains both, and they do not overlap.
            unsafe { cudarc::driver::result::memcpy_dtod_async(copy, segment, 4 * COUNT, other.cu_stream()) }
                .expect("the work should be submitted");
            assert!(!cuda::advance(other.cu_stream() as u64), "the peer has not joined yet");
            rank.meet();
            other.synchronize().expect("the stream should complete");
            assert_eq!(rank.read::<f32>(copy, COUNT), sum(2));
        } else {
            rank.meet();
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
        }
        rank.stream.synchronize().expect("the stream should complete");
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

nccl_test!(a_rank_that_hangs_in_a_registration_is_freed_by_a_revoke_or_an_abort, {
    for ends in [abort as fn(u64) -> i32, |comm| revoke(comm, 0)] {
        nccl::hang("ncclCommWindowRegister", Some(1), 1);
        ranks(2, |rank| {
            let segment = rank.segment(2 * MIB);
            std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                let caller = scope.spawn(|| rank.window(segment, 2 * MIB));
                // Both threads are inside the call: rank 0 waits for rank 1, which hangs.
                let calls = || nccl::calls("ncclCommWindowRegister");
                until(|| calls() != 0 && calls() % 2 == 0);
                rank.meet();
                assert_eq!(ends(rank.comm), SUCCESS);
                let (code, window) = caller.join().expect("the call should return");
                assert!([INTERNAL_ERROR, REMOTE_ERROR].contains(&code), "{code}");
                assert_eq!(window, 0);
            });
            rank.meet();
            let _already = abort(rank.comm);
            assert_eq!(memory_free(segment), SUCCESS);
        });
        nccl::forget();
    }
    assert_eq!(cuda::live().device_bytes, 0, "the registration releases its memory");
});

nccl_test!(a_dead_rank_is_a_remote_error_for_the_living, {
    ranks(3, |rank| {
        let segment = rank.segment(2 * MIB);
        assert_eq!(rank.window(segment, 2 * MIB).0, SUCCESS);
        rank.meet();
        if rank.rank == 2 {
            nccl::kill(2);
        }
        rank.meet();
        if rank.rank < 2 {
            assert_eq!(async_error(rank.comm), REMOTE_ERROR);
            let other = rank.segment(2 * MIB);
            assert_eq!(rank.window(other, 2 * MIB), (REMOTE_ERROR, 0));
            assert_eq!(abort(rank.comm), SUCCESS);
        }
    });
    nccl::assert_clean();
});

/// Joins without blocking.
fn join_nonblocking(id: UniqueId, rank: usize) -> u64 {
    let (code, comm) = init(2, id, rank, false);
    assert_eq!(code, IN_PROGRESS);
    comm
}

fn settle(comm: u64) -> i32 {
    until_some(|| Some(async_error(comm)).filter(|code| *code != IN_PROGRESS))
}

nccl_test!(a_nonblocking_communicator_is_in_progress_until_it_is_queried, {
    let id = unique_id();
    std::thread::scope(|scope| {
        let _exit = ExitOnPanic;
        for rank in 0..2 {
            scope.spawn(move || {
                let context = cudarc::driver::CudaContext::new(rank).expect("the stub should have a device");
                let stream = context.new_stream().expect("the driver should create a stream");
                let comm = join_nonblocking(id, rank);
                assert_eq!(settle(comm), SUCCESS);
                let raw = stream.cu_stream() as u64;
                let mut base = 0;
                assert_eq!(crate::raw::memory_allocate(&raw mut base, 2 * MIB), SUCCESS);
                // NCCL's thread starts late, so an event that is recorded before the first query completes immediately.
                assert_eq!(all_reduce(base, base, COUNT, 7, 0, comm, raw), IN_PROGRESS);
                let early = stream.record_event(None).expect("the event should be recorded");
                until(|| query(&early) == CUresult::CUDA_SUCCESS);
                assert_eq!(async_error(comm), IN_PROGRESS);
                assert_eq!(settle(comm), SUCCESS);
                stream.synchronize().expect("the stream should complete");
                let mut window = 1;
                assert_eq!(crate::raw::window_register(comm, base, 2 * MIB, &raw mut window, 1), IN_PROGRESS);
                assert_eq!(settle(comm), SUCCESS);
                assert!(window > 1, "the window is written before the call completes");
                assert_eq!(window_deregister(comm, window), SUCCESS);
                assert_eq!(destroy(comm), SUCCESS);
            });
        }
    });
    nccl::assert_clean();
});

nccl_test!(a_hanging_init_ends_when_the_fault_is_removed, {
    nccl::hang("ncclCommInitRankConfig", Some(0), 1);
    let id = unique_id();
    let _context = cudarc::driver::CudaContext::new(0).expect("the stub should have a device");
    std::thread::scope(|scope| {
        let _exit = ExitOnPanic;
        let hung = scope.spawn(|| init(2, id, 0, true).0);
        until(|| nccl::calls("ncclCommInitRankConfig") != 0);
        until(|| {
            nccl::heal();
            hung.is_finished()
        });
        assert_eq!(hung.join().expect("the call should return"), 2);
    });
});

nccl_test!(thousands_of_jobs_run_in_one_process, {
    for seed in 0..1000 {
        ranks(2 + seed % 3, |rank: &Rank| {
            let segment = rank.segment(2 * MIB);
            let (code, window) = rank.window(segment, 2 * MIB);
            assert_eq!(code, SUCCESS);
            assert_eq!(rank.sum(segment, segment, 16), SUCCESS);
            rank.stream.synchronize().expect("the stream should complete");
            assert_eq!(window_deregister(rank.comm, window), SUCCESS);
            assert_eq!((memory_free(segment), destroy(rank.comm)), (SUCCESS, SUCCESS));
        });
    }
    nccl::assert_clean();
    assert_eq!((nccl::live(), cuda::live().device_bytes), (nccl::Live::default(), 0));
});
