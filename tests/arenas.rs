//! Arenas: pools that are reset or destroyed after each request, pools that the program drops, and pools with keys.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, HandleError, OutOfMemoryCause, PoolError, UnknownError};
use symmalloc_core::op::Record;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, Allocator, Emptied, LimitScope, Op, PoolId, SharedAllocator, StreamId};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::{Call, SimBackend, SplitMix64};
use symmalloc_trace::Trace;
use symmalloc_trace::replay::{Program, Replay};

fn config(text: &str) -> Config {
    text.parse().expect("the configuration should be valid")
}

fn pool(text: &str) -> PoolConfig {
    text.parse().expect("the configuration should be valid")
}

/// A program in a pool: allocations, uses by another stream, some frees. Returns the live allocations.
fn work(allocator: &Allocator<&SimBackend>, pool: PoolId, streams: [StreamId; 2], seed: u64) -> Vec<Allocation> {
    let mut random = SplitMix64::new(seed);
    let mut live: Vec<Allocation> = Vec::new();
    for _ in 0..40 {
        let stream = streams[random.below(2) as usize];
        match random.below(4) {
            0 if !live.is_empty() => {
                let freed = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(freed.handle).expect("the allocation should be live");
            }
            1 if !live.is_empty() => {
                let used = live[random.below(live.len() as u64) as usize];
                allocator.record_use(used.handle, stream).expect("the allocation should be live");
            }
            _ => {
                let size_bytes = [1, 700, 3 * KIB, MIB, 3 * MIB + 512, 9 * MIB, 40 * MIB][random.below(7) as usize];
                live.push(allocator.allocate(pool, stream, size_bytes).expect("memory should suffice"));
            }
        }
    }
    live
}

/// A reset makes all handles stale and the memory free, keeps the memory, and calls no driver. It decides like frees in the order of
/// placements, in pools of every kind.
#[test]
fn a_reset_equals_the_frees_of_everything_and_makes_no_driver_call() {
    let policies = [
        "segments:expandable",
        "segments:fixed",
        "streams:shared",
        "segments:reserved,segment_mb:4096",
        "symmetric:true",
        "stitching:true,stitching_granule_mb:2,stitching_least_mb:2",
        "release_threshold_mb:24",
    ];
    for (policy, seed) in policies.into_iter().flat_map(|policy| (0..20).map(move |seed| (policy, seed))) {
        let outcomes = [true, false].map(|is_reset| {
            let device = SimBackend::builder().seed(seed).build();
            let allocator: Allocator<_> =
                Allocator::new(&device, Config::default()).expect("the arguments should be valid");
            let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
            let arena = allocator.create_pool(pool(policy)).expect("the configuration should be valid");
            let mut live = work(&allocator, arena, streams, seed);
            let (calls, reserved_bytes) = (device.calls(), allocator.stats().reserved_bytes.current);
            if is_reset {
                let freed = allocator.reset_pool(arena).expect("the pool should exist");
                assert_eq!(freed.allocations, live.len() as u64, "{policy}");
                if !policy.starts_with("release") {
                    assert_eq!(device.calls().fallible(), calls.fallible(), "{policy}: a driver call");
                    assert_eq!(allocator.stats().reserved_bytes.current, reserved_bytes, "{policy}: the memory stays");
                }
            } else {
                let stream_of = |made: &Allocation| allocator.segment_at(made.address).map(|at| at.heap.stream());
                live.sort_by_key(|made| (stream_of(made).expect("the allocation should be live"), made.placement));
                live.iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
                assert_eq!(allocator.reset_pool(arena), Ok(Emptied::default()), "{policy}");
            }
            for made in live {
                let stale = HandleError::Stale { handle: made.handle };
                assert_eq!(allocator.free(made.handle), Err(stale.into()), "{policy}");
            }
            allocator.check().unwrap_or_else(|violation| panic!("{policy}: {violation}"));
            assert_eq!(allocator.stats().usage.all.allocated_bytes.current, 0, "{policy}");
            let digest = allocator.digest(arena).expect("the pool should exist");
            let later: Vec<_> = work(&allocator, arena, streams, seed + 1).iter().map(|made| made.placement).collect();
            (digest, later, allocator.digest(arena).expect("the pool should exist"))
        });
        assert_eq!(outcomes[0], outcomes[1], "{policy}, seed {seed}");
    }
}

