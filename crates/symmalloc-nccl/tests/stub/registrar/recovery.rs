//! Tests of recovery from a refused wake: one rank's device is full, that rank makes room alone, and the next wake succeeds on all ranks.

use super::support::{Job, MIB, Rank, nothing_is_left};
use stub_process::{is_night, nccl_test};
use symmalloc_core::PoolConfig;
use symmalloc_core::op::Contents;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, Pool};
use symmalloc_nccl::{CollectiveSleepError, Obstacle};

const WINDOWS: u64 = 90 * MIB;
/// So much that the rest of a device of 256 MiB has no room for the windows.
const PRIVATE: u64 = 200 * MIB;

/// A way in which one rank makes room.
#[derive(Clone, Copy, Debug)]
enum Recovery {
    /// Frees memory. The wake releases it.
    Free,
    /// Frees memory and trims all pools.
    Trim,
    /// Frees memory and trims all pools through the core.
    CoreTrim,
    /// Frees memory and trims the sleeping pool too.
    TrimAsleep,
    /// Drops the private pool. The wake destroys it.
    Drop,
    /// Destroys the private pool.
    Destroy,
    /// Puts the private pool to sleep.
    Sleep,
    /// Raises the allocator's limit.
    Limit,
}

const ALL: [Recovery; 8] = [
    Recovery::Free,
    Recovery::Trim,
    Recovery::CoreTrim,
    Recovery::TrimAsleep,
    Recovery::Drop,
    Recovery::Destroy,
    Recovery::Sleep,
    Recovery::Limit,
];

type Private = (Pool<CudaBackend>, Vec<DeviceBuffer<f32>>);

fn fill(it: &Rank, kind: Recovery) -> Private {
    let pool = it
        .allocator
        .create_pool(PoolConfig::builder().fixed().build().expect("the configuration should be valid"))
        .expect("the pool should fit into the device");
    if let Recovery::Limit = kind {
        it.allocator.core().set_total_limit_bytes(Some(WINDOWS - MIB));
        return (pool, Vec::new());
    }
    let buffers = vec![it.take(&pool, PRIVATE)];
    (pool, buffers)
}

/// Makes room on this rank alone. Returns what must live until the wake.
fn recover(it: &Rank, kind: Recovery, asleep: &Pool<CudaBackend>, (pool, buffers): Private) -> Option<Private> {
    match kind {
        Recovery::Sleep => {
            it.allocator.sleep(pool.id(), Contents::Drop).expect("no work uses it");
            return Some((pool, buffers));
        }
        Recovery::Limit => it.allocator.core().set_total_limit_bytes(None),
        _ => drop(buffers),
    }
    match kind {
        Recovery::Trim => assert_eq!(it.allocator.trim_all(), Ok(PRIVATE)),
        Recovery::CoreTrim => assert_eq!(it.allocator.core().trim_all(), Ok(PRIVATE)),
        Recovery::TrimAsleep => assert_eq!(it.allocator.core().trim_pool(asleep.id()), Ok(0)),
        Recovery::Drop => return None,
        Recovery::Destroy => {
            drop(pool);
            it.allocator.trim_all().expect("it is destroyed");
            return None;
        }
        Recovery::Free | Recovery::Sleep | Recovery::Limit => {}
    }
    Some((pool, Vec::new()))
}

fn recovers(ranks: usize) {
    Job::new(ranks).run(|it| {
        let pool = it.attached_pool();
        let mut tensors = [20, 30, 40].map(|size| it.take(&pool, size * MIB));
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        let is_full = it.rank + 1 == ranks;
        let rounds = if is_night() { 50 } else { 6 };
        for kind in ALL {
            for round in 0..rounds {
                it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
                let digest = it.allocator.digest(pool.id());
                let private = is_full.then(|| fill(it, kind));
                let error = it.registrar.wake(&it.world, pool.id()).expect_err("one device is full");
                let CollectiveSleepError::Refused { ranks: refused, .. } = error else { panic!("{kind:?}: {error}") };
                assert_eq!(refused.len(), 1, "{kind:?}");
                assert_eq!(refused[0].rank as usize, ranks - 1, "{kind:?}");
                assert!(matches!(refused[0].obstacle, Obstacle::Memory { .. } | Obstacle::Limit { .. }), "{kind:?}");
                assert_eq!(it.registrar.phase(pool.id()), Ok(Phase::Asleep));
                let refused = it.allocator.digest(pool.id());
                assert_ne!(refused, digest, "the refused wake is an op on every rank");
                let kept = private.and_then(|private| recover(it, kind, &pool, private));
                assert_eq!(it.allocator.digest(pool.id()), refused, "{kind:?}: a recovery is no op of the pool");
                let woken = it.registrar.wake(&it.world, pool.id());
                let woken = woken.unwrap_or_else(|error| panic!("{kind:?}, round {round}: {error}"));
                assert_eq!((woken.memory.remapped_bytes, woken.registrations), (WINDOWS, 3));
                drop(kept);
                if is_full {
                    it.allocator.trim_private();
                }
            }
            tensors.iter_mut().for_each(|tensor| it.reduce_right(&it.world, tensor));
            it.registrar.sync(&[&it.world]).unwrap_or_else(|error| panic!("{kind:?}: the histories differ: {error}"));
        }
    });
    nothing_is_left();
}

nccl_test!(a_rank_of_two_recovers_from_a_refused_wake, ["STUB_MEMORY_BYTES" = "268435456"], {
    recovers(2);
});

nccl_test!(a_rank_of_four_recovers_from_a_refused_wake, ["STUB_MEMORY_BYTES" = "268435456"], {
    recovers(4);
});

nccl_test!(a_wake_releases_cached_memory_of_private_pools_alone, ["STUB_MEMORY_BYTES" = "268435456"], {
    Job::new(2).run(|it| {
        let pool = it.attached_pool();
        let _tensor = it.take(&pool, 90 * MIB);
        let symmetric = it.pool();
        drop(it.take(&symmetric, 100 * MIB));
        it.registrar.sync(&[&it.world]).expect("the ranks should agree");
        it.registrar.sleep(&it.world, pool.id(), Contents::Drop).expect("all ranks should sleep together");
        let private = (it.rank == 1).then(|| {
            let pool = it
                .allocator
                .create_pool(PoolConfig::builder().fixed().build().expect("the configuration should be valid"))
                .expect("the pool should fit into the device");
            drop(it.take(&pool, 120 * MIB));
            pool
        });
        let digest = it.allocator.digest(symmetric.id());
        it.registrar.wake(&it.world, pool.id()).expect("the cached memory makes room");
        assert_eq!(it.allocator.digest(symmetric.id()), digest);
        let reserved = |pool: &Pool<CudaBackend>| {
            it.allocator.core().pool_stats(pool.id()).expect("the pool should exist").reserved_bytes.current
        };
        assert_eq!(reserved(&symmetric), 100 * MIB, "symmetric memory stays cached");
        assert_eq!(private.as_ref().map(reserved), (it.rank == 1).then_some(0));
    });
    nothing_is_left();
});
