//! Layouts: a rank that restarts goes on as the others do, and a pool goes back to what it was.

use std::cell::RefCell;
use std::collections::BTreeSet;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::errors::OutOfMemoryCause;
use symmalloc_core::layout::Layout;
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_core::restore::LayoutError;
use symmalloc_core::restore::RestoreError;
use symmalloc_core::segment_log::SegmentEventKind;
use symmalloc_core::units::MIB;
use symmalloc_core::{
    Allocation, AllocationId, Allocator, Digest, LimitScope, Op, Placement, PoolId, SegmentId, StreamId,
};
use symmalloc_harness::checker::{DeviceWork, PrintOnPanic, outcome};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_harness::jobs;
use symmalloc_harness::oracle::Outcome;
use symmalloc_harness::restart::Checkpoint;
use symmalloc_sim::{Call, Delays, Fault, FaultRule, SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

const POOL: PoolId = PoolId::DEFAULT;
const S0: StreamId = StreamId(0);
const S1: StreamId = StreamId(1);

/// What later ops come to: every decision, and what is reserved after it.
type Future = Vec<(Outcome, u64)>;

fn digests<L: Lock>(allocator: &Allocator<&SimBackend, L>) -> Vec<Option<Digest>> {
    (0..allocator.pool_count()).map(|pool| allocator.digest(PoolId(pool)).ok()).collect()
}

/// Carries the ops from `first` on out.
fn go_on<L: Lock>(
    allocator: &Allocator<&SimBackend, L>,
    program: &Program,
    replay: &mut Replay<'_, &SimBackend, L>,
    work: &mut DeviceWork<'_>,
    first: usize,
) -> Future {
    let mut future = Vec::new();
    for op in &program.ops()[first..] {
        let result = replay.step(op);
        work.submit(op, &result);
        future.push((outcome(result), allocator.stats().reserved_bytes.current));
    }
    allocator.check().expect("sound");
    future
}

/// A rank restarts after `checkpoint` and goes on.
fn restarted<L: Lock>(scenario: &Scenario, checkpoint: &Checkpoint, seed: u64) -> (Future, Vec<Option<Digest>>) {
    let device = scenario.device_builder(seed).rank(9).delays(Delays::UntilSynchronized).build();
    let (future, digests) = {
        let allocator = Allocator::<_, L>::new(&device, scenario.config.clone()).expect("valid");
        let mut work = DeviceWork::new(&device);
        let adopt = |id, stream, allocation| work.adopt(id, stream, allocation);
        let mut replay = checkpoint.resume(&allocator, &scenario.program, adopt);
        allocator.check().expect("sound");
        let again = Checkpoint::take(checkpoint.op, &allocator, &scenario.program, &replay);
        assert_eq!(&again, checkpoint, "what was restored is what was saved");
        let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
        (future, digests(&allocator))
    };
    assert!(device.leaks().is_empty(), "left behind: {}", device.leaks());
    (future, digests)
}

#[test]
fn a_restarted_rank_has_the_same_future() {
    let (mut live, mut holes, mut heaps) = (0, 0, 0);
    for seed in 0..400 {
        let scenario = Scenario::from_seed(seed, 140).with_layouts();
        let _report = PrintOnPanic(&scenario);
        let at = SplitMix64::new(seed).below(scenario.program.ops().len() as u64) as usize;
        let device = scenario.device(seed);
        let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
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

/// The scenario in the default pool alone: what is done with other pools is done there.
fn in_one_pool(scenario: &Scenario) -> Scenario {
    let ops = scenario.ops().filter_map(|(op, access)| match op {
        Op::CreatePool { .. } | Op::DestroyPool { .. } => None,
        Op::Allocate { id, stream, size_bytes, .. } => {
            Some((Op::Allocate { id, pool: POOL, stream, size_bytes }, access))
        }
        Op::Reserve { stream, size_bytes, .. } => Some((Op::Reserve { pool: POOL, stream, size_bytes }, access)),
        Op::Trim { .. } => Some((Op::Trim { pool: Some(POOL) }, access)),
        other => Some((other, access)),
    });
    Scenario::new(scenario.config.clone(), scenario.granularity_bytes, ops)
}

/// The state that a refused restore must leave alone.
fn state<L: Lock>(allocator: &Allocator<&SimBackend, L>) -> impl PartialEq + std::fmt::Debug + use<L> {
    allocator.check().expect("sound");
    (allocator.snapshot(), allocator.stats(), digests(allocator))
}

/// Allocates, uses and frees at random, and frees what it made. Some of `live` is freed as well.
fn stray(
    allocator: &Allocator<&SimBackend>,
    work: &mut DeviceWork<'_>,
    live: &mut Vec<(AllocationId, symmalloc_core::Handle)>,
    random: &mut SplitMix64,
) {
    let streams = u64::from(allocator.stream_count());
    let mut made = Vec::new();
    for step in 0..random.below(60) {
        let stream = StreamId(random.below(streams) as u16);
        match random.below(4) {
            0 | 1 => {
                let id = AllocationId(1_000_000 + step);
                let size_bytes = [512, 100_000, MIB, 3 * MIB, 17 * MIB][random.below(5) as usize];
                let op = Op::Allocate { id, pool: POOL, stream, size_bytes };
                if let Ok(allocation) = allocator.allocate(POOL, stream, size_bytes) {
                    work.submit(&op, &Ok(Some(allocation)));
                    made.push((id, allocation.handle));
                }
            }
            2 => {
                let from = if random.below(2) == 0 || made.is_empty() { &mut *live } else { &mut made };
                if let Some(at) = random.below(from.len() as u64 + 1).checked_sub(1) {
                    let (id, handle) = from.swap_remove(at as usize);
                    allocator.free(handle).expect("no faults");
                    work.submit(&Op::Free { id }, &Ok(None));
                }
            }
            _ => {
                if let Some((id, handle)) = made.last().or(live.last()) {
                    allocator.record_use(*handle, stream).expect("live");
                    work.submit(&Op::RecordUse { id: *id, stream }, &Ok(None));
                }
            }
        }
    }
    for (id, handle) in made {
        allocator.free(handle).expect("no faults");
        work.submit(&Op::Free { id }, &Ok(None));
    }
}

#[test]
fn a_pool_goes_back_to_what_it_was_and_has_the_same_future_again() {
    let (mut rewound, mut gone, mut carved, mut kept) = (0, 0, 0, 0);
    for seed in 0..400 {
        let scenario = in_one_pool(&Scenario::from_seed(seed, 140).with_layouts());
        let _report = PrintOnPanic(&scenario);
        let program = &scenario.program;
        let mut random = SplitMix64::new(seed);
        let at = program.ops().len() / 3 + random.below(program.ops().len() as u64 / 3) as usize;
        let device = scenario.device(seed);
        {
            let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
            let mut replay = Replay::new(&allocator, program);
            let mut work = DeviceWork::new(&device);
            for op in &program.ops()[..at] {
                let result = replay.step(op);
                work.submit(op, &result);
            }
            let checkpoint = Checkpoint::take(at, &allocator, program, &replay);
            let (expected, ends) = restarted::<Exclusive>(&scenario, &checkpoint, seed);
            for _ in 0..3 {
                // Whatever happens in between, what the layout does not know is freed.
                let ids = checkpoint.live.iter().map(|(id, ..)| *id);
                let mut live: Vec<_> = ids.filter_map(|id| Some((id, replay.handle(id)?))).collect();
                live.retain(|(_, handle)| allocator.allocation(*handle).is_ok());
                stray(&allocator, &mut work, &mut live, &mut random);
                let before = state(&allocator);
                if let Err(error) = allocator.restore_layout(POOL, &checkpoint.layout(POOL)) {
                    // Memory went back at a limit, at a threshold, or by a trim.
                    assert!(matches!(error, RestoreError::Gone { .. }), "seed {seed}: {error}");
                    assert_eq!(state(&allocator), before, "seed {seed}: a refused restore changes nothing");
                    gone += 1;
                    break;
                }
                replay = Replay::new(&allocator, program);
                let still: BTreeSet<_> = live.iter().map(|(id, _)| *id).collect();
                // To restore once more changes nothing, and gives the handles.
                checkpoint.restore_pool(POOL, &allocator, &mut replay, |id, stream, allocation| {
                    if still.contains(&id) {
                        kept += 1;
                    } else {
                        work.adopt(id, stream, allocation);
                        carved += 1;
                    }
                });
                for (id, handle) in &live {
                    assert_eq!(replay.handle(*id), Some(*handle), "a handle that was live all the time is good");
                }
                let future = go_on(&allocator, program, &mut replay, &mut work, at);
                assert_eq!((future, digests(&allocator)), (expected.clone(), ends.clone()), "seed {seed}, op {at}");
                rewound += 1;
                free_what_was_made_since(&allocator, program, &replay, &mut work, at);
            }
        }
        assert!(device.leaks().is_empty(), "seed {seed}, left behind: {}", device.leaks());
    }
    assert!(rewound > 300 && gone > 50, "{rewound} went back, {gone} could not");
    assert!(carved > 1000 && kept > 1000, "{carved} carved, {kept} kept");
}

fn free_what_was_made_since(
    allocator: &Allocator<&SimBackend>,
    program: &Program,
    replay: &Replay<'_, &SimBackend, Exclusive>,
    work: &mut DeviceWork<'_>,
    at: usize,
) {
    for op in &program.ops()[at..] {
        let Op::Allocate { id, .. } = *op else { continue };
        if let Some(handle) = replay.handle(id) {
            allocator.free(handle).expect("no faults");
            work.submit(&Op::Free { id }, &Ok(None));
        }
    }
}

/// A run of the scenario's first part, and where it is then.
fn first_part<'a, 'd>(
    scenario: &'a Scenario,
    allocator: &'a Allocator<&'d SimBackend>,
    work: &mut DeviceWork<'_>,
) -> (Replay<'a, &'d SimBackend, Exclusive>, Checkpoint) {
    let at = scenario.program.ops().len() / 2;
    let mut replay = Replay::new(allocator, &scenario.program);
    for op in &scenario.program.ops()[..at] {
        let result = replay.step(op);
        work.submit(op, &result);
    }
    let checkpoint = Checkpoint::take(at, allocator, &scenario.program, &replay);
    (replay, checkpoint)
}

/// From now on, the driver refuses the call that comes after `calls` others.
fn refuse_after(device: &SimBackend, calls: u64) {
    let ordinal = device.calls().fallible() + calls;
    device.inject(None, FaultRule::At { ordinal }, Fault::Refused);
}

#[test]
fn a_rejoin_that_the_driver_refuses_leaves_the_pool_fresh() {
    let (mut refused, mut kept) = (0, 0);
    for seed in 0..80 {
        let scenario = in_one_pool(&Scenario::from_seed(seed, 60).with_layouts());
        let _report = PrintOnPanic(&scenario);
        let device = scenario.device(seed);
        let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
        let (_, checkpoint) = first_part(&scenario, &allocator, &mut DeviceWork::new(&device));
        let expected = restarted::<Exclusive>(&scenario, &checkpoint, seed);
        let layout = checkpoint.layout(POOL);
        for calls in 0.. {
            let device = scenario.device(seed + 1);
            {
                let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
                for _ in 0..4 {
                    allocator.register_stream().expect("few");
                }
                let fresh = digests(&allocator);
                refuse_after(&device, calls);
                if calls % 2 == 1 {
                    // Nor does it take anything back.
                    device.inject(Some(Call::Unmap), FaultRule::Every { calls: 1 }, Fault::Refused);
                }
                match allocator.restore_layout(POOL, &layout) {
                    Ok(_) => break,
                    Err(RestoreError::Backend(_)) => refused += 1,
                    Err(error) => panic!("seed {seed}: {error}"),
                }
                allocator.check().expect("sound");
                assert_eq!(digests(&allocator), fresh);
                let stats = allocator.stats();
                assert_eq!((stats.segment_count, stats.usage.all.allocations.current), (0, 0));
                assert_eq!(stats.reserved_bytes.current, device.mapped_bytes());
                assert_eq!(stats.retired_bytes, device.mapped_bytes(), "what the driver kept is known");
                assert!(calls % 2 == 1 || device.mapped_bytes() == 0, "seed {seed}: everything is given back");
                kept += u64::from(device.mapped_bytes() > 0);
                device.heal();
                if calls % 4 == 1 {
                    let kept_bytes = device.mapped_bytes();
                    assert_eq!(allocator.trim(None), Ok(kept_bytes), "a trim takes back what the driver kept");
                    assert_eq!((device.mapped_bytes(), digests(&allocator)), (0, fresh));
                }
                let mut work = DeviceWork::new(&device);
                let adopt = |id, stream, allocation| work.adopt(id, stream, allocation);
                let mut replay = checkpoint.resume(&allocator, &scenario.program, adopt);
                let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
                assert_eq!((future, digests(&allocator)), expected, "seed {seed}, call {calls}");
            }
            assert!(device.leaks().is_empty(), "seed {seed}, call {calls}, left behind: {}", device.leaks());
        }
    }
    assert!(refused > 200 && kept > 50, "{refused} refused, {kept} with memory that the driver kept");
}

#[test]
fn a_rewind_that_the_driver_refuses_can_be_made_again() {
    let mut kinds = BTreeSet::new();
    for seed in 0..80 {
        let scenario = in_one_pool(&Scenario::from_seed(seed, 60).with_layouts());
        let _report = PrintOnPanic(&scenario);
        for calls in 0.. {
            let device = scenario.device(seed);
            {
                let allocator: Allocator<_> = Allocator::new(&device, scenario.config.clone()).expect("valid");
                let mut work = DeviceWork::new(&device);
                let (mut replay, checkpoint) = first_part(&scenario, &allocator, &mut work);
                let ids = checkpoint.live.iter().map(|(id, ..)| *id);
                let mut live: Vec<_> = ids.filter_map(|id| Some((id, replay.handle(id)?))).collect();
                live.retain(|(_, handle)| allocator.allocation(*handle).is_ok());
                stray(&allocator, &mut work, &mut live, &mut SplitMix64::new(seed));
                let layout = checkpoint.layout(POOL);
                refuse_after(&device, calls);
                match allocator.restore_layout(POOL, &layout) {
                    Err(RestoreError::Backend(_)) => kinds.insert(("backend", seed)),
                    Err(RestoreError::Fence { .. }) => kinds.insert(("fence", seed)),
                    Ok(_) | Err(RestoreError::Gone { .. }) => break,
                    Err(error) => panic!("seed {seed}: {error}"),
                };
                allocator.check().expect("sound");
                device.heal();
                replay = Replay::new(&allocator, &scenario.program);
                let still: BTreeSet<_> = live.iter().map(|(id, _)| *id).collect();
                checkpoint.restore_pool(POOL, &allocator, &mut replay, |id, stream, allocation| {
                    if !still.contains(&id) {
                        work.adopt(id, stream, allocation);
                    }
                });
                let future = go_on(&allocator, &scenario.program, &mut replay, &mut work, checkpoint.op);
                let expected = restarted::<Exclusive>(&scenario, &checkpoint, seed);
                assert_eq!((future, digests(&allocator)), expected, "seed {seed}, call {calls}");
            }
            assert!(device.leaks().is_empty(), "seed {seed}, call {calls}, left behind: {}", device.leaks());
        }
    }
    let count = |kind| kinds.iter().filter(|(of, _)| *of == kind).count();
    assert!(count("backend") > 20 && count("fence") > 5, "{kinds:?}");
}

fn pool(segments: &str) -> PoolConfig {
    segments.parse().expect("valid")
}

fn rank<'a>(device: &'a SimBackend, pool: &PoolConfig, limit_bytes: Option<u64>) -> Allocator<&'a SimBackend> {
    let config = Config::builder().default_pool(pool.clone()).limit_bytes(limit_bytes).build().expect("valid");
    let allocator = Allocator::new(device, config).expect("valid");
    allocator.register_stream().expect("the first");
    allocator.register_stream().expect("the second");
    allocator
}

/// Expects a refusal, and that nothing changed.
fn refusal(allocator: &Allocator<&SimBackend>, pool: PoolId, layout: &Layout) -> RestoreError {
    let before = state(allocator);
    let error = allocator.restore_layout(pool, layout).expect_err("it does not fit");
    assert_eq!(state(allocator), before, "{error}");
    error
}

#[test]
fn a_layout_fits_only_where_everything_that_decides_is_the_same() {
    let device = SimBackend::builder().build();
    let policy = pool("streams:shared");
    let old = rank(&device, &policy, None);
    let made = old.allocate(POOL, S0, MIB).expect("fits");
    old.record_use(made.handle, S1).expect("live");
    let layout = old.save_layout(POOL).expect("nothing is retired");

    let error = refusal(&rank(&device, &pool("streams:separate"), None), POOL, &layout);
    assert!(matches!(error, RestoreError::Config { .. }), "{error}");
    let other = SimBackend::builder().granularity_bytes(4 * MIB).build();
    let error = refusal(&rank(&other, &policy, None), POOL, &layout);
    assert_eq!(
        error,
        RestoreError::Input { key: "granularity", saved_bytes: Some(2 * MIB), here_bytes: Some(4 * MIB) }
    );
    let error = refusal(&rank(&device, &policy, Some(9)), POOL, &layout);
    assert_eq!(error, RestoreError::Input { key: "total_limit", saved_bytes: None, here_bytes: Some(9) });
    let error = refusal(&rank(&device, &policy, None), PoolId(1), &layout);
    assert!(matches!(error, RestoreError::Unknown(_)), "{error}");
    let config = Config::builder().default_pool(policy).build().expect("valid");
    let one_stream: Allocator<_> = Allocator::new(&device, config).expect("valid");
    one_stream.register_stream().expect("the first");
    let error = refusal(&one_stream, POOL, &layout);
    assert_eq!(error.to_string(), "s1 is unknown; 1 streams are registered: call register_stream first");
}

#[test]
fn pools_are_restored_within_the_limit_over_all_of_them() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, Some(32 * MIB));
    old.allocate(POOL, S0, 20 * MIB).expect("fits");
    let layout = old.save_layout(POOL).expect("nothing is retired");
    let new = rank(&device, &policy, Some(32 * MIB));
    let private = new.create_pool(policy).expect("valid");
    let made = new.allocate(private, S0, 14 * MIB).expect("fits");
    let error = refusal(&new, POOL, &layout);
    let (scope, limit_bytes) = (LimitScope::Allocator, 32 * MIB);
    assert_eq!(
        error,
        RestoreError::Limit { needed_bytes: 20 * MIB, cause: OutOfMemoryCause::Limit { scope, limit_bytes } }
    );
    new.free(made.handle).expect("live");
    new.trim(Some(private)).expect("no faults");
    new.restore_layout(POOL, &layout).expect("there is room now");
}

