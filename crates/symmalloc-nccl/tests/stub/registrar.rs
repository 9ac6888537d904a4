//! Tests of the registrar on the stubs: which memory it registers on which communicators, and when it releases memory.

mod captures;
mod concurrent;
mod costs;
mod divergence;
mod events;
mod faults;
mod graphs;
mod growth;
#[cfg(feature = "metrics")]
mod metrics;
mod programs;
mod recovery;
mod rejected;
mod repetition;
mod revocation;
mod shrink;
mod sleep;
mod sleep_deaths;
mod sleep_faults;
mod sleep_programs;
pub(crate) mod support;
mod suspension;
mod waits;
mod window_flags;

use std::num::NonZeroU32;
use std::sync::Mutex;
use stub_process::{ExitOnPanic, nccl, nccl_test, until};
use support::{Job, MIB, nothing_is_left};
use symmalloc_agreement::Mode;
use symmalloc_core::PoolId;
use symmalloc_core::config::PoolConfig;
use symmalloc_core::errors::AllocateError;
use symmalloc_core::op::Contents;
use symmalloc_cuda::{CudaError, CudaMemory, Pool};
use symmalloc_nccl::{
    AttachError, Attachment, Invalidated, InvalidationCursor, LookupError, Registrar, Registration, SyncError,
};

nccl_test!(allocations_have_windows_after_a_sync_and_reduce_correctly, {
    Job::new(4).run(|it| {
        let pool = it.attached_pool();
        let mut tensors: Vec<_> = (0..8).map(|_| it.take(&pool, MIB)).collect();
        assert!(matches!(it.registrar.window_of(&it.world, &tensors[0]), Err(LookupError::NotRegistered { .. })));
        let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!((synced.registrations, synced.deregistrations, synced.rounds), (4, 0, 1), "four segments of 2 MiB");
        let offsets: Vec<u64> = tensors.iter().map(|tensor| it.offset_of(&it.world, tensor)).collect();
        assert_eq!(offsets, [0, MIB, 0, MIB, 0, MIB, 0, MIB]);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        // If the blocks are freed and allocated again, they have the same placements, and no registration is needed.
        tensors.clear();
        let mut tensors: Vec<_> = (0..8).map(|_| it.take(&pool, MIB)).collect();
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").registrations, 0);
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
        let stats = it.registrar.stats();
        assert_eq!((stats.windows, stats.window_bytes, stats.registrations, stats.syncs), (4, 8 * MIB, 4, 2));
    });
    nothing_is_left();
});

nccl_test!(without_agreement_a_sync_with_nothing_new_makes_no_call_at_all, {
    Job::new(2).quiet().run(|it| {
        let pool = it.attached_pool();
        let _kept = it.take(&pool, MIB);
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").rounds, 1);
        it.meet();
        let (calls, driver_calls) = (nccl::all_calls(), stub_process::cuda::all_calls());
        it.meet();
        for _ in 0..100 {
            assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").rounds, 0);
        }
        it.meet();
        assert_eq!((nccl::all_calls(), stub_process::cuda::all_calls()), (calls, driver_calls));
        it.meet();
        assert_eq!(it.registrar.stats().quiet_syncs, 100);
    });
    nothing_is_left();
});

