//! Reports of the allocator: statistics and their scopes, snapshots, leaks and the summary.

use symmalloc_core::config::{PoolConfig, Reclaim};
use symmalloc_core::errors::AllocateError;
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::report::{BlockStateSnapshot, MemoryStats};
use symmalloc_core::stats::{ClassStats, Stat};
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{Allocation, Allocator, Config, PoolId, SharedAllocator, StreamId, generic};
use symmalloc_sim::{SimBackend, SplitMix64};

const POOL: PoolId = PoolId::DEFAULT;

fn allocator_with_two_streams() -> (Allocator<SimBackend>, StreamId, StreamId) {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let (one, other) = (
        allocator.register_stream().expect("a stream id is available"),
        allocator.register_stream().expect("a stream id is available"),
    );
    (allocator, one, other)
}

#[test]
fn usage_is_counted_by_class_by_stream_and_in_total() {
    let (allocator, one, other) = allocator_with_two_streams();
    let small = allocator.allocate(POOL, one, 1000).expect("memory should suffice");
    let _live = allocator.allocate(POOL, one, 3 * MIB).expect("memory should suffice");
    let _live = allocator.allocate(POOL, other, 5 * MIB).expect("memory should suffice");
    allocator.free(small.handle).expect("the allocation should be live");

    let stats = allocator.heap_stats(POOL, one).expect("the pool should exist").usage;
    let bytes = stats.small.allocated_bytes;
    assert_eq!((bytes.current, bytes.peak, bytes.allocated, bytes.freed), (0, 1024, 1024, 1024));
    assert_eq!(stats.small.requested_bytes.peak, 1000);
    assert_eq!(stats.large.allocations.current, 1);
    assert_eq!(stats.all.allocated_bytes.peak, 3 * MIB + KIB);
    let reserved = allocator.heap_stats(POOL, other).expect("the pool should exist").reserved_bytes;
    assert_eq!((reserved.current, reserved.peak, reserved.freed), (6 * MIB, 6 * MIB, 0));
    assert_eq!(allocator.pool_stats(POOL).expect("the pool should exist").usage.all.allocations.allocated, 3);
}

#[test]
fn one_thread_gets_exact_peaks_over_streams_and_several_an_upper_bound() {
    let (allocator, one, other) = allocator_with_two_streams();
    let several =
        SharedAllocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    several.register_stream().expect("a stream id is available");
    several.register_stream().expect("a stream id is available");
    for stream in [one, other] {
        let taken = allocator.allocate(POOL, stream, 4 * MIB).expect("memory should suffice");
        allocator.free(taken.handle).expect("the allocation should be live");
        let taken = several.allocate(POOL, stream, 4 * MIB).expect("memory should suffice");
        several.free(taken.handle).expect("the allocation should be live");
    }
    let (exact, bound) = (allocator.stats(), several.stats());
    assert_eq!((exact.usage.all.allocated_bytes.peak, exact.peaks_are_exact), (4 * MIB, true));
    assert_eq!((bound.usage.all.allocated_bytes.peak, bound.peaks_are_exact), (8 * MIB, false));
}