#[test]
fn a_live_allocation_that_the_layout_does_not_know_is_named() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let saved = allocator.allocate(POOL, S0, MIB).expect("fits");
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    let late = allocator.allocate_named(POOL, S1, 100, "late").expect("fits");
    let error = refusal(&allocator, POOL, &layout);
    let unknown = |stream, placement, requested_bytes, name: Option<&str>| {
        (POOL, stream, placement, requested_bytes, name.map(Into::into))
    };
    let found = |error| match error {
        RestoreError::UnknownLive { pool, stream, placement, requested_bytes, name, .. } => {
            (pool, stream, placement, requested_bytes, name)
        }
        error => panic!("{error}"),
    };
    assert!(error.to_string().contains("\"late\""), "{error}");
    assert_eq!(found(error), unknown(S1, late.placement, 100, Some("late")));
    allocator.free(late.handle).expect("live");

    // Another one at the same place is not the saved one.
    allocator.free(saved.handle).expect("live");
    let other = allocator.allocate(POOL, S0, MIB - 1).expect("fits");
    assert_eq!(other.placement, saved.placement);
    assert_eq!(found(refusal(&allocator, POOL, &layout)), unknown(S0, other.placement, MIB - 1, None));
    allocator.free(other.handle).expect("live");
    let restored = allocator.restore_layout(POOL, &layout).expect("it fits");
    let found = restored.find(S0, saved.placement).expect("it was live").allocation;
    assert_eq!((found.placement, found.address, found.size_bytes), (saved.placement, saved.address, MIB));
    assert_eq!(allocator.save_layout(POOL), Ok(layout));
    assert!(allocator.free(saved.handle).is_err(), "the old handle stays stale");
    allocator.free(found.handle).expect("live");
}

