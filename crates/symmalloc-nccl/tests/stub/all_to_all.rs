//! Tests of all-to-all-v on the stubs: results, calls that fail, cached segments, and leak checks.

#[path = "../programs/all_to_all.rs"]
mod programs;

use cudarc::driver::DevicePtr;
use programs::{
    Rank, captured, counts, disagreements, equal_parts, known_splits, on_ranks, on_ranks_with, one_way, uneven_rows,
};
use std::fmt::Debug;
use std::path::Path;
use std::time::{Duration, Instant};
use stub_process::{Barrier, Library, cuda, is_night, nccl, nccl_test, scaled_to_load};
use symmalloc_agreement::TransportError;
use symmalloc_core::PoolConfig;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, GraphPool};
use symmalloc_nccl::{AllToAll, AllToAllError, CommunicatorBuilder, LookupError, Registration, Side, Splits};

nccl_test!(uneven_rows_of_any_type_arrive_as_the_splits_specify, {
    (1..=4).for_each(|ranks| drop(on_ranks(ranks, uneven_rows)));
    nccl::assert_clean();
});

nccl_test!(a_nonblocking_communicator_gives_the_same_rows, {
    on_ranks_with(2, CommunicatorBuilder::nonblocking, uneven_rows);
    nccl::assert_clean();
});

nccl_test!(without_splits_whole_buffers_are_split_equally, {
    on_ranks(3, equal_parts);
    nccl::assert_clean();
});

nccl_test!(ranks_may_have_nothing_to_send_or_nothing_at_all, {
    on_ranks(2, |it| {
        one_way(it);
        let all_to_all = it.all_to_all();
        let (none, mut nothing) = (it.zeros::<u64>(0), it.zeros::<u64>(0));
        all_to_all.run(&it.stream, &none, &mut nothing, 1, None).expect("an empty call is valid");
        all_to_all.run(&it.stream, &none, &mut nothing, 0, None).expect("an empty call is valid");
    });
    // Only rank 0 sends, and only the last rank receives.
    assert_eq!((nccl::calls("ncclSend"), nccl::calls("ncclRecv")), (1, 1), "empty calls submit nothing");
    nccl::assert_clean();
});

nccl_test!(a_rank_that_does_not_exchange_is_detected_at_the_deadline, {
    let deadline = |builder: CommunicatorBuilder| builder.deadline(scaled_to_load(Duration::from_millis(500)));
    let barrier = Barrier::new(2);
    on_ranks_with(2, deadline, |it| {
        let all_to_all = it.all_to_all();
        if it.rank == 0 {
            let late = all_to_all.exchange_splits(&[1, 2]).expect_err("rank 1 is missing");
            assert!(matches!(late, AllToAllError::Transport(TransportError::RankLost { rank: 1 })), "{late}");
            all_to_all.exchange_splits(&[1, 2]).expect_err("the communicator is gone");
        }
        barrier.wait();
    });
});

nccl_test!(with_checks_ranks_that_disagree_get_the_same_error, {
    on_ranks(3, disagreements);
    nccl::assert_clean();
});

nccl_test!(with_checks_a_refused_call_submits_nothing_on_any_rank, {
    on_ranks(2, |it| {
        let all_to_all = AllToAll::builder(&it.comm).check_calls().build().expect("the build should succeed");
        let rows: &[u64] = if it.rank == 0 { &[1, 2] } else { &[1, 1] };
        let splits = Splits::sending(rows).receiving(&[1, 1]);
        let (input, mut output) = (it.zeros::<u32>(4), it.zeros::<u32>(4));
        all_to_all
            .run(&it.stream, &input, &mut output, 1, &splits.expect("the splits are valid"))
            .expect_err("the ranks' calls differ");
    });
    assert_eq!((nccl::calls("ncclSend"), nccl::calls("ncclRecv"), cuda::calls("cuMemcpyDtoDAsync_v2")), (0, 0, 0));
    nccl::assert_clean();
});

nccl_test!(a_captured_call_sends_the_data_of_each_launch, {
    on_ranks(2, captured);
    nccl::assert_clean();
});

