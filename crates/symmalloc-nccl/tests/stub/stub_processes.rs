//! Tests of the stub of libnccl across processes.

use crate::raw::{MIB, Rank, SUCCESS, UniqueId, async_error, destroy, unique_id, window_deregister};
use crate::stub_itself::{COUNT, input, sum};
use std::path::PathBuf;
use std::sync::Arc;
use stub_process::{Barrier, nccl, nccl_test, ranks, until, until_some};

/// Receives the unique id from rank 0 through a file.
fn exchange(rank: usize, file: &str) -> UniqueId {
    let file = PathBuf::from(file);
    if rank == 0 {
        let id = unique_id();
        let new = file.with_extension("new");
        std::fs::write(&new, id.0).expect("the write should succeed");
        std::fs::rename(new, file).expect("the rename should succeed");
        return id;
    }
    let bytes = until_some(|| std::fs::read(&file).ok());
    UniqueId(bytes.try_into().expect("128 bytes"))
}

fn join(rank: usize, count: usize) -> Rank {
    let file = std::env::var("STUB_TEST_ID").expect("set for every rank");
    Rank::join(count, exchange(rank, &file), rank, &Arc::new(Barrier::new(1)))
}

/// All-reduces between windows of several processes.
fn reduce_in_windows(rank: &Rank, skew: u64) -> Vec<f32> {
    let (from, to) = (rank.segment(2 * MIB), rank.segment(2 * MIB));
    let windows = [rank.window(from, 2 * MIB), rank.window(to, 2 * MIB)];
    let out = to + 4096 + if rank.rank == 1 { skew } else { 0 };
    rank.write(from, &input(rank.rank));
    rank.write(out, &[-1.0f32; COUNT]);
    let barrier = rank.segment(2 * MIB);
    assert_eq!(rank.sum(barrier, barrier, 1), SUCCESS);
    assert_eq!(rank.sum(from, out, COUNT), SUCCESS);
    let answer = rank.read::<f32>(out, COUNT);
    for (code, window) in windows {
        assert_eq!((code, window_deregister(rank.comm, window)), (SUCCESS, SUCCESS));
    }
    answer
}

nccl_test!(processes_reduce_as_threads_do, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    for (name, skew) in [("right", 0), ("wrong", 8192)] {
        let file = folder.path().join(name);
        let outputs =
            ranks(4, &[("STUB_TEST_ID", &file.to_string_lossy()), ("STUB_TEST_SKEW", &format!("{skew}"))], |rank| {
                let skew =
                    std::env::var("STUB_TEST_SKEW").expect("it should be set").parse().expect("it should be a number");
                let rank = join(rank, 4);
                assert_eq!(reduce_in_windows(&rank, skew) == sum(4), skew == 0);
                assert_eq!(destroy(rank.comm), SUCCESS);
                if skew == 0 {
                    nccl::assert_clean();
                }
            });
        for output in outputs {
            assert!(output.is_success, "{name}, rank {}:\n{}", output.rank, output.text);
        }
    }
});

nccl_test!(a_process_that_ends_is_a_remote_error_for_the_others, {
    let folder = tempfile::tempdir().expect("a folder should be created");
    let file = folder.path().join("id");
    let outputs = ranks(3, &[("STUB_TEST_ID", &file.to_string_lossy())], |rank| {
        let rank = join(rank, 3);
        if rank.rank == 1 {
            std::process::exit(7);
        }
        until(|| async_error(rank.comm) != SUCCESS);
        assert_eq!(async_error(rank.comm), 6);
    });
    assert_eq!(outputs.iter().map(|output| output.is_success).collect::<Vec<_>>(), [true, false, true], "{outputs:?}");
});

nccl_test!(ranks_meet_at_a_named_address, {
    // The address is unique, because several runs of this test can overlap.
    let address = format!("stub-test-{}:1", std::process::id());
    let outputs = ranks(3, &[("NCCL_COMM_ID", &address)], |rank| {
        for _ in 0..3 {
            let rank = Rank::join(3, unique_id(), rank, &Arc::new(Barrier::new(1)));
            let segment = rank.segment(2 * MIB);
            rank.write(segment, &input(rank.rank));
            assert_eq!(rank.sum(segment, segment, COUNT), SUCCESS);
            assert_eq!(rank.read::<f32>(segment, COUNT), sum(3));
            assert_eq!(destroy(rank.comm), SUCCESS);
        }
    });
    for output in outputs {
        assert!(output.is_success, "rank {}:\n{}", output.rank, output.text);
    }
});