nccl_test!(ranks_compare_as_often_as_the_attachments_require, {
    Job::new(2).run(|it| {
        let every = |syncs| Mode::EverySyncs(NonZeroU32::new(syncs).expect("the number should not be zero"));
        for (modes, expected) in [
            ([Mode::Off, Mode::Off], [0, 0, 0, 0, 0, 0]),
            ([every(2), Mode::Off], [0, 1, 0, 1, 0, 1]),
            ([every(3), every(2)], [0, 1, 1, 1, 0, 1]),
            ([Mode::Off, Mode::AtSync], [1, 1, 1, 1, 1, 1]),
        ] {
            let pools = modes.map(|agreement| {
                let pool = it.pool();
                let attachment = Attachment { agreement, ..Attachment::default() };
                it.registrar
                    .attach(&it.world, &[pool.id()], attachment)
                    .expect("the pool should be symmetric and registrable");
                pool
            });
            // Rank 1 alone also has registered buffers, which do not make it compare more often.
            let private = it.allocator.create_pool(PoolConfig::default()).expect("the pool should fit into the device");
            if it.rank == 1 {
                it.registrar
                    .attach(&it.world, &[private.id()], Registration::Buffers)
                    .expect("any pool should be attachable");
            }
            let rounds = expected.map(|_| it.registrar.sync(&[&it.world]).expect("the ranks should agree").rounds);
            assert_eq!(rounds, expected, "{modes:?}");
            assert_eq!(it.registrar.agree(&[&it.world]).expect("the ranks should agree").rounds, 1, "on request");
            let ids: Vec<_> = pools.iter().map(Pool::id).collect();
            it.registrar.detach(&it.world, &ids).expect("the pool should be attached");
            if it.rank == 1 {
                it.registrar.detach(&it.world, &[private.id()]).expect("the pool should be attached");
            }
            it.registrar.agree(&[&it.world]).expect("the ranks should agree");
        }
    });
    nothing_is_left();
});

nccl_test!(a_sync_covers_communicators_with_nothing_new_next_to_others, {
    Job::new(2).run(|it| {
        let modes = [Mode::Off, Mode::AtSync, Mode::Off];
        let split =
            |_| it.world.split(Some(0), it.world.rank()).expect("all ranks should split").expect("each has a color");
        let comms = modes.map(split);
        let attached = |(comm, agreement)| {
            let pool = it.pool();
            let attachment = Attachment { agreement, ..Attachment::default() };
            it.registrar.attach(comm, &[pool.id()], attachment).expect("the pool should be symmetric and registrable");
            pool
        };
        let pools: Vec<_> = comms.iter().zip(modes).map(attached).collect();
        let comms = comms.each_ref();
        it.registrar.sync(&comms).expect("the ranks should agree");
        let mut kept = Vec::new();
        for pool in &pools {
            kept.push(it.take(pool, MIB));
            assert_eq!(it.registrar.sync(&comms).expect("the ranks should agree").registrations, 1);
            assert_eq!(
                it.registrar.sync(&comms).expect("the ranks should agree").rounds,
                1,
                "only one communicator compares"
            );
        }
        assert_eq!(it.registrar.stats().quiet_syncs, 0);
        let off = [comms[0], comms[2]];
        assert_eq!(it.registrar.sync(&off).expect("the call should have nothing to do").rounds, 0);
        assert_eq!(it.registrar.stats().quiet_syncs, 1);
        drop(kept);
    });
    nothing_is_left();
});

nccl_test!(pools_for_buffers_on_some_ranks_decide_no_collective, {
    for first in [Mode::Off, Mode::AtSync] {
        Job::new(2).run(|it| {
            let attach = |agreement| {
                let pool =
                    it.allocator.create_pool(PoolConfig::default()).expect("the pool should fit into the device");
                let attachment = Attachment { agreement, ..Registration::Buffers.into() };
                it.registrar.attach(&it.world, &[pool.id()], attachment).expect("any pool should be attachable");
                pool
            };
            let _first = attach(first);
            let others = if it.rank == 0 { [].as_slice() } else { &[Mode::EachOp, Mode::Off] };
            let _others: Vec<_> = others.iter().map(|agreement| attach(*agreement)).collect();
            for _ in 0..3 {
                let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
                assert_eq!(synced.rounds, u64::from(first == Mode::AtSync), "{first:?}");
            }
        });
    }
    nothing_is_left();
});

nccl_test!(ranks_with_different_agreement_modes_get_the_same_report, {
    let errors = Job::new(2).run(|it| {
        let pool = it.pool();
        let agreement = if it.rank == 0 { Mode::AtSync } else { Mode::EachOp };
        let attachment = Attachment { agreement, ..Attachment::default() };
        it.registrar.attach(&it.world, &[pool.id()], attachment).expect("the pool should be symmetric and registrable");
        it.registrar.sync(&[&it.world]).expect_err("the modes differ").to_string()
    });
    assert!(errors[0].contains("the ranks differ in the agreement mode; rank 0: 1; rank 1: 2"), "{}", errors[0]);
    assert_eq!(errors[0], errors[1]);
    nothing_is_left();
});