#[test]
fn memory_that_went_back_cannot_be_restored() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let made: Vec<Allocation> = (0..4).map(|_| allocator.allocate(POOL, S0, 2 * MIB).expect("fits")).collect();
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    let gone = |offset_bytes, size_bytes| RestoreError::Gone {
        pool: POOL,
        stream: Some(S0),
        segment: SegmentId(0),
        offset_bytes,
        size_bytes,
    };
    // A hole, then the end, then all of it.
    for (freed, offset_bytes, size_bytes) in
        [(1, 2 * MIB, 2 * MIB), (3, 2 * MIB, 2 * MIB), (0, 0, 4 * MIB), (2, 0, 8 * MIB)]
    {
        allocator.free(made[freed].handle).expect("live");
        allocator.trim(None).expect("no faults");
        assert_eq!(refusal(&allocator, POOL, &layout), gone(offset_bytes, size_bytes));
    }
    let fresh = rank(&device, &PoolConfig::default(), None);
    fresh.allocate(POOL, S1, 1).expect("fits");
    assert_eq!(refusal(&fresh, POOL, &layout), gone(0, 8 * MIB), "a pool with a history of its own does not rejoin");
}

#[test]
fn a_hole_that_was_filled_since_is_a_hole_again() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let made: Vec<Allocation> = (0..3).map(|_| allocator.allocate(POOL, S0, 4 * MIB).expect("fits")).collect();
    allocator.free(made[1].handle).expect("live");
    allocator.trim(None).expect("no faults");
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    let future = || {
        let made = [MIB, 3 * MIB, 5 * MIB].map(|size_bytes| allocator.allocate(POOL, S0, size_bytes).expect("fits"));
        let used = device.submit(S0, made[0].address, made[0].size_bytes);
        used.expect("ordered");
        let placements = made.map(|made| made.placement);
        made.iter().for_each(|made| allocator.free(made.handle).expect("live"));
        (placements, device.mapped_bytes(), allocator.digest(POOL))
    };
    let first = future();
    allocator.restore_layout(POOL, &layout).expect("nothing went back");
    assert_eq!((device.mapped_bytes(), allocator.save_layout(POOL)), (8 * MIB, Ok(layout)));
    assert_eq!(future(), first);
    allocator.check().expect("sound");
}