nccl_test!(captured_calls_are_not_compared, {
    on_ranks(2, |it| {
        let all_to_all = AllToAll::builder(&it.comm).check_calls().build().expect("the build should succeed");
        let (input, mut output) = (it.zeros::<u32>(2), it.zeros::<u32>(2));
        all_to_all.run(&it.stream, &input, &mut output, 1, None).expect("the ranks should exchange their splits");
        let graphs = GraphPool::new(it.registrar.allocator(), PoolConfig::default()).expect("there should be a pool");
        let capture = graphs.begin(&it.stream).expect("the capture should begin");
        all_to_all.run(&it.stream, &input, &mut output, 1, None).expect("the call should be captured");
        capture.end().expect("the capture should end");
    });
    assert_eq!(nccl::calls("ncclAllGather"), 4, "two from the registrars' sync, two from the first calls");
    nccl::assert_clean();
});

/// Sends `SENT` from a stream that is blocked, and writes to both buffers on the streams to which they belong. The exchange comes first.
fn buffers_are_reused_after_the_exchange() {
    const LEN: usize = 1 << 10;
    const SENT: u8 = 5;
    const LATER: u8 = 9;
    for is_registered in [true, false] {
        on_ranks(2, |it| {
            let all_to_all = AllToAll::new(&it.comm).expect("the build should succeed");
            let other = it.comm.device().context().new_stream().expect("the driver should create a stream");
            if is_registered {
                it.registrar.allocator().register_stream(&other).expect("the stream should be registered");
            }
            let (mut input, mut output) = (it.buffer::<u8>(&[SENT; LEN]), it.zeros::<u8>(LEN));
            let mut copy = it.zeros::<u8>(LEN);
            it.stream.synchronize().expect("the work should complete");
            let work = cuda::hold(other.cu_stream() as u64);
            all_to_all.run(&other, &input, &mut output, 1, None).expect("the work should be submitted");
            // The guards of these calls order them after the exchange.
            it.stream.memcpy_htod(&[LATER; LEN], &mut input).expect("the work should be submitted");
            it.stream.memcpy_dtod(&output, &mut copy).expect("the work should be submitted");
            it.stream.memcpy_htod(&[LATER; LEN], &mut output).expect("the work should be submitted");
            cuda::advance(it.stream.cu_stream() as u64);
            drop(work);
            // Work of this rank's stream takes effect before the exchange, unless it waits.
            cuda::advance(it.stream.cu_stream() as u64);
            it.comm.synchronize(&other).expect("both ranks take part");
            assert_eq!(it.read(&copy), [SENT; LEN], "registered: {is_registered}");
            assert_eq!((it.read(&input), it.read(&output)), (vec![LATER; LEN], vec![LATER; LEN]));
        });
    }
    nccl::assert_clean();
}

nccl_test!(buffers_of_an_exchange_are_reused_after_it, {
    buffers_are_reused_after_the_exchange();
});

nccl_test!(buffers_of_an_exchange_are_reused_after_it_on_a_lazy_device, ["STUB_LAZY" = "1"], {
    buffers_are_reused_after_the_exchange();
});

nccl_test!(splits_that_are_known_or_repeated_cost_no_exchange, {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let counts = counts(3, it.ranks);
        let exchanged = all_to_all.exchange_splits(&counts[it.rank]).expect("the ranks should exchange their splits");
        let known = known_splits(&counts, it.rank);
        assert_eq!((exchanged.input(), exchanged.output()), (known.input(), known.output()));
        assert_eq!(exchanged.rows_between(1, 0), Some(counts[1][0]));
        for seed in 0..10 {
            it.round::<u32>(&all_to_all, seed, &exchanged, 2);
            it.round::<u32>(&all_to_all, seed, &known, 2);
        }
    });
    assert_eq!(nccl::calls("ncclAllGather"), 4, "two from the registrars' sync, two from the exchange");
    nccl::assert_clean();
});

