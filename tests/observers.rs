//! Observers: the events for a registrar of windows, and the memory that the allocator keeps for it.

use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig, Reclaim};
use symmalloc_core::errors::{AllocateError, PoolError};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::report::{BlockStateSnapshot, SegmentSnapshot};
use symmalloc_core::segment_log::{SegmentEvent, SegmentEventKind};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, PoolId, SegmentId, StreamId};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::run::Run;
use symmalloc_sim::SimBackend;

const POOL: PoolId = PoolId::DEFAULT;

fn fixed(device: &SimBackend) -> Allocator<&SimBackend> {
    let pool = PoolConfig::builder().fixed().build().expect("the configuration should be valid");
    let allocator = Allocator::new(
        device,
        Config::builder().default_pool(pool).build().expect("the configuration should be valid"),
    )
    .expect("the arguments should be valid");
    allocator.register_stream().expect("the first stream should be registered");
    allocator
}

fn kinds(events: &[SegmentEvent]) -> Vec<(SegmentEventKind, u32)> {
    events.iter().map(|event| (event.kind, event.segment.0)).collect()
}

#[test]
fn a_new_observer_gets_all_live_segments_and_then_only_changes() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let stream = StreamId(0);
    let old = allocator.allocate(POOL, stream, 30 * MIB).expect("the allocation should fit");
    let (observer, births) = allocator.observe(POOL).expect("the pool should exist");
    assert_eq!(kinds(&births), [(SegmentEventKind::Birth, 0)]);
    assert_eq!((births[0].base, births[0].size_bytes), (old.address, 30 * MIB));
    assert!(allocator.unread(observer).events.is_empty());
    let _live = allocator.allocate(POOL, stream, 40 * MIB).expect("the allocation should fit");
    let unread = allocator.unread(observer);
    assert_eq!(kinds(&unread.events), [(SegmentEventKind::Birth, 1)]);
    assert_eq!(allocator.unread(observer), unread, "reading is not acknowledging");
    assert_eq!(allocator.acknowledge(observer, &unread), Ok(0));
    assert!(allocator.unread(observer).events.is_empty());
}

#[test]
fn the_number_of_log_entries_shows_whether_there_are_new_events() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    assert_eq!(allocator.segment_log_entries(POOL), 0);
    let made = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    let born = allocator.segment_log_entries(POOL);
    assert_eq!(born, 1);
    allocator.free(made.handle).expect("the allocation should be live");
    let _live = allocator.allocate(POOL, StreamId(0), 20 * MIB).expect("it fits into freed memory");
    assert_eq!(allocator.segment_log_entries(POOL), born, "no segment was created or released");
    let other = allocator.register_stream().expect("the second");
    let _live = allocator.allocate(POOL, other, MIB).expect("the allocation should fit");
    assert_eq!(allocator.segment_log_entries(POOL), born + 1, "all heaps of the pool count");
    assert_eq!(allocator.segment_log_entries(PoolId(7)), 0, "no such pool");
}

#[test]
fn memory_of_a_dead_segment_is_held_until_every_observer_has_acknowledged() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let made = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    let (one, _) = allocator.observe(POOL).expect("the pool should exist");
    let (other, _) = allocator.observe(POOL).expect("the pool should exist");
    allocator.free(made.handle).expect("the allocation should be live");
    assert_eq!(allocator.trim_all(), Ok(0), "nothing was released yet");
    let stats = allocator.stats();
    assert_eq!(
        (device.mapped_bytes(), stats.retired_bytes, stats.reserved_bytes.current),
        (30 * MIB, 30 * MIB, 30 * MIB)
    );
    allocator.check().expect("the invariants should hold");
    // The addresses also stay reserved: a new segment must not be placed under an old window.
    let new = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    assert_eq!(new.placement.segment, SegmentId(1), "ids are never reused");
    assert_ne!(new.address, made.address);
    let unread = allocator.unread(one);
    assert_eq!(kinds(&unread.events), [(SegmentEventKind::Death, 0), (SegmentEventKind::Birth, 1)]);
    assert_eq!(allocator.acknowledge(one, &unread), Ok(0), "the other observer has not acknowledged");
    assert_eq!(allocator.acknowledge(one, &unread), Ok(0), "acknowledging twice changes nothing");
    assert_eq!(allocator.acknowledge(other, &allocator.unread(other)), Ok(30 * MIB));
    assert_eq!(device.mapped_bytes(), 30 * MIB);
    allocator.check().expect("the invariants should hold");
}

