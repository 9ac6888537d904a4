//! Tests of revokes: they stop the work of a communicator, which then can only shrink and end.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stub_process::{nccl, nccl_test, until};
use symmalloc_nccl::{
    Capability, CommError, CommState, Communicator, CommunicatorBuilder, NcclVersion, ReduceOp, SyncError, UniqueId,
    WatchdogMode,
};

fn revoked(comm: &Communicator) -> CommError {
    CommError::Revoked { name: comm.name().into() }
}

/// Connects a communicator of all ranks in one of the modes.
fn connect(it: &Rank, id: UniqueId, configure: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder) -> Communicator {
    let builder = Communicator::builder(&it.device).deadline(it.deadline).watchdog(WatchdogMode::Off).name("revoked");
    configure(builder).connect(id, it.rank as u32, it.ranks as u32).expect("all ranks should connect")
}

/// One of three ranks does not join a collective. The others revoke, shrink and continue with the same placements.
fn continue_after_a_missing_rank(configure: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync) {
    let id = UniqueId::new().expect("the stub creates an id");
    Job::new(3).run(|it| {
        let comm = connect(it, id, &configure);
        let pool = it.pool();
        it.registrar.attach(&comm, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let (mut one, mut two) = (it.take(&pool, 8 * MIB), it.take(&pool, 40 * MIB));
        it.registrar.sync(&[&comm]).expect("all ranks should sync");
        let before = [it.offset_of(&comm, &one), it.offset_of(&comm, &two)];
        it.reduce_right(&comm, &mut one);
        it.meet();
        if it.rank != 1 {
            comm.all_reduce_in_place(&mut one, ReduceOp::Sum, &it.stream).expect("the work should be submitted");
            // The rank that is missing never submits it.
            comm.revoke().expect("the work should stop");
            comm.revoke().expect("it is revoked already");
            assert_eq!(comm.state(), CommState::Revoked);
            assert_eq!(
                comm.synchronize(&it.stream),
                Err(revoked(&comm)),
                "the stream continues, and the results are invalid"
            );
            assert_eq!(comm.guarded(|| it.stream.synchronize().expect("it continues")), Err(revoked(&comm)));

            let refused = [
                comm.check(),
                comm.all_reduce_in_place(&mut one, ReduceOp::Sum, &it.stream),
                comm.split(Some(0), 0).map(drop),
                comm.register_window(4096, 4096).map(drop),
                comm.register_buffer(4096, 4096).map(drop),
                comm.announce("step", None, &it.stream, || ()),
            ];
            assert!(refused.iter().all(|refused| *refused == Err(revoked(&comm))), "{refused:?}");
            assert!(revoked(&comm).to_string().contains("shrink it"), "{}", revoked(&comm));

            // The windows are gone, and the pool is not.
            let error = it.registrar.sync(&[&comm]).expect_err("the communicator is revoked");
            assert!(matches!(error, SyncError::Gone { state: CommState::Revoked, .. }), "{error}");
            assert_eq!(it.registrar.stats().windows, 0);
            let rest = comm.shrink(&[1]).expect("the remaining ranks shrink");
            comm.destroy().expect("it does not wait for others");
            assert_eq!((rest.name(), rest.ranks(), comm.state()), ("revoked/without-1", 2, CommState::Aborted));
            it.registrar
                .attach(&rest, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            it.registrar.sync(&[&rest]).expect("the remaining ranks sync");
            assert_eq!([it.offset_of(&rest, &one), it.offset_of(&rest, &two)], before);
            it.reduce_right(&rest, &mut one);
            it.reduce_right(&rest, &mut two);
            rest.destroy().expect("the communicator should be idle");
        }
        it.meet();
        if it.rank == 1 {
            comm.abort().expect("its ranks are gone");
        }
        it.registrar.sweep();
    });
    nothing_is_left();
}

nccl_test!(ranks_continue_without_one_that_is_missing_in_2_30, ["STUB_NCCL_VERSION" = "23007"], {
    continue_after_a_missing_rank(|builder| builder);
});

nccl_test!(ranks_continue_without_one_that_is_missing_without_blocking_in_2_32, ["STUB_NCCL_VERSION" = "23203"], {
    continue_after_a_missing_rank(CommunicatorBuilder::nonblocking);
});

/// A thread waits in a registration that another rank does not join, and another thread revokes.
fn unblock_a_registration(configure: impl Fn(CommunicatorBuilder) -> CommunicatorBuilder + Sync) {
    let id = UniqueId::new().expect("the stub creates an id");
    Job::new(2).run(|it| {
        let comm = connect(it, id, &configure);
        let pool = it.pool();
        let mut tensor = it.take(&pool, 40 * MIB);
        let base = it.registrar.key_of(&tensor).expect("the buffer lies in a live segment").base;
        if it.rank == 0 {
            let since = Instant::now();
            std::thread::scope(|scope| {
                let calls = nccl::calls("ncclCommWindowRegister");
                let waits = scope.spawn(|| comm.register_window(base, 40 * MIB).map(drop));
                until(|| nccl::calls("ncclCommWindowRegister") > calls);
                comm.revoke().expect("the registration should stop");
                assert_eq!(waits.join().expect("the thread should not panic"), Err(revoked(&comm)));
            });
            assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
            assert_eq!(nccl::calls("ncclCommRevoke"), 1);
            assert_eq!(comm.state(), CommState::Revoked);
            let alone = comm.shrink(&[1]).expect("the only remaining rank shrinks");
            it.reduce_right(&alone, &mut tensor);
            alone.destroy().expect("the communicator should be idle");
        }
        it.meet();
        if it.rank == 1 {
            comm.abort().expect("the other rank is gone");
        }
    });
    nothing_is_left();
}

nccl_test!(a_revoke_releases_a_thread_inside_a_call, ["STUB_NCCL_VERSION" = "23007"], {
    unblock_a_registration(|builder| builder);
});

nccl_test!(a_revoke_releases_a_thread_that_polls, ["STUB_NCCL_VERSION" = "23007"], {
    unblock_a_registration(CommunicatorBuilder::nonblocking);
});

nccl_test!(an_old_library_cannot_revoke, ["STUB_NCCL_VERSION" = "22806"], {
    Job::new(2).run(|it| {
        let (capability, version) = (Capability::Revoke, NcclVersion::new(2, 28, 6));
        assert_eq!(it.world.revoke(), Err(CommError::Unsupported { capability, version }));
        it.world.check().expect("the invariants should still hold");
    });
    nothing_is_left();
});

nccl_test!(suspended_ended_and_borrowed_communicators_refuse_a_revoke, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        // SAFETY: the communicator outlives the borrower, and only this thread uses it.
        let borrowed = unsafe { Communicator::builder(&it.device).name("borrowed").borrow(it.world.raw()) };
        let borrowed = borrowed.expect("the allocation should be live");
        assert_eq!(borrowed.revoke(), Err(CommError::Borrowed { name: "borrowed".into() }));
        drop(borrowed);
        it.world.suspend().expect("all ranks should suspend the communicator");
        assert!(matches!(it.world.revoke(), Err(CommError::Suspended { .. })));
        it.world.resume().expect("all ranks should resume the communicator");
        it.world.check().expect("the invariants should still hold");
        it.world.destroy().expect("the communicator should be idle");
        assert!(matches!(it.world.revoke(), Err(CommError::Gone { state: CommState::Destroyed, .. })));
    });
    nothing_is_left();
});

