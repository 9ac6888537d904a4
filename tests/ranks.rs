//! Ranks: the same program makes the same decisions under different conditions (rules D1, D3, D8).
//!
//! Every rank has different addresses, event timing and raw handles, and polls events at different times.

use proptest::prelude::*;
use std::cell::RefCell;
use symmalloc_core::config::{Config, ExpandableSegments, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Digest, Placement, PoolId, StreamId};
use symmalloc_harness::checker::{Decisions, decisions, decisions_through};
use symmalloc_harness::generate::{Scenario, scenario_bytes};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_harness::jobs;
use symmalloc_sim::{Addresses, Delays, SimBackend, SplitMix64};
use symmalloc_trace::replay::Replay;

/// Runs a rank. Its host polls for completed events at arbitrary times.
fn rank<L: Lock>(scenario: &Scenario, seed: u64, rank: u32) -> Decisions {
    let delays = match rank % 4 {
        0 => Delays::Immediate,
        1 => Delays::UntilSynchronized,
        2 => Delays::UpTo { ticks: 20 },
        _ => Delays::FromSeed,
    };
    let device = scenario.device_builder(seed).rank(rank).delays(delays).build();
    let mut random = SplitMix64::new(seed ^ u64::from(rank));
    decisions::<L>(scenario, &device, |_, _, _, allocator| {
        if random.below(4) == 0 {
            device.tick(random.below(30));
            allocator.drop_completed_fences().expect("no fault was injected");
        }
    })
}

/// Returns every call that the allocator makes on a device with these event delays.
fn calls(scenario: &Scenario, seed: u64, delays: Delays) -> Vec<DeviceCall> {
    let device = scenario.device_builder(seed).delays(delays).build();
    let calls = RefCell::new(Vec::new());
    let backend = Hooked { inner: &device, hook: |call| calls.borrow_mut().push(call) };
    decisions_through::<_, Exclusive>(scenario, &backend, &device, |_, _, _, _| device.tick(seed % 8));
    calls.into_inner()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn ranks_decide_alike_whatever_their_addresses_and_timing(bytes in scenario_bytes(120), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        let first = rank::<Exclusive>(&scenario, seed, 0);
        for other in 1..6 {
            assert_eq!(rank::<Exclusive>(&scenario, seed, other), first, "rank {other} and rank 0");
        }
        let other = scenario.clone().with_other_access();
        assert_eq!(rank::<Shared>(&other, seed, 6), first, "with locks, and by handle what was by address");
    }

    #[test]
    fn ranks_make_the_same_calls_whenever_their_events_complete(bytes in scenario_bytes(120), seed in any::<u64>()) {
        let scenario = Scenario::from_bytes(&bytes);
        let first = calls(&scenario, seed, Delays::Immediate);
        for delays in [Delays::UntilSynchronized, Delays::UpTo { ticks: 20 }, Delays::FromSeed] {
            let differs = calls(&scenario, seed, delays).iter().zip(&first).position(|(one, other)| one != other);
            assert_eq!(differs, None, "{delays:?}: the first call that differs: {:?}", differs.map(|at| first[at]));
            assert_eq!(calls(&scenario, seed, delays).len(), first.len(), "{delays:?}");
        }
    }
}

#[test]
fn different_programs_have_different_digests() {
    let mut digests = std::collections::BTreeMap::new();
    for seed in 0..500 {
        let scenario = Scenario::from_seed(seed, 60);
        let run = rank::<Exclusive>(&scenario, seed, 0);
        if let Some(other) = digests.insert(run.digests[0].1.value, seed) {
            panic!("programs {seed} and {other} have the same digest");
        }
    }
}

/// Runs a recorded job on a rank. Returns all placements and the digest.
fn job_on_rank(program: &symmalloc_trace::replay::Program, pool: &PoolConfig, rank: u32) -> (Vec<Placement>, Digest) {
    let config = Config::builder().default_pool(pool.clone()).build().expect("the configuration should be valid");
    let allocator: Allocator<_> = Allocator::new(SimBackend::builder().seed(99).rank(rank).build(), config)
        .expect("the arguments should be valid");
    let mut placements = Vec::with_capacity(program.allocation_count());
    let mut replay = Replay::new(&allocator, program);
    replay.run(|_, allocation| placements.push(allocation.placement)).expect("the job fits 80 GiB");
    allocator.check().expect("the invariants should hold");
    (placements, allocator.digest(PoolId::DEFAULT).expect("the default pool should always exist"))
}

#[test]
fn recorded_jobs_are_placed_alike_on_every_rank() {
    for job in ["fsdp1_train_rank0", "fsdp_train_rank0", "moe_train"] {
        let program = jobs::program(job);
        for streams in [StreamPolicy::Separate, StreamPolicy::Shared] {
            for pool in [PoolConfig::builder().expandable(), PoolConfig::builder().fixed()] {
                let pool = pool.streams(streams).build().expect("the configuration should be valid");
                let first = job_on_rank(&program, &pool, 0);
                for rank in 1..4 {
                    assert!(
                        job_on_rank(&program, &pool, rank) == first,
                        "{job}, {pool}: rank {rank} and rank 0 differ"
                    );
                }
            }
        }
    }
}

/// Both ranks of a job made the same ops, but PyTorch placed most of them differently.
#[test]
fn both_ranks_of_a_recorded_job_are_placed_alike() {
    for [one, other] in [["fsdp1_train_rank0", "fsdp1_train_rank1"], ["fsdp_train_rank0", "fsdp_train_rank1"]] {
        let pool = PoolConfig::default();
        let (placements, _) = job_on_rank(&jobs::program(one), &pool, 0);
        let (others, _) = job_on_rank(&jobs::program(other), &pool, 1);
        assert_eq!(placements.iter().zip(&others).filter(|(a, b)| a != b).count(), 0, "{one}");
        assert_eq!(placements.len(), others.len());
    }
}

