//! Tests of communicators that grow: a rank leaves and rejoins, and the others keep their pools.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Mutex;
use stub_process::{nccl, nccl_test, until};
use symmalloc_nccl::{
    Capability, CommError, CommState, Communicator, CommunicatorBuilder, GrowIdObstacle, NcclVersion, Stage, SyncError,
    UniqueId, WatchdogMode,
};

/// A place where rank 0 of a communicator leaves the id of a grow for the other threads.
pub(crate) type SharedId = Mutex<Option<UniqueId>>;

pub(crate) fn builder(it: &Rank) -> CommunicatorBuilder {
    Communicator::builder(&it.device).deadline(it.deadline).watchdog(WatchdogMode::Off).name("grown")
}

/// Creates an id on rank 0 of the old communicator and returns it on all threads.
pub(crate) fn share_id(it: &Rank, old: Option<&Communicator>, shared: &SharedId) -> UniqueId {
    if let Some(old) = old.filter(|old| old.rank() == 0) {
        *shared.lock().expect("the lock is not poisoned") = Some(old.grow_id().expect("rank 0 creates an id"));
    }
    it.meet();
    shared.lock().expect("the lock is not poisoned").expect("rank 0 set it")
}

/// Grows the old communicator, or joins it as its last rank.
pub(crate) fn grow(
    builder: CommunicatorBuilder,
    old: Option<&Communicator>,
    id: UniqueId,
    ranks: u32,
) -> Result<Communicator, CommError> {
    match old {
        Some(old) => builder.grow(old, id, ranks),
        None => builder.join(id, ranks - 1, ranks),
    }
}

/// Four ranks with windows lose `leaver`, continue, and get it back.
fn lose_one_of_four_and_grow_back(
    leaver: usize,
    configure: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync,
) {
    let shared = SharedId::default();
    let placements = Job::new(4).run(|it| {
        let pool = it.attached_pool();
        let mut before = it.take(&pool, 8 * MIB);
        it.registrar.sync(&[&it.world]).expect("all ranks should sync");
        it.reduce_right(&it.world, &mut before);
        it.meet();
        let rest = (it.rank != leaver).then(|| it.world.shrink(&[leaver as u32]).expect("the remaining ranks shrink"));
        it.world.destroy().expect("the communicator should be idle");
        it.registrar.sweep();
        // The rank that left makes the same allocations in the symmetric pool, without the others.
        let mut during = it.take(&pool, 40 * MIB);
        if let Some(rest) = &rest {
            it.registrar
                .attach(rest, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[rest]).expect("the remaining ranks sync");
            it.reduce_right(rest, &mut during);
        }

        let id = share_id(it, rest.as_ref(), &shared);
        let grown = grow(configure(builder(it)), rest.as_ref(), id, 4).expect("all ranks should arrive");
        let rank = rest.as_ref().map_or(3, Communicator::rank);
        assert_eq!((grown.name(), grown.rank(), grown.ranks()), ("grown", rank, 4));
        assert!(rest.as_ref().is_none_or(|rest| rest.state() == CommState::Ready), "it stays usable");
        if let Some(rest) = rest {
            it.reduce_right(&rest, &mut before);
            rest.destroy().expect("the communicator should be idle");
        }
        it.registrar.attach(&grown, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let after = it.take(&pool, 20 * MIB);
        it.registrar.sync(&[&grown]).expect("all ranks should sync");
        let mut tensors = [before, during, after];
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&grown, tensor));
        let offsets = tensors.each_ref().map(|tensor| it.offset_of(&grown, tensor));
        grown.destroy().expect("the communicator should be idle");
        (offsets, it.allocator.digest(pool.id()).expect("the pool should exist"))
    });
    assert!(placements.iter().all(|other| *other == placements[0]), "{placements:?}");
    nothing_is_left();
}

nccl_test!(four_ranks_lose_one_and_grow_back_in_2_29, ["STUB_NCCL_VERSION" = "22902"], {
    lose_one_of_four_and_grow_back(1, |builder| builder);
});