nccl_test!(memory_is_released_after_its_window, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let large = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        drop(large);
        assert_eq!(it.trim(&pool), 0, "a window covers it");
        assert_eq!(it.registrar.stats().dead_bytes, 30 * MIB);
        let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!((synced.deregistrations, synced.released_bytes), (1, 30 * MIB));
        assert_eq!((it.registrar.stats().dead_bytes, it.registrar.stats().windows), (0, 0));
        it.check();
    });
    assert_eq!(nccl::calls("ncclCommWindowDeregister"), 2);
    nothing_is_left();
});

nccl_test!(one_pool_has_separate_windows_on_each_communicator, {
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
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        it.registrar.sync(&[&pair]).expect("the ranks should agree");
        let (one, other) = (
            it.registrar.window_of(&it.world, &tensor).expect("the memory should have a window"),
            it.registrar.window_of(&pair, &tensor).expect("the memory should have a window"),
        );
        assert_ne!(one.window, other.window);
        assert_eq!((one.segment, one.offset_bytes), (other.segment, other.offset_bytes));
        it.reduce_right(&it.world, &mut tensor);
        it.reduce_right(&pair, &mut tensor);
        drop(tensor);
        it.trim(&pool);
        assert_eq!(
            it.registrar.sync(&[&it.world]).expect("the ranks should agree").released_bytes,
            0,
            "the pair still has a window on it"
        );
        assert_eq!(it.registrar.sync(&[&pair]).expect("the ranks should agree").released_bytes, 30 * MIB);
    });
    nothing_is_left();
});

nccl_test!(communicators_named_in_opposite_orders_do_not_wait_for_each_other, {
    Job::new(8).run(|it| {
        // The communicators are tensor-parallel pairs, and data-parallel groups of four across them.
        let (rank, pool) = (it.world.rank(), it.pool());
        let tp =
            it.world.split(Some(rank / 2), 0).expect("all ranks should split").expect("the rank should be in a part");
        let dp =
            it.world.split(Some(rank % 2), 0).expect("all ranks should split").expect("the rank should be in a part");
        for comm in [&it.world, &tp, &dp] {
            it.registrar
                .attach(comm, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
        }
        let mut tensors = Vec::new();
        for round in 0..3 {
            tensors.push(it.take(&pool, (20 + 10 * round) * MIB));
            let order: [&_; 4] =
                if rank.is_multiple_of(2) { [&tp, &dp, &it.world, &tp] } else { [&it.world, &dp, &tp, &dp] };
            let synced = it.registrar.sync(&order).expect("the ranks should agree");
            assert_eq!((synced.registrations, synced.rounds), (3, 3), "a repeated communicator counts once");
            let tensor = tensors.last_mut().expect("a tensor was just allocated");
            [&dp, &tp, &it.world].into_iter().for_each(|comm| it.reduce_right(comm, tensor));
        }
    });
    nothing_is_left();
});

nccl_test!(threads_with_separate_communicators_and_pools_are_independent, {
    Job::new(2).run(|it| {
        let lane = |name| {
            let comm =
                it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
            let stream = it.device.context().new_stream().expect("the driver should create a stream");
            it.allocator.register_stream(&stream).expect("stream ids are available");
            let pool = it.pool();
            it.registrar
                .attach(&comm, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            (name, comm, stream, pool)
        };
        // The communicators are created in the same order on every rank.
        let lanes = ["a", "b"].map(lane);
        std::thread::scope(|scope| {
            let _exit = ExitOnPanic;
            for (name, comm, stream, pool) in &lanes {
                scope.spawn(move || {
                    let allocator = it.allocator.with_pool(pool);
                    for round in 0..40_u64 {
                        let size = ((round % 5) * 7 + 3) * MIB + if *name == "a" { 0 } else { 512 };
                        // SAFETY: every bit pattern is a valid `f32`.
                        let tensor = unsafe { allocator.alloc::<f32>(stream, size as usize / 4) }
                            .expect("the allocation should fit");
                        it.registrar.sync(&[comm]).expect("the ranks should agree");
                        it.registrar.window_of(comm, &tensor).expect("it is in a window");
                        drop(tensor);
                        if round % 3 == 0 {
                            it.allocator.core().trim_pool(pool.id()).expect("no fault should be injected");
                        }
                    }
                    // Without this, the registrar would keep the communicator alive.
                    comm.destroy().expect("the communicator is idle");
                });
            }
        });
        it.check();
    });
    nothing_is_left();
});

nccl_test!(a_new_communicator_gets_windows_on_live_segments, {
    let id = Mutex::new(None);
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let mut tensors = [it.take(&pool, 30 * MIB), it.take(&pool, 40 * MIB)];
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let late = it.connect("late", &id);
        it.registrar.attach(&late, &[pool.id()], it.windows()).expect("the pool should be symmetric and registrable");
        let synced = it.registrar.sync(&[&late, &it.world]).expect("the ranks should agree");
        assert_eq!((synced.registrations, synced.rounds), (2, 2));
        tensors.iter_mut().for_each(|tensor| it.reduce_right(&late, tensor));
        late.destroy().expect("the communicator is idle");
    });
    nothing_is_left();
});

