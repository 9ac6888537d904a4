//! Limits: what a configured limit refuses, and when the failure callback runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::{AllocateError, OutOfMemoryCause};
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocator, LimitScope, PoolId, Retry, StreamId};
use symmalloc_sim::{SimBackend, SplitMix64};

const POOL: PoolId = PoolId::DEFAULT;

fn config(text: &str) -> Config {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A limit refuses a request only if the request, rounded to the driver's granularity, does not fit next to the memory that the pool still
/// holds after it released what it can, for every step of growth, granule, limit and kind of segment.
#[test]
fn a_limit_refuses_only_what_does_not_fit() {
    let mut random = SplitMix64::new(68);
    let mut pick = |choices: &[&str]| choices[random.below(choices.len() as u64) as usize].to_owned();
    let (mut refused, mut served) = (0, 0);
    for case in 0..600 {
        let segments = pick(&[
            "segments:fixed",
            "segments:fixed,large_segment_size_mb:64",
            "segments:fixed,max_split_size_mb:32",
            "segments:expandable,growth_mb:2",
            "segments:expandable,growth_mb:64",
            "segments:expandable,range_mb:256",
            "stitching:true",
            "stitching:true,stitching_granule_mb:2,stitching_least_mb:4",
            "stitching:true,stitching_granule_mb:64,growth_mb:128",
        ]);
        let limit_mb: u64 = pick(&["7", "33", "64", "120", "500"]).parse().expect("it should be a number");
        let limit = pick(&["limit_mb", "total_limit_mb"]);
        let reclaim = pick(&["reclaim:never", "reclaim:heap", "reclaim:pool"]);
        let granularity_bytes: u64 = pick(&["512", "65536", "2097152"]).parse().expect("it should be a number");
        let text = format!("{segments},{limit}:{limit_mb},{reclaim}");
        let device = SimBackend::builder().granularity_bytes(granularity_bytes).memory_bytes(1 << 50).build();
        let allocator: Allocator<_> = Allocator::new(&device, config(&text)).expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        let mut random = SplitMix64::new(case);
        let mut live = Vec::new();
        for op in 0..60 {
            if random.below(3) == 0 && !live.is_empty() {
                let freed = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(freed).expect("the allocation should be live");
                continue;
            }
            let size_bytes = match random.below(4) {
                0 => 1 + random.below(600 * KIB),
                1 => 1 + random.below(limit_mb * MIB / 8),
                2 => limit_mb * MIB / 3,
                _ => limit_mb * MIB / 2,
            };
            match allocator.allocate(POOL, stream, size_bytes) {
                Ok(made) => {
                    served += 1;
                    live.push(made.handle);
                }
                Err(AllocateError::OutOfMemory(error)) => {
                    refused += 1;
                    if !matches!(error.cause, OutOfMemoryCause::Limit { .. }) {
                        continue;
                    }
                    let needed_bytes = size_bytes.next_multiple_of(granularity_bytes);
                    let held_bytes = allocator.stats().reserved_bytes.current;
                    assert!(
                        held_bytes + needed_bytes > limit_mb * MIB,
                        "{text}, granularity {granularity_bytes}, case {case}, op {op}: {held_bytes} held and {needed_bytes} needed: {error}"
                    );
                }
                Err(error) => panic!("{text}: {error}"),
            }
            allocator.check().unwrap_or_else(|violation| panic!("{text}, case {case}, op {op}: {violation}"));
        }
    }
    assert!(refused > 1000 && served > 10_000, "{refused} refused, {served} served");
}

/// The case of PyTorch's `test_max_split_expandable`: 80 of 120 MiB are held, and 40 are requested.
#[test]
fn the_default_granules_of_stitching_shrink_to_the_limit() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config("stitching:true,total_limit_mb:120"))
            .expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let _live = allocator.allocate(POOL, stream, 80 * MIB).expect("the allocation should fit");
    let tight = allocator.allocate(POOL, stream, 40 * MIB).expect("it fits exactly");
    assert_eq!(allocator.stats().reserved_bytes.current, 120 * MIB);
    // Memory that was acquired tightly is reused and released like any other, and growth continues where it was.
    allocator.free(tight.handle).expect("the allocation should be live");
    let again = allocator.allocate(POOL, stream, 40 * MIB).expect("the memory is cached");
    assert_eq!(again.placement, tight.placement);
    allocator.free(again.handle).expect("the allocation should be live");
    assert_eq!(allocator.trim_all(), Ok(40 * MIB));
    let layout = allocator.save_layout(POOL).expect("nothing is stitched");
    assert_eq!(layout.reserved_bytes(), 80 * MIB);
    let small = allocator.allocate(POOL, stream, 12 * MIB).expect("the allocation should fit");
    assert_eq!(small.placement.offset_bytes, 80 * MIB, "at the end of the range");
}

