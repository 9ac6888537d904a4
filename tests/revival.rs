//! Revivals: a pool restores its former allocations, and keeps the memory that captured graphs may use.

use std::cell::Cell;
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::ids::{HeapId, SegmentId, StreamGroup};
use symmalloc_core::layout::Layout;
use symmalloc_core::op::{Op, Record};
use symmalloc_core::restore::{RestoreError, RevivedPlace};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, Backend, Digest, Placement, PoolId, StreamId};
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_harness::memory::Memory;
use symmalloc_sim::{Delays, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};
use symmalloc_trace::{RecordLine, Trace};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

type Rank<'a> = Allocator<&'a SimBackend>;

fn rank<'a>(device: &'a SimBackend, policy: &str) -> Rank<'a> {
    let pool: PoolConfig = policy.parse().expect("the text should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator = Allocator::new(device, config).expect("the arguments should be valid");
    allocator.register_stream().expect("a stream id is available");
    allocator.register_stream().expect("a stream id is available");
    allocator
}

/// Live allocations, in an order that is the same on every rank.
type Live = BTreeMap<(StreamId, Placement), Allocation>;

/// Allocates and frees at random.
fn wander(allocator: &Rank<'_>, random: &mut SplitMix64, live: &mut Live, ops: u32) {
    for _ in 0..ops {
        if live.is_empty() || random.below(5) < 3 {
            let stream = StreamId(random.below(2) as u16);
            let bytes = [700, 90_000, MIB, 5 * MIB, 23 * MIB][random.below(5) as usize] + random.below(4096);
            let made = allocator.allocate(POOL, stream, bytes).expect("the allocation should fit");
            allocator.backend().submit(stream, made.address, made.size_bytes).expect("no race should be found");
            live.insert((stream, made.placement), made);
        } else {
            let at = random.below(live.len() as u64) as usize;
            let (&key, &freed) = live.iter().nth(at).expect("one of them");
            if random.below(3) == 0 {
                let other = StreamId(1 - key.0.0);
                allocator.record_use(freed.handle, other).expect("the allocation should be live");
                work_after(allocator.backend(), other, key.0, &freed);
            }
            allocator.free(freed.handle).expect("the allocation should be live");
            live.remove(&key);
        }
    }
}

/// Runs work of `stream` on an allocation, ordered after the work of `owner` so far.
fn work_after(device: &SimBackend, stream: StreamId, owner: StreamId, allocation: &Allocation) {
    let event = device.record(owner).expect("no fault should be injected");
    device.wait(stream, event).expect("no fault should be injected");
    device.recycle(event);
    device.submit(stream, allocation.address, allocation.size_bytes).expect("no race should be found");
}

/// Frees the allocations that the layout lacks, as a tree of graphs does, and revives the rest. Uses of their memory in
/// the meantime do not race with the revived allocations.
fn go_back(allocator: &Rank<'_>, layout: &Layout, saved: &Live, now: &Live) {
    for (key, allocation) in now {
        let is_kept = saved.get(key).is_some_and(|before| before.handle == allocation.handle);
        if !is_kept {
            allocator.free(allocation.handle).expect("the allocation should be live");
        }
    }
    let reserved = allocator.stats().reserved_bytes.current;
    let restored = allocator.revive_layout(POOL, layout).expect("the layout's memory still exists");
    let mut found: Vec<_> = restored.allocations().map(|one| (one.stream, one.allocation.placement)).collect();
    found.sort();
    let expected: Vec<_> = saved.keys().copied().collect();
    assert_eq!(found, expected, "exactly what was saved is live");
    for one in restored.allocations() {
        let is_kept =
            now.get(&(one.stream, one.allocation.placement)).is_some_and(|live| live.handle == one.allocation.handle);
        if !is_kept {
            let Allocation { address, size_bytes, .. } = one.allocation;
            allocator.backend().submit(one.stream, address, size_bytes).expect("no race should be found");
        }
    }
    assert_eq!(allocator.stats().reserved_bytes.current, reserved, "no memory was obtained or released");
    allocator.check().expect("the invariants should hold");
}

