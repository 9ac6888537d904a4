//! Tests of ranks that diverge: every rank gets a report within the deadline, and no rank hangs or gets a wrong result.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::time::Instant;
use stub_process::{cuda, nccl, nccl_test};
use symmalloc_agreement::Cause;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{CheckedCollectives, ReduceOp, SyncError, SyncField};

/// Runs a program in which rank 1 diverges. Returns the error of the sync on each rank, after which nothing new may be registered.
fn injected(
    ranks: usize,
    program: impl Fn(&Rank, &Pool<CudaBackend>, &mut Vec<DeviceBuffer<f32>>) + Sync,
) -> Vec<SyncError> {
    let outcomes = Job::new(ranks).run(|it| {
        let pool = it.attached_pool();
        let mut tensors = vec![it.take(&pool, MIB)];
        it.registrar.sync(&[&it.world]).expect("the ranks agree so far");
        program(it, &pool, &mut tensors);
        let error = it.registrar.sync(&[&it.world]).expect_err("they differ");
        assert_eq!(it.registrar.stats().windows, 1, "nothing was registered");
        it.world.check().expect("the communicator still works");
        it.reduce_right(&it.world, &mut tensors[0]);
        it.check();
        error
    });
    assert!(outcomes.iter().all(|error| *error == outcomes[0]), "all ranks have the same report");
    nothing_is_left();
    outcomes
}

fn cause(errors: &[SyncError]) -> Cause {
    let SyncError::Disagreed { disagreement, .. } = &errors[0] else { panic!("{}", errors[0]) };
    let first = disagreement.first_heap().expect("a heap should differ");
    assert!(first.groups.iter().any(|group| group.ranks.to_string() == "1"), "{disagreement}");
    first.cause
}

nccl_test!(another_size_on_one_rank_is_reported_on_all, {
    let errors = injected(4, |it, pool, tensors| {
        tensors.push(it.take(pool, if it.rank == 1 { 30 * MIB + 512 } else { 30 * MIB }));
    });
    assert_eq!(cause(&errors), Cause::DifferentRequest);
});

nccl_test!(an_allocation_on_one_rank_only_is_reported_on_all, {
    let errors = injected(3, |it, pool, tensors| {
        if it.rank == 1 {
            tensors.push(it.take(pool, 30 * MIB));
        }
    });
    assert_eq!(cause(&errors), Cause::OpOnSomeRanks);
});

nccl_test!(another_order_on_one_rank_is_reported_on_all, {
    let errors = injected(2, |it, pool, tensors| {
        let sizes = if it.rank == 1 { [40 * MIB, 30 * MIB] } else { [30 * MIB, 40 * MIB] };
        tensors.extend(sizes.map(|size| it.take(pool, size)));
        tensors.push(it.take(pool, 50 * MIB));
    });
    assert_eq!(cause(&errors), Cause::DifferentOrder);
});

nccl_test!(memory_that_one_rank_is_refused_is_reported_on_all, {
    let errors = injected(2, |it, pool, tensors| {
        // The ranks allocate one after the other, so that only rank 1 runs out of memory.
        let take = || it.allocator.with_pool(pool).alloc_zeroed::<f32>(&it.stream, 30 << 18);
        if it.rank == 0 {
            tensors.push(take().expect("the allocation should fit"));
            it.meet();
            it.meet();
        } else {
            it.meet();
            cuda::fail("cuMemCreate", 1, 2);
            take().expect_err("the driver refuses");
            cuda::heal();
            it.meet();
        }
    });
    assert_eq!(cause(&errors), Cause::RefusedMemory);
});

nccl_test!(without_agreement_plans_that_differ_are_reported_on_all, {
    let outcomes = Job::new(3).quiet().run(|it| {
        let pool = it.attached_pool();
        let _tensors = [30, if it.rank == 1 { 50 } else { 40 }].map(|size| it.take(&pool, size * MIB));
        let error = it.registrar.sync(&[&it.world]).expect_err("they differ");
        let SyncError::Differ { difference, .. } = &error else { panic!("{error}") };
        assert_eq!(difference.field, SyncField::Changes);
        let first = difference.first_change.as_ref().expect("the changes were compared");
        assert_eq!((first.index, first.groups.len()), (1, 2));
        assert!(error.to_string().contains("ranks 0,2: register segment 1"), "{error}");
        it.world.check().expect("the communicator still works");
        error
    });
    assert!(outcomes.iter().all(|error| *error == outcomes[0]));
    nothing_is_left();
});