nccl_test!(windows_of_an_ended_communicator_are_not_touched_and_its_memory_is_released, {
    let id = Mutex::new(None);
    for aborts in [false, true] {
        Job::new(2).run(|it| {
            let other = it.connect("other", &id);
            let pool = it.attached_pool();
            it.registrar
                .attach(&other, &[pool.id()], it.windows())
                .expect("the pool should be symmetric and registrable");
            let tensor = it.take(&pool, 30 * MIB);
            it.registrar.sync(&[&it.world, &other]).expect("the ranks should agree");
            drop(tensor);
            it.trim(&pool);
            it.meet();
            let ended = if aborts { other.abort() } else { other.destroy() };
            ended.expect("the abort ends in time");
            let synced = it.registrar.sync(&[&it.world]).expect("the other communicator is swept");
            assert_eq!(synced.deregistrations, 1, "the windows of the other communicator ended with it");
            assert_eq!(it.registrar.stats().dead_bytes, 0);
            assert!(matches!(it.registrar.sync(&[&other]), Err(SyncError::Gone { .. })));
            let mut cursor = InvalidationCursor::default();
            assert_eq!(it.registrar.invalidations(&other, &mut cursor), Invalidated::Everything);
            assert_eq!(it.registrar.stats().communicators, 1);
            it.check();
        });
    }
    nothing_is_left();
});