/// A job may have many heaps that hold a few small tensors each: of private pools, graphs and streams.
#[test]
fn a_heap_of_small_tensors_reserves_at_most_twice_their_size_or_a_granule_more() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config("stitching:true")).expect("a valid configuration");
    let reserved = || allocator.stats().reserved_bytes.current;
    let streams: Vec<_> = (0..10).map(|_| allocator.register_stream().expect("a stream id is available")).collect();
    for &stream in &streams {
        let _live = allocator.allocate(POOL, stream, 512).expect("the device has memory");
    }
    assert_eq!(reserved(), 10 * 2 * MIB);
    let (before, stream, size_bytes) = (9 * 2 * MIB, streams[0], 256 * 1024);
    let mut held = Vec::new();
    for live_bytes in (1..=256).map(|count| count * size_bytes) {
        held.push(allocator.allocate(POOL, stream, size_bytes).expect("the device has memory").handle);
        let (heap, live_bytes) = (reserved() - before, live_bytes + 512);
        let most = (2 * live_bytes).clamp(2 * MIB, live_bytes + 16 * MIB);
        assert!(heap <= most, "{heap} bytes are reserved for {live_bytes}");
    }
    // The segments are released like any other, and the heap is then as new.
    held.into_iter().for_each(|handle| allocator.free(handle).expect("the allocation is live"));
    allocator.trim_all().expect("nothing fails");
    assert_eq!(reserved(), 10 * 2 * MIB);
}

/// A restored heap grows like the saved one, also next to a tight segment.
#[test]
fn a_layout_with_a_tight_segment_is_restored() {
    let text = "stitching:true,total_limit_mb:110";
    let make = |seed| {
        let device = SimBackend::builder().seed(seed).build();
        let allocator: Allocator<_> = Allocator::new(device, config(text)).expect("the arguments should be valid");
        allocator.register_stream().expect("a stream id is available");
        allocator
    };
    let (saved, restored, stream) = (make(1), make(2), StreamId(0));
    let big = saved.allocate(POOL, stream, 64 * MIB).expect("the allocation should fit");
    let tight = saved.allocate(POOL, stream, 42 * MIB).expect("it fits tightly");
    let layout = saved.save_layout(POOL).expect("nothing is stitched");
    let live = restored.restore_layout(POOL, &layout).expect("the pool is unused");
    let freed = |allocator: &Allocator<SimBackend>, address: usize| {
        let snapshot = allocator.snapshot();
        let segment = &snapshot.segments[address];
        (segment.segment, segment.size_bytes, segment.mapped_bytes)
    };
    assert_eq!([0, 1].map(|at| freed(&saved, at)), [0, 1].map(|at| freed(&restored, at)));
    saved.free(big.handle).expect("the allocation should be live");
    saved.free(tight.handle).expect("the allocation should be live");
    live.allocations().for_each(|made| restored.free(made.allocation.handle).expect("the allocation should be live"));
    for size_bytes in [40, 30, 20, 10].map(|mib| mib * MIB) {
        let placed = [&saved, &restored].map(|allocator| allocator.allocate(POOL, stream, size_bytes));
        let placed = placed.map(|made| made.map(|made| made.placement).map_err(|error| error.to_string()));
        assert_eq!(placed[0], placed[1]);
    }
    restored.check().expect("the invariants should hold");
}