#[test]
fn an_observer_keeps_a_pool_from_going_back_over_births_and_growth() {
    for segments in ["segments:expandable", "segments:fixed"] {
        let device = SimBackend::builder().build();
        let allocator = rank(&device, &pool(segments), None);
        let empty = allocator.save_layout(POOL).expect("nothing is retired");
        let first = allocator.allocate(POOL, S0, 20 * MIB).expect("fits");
        let layout = allocator.save_layout(POOL).expect("nothing is retired");
        let (observer, _) = allocator.observe(POOL).expect("exists");
        allocator.free(first.handle).expect("live");
        let again =
            allocator.restore_layout(POOL, &layout).expect("no memory comes or goes").allocations().next().cloned();
        assert!(allocator.unread(observer).events.is_empty());

        let more = allocator.allocate(POOL, S0, 30 * MIB).expect("fits");
        allocator.free(more.handle).expect("live");
        let segment = SegmentId(more.placement.segment.0);
        let observed = RestoreError::Observed { pool: POOL, stream: Some(S0), segment, observers: 1 };
        assert_eq!(refusal(&allocator, POOL, &layout), observed);

        // Dead segments that an observer holds count towards the limits.
        allocator.free(again.expect("it is live").allocation.handle).expect("live");
        allocator.trim(None).expect("no faults");
        let retired_bytes = 50 * MIB;
        assert_eq!(allocator.save_layout(POOL), Err(LayoutError::Retired { pool: POOL, retired_bytes }));
        assert_eq!(
            refusal(&allocator, POOL, &empty),
            RestoreError::State(LayoutError::Retired { pool: POOL, retired_bytes })
        );
        allocator.forget(observer).expect("no faults");
        allocator.restore_layout(POOL, &empty).expect("nothing was there");
        assert_eq!(allocator.save_layout(POOL), Ok(empty));
    }
}

