//! What the allocator tells of itself: statistics and their scopes, snapshots, leaks, the summary.

use symmalloc_core::config::PoolConfig;
use symmalloc_core::lock::Shared;
use symmalloc_core::report::BlockStateSnapshot;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocator, Config, PoolId, StreamId};
use symmalloc_sim::SimBackend;

const POOL: PoolId = PoolId::DEFAULT;

fn allocator_with_two_streams() -> (Allocator<SimBackend>, StreamId, StreamId) {
    let allocator: Allocator<_> = Allocator::new(SimBackend::builder().build(), Config::default()).expect("a device");
    let (one, other) = (allocator.register_stream().expect("few"), allocator.register_stream().expect("few"));
    (allocator, one, other)
}

#[test]
fn usage_is_counted_by_class_by_stream_and_in_all() {
    let (allocator, one, other) = allocator_with_two_streams();
    let small = allocator.allocate(POOL, one, 1000).expect("memory");
    allocator.allocate(POOL, one, 3 * MIB).expect("memory");
    allocator.allocate(POOL, other, 5 * MIB).expect("memory");
    allocator.free(small.handle).expect("live");

    let stats = allocator.heap_stats(POOL, one).expect("a pool").usage;
    let bytes = stats.small.allocated_bytes;
    assert_eq!((bytes.current, bytes.peak, bytes.allocated, bytes.freed), (0, 1024, 1024, 1024));
    assert_eq!(stats.small.requested_bytes.peak, 1000);
    assert_eq!(stats.large.allocations.current, 1);
    assert_eq!(stats.all.allocated_bytes.peak, 3 * MIB + KIB);
    let reserved = allocator.heap_stats(POOL, other).expect("a pool").reserved_bytes;
    assert_eq!((reserved.current, reserved.peak, reserved.freed), (6 * MIB, 6 * MIB, 0));
    assert_eq!(allocator.pool_stats(POOL).expect("a pool").usage.all.allocations.allocated, 3);
}

#[test]
fn one_thread_gets_exact_peaks_over_streams_and_several_an_upper_bound() {
    let (allocator, one, other) = allocator_with_two_streams();
    let several = Allocator::<_, Shared>::new(SimBackend::builder().build(), Config::default()).expect("a device");
    several.register_stream().expect("few");
    several.register_stream().expect("few");
    for stream in [one, other] {
        let taken = allocator.allocate(POOL, stream, 4 * MIB).expect("memory");
        allocator.free(taken.handle).expect("live");
        let taken = several.allocate(POOL, stream, 4 * MIB).expect("memory");
        several.free(taken.handle).expect("live");
    }
    let (exact, bound) = (allocator.stats(), several.stats());
    assert_eq!((exact.usage.all.allocated_bytes.peak, exact.peaks_are_exact), (4 * MIB, true));
    assert_eq!((bound.usage.all.allocated_bytes.peak, bound.peaks_are_exact), (8 * MIB, false));
}

#[test]
fn scopes_nest_also_over_streams_that_come_later() {
    let (allocator, one, other) = allocator_with_two_streams();
    let before = allocator.allocate(POOL, one, 8 * MIB).expect("memory");
    let outer = allocator.open_stat_scope();
    allocator.free(before.handle).expect("live");
    let inner = allocator.open_stat_scope();
    // The second heap is made inside both scopes.
    let late = allocator.allocate(POOL, other, 2 * MIB).expect("memory");
    let seen = allocator.close_stat_scope(inner).all.allocated_bytes;
    assert_eq!((seen.current, seen.peak, seen.allocated, seen.freed), (2 * MIB, 2 * MIB, 2 * MIB, 0));
    allocator.free(late.handle).expect("live");
    let seen = allocator.close_stat_scope(outer).all.allocated_bytes;
    assert_eq!((seen.current, seen.peak, seen.allocated, seen.freed), (0, 8 * MIB, 2 * MIB, 10 * MIB));
    allocator.reset_peak_stats();
    assert_eq!(allocator.stats().usage.all.allocated_bytes.peak, 0);
    assert_eq!(allocator.check(), Ok(()));
}

#[test]
fn a_snapshot_shows_names_uses_and_what_a_free_block_waits_for() {
    let (allocator, one, other) = allocator_with_two_streams();
    let cache = allocator.allocate_named(POOL, one, MIB, "kv cache").expect("memory");
    let bucket = allocator.allocate(POOL, one, MIB).expect("memory");
    allocator.record_use(cache.handle, other).expect("live");
    allocator.record_use(bucket.handle, other).expect("live");
    allocator.free(bucket.handle).expect("live");

    let snapshot = allocator.snapshot();
    assert_eq!((snapshot.segments.len(), snapshot.segments[0].mapped_bytes), (1, 2 * MIB));
    let states: Vec<_> = snapshot.segments[0].blocks.iter().map(|block| block.state.clone()).collect();
    let name = Some("kv cache".into());
    let cache = BlockStateSnapshot::Allocated { stream: one, requested_bytes: MIB, name, used_by: vec![other] };
    assert_eq!(states, [cache, BlockStateSnapshot::Free { fenced_by: vec![other] }]);
}

#[test]
fn leaks_are_told_largest_first_with_their_names() {
    let (allocator, one, other) = allocator_with_two_streams();
    assert_eq!(allocator.leak_report().to_string(), "0 live allocations, 0 bytes requested");
    allocator.allocate(POOL, one, 100).expect("memory");
    allocator.allocate_named(POOL, other, 5000, "scratch").expect("memory");
    let report = allocator.leak_report();
    assert_eq!(report.requested_bytes, 5100);
    let told = report.to_string();
    let lines: Vec<_> = told.lines().map(str::trim).collect();
    assert_eq!(lines[1..], ["5000 bytes  scratch  p0 s1 0@0", "100 bytes  (unnamed)  p0 s0 0@0"]);
}

#[test]
fn the_summary_has_a_row_for_every_pool_that_is_left() {
    let (allocator, one, _) = allocator_with_two_streams();
    let kept = allocator.create_pool(PoolConfig::default()).expect("a pool");
    let gone = allocator.create_pool(PoolConfig::default()).expect("a pool");
    allocator.allocate(kept, one, MIB).expect("memory");
    allocator.destroy_pool(gone).expect("nothing is live in it");
    let summary = allocator.summary();
    let rows: Vec<_> = summary.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(rows.len(), 4, "{summary}");
    assert_eq!(rows[3], ["p1", "1048576", "1048576", "2097152", "2097152", "1", "1"]);
}