/// The pools have one heap each, and the second one is created after the first one is destroyed.
#[test]
fn peaks_of_destroyed_pools_add_up_to_an_upper_bound() {
    let allocator =
        SharedAllocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let stream = allocator.register_stream().expect("a stream id is available");
    for bound in [4, 8] {
        let pool = allocator.create_pool(PoolConfig::default()).expect("the pool should be created");
        let taken = allocator.allocate(pool, stream, 4 * MIB).expect("memory should suffice");
        allocator.free(taken.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("nothing should be live in the pool");
        let stats = allocator.stats();
        assert_eq!((stats.usage.all.allocated_bytes.peak, stats.peaks_are_exact), (bound * MIB, false));
    }
    allocator.reset_peak_stats();
    let taken = allocator.allocate(POOL, stream, MIB).expect("memory should suffice");
    allocator.free(taken.handle).expect("the allocation should be live");
    let stats = allocator.stats();
    assert_eq!((stats.usage.all.allocated_bytes.peak, stats.peaks_are_exact), (MIB, true));
}

#[test]
fn scopes_nest_even_over_streams_registered_later() {
    let (allocator, one, other) = allocator_with_two_streams();
    let before = allocator.allocate(POOL, one, 8 * MIB).expect("memory should suffice");
    let outer = allocator.open_stat_scope();
    allocator.free(before.handle).expect("the allocation should be live");
    let inner = allocator.open_stat_scope();
    // The second heap is created inside both scopes.
    let late = allocator.allocate(POOL, other, 2 * MIB).expect("memory should suffice");
    let seen = allocator.close_stat_scope(inner).all.allocated_bytes;
    assert_eq!((seen.current, seen.peak, seen.allocated, seen.freed), (2 * MIB, 2 * MIB, 2 * MIB, 0));
    allocator.free(late.handle).expect("the allocation should be live");
    let seen = allocator.close_stat_scope(outer).all.allocated_bytes;
    assert_eq!((seen.current, seen.peak, seen.allocated, seen.freed), (0, 8 * MIB, 2 * MIB, 10 * MIB));
    allocator.reset_peak_stats();
    assert_eq!(allocator.stats().usage.all.allocated_bytes.peak, 0);
    assert_eq!(allocator.check(), Ok(()));
}

#[test]
fn a_snapshot_shows_names_uses_and_fences() {
    let (allocator, one, other) = allocator_with_two_streams();
    let cache = allocator.allocate_named(POOL, one, MIB, "kv cache").expect("memory should suffice");
    let bucket = allocator.allocate(POOL, one, MIB).expect("memory should suffice");
    allocator.record_use(cache.handle, other).expect("the allocation should be live");
    allocator.record_use(bucket.handle, other).expect("the allocation should be live");
    allocator.free(bucket.handle).expect("the allocation should be live");

    let snapshot = allocator.snapshot();
    assert_eq!((snapshot.segments.len(), snapshot.segments[0].mapped_bytes), (1, 2 * MIB));
    let states: Vec<_> = snapshot.segments[0].blocks.iter().map(|block| block.state.clone()).collect();
    let name = Some("kv cache".into());
    let cache = BlockStateSnapshot::Allocated { stream: one, requested_bytes: MIB, name, used_by: vec![other] };
    assert_eq!(states, [cache, BlockStateSnapshot::Free { fenced_by: vec![other] }]);
}

#[test]
fn leaks_are_reported_by_name_largest_first() {
    let (allocator, one, other) = allocator_with_two_streams();
    assert_eq!(allocator.leak_report().to_string(), "0 live allocations, 0 bytes requested");
    let _live = allocator.allocate(POOL, one, 100).expect("memory should suffice");
    let _live = allocator.allocate_named(POOL, other, 5000, "scratch").expect("memory should suffice");
    let report = allocator.leak_report();
    assert_eq!(report.requested_bytes, 5100);
    let text = report.to_string();
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    assert_eq!(lines[1..], ["5000 bytes  scratch  p0 s1 0@0", "100 bytes  (unnamed)  p0 s0 0@0"]);
}

#[test]
fn the_summary_has_a_row_for_every_pool_that_is_left() {
    let (allocator, one, _) = allocator_with_two_streams();
    let kept = allocator.create_pool(PoolConfig::default()).expect("the pool should be created");
    let gone = allocator.create_pool(PoolConfig::default()).expect("the pool should be created");
    let _live = allocator.allocate(kept, one, MIB).expect("memory should suffice");
    allocator.destroy_pool(gone).expect("nothing is live in it");
    let summary = allocator.summary();
    let rows: Vec<_> = summary.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(rows.len(), 4, "{summary}");
    assert_eq!(rows[3], ["p1", "1048576", "1048576", "2097152", "2097152", "1", "1"]);
}

/// The oracle of statistics: live allocations by class, and the totals and peaks of each open scope since its start.
#[derive(Clone, Default)]
struct Usage {
    /// Current statistics by class (all, small, large) and quantity (allocations, allocated bytes, requested bytes).
    now: [[Stat; 3]; 3],
    /// Value of `now` at the start of each open scope, outermost first.
    scopes: Vec<[[Stat; 3]; 3]>,
}

impl Usage {
    fn change(&mut self, made: &Allocation, requested_bytes: u64, is_made: bool) {
        let class = if made.size_bytes <= MIB { 1 } else { 2 };
        for class in [0, class] {
            for (stat, amount) in self.now[class].iter_mut().zip([1, made.size_bytes, requested_bytes]) {
                if is_made {
                    (stat.current, stat.allocated) = (stat.current + amount, stat.allocated + amount);
                } else {
                    (stat.current, stat.freed) = (stat.current - amount, stat.freed + amount);
                }
                stat.peak = stat.peak.max(stat.current);
            }
        }
    }

    fn reset_peaks(&mut self) {
        self.now.as_flattened_mut().iter_mut().for_each(|stat| stat.peak = stat.current);
    }

    fn open(&mut self) {
        self.scopes.push(self.now);
        self.reset_peaks();
    }

    fn close(&mut self) -> [[Stat; 3]; 3] {
        let outer = self.scopes.pop().expect("one is open");
        let mut seen = self.now;
        for ((now, outer), seen) in
            self.now.as_flattened_mut().iter_mut().zip(outer.as_flattened()).zip(seen.as_flattened_mut())
        {
            now.peak = now.peak.max(outer.peak);
            (seen.allocated, seen.freed) = (now.allocated - outer.allocated, now.freed - outer.freed);
        }
        seen
    }
}

fn stats_of(stats: &ClassStats) -> [[Stat; 3]; 3] {
    [stats.all, stats.small, stats.large].map(|usage| [usage.allocations, usage.allocated_bytes, usage.requested_bytes])
}

/// Opens and closes scopes at any depth and resets peaks within them. Compares every number, by class and in all.
fn statistics_are_the_oracles<L: Lock>(seed: u64) {
    let allocator = generic::Allocator::<_, L>::with_lock(SimBackend::builder().build(), Config::default())
        .expect("the device should be created");
    let stream = allocator.register_stream().expect("a stream id is available");
    let (mut random, mut usage) = (SplitMix64::new(seed), Usage::default());
    let (mut live, mut scopes) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        match random.below(12) {
            0..5 => {
                let requested_bytes = 1 + (random.below(4 * MIB) >> (2 * random.below(6)));
                let made = allocator.allocate(POOL, stream, requested_bytes).expect("memory should suffice");
                usage.change(&made, requested_bytes, true);
                live.push((made, requested_bytes));
            }
            5..9 if !live.is_empty() => {
                let (made, requested_bytes) = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(made.handle).expect("the allocation should be live");
                usage.change(&made, requested_bytes, false);
            }
            9 => {
                scopes.push(allocator.open_stat_scope());
                usage.open();
            }
            10 => {
                if let Some(scope) = scopes.pop() {
                    assert_eq!(stats_of(&allocator.close_stat_scope(scope)), usage.close(), "seed {seed}: a scope");
                }
            }
            11 if random.below(4) == 0 => {
                allocator.reset_peak_stats();
                usage.reset_peaks();
            }
            _ => {}
        }
        assert_eq!(
            stats_of(&allocator.heap_stats(POOL, stream).expect("the pool should exist").usage),
            usage.now,
            "seed {seed}"
        );
        assert_eq!(stats_of(&allocator.stats().usage), usage.now, "seed {seed}: over all heaps");
    }
}