#[test]
fn forgetting_an_observer_releases_its_memory() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let made = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    let (observer, _) = allocator.observe(POOL).expect("the pool should exist");
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    assert_eq!(allocator.forget(observer), Ok(30 * MIB));
    assert!(device.leaks().is_empty(), "{}", device.leaks());
    assert!(allocator.unread(observer).events.is_empty());
    assert_eq!(allocator.forget(observer), Ok(0));
}

#[test]
fn acknowledging_earlier_events_does_not_acknowledge_later_deaths() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let (observer, _) = allocator.observe(POOL).expect("the pool should exist");
    let made = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    let early = allocator.unread(observer);
    allocator.free(made.handle).expect("the allocation should be live");
    allocator.trim_all().expect("no fault should be injected");
    assert_eq!(allocator.acknowledge(observer, &early), Ok(0));
    assert_eq!(kinds(&allocator.unread(observer).events), [(SegmentEventKind::Death, 0)]);
    assert_eq!(device.mapped_bytes(), 30 * MIB);
}

#[test]
fn an_observed_pool_is_not_shrunk_and_not_destroyed() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let pool = allocator.create_pool(PoolConfig::default()).expect("the configuration should be valid");
    let stream = StreamId(0);
    let kept = allocator.allocate(pool, stream, MIB).expect("the allocation should fit");
    let freed = allocator.allocate(pool, stream, 20 * MIB).expect("the allocation should fit");
    let (observer, _) = allocator.observe(pool).expect("the pool should exist");
    allocator.free(freed.handle).expect("the allocation should be live");
    assert_eq!(allocator.trim_pool(pool), Ok(0), "a window covers it");
    allocator.free(kept.handle).expect("the allocation should be live");
    assert_eq!(allocator.destroy_pool(pool), Err(PoolError::Observed { pool, observers: 1 }));
    allocator.forget(observer).expect("no fault should be injected");
    allocator.destroy_pool(pool).expect("empty and not observed");
    assert!(device.leaks().is_empty(), "{}", device.leaks());
}

#[test]
fn dropping_the_allocator_releases_retired_memory() {
    let device = SimBackend::builder().build();
    {
        let allocator = fixed(&device);
        let (_observer, _) = allocator.observe(POOL).expect("the pool should exist");
        let made = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.trim_all().expect("no fault should be injected");
        let _live = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    }
    assert!(device.leaks().is_empty(), "{}", device.leaks());
}

/// The knowledge of a registrar that reads occasionally: the segments whose windows it holds.
#[derive(Default)]
struct Registrar {
    windows: BTreeMap<(StreamGroup, SegmentId), u64>,
}

impl Registrar {
    fn read(&mut self, events: &[SegmentEvent]) {
        for event in events {
            let key = (event.heap.group, event.segment);
            match event.kind {
                SegmentEventKind::Birth => {
                    assert_eq!(self.windows.insert(key, event.size_bytes), None, "born twice: {event:?}");
                }
                SegmentEventKind::Growth => {
                    let size = self.windows.get_mut(&key).unwrap_or_else(|| panic!("grown before birth: {event:?}"));
                    assert_eq!(event.offset_bytes, *size, "the growth is not at the end");
                    *size += event.size_bytes;
                }
                SegmentEventKind::Death => {
                    let size = self.windows.remove(&key);
                    assert_eq!(size, Some(event.size_bytes), "dead before birth, or of another size: {event:?}");
                }
                kind => panic!("{kind:?} in an observed pool"),
            }
        }
    }
}

