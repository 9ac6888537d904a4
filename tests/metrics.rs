//! Metrics: every number under its labels, as a Prometheus exporter shows it.

use metrics_exporter_prometheus::PrometheusBuilder;
use symmalloc_core::config::{PoolConfig, StreamPolicy};
use symmalloc_core::metrics::{Metric, Publisher, Source};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, Config, PoolId};
use symmalloc_sim::SimBackend;

/// Returns the text of a recorder after publishing these sources in turn.
fn rendered(publisher: &Publisher, sources: &[&dyn Source]) -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || sources.iter().for_each(|source| publisher.publish(*source)));
    recorder.handle().render()
}

/// Returns the value of a series.
#[track_caller]
fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse().expect("it should be a number")
}

#[test]
fn a_heaps_numbers_are_published_under_its_pool_and_stream() {
    let pool = PoolConfig::builder().limit_bytes(Some(16 * MIB)).build().expect("the configuration should be valid");
    let config = Config::builder()
        .default_pool(pool)
        .total_limit_bytes(Some(1024 * MIB))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), config).expect("the device should be created");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let take = |stream, size_bytes| allocator.allocate(PoolId::DEFAULT, stream, size_bytes);
    let first = take(streams[0], 6 * MIB).expect("the request should stay within the limit");
    let held = take(streams[0], 2 * MIB - 100).expect("the request should stay within the limit");
    let _ends = take(streams[0], 2 * MIB).expect("the request should stay within the limit");
    allocator.free(first.handle).expect("the allocation should be live");
    let cut = take(streams[0], MIB).expect("the memory should be cached");
    take(streams[1], 64 * MIB).expect_err("more than the limit");
    allocator.free(held.handle).expect("the allocation should be live");
    allocator.free(cut.handle).expect("the allocation should be live");
    let held = take(streams[0], 3 * MIB).expect("the memory should be cached");

    let text = rendered(&Publisher::new().with_label("rank", "3"), &[&allocator]);
    let heap = |name: &str| value(&text, &format!("{name}{{rank=\"3\",pool=\"0\",stream=\"0\"}}"));
    let mib = |count: u64| (count * MIB) as f64;
    assert_eq!(heap("symmalloc_reserved_bytes"), mib(10));
    assert_eq!(heap("symmalloc_reserved_bytes_peak"), mib(10));
    assert_eq!(heap("symmalloc_allocated_bytes"), mib(5));
    assert_eq!(heap("symmalloc_requested_bytes"), mib(5));
    assert_eq!(heap("symmalloc_requested_bytes_peak"), mib(10) - 100.0);
    assert_eq!(heap("symmalloc_largest_free_bytes"), mib(5));
    assert_eq!(heap("symmalloc_fragmentation_ratio"), 0.0);
    assert_eq!(heap("symmalloc_live_allocations"), 2.0);
    assert_eq!((heap("symmalloc_allocations_total"), heap("symmalloc_frees_total")), (5.0, 3.0));
    assert_eq!((heap("symmalloc_segments"), heap("symmalloc_growths_total")), (1.0, 3.0));
    assert_eq!((heap("symmalloc_obtained_bytes_total"), heap("symmalloc_released_bytes_total")), (mib(10), 0.0));
    assert_eq!(heap("symmalloc_out_of_memory_total"), 0.0);
    let digest = allocator.heap_digests(PoolId::DEFAULT).expect("the pool should exist")[0].1;
    assert_eq!(heap("symmalloc_ops_total"), digest.ops as f64);
    assert_eq!(value(&text, "symmalloc_out_of_memory_total{rank=\"3\",pool=\"0\",stream=\"1\"}"), 1.0);
    assert_eq!(value(&text, "symmalloc_pool_limit_bytes{rank=\"3\",pool=\"0\"}"), mib(16));
    assert_eq!(value(&text, "symmalloc_limit_bytes{rank=\"3\"}"), mib(1024));
    allocator.set_total_limit_bytes(Some(512 * MIB));
    let later = rendered(&Publisher::new().with_label("rank", "3"), &[&allocator]);
    assert_eq!(value(&later, "symmalloc_limit_bytes{rank=\"3\"}"), mib(512), "the current limit");
    assert_eq!(value(&text, "symmalloc_total_allocated_bytes_peak{rank=\"3\"}"), mib(10));
    assert!(text.contains("# TYPE symmalloc_reserved_bytes gauge"), "{text}");
    assert!(text.contains("# HELP symmalloc_trims_total trims of the heap"), "{text}");
    allocator.free(held.handle).expect("the allocation should be live");
}

