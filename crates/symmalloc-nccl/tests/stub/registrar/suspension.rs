//! Tests of communicators that are suspended while a pool sleeps.

use super::support::{Job, MIB, Rank, nothing_is_left};
use std::sync::Mutex;
use stub_process::{is_night, nccl, nccl_test};
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{
    CollectiveSleepError, CommError, CommState, Obstacle, ReduceOp, SleepField, SleepStep, SyncError,
};

fn registered(it: &Rank) -> (Pool<CudaBackend>, Vec<DeviceBuffer<f32>>) {
    registered_with(it, [20, 30, 40])
}

/// Registers a pool with three segments of these sizes in MiB.
fn registered_with(it: &Rank, sizes: [u64; 3]) -> (Pool<CudaBackend>, Vec<DeviceBuffer<f32>>) {
    let pool = it.attached_pool();
    let tensors = sizes.map(|size| it.take(&pool, size * MIB)).into();
    it.registrar.sync(&[&it.world]).expect("the ranks should agree");
    (pool, tensors)
}

fn suspends_and_resumes(ranks: usize) {
    Job::new(ranks).run(|it| {
        let pair = it
            .world
            .split(Some(it.world.rank() / 2), 0)
            .expect("all ranks should split")
            .expect("the rank should be in a part");
        let (pool, mut tensors) = registered_with(it, [10, 12, 14]);
        it.registrar.attach(&pair, &[pool.id()], it.windows()).expect("the pool should not be attached yet");
        it.registrar.sync(&[&it.world, &pair]).expect("the ranks should agree");
        let content: Vec<f32> = (0..tensors[0].len()).map(|at| (at % 1013 + it.rank) as f32).collect();
        let rounds = if is_night() { 10 } else { 3 };
        for _ in 0..rounds {
            it.stream.memcpy_htod(&content, &mut tensors[0]).expect("the copy should succeed");
            let slept = it
                .registrar
                .sleep_and_suspend(&it.world, pool.id(), Contents::Keep)
                .expect("all ranks should sleep together");
            assert_eq!((slept.suspended_bytes, slept.deregistrations), (2 * 64 * MIB, 6));
            assert!(it.world.is_suspended() && pair.is_suspended());
            assert_eq!(it.world.memory().expect("NCCL reports it").held_bytes(), 0);
            let mut other = it.take(&it.pool(), MIB);
            let error = it.world.all_reduce_in_place(&mut other, ReduceOp::Sum, &it.stream).expect_err("suspended");
            assert!(matches!(error, CommError::Suspended { .. }), "{error}");
            drop(other);
            for error in [it.registrar.sync(&[&it.world]), it.registrar.agree(&[&pair, &it.world])] {
                assert!(matches!(error, Err(SyncError::Suspended { .. })), "{error:?}");
            }
            let derived =
                [it.world.split(Some(0), 0).map(drop), it.world.shrink(&[(it.rank as u32 + 1) % 2]).map(drop)];
            assert!(derived.iter().all(|error| matches!(error, Err(CommError::Suspended { .. }))), "{derived:?}");
            let woken = it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
            assert_eq!((woken.registrations, woken.resumed.len(), woken.lost.len()), (6, 2, 0));
            assert!(!it.world.is_suspended() && !pair.is_suspended());
            assert_eq!(it.stream.clone_dtoh(&tensors[0]).expect("the copy should succeed"), content);
            tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
            tensors.iter_mut().for_each(|tensor| it.reduce_right(&pair, tensor));
        }
        // A second sleep of a sleeping pool resumes and suspends the communicators again.
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
}

nccl_test!(
    suspended_communicators_of_two_ranks_resume_with_correct_windows,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64"],
    {
        suspends_and_resumes(2);
    }
);

nccl_test!(
    suspended_communicators_of_four_ranks_resume_with_correct_windows,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64"],
    {
        suspends_and_resumes(4);
    }
);

nccl_test!(an_older_nccl_refuses_to_suspend_and_the_pool_stays_awake, ["STUB_NCCL_VERSION" = "22906"], {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        let error = it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect_err("it is too old");
        let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
        assert!(ranks.len() == 2 && ranks.iter().all(|of| of.obstacle == Obstacle::NoSuspension), "{error}");
        assert!(error.to_string().contains("2.29.7"), "{error}");
        assert!(matches!(it.world.memory(), Err(CommError::Unsupported { .. })));
        assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Awake));
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(other_windows_prevent_a_suspension, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        let (pool, _tensors) = registered(it);
        let other = it.attached_pool();
        let mut tensor = it.take(&other, 20 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let error = it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect_err("it has windows");
        let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
        assert!(ranks.len() == 2 && ranks.iter().all(|of| of.obstacle == Obstacle::WindowsOfOtherPools), "{error}");
        it.reduce_right(&it.world, &mut tensor);
        it.registrar.sleep(&it.world, other.id(), Contents::Drop).expect("all ranks should sleep together");
        it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect("the other pool sleeps");
        it.registrar.wake(&it.world, other.id()).expect("all ranks should wake together");
        let error = it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect_err("it has windows");
        assert!(matches!(error, CollectiveSleepError::Refused { .. }), "{error}");
        it.reduce_right(&it.world, &mut tensor);
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        it.reduce_right(&it.world, &mut tensor);
    });
    nothing_is_left();
});