/// Returns a rank's digests over time.
fn history(policy: &str, device: &SimBackend, seed: u64) -> Vec<Digest> {
    wandered(&rank(device, policy), seed)
}

fn wandered(allocator: &Rank<'_>, seed: u64) -> Vec<Digest> {
    let mut random = SplitMix64::new(seed);
    let mut digests = Vec::new();
    let mut saved = Live::new();
    wander(allocator, &mut random, &mut saved, 25);
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    for _ in 0..4 {
        let mut now = saved.clone();
        wander(allocator, &mut random, &mut now, 30);
        go_back(allocator, &layout, &saved, &now);
        // Revived allocations have new handles.
        let again = allocator.revive_layout(POOL, &layout).expect("the call should have nothing to do");
        saved = again.allocations().map(|one| ((one.stream, one.allocation.placement), one.allocation)).collect();
        digests.push(allocator.digest(POOL).expect("the pool should exist"));
    }
    digests
}

#[test]
fn a_pool_returns_to_checkpoints_repeatedly_and_alike_on_every_rank() {
    for policy in ["segments:expandable", "segments:fixed", "streams:shared"] {
        for seed in 0..60 {
            let digests = [1, 2].map(|rank| {
                let device = SimBackend::builder().rank(rank).seed(seed + 7).delays(Delays::UntilSynchronized).build();
                let digests = history(policy, &device, seed);
                assert!(device.leaks().is_empty(), "{policy}, seed {seed}: {}", device.leaks());
                digests
            });
            assert_eq!(digests[0], digests[1], "{policy}, seed {seed}");
        }
    }
}

/// Records a run and returns its ops, read back from their text.
fn recorded(allocator: &Rank<'_>, run: impl FnOnce(&Rank<'_>)) -> Vec<Record> {
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    run(allocator);
    let count = allocator.stop_recording().expect("the recording did not end early").records;
    let records = sink.records();
    assert_eq!(records.len() as u64, count);
    let text = Trace::new(None, records).expect("the records should be consistent").to_text();
    Trace::parse(&text).expect("written traces can be read").records().to_vec()
}

#[test]
fn a_recording_continues_after_a_revival_and_replays_to_the_same_digests() {
    let mut revived = 0;
    for policy in ["segments:expandable", "segments:fixed", "segments:fixed,max_split_size_mb:30", "streams:shared"] {
        for seed in 0..40 {
            let device = SimBackend::builder().rank(1).seed(seed + 7).build();
            let allocator = rank(&device, policy);
            let records = recorded(&allocator, |allocator| drop(wandered(allocator, seed)));
            revived += records.iter().filter(|record| record.revived_bytes.is_some()).count();
            let program = Program::new(&records).expect("the records should be consistent");
            let other = SimBackend::builder().rank(2).seed(seed).build();
            let config = allocator.config().clone();
            let again: Rank<'_> = Allocator::new(&other, config).expect("the arguments should be valid");
            let mut placements = Vec::new();
            Replay::new(&again, &program)
                .run(|_, made| placements.push(made.placement))
                .expect("the program should replay");
            let expected: Vec<_> = records
                .iter()
                .filter(|record| matches!(record.op, Op::Allocate { .. }))
                .map(|record| record.placement.expect("an allocation of nonzero size"))
                .collect();
            assert_eq!(placements, expected, "{policy}, seed {seed}");
            assert_eq!(again.digest(POOL), allocator.digest(POOL), "{policy}, seed {seed}");
            assert_eq!(again.stats().usage, allocator.stats().usage, "{policy}, seed {seed}");
            again.check().expect("the invariants should hold");
        }
    }
    assert!(revived > 1000, "{revived} were revived");
}

/// Runs a branch of a tree of graphs, which allocates memory between a checkpoint and the return to it.
fn branch(allocator: &Rank<'_>) {
    let stem = allocator.allocate_named(POOL, S0, 3 * MIB, "stem").expect("the allocation should fit");
    allocator.record_use(stem.handle, S1).expect("the allocation should be live");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.free(stem.handle).expect("the allocation should be live");
    let branch = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    allocator.free(branch.handle).expect("the allocation should be live");
    allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    let _live = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
}

