//! Remains of destroyed pools: a bounded number of bytes each, and no work for calls that visit all pools.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use symmalloc_agreement::{Point, RankHistory};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::op::Contents;
use symmalloc_core::{PoolId, SharedAllocator, StreamId, generic};
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend};

/// Maximum number of bytes kept per destroyed pool, including the history of one heap.
const BYTES_MAX: usize = 256;
/// Maximum number of additional bytes per further heap of a symmetric pool, until the ranks agree on its history.
const HISTORY_BYTES_MAX: usize = 28;
const POOLS: usize = 2000;
const STREAMS: u16 = 4;

/// A global allocator that counts allocated bytes.
struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocator<L: Lock>() -> generic::Allocator<SimBackend, L> {
    let backend = SimBackend::builder().memory_bytes(1 << 50).build();
    let allocator =
        generic::Allocator::with_lock(backend, Config::default()).expect("the configuration should be valid");
    for _ in 0..STREAMS {
        allocator.register_stream().expect("a stream id is available");
    }
    allocator
}

/// Creates a pool, uses it on all streams, in steps and across a sleep, and destroys it.
fn live_and_die<L: Lock>(allocator: &generic::Allocator<SimBackend, L>, config: &str, sleeps: bool) -> PoolId {
    let config: PoolConfig = config.parse().expect("the text should be valid");
    let pool = allocator.create_pool(config).expect("the configuration should be valid");
    for _ in 0..4 {
        allocator.begin_step(pool, 0).expect("no other step");
        for stream in (0..STREAMS).map(StreamId) {
            let made = [512, 3 << 20, 40_000, 9 << 20].map(|size_bytes| {
                allocator.allocate_named(pool, stream, size_bytes, "weights").expect("memory should suffice").handle
            });
            allocator.record_use(made[1], StreamId(0)).expect("the allocation should be live");
            made.into_iter().for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
        }
        allocator.end_step(pool).expect("a step should be open");
    }
    if sleeps {
        allocator
            .quiesce(pool, Contents::Keep)
            .expect("no work is pending")
            .unmap()
            .expect("the pool should fall asleep");
    }
    allocator.destroy_pool(pool).expect("the pool should be empty");
    pool
}

/// Returns the number of bytes kept per destroyed pool, averaged over many. `config` returns the configuration of the
/// n-th pool.
fn bytes_per_pool<L: Lock>(
    config: impl Fn(usize) -> String,
    sleeps: bool,
    after_each: impl Fn(&generic::Allocator<SimBackend, L>),
) -> usize {
    let allocator = allocator::<L>();
    let run = |pools: Range<usize>| {
        for number in pools {
            live_and_die(&allocator, &config(number), sleeps);
            after_each(&allocator);
        }
    };
    run(0..200);
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    run(200..200 + POOLS);
    let grown = LIVE_BYTES.load(Ordering::Relaxed).saturating_sub(before);
    assert_eq!(allocator.pool_count() as usize, 201 + POOLS);
    allocator.check().expect("the invariants should hold");
    grown / POOLS
}

/// Returns the configuration of the n-th pool of a policy, which differs from all others unless it recurs.
fn numbered(policy: &str, number: usize, recurs: bool) -> String {
    let separator = if policy.is_empty() { "" } else { "," };
    let number = if recurs { 0 } else { number };
    format!("{policy}{separator}release_threshold_mb:{}", 1 << 20 | number)
}

/// Histories of symmetric pools stay until the ranks agree.
fn symmetric(recurs: bool) {
    let settle = |allocator: &SharedAllocator<SimBackend>| RankHistory::new(allocator, Point::Sync).settle();
    let of_one = |number| numbered("symmetric:true,streams:shared", number, recurs);
    let of_four = |number| numbered("symmetric:true", number, recurs);
    let settled = bytes_per_pool::<Shared>(of_one, false, settle);
    let unsettled = bytes_per_pool::<Shared>(of_one, false, |_| ());
    let of_four = bytes_per_pool::<Shared>(of_four, false, |_| ());
    println!(
        "symmetric, recurs {recurs}: {settled} bytes when settled, {unsettled} when not, {of_four} with four heaps"
    );
    assert!(settled <= BYTES_MAX, "{settled}");
    assert!(unsettled <= BYTES_MAX, "{unsettled}");
    assert!(of_four <= unsettled + usize::from(STREAMS - 1) * HISTORY_BYTES_MAX, "{of_four}");
    assert!(!recurs || of_four <= BYTES_MAX, "{of_four}");
}

/// A single test, because concurrent tests in the same process would also allocate.
#[test]
fn a_destroyed_pool_keeps_few_bytes_and_is_not_visited() {
    let policies = [
        "",
        "segments:fixed",
        "streams:shared",
        "stitching:true,stitching_granule_mb:2,stitching_least_mb:4",
        "plan:learn",
        "streams:shared,plan:learn",
        "segments:fixed,tag:weights,limit_mb:500",
    ];
    for policy in policies {
        for sleeps in [false, true] {
            for recurs in [true, false] {
                let config = |number| numbered(policy, number, recurs);
                let shared = bytes_per_pool::<Shared>(config, sleeps, |_| ());
                let exclusive = bytes_per_pool::<Exclusive>(config, sleeps, |_| ());
                println!("{policy:60} sleeps {sleeps}, recurs {recurs}: {shared} and {exclusive} bytes");
                assert!(
                    shared <= BYTES_MAX && exclusive <= BYTES_MAX,
                    "{policy} sleeps {sleeps}, recurs {recurs}: {shared}, {exclusive}"
                );
            }
        }
    }
    for recurs in [true, false] {
        symmetric(recurs);
    }
    visits();
}

/// Trims and reports visit live pools, and destroyed ones whose memory the driver kept.
fn visits() {
    for keeps_memory in [false, true] {
        let backend = SimBackend::builder().memory_bytes(1 << 50).build();
        let allocator: SharedAllocator<_> =
            generic::Allocator::with_lock(backend, Config::default()).expect("the configuration should be valid");
        for _ in 0..STREAMS {
            allocator.register_stream().expect("a stream id is available");
        }
        let pools: Vec<_> = (0..500).map(|_| live_and_die(&allocator, "", false)).collect();
        assert_eq!(allocator.listed_pool_count(), 1, "the default pool");
        let stats = allocator.stats();
        assert_eq!(stats.usage.all.allocations.allocated, 500 * 4 * 16, "the statistics still include them");
        assert_eq!(stats.usage.all.allocations.freed, 500 * 4 * 16);
        let live = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
        assert_eq!((allocator.listed_pool_count(), live.0), (2, 501));
        if keeps_memory {
            let made = allocator.allocate(live, StreamId(0), 1 << 20).expect("memory should suffice");
            allocator.free(made.handle).expect("the allocation should be live");
            let ordinal = allocator.backend().calls().of(Call::Unmap);
            allocator.backend().inject(Some(Call::Unmap), FaultRule::At { ordinal }, Fault::Refused);
            allocator.destroy_pool(live).expect_err("the driver keeps the memory");
            assert_eq!(allocator.listed_pool_count(), 2);
            allocator.trim_all().expect("the driver works again");
        } else {
            allocator.destroy_pool(live).expect("the pool should be empty");
        }
        assert_eq!(allocator.listed_pool_count(), 1);
        assert_eq!(allocator.backend().mapped_bytes(), 0);
        assert!(pools.iter().all(|pool| allocator.pool_stats(*pool).is_err()));
        assert_eq!(allocator.summary().lines().count(), 3, "a header, all pools, the default pool");
        allocator.check().expect("the invariants should hold");
    }
}
