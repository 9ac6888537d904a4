//! All-to-all-v on the stubs: what arrives, what is refused, what is kept, and what leaks: nothing.

use crate::process::{Live, live, nccl_calls, stub_test};
use crate::programs::all_to_all::{Holdings, Rank, counts, known_splits, many_calls, on_ranks, on_ranks_with};
use cudarc::driver::DevicePtr;
use std::sync::Barrier;
use symmalloc_core::PoolConfig;
use symmalloc_cuda::{CudaAllocator, DeviceBuffer, GraphPool};
use symmalloc_nccl::{AllToAll, AllToAllError, CommunicatorBuilder, LookupError, Registration, Side, Splits};

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
    on_ranks_with(2, CommunicatorBuilder::nonblocking, |it| {
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
        let mut refused =
            |splits: &Splits, row| all_to_all.run(&it.stream, &input, &mut output, row, splits).expect_err("refused");
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
        // SAFETY: the memory is not used while two names of it exist.
        let mut twice = unsafe { it.stream.upgrade_device_ptr::<u32>(input.device_ptr(&it.stream).0 + 16, 6) };
        let overlap = all_to_all.run(&it.stream, &input, &mut twice, 1, &splits);
        assert!(matches!(overlap, Err(AllToAllError::Overlap { input_bytes: 20, output_bytes: 20, .. })));
        std::mem::forget(twice);
        assert_eq!(nccl_calls("ncclSend") + nccl_calls("ncclRecv"), before);
        it.round::<u32>(&all_to_all, 1, &splits, 2);
    });
});

stub_test!(a_rank_that_cannot_tell_its_splits_is_named_to_the_others, ["STUB_DEVICES" = "3"], {
    on_ranks(3, |it| {
        let all_to_all = it.all_to_all();
        let rows: &[u64] = if it.rank == 1 { &[u64::MAX, 1, 0] } else { &[1, 2, 3] };
        let refused = all_to_all.exchange_splits(rows).expect_err("refused");
        match it.rank {
            1 => assert!(matches!(refused, AllToAllError::Splits(_)), "{refused}"),
            _ => assert_eq!(refused, AllToAllError::Refused { rank: 1 }),
        }
        all_to_all.exchange_splits(&[1, 2, 3]).expect("all can go on");
    });
});

stub_test!(where_calls_are_checked_ranks_that_disagree_get_the_same_error, ["STUB_DEVICES" = "3"], {
    on_ranks(3, |it| {
        let all_to_all = AllToAll::builder(&it.comm).check_calls().build().expect("built");
        let counts = counts(5, it.ranks);
        let right = known_splits(&counts, it.rank);
        it.round::<u32>(&all_to_all, 5, &right, 2);
        let before = nccl_calls("ncclSend") + nccl_calls("ncclRecv");
        let (input, mut output) = (it.zeros::<u32>(400), it.zeros::<u32>(400));

        // The splits changed on rank 2 only.
        let mut changed = counts.clone();
        changed[2][0] += 1;
        let splits = if it.rank == 2 { known_splits(&changed, it.rank) } else { right.clone() };
        let refused = all_to_all.run(&it.stream, &input, &mut output, 2, &splits).expect_err("they disagree");
        let AllToAllError::Disagreement { from: 2, to: 0, sent_rows, expected_rows, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((sent_rows, expected_rows), (counts[2][0] + 1, counts[2][0]));

        // The rows are longer on rank 1 only.
        let row = if it.rank == 1 { 3 } else { 2 };
        let refused = all_to_all.run(&it.stream, &input, &mut output, row, &right).expect_err("they disagree");
        assert!(matches!(refused, AllToAllError::Disagreement { sent_row_bytes: 8 | 12, .. }), "{refused}");

        // Rank 0 gives a buffer that is too short.
        let len = if it.rank == 0 { 0 } else { 400 };
        let refused = all_to_all.run(&it.stream, &input.slice(..len), &mut output, 2, &right).expect_err("refused");
        match it.rank {
            0 => {
                assert!(matches!(refused, AllToAllError::BufferTooShort { side: Side::Input, len: 0, .. }), "{refused}")
            }
            _ => assert_eq!(refused, AllToAllError::Refused { rank: 0 }),
        }
        // Rank 1 exchanges splits where the others move rows.
        let refused = match it.rank {
            1 => all_to_all.exchange_splits(&counts[1]).map(|_| ()),
            _ => all_to_all.run(&it.stream, &input, &mut output, 2, &right),
        };
        let named = if it.rank == 1 { 0 } else { 1 };
        assert_eq!(refused, Err(AllToAllError::DifferentCalls { rank: named }));

        assert_eq!(nccl_calls("ncclSend") + nccl_calls("ncclRecv"), before, "nothing was submitted");
        it.round::<u32>(&all_to_all, 6, &known_splits(&counts, it.rank), 2);
    });
});

stub_test!(memory_that_is_not_registered_is_refused_where_it_must_be, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let (strict, any) = (it.all_to_all(), AllToAll::new(&it.comm).expect("built"));
        let plain = CudaAllocator::new(it.comm.device(), Default::default()).expect("an allocator");
        let splits = Splits::sending(&[1, 1]).receiving(&[1, 1]).expect("they fit");
        let (input, mut output) = (it.zeros::<u32>(2), plain.alloc_zeroed::<u32>(&it.stream, 2).expect("allocated"));
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
});