#[test]
fn a_recorded_revival_has_its_name_its_uses_and_its_block() {
    let device = SimBackend::builder().build();
    let records = recorded(&rank(&device, "segments:expandable"), branch);
    let lines: Vec<String> = records.iter().map(|record| RecordLine(record).to_string()).collect();
    assert_eq!(
        lines[2..],
        [
            "a 0 3145728 s0 \"stem\" -> 0@0",
            "u 0 s1",
            "f 0",
            "a 1 1048576 s0 -> 0@0",
            "f 1",
            "a 2 3145728 s0 \"stem\" -> 0@0 revived 3145728",
            "u 2 s1",
            "a 3 1048576 s0 -> 0@3145728",
        ]
    );
}

#[test]
fn a_replay_allocates_normally_if_the_placement_of_a_revival_is_not_free() {
    let device = SimBackend::builder().build();
    let mut records = recorded(&rank(&device, "segments:expandable"), branch);
    let revival = records.iter().position(|record| record.revived_bytes.is_some()).expect("there should be one");
    let run = |records: &[Record], policy: &str| {
        let program = Program::new(records).expect("the records should be consistent");
        let other = SimBackend::builder().build();
        let again = rank(&other, policy);
        let mut placements = Vec::new();
        Replay::new(&again, &program)
            .run(|_, made| placements.push(made.placement))
            .expect("the program should replay");
        again.check().expect("the invariants should hold");
        placements.remove(2)
    };
    let (segment, offset_bytes) = (SegmentId(0), 0);
    assert_eq!(run(&records, "segments:fixed"), Placement { segment, offset_bytes });
    // Placements that do not exist, are misaligned, or overlap a live allocation.
    for (segment, offset_bytes, block_bytes) in
        [(9, 0, 3 * MIB), (0, 100, 3 * MIB), (0, 0, 3 * MIB + 1), (0, u64::MAX - 511, 3 * MIB), (0, 600 * MIB, 3 * MIB)]
    {
        let place = Placement { segment: SegmentId(segment), offset_bytes };
        records[revival] = records[revival].clone().with_revival(place, block_bytes);
        assert_eq!(run(&records, "segments:expandable"), Placement { segment: SegmentId(0), offset_bytes: 0 });
    }
    let allocator = rank(&device, "segments:expandable");
    let _live = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let place = RevivedPlace { placement: Placement { segment: SegmentId(0), offset_bytes: 0 }, block_bytes: MIB };
    let digest = allocator.digest(POOL);
    let refused = allocator.replay().revive(POOL, S0, MIB, place, None).expect_err("it overlaps a live allocation");
    assert!(matches!(refused, RestoreError::UnknownLive { .. }), "{refused}");
    assert_eq!(allocator.digest(POOL), digest);
}

#[test]
fn memory_that_another_branch_obtained_stays() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:expandable");
    let stem = allocator.allocate(POOL, S0, 3 * MIB).expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    let branch = allocator.allocate(POOL, S0, 60 * MIB).expect("the allocation should fit");
    allocator.free(branch.handle).expect("the allocation should be live");
    allocator.free(stem.handle).expect("the allocation should be live");
    let reserved = device.mapped_bytes();
    let restored = allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    assert_eq!(restored.allocations().next().expect("there should be one").allocation.address, stem.address);
    assert_eq!(device.mapped_bytes(), reserved);
    let again = allocator.allocate(POOL, S0, 60 * MIB).expect("the allocation should fit");
    assert_eq!((again.address, device.mapped_bytes()), (branch.address, reserved));
}