#[test]
fn only_an_unused_pool_is_reset_under_buffers_that_own_their_memory() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let arena = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let made = allocator.allocate(arena, stream, 1000).expect("memory should suffice");
    let nothing = allocator.allocate(arena, stream, 0).expect("zero bytes fit");
    let in_use = PoolError::InUse { pool: arena, allocations: 1, allocated_bytes: 1024 };
    assert_eq!(allocator.reset_unused_pool(arena), Err(in_use));
    allocator.free(made.handle).expect("the allocation should still be live");
    assert_eq!(allocator.reset_unused_pool(arena), Ok(()));
    allocator.free(nothing.handle).expect("a reset leaves allocations of zero bytes alone");
    allocator.destroy_pool(arena).expect("nothing should be live in the pool");
    assert_eq!(allocator.reset_pool(arena), Err(UnknownError::DestroyedPool { pool: arena }));
}

/// Serves requests that each have their own arena, which the program drops. Returns the records and the most memory held.
fn serve(config: &Config, arena: &str, requests: u32) -> (Vec<Record>, u64, u64, SimBackend) {
    let device = SimBackend::builder().memory_bytes(1 << 40).build();
    let memory = Memory::new();
    let mut reserved_peak_bytes = 0;
    let mut refused = 0;
    {
        let allocator: Allocator<_> = Allocator::new(&device, config.clone()).expect("the arguments should be valid");
        allocator.start_recording(memory.clone()).expect("nothing should have been allocated");
        let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
        for _ in 0..requests {
            let arena = allocator.create_pool(pool(arena)).expect("the configuration should be valid");
            for stream in streams {
                match allocator.allocate(arena, stream, 4 * MIB) {
                    Ok(made) => allocator.free(made.handle).expect("the allocation should be live"),
                    Err(_) => refused += 1,
                }
            }
            allocator.abandon_pool(arena);
            reserved_peak_bytes = reserved_peak_bytes.max(allocator.stats().reserved_bytes.current);
        }
        allocator.check().expect("the invariants should hold");
        allocator.stop_recording().expect("the sink has space");
    }
    (memory.records(), reserved_peak_bytes, refused, device)
}

/// The limit has room for one arena and a bit. Dropped arenas are destroyed before it refuses a request, each destruction is recorded before
/// the request, and a replay decides alike.
#[test]
fn dropped_private_pools_are_destroyed_before_the_limit_refuses() {
    let config = config("total_limit_mb:64");
    let (records, peak_bytes, refused, _) = serve(&config, "", 200);
    assert_eq!(refused, 0, "nothing is live between the requests");
    assert!(peak_bytes <= 64 * MIB, "{peak_bytes}");
    let destroyed = records.iter().filter(|record| matches!(record.op, Op::DestroyPool { .. })).count();
    assert!(destroyed > 100, "{destroyed} destructions are recorded");
    let trace = Trace::new(Some(config.clone()), records.clone()).expect("a recording is a trace");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the contents should be UTF-8"), trace);
    let program = Program::new(&records).expect("a recording is a program");
    let device = SimBackend::builder().seed(9).memory_bytes(1 << 40).build();
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let again = Memory::new();
    allocator.start_recording(again.clone()).expect("nothing should have been allocated");
    Replay::new(&allocator, &program).run(|_, _| {}).expect("it ran before");
    allocator.stop_recording().expect("the sink has space");
    assert_eq!(again.records(), records);
}

/// Ranks compare the ops of symmetric pools, so these are destroyed only explicitly. Neither is a pool with a live allocation, or one that an
/// observer follows.
#[test]
fn symmetric_used_and_observed_pools_are_not_destroyed_for_a_request() {
    let (_, _, refused, _) = serve(&config("total_limit_mb:64"), "symmetric:true", 20);
    assert!(refused > 0);
    let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), config("total_limit_mb:64"))
        .expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let used = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let live = allocator.allocate(used, stream, 20 * MIB).expect("the allocation should fit");
    let observed = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let made = allocator.allocate(observed, stream, 20 * MIB).expect("the allocation should fit");
    allocator.free(made.handle).expect("the allocation should be live");
    let (observer, _) = allocator.observe(observed).expect("the pool should exist");
    [used, observed].into_iter().for_each(|pool| allocator.abandon_pool(pool));
    let refused = allocator.allocate(PoolId::DEFAULT, stream, 30 * MIB).expect_err("the limit is full");
    let AllocateError::OutOfMemory(error) = refused else { panic!("{refused}") };
    assert!(matches!(error.cause, OutOfMemoryCause::Limit { scope: LimitScope::Allocator, .. }));
    assert_eq!(allocator.pools(), [PoolId::DEFAULT, used, observed]);
    allocator.forget(observer).expect("it should be registered");
    let _live = allocator.allocate(PoolId::DEFAULT, stream, 30 * MIB).expect("the observed pool was destroyed");
    assert_eq!(allocator.pools(), [PoolId::DEFAULT, used]);
    allocator.free(live.handle).expect("the allocation should be live");
    assert_eq!(allocator.destroy_abandoned(), Ok(20 * MIB));
}

