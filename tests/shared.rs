//! Threads: a heap's placements and digest depend on its own ops alone, however threads interleave (rule D8).

use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::units::MIB;
use symmalloc_core::{Digest, Handle, PoolId, SharedAllocator, StreamId};
use symmalloc_sim::{IdleBackend, SimBackend, SplitMix64};

const THREADS: u16 = 4;
const OPS: u64 = 3000;

/// Runs a thread on its own stream, with uses on the other streams. Returns nothing, because its heap's digest covers all decisions.
fn drive(allocator: &SharedAllocator<SimBackend>, pool: PoolId, stream: StreamId, seed: u64) {
    let mut random = SplitMix64::new(seed ^ u64::from(stream.0));
    let mut live: Vec<Handle> = Vec::new();
    for _ in 0..OPS {
        match random.below(10) {
            0..=4 => {
                let size_bytes = 512 << random.below(14);
                let allocation = allocator.allocate(pool, stream, size_bytes).expect("no limit should be reached");
                let submitted = allocator.backend().submit(stream, allocation.address, allocation.size_bytes);
                submitted.expect("the earlier users were waited for");
                live.push(allocation.handle);
            }
            5..=7 if !live.is_empty() => {
                let handle = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(handle).expect("the allocation should be live");
            }
            8 if !live.is_empty() => {
                let handle = live[random.below(live.len() as u64) as usize];
                let other = StreamId(random.below(THREADS.into()) as u16);
                allocator.record_use(handle, other).expect("the allocation should be live");
            }
            _ => allocator.reserve(pool, stream, random.below(8) << 20).expect("no limit should be reached"),
        }
    }
    live.into_iter().for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
}

fn allocator(pool: PoolConfig, seed: u64) -> SharedAllocator<SimBackend> {
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator =
        SharedAllocator::new(SimBackend::builder().seed(seed).build(), config).expect("the arguments should be valid");
    for stream in 0..THREADS {
        assert_eq!(allocator.register_stream(), Ok(StreamId(stream)));
    }
    allocator
}

fn digests(allocator: &SharedAllocator<SimBackend>) -> (Digest, Vec<(StreamGroup, Digest)>) {
    allocator.check().expect("the invariants should hold");
    let pool = PoolId::DEFAULT;
    (
        allocator.digest(pool).expect("the pool should exist"),
        allocator.heap_digests(pool).expect("the pool should exist"),
    )
}

fn threads_decide_like_one(pool: &PoolConfig) {
    for seed in 0..4 {
        let alone = allocator(pool.clone(), seed);
        (0..THREADS).for_each(|stream| drive(&alone, PoolId::DEFAULT, StreamId(stream), seed));
        let together = allocator(pool.clone(), seed + 100);
        std::thread::scope(|scope| {
            for stream in (0..THREADS).rev() {
                let together = &together;
                scope.spawn(move || drive(together, PoolId::DEFAULT, StreamId(stream), seed));
            }
        });
        assert_eq!(digests(&together), digests(&alone), "seed {seed}");
        assert_eq!(digests(&together).1.len(), usize::from(THREADS));
        assert_eq!(together.stats().usage.all.allocations.current, 0);
        let backend_leaks = {
            together.trim_all().expect("no fault should be injected");
            together.backend().leaks()
        };
        assert!(backend_leaks.is_empty(), "{backend_leaks}");
    }
}

#[test]
fn threads_on_expandable_heaps_decide_like_one_thread() {
    threads_decide_like_one(&PoolConfig::default());
}

#[test]
fn threads_on_fixed_segments_decide_like_one_thread() {
    threads_decide_like_one(&PoolConfig::builder().fixed().build().expect("the configuration should be valid"));
}

/// Ops of a rank in one pool change no placement in another (rule D8).
#[test]
fn pools_are_independent() {
    let run = |is_rank_zero: bool| {
        let allocator = allocator(PoolConfig::default(), 3);
        let log = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
        std::thread::scope(|scope| {
            if is_rank_zero {
                scope.spawn(|| drive(&allocator, log, StreamId(0), 77));
            }
            drive(&allocator, PoolId::DEFAULT, StreamId(0), 5);
        });
        digests(&allocator)
    };
    assert_eq!(run(true), run(false));
}

/// Many threads share one pool whose streams share a heap. Their order varies, but the heap stays consistent and nothing races.
#[test]
fn threads_that_share_a_heap_leave_it_consistent() {
    let pool = PoolConfig::builder()
        .streams(symmalloc_core::config::StreamPolicy::Shared)
        .build()
        .expect("the configuration should be valid");
    let allocator = allocator(pool, 9);
    std::thread::scope(|scope| {
        for stream in 0..THREADS {
            let allocator = &allocator;
            scope.spawn(move || {
                let mut random = SplitMix64::new(u64::from(stream));
                let mut live = Vec::new();
                for _ in 0..OPS {
                    if live.len() < 40 && random.below(2) == 0 {
                        let size_bytes = 512 << random.below(14);
                        let made = allocator
                            .allocate(PoolId::DEFAULT, StreamId(stream), size_bytes)
                            .expect("no limit should be reached");
                        live.push(made.handle);
                    } else if let Some(handle) = live.pop() {
                        allocator.free(handle).expect("the allocation should be live");
                    }
                }
            });
        }
    });
    allocator.check().expect("the invariants should hold");
}

/// Threads continually obtain and release memory, each in a separate pool under one limit. The charged bytes equal the held bytes, and
/// never exceed the limit.
#[test]
fn threads_that_charge_one_limit_lose_no_charge() {
    let limit_bytes = 14 * MIB;
    let config =
        Config::builder().total_limit_bytes(Some(limit_bytes)).build().expect("the configuration should be valid");
    let allocator = SharedAllocator::new(IdleBackend::default(), config).expect("the arguments should be valid");
    let pools: Vec<PoolId> = (0..THREADS)
        .map(|_| {
            allocator.register_stream().expect("a stream id is available");
            allocator
                .create_pool(PoolConfig::builder().fixed().build().expect("the configuration should be valid"))
                .expect("the pool is created")
        })
        .collect();
    std::thread::scope(|scope| {
        for (stream, pool) in (0..).map(StreamId).zip(&pools) {
            let allocator = &allocator;
            scope.spawn(move || {
                for _ in 0..300_000 {
                    if allocator.reserve(*pool, stream, 4 * MIB).is_ok() {
                        allocator.trim_pool(*pool).expect("no fault should be injected");
                    }
                }
            });
        }
        for _ in 0..5000 {
            let reserved_bytes = allocator.stats().reserved_bytes.current;
            assert!(reserved_bytes <= limit_bytes, "{reserved_bytes} bytes under a limit of {limit_bytes}");
        }
    });
    assert_eq!(allocator.stats().reserved_bytes.current, 0);
    allocator.reserve(pools[0], StreamId(0), limit_bytes).expect("the whole limit is available");
    allocator.reserve(pools[1], StreamId(1), 1).expect_err("nothing is left");
}