nccl_test!(a_growing_pool_gets_one_larger_window_if_nccl_supports_it, ["STUB_NCCL_VERSION" = "23007"], {
    Job::new(2).run(|it| {
        let pool = it.pool_with(|config| config);
        it.registrar.attach(&it.world, &[pool.id()], it.windows()).expect("2.30.7 supports growing windows");
        let mut first = it.take(&pool, 2 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let before = it.registrar.window_of(&it.world, &first).expect("the memory should have a window");
        let mut second = it.take(&pool, 6 * MIB);
        assert!(matches!(it.registrar.window_of(&it.world, &second), Err(LookupError::NotRegistered { .. })));
        it.reduce_right(&it.world, &mut first);
        let synced = it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!((synced.registrations, synced.deregistrations), (1, 1));
        let after = it.registrar.window_of(&it.world, &first).expect("the memory should have a window");
        assert_ne!(before.segment, after.segment, "the key changes when the segment grows");
        let mut cursor = InvalidationCursor::default();
        assert_eq!(it.registrar.invalidations(&it.world, &mut cursor), Invalidated::Keys(vec![before.segment]));
        [&mut first, &mut second].into_iter().for_each(|tensor| it.reduce_right(&it.world, tensor));
    });
    nothing_is_left();
});

nccl_test!(ranks_with_different_chunks_share_windows, ["STUB_NCCL_VERSION" = "23007"], {
    let job = Job { prefetch_bytes: 40 << 20, ..Job::new(2) };
    job.run(|it| {
        let pool = it.pool_with(|config| config);
        it.registrar.attach(&it.world, &[pool.id()], it.windows()).expect("2.30.7 supports growing windows");
        let mut tensors = Vec::new();
        for mib in [2, 6, 2, 30, 8] {
            tensors.push(it.take(&pool, mib * MIB));
            until(|| it.rank != 0 || it.allocator.core().backend().spare_bytes() != 0);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
            it.check();
        }
        nccl::assert_clean();
    });
    nothing_is_left();
});

nccl_test!(pools_that_cannot_have_windows_are_refused_with_a_remedy, {
    Job::new(2).run(|it| {
        let attach = |pool, registration| it.registrar.attach(&it.world, &[pool], registration);
        let private = attach(PoolId::DEFAULT, Registration::Windows).expect_err("the pool is private");
        assert!(matches!(private, AttachError::NotSymmetric { .. }) && private.to_string().contains("symmetric:true"));
        let growing = it.pool_with(|config| config);
        let error = attach(growing.id(), Registration::Windows).expect_err("2.28.9 does not support growing windows");
        assert!(matches!(error, AttachError::Growing { .. }) && error.to_string().contains("reserved or fixed"));
        attach(growing.id(), Registration::Buffers).expect("buffers can be in any memory");
        let twice = attach(growing.id(), Registration::Buffers).expect_err("the pool is already attached");
        assert!(matches!(twice, AttachError::Already { .. }));
        assert!(matches!(attach(PoolId(99), Registration::Buffers), Err(AttachError::Unknown(_))));
        let pool = it.pool();
        let error = it.registrar.attach(&it.world, &[pool.id(), PoolId::DEFAULT], it.windows());
        error.expect_err("one of them is private");
        assert_eq!(it.registrar.registration(&it.world, pool.id()), None, "neither pool is attached");
    });
    nothing_is_left();
});

nccl_test!(a_detached_pool_loses_its_windows_at_the_next_sync, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let key = it.registrar.key_of(&tensor).expect("the buffer lies in a segment");
        drop(tensor);
        it.registrar.detach(&it.world, &[pool.id()]).expect("the pool should have been attached");
        let id = pool.id();
        drop(pool);
        it.allocator.trim_all().expect("trimming a watched pool is no error");
        assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").deregistrations, 1);
        let mut cursor = InvalidationCursor::default();
        assert_eq!(it.registrar.invalidations(&it.world, &mut cursor), Invalidated::Keys(vec![key]));
        it.allocator.trim_all().expect("the pool is no longer watched");
        assert!(it.allocator.core().pool_config(id).is_err(), "the pool is destroyed");
        assert!(matches!(it.registrar.detach(&it.world, &[id]), Err(SyncError::NotAttached { pool: Some(_), .. })));
        assert_eq!(it.allocator.stats().reserved_bytes.current, 0);
    });
    nothing_is_left();
});

nccl_test!(buffers_of_private_pools_are_registered_without_other_ranks, {
    Job::new(2).quiet().run(|it| {
        // Only rank 1 has a private pool, which grows.
        if it.rank == 1 {
            let pool = it.allocator.create_pool(PoolConfig::default()).expect("the pool should fit into the device");
            let buffers = Attachment { registration: Registration::Buffers, ..it.windows() };
            it.registrar.attach(&it.world, &[pool.id()], buffers).expect("buffers can be in any memory");
            let first = it.take(&pool, 2 * MIB);
            let second = it.take(&pool, 4 * MIB);
            let synced = it.registrar.sync(&[&it.world]).expect("no other rank takes part");
            assert_eq!((synced.registrations, synced.rounds), (2, 0), "one registration per piece of memory");
            assert!(matches!(it.registrar.window_of(&it.world, &second), Err(LookupError::Plain { .. })));
            assert_eq!(it.registrar.stats().buffers, 2);
            drop((first, second));
            it.trim(&pool);
            let synced = it.registrar.sync(&[&it.world]).expect("no other rank takes part");
            assert_eq!((synced.deregistrations, synced.released_bytes), (2, 6 * MIB));
        }
    });
    assert_eq!((nccl::calls("ncclCommRegister"), nccl::calls("ncclAllGather")), (2, 0));
    nothing_is_left();
});

