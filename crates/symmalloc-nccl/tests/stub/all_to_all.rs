//! All-to-all-v on the stubs: what arrives, what is refused, what is kept, and what leaks: nothing.

use crate::process::{stub_test};
use crate::programs::all_to_all::{Rank, counts, known_splits, mix, on_ranks, on_ranks_with};
use symmalloc_core::PoolConfig;
use symmalloc_cuda::GraphPool;
use symmalloc_nccl::{AllToAll, AllToAllError, Side, Splits, SplitsError};

stub_test!(uneven_rows_of_any_type_arrive_where_the_splits_say, ["STUB_DEVICES" = "4"], {
    for ranks in 1..=4 {
        on_ranks(ranks, |it| {
            let all_to_all = it.all_to_all();
            for seed in 0..40 {
                let splits = known_splits(&counts(seed, it.ranks), it.rank);
                it.round::<u8>(&all_to_all, seed, &splits, 1);
                it.round::<u16>(&all_to_all, seed, &splits, 3);
                it.round::<f32>(&all_to_all, seed, &splits, 17);
                it.round::<f64>(&all_to_all, seed, &splits, 2);
                it.round::<f32>(&all_to_all, seed, &splits.reversed(), 5);
            }
            assert_eq!(all_to_all.segments().len(), 1, "one segment, whatever the sizes");
        });
    }
});

stub_test!(a_communicator_that_does_not_block_does_the_same, ["STUB_DEVICES" = "2"], {
    on_ranks_with(2, |builder| builder, |it| {
        let all_to_all = it.all_to_all();
        for seed in 0..10 {
            let splits = all_to_all.exchange_splits(&counts(seed, it.ranks)[it.rank]).expect("exchanged");
            it.round::<f32>(&all_to_all, seed, &splits, 4);
        }
    });
});

stub_test!(without_splits_whole_buffers_are_split_equally, ["STUB_DEVICES" = "3"], {
    on_ranks(3, |it| {
        let all_to_all = it.all_to_all();
        let part = |from: usize, to: usize| (0..4).map(move |at| (from * 100 + to * 10 + at) as u32);
        let input = it.buffer::<u32>(&(0..3).flat_map(|to| part(it.rank, to)).collect::<Vec<_>>());
        let mut output = it.zeros::<u32>(12);
        all_to_all.run(&it.stream, &input, &mut output, 2, None).expect("exchanged");
        assert_eq!(it.read(&output), (0..3).flat_map(|from| part(from, it.rank)).collect::<Vec<_>>());
    });
});

stub_test!(ranks_may_have_nothing_to_send_or_nothing_at_all, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        // Everything from rank 0 to rank 1.
        let splits = all_to_all.exchange_splits(if it.rank == 0 { &[0, 6] } else { &[0, 0] }).expect("exchanged");
        let full = it.buffer::<u64>(&[7; 6]);
        let (none, mut nothing, mut six) = (it.zeros::<u64>(0), it.zeros::<u64>(0), it.zeros::<u64>(6));
        match it.rank {
            0 => all_to_all.run(&it.stream, &full, &mut nothing, 1, &splits).expect("sent"),
            _ => {
                all_to_all.run(&it.stream, &none, &mut six, 1, &splits).expect("received");
                assert_eq!(it.read(&six), [7; 6]);
            }
        }
        let before = nccl_calls("ncclGroupStart");
        all_to_all.run(&it.stream, &none, &mut nothing, 1, None).expect("nothing");
        all_to_all.run(&it.stream, &none, &mut nothing, 0, None).expect("nothing");
        assert_eq!(nccl_calls("ncclGroupStart"), before, "nothing is submitted for nothing");
    });
});

stub_test!(splits_that_are_known_or_repeated_cost_no_exchange, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let counts = counts(3, it.ranks);
        let exchanged = all_to_all.exchange_splits(&counts[it.rank]).expect("exchanged");
        let known = known_splits(&counts, it.rank);
        assert_eq!((exchanged.input(), exchanged.output()), (known.input(), known.output()));
        assert_eq!(exchanged.rows_between(1, 0), Some(counts[1][0]));
        let before = nccl_calls("ncclAllGather");
        for seed in 0..10 {
            it.round::<u32>(&all_to_all, seed, &exchanged, 2);
            it.round::<u32>(&all_to_all, seed, &known, 2);
        }
        assert_eq!(nccl_calls("ncclAllGather"), before);
    });
});

stub_test!(what_is_refused_is_refused_before_anything_is_submitted, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let splits = Splits::sending(&[2, 3]).receiving(&[2, 3]).expect("they fit");
        let splits = if it.rank == 0 { splits } else { Splits::sending(&[3, 2]).receiving(&[3, 2]).expect("they fit") };
        let (input, mut output) = (it.buffer::<u32>(&[1; 10]), it.zeros::<u32>(10));
        let before = nccl_calls("ncclSend") + nccl_calls("ncclRecv");
        let mut refused = |splits: &Splits, row| {
            all_to_all.run(&it.stream, &input, &mut output, row, splits).expect_err("refused")
        };
        assert!(matches!(
            refused(&splits, 3),
            AllToAllError::BufferTooShort { side: Side::Input, rows: 5, row_elements: 3, len: 10 }
        ));
        let other = Splits::sending(&[1]).receiving(&[1]).expect("they fit");
        assert_eq!(refused(&other, 1), AllToAllError::SplitCount { given: 1, ranks: 2 });
        let other = Splits::sending(&[1, 1]).receiving(&[2, 2]).expect("they fit");
        assert_eq!(refused(&other, 1), AllToAllError::OwnPart { rank: it.rank, sent: 1, received: 2 });
        let uneven = all_to_all.run(&it.stream, &input, &mut output, 3, None);
        assert!(matches!(uneven, Err(AllToAllError::Uneven { ranks: 2, row_elements: 3, .. })));
        assert_eq!(
            all_to_all.exchange_splits(&[1, 2, 3]),
            Err(AllToAllError::SplitCount { given: 3, ranks: 2 }),
            "all ranks refuse"
        );
        // SAFETY: nothing uses the memory while two names of it exist.
        let mut twice = unsafe { it.stream.context().default_stream().upgrade_device_ptr::<u32>(address(&it, &input), 10) };
        let overlap = all_to_all.run(&it.stream, &input, &mut twice, 2, &splits);
        assert!(matches!(overlap, Err(AllToAllError::Overlap { input_bytes: 40, output_bytes: 40, .. })));
        std::mem::forget(twice);
        assert_eq!(nccl_calls("ncclSend") + nccl_calls("ncclRecv"), before);
        it.round::<u32>(&all_to_all, 1, &splits, 2);
    });
});