/// The driver fails each call of a revival once.
#[test]
fn a_revival_that_the_driver_refuses_can_be_repeated() {
    let mut refused = 0;
    for calls in 0.. {
        let device = SimBackend::builder().delays(Delays::UntilSynchronized).build();
        let allocator = rank(&device, "streams:shared");
        let saved = [(); 3].map(|()| allocator.allocate(POOL, S0, MIB).expect("the allocation should fit"));
        let layout = allocator.save_layout(POOL).expect("no segment should be retired");
        for made in saved {
            allocator.record_use(made.handle, S1).expect("the allocation should be live");
            work_after(&device, S1, S0, &made);
            allocator.free(made.handle).expect("the allocation should be live");
        }
        let before = (allocator.digest(POOL), allocator.stats());
        let ordinal = device.calls().fallible() + calls;
        device.inject(None, FaultRule::At { ordinal }, Fault::Refused);
        match allocator.revive_layout(POOL, &layout) {
            Err(RestoreError::Fence { stream: S0, .. }) => refused += 1,
            Err(error) => panic!("call {calls}: {error}"),
            Ok(_) => break,
        }
        assert_eq!((allocator.digest(POOL), allocator.stats()), before, "call {calls}");
        allocator.check().expect("the invariants should hold");
        device.heal();
        let revived = allocator.revive_layout(POOL, &layout).expect("the driver works again");
        for one in revived.allocations() {
            device.submit(S0, one.allocation.address, one.allocation.size_bytes).expect("no race should be found");
        }
    }
    assert!(refused > 0);
}

#[test]
fn a_live_allocation_that_the_layout_does_not_know_is_named() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:expandable");
    let saved = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    let found = || match allocator.revive_layout(POOL, &layout).expect_err("an allocation is unknown") {
        error @ RestoreError::UnknownLive { .. } => {
            let text = error.to_string();
            let RestoreError::UnknownLive { pool, stream, placement, requested_bytes, name } = error else {
                unreachable!()
            };
            (pool, stream, placement, requested_bytes, name, text)
        }
        error => panic!("{error}"),
    };
    let late = allocator.allocate_named(POOL, S1, 100, "late").expect("the allocation should fit");
    let (pool, stream, placement, requested_bytes, name, text) = found();
    assert!(text.contains("\"late\""), "{text}");
    assert_eq!((pool, stream, placement, requested_bytes), (POOL, S1, late.placement, 100));
    assert_eq!(name.as_deref(), Some("late"));
    allocator.free(late.handle).expect("the allocation should be live");
    let unnamed = allocator.allocate(POOL, S1, 100).expect("the allocation should fit");
    assert_eq!((unnamed.placement, found().4), (late.placement, None), "the name was freed");
    allocator.free(unnamed.handle).expect("the allocation should be live");

    // Another allocation at the same placement is not the saved one.
    allocator.free(saved.handle).expect("the allocation should be live");
    let other = allocator.allocate(POOL, S0, MIB - 1).expect("the allocation should fit");
    assert_eq!(other.placement, saved.placement);
    let (_, stream, placement, requested_bytes, name, _) = found();
    assert_eq!((stream, placement, requested_bytes, name), (S0, other.placement, MIB - 1, None));
    allocator.free(other.handle).expect("the allocation should be live");
    let restored = allocator.revive_layout(POOL, &layout).expect("the allocation should fit");
    let found = restored.find(S0, saved.placement).expect("the allocation should have been live").allocation;
    assert_eq!((found.placement, found.address, found.size_bytes), (saved.placement, saved.address, MIB));
    assert!(allocator.free(saved.handle).is_err(), "the old handle stays stale");
    allocator.free(found.handle).expect("the allocation should be live");
}

#[test]
fn released_memory_cannot_be_revived() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:expandable");
    let made: Vec<Allocation> =
        (0..4).map(|_| allocator.allocate(POOL, S0, 2 * MIB).expect("the allocation should fit")).collect();
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    // First a hole, then the end, then all of it.
    for (freed, offset_bytes, size_bytes) in
        [(1, 2 * MIB, 2 * MIB), (3, 2 * MIB, 2 * MIB), (0, 0, 4 * MIB), (2, 0, 8 * MIB)]
    {
        allocator.free(made[freed].handle).expect("the allocation should be live");
        allocator.trim_all().expect("no fault should be injected");
        let segment = SegmentId(0);
        let gone = RestoreError::Gone {
            heap: HeapId { pool: POOL, group: StreamGroup::One(S0) },
            segment,
            offset_bytes,
            size_bytes,
        };
        assert_eq!(allocator.revive_layout(POOL, &layout), Err(gone));
    }
}