nccl_test!(invalid_calls_are_refused_before_anything_is_submitted, {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let splits = Splits::sending(&[2, 3]).receiving(&[2, 3]).expect("the splits are valid");
        let splits = if it.rank == 0 {
            splits
        } else {
            Splits::sending(&[3, 2]).receiving(&[3, 2]).expect("the splits are valid")
        };
        let (input, mut output) = (it.buffer::<u32>(&[1; 10]), it.zeros::<u32>(10));
        let mut refused =
            |splits: &Splits, row| all_to_all.run(&it.stream, &input, &mut output, row, splits).expect_err("refused");
        assert!(matches!(
            refused(&splits, 3),
            AllToAllError::BufferTooShort { side: Side::Input, rows: 5, row_elements: 3, len: 10 }
        ));
        let other = Splits::sending(&[1]).receiving(&[1]).expect("the splits are valid");
        assert_eq!(refused(&other, 1), AllToAllError::SplitCount { given: 1, ranks: 2 });
        let other = Splits::sending(&[1, 1]).receiving(&[2, 2]).expect("the splits are valid");
        assert_eq!(refused(&other, 1), AllToAllError::OwnPart { rank: it.rank, sent: 1, received: 2 });
        let uneven = all_to_all.run(&it.stream, &input, &mut output, 3, None);
        assert!(matches!(uneven, Err(AllToAllError::Uneven { ranks: 2, row_elements: 3, .. })));
        assert_eq!(
            all_to_all.exchange_splits(&[1, 2, 3]),
            Err(AllToAllError::SplitCount { given: 3, ranks: 2 }),
            "the call fails on all ranks"
        );
        // SAFETY: the memory is not accessed while two buffers refer to it.
        let mut twice = unsafe { it.stream.upgrade_device_ptr::<u32>(input.device_ptr(&it.stream).0 + 16, 6) };
        let overlap = all_to_all.run(&it.stream, &input, &mut twice, 1, &splits);
        assert!(matches!(overlap, Err(AllToAllError::Overlap { input_bytes: 20, output_bytes: 20, .. })));
        std::mem::forget(twice);
    });
    assert_eq!((nccl::calls("ncclSend"), nccl::calls("ncclRecv"), cuda::calls("cuMemcpyDtoDAsync_v2")), (0, 0, 0));
    nccl::assert_clean();
});

nccl_test!(a_rank_with_invalid_splits_is_reported_on_the_others, {
    on_ranks(3, |it| {
        let all_to_all = it.all_to_all();
        let rows: &[u64] = if it.rank == 1 { &[u64::MAX, 1, 0] } else { &[1, 2, 3] };
        let refused = all_to_all.exchange_splits(rows).expect_err("refused");
        match it.rank {
            1 => assert!(matches!(refused, AllToAllError::Splits(_)), "{refused}"),
            _ => assert_eq!(refused, AllToAllError::Refused { rank: 1 }),
        }
        all_to_all.exchange_splits(&[1, 2, 3]).expect("all ranks can continue");
    });
    nccl::assert_clean();
});

nccl_test!(unregistered_memory_is_refused_if_registration_is_required, {
    on_ranks(2, |it| {
        let (strict, any) = (it.all_to_all(), AllToAll::new(&it.comm).expect("the build should succeed"));
        let plain = CudaAllocator::new(it.comm.device(), Default::default()).expect("the allocator should be created");
        let splits = Splits::sending(&[1, 1]).receiving(&[1, 1]).expect("the splits are valid");
        let (input, mut output) =
            (it.zeros::<u32>(2), plain.alloc_zeroed::<u32>(&it.stream, 2).expect("the allocation should succeed"));
        let refused = strict.run(&it.stream, &input, &mut output, 1, &splits).expect_err("refused");
        assert!(
            matches!(
                refused,
                AllToAllError::NotRegistered { side: Side::Output, error: LookupError::UnknownAddress { .. } }
            ),
            "{refused}"
        );
        any.run(&it.stream, &input, &mut output, 1, &splits).expect("NCCL moves any memory");
        assert!(any.segments().is_empty());
    });
    nccl::assert_clean();
});