nccl_test!(a_revoke_that_fails_aborts_the_communicator, ["STUB_NCCL_VERSION" = "23007"], {
    nccl::fail("ncclCommRevoke", Some(0), 1, 3);
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let _tensor = it.take(&pool, 8 * MIB);
        it.registrar.sync(&[&it.world]).expect("all ranks should sync");
        it.meet();
        if it.rank == 0 {
            let error = it.world.revoke().expect_err("the call fails");
            assert!(matches!(&error, CommError::Nccl(error) if error.code == 3), "{error}");
            assert_eq!(it.world.state(), CommState::Aborted);
            let Err(CommError::Gone { cause: Some(cause), .. }) = it.world.shrink(&[1]).map(drop) else {
                panic!("it shrank")
            };
            assert_eq!(*cause, error);
        } else {
            it.world.revoke().expect("it succeeds on this rank");
        }
    });
    nothing_is_left();
});

nccl_test!(a_revoke_that_hangs_loses_the_communicator_until_it_returns, ["STUB_NCCL_VERSION" = "23007"], {
    nccl::hang("ncclCommRevoke", Some(0), 1);
    Job::new(1).run(|it| {
        let error = it.world.revoke().expect_err("the call hangs");
        assert!(matches!(error, CommError::Deadline { state: CommState::Lost, .. }), "{error:?}");
        assert_eq!(it.world.state(), CommState::Lost);
        nccl::heal();
        until(|| it.world.state() == CommState::Aborted);
    });
    nothing_is_left();
});

nccl_test!(the_watchdog_leaves_a_revoked_communicator_alone, ["STUB_NCCL_VERSION" = "23007"], {
    let id = UniqueId::new().expect("the stub creates an id");
    let (revoked, aborted) = (AtomicBool::new(false), AtomicBool::new(false));
    let deadline = Duration::from_millis(600);
    stub_process::threads(2, |rank| {
        let device = symmalloc_cuda::CudaDevice::new(rank).expect("the stub should have a device");
        let comm = Communicator::builder(&device).deadline(deadline).watchdog(WatchdogMode::Abort);
        let comm = comm.connect(id, rank as u32, 2).expect("all ranks should connect");
        if rank == 0 {
            comm.revoke().expect("nothing is in progress");
            revoked.store(true, Ordering::Release);
            // The other rank aborts, which would end a communicator that is watched.
            until(|| aborted.load(Ordering::Acquire));
            std::thread::sleep(3 * deadline);
            assert_eq!(comm.state(), CommState::Revoked);
            let alone = comm.shrink(&[1]).expect("the only remaining rank shrinks");
            alone.destroy().expect("the communicator should be idle");
        } else {
            until(|| revoked.load(Ordering::Acquire));
            comm.abort().expect("the communicator should be idle");
            aborted.store(true, Ordering::Release);
        }
    });
    nccl::assert_clean();
});
