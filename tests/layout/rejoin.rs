//! Rejoins: a restarted rank continues like the others.

use super::{
    POOL, S0, S1, digests, first_part, go_on, in_one_pool, pool, rank, refusal, refuse_after, register_streams,
    restarted,
};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::errors::OutOfMemoryCause;
use symmalloc_core::lock::{Exclusive, Shared};
use symmalloc_core::restore::RestoreError;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, Allocator, LimitScope};
use symmalloc_harness::checker::{DeviceWork, PrintOnPanic};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::jobs;
use symmalloc_harness::restart::Checkpoint;
use symmalloc_sim::{Call, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::Replay;

#[test]
fn a_restarted_rank_has_the_same_future() {
    let (mut live, mut holes, mut heaps) = (0, 0, 0);
    for seed in 0..400 {
        let scenario = Scenario::from_seed(seed, 140).with_layouts();
        let _report = PrintOnPanic(&scenario);
        let at = SplitMix64::new(seed).below(scenario.program.ops().len() as u64) as usize;
        let device = scenario.device(seed);
        let allocator: Allocator<_> =
            Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
        let mut replay = Replay::new(&allocator, &scenario.program);
        let mut work = DeviceWork::new(&device);
        for op in &scenario.program.ops()[..at] {
            let result = replay.step(op);
            work.submit(op, &result);
        }
        let checkpoint = Checkpoint::take(at, &allocator, &scenario.program, &replay);
        for (pool, _) in &checkpoint.layouts {
            let layout = checkpoint.layout(*pool);
            let segments = layout.heaps().iter().flat_map(|heap| &heap.segments);
            holes += segments.filter(|segment| segment.extents.len() > 1).count();
            (live, heaps) = (live + layout.allocation_count(), heaps + layout.heaps().len());
        }
        let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, at);
        let expected = (future, digests(&allocator));
        assert_eq!(restarted::<Exclusive>(&scenario, &checkpoint, seed), expected, "seed {seed}, op {at}");
        assert_eq!(restarted::<Shared>(&scenario, &checkpoint, seed + 1), expected, "seed {seed}, op {at}, with locks");
    }
    assert!(live > 2000 && holes > 50 && heaps > 500, "{live} allocations, {holes} holes, {heaps} heaps");
}

#[test]
fn a_refused_rejoin_leaves_the_pool_unused() {
    let (mut refused, mut kept) = (0, 0);
    for seed in 0..80 {
        let scenario = in_one_pool(&Scenario::from_seed(seed, 60).with_layouts());
        let _report = PrintOnPanic(&scenario);
        let device = scenario.device(seed);
        let allocator: Allocator<_> =
            Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
        let (_, checkpoint) = first_part(&scenario, &allocator, &mut DeviceWork::new(&device));
        let expected = restarted::<Exclusive>(&scenario, &checkpoint, seed);
        let layout = checkpoint.layout(POOL);
        for calls in 0.. {
            let device = scenario.device(seed + 1);
            {
                let allocator: Allocator<_> =
                    Allocator::new(&device, scenario.config.clone()).expect("the arguments should be valid");
                register_streams(&allocator, &scenario.program);
                let fresh = digests(&allocator);
                refuse_after(&device, calls);
                if calls % 2 == 1 {
                    // The driver does not release anything either.
                    device.inject(Some(Call::Unmap), FaultRule::Every { calls: 1 }, Fault::Refused);
                }
                match allocator.restore_layout(POOL, &layout) {
                    Ok(_) => break,
                    Err(RestoreError::Backend(_)) => refused += 1,
                    Err(error) => panic!("seed {seed}: {error}"),
                }
                allocator.check().expect("the invariants should hold");
                assert_eq!(digests(&allocator), fresh);
                let stats = allocator.stats();
                assert_eq!((stats.segment_count, stats.usage.all.allocations.current), (0, 0));
                assert_eq!(stats.reserved_bytes.current, device.mapped_bytes());
                assert_eq!(stats.retired_bytes, device.mapped_bytes(), "the memory that the driver kept is counted");
                assert!(calls % 2 == 1 || device.mapped_bytes() == 0, "seed {seed}: everything is released");
                kept += u64::from(device.mapped_bytes() > 0);
                device.heal();
                if calls % 4 == 1 {
                    let kept_bytes = device.mapped_bytes();
                    assert_eq!(allocator.trim_all(), Ok(kept_bytes), "a trim releases the memory that the driver kept");
                    assert_eq!((device.mapped_bytes(), digests(&allocator)), (0, fresh));
                }
                let mut work = DeviceWork::new(&device);
                let adopt = |id, stream, allocation| work.adopt(id, stream, allocation);
                let mut replay = checkpoint.resume(&allocator, &scenario.program, adopt);
                let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
                assert_eq!((future, digests(&allocator)), expected, "seed {seed}, call {calls}");
            }
            assert!(device.leaks().is_empty(), "seed {seed}, call {calls}, leaked: {}", device.leaks());
        }
    }
    assert!(refused > 200 && kept > 50, "{refused} refused, {kept} with memory that the driver kept");
}