#[test]
fn observers_of_a_pool_that_rejoins_are_told_of_its_segments() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, None);
    let made: Vec<Allocation> = (0..3).map(|_| old.allocate(POOL, S0, 2 * MIB).expect("fits")).collect();
    old.free(made[1].handle).expect("live");
    old.trim(None).expect("no faults");
    let layout = old.save_layout(POOL).expect("nothing is retired");
    let new = rank(&device, &policy, None);
    let (observer, births) = new.observe(POOL).expect("exists");
    assert!(births.is_empty());
    new.restore_layout(POOL, &layout).expect("fresh");
    let told: Vec<_> =
        new.unread(observer).events.iter().map(|event| (event.kind, event.offset_bytes, event.size_bytes)).collect();
    let expected = [(SegmentEventKind::Birth, 0, 2 * MIB), (SegmentEventKind::Growth, 4 * MIB, 2 * MIB)];
    assert_eq!(told, expected);
}

#[test]
fn the_text_names_what_is_live_and_allocations_of_nothing_can_still_be_freed() {
    let device = SimBackend::builder().build();
    let policy = pool("streams:shared,limit_mb:64");
    let old = rank(&device, &policy, Some(100 * MIB));
    let weights = old.allocate_named(POOL, S0, 3 * MIB, "weights \"0\"").expect("fits");
    old.record_use(weights.handle, S1).expect("live");
    let nothing = old.allocate(POOL, S1, 0).expect("takes no memory");
    let text = symmalloc_trace::layout::to_text(&old.save_layout(POOL).expect("nothing is retired"));
    let digest = old.heap_digests(POOL).expect("exists")[0].1;
    let expected = format!(
        "symmalloc-layout 1\n\
         pool segments:expandable,range_mb:524288,growth_mb:2,streams:shared,symmetric:false,limit_mb:64,reclaim:heap\n\
         granularity 2097152\n\
         total_limit 104857600\n\
         heap shared 4 {digest} 1\n\
         segment 0 large\n\
         memory 0 4194304\n\
         a 0 3145728 3145728 s0 \"weights \\\"0\\\"\"\n\
         u s1\n\
         end 8\n"
    );
    assert_eq!(text, expected);

    let new = rank(&device, &policy, Some(100 * MIB));
    let restored = new.restore_layout(POOL, &symmalloc_trace::layout::parse(&text).expect("a layout")).expect("fresh");
    old.free(nothing.handle).expect("live");
    new.free(restored.nothing(S1).expect("its heap has a history")).expect("it stands for them");
    assert_eq!(new.digest(POOL), old.digest(POOL));
    assert_eq!(restored.allocations().next().expect("one is live").name.as_deref(), Some("weights \"0\""));
    assert_eq!(restored.find(S1, Placement::NOWHERE), None);
}

