//! Tests of pools that sleep and wake on all ranks, in place and with the same windows. All ranks report the same obstacles.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Mutex;
use std::time::Instant;
use stub_process::{cuda, nccl, nccl_test};
use symmalloc_core::PoolId;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, DriverError, GraphPool, Pool};
use symmalloc_nccl::{
    CollectiveSleepError, CommState, Communicator, Invalidated, InvalidationCursor, LookupError, Obstacle,
    RankObstacle, Registration, SleepField, SyncError, WindowHandle,
};

fn window(it: &Rank, comm: &Communicator, buffer: &DeviceBuffer<f32>) -> WindowHandle {
    it.registrar.window_of(comm, buffer).expect("it has a window").window
}

/// Returns a synced pool with three segments that is attached to the world, and its buffers.
fn registered(it: &Rank) -> (Pool<CudaBackend>, Vec<DeviceBuffer<f32>>) {
    let pool = it.attached_pool();
    let tensors = [20, 30, 40].map(|size| it.take(&pool, size * MIB)).into();
    it.registrar.sync(&[&it.world]).expect("the ranks should agree");
    (pool, tensors)
}

nccl_test!(a_pool_wakes_in_place_with_the_windows_that_it_had, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    Job::new(4).run(|it| {
        let pair = it
            .world
            .split(Some(it.world.rank() / 2), 0)
            .expect("all ranks should split")
            .expect("the rank should be in a part");
        let pool = it.attached_pool();
        it.registrar
            .attach(&pair, &[pool.id()], it.windows())
            .expect("the pool is not attached to this communicator yet");
        let mut tensors: Vec<_> = [20, 30, 40].map(|size| it.take(&pool, size * MIB)).into();
        it.registrar.sync(&[&it.world, &pair]).expect("the ranks should agree");
        let other = it.attached_pool();
        let mut other_tensor = it.take(&other, 25 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let handles = |tensors: &[DeviceBuffer<f32>]| -> Vec<[WindowHandle; 2]> {
            tensors.iter().map(|tensor| [&it.world, &pair].map(|comm| window(it, comm, tensor))).collect()
        };
        let before = handles(&tensors);
        let mut cursor = InvalidationCursor::default();
        let _none = it.registrar.invalidations(&it.world, &mut cursor);
        let stats = || {
            [&it.world, &pair]
                .map(|comm| it.registrar.communicator_stats(comm).expect("the communicator should be ready"))
        };
        let stats_before = stats();
        for _ in 0..20 {
            let slept =
                it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
            assert_eq!((slept.memory.released_bytes, slept.memory.kept_bytes, slept.deregistrations), (90 * MIB, 0, 6));
            assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Asleep));
            assert_eq!(it.registrar.stats().windows, 1, "only the window of the other pool is left");
            // The pool cannot be used while it sleeps; other memory can.
            let error = it.registrar.window_of(&it.world, &tensors[0]).expect_err("it sleeps");
            assert!(
                matches!(error, LookupError::Asleep { .. }) && error.to_string().contains("wake its pool"),
                "{error}"
            );
            assert_eq!(it.registrar.sync(&[&it.world, &pair]).expect("the sleeping pool is skipped").registrations, 0);
            it.reduce_right(&it.world, &mut other_tensor);
            let again =
                it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("the call should have nothing to do");
            assert_eq!(again.memory.released_bytes, 0);

            let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
            assert_eq!((woken.memory.remapped_bytes, woken.registrations), (90 * MIB, 6));
            assert_eq!((woken.changed, woken.lost), (vec![], Vec::<String>::new()));
            assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Awake));
            assert_eq!(handles(&tensors), before, "the same windows");
            assert_eq!(stats(), stats_before, "the same windows in the same symmetric space");
            assert_eq!(
                it.registrar.wake(&it.world, pool.id()).expect("the call should have nothing to do").registrations,
                0
            );
            for tensor in &mut tensors {
                it.reduce_right(&it.world, tensor);
                it.reduce_right(&pair, tensor);
            }
        }
        assert_eq!(
            it.registrar.invalidations(&it.world, &mut cursor),
            Invalidated::Keys(vec![]),
            "keys outlive a sleep"
        );
        // The pool works as before.
        tensors.push(it.take(&pool, 50 * MIB));
        assert_eq!(it.registrar.sync(&[&it.world, &pair]).expect("the ranks should agree").registrations, 2);
        it.reduce_right(&it.world, tensors.last_mut().expect("a tensor was just allocated"));
    });
    nothing_is_left();
});

