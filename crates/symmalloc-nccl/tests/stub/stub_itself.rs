//! Tests of the stub of libnccl: its results are correct where NCCL's are, and wrong where NCCL's are.

use crate::raw::{F32, MIB, Rank, SUCCESS, all_reduce, ranks, split_into, user_rank_into, window_deregister};
use crate::raw::{
    all_gather, broadcast, destroy, group_end, group_start, memory_free, receive, reduce, reduce_scatter, send,
};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use stub_process::{nccl, nccl_test};

pub(crate) const COUNT: usize = 1000;
const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// Returns the input of a rank.
pub(crate) fn input(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (rank * 10_000 + index) as f32).collect()
}

/// Returns the sum of the inputs of all ranks.
pub(crate) fn sum(ranks: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (0..ranks).map(|rank| (rank * 10_000 + index) as f32).sum()).collect()
}

nccl_test!(collectives_compute_correct_results, {
    for count in [1, 2, 3, 8] {
        ranks(count, |rank| {
            let segment = rank.segment(2 * MIB);
            let out = segment + MIB as u64;
            let stream = rank.raw_stream();
            rank.write(segment, &input(rank.rank));
            assert_eq!(rank.sum(segment, out, COUNT), SUCCESS);
            assert_eq!(rank.read::<f32>(out, COUNT), sum(count));
            assert_eq!(all_gather(segment, out, COUNT, F32, rank.comm, stream), SUCCESS);
            assert_eq!(rank.read::<f32>(out, COUNT * count), (0..count).flat_map(input).collect::<Vec<_>>());
            let part = COUNT / count;
            assert_eq!(reduce_scatter(segment, out, part, F32, 0, rank.comm, stream), SUCCESS);
            assert_eq!(rank.read::<f32>(out, part), sum(count)[rank.rank * part..][..part]);
            let last = count as i32 - 1;
            assert_eq!(broadcast(segment, out, COUNT, F32, last, rank.comm, stream), SUCCESS);
            assert_eq!(rank.read::<f32>(out, COUNT), input(count - 1));
            rank.write(out, &[-1.0f32; COUNT]);
            assert_eq!(reduce(segment, out, COUNT, F32, 0, last, rank.comm, stream), SUCCESS);
            let expected = if rank.rank == count - 1 { sum(count) } else { vec![-1.0; COUNT] };
            assert_eq!(rank.read::<f32>(out, COUNT), expected);
            assert_eq!(destroy(rank.comm), SUCCESS);
            assert_eq!(memory_free(segment), SUCCESS);
        });
    }
    nccl::assert_clean();
    assert_eq!(nccl::live(), nccl::Live::default());
});