nccl_test!(a_segment_is_cached_until_the_registrar_invalidates_it, {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let pool = it
            .registrar
            .allocator()
            .create_pool(PoolConfig::builder().fixed().symmetric(true).build().expect("the configuration is valid"));
        let pool = pool.expect("there should be a pool");
        it.registrar.attach(&it.comm, &[pool.id()], Registration::Windows).expect("the pool should be attachable");
        let allocator = it.registrar.allocator().with_pool(&pool);
        let splits = Splits::sending(&[8, 8]).receiving(&[8, 8]).expect("the splits are valid");
        let input = it.zeros::<u32>(16);
        let round = |output: &mut DeviceBuffer<u32>| all_to_all.run(&it.stream, &input, output, 1, &splits);

        let mut output = allocator.alloc_zeroed::<u32>(&it.stream, 16).expect("the allocation should succeed");
        let refused = round(&mut output).expect_err("refused");
        assert!(
            matches!(refused, AllToAllError::NotRegistered { error: LookupError::NotRegistered { .. }, .. }),
            "{refused}"
        );
        it.registrar.sync(&[&it.comm]).expect("the ranks should agree");
        for _ in 0..10 {
            round(&mut output).expect("the ranks should exchange their splits");
        }
        let (first, lasting) = (
            it.registrar.key_of(&output).expect("the buffer lies in a live segment"),
            it.registrar.key_of(&input).expect("the buffer lies in a live segment"),
        );
        let mut both = [first, lasting];
        both.sort_unstable();
        assert_eq!(all_to_all.segments(), both);

        // The segment is released while the last call may still be running.
        drop(output);
        allocator.core().trim_pool(pool.id()).expect("the trim should succeed");
        it.registrar.sync(&[&it.comm]).expect("the ranks should agree");
        let mut output = allocator.alloc_zeroed::<u32>(&it.stream, 16).expect("the allocation should succeed");
        it.registrar.sync(&[&it.comm]).expect("the ranks should agree");
        round(&mut output).expect("the ranks should exchange their splits");
        let second = it.registrar.key_of(&output).expect("the buffer lies in a live segment");
        assert_ne!(first, second, "a key is never reused, even at the same address");
        let mut both = [second, lasting];
        both.sort_unstable();
        assert_eq!(all_to_all.segments(), both);
    });
    nccl::assert_clean();
});

nccl_test!(buffers_may_be_dropped_while_the_rows_wait_for_the_other_rank, {
    let barrier = Barrier::new(2);
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let other = it.comm.device().context().new_stream().expect("the driver should create a stream");
        it.allocator.register_stream(&other).expect("the stream should be registered");
        let splits = Splits::sending(&[4, 4]).receiving(&[4, 4]).expect("the splits are valid");
        let mut output = it.zeros::<u32>(8);
        for round in 1..=20_u32 {
            let input = it.buffer(&[round; 8]);
            let place = input.placement();
            if it.rank == 1 {
                barrier.wait();
            }
            all_to_all.run(&other, &input, &mut output, 1, &splits).expect("the ranks should exchange their splits");
            drop(input);
            // Rank 1 has not sent anything yet, so rank 0's rows are still in the memory that `next` overwrites with zeros.
            let next = it.zeros::<u32>(8);
            assert_eq!(next.placement(), place, "the same memory");
            if it.rank == 0 {
                barrier.wait();
            }
            assert_eq!(it.read(&output), [round; 8]);
            assert_eq!(it.read(&next), [0; 8]);
        }
        assert_eq!(it.allocator.drop_errors().count, 0);
    });
    nccl::assert_clean();
});

/// Number of calls before resources are first counted.
const WARM_UP_CALLS: u64 = 1_000;

/// Returns the resources of the process, the stubs and the crates. Excludes events, whose number varies with the watchdog, and
/// the size of pinned memory, which depends on how threads interleave.
fn holdings(it: &Rank, all_to_all: &AllToAll) -> impl Debug + PartialEq {
    let stats = it.registrar.stats();
    let registered = ["ncclCommWindowRegister", "ncclCommRegister", "ncclCommWindowDeregister", "ncclCommDeregister"];
    (
        cuda::Live { events: 0, host_bytes: 0, ..cuda::live() },
        nccl::live(),
        registered.map(nccl::calls),
        stats,
        it.allocator.stats().segments_born,
        all_to_all.segments(),
        open_files(),
    )
}