nccl_test!(sleeps_over_different_communicators_run_concurrently, {
    let shared = Mutex::new(None);
    Job::new(1).run(|it| {
        let next = it.connect("next", &shared);
        let pools: Vec<_> = [&it.world, &next].map(|over| (over, it.attached_pool())).into();
        let _tensors: Vec<_> = pools
            .iter()
            .map(|(_, pool)| {
                it.registrar.attach(&next, &[pool.id()], it.windows()).expect("the pool is not attached yet");
                it.take(pool, 20 * MIB)
            })
            .collect();
        it.registrar.sync(&[&it.world, &next]).expect("a single rank should agree");
        let (done, finished) = std::sync::mpsc::channel::<()>();
        let limit = super::support::PATIENT;
        std::thread::spawn(move || {
            if finished.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("two sleeps wait for each other's locks");
                std::process::abort();
            }
        });
        std::thread::scope(|scope| {
            for (over, pool) in &pools {
                scope.spawn(|| {
                    for _ in 0..50 {
                        it.registrar.sleep(over, pool.id(), Contents::Drop).expect("a single rank should sleep");
                        it.registrar.wake(over, pool.id()).expect("a single rank should wake");
                    }
                });
            }
        });
        drop(done);
        next.destroy().expect("the communicator should be destroyed");
    });
    nothing_is_left();
});

nccl_test!(a_sleeping_pool_releases_its_memory_on_every_device, {
    Job::new(2).run(|it| {
        let (pool, tensors) = registered(it);
        it.meet();
        assert_eq!(cuda::live().device_bytes, 2 * 90 * MIB);
        it.meet();
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.meet();
        assert_eq!(cuda::live().device_bytes, 0);
        assert_eq!(nccl::live().windows, 0);
        it.meet();
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        drop(tensors);
    });
    nothing_is_left();
});