nccl_test!(a_communicator_with_registrations_is_not_suspended, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        let error = it.world.suspend().expect_err("it has windows");
        assert!(matches!(error, CommError::Registered { registrations: 3, .. }), "{error}");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        // A registration of the program's own counts as well.
        let other = it.pool();
        let tensor = it.take(&other, 20 * MIB);
        let base = it.registrar.key_of(&tensor).expect("it is in a segment").base;
        let buffer = it.world.register_buffer(base, MIB).expect("NCCL supports it");
        let error = it.world.suspend().expect_err("it has a buffer");
        assert!(matches!(error, CommError::Registered { registrations: 1, .. }), "{error}");
        let error = it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop).expect_err("it has a buffer");
        let CollectiveSleepError::Refused { ranks, .. } = &error else { panic!("{error}") };
        assert!(ranks.iter().all(|of| of.obstacle == Obstacle::WindowsOfOtherPools), "{error}");
        it.world.deregister_buffer(buffer).expect("it should be registered");
        it.world.suspend().expect("nothing is registered");
        assert!(it.world.is_suspended());
        it.world.resume().expect("all ranks should resume the communicator");
        it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(
    what_remains_on_the_device_is_listed_by_owner,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64"],
    {
        Job::new(2).run(|it| {
            let (pool, _tensors) = registered(it);
            let awake = it.registrar.device_memory().expect("the driver reports it");
            assert_eq!((awake.awake_bytes, awake.communicators_bytes), (90 * MIB, 64 * MIB));
            assert_eq!(it.allocator.device_memory().expect("the driver reports it").communicators_bytes, 0);
            it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
            let asleep = it.registrar.device_memory().expect("the driver reports it");
            assert_eq!((asleep.awake_bytes, asleep.asleep_bytes, asleep.communicators_bytes), (0, 0, 64 * MIB));
            it.registrar
                .sleep_and_suspend(&it.world, pool.id(), Contents::Drop)
                .expect("all ranks should sleep together");
            let suspended = it.registrar.device_memory().expect("the driver reports it");
            assert_eq!((suspended.used_bytes, suspended.communicators_bytes), (0, 0));
            it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
            it.meet();
        });
        nothing_is_left();
    }
);