#[test]
fn free_bytes_outside_the_largest_block_are_fragmentation() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let taken = [6, 2, 2, 2]
        .map(|mib| allocator.allocate(PoolId::DEFAULT, stream, mib * MIB).expect("the allocation should fit"));
    allocator.free(taken[0].handle).expect("the allocation should be live");
    allocator.free(taken[2].handle).expect("the allocation should be live");
    let text = rendered(&Publisher::new(), &[&allocator]);
    assert_eq!(value(&text, "symmalloc_fragmentation_ratio{pool=\"0\",stream=\"0\"}"), 0.25);
    assert_eq!(value(&text, "symmalloc_free_blocks{pool=\"0\",stream=\"0\"}"), 2.0);
}

#[test]
fn retired_segments_do_not_count_as_fragmentation() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let stream = allocator.register_stream().expect("the first stream should be registered");
    let take = |mib| allocator.allocate(PoolId::DEFAULT, stream, mib * MIB).expect("the allocation should fit").handle;
    let free = |handle| allocator.free(handle).expect("the allocation should be live");
    let fragmentation_with = |retired_mib: u64| {
        let text = rendered(&Publisher::new(), &[&allocator]);
        let heap = |name: &str| value(&text, &format!("{name}{{pool=\"0\",stream=\"0\"}}"));
        assert_eq!(heap("symmalloc_retired_bytes"), (retired_mib * MIB) as f64);
        heap("symmalloc_fragmentation_ratio")
    };
    let (observer, _) = allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
    free(take(50));
    allocator.trim_all().expect("no fault should be injected");
    assert_eq!(fragmentation_with(50), 0.0, "nothing is free");
    let [first, _, third, _] = [6, 2, 2, 2].map(take);
    assert_eq!(fragmentation_with(50), 0.0, "nothing is free");
    free(first);
    assert_eq!(fragmentation_with(50), 0.0, "the free memory is contiguous");
    free(third);
    assert_eq!(fragmentation_with(50), 0.25);
    allocator.forget(observer).expect("no fault should be injected");
    assert_eq!(fragmentation_with(0), 0.25);
}

#[test]
fn streams_that_share_a_heap_are_one_series() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let config =
        PoolConfig::builder().streams(StreamPolicy::Shared).build().expect("the configuration should be valid");
    let pool = allocator.create_pool(config).expect("the configuration should be valid");
    let recorder = PrometheusBuilder::new().build_recorder();
    for round in 1..=2 {
        for stream in streams {
            let _live = allocator.allocate(pool, stream, MIB).expect("the allocation should fit");
        }
        metrics::with_local_recorder(&recorder, || Publisher::new().publish(&allocator));
        let text = recorder.handle().render();
        let allocations = value(&text, "symmalloc_allocations_total{pool=\"1\",stream=\"all\"}");
        assert_eq!(allocations, f64::from(2 * round), "published again, not added");
    }
}

#[test]
fn a_group_of_streams_is_one_series() {
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().build(), Config::default()).expect("the device should be created");
    let first = allocator.register_stream().expect("a stream id is available");
    let second = allocator.register_stream_in(first).expect("the group should exist");
    let pool = allocator
        .create_pool("streams:grouped".parse().expect("the text should be valid"))
        .expect("the configuration should be valid");
    for stream in [first, second] {
        let _live = allocator.allocate(pool, stream, MIB).expect("the allocation should fit");
    }
    let text = rendered(&Publisher::new(), &[&allocator]);
    assert_eq!(value(&text, "symmalloc_allocations_total{pool=\"1\",stream=\"0+\"}"), 2.0);
}

#[test]
fn sources_of_the_program_are_published_too() {
    struct Batches(u64);
    impl Source for Batches {
        fn publish(&self, to: &Publisher) {
            const BATCHES: Metric = Metric::counter("job_batches_total", None, "batches so far");
            to.record(&BATCHES, self.0 as f64);
        }
    }
    let text = rendered(&Publisher::new().with_label("rank", "0"), &[&Batches(7)]);
    assert_eq!(value(&text, "job_batches_total{rank=\"0\"}"), 7.0);
}