/// On random programs, a registrar's view equals the allocator's whenever it is up to date.
#[test]
fn the_log_contains_every_birth_growth_and_death_in_order() {
    let mut deaths = 0;
    for seed in 0..150 {
        let scenario = Scenario::from_seed(seed, 120);
        let device = scenario.device(seed);
        let allocator: Allocator<_> =
            Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
        let (observer, births) = allocator.observe(POOL).expect("the pool should exist");
        let mut registrar = Registrar::default();
        registrar.read(&births);
        let mut run = Run::new(&allocator, &scenario);
        for index in 0..scenario.program.ops().len() {
            let _refused_or_not = run.step(index);
            if index % 7 == 0 {
                let unread = allocator.unread(observer);
                deaths += unread.events.iter().filter(|event| event.kind == SegmentEventKind::Death).count();
                registrar.read(&unread.events);
                allocator.acknowledge(observer, &unread).expect("no fault should be injected");
                assert_eq!(allocator.pool_stats(POOL).expect("the pool should exist").retired_bytes, 0);
                let live: BTreeMap<_, _> = allocator
                    .snapshot()
                    .segments
                    .iter()
                    .filter(|segment| segment.heap.pool == POOL)
                    .map(|segment| ((segment.heap.group, segment.segment), segment.size_bytes))
                    .collect();
                assert_eq!(registrar.windows, live, "seed {seed}, op {index}");
                allocator.check().expect("the invariants should hold");
            }
        }
    }
    assert!(deaths > 100, "{deaths}");
}

/// Returns the mapped memory in the live segments of the pool, as contiguous runs.
fn mapped_runs(allocator: &Allocator<&SimBackend>) -> Runs {
    let snapshot = allocator.snapshot();
    let segments = snapshot.segments.iter().filter(|segment| segment.heap.pool == POOL);
    let runs = |segment: &SegmentSnapshot| {
        let mut runs = Vec::new();
        // A stitched range owns no memory.
        let mapped = segment.blocks.iter().filter(|_| segment.mapped_bytes > 0);
        let mapped = mapped.filter(|block| block.state != BlockStateSnapshot::Hole);
        mapped.for_each(|block| add_run(&mut runs, block.offset_bytes, block.size_bytes));
        runs
    };
    segments.map(|segment| ((segment.heap.group, segment.segment), runs(segment))).collect()
}

/// Adds bytes to an ordered list of runs, merged with their neighbors.
fn add_run(runs: &mut Vec<(u64, u64)>, offset_bytes: u64, size_bytes: u64) {
    assert!(runs.iter().all(|(offset, size)| offset_bytes + size_bytes <= *offset || offset + size <= offset_bytes));
    runs.push((offset_bytes, size_bytes));
    runs.sort_unstable();
    runs.dedup_by(|(offset, size), before| {
        let is_behind = before.0 + before.1 == *offset;
        before.1 += if is_behind { *size } else { 0 };
        is_behind
    });
}

/// Observers are added while segments have holes, which are then filled. Every reported offset matches the location of the memory.
#[test]
fn an_observer_knows_which_bytes_have_memory() {
    let (mut fillings, mut births_with_holes) = (0, 0);
    for seed in 0..200 {
        let scenario = Scenario::from_seed(seed, 160);
        let device = scenario.device(seed);
        let allocator: Allocator<_> =
            Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
        let mut run = Run::new(&allocator, &scenario);
        let mut observing = None;
        for index in 0..scenario.program.ops().len() {
            let _refused_or_not = run.step(index);
            let (observer, mut known) = match observing.take() {
                None if index % 10 == 0 => {
                    let (observer, births) = allocator.observe(POOL).expect("the pool should exist");
                    births_with_holes +=
                        usize::from(kinds(&births).iter().any(|(kind, _)| *kind != SegmentEventKind::Birth));
                    (observer, read(BTreeMap::new(), &births))
                }
                None => continue,
                Some((observer, _)) if index % 10 == 9 => {
                    allocator.forget(observer).expect("no fault should be injected");
                    continue;
                }
                Some(observing) => observing,
            };
            let unread = allocator.unread(observer);
            fillings += unread.events.iter().filter(|event| is_filling(&known, event)).count();
            known = read(known, &unread.events);
            allocator.acknowledge(observer, &unread).expect("no fault should be injected");
            assert_eq!(known, mapped_runs(&allocator), "seed {seed}, op {index}");
            observing = Some((observer, known));
        }
    }
    assert!(fillings > 5 && births_with_holes > 5, "{fillings} fillings, {births_with_holes} births with holes");
}

type Runs = BTreeMap<(StreamGroup, SegmentId), Vec<(u64, u64)>>;