#[test]
fn a_pool_without_a_heap_of_the_layout_has_no_memory_to_revive() {
    for policy in ["segments:expandable", "segments:fixed"] {
        let devices = [(); 2].map(|()| SimBackend::builder().build());
        let [saved_on, other] = devices.each_ref().map(|device| rank(device, policy));
        for stream in [S0, S1] {
            let _live = saved_on.allocate(POOL, stream, MIB).expect("the allocation should fit");
        }
        let layout = saved_on.save_layout(POOL).expect("no segment should be retired");
        // The other pool has the same memory on S0 and was never used on S1.
        let _live = other.allocate(POOL, S0, MIB).expect("the allocation should fit");
        let before = other.stats();
        let error = other.revive_layout(POOL, &layout).expect_err("S1 has no memory");
        assert!(matches!(error, RestoreError::Gone { heap, .. } if heap.stream() == Some(S1)), "{error}");
        assert_eq!(other.stats(), before, "nothing changed");
    }
}

/// A named allocation is at the placement of a saved unnamed one. It takes the role of the saved one, and loses its name.
#[test]
fn a_revival_removes_names_that_were_given_later() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:expandable");
    let saved = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let named = allocator.allocate_named(POOL, S0, MIB, "weights").expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.free(saved.handle).expect("the allocation should be live");
    allocator.free(named.handle).expect("the allocation should be live");
    let later = allocator.allocate_named(POOL, S0, MIB, "later").expect("the allocation should fit");
    let unnamed = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    assert_eq!([later.placement, unnamed.placement], [saved.placement, named.placement]);
    let revived = allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    let names: Vec<_> = revived.allocations().map(|revived| revived.name.as_deref()).collect();
    assert_eq!(names, [None, Some("weights")]);
    assert!(!allocator.leak_report().to_string().contains("later"));
}

/// Revived allocations are found by address; allocations that the layout lacks are not.
#[test]
fn revived_allocations_are_found_by_their_addresses() {
    let device = SimBackend::builder().build();
    let config =
        Config::builder().pointer_lookup(PointerLookup::Exact).build().expect("the configuration should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    allocator.register_stream().expect("a stream id is available");
    allocator.register_stream().expect("a stream id is available");
    let saved = [(); 2].map(|()| allocator.allocate(POOL, S0, MIB).expect("the allocation should fit"));
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.record_use_at(saved[0].address, S1).expect("the allocation should be live");
    allocator.free_at(saved[0].address).expect("the allocation should be live");
    let small = allocator.allocate(POOL, S0, 512).expect("the allocation should fit");
    assert_eq!(small.address, saved[0].address);
    allocator.free_at(small.address).expect("the allocation should be live");
    let revived = allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    for again in revived.allocations() {
        assert_eq!(allocator.handle_at(again.allocation.address), Ok(again.allocation.handle));
        allocator.free_at(again.allocation.address).expect("live again");
    }
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
}

/// The peak over all heaps ends with the same value as if nothing had been freed.
#[test]
fn revived_allocations_count_in_the_peak_over_all_heaps() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:expandable");
    let handles =
        [S0, S1].map(|stream| allocator.allocate(POOL, stream, 10 * MIB).expect("the allocation should fit").handle);
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    handles.into_iter().for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
    allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    let _live = allocator.allocate(POOL, S0, 5 * MIB).expect("the allocation should fit");
    let usage = allocator.stats().usage.all;
    assert_eq!((usage.allocated_bytes.current, usage.allocated_bytes.peak), (25 * MIB, 25 * MIB));
    allocator.check().expect("the invariants should hold");
}

#[test]
fn a_revived_allocation_waits_for_later_users_of_its_memory() {
    let device = SimBackend::builder().build();
    let waits = Cell::new(0);
    let count = |call| {
        if let DeviceCall::Wait { stream } = call {
            assert_eq!(stream, S0);
            waits.set(waits.get() + 1);
        }
    };
    let config = Config::builder()
        .default_pool("streams:shared".parse().expect("the text should be valid"))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(Hooked { inner: &device, hook: count }, config).expect("the arguments should be valid");
    for _ in 0..2 {
        allocator.register_stream().expect("a stream id is available");
    }
    let saved = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.record_use(saved.handle, S1).expect("the allocation should be live");
    allocator.free(saved.handle).expect("the allocation should be live");
    allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    assert_eq!(waits.get(), 1);
}