// Rank 1 exchanges messages only because of its new segment.
nccl_test!(a_rank_that_compares_alone_is_reported_on_all, {
    let outcomes = Job::new(2).quiet().run(|it| {
        let pool = it.attached_pool();
        let mut tensor = it.take(&pool, MIB);
        let comms = [&it.world];
        let compares = it.rank == 0;
        let outcome = if compares { it.registrar.agree(&comms) } else { it.registrar.sync(&comms) };
        let error = outcome.expect_err("only one rank compares");
        let SyncError::Differ { difference, .. } = &error else { panic!("{error}") };
        assert_eq!(difference.field, SyncField::Compared);
        it.registrar.sync(&comms).expect("neither rank compares");
        it.reduce_right(&it.world, &mut tensor);
        it.check();
        error
    });
    assert_eq!(outcomes[0], outcomes[1], "all ranks have the same report");
    nothing_is_left();
});

// A failed sync does not consume the segment events that it read.
// Two of three ranks sync among themselves, once or more often, before all three compare their histories.
nccl_test!(a_difference_from_before_a_sync_of_other_ranks_is_named, {
    for syncs in 0..3 {
        let outcomes = Job::new(3).run(|it| {
            let pair = it.world.split((it.rank < 2).then_some(0), 0).expect("all ranks should split");
            let pool = it.attached_pool();
            if let Some(pair) = &pair {
                it.registrar
                    .attach(pair, &[pool.id()], it.windows())
                    .expect("the pool should be symmetric and registrable");
            }
            let mut tensors = vec![it.take(&pool, MIB)];
            it.registrar.sync(&[&it.world]).expect("the ranks agree so far");
            for round in 0..=syncs {
                tensors.push(it.take(&pool, if it.rank == 2 && round == 0 { 30 * MIB + 512 } else { 30 * MIB }));
                if let Some(pair) = pair.as_ref().filter(|_| round < syncs) {
                    it.registrar.sync(&[pair]).expect("these two agree");
                }
            }
            let error = it.registrar.sync(&[&it.world]).expect_err("the third rank differs");
            drop(tensors);
            if let Some(pair) = pair {
                pair.destroy().expect("the communicator should be idle");
            }
            error
        });
        let SyncError::Disagreed { disagreement, .. } = &outcomes[0] else { panic!("{}", outcomes[0]) };
        let first = disagreement.first_heap().expect("a heap should differ");
        assert_eq!(first.cause, Cause::DifferentRequest, "after {syncs} syncs of two ranks: {disagreement}");
        assert!(first.groups.iter().any(|group| group.ranks.to_string() == "2"), "{disagreement}");
        assert!(outcomes.iter().all(|error| *error == outcomes[0]), "all ranks have the same report");
        nothing_is_left();
    }
});

nccl_test!(ranks_sync_once_their_segments_are_equal_again, {
    Job::new(2).quiet().run(|it| {
        let pool = it.attached_pool();
        let _first = it.take(&pool, 30 * MIB);
        let _second = (it.rank == 0).then(|| it.take(&pool, 40 * MIB));
        let error = it.registrar.sync(&[&it.world]).expect_err("they differ");
        assert!(matches!(error, SyncError::Differ { .. }), "{error}");
        let _made_up = (it.rank == 1).then(|| it.take(&pool, 40 * MIB));
        let synced = it.registrar.sync(&[&it.world]).expect("all ranks have the same segments by now");
        assert_eq!((synced.registrations, it.registrar.stats().windows), (2, 2));
    });
    nothing_is_left();
});

