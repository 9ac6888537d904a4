//! Groups of streams: a pool with `streams:grouped` has a heap per group, and all other pools ignore groups.

use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::StreamError;
use symmalloc_core::ids::{HeapId, Placement, StreamGroup};
use symmalloc_core::plans::{Plan, PlanError, PlannedAllocation, StepAllocation};
use symmalloc_core::restore::RestoreError;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Op, PoolId, StreamId};
use symmalloc_harness::jobs;
use symmalloc_harness::memory::Memory;
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::{Program, Replay};
use symmalloc_trace::{Trace, layout};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);
const S2: StreamId = StreamId(2);

fn config(pool: &str) -> Config {
    Config::builder()
        .default_pool(pool.parse().expect("the text should be valid"))
        .build()
        .expect("the configuration should be valid")
}

/// Returns an allocator with three streams: s0, s1, and s2 in the group of `group`.
fn allocator(pool: &str, group: StreamId) -> Allocator<SimBackend> {
    let allocator = Allocator::new(SimBackend::builder().build(), config(pool)).expect("the device should be created");
    assert_eq!([(); 2].map(|()| allocator.register_stream()), [Ok(S0), Ok(S1)]);
    assert_eq!(allocator.register_stream_in(group), Ok(S2));
    allocator
}

fn allocate(allocator: &Allocator<SimBackend>, stream: StreamId, mib: u64) -> Allocation {
    let made = allocator.allocate(POOL, stream, mib * MIB).expect("no limit should be reached");
    allocator.backend().submit(stream, made.address, made.size_bytes).expect("the earlier users were waited for");
    made
}

/// Frees a block of s0, and returns the address that each stream then gets for a request of its size, and the block's.
fn successors(pool: &str) -> ([Allocation; 2], Allocation) {
    let allocator = allocator(pool, S0);
    let first = allocate(&allocator, S0, 4);
    allocator.free(first.handle).expect("the allocation should be live");
    ([S1, S2].map(|stream| allocate(&allocator, stream, 4)), first)
}

#[test]
fn streams_of_a_group_reuse_memory_of_each_other_and_no_others() {
    let ([other, member], first) = successors("streams:grouped");
    assert_eq!(member.address, first.address);
    assert_ne!(other.address, first.address);
    let ([other, member], first) = successors("streams:separate");
    assert!(other.address != first.address && member.address != first.address, "groups have no meaning here");
    let ([other, _], first) = successors("streams:shared");
    assert_eq!(other.address, first.address, "groups have no meaning here");
}

#[test]
fn a_group_is_named_after_its_first_stream() {
    let allocator = allocator("", S0);
    for group in [S2, StreamId(3), StreamId(4), StreamId(7), StreamId::MAX] {
        assert_eq!(allocator.register_stream_in(group), Err(StreamError::UnknownGroup { group }));
    }
    assert_eq!((allocator.stream_count(), allocator.groups().stream_count()), (3, 3), "nothing changed");
    assert_eq!(allocator.register_stream_in(S1), Ok(StreamId(3)));
    assert_eq!([S0, S1, S2, StreamId(3)].map(|stream| allocator.group_of(stream)), [Ok(S0), Ok(S1), Ok(S0), Ok(S1)]);
    assert!(allocator.group_of(StreamId(4)).is_err());
}

/// Replays a recorded job whose streams all join one group, or none. Returns the placements.
fn placements(job: &str, pool: &str, is_one_group: bool) -> Vec<Placement> {
    let records = jobs::records(job).into_iter().map(|mut record| {
        if let Op::RegisterStream { group, .. } = &mut record.op
            && is_one_group
        {
            *group = S0;
        }
        record
    });
    let program = Program::new(&records.collect::<Vec<_>>()).expect("the arguments should be valid");
    let allocator: Allocator<_> =
        Allocator::new(SimBackend::builder().seed(1).build(), config(pool)).expect("the device should be created");
    let mut placements = Vec::new();
    Replay::new(&allocator, &program).run(|_, made| placements.push(made.placement)).expect("the job fits");
    allocator.check().expect("the invariants should hold");
    placements
}

#[test]
fn a_group_of_one_places_like_a_separate_stream_and_a_group_of_all_like_shared_streams() {
    for job in ["fsdp1_train_rank0", "moe_train"] {
        assert_eq!(placements(job, "streams:grouped", false), placements(job, "streams:separate", false), "{job}");
        assert_eq!(placements(job, "streams:grouped", true), placements(job, "streams:shared", false), "{job}");
        assert_eq!(placements(job, "streams:separate", true), placements(job, "streams:separate", false), "{job}");
    }
}

#[test]
fn a_heap_is_reported_once_for_its_group() {
    let allocator = allocator("streams:grouped", S0);
    let live = allocate(&allocator, S2, 3);
    let heap = HeapId { pool: POOL, group: StreamGroup::Group(S0) };
    assert_eq!((heap.to_string(), heap.group.to_string()), ("p0 s0+".to_owned(), "s0+".to_owned()));
    let of_heap =
        |stream| allocator.heap_stats(POOL, stream).expect("the pool should exist").usage.all.allocations.current;
    assert_eq!([S0, S1, S2].map(of_heap), [1, 0, 1], "s0 made no op yet, and has the heap of its group");
    let more = allocate(&allocator, S0, 3);
    let by_heap = allocator.stats_by_heap();
    assert_eq!(by_heap.iter().map(|(heap, _)| *heap).collect::<Vec<_>>(), [heap]);
    let segments = allocator.snapshot().segments;
    assert!(segments.iter().all(|segment| segment.heap == heap) && segments.len() == 1, "{segments:?}");
    assert_eq!(allocator.stats().usage.all.allocations.current, 2);
    [live, more].into_iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
    assert_eq!(allocator.trim_all().map(|bytes| bytes > 0), Ok(true));
    assert_eq!(allocator.stats().reserved_bytes.current, 0);
    allocator.check().expect("the invariants should hold");
}