/// Every call that releases memory returns all released bytes.
#[test]
fn released_bytes_are_counted() {
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let [first, second, third] = [(); 3].map(|()| {
        let arena = allocator.create_pool(pool("symmetric:true")).expect("the configuration should be valid");
        let made = allocator.allocate(arena, stream, 3 * MIB).expect("memory should suffice");
        allocator.free(made.handle).expect("the allocation should be live");
        arena
    });
    let held = || allocator.stats().reserved_bytes.current;
    let each = held() / 3;
    assert!(each >= 3 * MIB);
    assert_eq!(allocator.destroy_pool(first), Ok(each));
    allocator.abandon_pool(second);
    assert_eq!(allocator.destroy_abandoned_private(), Ok(0));
    assert_eq!(allocator.destroy_abandoned(), Ok(each));
    assert_eq!(allocator.trim_pool(third), Ok(each));
    assert_eq!((held(), device.calls().of(Call::Unmap)), (0, 3));
}

/// Threads that create pools at the same time get the ids that they chose, in any interleaving, and with them the same digests and reports.
#[test]
fn keys_name_pools_whatever_the_timing() {
    let run = |late: usize| {
        let allocator = SharedAllocator::new(SimBackend::builder().build(), Config::default())
            .expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        let turn = AtomicUsize::new(0);
        thread::scope(|scope| {
            for worker in 0..4_usize {
                let (allocator, turn) = (&allocator, &turn);
                scope.spawn(move || {
                    // A different worker comes first in every run.
                    while turn.load(Ordering::Acquire) != (worker + late) % 4 {
                        thread::yield_now();
                    }
                    for request in 0..3_usize {
                        let key = PoolId((1 + request * 4 + worker) as u32);
                        let arena = allocator.create_pool_with_key(key, PoolConfig::default()).expect("unused");
                        assert_eq!(arena, key);
                        let _live = allocator
                            .allocate(arena, stream, (1 + worker as u64) * MIB)
                            .expect("memory should suffice");
                    }
                    turn.fetch_add(1, Ordering::Release);
                });
            }
        });
        allocator.check().expect("the invariants should hold");
        let digests: Vec<_> = allocator.pools().into_iter().map(|pool| (pool, allocator.digest(pool))).collect();
        let sizes =
            allocator.snapshot().segments.into_iter().map(|segment| (segment.heap.pool, segment.blocks[0].size_bytes));
        (digests, sizes.collect::<Vec<_>>())
    };
    let first = run(0);
    assert_eq!(first.0.len(), 13);
    (1..4).for_each(|late| assert_eq!(run(late), first));
}

/// A key is used once. Pools without a key are numbered after the highest id so far. Recordings with gaps replay with the same ids.
#[test]
fn keys_are_checked_and_recorded() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let memory = Memory::new();
    allocator.start_recording(memory.clone()).expect("nothing should have been allocated");
    let with_key = |key| allocator.create_pool_with_key(PoolId(key), PoolConfig::default());
    assert_eq!(with_key(0), Err(PoolError::KeyOutOfRange { key: PoolId(0) }));
    assert_eq!(with_key(65_536), Err(PoolError::KeyOutOfRange { key: PoolId(65_536) }));
    assert_eq!(with_key(7), Ok(PoolId(7)));
    assert_eq!(with_key(3), Ok(PoolId(3)));
    assert_eq!(with_key(7), Err(PoolError::KeyInUse { key: PoolId(7) }));
    allocator.destroy_pool(PoolId(3)).expect("the pool should be empty");
    assert_eq!(with_key(3), Err(PoolError::KeyInUse { key: PoolId(3) }));
    assert_eq!(allocator.create_pool(PoolConfig::default()), Ok(PoolId(8)));
    assert!(allocator.digest(PoolId(5)).is_err(), "no pool has this key");
    let records = { allocator.stop_recording().map(|_| memory.records()).expect("the sink has space") };
    let trace = Trace::new(Some(Config::default()), records.clone()).expect("gaps are allowed");
    assert_eq!(Trace::parse(&trace.to_text()).expect("the contents should be UTF-8"), trace);
    let program = Program::new(&records).expect("a recording is a program");
    let again: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    Replay::new(&again, &program).run(|_, _| {}).expect("it ran before");
    assert_eq!(again.pools(), allocator.pools());
}