#[test]
fn a_recorded_job_that_restarts_in_its_middle_comes_to_the_same_digest() {
    let golden = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/jobs.txt")).expect("is there");
    let golden = |job: &str, segments: &str| {
        let row = golden.lines().find(|row| row.starts_with(&format!("{job:<20} {segments:<10} separate")));
        row.expect("the job is there").split_whitespace().last().expect("a digest").to_owned()
    };
    for job in ["llama_generate", "gpt2_train_varlen", "fsdp1_train_rank0"] {
        let program = jobs::program(job);
        for segments in ["expandable", "fixed"] {
            let policy = pool(&format!("segments:{segments}"));
            let config = Config::builder().default_pool(policy).build().expect("valid");
            let rank = |rank| {
                let device = SimBackend::builder().seed(1).rank(rank).build();
                Allocator::<_>::new(device, config.clone()).expect("valid")
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
            new.check().expect("sound");
            assert_eq!(new.digest(POOL).expect("exists").to_string(), golden(job, segments), "{job}, {segments}");
        }
    }
}

#[test]
fn a_name_that_no_line_can_hold_is_cut_between_characters() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    allocator.allocate_named(POOL, S0, 1, &"\u{1f600}x".repeat(1000)).expect("fits");
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    let name = layout.heaps()[0].segments[0].allocations[0].name.clone().expect("it is named");
    assert_eq!((name.len(), &name[4090..]), (4095, "\u{1f600}x"));
    assert_eq!(symmalloc_trace::layout::parse(&symmalloc_trace::layout::to_text(&layout)).expect("a layout"), layout);
}

