//! Tests with a fault at each call of a sync, on one rank. The affected communicator ends on every rank within the deadline, and everything
//! else continues: the allocators stay correct, memory is released, and the stub detects no violations.

use super::support::{Job, MIB, Rank};
use std::time::Instant;
use stub_process::{cuda, nccl, nccl_test, until};
use symmalloc_nccl::{CommState, Communicator, SyncError};

/// A fault on rank 1.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The n-th call of this name fails.
    Fails(&'static str, u64),
    /// The n-th call of this name never reaches the other ranks.
    Hangs(&'static str, u64),
}

/// Runs two syncs on `comm`: the first registers windows, and the second registers some and deregisters others.
fn work(it: &Rank, comm: &Communicator) -> Result<(), SyncError> {
    let pool = it.pool();
    it.registrar.attach(comm, &[pool.id()], it.windows()).map_err(|error| match error {
        symmalloc_nccl::AttachError::Communicator(error) => {
            SyncError::Communicator { communicator: comm.name().to_owned(), error }
        }
        error => panic!("{error}"),
    })?;
    let tensors = [20, 30, 40].map(|size| it.take(&pool, size * MIB));
    let synced = it.registrar.sync(&[comm]);
    let [first, .., last] = tensors;
    drop((first, last));
    it.trim(&pool);
    let kept = it.take(&pool, 50 * MIB);
    let synced = synced.and_then(|_| it.registrar.sync(&[comm]));
    drop(kept);
    synced.map(|_| ())
}

/// Aborts a failed communicator. While a thread is inside NCCL, the communicator is lost and its memory is kept.
fn until_over(it: &Rank, comm: &Communicator) {
    until(|| {
        let is_over = comm.abort().is_ok();
        assert!(is_over || comm.state() == CommState::Lost);
        it.registrar.sweep();
        is_over
    });
}

/// Runs a job with one fault. Returns `true` if any rank got an error.
fn strike(fault: Fault) -> bool {
    let before = cuda::live().device_bytes;
    let struck = Job::new(2).impatient().run(|it| {
        let other = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        it.meet();
        if it.rank == 0 {
            match fault {
                Fault::Fails(call, nth) => nccl::fail(call, Some(1), nth, 3),
                Fault::Hangs(call, nth) => nccl::hang(call, Some(1), nth),
            }
        }
        it.meet();
        let begun = Instant::now();
        let outcome = work(it, &other);
        assert!(begun.elapsed() < 30 * it.deadline, "{fault:?}: {:?}", begun.elapsed());
        it.check();
        it.meet();
        if it.rank == 0 {
            nccl::heal();
        }
        it.meet();
        if outcome.is_err() || other.destroy().is_err() {
            until_over(it, &other);
        }
        it.registrar.sweep();
        assert_eq!(it.registrar.stats().dead_bytes, 0, "{fault:?}: rank {} holds dead memory", it.rank);
        // All other communicators stay correct.
        let pool = it.attached_pool();
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the world still works");
        it.reduce_right(&it.world, &mut tensor);
        outcome.is_err()
    });
    nccl::assert_clean();
    let live = nccl::live();
    assert_eq!((live.communicators, live.windows, live.kept_rounds), (0, 0, 0), "{fault:?}");
    // If NCCL fails to deregister a window, it keeps the window's memory, on that rank only.
    let is_refused = matches!(fault, Fault::Fails("ncclCommWindowDeregister", _));
    let kept = cuda::live().device_bytes - before;
    assert!(kept == 0 || is_refused && kept <= 40 * MIB, "{fault:?}: {kept} bytes of device memory are left");
    struck.into_iter().any(|struck| struck)
}

nccl_test!(a_failed_call_at_any_point_of_a_sync_ends_only_its_communicator, {
    for call in ["ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclAllGather"] {
        let nth = (1..).take_while(|nth| strike(Fault::Fails(call, *nth))).count();
        assert!(nth >= 2, "{call} was made {nth} times");
    }
});

nccl_test!(a_call_that_hangs_at_any_point_of_a_sync_ends_the_communicator_within_the_deadline, {
    for call in ["ncclCommWindowRegister", "ncclAllGather"] {
        let nth = (1..).take_while(|nth| strike(Fault::Hangs(call, *nth))).count();
        assert!(nth >= 2, "{call} was made {nth} times");
    }
});

nccl_test!(a_communicator_that_one_rank_has_swept_does_not_keep_the_others_from_their_sync, {
    Job::new(2).impatient().run(|it| {
        let pool = it.attached_pool();
        let other = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        it.registrar.attach(&other, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&other, &it.world]).expect("the ranks should agree");
        it.meet();
        other.abort().expect("no thread is inside NCCL");
        if it.rank == 0 {
            it.registrar.sweep();
        }
        for agrees in [false, true] {
            let comms = [&other, &it.world];
            let outcome = if agrees { it.registrar.agree(&comms) } else { it.registrar.sync(&comms) };
            assert!(matches!(outcome, Err(SyncError::Gone { .. })), "rank {}: {outcome:?}", it.rank);
            it.registrar.sync(&[&it.world]).expect("the ranks are in the same round");
            it.reduce_right(&it.world, &mut tensor);
        }
    });
    super::support::nothing_is_left();
});

nccl_test!(memory_that_the_driver_does_not_release_is_kept_and_reported, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        drop(tensor);
        it.trim(&pool);
        it.meet();
        if it.rank == 0 {
            cuda::fail("cuMemUnmap", 0, 700);
        }
        it.meet();
        let synced = it.registrar.sync(&[&it.world]).expect("the windows are deregistered despite the fault");
        assert_eq!((synced.deregistrations, synced.released_bytes), (1, 0));
        assert!(synced.not_released.is_some());
        assert_eq!(it.registrar.stats().dead_bytes, 30 * MIB);
        it.meet();
        if it.rank == 0 {
            cuda::heal();
        }
        it.meet();
        assert_eq!(it.trim(&pool), 30 * MIB, "the next trim retries");
    });
    super::support::nothing_is_left();
});