nccl_test!(a_wake_restores_kept_contents_and_zeroes_the_others, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        let content: Vec<f32> = (0..tensors[0].len()).map(|at| (at % 1013 + it.rank) as f32).collect();
        it.stream.memcpy_htod(&content, &mut tensors[0]).expect("the copy should succeed");
        let slept = it.registrar.sleep(&it.world, pool.id(), Contents::Keep).expect("all ranks should sleep together");
        assert_eq!((slept.memory.kept_bytes, slept.memory.released_bytes), (90 * MIB, 90 * MIB));
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        assert_eq!(it.stream.clone_dtoh(&tensors[0]).expect("the copy should succeed"), content);
        it.registrar.sleep(&it.world, pool.id(), Contents::Zero).expect("all ranks should sleep together");
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        assert!(
            it.stream.clone_dtoh(&tensors[0]).expect("the copy should succeed").iter().all(|element| *element == 0.0)
        );
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(a_wake_restores_buffers_of_a_private_pool, {
    Job::new(2).run(|it| {
        let config = symmalloc_core::PoolConfig::builder().build().expect("the configuration should be valid");
        let pool = it.allocator.create_pool(config).expect("the pool should fit into the device");
        it.registrar.attach(&it.world, &[pool.id()], Registration::Buffers).expect("any pool should be attachable");
        let tensor = it.take(&pool, 50 * MIB);
        assert_eq!(it.registrar.sync(&[&it.world]).expect("no other rank takes part").registrations, 1);
        let slept = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        assert_eq!((slept.deregistrations, it.registrar.stats().buffers), (1, 0));
        let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        assert_eq!((woken.registrations, it.registrar.stats().buffers), (1, 1));
        assert!(matches!(it.registrar.window_of(&it.world, &tensor), Err(LookupError::Plain { .. })));
    });
    nothing_is_left();
});

nccl_test!(segments_removed_and_created_before_a_sleep_are_synced_after_it, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        drop(tensors.remove(1));
        it.trim(&pool);
        let mut late = it.take(&pool, 60 * MIB);
        // No sync has run since then, so a dead segment still has a window, and a new segment has none.
        let slept = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        assert_eq!(slept.deregistrations, 3);
        it.meet();
        let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        assert_eq!(woken.registrations, 2, "only live segments");
        let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!((synced.registrations, synced.deregistrations, synced.released_bytes), (1, 0, 30 * MIB));
        it.reduce_right(&it.world, &mut late);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(a_refused_allocation_is_reported_on_all_ranks_and_all_stay_asleep, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        for nth in 1..=3 {
            it.meet();
            if it.rank == 0 {
                cuda::fail_elsewhere("cuMemCreate", nth, 2);
            }
            it.meet();
            let error = it.registrar.wake(&it.world, pool.id()).expect_err("rank 1 has no memory");
            let obstacle = Obstacle::Memory { needed_bytes: 90 * MIB, code: 2 };
            let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
            assert_eq!(ranks.iter().map(|of| (of.rank, of.obstacle)).collect::<Vec<_>>(), [(1, obstacle)], "{nth}");
            assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Asleep));
            it.meet();
            assert_eq!(cuda::live().device_bytes, 0, "no rank keeps memory");
            it.meet();
        }
        it.registrar.wake(&it.world, pool.id()).expect("rank 1 has memory now");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(a_failed_capture_query_is_an_error, {
    let call = "cuStreamGetCaptureInfo_v2";
    Job::new(1).run(|it| {
        let (pool, _tensors) = registered(it);
        let before = cuda::calls(call);
        assert_eq!(it.allocator.is_capturing(), Ok(false));
        let streams = cuda::calls(call) - before;
        let error = DriverError { call, code: 700 };
        cuda::fail(call, 1, 700);
        let expected = CollectiveSleepError::Cuda { communicator: it.world.name().to_owned(), error: error.into() };
        assert_eq!(it.registrar.wake(&it.world, pool.id()), Err(expected.clone()));
        cuda::fail(call, 1, 700);
        assert_eq!(it.registrar.sleep(&it.world, pool.id(), Contents::Drop), Err(expected));
        // The second query runs after the ranks have started to exchange messages, so all ranks get the error.
        cuda::fail(call, streams + 1, 700);
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect_err("the query fails");
        let CollectiveSleepError::Refused { ranks, .. } = error else { panic!("{error}") };
        assert_eq!((ranks.len(), ranks[0].obstacle), (1, Obstacle::Stream { code: 700 }));
        cuda::heal();
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
    });
    nothing_is_left();
});

nccl_test!(unfinished_work_is_reported_on_all_ranks_and_all_stay_awake, {
    Job::new(2).impatient().run(|it| {
        let (pool, mut tensors) = registered(it);
        let graphs = GraphPool::new(&it.allocator, symmalloc_core::PoolConfig::default())
            .expect("the pool should fit into the device");
        let obstacles = |error: CollectiveSleepError| -> Vec<(u32, Obstacle)> {
            let CollectiveSleepError::Refused { ranks, .. } = error else { panic!("{error}") };
            ranks.iter().map(|RankObstacle { rank, obstacle, .. }| (*rank, *obstacle)).collect()
        };
        // Ranks cannot communicate during a capture, so the call fails before they exchange messages.
        let capture = graphs.begin(&it.stream).expect("no other capture is active");
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect_err("a graph is being captured");
        assert_eq!(error, CollectiveSleepError::Capturing);
        assert_eq!(it.registrar.wake(&it.world, pool.id()), Err(CollectiveSleepError::Capturing));
        drop(capture);
        let work = (it.rank == 0).then(|| cuda::hold(it.stream.cu_stream() as u64));
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect_err("rank 0 is busy");
        assert_eq!(obstacles(error), [(0, Obstacle::Work { waited: it.deadline / 2 })]);
        drop(work);
        assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Awake));
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(different_calls_are_reported_on_all_ranks_and_change_nothing, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        let second = it.attached_pool();
        let _kept = it.take(&second, 20 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let sleep = |pool: PoolId, contents| it.registrar.sleep(&it.world, pool, contents);
        let field = |error: CollectiveSleepError| {
            let CollectiveSleepError::Differ { difference, .. } = error else { panic!("{error}") };
            difference.field
        };
        let is_second = it.rank == 1;
        let contents = if is_second { Contents::Keep } else { Contents::Drop };
        assert_eq!(field(sleep(pool.id(), contents).expect_err("the contents differ")), SleepField::Call);
        let one = if is_second { second.id() } else { pool.id() };
        assert_eq!(field(sleep(one, Contents::Drop).expect_err("the pools differ")), SleepField::Pool);
        // One rank sleeps while the other wakes.
        let differs = if is_second {
            matches!(it.registrar.wake(&it.world, pool.id()), Err(CollectiveSleepError::Differ { .. }))
        } else {
            field(sleep(pool.id(), Contents::Drop).expect_err("the other rank wakes the pool")) == SleepField::Call
        };
        assert!(differs);
        // One rank sleeps while the other syncs.
        if is_second {
            let error = it.registrar.sync(&[&it.world]).expect_err("the other rank puts the pool to sleep");
            assert!(matches!(error, SyncError::Differ { .. }), "{error}");
        } else {
            assert_eq!(
                field(sleep(pool.id(), Contents::Drop).expect_err("the other rank syncs")),
                SleepField::Protocol
            );
        }
        assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Awake));
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(ranks_whose_histories_differ_do_not_sleep, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        if it.rank == 1 {
            drop(tensors.pop());
        }
        let error = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect_err("they differ");
        assert!(matches!(error, CollectiveSleepError::Disagreed { .. }), "{error}");
        assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Awake));
    });
    nothing_is_left();
});

