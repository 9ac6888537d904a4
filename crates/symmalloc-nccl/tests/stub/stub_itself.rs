//! The stub of libnccl: right where NCCL is right, wrong where it is wrong, and it sees what nobody should do.

use crate::raw::{F32, MIB, Rank, SUCCESS, ranks, window_deregister};
use crate::raw::{all_gather, destroy, memory_free, reduce_scatter};
use stub_process::{nccl, nccl_test};

const COUNT: usize = 1000;

/// What rank `rank` puts in.
fn input(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (rank * 10_000 + index) as f32).collect()
}

fn sum(ranks: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (0..ranks).map(|rank| (rank * 10_000 + index) as f32).sum()).collect()
}

nccl_test!(collectives_compute_what_they_should, {
    for count in [1, 2, 3, 8] {
        ranks(count, |rank| {
            let segment = rank.segment(2 * MIB);
            let out = segment + MIB as u64;
            rank.write(segment, &input(rank.rank));
            assert_eq!(rank.sum(segment, out, COUNT), SUCCESS);
            assert_eq!(rank.read(out, COUNT), sum(rank.ranks));
            assert_eq!(all_gather(segment, out, COUNT, F32, rank.comm, rank.raw_stream()), SUCCESS);
            assert_eq!(rank.read(out, COUNT * rank.ranks), (0..rank.ranks).flat_map(input).collect::<Vec<_>>());
            let part = COUNT / rank.ranks;
            assert_eq!(reduce_scatter(segment, out, part, F32, 0, rank.comm, rank.raw_stream()), SUCCESS);
            assert_eq!(rank.read(out, part), sum(rank.ranks)[rank.rank * part..][..part]);
            assert_eq!(destroy(rank.comm), SUCCESS);
            assert_eq!(memory_free(segment), SUCCESS);
        });
    }
    nccl::assert_clean();
    assert_eq!(nccl::live(), nccl::Live::default());
});

/// All-reduce between two windows; `skew` moves rank 1's output.
fn reduce_in_windows(rank: &Rank, skew: u64) -> Vec<f32> {
    let (from, to) = (rank.segment(2 * MIB), rank.segment(2 * MIB));
    let windows = [rank.window(from, 2 * MIB), rank.window(to, 2 * MIB)];
    assert!(windows.iter().all(|(code, window)| *code == SUCCESS && *window != 0));
    let out = to + 4096 + if rank.rank == 1 { skew } else { 0 };
    rank.write(from, &input(rank.rank));
    rank.write(out, &vec![-1.0; COUNT]);
    rank.meet();
    assert_eq!(rank.sum(from, out, COUNT), SUCCESS);
    let answer = rank.read(out, COUNT);
    for (_, window) in windows {
        assert_eq!(window_deregister(rank.comm, window), SUCCESS);
    }
    assert_eq!((memory_free(from), memory_free(to)), (SUCCESS, SUCCESS));
    assert_eq!(destroy(rank.comm), SUCCESS);
    answer
}

nccl_test!(windows_reduce_right_at_equal_places_and_wrong_without_a_word_at_others, {
    ranks(4, |rank| assert_eq!(reduce_in_windows(rank, 0), sum(4)));
    nccl::assert_clean();
    ranks(4, |rank| assert_ne!(reduce_in_windows(rank, 8192), sum(4)));
    assert!(nccl::violations()[0].contains("places that differ"), "{:?}", nccl::violations());
    assert_eq!(nccl::live(), nccl::Live::default());
    assert_eq!(stub_process::cuda::live().device_bytes, 0);
});
