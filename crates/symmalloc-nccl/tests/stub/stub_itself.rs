//! Tests of the stub of libnccl: its results are correct where NCCL's are, and wrong where NCCL's are. The tests of communicators and of
//! all-to-all-v also fail if a collective, a split, a group or a graph of the stub is wrong.

use crate::raw::{MIB, Rank, SUCCESS, all_gather, all_reduce, destroy, memory_free, ranks, window_deregister};
use stub_process::{nccl, nccl_test};

pub(crate) const COUNT: usize = 1000;

/// Returns the input of a rank.
pub(crate) fn input(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (rank * 10_000 + index) as f32).collect()
}

/// Returns the sum of the inputs of all ranks.
pub(crate) fn sum(ranks: usize) -> Vec<f32> {
    (0..COUNT).map(|index| (0..ranks).map(|rank| (rank * 10_000 + index) as f32).sum()).collect()
}

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
        rank.stream.synchronize().expect("the stream should complete");
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