nccl_test!(four_ranks_lose_the_first_and_grow_back_in_2_30, ["STUB_NCCL_VERSION" = "23007"], {
    lose_one_of_four_and_grow_back(0, |builder| builder);
});

nccl_test!(four_ranks_lose_one_and_grow_back_without_blocking_in_2_32, ["STUB_NCCL_VERSION" = "23203"], {
    lose_one_of_four_and_grow_back(3, CommunicatorBuilder::nonblocking);
});

nccl_test!(one_rank_grows_to_three_and_again_to_four, ["STUB_NCCL_VERSION" = "23203"], {
    let shared = SharedId::default();
    Job::new(4).run(|it| {
        let alone = it
            .world
            .split(Some(it.rank as u32), 0)
            .expect("all ranks should split")
            .expect("the rank should be in a part");
        let old = (it.rank == 0).then_some(&alone);
        let id = share_id(it, old, &shared);
        let rank = it.rank as u32;
        let three = match it.rank {
            0 => Some(builder(it).grow(&alone, id, 3).expect("all ranks should arrive")),
            1 | 2 => Some(builder(it).join(id, rank, 3).expect("all ranks should arrive")),
            _ => None,
        };
        it.meet();
        let id = share_id(it, three.as_ref(), &shared);
        let four = grow(builder(it).name("four"), three.as_ref(), id, 4).expect("all ranks should arrive");
        assert_eq!((four.rank(), four.ranks()), (rank, 4));
        let mut tensor = it.take(&it.pool(), MIB);
        it.reduce_right(&four, &mut tensor);
        assert!(three.as_ref().is_none_or(|three| three.order() != four.order()));
        four.destroy().expect("the communicator should be idle");
        three.iter().for_each(|three| three.destroy().expect("the communicator should be idle"));
        alone.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});

nccl_test!(an_old_library_can_neither_grow_nor_join, ["STUB_NCCL_VERSION" = "22809"], {
    Job::new(2).run(|it| {
        let unsupported = CommError::Unsupported { capability: Capability::Grow, version: NcclVersion::new(2, 28, 9) };
        let id = UniqueId::from_bytes([7; UniqueId::BYTES]);
        assert_eq!(it.world.grow_id(), Err(unsupported.clone()));
        assert_eq!(builder(it).grow(&it.world, id, 3).map(drop), Err(unsupported.clone()));
        assert_eq!(builder(it).join(id, 2, 3).map(drop), Err(unsupported.clone()));
        assert!(unsupported.to_string().starts_with("NCCL 2.29.2 is required for ncclCommGrow"), "{unsupported}");
        it.world.check().expect("the invariants should still hold");
    });
    nothing_is_left();
});

nccl_test!(a_grow_with_bad_arguments_or_in_the_wrong_order_has_no_effect, ["STUB_NCCL_VERSION" = "23007"], {
    let shared = SharedId::default();
    Job::new(3).run(|it| {
        let (world, rank) = (&it.world, it.world.rank());
        let pair = world.split((rank < 2).then_some(0), rank).expect("all ranks should split");
        let obstacle =
            |comm: &Communicator, obstacle| CommError::GrowId { name: comm.name().into(), rank: comm.rank(), obstacle };
        if let Some(pair) = &pair {
            let unknown = UniqueId::from_bytes([7; UniqueId::BYTES]);
            for requested in [0, 1, 2] {
                let refused = builder(it).grow(pair, unknown, requested).map(drop);
                assert_eq!(refused, Err(CommError::GrowRanks { name: pair.name().into(), ranks: 2, requested }));
            }
            if rank == 0 {
                let refused = builder(it).grow(pair, unknown, 3).map(drop);
                assert_eq!(refused, Err(obstacle(pair, GrowIdObstacle::Unknown)), "no id was created");
            } else {
                assert_eq!(pair.grow_id(), Err(obstacle(pair, GrowIdObstacle::NotRankZero)));
            }
        }
        let id = share_id(it, pair.as_ref(), &shared);
        if let Some(pair) = pair.as_ref().filter(|_| rank == 0) {
            assert_eq!(pair.grow_id(), Err(obstacle(pair, GrowIdObstacle::Unused)));
            let refused = builder(it).grow(pair, UniqueId::from_bytes([7; UniqueId::BYTES]), 3).map(drop);
            assert_eq!(refused, Err(obstacle(pair, GrowIdObstacle::Unknown)));
        }
        assert_eq!(builder(it).join(id, 3, 3).map(drop), Err(CommError::NoSuchRank { rank: 3, ranks: 3 }));
        // None of this had an effect: the id is valid, once.
        let grown = grow(builder(it), pair.as_ref(), id, 3).expect("all ranks should arrive");
        if let Some(pair) = pair.as_ref().filter(|_| rank == 0) {
            assert_eq!(builder(it).grow(pair, id, 3).map(drop), Err(obstacle(pair, GrowIdObstacle::Unknown)));
        }
        let mut tensor = it.take(&it.pool(), MIB);
        it.reduce_right(&grown, &mut tensor);
        grown.destroy().expect("the communicator should be idle");
        pair.iter().for_each(|pair| pair.destroy().expect("the communicator should be idle"));
    });
    nothing_is_left();
});

nccl_test!(
    an_address_in_the_environment_prevents_a_grow,
    ["STUB_NCCL_VERSION" = "23007", "NCCL_COMM_ID" = "127.0.0.1:29555"],
    {
        Job::new(1).run(|it| {
            let (name, rank, obstacle) = ("world".into(), 0, GrowIdObstacle::CommIdVariable);
            assert_eq!(it.world.grow_id(), Err(CommError::GrowId { name, rank, obstacle }));
            it.world.check().expect("the invariants should still hold");
        });
        nothing_is_left();
    }
);

nccl_test!(a_suspended_communicator_cannot_grow, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        it.world.suspend().expect("all ranks should suspend the communicator");
        let id = UniqueId::from_bytes([7; UniqueId::BYTES]);
        let created = (it.rank == 0).then(|| it.world.grow_id().map(drop));
        for refused in created.into_iter().chain([builder(it).grow(&it.world, id, 3).map(drop)]) {
            assert!(matches!(refused, Err(CommError::Suspended { .. })), "{refused:?}");
        }
        it.world.resume().expect("all ranks should resume the communicator");
    });
    nothing_is_left();
});