/// The simulator gives ranks different conditions; otherwise the tests above would prove nothing.
#[test]
fn ranks_get_different_addresses() {
    let scenario = Scenario::from_seed(5, 50);
    let order = |rank| {
        let device = scenario.device_builder(1).rank(rank).addresses(Addresses::default()).build();
        let allocator: Allocator<_> =
            Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
        let mut replay = Replay::new(&allocator, &scenario.program);
        let mut addresses = Vec::new();
        for op in scenario.program.ops() {
            addresses.extend(replay.step(op).ok().flatten().map(|allocation| allocation.address));
        }
        addresses
    };
    assert_ne!(order(0), order(1));
}

#[test]
fn private_memory_of_a_rank_does_not_affect_symmetric_placements() {
    let mut knobs = ExpandableSegments::default();
    knobs.growth_bytes = 8 * MIB;
    let symmetric = PoolConfig::builder()
        .segments(SegmentPolicy::Expandable(knobs))
        .symmetric(true)
        .build()
        .expect("the configuration should be valid");
    // One rank reserves 41 of a total of 64 MiB for itself, in a pool that the others leave empty.
    let placements = [0, 41 * MIB].map(|private_bytes| {
        let config =
            Config::builder().total_limit_bytes(Some(64 * MIB)).build().expect("the configuration should be valid");
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
        let stream = allocator.register_stream().expect("a stream id is available");
        let pool = allocator.create_pool(symmetric.clone()).expect("the pool should be created");
        if private_bytes > 0 {
            let _live = allocator
                .allocate(PoolId::DEFAULT, stream, private_bytes)
                .expect("the request should stay within the limit");
        }
        let mut placed = Vec::new();
        let mut allocate = |size_bytes| {
            let made = allocator.allocate(pool, stream, size_bytes).ok();
            placed.push(made.map(|made| made.placement));
            made
        };
        let first = allocate(3 * MIB).expect("the request should stay within the limit");
        let _kept = allocate(9 * MIB).expect("the request should stay within the limit");
        allocator.free(first.handle).expect("the allocation should be live");
        // This request does not fit without growth. The heap grows if the limit allows it; otherwise the request is
        // refused and nothing is released.
        allocate(12 * MIB);
        placed.truncate(2);
        let snapshot = allocator.snapshot();
        let held: Vec<_> = snapshot.segments.iter().filter(|segment| segment.heap.pool == pool).collect();
        let hole = held[0].blocks.iter().any(|block| block.state == BlockStateSnapshot::Hole);
        (placed, hole, allocator.allocate(pool, stream, 3 * MIB).expect("the free block still exists").placement)
    });
    assert_eq!(placements[0], placements[1]);
}

/// Returns the digest of a pool after one allocation with these uses.
fn digest_after(size_bytes: u64, uses: &[StreamId]) -> Digest {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the granularity should be valid");
    let streams: Vec<_> = (0..2).map(|_| allocator.register_stream().expect("a stream id is available")).collect();
    let made = allocator.allocate(PoolId::DEFAULT, streams[0], size_bytes).expect("memory should suffice");
    uses.iter().for_each(|stream| allocator.record_use(made.handle, *stream).expect("the allocation should be live"));
    allocator.digest(PoolId::DEFAULT).expect("the default pool should always exist")
}

/// Both requests take the same block of 1 KiB at the same offset.
#[test]
fn a_request_that_differs_by_one_byte_changes_the_digest() {
    assert_eq!(digest_after(1000, &[]), digest_after(1000, &[]));
    assert_ne!(digest_after(1000, &[]), digest_after(1001, &[]));
}

#[test]
fn a_use_that_only_one_rank_records_changes_the_digest() {
    let [owner, other] = [StreamId(0), StreamId(1)];
    let digests = [&[][..], &[owner], &[other], &[owner, other], &[other, owner]].map(|uses| digest_after(1000, uses));
    let distinct: std::collections::BTreeSet<_> = digests.iter().map(|digest| digest.value).collect();
    assert_eq!(distinct.len(), digests.len());
}

/// Private memory of a rank can cause the growth of a symmetric pool to be refused, but never reduces the growth step.
#[test]
fn the_limit_over_all_pools_does_not_change_the_growth_of_a_symmetric_pool() {
    let mut knobs = ExpandableSegments::default();
    knobs.growth_bytes = 8 * MIB;
    let symmetric = PoolConfig::builder()
        .segments(SegmentPolicy::Expandable(knobs))
        .symmetric(true)
        .build()
        .expect("the configuration should be valid");
    // On one rank, the symmetric pool has 6 of 64 MiB left: enough for the request, but not for the step.
    let reserved = [0, 58 * MIB].map(|private_bytes| {
        let config =
            Config::builder().total_limit_bytes(Some(64 * MIB)).build().expect("the configuration should be valid");
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
        let stream = allocator.register_stream().expect("a stream id is available");
        let pool = allocator.create_pool(symmetric.clone()).expect("the pool should be created");
        if private_bytes > 0 {
            let _live = allocator
                .allocate(PoolId::DEFAULT, stream, private_bytes)
                .expect("the request should stay within the limit");
        }
        let made = allocator.allocate(pool, stream, 3 * MIB).is_ok();
        made.then(|| allocator.pool_stats(pool).expect("the pool should exist").reserved_bytes.current)
    });
    assert_eq!(reserved, [Some(8 * MIB), None]);
}