nccl_test!(
    ranks_that_cannot_reach_each_other_get_plain_registrations,
    ["STUB_NCCL_VERSION" = "23007", "STUB_NCCL_NO_SYMMETRIC" = "1"],
    {
        Job::new(2).run(|it| {
            let pool = it.attached_pool();
            let mut tensor = it.take(&pool, 30 * MIB);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            assert!(matches!(it.registrar.window_of(&it.world, &tensor), Err(LookupError::Plain { .. })));
            it.reduce_right(&it.world, &mut tensor);
            drop(tensor);
            it.trim(&pool);
            assert_eq!(it.registrar.sync(&[&it.world]).expect("the ranks should agree").released_bytes, 30 * MIB);
        });
        assert_eq!((nccl::calls("ncclCommDeregister"), nccl::calls("ncclCommWindowDeregister")), (2, 0));
        nothing_is_left();
    }
);

nccl_test!(a_scope_registers_its_allocations_even_if_its_work_fails, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let take = |allocator: &symmalloc_cuda::CudaAllocator, bytes: u64| {
            // SAFETY: every bit pattern is a valid `f32`.
            unsafe { allocator.alloc::<f32>(&it.stream, bytes as usize / 4) }
        };
        let comms = [&it.world];
        let made = it.registrar.with_symmetric(&comms, &pool, |allocator| take(allocator, 30 * MIB));
        let mut made = made.expect("the ranks should agree").expect("the allocation should fit");
        it.reduce_right(&it.world, &mut made);
        let failed: Result<Result<(), &str>, _> = it.registrar.with_symmetric(&comms, &pool, |allocator| {
            std::mem::forget(take(allocator, 40 * MIB));
            Err("the error of the work")
        });
        assert_eq!(failed.expect("the sync succeeds"), Err("the error of the work"));
        assert_eq!(it.registrar.stats().windows, 2, "the allocation is registered despite the error");
        let other = it.pool();
        let refused = it.registrar.with_symmetric(&comms, &other, |_| panic!("the work must not run"));
        assert!(matches!(refused, Err(SyncError::NotAttached { pool: Some(_), .. })));
        assert!(it.allocator.with_pool(&pool).pool() == pool.id());
    });
    nccl::assert_clean();
});

nccl_test!(keys_are_stable_across_sizes_and_never_reused, {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let mut cursor = InvalidationCursor::default();
        let [a, b] = [3, 5].map(|kib: u64| it.take(&pool, kib << 10));
        let key = it.registrar.key_of(&a).expect("the buffer lies in a segment");
        assert_eq!(it.registrar.key_of(&b).expect("the buffer lies in a segment"), key);
        assert_eq!(it.registrar.key_at(key.base).expect("its first byte"), key);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!(it.registrar.window_of(&it.world, &b).expect("the memory should have a window").segment, key);
        assert_eq!(it.registrar.invalidations(&it.world, &mut cursor), Invalidated::Keys(vec![]));
        drop((a, b));
        it.trim(&pool);
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        assert_eq!(it.registrar.invalidations(&it.world, &mut cursor), Invalidated::Keys(vec![key]));
        let again = it.take(&pool, 3 << 10);
        assert_ne!(it.registrar.key_of(&again).expect("the buffer lies in a segment"), key);
        let nothing = it.take(&pool, 0);
        assert_eq!(it.registrar.key_of(&nothing), Err(LookupError::Empty));
        assert!(matches!(it.registrar.key_at(8), Err(LookupError::UnknownAddress { .. })));
    });
    nothing_is_left();
});