nccl_test!(a_failed_id_ends_the_old_communicator, ["STUB_NCCL_VERSION" = "23007"], {
    nccl::fail("ncclCommGetUniqueId", Some(0), 1, 3);
    Job::new(1).run(|it| {
        let error = it.world.grow_id().expect_err("the call fails");
        assert!(matches!(&error, CommError::Nccl(error) if error.code == 3), "{error}");
        assert_eq!(it.world.state(), CommState::Aborted);
    });
    nothing_is_left();
});

/// Two of three ranks grow to three, and one call fails or is not made on one rank. Every rank gets an error, and the old communicator ends.
fn fail_one_grow(strike: impl Fn(&Rank) -> bool + Sync, code: Option<i32>) {
    let shared = SharedId::default();
    Job::new(3).impatient().run(|it| {
        let rank = it.world.rank();
        let pair = it.world.split((rank < 2).then_some(0), rank).expect("all ranks should split");
        let id = share_id(it, pair.as_ref(), &shared);
        let is_missing = strike(it);
        it.meet();
        if !is_missing {
            let error = grow(builder(it).nonblocking(), pair.as_ref(), id, 3).expect_err("a rank is missing");
            let is_expected = match (&error, code) {
                // The failed rank leaves the old communicator, which another rank may see as `ncclRemoteError`.
                (CommError::Nccl(error), Some(code)) => [code, 6].contains(&error.code),
                (CommError::Deadline { stage, waited, .. }, _) => {
                    matches!(stage, Stage::Grow | Stage::Connect) && *waited >= it.deadline
                }
                _ => false,
            };
            assert!(is_expected, "{error:?}");
            if let Some(pair) = &pair {
                assert_ne!(pair.state(), CommState::Ready);
                assert!(matches!(pair.check(), Err(CommError::Gone { .. })), "{:?}", pair.check());
            }
        }
        it.meet();
        if it.rank == 0 {
            nccl::heal();
        }
        it.meet();
        pair.iter().for_each(|pair| pair.abort().expect("nothing hangs"));
        it.world.check().expect("the other communicator is not affected");
    });
    nccl::assert_clean();
}