#[test]
fn scopes_and_peaks_equal_a_naive_count() {
    for seed in 0..60 {
        statistics_are_the_oracles::<Exclusive>(seed);
        statistics_are_the_oracles::<Shared>(seed);
    }
}

/// Returns every quantity that has a peak: of all pools, of each pool, and of each heap through both of its queries.
fn stats_of_all_levels<L: Lock>(allocator: &generic::Allocator<SimBackend, L>) -> Vec<(String, Stat)> {
    let mut levels = vec![("all pools".to_owned(), allocator.stats())];
    for pool in (0..allocator.pool_count()).map(PoolId) {
        levels.push((pool.to_string(), allocator.pool_stats(pool).expect("the pool should exist")));
        for stream in [0, 1].map(StreamId) {
            levels
                .push((format!("{pool} {stream}"), allocator.heap_stats(pool, stream).expect("the pool should exist")));
        }
    }
    let by_heap = allocator.stats_by_heap().into_iter();
    levels.extend(by_heap.map(|(heap, stats)| (format!("{heap}, listed"), stats)));
    let stats_of = |(level, stats): (String, MemoryStats)| {
        let stats = [stats_of(&stats.usage).as_flattened(), &[stats.reserved_bytes]].concat();
        stats.into_iter().map(move |stat| (level.clone(), stat))
    };
    levels.into_iter().flat_map(stats_of).collect()
}

fn a_reset_reaches_every_peak<L: Lock>() {
    let allocator = generic::Allocator::<_, L>::with_lock(SimBackend::builder().build(), Config::default())
        .expect("the device should be created");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let pools = [POOL, allocator.create_pool(PoolConfig::default()).expect("the pool should be created")];
    for (pool, stream) in pools.iter().flat_map(|pool| streams.map(|stream| (*pool, stream))) {
        let made = [1000, 2 * MIB, 2000, 8 * MIB]
            .map(|size| allocator.allocate(pool, stream, size).expect("memory should suffice"));
        made[2..].iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
    }
    allocator.trim_all().expect("no fault should be injected");
    for (level, stat) in stats_of_all_levels(&allocator) {
        assert!(stat.peak > stat.current && stat.current > 0, "{level}: {stat:?}");
    }
    allocator.reset_peak_stats();
    for (level, stat) in stats_of_all_levels(&allocator) {
        assert_eq!(stat.peak, stat.current, "{level}");
    }
}

#[test]
fn peaks_of_all_pools_each_pool_and_each_heap_can_be_reset() {
    a_reset_reaches_every_peak::<Exclusive>();
    a_reset_reaches_every_peak::<Shared>();
}

/// A heap of fixed segments separates small from large blocks, and the largest free block may be of either class.
#[test]
fn the_largest_free_block_that_an_error_names_is_of_any_size_class() {
    for (size_bytes, largest) in [(KIB, 2 * MIB), (3 * MIB, 20 * MIB)] {
        let pool = PoolConfig::builder().fixed().reclaim(Reclaim::Never).limit_bytes(Some(22 * MIB));
        let config = Config::builder()
            .default_pool(pool.build().expect("the configuration should be valid"))
            .build()
            .expect("the configuration should be valid");
        let allocator: Allocator<_> =
            Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
        let stream = allocator.register_stream().expect("a stream id is available");
        let made = allocator.allocate(POOL, stream, size_bytes).expect("memory should suffice");
        allocator.free(made.handle).expect("the allocation should be live");
        let error = allocator.allocate(POOL, stream, 40 * MIB).expect_err("more than the limit");
        let AllocateError::OutOfMemory(error) = error else { panic!("{error}") };
        assert_eq!((error.largest_free_bytes, error.reserved_bytes, error.allocated_bytes), (largest, largest, 0));
    }
}
