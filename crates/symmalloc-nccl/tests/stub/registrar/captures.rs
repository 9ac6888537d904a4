//! Tests with another thread that captures in global mode, in which the driver rejects every call, on all threads, that is not stream work.
//! The ranks continue, and the capture stays valid.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::time::Duration;
use stub_process::{Captured, nccl, nccl_test, while_captured};
use symmalloc_core::op::Contents;
use symmalloc_nccl::CommState;

/// Runs `body` on all ranks, which are threads of one process, while a stream of rank 0's device is being captured.
fn all_while_captured(it: &Rank, body: impl FnOnce()) {
    let body = || {
        it.meet();
        body();
        it.meet();
    };
    if it.rank == 0 {
        assert_eq!(while_captured(0, body), ((), Captured::Graph));
    } else {
        body();
    }
    it.meet();
}

nccl_test!(a_sync_registers_and_deregisters, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let large = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        all_while_captured(it, || {
            let _other = it.take(&pool, 20 * MIB);
            drop(large);
            it.trim(&pool);
            let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            assert_eq!((synced.registrations, synced.deregistrations, synced.released_bytes), (1, 1, 30 * MIB));
        });
    });
    nothing_is_left();
});

nccl_test!(a_pool_sleeps_and_wakes, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        all_while_captured(it, || {
            for contents in [Contents::Keep, Contents::Drop] {
                it.registrar.sleep(&it.world, pool.id(), contents).expect("all ranks should sleep together");
                it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
            }
        });
        it.reduce_right(&it.world, &mut tensor);
    });
    nothing_is_left();
});

nccl_test!(communicators_are_created_awaited_and_destroyed, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let tensor = it.take(&pool, MIB);
        all_while_captured(it, || {
            let part =
                it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
            it.registrar.attach(&part, &[pool.id()], it.windows()).expect("the memory should be registrable");
            it.registrar.sync(&[&part]).expect("the ranks should agree");
            part.synchronize(&it.stream).expect("nothing runs");
            part.destroy().expect("ready");
        });
        it.registrar.sweep();
        drop(tensor);
    });
    nothing_is_left();
});

nccl_test!(an_abort_deregisters_windows_only_after_the_devices_work, {
    Job::new(1).run(|it| {
        let pool = it.attached_pool();
        let _tensor = it.take(&pool, MIB);
        let part = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        it.registrar.attach(&part, &[pool.id()], it.windows()).expect("the memory should be registrable");
        it.registrar.sync(&[&part]).expect("the ranks should agree");
        let (aborting, captured) = while_captured(0, || {
            let part = part.clone();
            let aborting = std::thread::spawn(move || part.abort());
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(nccl::calls("ncclCommRevoke"), 1);
            assert_eq!((nccl::calls("ncclCommWindowDeregister"), nccl::calls("ncclCommAbort")), (0, 0));
            aborting
        });
        assert_eq!(captured, Captured::Spoiled, "synchronizing with a device is forbidden in every mode");
        aborting.join().expect("the thread does not panic").expect("it ended in time");
        assert_eq!(part.state(), CommState::Aborted);
        assert_eq!((nccl::calls("ncclCommWindowDeregister"), nccl::calls("ncclCommAbort")), (1, 1));
        it.registrar.sweep();
    });
    nothing_is_left();
});