nccl_test!(a_communicator_with_absent_ranks_keeps_the_pool_awake, {
    Job::new(4).run(|it| {
        let pair = it
            .world
            .split(Some(it.world.rank() / 2), 0)
            .expect("all ranks should split")
            .expect("the rank should be in a part");
        let (pool, mut tensors) = registered(it);
        let error = it.registrar.sleep(&pair, pool.id(), Contents::Drop).expect_err("it is not attached");
        assert!(matches!(error, CollectiveSleepError::NotAttached { .. }), "{error}");
        it.registrar
            .attach(&pair, &[pool.id()], it.windows())
            .expect("the pool is not attached to this communicator yet");
        let error = it.registrar.sleep(&pair, pool.id(), Contents::Drop).expect_err("the world has other ranks");
        let CollectiveSleepError::Differ { difference, .. } = error else { panic!("{error}") };
        assert_eq!((difference.field, difference.groups.len()), (SleepField::Communicators, 1));
        assert_eq!(difference.groups[0].1, 4, "the communicator has four ranks, two of which take part");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(communicators_that_end_during_a_sleep_are_skipped_and_reported, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    let shared = Mutex::new(None);
    Job::new(4).run(|it| {
        let pair = it
            .world
            .split(Some(it.world.rank() / 2), 0)
            .expect("all ranks should split")
            .expect("the rank should be in a part");
        let pool = it.attached_pool();
        it.registrar
            .attach(&pair, &[pool.id()], it.windows())
            .expect("the pool is not attached to this communicator yet");
        let mut tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world, &pair]).expect("the ranks should agree");
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        // Only one of four ranks knows that its pair has ended.
        if it.rank == 1 {
            pair.abort().expect("the communicator should end");
            it.registrar.sweep();
        }
        it.meet();
        let registrations = nccl::calls("ncclCommWindowRegister");
        it.meet();
        let begun = Instant::now();
        let woken = it.registrar.wake(&it.world, pool.id()).expect("the world still works");
        it.meet();
        assert_eq!(nccl::calls("ncclCommWindowRegister") - registrations, 6, "no rank calls NCCL with the dead pair");
        assert!(begun.elapsed() < super::support::PATIENT / 2, "no rank waits for the dead pair");
        let is_hit = it.rank < 2;
        assert_eq!(woken.registrations, if is_hit { 1 } else { 2 });
        assert_eq!(woken.lost, if is_hit { vec![pair.name().to_owned()] } else { vec![] });
        assert_eq!(pair.state() == CommState::Ready, !is_hit);
        it.reduce_right(&it.world, &mut tensor);
        // A later sleep ignores the dead pair, and a new communicator replaces it.
        let next = it.connect("next", &shared);
        it.registrar
            .attach(&next, &[pool.id()], it.windows())
            .expect("the pool is not attached to this communicator yet");
        it.registrar.sync(&[&it.world, &next]).expect("the ranks should agree");
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        assert_eq!((woken.lost, woken.changed), (Vec::<String>::new(), vec![]));
        it.reduce_right(&next, &mut tensor);
        next.destroy().expect("the communicator should be destroyed");
        pair.destroy().expect("the communicator should be destroyed");
    });
    nothing_is_left();
});

nccl_test!(communicators_that_ended_are_forgotten_with_their_pools, {
    let shared = Mutex::new(None);
    Job::new(2).run(|it| {
        for _ in 0..4 {
            let pool = it.pool();
            let next = it.connect("next", &shared);
            it.registrar
                .attach(&next, &[pool.id()], it.windows())
                .expect("the pool is not attached to this communicator yet");
            let tensor = it.take(&pool, MIB);
            it.registrar.sync(&[&next]).expect("the ranks should agree");
            next.destroy().expect("the communicator should be destroyed");
            it.registrar.sweep();
            assert_eq!(
                format!("{:?}", it.registrar).matches("EndedComm {").count(),
                1,
                "the ended communicator is kept while other ranks may name it"
            );
            drop((tensor, pool));
            // A trim releases the memory of a dropped pool, if it was not released before.
            it.allocator.trim_all().expect("no fault should be injected");
        }
        it.registrar.sweep();
        assert!(!format!("{:?}", it.registrar).contains("EndedComm {"), "{:?}", it.registrar);
    });
    nothing_is_left();
});

nccl_test!(windows_with_new_handles_are_reported_on_all_ranks, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        // Another pool takes the addresses of its windows.
        let other = it.attached_pool();
        let _taken = it.take(&other, 64 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let mut cursor = InvalidationCursor::default();
        let _none = it.registrar.invalidations(&it.world, &mut cursor);
        let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        let segments: Vec<u32> = woken.changed.iter().map(|(_, segment)| segment.id.0).collect();
        assert!(!segments.is_empty(), "the windows' addresses are in use");
        assert!(woken.changed.iter().all(|(communicator, _)| communicator == it.world.name()));
        let Invalidated::Keys(keys) = it.registrar.invalidations(&it.world, &mut cursor) else {
            panic!("the communicator is ready")
        };
        assert_eq!(keys.iter().map(|key| key.segment.id.0).collect::<Vec<_>>(), segments);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(a_pool_that_is_detached_during_a_sleep_has_nothing_to_register, {
    Job::new(2).run(|it| {
        let (pool, tensors) = registered(it);
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should be attached");
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").deregistrations, 0);
        let error = it.registrar.wake(&it.world, pool.id()).expect_err("it is not attached");
        assert!(matches!(error, CollectiveSleepError::NotAttached { .. }), "{error}");
        it.allocator.core().wake(pool.id()).expect("the pool is no longer registered");
        drop(tensors);
    });
    nothing_is_left();
});

nccl_test!(a_pool_that_was_detached_during_a_sleep_sleeps_with_its_next_windows, {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should be attached");
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        it.allocator.core().wake(pool.id()).expect("the pool is no longer registered");
        tensors.pop();
        it.trim(&pool);
        it.registrar.attach(&it.world, &[pool.id()], it.windows()).expect("not attached anymore");
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").registrations, 2);
        let slept = it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        assert_eq!((slept.deregistrations, slept.memory.released_bytes), (2, 50 * MIB));
        assert_eq!(it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together").registrations, 2);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(
    ranks_that_cannot_reach_each_others_memory_sleep_and_wake_without_windows,
    ["STUB_NCCL_NO_SYMMETRIC" = "1", "STUB_NCCL_VERSION" = "22902"],
    {
        Job::new(2).run(|it| {
            let (pool, mut tensors) = registered(it);
            assert!(matches!(it.registrar.window_of(&it.world, &tensors[0]), Err(LookupError::Plain { .. })));
            for _ in 0..5 {
                let slept =
                    it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
                assert_eq!((slept.deregistrations, slept.memory.released_bytes), (3, 90 * MIB));
                let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
                assert_eq!((woken.registrations, woken.changed), (3, vec![]));
                tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
            }
        });
        nothing_is_left();
    }
);
