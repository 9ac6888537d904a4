//! Control calls of one rank that overlap: a test holds a call inside NCCL or in its wait for the device, makes another call meanwhile, and
//! asserts that the first one was still in progress.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Mutex;
use stub_process::{ExitOnPanic, cuda, nccl, nccl_test, until};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_nccl::{CommState, Communicator, LookupError, Registration};

/// Runs `control` on another thread. Once its first collective has begun, runs `meanwhile` and then `release`. `control` must not be able to
/// return before `release`.
fn overlap<C: Send, M>(
    control: impl FnOnce() -> C + Send,
    meanwhile: impl FnOnce() -> M,
    release: impl FnOnce(),
) -> (C, M) {
    let before = nccl::calls("ncclAllGather");
    std::thread::scope(|scope| {
        let _exit = ExitOnPanic;
        let held = scope.spawn(|| {
            let _exit = ExitOnPanic;
            control()
        });
        until(|| nccl::calls("ncclAllGather") > before);
        let made = meanwhile();
        assert!(!held.is_finished(), "the calls do not overlap");
        release();
        (held.join().expect("the thread should not panic"), made)
    })
}

impl Rank {
    /// Blocks a collective call of rank 0 until all ranks have run `meanwhile`: the other ranks make that call only afterwards.
    fn held_by_peers<C: Send, M>(&self, control: impl FnOnce() -> C + Send, meanwhile: impl FnOnce() -> M) -> (C, M) {
        self.meet();
        if self.rank == 0 {
            let begun = || {
                self.meet();
                meanwhile()
            };
            return overlap(control, begun, || self.meet());
        }
        self.meet();
        let made = meanwhile();
        self.meet();
        (control(), made)
    }
}

/// Splits a communicator with the same ranks off the world.
fn split(it: &Rank) -> Communicator {
    it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part")
}

nccl_test!(
    calls_over_other_communicators_do_not_wait_for_a_sync_a_sleep_or_a_wake,
    ["STUB_NCCL_REUSE_WINDOWS" = "1"],
    {
        let shared = Mutex::new(None);
        Job::new(2).run(|it| {
            let (registrar, other, pool) = (&it.registrar, split(it), it.attached_pool());
            let beside = it.pool();
            registrar
                .attach(&other, &[beside.id()], Registration::Windows)
                .expect("the pool should be symmetric and registrable");
            let mut tensors = [it.take(&pool, 20 * MIB), it.take(&beside, 20 * MIB)];
            registrar.sync(&[&other]).expect("the ranks should agree");
            let sleep_and_wake = || {
                let slept =
                    registrar.sleep(&other, beside.id(), Contents::Drop).expect("all ranks should sleep together");
                let woken = registrar.wake(&other, beside.id()).expect("all ranks should wake together");
                (slept.deregistrations, slept.memory.released_bytes, woken.registrations, woken.changed.len())
            };

            let sync = || registrar.sync(&[&it.world]).expect("the ranks should agree");
            let (synced, slept) = it.held_by_peers(sync, sleep_and_wake);
            assert_eq!((synced.registrations, slept), (1, (1, 20 * MIB, 1, 0)));

            let sleep =
                || registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
            let (slept, more) = it.held_by_peers(sleep, || {
                assert_eq!(registrar.phase(pool.id()), Ok(Phase::Awake), "before the ranks decide");
                let more = it.take(&beside, 30 * MIB);
                assert_eq!(registrar.sync(&[&other]).expect("the ranks should agree").registrations, 1);
                it.offset_of(&other, &more);
                more
            });
            assert_eq!((slept.deregistrations, slept.memory.released_bytes), (1, 20 * MIB));
            drop(more);
            it.trim(&beside);

            let wake = || registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
            let (woken, synced) = it.held_by_peers(wake, || {
                assert_eq!(registrar.phase(pool.id()), Ok(Phase::Asleep));
                // Creates and destroys a communicator.
                let next = it.connect("next", &shared);
                registrar
                    .attach(&next, &[beside.id()], Registration::Windows)
                    .expect("the pool should be symmetric and registrable");
                let synced = registrar.sync(&[&next, &other]).expect("the ranks should agree");
                next.destroy().expect("the communicator should be idle");
                registrar.sweep();
                synced
            });
            assert_eq!((woken.registrations, woken.changed, woken.lost), (1, vec![], Vec::<String>::new()));
            assert_eq!((synced.registrations, synced.deregistrations), (1, 1), "the dead segment had one window");
            let stats = registrar.stats();
            assert_eq!((stats.communicators, stats.windows, stats.window_bytes), (2, 2, 40 * MIB));
            it.reduce_right(&it.world, &mut tensors[0]);
            it.reduce_right(&other, &mut tensors[1]);
            other.destroy().expect("the communicator should be idle");
        });
        nothing_is_left();
    }
);