nccl_test!(pools_that_are_attached_on_some_ranks_only_are_reported_on_all, {
    let outcomes = Job::new(2).run(|it| {
        let (pool, other) = (it.attached_pool(), it.pool());
        if it.rank == 1 {
            it.registrar
                .attach(&it.world, &[other.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
        }
        let _tensor = it.take(&pool, MIB);
        it.registrar.sync(&[&it.world]).expect_err("they differ")
    });
    for error in outcomes {
        let SyncError::Differ { difference, .. } = &error else { panic!("{error}") };
        assert_eq!(difference.field, SyncField::Attached);
    }
    nothing_is_left();
});

nccl_test!(a_missing_rank_is_an_error_on_the_others_within_the_deadline, {
    Job::new(3).impatient().run(|it| {
        let pool = it.attached_pool();
        let tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        drop(tensor);
        it.trim(&pool);
        if it.rank == 1 {
            it.meet();
            return;
        }
        let begun = Instant::now();
        let error = it.registrar.sync(&[&it.world]).expect_err("rank 1 is missing");
        assert!(matches!(error, SyncError::Transport { .. }), "{error}");
        assert!(begun.elapsed() < 20 * it.deadline, "{:?}", begun.elapsed());
        assert_eq!(it.registrar.stats().dead_bytes, 0, "the world's segments are released");
        assert!(matches!(it.registrar.sync(&[&it.world]), Err(SyncError::Gone { .. })));
        // The allocator continues to work.
        drop(it.take(&pool, 40 * MIB));
        it.check();
        it.meet();
    });
    nccl::assert_clean();
});

nccl_test!(a_rank_that_dies_is_an_error_on_the_others_and_other_communicators_continue, {
    Job::new(3).impatient().run(|it| {
        let rest = it.world.split((it.rank != 2).then_some(0), 0).expect("all ranks should split");
        let pool = it.attached_pool();
        if let Some(rest) = &rest {
            it.registrar
                .attach(rest, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
        }
        let mut tensor = it.take(&pool, 30 * MIB);
        it.meet();
        let Some(rest) = rest else {
            // The rank ends without notice.
            it.meet();
            return;
        };
        it.registrar.sync(&[&it.world, &rest]).expect_err("rank 2 is gone");
        // The communicator of the other two was synced despite the failure.
        assert_eq!(it.offset_of(&rest, &tensor), 0);
        it.reduce_right(&rest, &mut tensor);
        drop(tensor);
        it.trim(&pool);
        assert_eq!(it.registrar.sync(&[&rest]).expect("the ranks should agree").released_bytes, 30 * MIB);
        it.meet();
    });
    nccl::assert_clean();
});

/// A checked collective on two of four buffers of 1 MiB, or on a part of one.
type Call = fn(&CheckedCollectives, &[DeviceBuffer<f32>; 4], &mut DeviceBuffer<f32>, &Rank) -> Result<(), SyncError>;

/// A collective, and others that differ from it in one argument that ranks compare. The last buffer of the list is passed in place of the
/// one that is passed for writing.
const CALLS: &[(&str, Call, Call)] = &[
    (
        "the send buffer of an all-reduce",
        |it, from, to, rank| it.all_reduce(&from[0], to, ReduceOp::Sum, &rank.stream),
        |it, from, to, rank| it.all_reduce(&from[1], to, ReduceOp::Sum, &rank.stream),
    ),
    (
        "the length of an all-reduce",
        |it, from, to, rank| it.all_reduce(&from[0], to, ReduceOp::Sum, &rank.stream),
        |it, from, to, rank| it.all_reduce(&from[0].slice(..8), &mut to.slice_mut(..8), ReduceOp::Sum, &rank.stream),
    ),
    (
        "the start of an all-reduce",
        |it, from, to, rank| it.all_reduce(&from[0].slice(..8), &mut to.slice_mut(..8), ReduceOp::Sum, &rank.stream),
        |it, from, to, rank| it.all_reduce(&from[0].slice(8..16), &mut to.slice_mut(..8), ReduceOp::Sum, &rank.stream),
    ),
    (
        "the receive buffer of an all-reduce",
        |it, from, to, rank| it.all_reduce(&from[0].slice(..8), &mut to.slice_mut(..8), ReduceOp::Sum, &rank.stream),
        |it, from, to, rank| it.all_reduce(&from[0].slice(..8), &mut to.slice_mut(8..16), ReduceOp::Sum, &rank.stream),
    ),
    (
        "the receive buffer of an all-gather",
        |it, from, to, rank| it.all_gather(&from[0].slice(..8), &mut to.slice_mut(..24), &rank.stream),
        |it, from, to, rank| it.all_gather(&from[0].slice(..8), &mut to.slice_mut(8..32), &rank.stream),
    ),
    (
        "the receive buffer of a reduce-scatter",
        |it, from, to, rank| {
            it.reduce_scatter(&from[0].slice(..24), &mut to.slice_mut(..8), ReduceOp::Sum, &rank.stream)
        },
        |it, from, to, rank| {
            it.reduce_scatter(&from[0].slice(..24), &mut to.slice_mut(8..16), ReduceOp::Sum, &rank.stream)
        },
    ),
    (
        "the buffer of a broadcast",
        |it, _, to, rank| it.broadcast(&mut to.slice_mut(..8), 0, &rank.stream),
        |it, _, to, rank| it.broadcast(&mut to.slice_mut(8..16), 0, &rank.stream),
    ),
    (
        "the receive buffer of a reduction",
        |it, from, to, rank| it.reduce(&from[0].slice(..8), &mut to.slice_mut(..8), ReduceOp::Sum, 0, &rank.stream),
        |it, from, to, rank| it.reduce(&from[0].slice(..8), &mut to.slice_mut(8..16), ReduceOp::Sum, 0, &rank.stream),
    ),
    (
        "the collective",
        |it, from, to, rank| it.all_reduce(&from[0], to, ReduceOp::Sum, &rank.stream),
        |it, from, to, rank| it.reduce(&from[0], to, ReduceOp::Sum, 0, &rank.stream),
    ),
];

nccl_test!(each_argument_of_a_checked_collective_is_compared, {
    Job::new(3).checking_offsets().run(|it| {
        let pool = it.attached_pool();
        let from = [(); 4].map(|()| it.take(&pool, MIB));
        let mut to = it.take(&pool, MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let checked = it.registrar.checked(&it.world);
        for (what, one, other) in CALLS {
            for call in [one, other] {
                call(&checked, &from, &mut to, it).unwrap_or_else(|error| panic!("{what} is equal: {error}"));
            }
            let call = if it.rank == 1 { other } else { one };
            let error = call(&checked, &from, &mut to, it).expect_err(what);
            let SyncError::OffsetsDiffer { difference, .. } = &error else { panic!("{what}: {error}") };
            assert_eq!(difference.groups.len(), 2, "{what}");
        }
        it.stream.synchronize().expect("the work should complete");
    });
    nothing_is_left();
});

nccl_test!(buffers_that_differ_are_reported_before_the_collective_runs, {
    let outcomes = Job::new(3).checking_offsets().run(|it| {
        let pool = it.attached_pool();
        let mut tensors = [it.take(&pool, MIB), it.take(&pool, MIB)];
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let checked = it.registrar.checked(&it.world);
        let [one, other] = &mut tensors;
        checked.all_reduce_in_place(one, ReduceOp::Sum, &it.stream).expect("all ranks pass the same buffer");
        let given = if it.rank == 1 { other } else { one };
        let error =
            checked.all_reduce_in_place(given, ReduceOp::Sum, &it.stream).expect_err("rank 1 passes another buffer");
        let SyncError::OffsetsDiffer { difference, .. } = &error else { panic!("{error}") };
        assert_eq!(difference.groups.len(), 2);
        assert!(error.to_string().contains("ranks 0,2: all-reduce of 1048576 bytes"), "{error}");
        assert!(error.to_string().contains("offset 1048576"), "{error}");
        it.world.check().expect("the communicator still works");
        error
    });
    assert!(outcomes.iter().all(|error| *error == outcomes[0]));
    assert_eq!(nccl::calls("ncclAllReduce"), 3, "the second collective never runs");
    nothing_is_left();
});