/// The failure callback runs only if freeing memory can help: not if the request exceeds the limit, the limit without segments that stay, or
/// its heap's only segment.
#[test]
fn the_failure_callback_runs_only_if_an_eviction_can_help() {
    let cases: [(&str, &str, u64, bool); 14] = [
        // The configuration of the allocator, that of the pool (the default one if empty), requested MiB, and whether the callback runs.
        ("total_limit_mb:64", "", 100, false),
        ("total_limit_mb:64", "", 64, true),
        ("total_limit_mb:64,segments:fixed", "", 65, false),
        ("total_limit_mb:64,segments:fixed", "", 64, true),
        ("total_limit_mb:64,stitching:true", "", 63, true),
        ("total_limit_mb:64,stitching:true", "", 65, false),
        ("limit_mb:64", "", 65, false),
        ("limit_mb:64", "", 63, true),
        ("total_limit_mb:64", "limit_mb:40", 41, false),
        ("total_limit_mb:64", "limit_mb:40", 39, true),
        // A reserved segment of the default pool stays, so at most 24 MiB are available.
        ("total_limit_mb:64,segments:reserved,segment_mb:40", "segments:expandable", 25, false),
        ("total_limit_mb:64,segments:reserved,segment_mb:40", "segments:expandable", 24, true),
        ("segments:reserved,segment_mb:40", "", 41, false),
        ("segments:reserved,segment_mb:40", "", 40, true),
    ];
    for (text, pool, request_mb, runs) in cases {
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), config(text)).expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        let first = allocator.allocate(POOL, stream, 512).expect("the allocation should fit");
        let pool = match pool {
            "" => POOL,
            text => allocator
                .create_pool(text.parse::<PoolConfig>().expect("the text should be valid"))
                .expect("the configuration should be valid"),
        };
        let held = allocator.allocate(pool, stream, 2 * MIB).expect("the allocation should fit");
        let called = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&called);
        allocator.set_failure_callback(move |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
            Retry::GiveUp
        });
        let refused = allocator.allocate(pool, stream, request_mb * MIB).expect_err("memory is in use");
        assert!(matches!(refused, AllocateError::OutOfMemory(_)), "{text}: {refused}");
        assert_eq!(called.load(Ordering::Relaxed) > 0, runs, "{text}: {request_mb} MiB: {refused}");
        // Without its live allocations, the pool serves exactly the requests for which the callback runs.
        [first, held].into_iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
        if pool != POOL {
            allocator.trim_all().expect("no fault should be injected");
        }
        let served = allocator.allocate(pool, stream, request_mb * MIB);
        assert_eq!(served.is_ok(), runs, "{text}: {request_mb} MiB: {served:?}");
    }
}

/// A heap that holds more than a lowered limit can serve the request from what it holds, so the callback runs.
#[test]
fn a_lowered_limit_does_not_make_held_memory_useless() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let held = allocator.allocate(POOL, stream, 100 * MIB).expect("there is no limit");
    allocator.set_total_limit_bytes(Some(64 * MIB));
    let handle = held.handle;
    allocator.set_failure_callback(move |allocator, error| {
        assert!(matches!(error.cause, OutOfMemoryCause::Limit { scope: LimitScope::Allocator, .. }));
        allocator.free(handle).map_or(Retry::GiveUp, |()| Retry::Again)
    });
    let made = allocator.allocate(POOL, stream, 90 * MIB).expect("the callback freed more");
    assert_eq!(made.placement, held.placement);
}