nccl_test!(a_grow_that_fails_on_an_old_rank_is_an_error_on_every_rank, ["STUB_NCCL_VERSION" = "23007"], {
    for rank in [0, 1] {
        fail_one_grow(
            |it| {
                if it.rank == 0 {
                    nccl::fail("ncclCommGrow", Some(rank), 1, 3);
                }
                false
            },
            Some(3),
        );
    }
});

nccl_test!(a_grow_that_fails_on_the_new_rank_is_an_error_on_every_rank, ["STUB_NCCL_VERSION" = "23007"], {
    fail_one_grow(
        |it| {
            if it.rank == 0 {
                nccl::fail("ncclCommGrow", Some(2), 1, 2);
            }
            false
        },
        Some(2),
    );
});

nccl_test!(a_new_rank_that_never_joins_is_an_error_on_every_rank, ["STUB_NCCL_VERSION" = "23007"], {
    fail_one_grow(|it| it.rank == 2, None);
});

nccl_test!(an_old_rank_that_does_not_grow_is_an_error_on_every_rank, ["STUB_NCCL_VERSION" = "23007"], {
    fail_one_grow(|it| it.rank == 1, None);
});

nccl_test!(a_blocking_grow_ends_at_the_deadline, ["STUB_NCCL_VERSION" = "23007"], {
    let shared = SharedId::default();
    Job::new(1).impatient().run(|it| {
        let id = share_id(it, Some(&it.world), &shared);
        let error = builder(it).grow(&it.world, id, 2).expect_err("no rank joins");
        let CommError::Deadline { stage, state, .. } = error else { panic!("{error:?}") };
        assert_eq!((stage, state), (Stage::Grow, CommState::Lost));
        // The missing rank arrives late: the thread returns, and both communicators are aborted.
        let late = std::thread::scope(|scope| {
            let join = || {
                let device = symmalloc_cuda::CudaDevice::new(1).expect("the stub should have a device");
                Communicator::builder(&device).watchdog(WatchdogMode::Off).name("grown").join(id, 1, 2).map(drop)
            };
            scope.spawn(join).join().expect("the thread should not panic")
        });
        late.expect("it connects");
        until(|| it.world.state() == CommState::Aborted);
    });
    nccl::assert_clean();
});

nccl_test!(a_rank_that_joins_with_another_history_is_named, ["STUB_NCCL_VERSION" = "23203"], {
    let shared = SharedId::default();
    Job::new(3).run(|it| {
        let rank = it.world.rank();
        let pair = it.world.split((rank < 2).then_some(0), rank).expect("all ranks should split");
        let pool = it.pool();
        let size = if rank == 2 { 30 } else { 40 };
        let mut tensor = it.take(&pool, size * MIB);
        let id = share_id(it, pair.as_ref(), &shared);
        let grown = grow(builder(it), pair.as_ref(), id, 3).expect("all ranks should arrive");
        it.registrar.attach(&grown, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let error = it.registrar.sync(&[&grown]).expect_err("the histories differ");
        assert!(matches!(error, SyncError::Disagreed { .. }), "{error}");
        assert_eq!(grown.state(), CommState::Ready);
        // The communicator without the new rank is not affected.
        if let Some(pair) = &pair {
            it.registrar
                .attach(pair, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[pair]).expect("the old ranks agree");
            it.reduce_right(pair, &mut tensor);
            pair.destroy().expect("the communicator should be idle");
        }
        grown.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});