/// The rest of the free block in front of a revived allocation keeps its earlier users.
#[test]
fn memory_in_front_of_a_revived_allocation_waits_for_its_earlier_users() {
    const S2: StreamId = StreamId(2);
    let device = SimBackend::builder().build();
    let waits = Cell::new(0);
    let count = |call| waits.set(waits.get() + u32::from(matches!(call, DeviceCall::Wait { stream: S2 })));
    let config = Config::builder()
        .default_pool("streams:shared".parse().expect("the text should be valid"))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> =
        Allocator::new(Hooked { inner: &device, hook: count }, config).expect("the arguments should be valid");
    for _ in 0..3 {
        allocator.register_stream().expect("a stream id is available");
    }
    let front = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let saved = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    allocator.free(front.handle).expect("the allocation should be live");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.free(saved.handle).expect("the allocation should be live");
    // One block at both places, which another stream has used.
    let both = allocator.allocate(POOL, S0, 2 * MIB).expect("the allocation should fit");
    assert_eq!(both.address, front.address);
    allocator.record_use(both.handle, S1).expect("the allocation should be live");
    allocator.free(both.handle).expect("the allocation should be live");
    allocator.revive_layout(POOL, &layout).expect("the layout's memory still exists");
    let again = allocator.allocate(POOL, S2, MIB).expect("the allocation should fit");
    assert_eq!((again.address, waits.get()), (front.address, 2), "it waits for both streams");
}

#[test]
fn unknown_live_and_released_allocations_are_refused_without_changes() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, "segments:fixed");
    let saved = allocator.allocate(POOL, S0, 30 * MIB).expect("the allocation should fit");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    let stray = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    let digest = allocator.digest(POOL);
    assert!(matches!(allocator.revive_layout(POOL, &layout), Err(RestoreError::UnknownLive { .. })));
    assert_eq!(allocator.digest(POOL), digest);
    allocator.free(stray.handle).expect("the allocation should be live");
    allocator.free(saved.handle).expect("the allocation should be live");
    allocator.trim_all().expect("the memory should be released");
    assert!(matches!(allocator.revive_layout(POOL, &layout), Err(RestoreError::Gone { .. })));
}

/// An allocation is freed and made again at the same place, without the use that the layout has. It is live when the layout is revived,
/// which adds the use.
#[test]
fn a_revival_adds_the_saved_uses_of_allocations_that_are_live() {
    let device = SimBackend::builder().build();
    let waits = Cell::new(0);
    let count = |call| waits.set(waits.get() + u32::from(matches!(call, DeviceCall::Wait { .. })));
    let allocator: Allocator<_> = Allocator::new(Hooked { inner: &device, hook: count }, Config::default())
        .expect("the arguments should be valid");
    for _ in 0..2 {
        allocator.register_stream().expect("a stream id is available");
    }
    let sink = Memory::new();
    allocator.start_recording(sink.clone()).expect("nothing should have been allocated");
    let saved = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    allocator.record_use(saved.handle, S1).expect("the allocation should be live");
    let layout = allocator.save_layout(POOL).expect("no segment should be retired");
    allocator.free(saved.handle).expect("the allocation should be live");
    let again = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    assert_eq!((again.placement, waits.replace(0)), (saved.placement, 1));

    let digest = allocator.digest(POOL);
    let revived = allocator.revive_layout(POOL, &layout).expect("all of it is there");
    assert_eq!(revived.allocations().next().expect("there should be one").allocation.handle, again.handle);
    assert_ne!(allocator.digest(POOL), digest, "the use is in the digest");
    allocator.free(again.handle).expect("the allocation should be live");
    let _live = allocator.allocate(POOL, S0, MIB).expect("the allocation should fit");
    assert_eq!(waits.get(), 1, "the next owner waits for the other stream");
    allocator.stop_recording().expect("it did not end early");
    let uses = sink.records().iter().filter(|record| matches!(record.op, Op::RecordUse { .. })).count();
    assert_eq!(uses, 2, "the use is in the recording");
}
