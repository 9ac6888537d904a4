//! Tests of communicators that shrink: a rank leaves, and the others continue in their pools.

use super::support::{Job, MIB, nothing_is_left};
use stub_process::nccl_test;
use symmalloc_nccl::{Capability, CommError, CommState, NcclVersion};

/// Four ranks with windows lose rank 1, and later the first of the remaining ones.
fn lose_two_of_four() {
    let placements = Job::new(4).run(|it| {
        let pool = it.attached_pool();
        let mut before = it.take(&pool, 8 * MIB);
        it.registrar.sync(&[&it.world]).expect("all ranks should sync");
        it.reduce_right(&it.world, &mut before);
        it.meet();
        if it.rank == 1 {
            return None;
        }
        let rest = it.world.shrink(&[1]).expect("the remaining ranks shrink");
        assert_eq!((rest.name(), rest.ranks()), ("world/without-1", 3));
        assert_eq!(rest.rank() as usize, it.rank.saturating_sub(1), "the order does not change");
        it.registrar.attach(&rest, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let mut after = it.take(&pool, 40 * MIB);
        it.registrar.sync(&[&rest]).expect("the remaining ranks sync");
        it.reduce_right(&rest, &mut before);
        it.reduce_right(&rest, &mut after);
        let offsets = [it.offset_of(&rest, &before), it.offset_of(&rest, &after)];

        // Ranks that shrink from the same parent at different times have equal names.
        if it.rank > 0 {
            let pair = rest.shrink(&[0, 0]).expect("the remaining ranks shrink");
            assert_eq!((pair.name(), pair.ranks()), ("world/without-1/without-0", 2));
            it.registrar
                .attach(&pair, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[&pair]).expect("the remaining ranks sync");
            it.reduce_right(&pair, &mut after);
            let again = rest.shrink(&[0]).expect("the remaining ranks shrink");
            assert_eq!(again.name(), "world/without-1/without-0#2");
            assert!(pair.order() < again.order() && rest.order() < pair.order());
            again.destroy().expect("the communicator should be idle");
            pair.destroy().expect("the communicator should be idle");
        }
        rest.destroy().expect("the communicator should be idle");
        Some((offsets, it.allocator.digest(pool.id()).expect("the pool should exist")))
    });
    let remaining: Vec<_> = placements.into_iter().flatten().collect();
    assert_eq!(remaining.len(), 3);
    assert!(remaining.iter().all(|other| *other == remaining[0]), "{remaining:?}");
    nothing_is_left();
}

nccl_test!(four_ranks_lose_one_and_the_others_continue_in_their_pools, ["STUB_NCCL_VERSION" = "22809"], {
    lose_two_of_four();
});

nccl_test!(four_ranks_lose_one_and_the_others_continue_in_2_30, ["STUB_NCCL_VERSION" = "23007"], {
    lose_two_of_four();
});

nccl_test!(four_ranks_lose_one_and_the_others_continue_in_2_32, ["STUB_NCCL_VERSION" = "23203"], {
    lose_two_of_four();
});

nccl_test!(a_shrink_with_bad_ranks_has_no_effect, {
    Job::new(2).run(|it| {
        assert_eq!(it.world.shrink(&[2]).map(|_| ()), Err(CommError::NoSuchRank { rank: 2, ranks: 2 }));
        for excluded in [vec![], vec![it.world.rank()]] {
            let (name, rank) = (it.world.name().into(), it.world.rank());
            let refused = it.world.shrink(&excluded).map(|_| ());
            assert_eq!(refused, Err(CommError::ShrinkArgument { name, rank, excluded }));
        }
        it.world.check().expect("the invariants should still hold");
    });
    nothing_is_left();
});

nccl_test!(an_old_library_cannot_shrink, ["STUB_NCCL_VERSION" = "22605"], {
    Job::new(2).run(|it| {
        let (capability, version) = (Capability::Shrink, NcclVersion::new(2, 26, 5));
        assert_eq!(
            it.world.shrink(&[1 - it.world.rank()]).map(|_| ()),
            Err(CommError::Unsupported { capability, version })
        );
        it.world.check().expect("the invariants should still hold");
    });
});

nccl_test!(a_rank_that_is_missing_from_a_shrink_ends_the_parent_at_the_deadline, {
    Job::new(3).impatient().run(|it| {
        if it.rank == 1 {
            let error = it.world.shrink(&[2]).expect_err("rank 0 does not shrink");
            assert!(matches!(error, CommError::Deadline { .. }), "{error:?}");
            assert_ne!(it.world.state(), CommState::Ready);
        }
        it.meet();
    });
});