/// A pool may reuse the heaps of a destroyed one, of which some members had none.
#[test]
fn a_later_pool_has_the_same_groups() {
    let allocator = allocator("streams:grouped", S0);
    let grouped: PoolConfig = "streams:grouped".parse().expect("the text should be valid");
    for members in [[S0, S2], [S2, S0], [S2, S2]] {
        let pool = allocator.create_pool(grouped.clone()).expect("the pool should be created");
        let first = allocator.allocate(pool, members[0], 4 * MIB).expect("no limit should be reached");
        allocator.free(first.handle).expect("the allocation should be live");
        let second = allocator.allocate(pool, members[1], 4 * MIB).expect("no limit should be reached");
        assert_eq!(second.placement, first.placement);
        assert_eq!(allocator.heap_digests(pool).expect("the pool should exist").len(), 1);
        allocator.free(second.handle).expect("the allocation should be live");
        allocator.destroy_pool(pool).expect("the pool should be empty");
        allocator.check().expect("the invariants should hold");
    }
}

#[test]
fn a_layout_needs_the_same_groups() {
    let old = allocator("streams:grouped", S0);
    let (kept, other) = (allocate(&old, S2, 4), allocate(&old, S1, 2));
    let saved = layout::to_text(&old.save_layout(POOL).expect("it can be saved"));
    assert!(saved.contains("\nheap s0+ ") && saved.contains("\nheap s1+ "), "{saved}");
    let saved = layout::parse(&saved).expect("a written layout can be read");
    let new = allocator("streams:grouped", S0);
    let restored = new.restore_layout(POOL, &saved).expect("the groups are equal");
    for (stream, made) in [(S2, kept), (S1, other)] {
        let found = restored.find(stream, made.placement).expect("the allocation should have been live");
        assert_eq!((found.stream, found.allocation.placement), (stream, made.placement));
    }
    assert_eq!(restored.find(S1, Placement { offset_bytes: 1 << 30, ..kept.placement }), None);
    assert!(restored.nothing(S0).is_some(), "the heap of its group was restored");
    assert_eq!(new.digest(POOL), old.digest(POOL));
    assert_eq!(allocate(&new, S0, 4).placement, allocate(&old, S0, 4).placement);
    let error = allocator("streams:grouped", S1).restore_layout(POOL, &saved).expect_err("s2 is in another group");
    let expected =
        RestoreError::Group { pool: POOL, stream: S2, saved: StreamGroup::Group(S0), here: StreamGroup::Group(S1) };
    assert_eq!(error, expected);
}

#[test]
fn a_plan_is_for_the_streams_of_one_group() {
    let allocator = allocator("streams:grouped", S0);
    let plan = |group, stream| {
        let wanted = StepAllocation { stream, requested_bytes: MIB, until: Some(1) };
        Plan::new(0, group, vec![PlannedAllocation { wanted, offset_bytes: Some(0) }])
    };
    let adopt = |group, stream| allocator.adopt_plan(POOL, plan(group, stream).expect("possible"));
    let of_s0 = StreamGroup::Group(S0);
    adopt(of_s0, S2).expect("s2 is in the group of s0");
    for (group, stream) in
        [(of_s0, S1), (StreamGroup::Group(S2), S2), (StreamGroup::One(S2), S2), (StreamGroup::All, S0)]
    {
        let error = adopt(group, stream).expect_err("it is not the heap's");
        assert!(matches!(error, PlanError::Streams { pool: POOL, .. }), "{error}");
    }
    assert!(plan(StreamGroup::Group(S1), S0).is_err(), "s0 is older than the group");
    assert_eq!(allocator.plans(POOL).expect("the pool should exist").len(), 1);
}

#[test]
fn a_recording_keeps_groups() {
    let allocator = allocator("streams:grouped", S0);
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    allocator.register_stream_in(S1).expect("s1 names a group");
    let _live = [StreamId(3), S2].map(|stream| allocate(&allocator, stream, 2));
    allocator.stop_recording().expect("no fault should be injected");
    let records = sink.records();
    let text = Trace::new(Some(allocator.config().clone()), records.clone())
        .expect("the records should be consistent")
        .to_text();
    assert!(text.contains("\nstream s0\nstream s1\nstream s2 in s0\nstream s3 in s1\n"), "{text}");
    let trace = Trace::parse(&text).expect("it was written");
    let program = Program::new(trace.records()).expect("the arguments should be valid");
    let again: Allocator<_> = Allocator::new(SimBackend::builder().rank(1).build(), allocator.config().clone())
        .expect("the device should be created");
    Replay::new(&again, &program).run(|_, _| ()).expect("no limit should be reached");
    assert_eq!(again.groups(), allocator.groups());
    assert_eq!(again.heap_digests(POOL), allocator.heap_digests(POOL));
}