nccl_test!(
    exhausted_symmetric_space_is_an_error_on_every_rank_before_nccl_fails,
    ["STUB_NCCL_WIN_STRIDE" = "4294967296", "NCCL_WIN_STRIDE" = "4294967296", "STUB_MEMORY_BYTES" = "17179869184"],
    {
        Job::new(2).run(|it| {
            let pool = it.attached_pool();
            let fits = it.take(&pool, 3072 * MIB);
            it.registrar.sync(&[&it.world]).expect("the ranks should agree");
            let too_much = it.take(&pool, 2048 * MIB);
            let error = it.registrar.sync(&[&it.world]).expect_err("it does not fit");
            let SyncError::SymmetricSpace { needed_bytes, used_bytes, budget_bytes, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((*needed_bytes, *budget_bytes), (2048 * MIB, 4096 * MIB));
            assert_eq!(*used_bytes, (3072 + 10) * MIB);
            assert!(error.to_string().contains("NCCL_WIN_STRIDE"));
            // The failed sync changed nothing, and the allocation that does not fit can be freed.
            drop(too_much);
            it.trim(&pool);
            it.registrar.sync(&[&it.world]).expect("nothing to register");
            let stats = it.registrar.communicator_stats(&it.world).expect("the pool should be attached");
            assert_eq!((stats.windows, stats.space_used_bytes, stats.space_budget_bytes), (1, *used_bytes, 4096 * MIB));
            drop(fits);
        });
        nothing_is_left();
    }
);

nccl_test!(dropping_a_registrar_deregisters_its_windows, {
    Job::new(2).run(|it| {
        let pool = it.pool();
        let registrar = Registrar::builder(&it.allocator).build().expect("the device reports its size");
        registrar
            .attach(&it.world, &[pool.id()], Registration::Windows)
            .expect("the pool should be symmetric and registrable");
        let tensor = it.take(&pool, 30 * MIB);
        registrar.sync(&[&it.world]).expect("the ranks should agree");
        drop(tensor);
        it.trim(&pool);
        drop(registrar);
        assert_eq!(it.allocator.stats().reserved_bytes.current, 0, "the memory is released");
        it.world.check().expect("the communicator still works");
    });
    nothing_is_left();
});

// One rank, so that syncs of different moments need not agree with those of another rank.
nccl_test!(
    memory_that_is_allocated_during_syncs_sleeps_and_wakes_gets_one_window,
    ["STUB_NCCL_REUSE_WINDOWS" = "1"],
    {
        Job::new(1).run(|it| {
            let pools = [it.attached_pool(), it.attached_pool()];
            let left: Vec<_> = std::thread::scope(|scope| {
                let _exit = ExitOnPanic;
                scope.spawn(|| {
                    for _ in 0..40 {
                        it.registrar.sync(&[&it.world]).expect("a single rank should agree");
                    }
                });
                scope.spawn(|| {
                    for _ in 0..20 {
                        it.registrar
                            .sleep(&it.world, pools[1].id(), Contents::Keep)
                            .expect("a single rank should sleep");
                        it.registrar.wake(&it.world, pools[1].id()).expect("a single rank should wake");
                    }
                });
                let growers = [0, 1].map(|index| {
                    let pool = &pools[index];
                    scope.spawn(move || {
                        let stream = it.device.context().new_stream().expect("the driver should create a stream");
                        let mut left = Vec::new();
                        for round in 0..40_usize {
                            let elements = (1 + round % 3 * 9) << 18;
                            // SAFETY: the memory is never read.
                            match unsafe { it.allocator.with_pool(pool).alloc::<f32>(&stream, elements) } {
                                Ok(tensor) if round % 8 == 7 => left.push(tensor),
                                Ok(tensor) => drop(tensor),
                                Err(CudaError::Allocate(AllocateError::Sleeps(_))) => {}
                                Err(error) => panic!("{error}"),
                            }
                            if round % 4 == 3 {
                                it.allocator.core().trim_pool(pool.id()).expect("no fault should be injected");
                            }
                        }
                        left
                    })
                });
                growers.into_iter().flat_map(|grower| grower.join().expect("the thread should not panic")).collect()
            });
            it.registrar.sync(&[&it.world]).expect("a single rank should agree");
            left.iter().for_each(|tensor| _ = it.registrar.window_of(&it.world, tensor).expect("it has a window"));
            let segments: u64 = pools.iter().map(|pool| segments_of(it, pool.id())).sum();
            let stats = it.registrar.stats();
            assert_eq!((stats.windows, stats.dead_bytes), (segments, 0), "one window per live segment");
            assert_eq!(it.registrar.sync(&[&it.world]).expect("a single rank should agree").registrations, 0);
        });
        nothing_is_left();
    }
);

fn segments_of(it: &support::Rank, pool: PoolId) -> u64 {
    it.allocator.core().pool_stats(pool).expect("the pool should exist").segment_count
}