nccl_test!(a_sleep_that_suspends_on_one_rank_alone_changes_nothing, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        let (pool, mut tensors) = registered(it);
        let outcome = if it.rank == 0 {
            it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Drop)
        } else {
            it.registrar.sleep(&it.world, pool.id(), Contents::Drop)
        };
        let error = outcome.expect_err("the calls differ");
        let CollectiveSleepError::Differ { difference, .. } = error else { panic!("{error}") };
        assert_eq!(difference.field, SleepField::Call);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(
    a_rank_without_room_for_its_communicator_recovers_while_the_others_wait,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_SUSPENDABLE_MB" = "64", "STUB_MEMORY_BYTES" = "268435456"],
    {
        Job::new(2).run(|it| {
            let (pool, mut tensors) = registered(it);
            let rounds = if is_night() { 50 } else { 6 };
            for _ in 0..rounds {
                it.registrar
                    .sleep_and_suspend(&it.world, pool.id(), Contents::Drop)
                    .expect("all ranks should sleep together");
                let digest = it.allocator.digest(pool.id());
                if it.rank == 1 {
                    let full = it
                        .allocator
                        .create_pool(symmalloc_core::PoolConfig::default())
                        .expect("the pool should fit into the device");
                    let private = it.take(&full, 210 * MIB);
                    let error = it.registrar.wake(&it.world, pool.id()).expect_err("the device is full");
                    assert!(matches!(error, CollectiveSleepError::NoRoom { .. }), "{error}");
                    assert_eq!(it.allocator.digest(pool.id()), digest, "the call was no op");
                    drop(private);
                }
                it.registrar.wake(&it.world, pool.id()).expect("all ranks should wake together");
                tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
            }
        });
        nothing_is_left();
    }
);

/// Fails a call on rank 1 during the sleep or the wake. The pool sleeps, and wakes with its contents over a new communicator.
fn survives_a_failed(call: &'static str, is_hung: bool) {
    let shared = Mutex::new(None);
    Job::new(2).impatient().run(|it| {
        let (pool, mut tensors) = registered_with(it, [10, 12, 14]);
        let content: Vec<f32> = (0..tensors[0].len()).map(|at| (at % 1013 + it.rank) as f32).collect();
        it.stream.memcpy_htod(&content, &mut tensors[0]).expect("the copy should succeed");
        it.meet();
        if it.rank == 0 {
            if is_hung {
                nccl::hang(call, Some(1), 1);
            } else {
                nccl::fail(call, Some(1), 1, 3);
            }
        }
        it.meet();
        let slept = it.registrar.sleep_and_suspend(&it.world, pool.id(), Contents::Keep);
        let error = match slept {
            Err(error) => error,
            Ok(_) => it.registrar.wake(&it.world, pool.id()).expect_err("a rank fails"),
        };
        let CollectiveSleepError::Broken { step, is_asleep, .. } = &error else { panic!("{error}") };
        let expected = if call == "ncclCommSuspend" { SleepStep::Suspend } else { SleepStep::Resume };
        assert_eq!((*step, *is_asleep), (expected, true), "{error}");
        assert_ne!(it.world.state(), CommState::Ready);
        it.meet();
        nccl::heal();
        let next = it.connect("next", &shared);
        it.registrar.attach(&next, &[pool.id()], it.windows()).expect("it is asleep");
        it.registrar.wake(&next, pool.id()).expect("all ranks should wake together");
        it.registrar.sync(&[&next]).expect("the ranks should agree");
        assert_eq!(it.stream.clone_dtoh(&tensors[0]).expect("the copy should succeed"), content);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&next, tensor));
        drop(tensors);
        next.destroy().expect("the communicator should be destroyed");
    });
}

nccl_test!(the_contents_survive_a_failed_suspension, ["STUB_NCCL_VERSION" = "23007"], {
    survives_a_failed("ncclCommSuspend", false);
});

nccl_test!(the_contents_survive_a_failed_resumption, ["STUB_NCCL_VERSION" = "23007"], {
    survives_a_failed("ncclCommResume", false);
});

nccl_test!(the_contents_survive_a_rank_that_does_not_suspend, ["STUB_NCCL_VERSION" = "23007"], {
    survives_a_failed("ncclCommSuspend", true);
});

nccl_test!(the_contents_survive_a_rank_that_does_not_resume, ["STUB_NCCL_VERSION" = "23007"], {
    survives_a_failed("ncclCommResume", true);
});