/// Where an allocation without a name was, one with a name is by now: it takes the saved one's place, and has no name then.
#[test]
fn a_rewind_takes_back_names_that_were_given_later() {
    let device = SimBackend::builder().build();
    let allocator = rank(&device, &PoolConfig::default(), None);
    let saved = allocator.allocate(POOL, S0, MIB).expect("fits");
    let named = allocator.allocate_named(POOL, S0, MIB, "weights").expect("fits");
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    allocator.free(saved.handle).expect("live");
    allocator.free(named.handle).expect("live");
    let later = allocator.allocate_named(POOL, S0, MIB, "later").expect("fits");
    let unnamed = allocator.allocate(POOL, S0, MIB).expect("fits");
    assert_eq!([later.placement, unnamed.placement], [saved.placement, named.placement]);
    let restored = allocator.restore_layout(POOL, &layout).expect("all of it is there");
    let names: Vec<_> = restored.allocations().map(|restored| restored.name.as_deref()).collect();
    assert_eq!(names, [None, Some("weights")]);
    assert_eq!(allocator.save_layout(POOL), Ok(layout));
    assert!(!allocator.leak_report().to_string().contains("later"));
}

/// Rule D5: memory goes back in (stream, sequence) order, in a rewind as well.
#[test]
fn a_rewind_gives_surplus_segments_back_in_the_order_of_their_birth() {
    let device = SimBackend::builder().build();
    let unmapped = RefCell::new(Vec::new());
    let log = |call| {
        if let DeviceCall::Unmap { size_bytes, .. } = call {
            unmapped.borrow_mut().push(size_bytes / MIB);
        }
    };
    let config = Config::builder().default_pool(pool("segments:fixed")).build().expect("valid");
    let allocator: Allocator<_> = Allocator::new(Hooked { inner: &device, hook: log }, config).expect("valid");
    let streams = [(); 2].map(|()| allocator.register_stream().expect("few"));
    allocator.allocate(POOL, S0, 20 * MIB).expect("fits");
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    // Born in an order that is neither that of their streams nor of their sizes; freed in yet another one.
    let sizes = [(1, 30), (0, 28), (0, 40), (1, 24), (0, 26)];
    let made = sizes.map(|(stream, mib)| allocator.allocate(POOL, streams[stream], mib * MIB).expect("fits"));
    for index in [3, 0, 4, 2, 1] {
        allocator.free(made[index].handle).expect("live");
    }
    allocator.restore_layout(POOL, &layout).expect("all of it is there");
    assert_eq!(*unmapped.borrow(), [28, 40, 26, 30, 24]);
}