nccl_test!(memory_that_comes_and_goes_during_a_sync_waits_for_the_next_one, {
    Job::new(2).run(|it| {
        let (registrar, pool) = (&it.registrar, it.attached_pool());
        let old = it.take(&pool, 30 * MIB);
        registrar.sync(&[&it.world]).expect("the ranks should agree");
        let kept = it.take(&pool, 40 * MIB);
        let change = || {
            drop(old);
            let new = it.take(&pool, 50 * MIB);
            assert_eq!(it.trim(&pool), 0, "a window covers the dead segment");
            new
        };
        let sync = || registrar.sync(&[&it.world]).expect("the ranks should agree");
        // Rank 0 changes its memory inside the sync, and rank 1 after it.
        let (synced, new) = if it.rank == 0 {
            it.held_by_peers(sync, || {
                let new = change();
                let lookup = registrar.window_of(&it.world, &new);
                assert!(matches!(lookup, Err(LookupError::NotRegistered { .. })), "{lookup:?}");
                assert_eq!(registrar.stats().dead_bytes, 30 * MIB);
                new
            })
        } else {
            let (synced, ()) = it.held_by_peers(sync, || {});
            (synced, change())
        };
        assert_eq!((synced.registrations, synced.deregistrations, synced.released_bytes), (1, 0, 0));
        let synced = registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!((synced.registrations, synced.deregistrations, synced.released_bytes), (1, 1, 30 * MIB));
        [kept, new].iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        let stats = registrar.stats();
        assert_eq!((stats.windows, stats.window_bytes, stats.dead_bytes), (2, 90 * MIB, 0));
    });
    nothing_is_left();
});

// One rank, whose calls need no order that other ranks share.
nccl_test!(calls_over_the_communicators_of_a_sleep_wait_for_it, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    Job::new(1).run(|it| {
        let (registrar, other) = (&it.registrar, split(it));
        let pools = [it.attached_pool(), it.attached_pool()];
        let both = pools.each_ref().map(symmalloc_cuda::Pool::id);
        registrar.attach(&other, &both, Registration::Windows).expect("the pool should be symmetric and registrable");
        let tensors = pools.each_ref().map(|pool| it.take(pool, 20 * MIB));
        registrar.sync(&[&it.world, &other]).expect("a single rank should agree");
        let new = it.take(&pools[1], 30 * MIB);
        let sleep = |over: &Communicator, pool: usize| registrar.sleep(over, both[pool], Contents::Drop);
        // A sleep makes this query before it locks its communicators, and again after the ranks have agreed.
        let queries = || cuda::calls("cuStreamGetCaptureInfo_v2");
        let before = queries();
        assert!(!it.allocator.is_capturing().expect("no fault should be injected"));
        let (start, per_query) = (queries(), queries() - before);
        let work = cuda::hold(it.stream.cu_stream() as u64);
        std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            // Waits for the work of the stream.
            let first = scope.spawn(|| sleep(&it.world, 0));
            until(|| queries() >= start + 2 * per_query);
            let agreed = nccl::calls("ncclAllGather");
            let again = scope.spawn(|| sleep(&it.world, 0));
            let crossed = scope.spawn(|| sleep(&other, 1));
            until(|| queries() >= start + 4 * per_query);
            assert_eq!([first.is_finished(), again.is_finished(), crossed.is_finished()], [false; 3]);
            assert_eq!(registrar.phase(both[0]), Ok(Phase::Awake));
            assert_eq!(registrar.stats().windows, 4);
            assert_eq!(nccl::calls("ncclAllGather"), agreed, "the others have exchanged nothing");
            assert!(registrar.window_of(&other, &tensors[0]).is_ok(), "lookups do not wait");
            assert_eq!(registrar.sweep(), 0, "a sweep does not wait");
            drop(work);
            let [first, again, crossed] = [first, again, crossed]
                .map(|call| call.join().expect("the thread should not panic").expect("a single rank should sleep"));
            assert_eq!((first.deregistrations, first.memory.released_bytes), (2, 20 * MIB));
            assert_eq!((again.deregistrations, again.memory.released_bytes), (0, 0), "it already slept");
            assert_eq!((crossed.deregistrations, crossed.memory.released_bytes), (2, 50 * MIB));
        });
        for pool in both {
            assert_eq!(registrar.wake(&it.world, pool).expect("a single rank should wake").registrations, 2);
        }
        assert_eq!(
            registrar.sync(&[&it.world, &other]).expect("a single rank should agree").registrations,
            2,
            "the new segment"
        );
        it.offset_of(&other, &new);
        other.destroy().expect("the communicator should be idle");
    });
    nothing_is_left();
});

nccl_test!(a_communicator_that_is_destroyed_during_a_sleep_is_left_out_of_the_wake, {
    Job::new(1).run(|it| {
        let (registrar, other, pool) = (&it.registrar, split(it), it.attached_pool());
        registrar
            .attach(&other, &[pool.id()], Registration::Windows)
            .expect("the pool should be symmetric and registrable");
        let mut tensor = it.take(&pool, 20 * MIB);
        registrar.sync(&[&it.world, &other]).expect("a single rank should agree");
        let work = cuda::hold(it.stream.cu_stream() as u64);
        let sleep = || registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("a single rank should sleep");
        let destroy = || {
            other.destroy().expect("the communicator should be idle");
            assert_eq!((other.state(), registrar.sweep()), (CommState::Destroyed, 0), "the sleep has locked it");
        };
        let (slept, ()) = overlap(sleep, destroy, || drop(work));
        assert_eq!(
            (slept.deregistrations, slept.memory.released_bytes),
            (1, 20 * MIB),
            "the other window ended earlier"
        );
        let woken = registrar.wake(&it.world, pool.id()).expect("a single rank should wake");
        assert_eq!((woken.registrations, woken.lost), (1, Vec::<String>::new()), "all ranks know that it ended");
        it.reduce_right(&it.world, &mut tensor);
    });
    nothing_is_left();
});