/// Returns the number of open files of this process, without the directory that the other rank's thread may be reading.
fn open_files() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("/proc should be available").flatten();
    files.filter_map(|file| std::fs::read_link(file.path()).ok()).filter(|to| !to.starts_with("/proc")).count()
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("/proc should be available");
    let pages = statm.split_whitespace().nth(1).expect("the second field");
    4096 * pages.parse::<u64>().expect("it should be a number")
}

nccl_test!(many_calls_with_changing_splits_leak_nothing, {
    let barrier = Barrier::new(2);
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let call = |seed| {
            let splits = all_to_all
                .exchange_splits(&counts(seed, it.ranks)[it.rank])
                .expect("the ranks should exchange their splits");
            it.round::<u32>(&all_to_all, seed, &splits, 1 + seed as usize % 3);
        };
        let look = || {
            barrier.wait();
            let seen = (holdings(it, &all_to_all), resident_bytes());
            barrier.wait();
            seen
        };
        let half = if is_night() { 50_000 } else { 10_000 };
        let marks = [0, WARM_UP_CALLS, WARM_UP_CALLS + half, WARM_UP_CALLS + 2 * half];
        let seen: Vec<_> = marks
            .windows(2)
            .map(|between| {
                (between[0]..between[1]).for_each(call);
                look()
            })
            .collect();
        assert_eq!(seen[1].0, seen[0].0, "after half of the calls");
        assert_eq!(seen[2].0, seen[0].0, "after all calls");
        // This detects a leak of 20 bytes per call, and at night of 4 bytes.
        assert!(seen[2].1 < seen[1].1 + 200_000, "{} and {} resident bytes", seen[1].1, seen[2].1);
        assert_eq!(it.allocator.drop_errors().count, 0);
    });
    nccl::assert_clean();
});

#[path = "../../examples/moe_dispatch/main.rs"]
#[allow(dead_code, unreachable_pub, reason = "a separate program")]
mod moe_dispatch;

fn small_model() -> moe_dispatch::Options {
    moe_dispatch::Options { steps: 24, tokens: 40, hidden: 7, experts: 3, ..Default::default() }
}

nccl_test!(moe_dispatch_is_correct_with_a_thread_for_each_device, {
    let reports = moe_dispatch::run(&moe_dispatch::Options { ranks: Some(4), ..small_model() })
        .expect("the example should succeed");
    assert_eq!(reports.len(), 4);
    print!("{}", moe_dispatch::Table(&reports));
    assert!(reports.iter().all(moe_dispatch::Report::is_right));
    nccl::assert_clean();
});

nccl_test!(moe_dispatch_is_correct_with_the_processes_of_torchrun, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let folder = folder.path().to_string_lossy();
    let variables = [
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29731"),
        ("STUB_TEST_FOLDER", &*folder),
    ];
    let ended = stub_process::ranks(2, &variables, |rank| {
        for variable in ["RANK", "LOCAL_RANK"] {
            // SAFETY: the process has no other thread yet that reads its environment.
            unsafe { std::env::set_var(variable, rank.to_string()) };
        }
        let reports = moe_dispatch::run(&small_model()).expect("the example should succeed");
        assert!(reports.len() == 1 && reports[0].is_right(), "{}", moe_dispatch::Table(&reports));
        nccl::assert_clean();
        // The stub's job state lives in the process of rank 0, which therefore exits last.
        let done = Path::new(&std::env::var_os("STUB_TEST_FOLDER").expect("set for every rank")).join("done");
        if rank == 1 {
            std::fs::write(&done, "").expect("the write should succeed");
        }
        let since = Instant::now();
        while !done.exists() && since.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(ended.iter().all(|rank| rank.is_success), "{ended:#?}");
});

nccl_test!(moe_dispatch_reports_a_missing_device, ["STUB_NO_DEVICE" = "1"], {
    let error = moe_dispatch::run(&small_model()).expect_err("there is no device");
    assert!(error.to_string().contains("nvidia-smi"), "{error}");
});

nccl_test!(moe_dispatch_reports_a_missing_libnccl, Library::Missing, [], {
    let error = moe_dispatch::run(&small_model()).expect_err("there is no library");
    assert!(error.to_string().contains("SYMMALLOC_NCCL_LIBRARY"), "{error}");
});