#[test]
fn pools_are_restored_within_the_limit_over_all_of_them() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, Some(32 * MIB));
    let _live = old.allocate(POOL, S0, 20 * MIB).expect("the allocation should fit");
    let layout = old.save_layout(POOL).expect("no segment should be retired");
    let new = rank(&device, &policy, Some(32 * MIB));
    let private = new.create_pool(policy).expect("the configuration should be valid");
    let made = new.allocate(private, S0, 14 * MIB).expect("the allocation should fit");
    let error = refusal(&new, POOL, &layout);
    let (scope, limit_bytes) = (LimitScope::Allocator, 32 * MIB);
    assert_eq!(
        error,
        RestoreError::Limit { needed_bytes: 20 * MIB, cause: OutOfMemoryCause::Limit { scope, limit_bytes } }
    );
    new.free(made.handle).expect("the allocation should be live");
    new.trim_pool(private).expect("no fault should be injected");
    new.restore_layout(POOL, &layout).expect("the limit now fits the layout");
}

#[test]
fn observers_of_a_rejoining_pool_are_notified_of_its_segments() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, None);
    let made: Vec<Allocation> =
        (0..3).map(|_| old.allocate(POOL, S0, 2 * MIB).expect("the allocation should fit")).collect();
    old.free(made[1].handle).expect("the allocation should be live");
    old.trim_all().expect("no fault should be injected");
    let layout = old.save_layout(POOL).expect("no segment should be retired");
    let new = rank(&device, &policy, None);
    let (observer, births) = new.observe(POOL).expect("the pool should exist");
    assert!(births.is_empty());
    new.restore_layout(POOL, &layout).expect("the pool should be unused");
    let restored: Vec<_> =
        new.unread(observer).events.iter().map(|event| (event.kind, event.offset_bytes, event.size_bytes)).collect();
    let expected = [(SegmentEventKind::Birth, 0, 2 * MIB), (SegmentEventKind::Growth, 4 * MIB, 2 * MIB)];
    assert_eq!(restored, expected);
}

