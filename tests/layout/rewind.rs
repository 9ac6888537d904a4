//! Rewinds: a pool returns to an earlier state.

use super::{
    POOL, S0, S1, digests, first_part, go_on, in_one_pool, pool, rank, refusal, refuse_after, restarted, state,
};
use std::cell::RefCell;
use std::collections::BTreeSet;
use symmalloc_core::config::{Config, PointerLookup, PoolConfig};
use symmalloc_core::lock::Exclusive;
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocation, AllocationId, Allocator, Op, SegmentId, StreamId};
use symmalloc_harness::checker::{DeviceWork, PrintOnPanic};
use symmalloc_harness::generate::Scenario;
use symmalloc_harness::hooked::{DeviceCall, Hooked};
use symmalloc_harness::restart::Checkpoint;
use symmalloc_sim::{SimBackend, SplitMix64};
use symmalloc_trace::replay::{Program, Replay};

/// Allocates, uses and frees at random, then frees its own allocations. Also frees some of `live`.
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
                // Allocations that the layout does not contain are freed, no matter what happens in between.
                let ids = checkpoint.live.iter().map(|(id, ..)| *id);
                let mut live: Vec<_> = ids.filter_map(|id| Some((id, replay.handle(id)?))).collect();
                live.retain(|(_, handle)| allocator.allocation(*handle).is_ok());
                stray(&allocator, &mut work, &mut live, &mut random);
                let before = state(&allocator);
                if let Err(error) = allocator.restore_layout(POOL, &checkpoint.layout(POOL)) {
                    // A limit, a threshold or a trim released memory.
                    assert!(matches!(error, RestoreError::Gone { .. }), "seed {seed}: {error}");
                    assert_eq!(state(&allocator), before, "seed {seed}: a rejected restore changes nothing");
                    gone += 1;
                    break;
                }
                replay = Replay::new(&allocator, program);
                let still: BTreeSet<_> = live.iter().map(|(id, _)| *id).collect();
                // Another restore changes nothing, and returns the handles.
                checkpoint.restore_pool(POOL, &allocator, &mut replay, |id, stream, allocation| {
                    if still.contains(&id) {
                        kept += 1;
                    } else {
                        work.adopt(id, stream, allocation);
                        carved += 1;
                    }
                });
                for (id, handle) in &live {
                    assert_eq!(replay.handle(*id), Some(*handle), "handles of live allocations stay valid");
                }
                let future = go_on(&allocator, program, &mut replay, &mut work, at);
                assert_eq!((future, digests(&allocator)), (expected.clone(), ends.clone()), "seed {seed}, op {at}");
                rewound += 1;
                free_what_was_made_since(&allocator, program, &replay, &mut work, at);
            }
        }
        assert!(device.leaks().is_empty(), "seed {seed}, leaked: {}", device.leaks());
    }
    assert!(rewound > 300 && gone > 50, "{rewound} rewound, {gone} could not");
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
            assert!(device.leaks().is_empty(), "seed {seed}, call {calls}, leaked: {}", device.leaks());
        }
    }
    let count = |kind| kinds.iter().filter(|(of, _)| *of == kind).count();
    assert!(count("backend") > 20 && count("fence") > 5, "{kinds:?}");
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

    // Another allocation at the same placement is not the saved one.
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
    // First a hole, then the end, then all of it.
    for (freed, offset_bytes, size_bytes) in
        [(1, 2 * MIB, 2 * MIB), (3, 2 * MIB, 2 * MIB), (0, 0, 4 * MIB), (2, 0, 8 * MIB)]
    {
        allocator.free(made[freed].handle).expect("live");
        allocator.trim(None).expect("no faults");
        assert_eq!(refusal(&allocator, POOL, &layout), gone(offset_bytes, size_bytes));
    }
    let fresh = rank(&device, &PoolConfig::default(), None);
    fresh.allocate(POOL, S1, 1).expect("fits");
    assert_eq!(refusal(&fresh, POOL, &layout), gone(0, 8 * MIB), "a pool that already has a history does not rejoin");
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
    allocator.restore_layout(POOL, &layout).expect("nothing was released");
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
        let again = allocator
            .restore_layout(POOL, &layout)
            .expect("no memory is obtained or released")
            .allocations()
            .next()
            .cloned();
        assert!(allocator.unread(observer).events.is_empty());

        let more = allocator.allocate(POOL, S0, 30 * MIB).expect("fits");
        allocator.free(more.handle).expect("live");
        let segment = SegmentId(more.placement.segment.0);
        let observed = RestoreError::Observed { pool: POOL, stream: Some(S0), segment, observers: 1 };
        assert_eq!(refusal(&allocator, POOL, &layout), observed);

        // Dead segments that an observer holds count toward the limits.
        allocator.free(again.expect("it is live").allocation.handle).expect("live");
        allocator.trim(None).expect("no faults");
        let retired_bytes = 50 * MIB;
        assert_eq!(allocator.save_layout(POOL), Err(LayoutError::Retired { pool: POOL, retired_bytes }));
        assert_eq!(
            refusal(&allocator, POOL, &empty),
            RestoreError::State(LayoutError::Retired { pool: POOL, retired_bytes })
        );
        allocator.forget(observer).expect("no faults");
        allocator.restore_layout(POOL, &empty).expect("the layout is empty");
        assert_eq!(allocator.save_layout(POOL), Ok(empty));
    }
}

/// A named allocation is at the placement of a saved unnamed one. It takes the role of the saved one, and loses its name.
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
    let restored = allocator.restore_layout(POOL, &layout).expect("the layout's memory still exists");
    let names: Vec<_> = restored.allocations().map(|restored| restored.name.as_deref()).collect();
    assert_eq!(names, [None, Some("weights")]);
    assert_eq!(allocator.save_layout(POOL), Ok(layout));
    assert!(!allocator.leak_report().to_string().contains("later"));
}

/// Rule D5: a rewind also releases memory in (stream, sequence) order.
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
    // Created in an order that is neither that of the streams nor of the sizes, and freed in another order.
    let sizes = [(1, 30), (0, 28), (0, 40), (1, 24), (0, 26)];
    let made = sizes.map(|(stream, mib)| allocator.allocate(POOL, streams[stream], mib * MIB).expect("fits"));
    for index in [3, 0, 4, 2, 1] {
        allocator.free(made[index].handle).expect("live");
    }
    allocator.restore_layout(POOL, &layout).expect("the layout's memory still exists");
    assert_eq!(*unmapped.borrow(), [28, 40, 26, 30, 24]);
}

/// Restored allocations are found by address; allocations that the layout lacks are not.
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
    let restored = allocator.restore_layout(POOL, &layout).expect("the layout's memory still exists");
    for again in restored.allocations() {
        assert_eq!(allocator.handle_at(again.allocation.address), Ok(again.allocation.handle));
        allocator.free_at(again.allocation.address).expect("live again");
    }
    assert_eq!(allocator.stats().usage.all.allocations.current, 0);
}