/// Returns `true` if a growth lies before existing memory.
fn is_filling(known: &Runs, event: &SegmentEvent) -> bool {
    let runs = known.get(&(event.heap.group, event.segment));
    event.kind == SegmentEventKind::Growth
        && runs.is_some_and(|runs| runs.iter().any(|(offset, _)| *offset > event.offset_bytes))
}

fn read(mut known: Runs, events: &[SegmentEvent]) -> Runs {
    for event in events {
        let key = (event.heap.group, event.segment);
        match event.kind {
            SegmentEventKind::Birth => {
                assert_eq!(event.offset_bytes, 0, "{event:?}");
                // A segment that begins with a hole is created without memory.
                let run = (event.size_bytes > 0).then_some((0, event.size_bytes));
                assert_eq!(known.insert(key, run.into_iter().collect()), None, "{event:?}");
            }
            SegmentEventKind::Growth => {
                let runs = known.get_mut(&key).unwrap_or_else(|| panic!("grown before birth: {event:?}"));
                add_run(runs, event.offset_bytes, event.size_bytes);
            }
            SegmentEventKind::Death => {
                let runs = known.remove(&key).unwrap_or_else(|| panic!("dead before birth: {event:?}"));
                let size_bytes: u64 = runs.iter().map(|(_, size)| size).sum();
                assert_eq!((event.offset_bytes, event.size_bytes), (0, size_bytes), "{event:?}");
            }
            kind => panic!("{kind:?} in an observed pool"),
        }
    }
    known
}

/// Rule D5: a heap has released the memory that an observer keeps, but requests cannot use it. The heaps release memory
/// in order, once, until enough is released.
#[test]
fn memory_kept_by_an_observer_serves_no_request_and_is_reclaimed_once() {
    let device = SimBackend::builder().build();
    let pool = PoolConfig::builder().fixed().reclaim(Reclaim::Pool).limit_bytes(Some(60 * MIB));
    let config = Config::builder()
        .default_pool(pool.build().expect("the configuration should be valid"))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let streams = [(); 3].map(|()| allocator.register_stream().expect("a stream id is available"));
    for made in streams
        .map(|stream| allocator.allocate(POOL, stream, 20 * MIB).expect("the request should stay within the limit"))
    {
        allocator.free(made.handle).expect("the allocation should be live");
    }
    let (observer, _) = allocator.observe(POOL).expect("the pool should exist");
    let refused = allocator.allocate(POOL, streams[0], 24 * MIB);
    assert!(matches!(refused, Err(AllocateError::OutOfMemory(_))), "{refused:?}");
    let trims = streams.map(|stream| allocator.heap_stats(POOL, stream).expect("the heap should exist").trim_count);
    assert_eq!(trims, [1, 1, 0], "two heaps hold enough");
    let stats = allocator.stats();
    assert_eq!((stats.retired_bytes, stats.reserved_bytes.current, stats.retry_count), (40 * MIB, 60 * MIB, 1));
    assert_eq!(allocator.acknowledge(observer, &allocator.unread(observer)), Ok(40 * MIB));
    let _live = allocator.allocate(POOL, streams[0], 24 * MIB).expect("it is back");
}

/// The cursor of one observer is independent of the others, and never moves backward.
#[test]
fn a_later_observer_and_a_repeated_acknowledgment_read_nothing_twice() {
    let device = SimBackend::builder().build();
    let allocator = fixed(&device);
    let (slow, _) = allocator.observe(POOL).expect("the pool should exist");
    let _live = allocator.allocate(POOL, StreamId(0), 30 * MIB).expect("the allocation should fit");
    let (quick, births) = allocator.observe(POOL).expect("the pool should exist");
    assert_eq!(kinds(&births), [(SegmentEventKind::Birth, 0)]);
    assert!(allocator.unread(quick).events.is_empty(), "it was already reported as a birth");
    let _live = allocator.allocate(POOL, StreamId(0), 40 * MIB).expect("the allocation should fit");
    let first = allocator.unread(quick);
    let _live = allocator.allocate(POOL, StreamId(0), 50 * MIB).expect("the allocation should fit");
    for unread in [&allocator.unread(quick), &first] {
        assert_eq!(allocator.acknowledge(quick, unread), Ok(0));
    }
    assert!(allocator.unread(quick).events.is_empty(), "all was acknowledged");
    assert_eq!(allocator.unread(slow).events.len(), 3);
}