nccl_test!(every_type_and_operation_reduces, {
    type Bytes = fn(u8) -> Vec<u8>;
    // Each type has a function that returns the bytes of a small number. Sum, product, max, min and average of 1 and 3 are 4, 3, 3, 1 and
    // 2.
    let types: [(i32, Bytes); 10] = [
        (0, |value| (value as i8).to_ne_bytes().to_vec()),
        (1, |value| value.to_ne_bytes().to_vec()),
        (2, |value| i32::from(value).to_ne_bytes().to_vec()),
        (3, |value| u32::from(value).to_ne_bytes().to_vec()),
        (4, |value| i64::from(value).to_ne_bytes().to_vec()),
        (5, |value| u64::from(value).to_ne_bytes().to_vec()),
        (6, |value| [0u16, 0x3c00, 0x4000, 0x4200, 0x4400][usize::from(value)].to_ne_bytes().to_vec()),
        (7, |value| f32::from(value).to_ne_bytes().to_vec()),
        (8, |value| f64::from(value).to_ne_bytes().to_vec()),
        (9, |value| ((f32::from(value).to_bits() >> 16) as u16).to_ne_bytes().to_vec()),
    ];
    ranks(2, |rank| {
        let segment = rank.segment(2 * MIB);
        let out = segment + MIB as u64;
        for (data_type, bytes) in types {
            for (op, expected) in [(0, 4), (1, 3), (2, 3), (3, 1), (4, 2)] {
                rank.write(segment, &bytes([1, 3][rank.rank]));
                assert_eq!(all_reduce(segment, out, 1, data_type, op, rank.comm, rank.raw_stream()), SUCCESS);
                let expected = bytes(expected);
                assert_eq!(rank.read::<u8>(out, expected.len()), expected, "type {data_type}, operation {op}");
            }
        }
        assert_eq!(
            all_reduce(segment, out, 1, 10, 0, rank.comm, rank.raw_stream()),
            4,
            "eight-bit floats cannot be reduced"
        );
        assert_eq!(
            all_gather(segment, out, 7, 10, rank.comm, rank.raw_stream()),
            SUCCESS,
            "eight-bit floats can be copied"
        );
        rank.stream.synchronize().expect("the stream completes");
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

nccl_test!(sends_and_receives_of_a_group_run_together, {
    ranks(4, |rank| {
        let segment = rank.segment(2 * MIB);
        let out = segment + MIB as u64;
        rank.write(segment, &input(rank.rank));
        assert_eq!(group_start(), SUCCESS);
        for peer in 0..4 {
            // Each rank receives parts of a different length.
            let (to, from) = (10 * (peer + 1), 10 * (rank.rank + 1));
            assert_eq!(send(segment, to, F32, peer as i32, rank.comm, rank.raw_stream()), SUCCESS);
            let at = out + 4096 * peer as u64;
            assert_eq!(receive(at, from, F32, peer as i32, rank.comm, rank.raw_stream()), SUCCESS);
        }
        assert_eq!(group_end(), SUCCESS);
        for peer in 0..4 {
            let got: Vec<f32> = rank.read::<f32>(out + 4096 * peer as u64, 10 * (rank.rank + 1));
            assert_eq!(got, input(peer)[..10 * (rank.rank + 1)]);
        }
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

nccl_test!(a_split_orders_ranks_by_key, {
    ranks(6, |rank| {
        let mut part = 1;
        let color = if rank.rank == 5 { -1 } else { rank.rank as i32 % 2 };
        assert_eq!(split_into(rank.comm, color, -(rank.rank as i32), &raw mut part, std::ptr::null_mut()), SUCCESS);
        if color < 0 {
            assert_eq!(part, 0);
        } else {
            let mut own = -1;
            assert_eq!(user_rank_into(part, &raw mut own), SUCCESS);
            let size = [3, 2][color as usize];
            assert_eq!(own as usize, size - 1 - rank.rank / 2, "ranks 0 and 1 have the highest keys");
            let segment = rank.segment(2 * MIB);
            rank.write(segment, &[1.0f32]);
            assert_eq!(all_reduce(segment, segment, 1, F32, 0, part, rank.raw_stream()), SUCCESS);
            assert_eq!(rank.read::<f32>(segment, 1), [size as f32]);
            assert_eq!(destroy(part), SUCCESS);
        }
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
    assert_eq!(nccl::live(), nccl::Live::default());
});

nccl_test!(a_graph_runs_its_collectives_at_every_launch, {
    ranks(3, |rank| {
        let segment = rank.segment(2 * MIB);
        rank.write(segment, &[1.0f32]);
        rank.stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .expect("the capture begins");
        assert_eq!(rank.sum(segment, segment, 1), SUCCESS);
        let graph = rank.stream.end_capture(FLAGS).expect("ended").expect("a graph");
        assert_eq!(rank.read::<f32>(segment, 1), [1.0], "captured, but not run");
        for power in 1..=5 {
            graph.launch().expect("launched");
            assert_eq!(rank.read::<f32>(segment, 1), [3f32.powi(power)]);
        }
        assert_eq!(destroy(rank.comm), SUCCESS);
    });
    nccl::assert_clean();
});

/// All-reduces from one window to another; `skew` shifts rank 1's output.
fn reduce_in_windows(rank: &Rank, skew: u64) -> Vec<f32> {
    let (from, to) = (rank.segment(2 * MIB), rank.segment(2 * MIB));
    let windows = [rank.window(from, 2 * MIB), rank.window(to, 2 * MIB)];
    assert!(windows.iter().all(|(code, window)| *code == SUCCESS && *window != 0));
    let out = to + 4096 + if rank.rank == 1 { skew } else { 0 };
    rank.write(from, &input(rank.rank));
    rank.write(out, &[-1.0f32; COUNT]);
    rank.meet();
    assert_eq!(rank.sum(from, out, COUNT), SUCCESS);
    let answer = rank.read::<f32>(out, COUNT);
    for (_, window) in windows {
        assert_eq!(window_deregister(rank.comm, window), SUCCESS);
    }
    assert_eq!((memory_free(from), memory_free(to)), (SUCCESS, SUCCESS));
    assert_eq!(destroy(rank.comm), SUCCESS);
    answer
}

nccl_test!(
    windows_reduce_correctly_at_equal_offsets_and_silently_wrong_at_others,
    ["STUB_DESCENDING_DEVICES" = "1,3"],
    {
        ranks(4, |rank| assert_eq!(reduce_in_windows(rank, 0), sum(4)));
        nccl::assert_clean();
        ranks(4, |rank| assert_ne!(reduce_in_windows(rank, 8192), sum(4)));
        assert!(nccl::violations()[0].contains("different window offsets"), "{:?}", nccl::violations());
        assert_eq!(nccl::live(), nccl::Live::default());
        assert_eq!(stub_process::cuda::live().device_bytes, 0);
    }
);

nccl_test!(windows_registered_in_another_order_on_one_rank_reduce_wrong, ["STUB_DESCENDING_DEVICES" = "1"], {
    ranks(2, |rank| {
        let segments = [rank.segment(2 * MIB), rank.segment(2 * MIB)];
        assert_eq!(segments[0] < segments[1], rank.rank == 0, "device 1 allocates its highest addresses first");
        // Registers in address order, which ranks must not do.
        let mut in_order = segments;
        in_order.sort_unstable();
        for base in in_order {
            assert_eq!(rank.window(base, 2 * MIB).0, SUCCESS);
        }
        rank.write(segments[0], &input(rank.rank));
        rank.write(segments[1], &[-1.0f32; COUNT]);
        rank.meet();
        assert_eq!(rank.sum(segments[0], segments[1], COUNT), SUCCESS);
        assert_ne!(rank.read::<f32>(segments[1], COUNT), sum(2));
    });
    assert!(nccl::violations()[0].contains("different window offsets"), "{:?}", nccl::violations());
});

nccl_test!(a_kernel_accesses_the_memory_that_was_registered, {
    ranks(2, |rank| {
        let old = rank.segment(2 * MIB);
        assert_eq!(rank.window(old, 2 * MIB).0, SUCCESS);
        rank.write(old, &[7.0f32; COUNT]);
        rank.meet();
        if rank.rank == 1 {
            assert_eq!(memory_free(old), SUCCESS);
            assert_eq!(rank.segment(2 * MIB), old, "new memory at the old address");
            rank.write(old, &[1.0f32; COUNT]);
        }
        rank.meet();
        assert_eq!(rank.sum(old, old, COUNT), SUCCESS);
        let seen = rank.read::<f32>(old, COUNT);
        assert_eq!(seen, [if rank.rank == 0 { 14.0 } else { 1.0 }; COUNT]);
    });
    assert!(nccl::violations()[0].contains("unmapped or freed under window"), "{:?}", nccl::violations());
});