stub_test!(a_segment_is_remembered_until_the_registrar_says_that_it_is_dead, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let pool = it
            .registrar
            .allocator()
            .create_pool(PoolConfig::builder().fixed().symmetric(true).build().expect("it fits"));
        let pool = pool.expect("a pool");
        it.registrar.attach(&it.comm, &[pool.id()], Registration::Windows).expect("attached");
        let allocator = it.registrar.allocator().with_pool(&pool);
        let splits = Splits::sending(&[8, 8]).receiving(&[8, 8]).expect("they fit");
        let input = it.zeros::<u32>(16);
        let round = |output: &mut DeviceBuffer<u32>| all_to_all.run(&it.stream, &input, output, 1, &splits);

        let mut output = allocator.alloc_zeroed::<u32>(&it.stream, 16).expect("allocated");
        let refused = round(&mut output).expect_err("refused");
        assert!(
            matches!(refused, AllToAllError::NotRegistered { error: LookupError::NotRegistered { .. }, .. }),
            "{refused}"
        );
        it.registrar.sync(&[&it.comm]).expect("in step");
        for _ in 0..10 {
            round(&mut output).expect("exchanged");
        }
        let (first, lasting) =
            (it.registrar.key_of(&output).expect("alive"), it.registrar.key_of(&input).expect("alive"));
        let mut both = [first, lasting];
        both.sort_unstable();
        assert_eq!(all_to_all.segments(), both);

        // The segment goes while the last call may still run.
        drop(output);
        allocator.core().trim(Some(pool.id())).expect("trimmed");
        it.registrar.sync(&[&it.comm]).expect("in step");
        let mut output = allocator.alloc_zeroed::<u32>(&it.stream, 16).expect("allocated");
        it.registrar.sync(&[&it.comm]).expect("in step");
        round(&mut output).expect("exchanged");
        let second = it.registrar.key_of(&output).expect("alive");
        assert_ne!(first, second, "a key never comes back, even at the same address");
        let mut both = [second, lasting];
        both.sort_unstable();
        assert_eq!(all_to_all.segments(), both);
    });
});

stub_test!(buffers_may_be_dropped_while_the_rows_wait_for_the_other_rank, ["STUB_DEVICES" = "2"], {
    let barrier = Barrier::new(2);
    on_ranks(2, |it| {
        let all_to_all = it.all_to_all();
        let other = it.comm.device().context().new_stream().expect("a stream");
        it.allocator.register_stream(&other).expect("registered");
        let splits = Splits::sending(&[4, 4]).receiving(&[4, 4]).expect("they fit");
        let mut output = it.zeros::<u32>(8);
        for round in 1..=20_u32 {
            let input = it.buffer(&[round; 8]);
            let place = input.placement();
            if it.rank == 1 {
                barrier.wait();
            }
            all_to_all.run(&other, &input, &mut output, 1, &splits).expect("exchanged");
            drop(input);
            // Rank 1 has not sent anything yet, so rank 0's rows are still where the zeros go.
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
});

stub_test!(calls_with_fixed_splits_are_captured_and_splits_are_not_exchanged_in_captures, ["STUB_DEVICES" = "2"], {
    on_ranks(2, |it| {
        let all_to_all =
            AllToAll::builder(&it.comm).require_registered(&it.registrar).check_calls().build().expect("built");
        let counts = counts(8, it.ranks);
        let splits = all_to_all.exchange_splits(&counts[it.rank]).expect("exchanged");
        let len = 3 * splits.input_rows_max().max(splits.output_rows_max()).expect("exchanged") as usize;
        let (mut input, mut output) = (it.zeros::<u32>(len), it.zeros::<u32>(len));
        // Connects the ranks, and compares the splits.
        all_to_all.run(&it.stream, &input, &mut output, 3, &splits).expect("exchanged");

        let graphs = GraphPool::new(it.registrar.allocator(), PoolConfig::default()).expect("a pool");
        let capture = graphs.begin(&it.stream).expect("begun");
        let gathers = nccl_calls("ncclAllGather");
        assert_eq!(all_to_all.exchange_splits(&counts[it.rank]), Err(AllToAllError::Capturing));
        all_to_all.run(&it.stream, &input, &mut output, 3, &splits).expect("captured");
        assert_eq!(nccl_calls("ncclAllGather"), gathers, "captured calls are not compared");
        let graph = capture.end().expect("ended");
        for seed in 0..5 {
            let (sent, received) = it.elements::<u32>(seed, &splits, 3);
            it.stream.memcpy_htod(&sent, &mut input).expect("copied");
            graph.launch(&it.stream).expect("launched");
            assert_eq!(it.read(&output)[..received.len()], received);
        }
    });
});

/// What the stubs count.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StubHoldings {
    live: Live,
    registrations: u64,
    deregistrations: u64,
}

impl Holdings for StubHoldings {
    fn now() -> Self {
        StubHoldings {
            live: live(),
            registrations: nccl_calls("ncclCommWindowRegister") + nccl_calls("ncclCommRegister"),
            deregistrations: nccl_calls("ncclCommWindowDeregister") + nccl_calls("ncclCommDeregister"),
        }
    }
}

stub_test!(a_hundred_thousand_calls_with_changing_splits_leave_nothing_behind, ["STUB_DEVICES" = "2"], {
    let resident_bytes = many_calls::<StubHoldings>(100_000, 2);
    // Fifty thousand calls: a word leaked by each would be 400 KB.
    assert!(resident_bytes < 200_000, "{resident_bytes} bytes more in the second half");
});