#[test]
fn a_recorded_job_that_restarts_midway_has_the_same_digest() {
    let golden = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/jobs.txt"))
        .expect("the golden file exists");
    let golden = |job: &str, segments: &str| {
        let row = golden.lines().find(|row| row.starts_with(&format!("{job:<20} {segments:<10} separate")));
        row.expect("the job is there").split_whitespace().last().expect("a digest").to_owned()
    };
    for job in ["llama_generate", "gpt2_train_varlen", "fsdp1_train_rank0"] {
        let program = jobs::program(job);
        for segments in ["expandable", "fixed"] {
            let policy = pool(&format!("segments:{segments}"));
            let config = Config::builder().default_pool(policy).build().expect("the configuration should be valid");
            let rank = |rank| {
                let device = SimBackend::builder().seed(1).rank(rank).build();
                Allocator::<_>::new(device, config.clone()).expect("the arguments should be valid")
            };
            let old = rank(0);
            let mut replay = Replay::new(&old, &program);
            let at = program.ops().len() / 2;
            for op in &program.ops()[..at] {
                replay.step(op).expect("the job fits 80 GiB");
            }
            let checkpoint = Checkpoint::take(at, &old, &program, &replay);
            let text = &checkpoint.layouts[0].1;
            println!("{job}, {segments}: {} live allocations, {} bytes of text", checkpoint.live.len(), text.len());
            assert!(text.len() < 300 + 100 * (checkpoint.live.len() + 400), "{} bytes", text.len());
            let new = rank(1);
            let mut replay = checkpoint.resume(&new, &program, |_, _, _| {});
            for op in &program.ops()[at..] {
                replay.step(op).expect("the job fits 80 GiB");
            }
            new.check().expect("the invariants should hold");
            assert_eq!(
                new.digest(POOL).expect("the pool should exist").to_string(),
                golden(job, segments),
                "{job}, {segments}"
            );
        }
    }
}

/// If the second heap of a pool does not fit, the reservation for the first one's memory is undone.
#[test]
fn a_rejoin_refused_by_the_limit_at_a_later_heap_charges_nothing() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, Some(32 * MIB));
    for stream in [S0, S1] {
        let _live = old.allocate(POOL, stream, 10 * MIB).expect("the allocation should fit");
    }
    let layout = old.save_layout(POOL).expect("no segment should be retired");
    let new = rank(&device, &policy, Some(32 * MIB));
    let private = new.create_pool(policy).expect("the configuration should be valid");
    let _live = new.allocate(private, S0, 20 * MIB).expect("the allocation should fit");
    let error = refusal(&new, POOL, &layout);
    assert!(matches!(error, RestoreError::Limit { .. }), "{error}");
    new.check().expect("the invariants should hold");
    assert_eq!(new.stats().reserved_bytes.current, 20 * MIB);
}

/// A rejoin obtains the memory of a saved segment extent by extent; each extent counts as growth.
#[test]
fn memory_that_a_rejoin_obtains_counts_as_growth() {
    for segments in ["segments:expandable", "segments:fixed"] {
        let policy = pool(segments);
        let device = SimBackend::builder().build();
        let old = rank(&device, &policy, None);
        let made = [4, 12, 4, 12, 4].map(|mib| old.allocate(POOL, S0, mib * MIB).expect("the allocation should fit"));
        let _live = old.allocate(POOL, S1, 30 * MIB).expect("the allocation should fit");
        old.free(made[1].handle).expect("the allocation should be live");
        old.free(made[3].handle).expect("the allocation should be live");
        old.trim_all().expect("no fault should be injected");
        let layout = old.save_layout(POOL).expect("no segment should be retired");

        let device = SimBackend::builder().build();
        let new = rank(&device, &policy, None);
        let growths = || {
            let heaps =
                [S0, S1].map(|stream| new.heap_stats(POOL, stream).expect("the pool should exist").growth_count);
            assert_eq!(
                new.pool_stats(POOL).expect("the pool should exist").growth_count,
                heaps[0] + heaps[1],
                "{segments}"
            );
            assert_eq!(new.stats().growth_count, device.calls().of(Call::Map), "{segments}: over all pools");
            heaps
        };
        new.restore_layout(POOL, &layout).expect("the pool should be unused");
        let rejoined = growths();
        assert_eq!(rejoined, if segments.ends_with("expandable") { [3, 1] } else { [2, 1] });
        let _live = new.allocate(POOL, S1, 50 * MIB).expect("the allocation should fit");
        assert_eq!(growths(), [rejoined[0], rejoined[1] + 1], "{segments}");
    }
}