/// Restored allocations are found by address, and those that the layout lacks are not.
#[test]
fn what_is_restored_is_found_by_its_address() {
    let device = SimBackend::builder().build();
    let config = Config::builder().pointer_lookup(PointerLookup::Exact).build().expect("valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("valid");
    allocator.register_stream().expect("few");
    allocator.register_stream().expect("few");
    let saved = [(); 2].map(|()| allocator.allocate(POOL, S0, MIB).expect("fits"));
    let layout = allocator.save_layout(POOL).expect("nothing is retired");
    allocator.record_use_at(saved[0].address, S1).expect("live");
    allocator.free_at(saved[0].address).expect("live");
    let small = allocator.allocate(POOL, S0, 512).expect("fits");
    assert_eq!(small.address, saved[0].address);
    allocator.free_at(small.address).expect("live");
    let restored = allocator.restore_layout(POOL, &layout).expect("all of it is there");
    for again in restored.allocations() {
        assert_eq!(allocator.handle_at(again.allocation.address), Ok(again.allocation.handle));
        allocator.free_at(again.allocation.address).expect("live again");
    }
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
}

/// When the second heap of a pool does not fit, the first one's memory is not set aside any more.
#[test]
fn a_rejoin_that_meets_the_limit_at_a_later_heap_charges_nothing() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, Some(32 * MIB));
    for stream in [S0, S1] {
        old.allocate(POOL, stream, 10 * MIB).expect("fits");
    }
    let layout = old.save_layout(POOL).expect("nothing is retired");
    let new = rank(&device, &policy, Some(32 * MIB));
    let private = new.create_pool(policy).expect("valid");
    new.allocate(private, S0, 20 * MIB).expect("fits");
    let error = refusal(&new, POOL, &layout);
    assert!(matches!(error, RestoreError::Limit { .. }), "{error}");
    new.check().expect("sound");
    assert_eq!(new.stats().reserved_bytes.current, 20 * MIB);
}

/// The peak over all heaps, counted in the end to the same value as if nothing had been restored.
#[test]
fn what_a_restore_makes_live_counts_in_the_peak_over_all_heaps() {
    let device = SimBackend::builder().build();
    let policy = PoolConfig::default();
    let old = rank(&device, &policy, None);
    let handles = [S0, S1].map(|stream| old.allocate(POOL, stream, 10 * MIB).expect("fits").handle);
    let layout = old.save_layout(POOL).expect("nothing is retired");
    handles.into_iter().for_each(|handle| old.free(handle).expect("live"));
    old.restore_layout(POOL, &layout).expect("all of it is there");
    let new = rank(&device, &policy, None);
    new.restore_layout(POOL, &layout).expect("a fresh pool");
    for allocator in [old, new] {
        for (mib, peak) in [(5, 25), (7, 32)] {
            allocator.allocate(POOL, S0, mib * MIB).expect("fits");
            let usage = allocator.stats().usage.all;
            assert_eq!((usage.allocated_bytes.current, usage.allocated_bytes.peak), (peak * MIB, peak * MIB));
            assert_eq!(usage.allocations.current, usage.allocations.peak);
        }
        allocator.check().expect("sound");
    }
}

/// A rejoin obtains what a saved segment had, piece by piece between its holes: each is a time that memory was obtained.
#[test]
fn memory_that_a_rejoin_obtains_counts_as_growth() {
    for segments in ["segments:expandable", "segments:fixed"] {
        let policy = pool(segments);
        let device = SimBackend::builder().build();
        let old = rank(&device, &policy, None);
        let made = [4, 12, 4, 12, 4].map(|mib| old.allocate(POOL, S0, mib * MIB).expect("fits"));
        old.allocate(POOL, S1, 30 * MIB).expect("fits");
        old.free(made[1].handle).expect("live");
        old.free(made[3].handle).expect("live");
        old.trim(None).expect("no faults");
        let layout = old.save_layout(POOL).expect("nothing is retired");

        let device = SimBackend::builder().build();
        let new = rank(&device, &policy, None);
        let growths = || {
            let heaps = [S0, S1].map(|stream| new.heap_stats(POOL, stream).expect("a pool").growth_count);
            assert_eq!(new.pool_stats(POOL).expect("a pool").growth_count, heaps[0] + heaps[1], "{segments}");
            assert_eq!(new.stats().growth_count, device.calls().of(Call::Map), "{segments}: over all pools");
            heaps
        };
        new.restore_layout(POOL, &layout).expect("fresh");
        let rejoined = growths();
        assert_eq!(rejoined, if segments.ends_with("expandable") { [3, 1] } else { [2, 1] });
        new.restore_layout(POOL, &layout).expect("it is there");
        assert_eq!(growths(), rejoined, "{segments}: nothing was obtained");
        new.allocate(POOL, S1, 50 * MIB).expect("fits");
        assert_eq!(growths(), [rejoined[0], rejoined[1] + 1], "{segments}");
    }
}
