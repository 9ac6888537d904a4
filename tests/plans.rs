//! Steps that follow plans: placements, the effect of a difference, and learning.

use proptest::prelude::*;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, PlanPolicy, PoolConfig};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::lock::Exclusive;
use symmalloc_core::plans::{DifferenceCause, Plan, PlanError, PlannedAllocation, SearchBudget, StepAllocation};
use symmalloc_core::restore::{LayoutError, RestoreError};
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, PoolId, Retry, StreamId};
use symmalloc_harness::steps::{StepScenario, run};
use symmalloc_harness::targets;
use symmalloc_sim::{Call, SimBackend, SplitMix64};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if symmalloc_harness::is_night() { 20_000 } else { 1_500 }))]

    /// Two ranks that share only the program place every step where the model expects it.
    #[test]
    fn planned_placements_equal_those_of_the_model_on_every_rank(bytes in prop::collection::vec(any::<u8>(), 4..180)) {
        targets::steps(&bytes);
    }
}

/// The generated steps are useful: plans are followed, left and learned, across streams and into the next step.
#[test]
fn generated_steps_follow_plans_and_deviate_from_them() {
    let (mut steps, mut followed, mut left, mut planned, mut learned) = (0, 0, 0, 0, 0);
    let mut random = SplitMix64::new(7);
    for _ in 0..300 {
        let length = 40 + random.next_u64() % 140;
        let bytes: Vec<u8> = (0..length).map(|_| random.next_u64() as u8).collect();
        let scenario = StepScenario::from_bytes(&bytes);
        let outcome = run::<Exclusive>(&scenario, &SimBackend::builder().seed(random.next_u64()).build());
        steps += outcome.reports.len();
        followed += outcome.reports.iter().filter(|report| report.planned > 0 && report.difference.is_none()).count();
        left += outcome.reports.iter().filter(|report| report.difference.is_some()).count();
        planned += outcome.reports.iter().map(|report| report.planned).sum::<u64>();
        learned += outcome.stats.learned;
    }
    println!("{steps} steps, {followed} followed, {left} left, {planned} planned, {learned} adopted");
    assert!(followed > steps / 4 && left > steps / 20 && planned > 3 * steps as u64 && learned > 100);
}

/// A restarted rank would have no open step, and would learn later than the others.
#[test]
fn a_pool_that_is_in_a_step_or_learns_has_no_layout_and_takes_none() {
    let device = SimBackend::builder().build();
    let pool = PoolConfig::builder().plan(PlanPolicy::Learn).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let pool = PoolId::DEFAULT;
    let before = allocator.save_layout(pool).expect("the pool has learned nothing");
    let is_refused = || {
        let saved = allocator.save_layout(pool);
        let restored = allocator.restore_layout(pool, &before);
        matches!(saved, Err(LayoutError::Planned { .. }))
            && matches!(restored, Err(RestoreError::State(LayoutError::Planned { .. })))
    };
    for _ in 0..3 {
        allocator.begin_step(pool, 0).expect("no step should be open");
        assert!(is_refused(), "in a step");
        let made = allocator.allocate(pool, stream, MIB).expect("memory should suffice");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.end_step(pool).expect("a step should be open");
        assert!(is_refused(), "the pool has run a step");
    }
    allocator.drop_plans(pool).expect("no step is open");
    allocator.save_layout(pool).expect("all is forgotten");
}

/// The memory of plans counts as in use from step to step, even if little is live in it. The free memory outside of it is below the
/// threshold.
#[test]
fn a_release_threshold_does_not_count_memory_of_plans() {
    let device = SimBackend::builder().build();
    let pool = PoolConfig::builder().plan(PlanPolicy::Learn).release_threshold_bytes(Some(8 * MIB));
    let config = Config::builder()
        .default_pool(pool.build().expect("the configuration should be valid"))
        .build()
        .expect("the configuration should be valid");
    let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let passes = |sizes: &[u64]| {
        for size_bytes in sizes {
            let made = allocator.allocate(PoolId::DEFAULT, stream, *size_bytes).expect("memory should suffice");
            allocator.free(made.handle).expect("the allocation should be live");
        }
    };
    let mut unmapped = Vec::new();
    for _ in 0..6 {
        allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
        passes(&[24 * MIB, 16 * MIB]);
        allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
        passes(&[3 * MIB]);
        unmapped.push(device.calls().of(Call::Unmap));
    }
    assert!(unmapped[0] > 0, "a learned step releases memory: {unmapped:?}");
    assert_eq!(unmapped[3..], [unmapped[2]; 3], "steps that follow their plan release none: {unmapped:?}");
}

/// The callback allocates in the same pool, on a stream that has no heap yet, and even runs a step. No lock is held during the callback.
#[test]
fn a_failure_callback_may_use_the_pool_whose_plan_has_no_memory() {
    let pool = PoolConfig::builder().limit_bytes(Some(160 * MIB)).build().expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator = Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
    let [planned, other] = [(); 2].map(|()| allocator.register_stream().expect("a stream id is available"));
    let _live = allocator.allocate(PoolId::DEFAULT, other, 64 * MIB - 512).expect("the allocation should fit");
    allocator.set_failure_callback(move |allocator, _| {
        let made = allocator.allocate(PoolId::DEFAULT, other, 512).expect("512 bytes fit");
        allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
        allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
        allocator.free(made.handle).expect("the allocation should be live");
        Retry::GiveUp
    });
    let wanted = StepAllocation { stream: planned, requested_bytes: 128 * MIB, until: Some(1) };
    let plan = Plan::new(0, StreamGroup::One(planned), vec![PlannedAllocation { wanted, offset_bytes: Some(0) }])
        .expect("it is one");
    let refused = allocator.adopt_plan(PoolId::DEFAULT, plan);
    assert!(matches!(refused, Err(PlanError::Memory(_))), "{refused:?}");
    assert!(allocator.plans(PoolId::DEFAULT).expect("the pool should exist").is_empty());
    assert_eq!(allocator.stats().usage.all.allocations.allocated, 2, "the callback ran once");
    allocator.check().expect("the state is consistent");
}

/// The second of two equal steps would be planned at its end, but the pool has other plans by then.
#[test]
fn a_plan_replaces_what_a_step_of_the_failure_callback_learns() {
    let pool = PoolConfig::builder()
        .limit_bytes(160 * MIB)
        .plan(PlanPolicy::Learn)
        .build()
        .expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator = Allocator::new(SimBackend::builder().build(), config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    let blocking = allocator.allocate(PoolId::DEFAULT, stream, 96 * MIB).expect("the allocation should fit");
    allocator.set_failure_callback(move |allocator, _| {
        for number in 0..2 {
            allocator.begin_step(PoolId::DEFAULT, 7).expect("no step should be open");
            let made = allocator.allocate(PoolId::DEFAULT, stream, 4 * MIB).expect("the allocation should fit");
            allocator.free(made.handle).expect("the allocation should be live");
            if number == 0 {
                allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
            }
        }
        allocator.free(blocking.handle).expect("the allocation should be live");
        Retry::Again
    });
    let wanted = StepAllocation { stream, requested_bytes: 128 * MIB, until: Some(1) };
    let plan = Plan::new(0, StreamGroup::One(stream), vec![PlannedAllocation { wanted, offset_bytes: Some(0) }]);
    allocator.adopt_plan(PoolId::DEFAULT, plan.expect("it is one")).expect("the callback made room");
    let report = allocator.end_step(PoolId::DEFAULT).expect("the callback left it open");
    assert_eq!((report.allocations, report.planned, report.difference), (1, 0, None));
    assert_eq!(allocator.plans(PoolId::DEFAULT).expect("the pool should exist").len(), 1);
    allocator.check().expect("the state is consistent");
}

/// A pool that rounds sizes to the device's granules plans with those sizes, both for learned and for adopted plans.
#[test]
fn plans_of_an_unsplit_pool_round_to_granules() {
    for learns in [PlanPolicy::Learn, PlanPolicy::Off] {
        let device = SimBackend::builder().build();
        let pool: PoolConfig = "segments:fixed,unsplit:true".parse().expect("the text should be valid");
        let pool = pool.to_builder().plan(learns).build().expect("the configuration should be valid");
        let config = Config::builder().default_pool(pool.clone()).build().expect("the configuration should be valid");
        let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        if learns == PlanPolicy::Off {
            let wanted = StepAllocation { stream, requested_bytes: 4096, until: Some(2) };
            let plan = Plan::solve(
                &pool,
                device.granularity_bytes(),
                StreamGroup::One(stream),
                0,
                &[wanted; 2],
                SearchBudget::default(),
            );
            allocator
                .adopt_plan(PoolId::DEFAULT, plan.expect("the plan should be valid"))
                .expect("its placements do not overlap");
        }
        let mut last = None;
        for _ in 0..4 {
            allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
            let made =
                [(); 2].map(|()| allocator.allocate(PoolId::DEFAULT, stream, 4096).expect("memory should suffice"));
            made.into_iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
            last = Some(allocator.end_step(PoolId::DEFAULT).expect("a step should be open"));
        }
        assert_eq!(last.expect("four steps").planned, 2, "{learns:?}");
        let plans = allocator.plans(PoolId::DEFAULT).expect("the pool should exist");
        assert_eq!(plans[0].memory_bytes(&pool, device.granularity_bytes()), 4 * MIB, "{learns:?}");
    }
}

/// Returns an allocator whose default pool has this policy, with one stream.
fn planned_pool(device: &SimBackend, policy: PlanPolicy, limit_bytes: u64) -> (Allocator<&SimBackend>, StreamId) {
    let pool = PoolConfig::builder()
        .plan(policy)
        .limit_bytes(Some(limit_bytes))
        .build()
        .expect("the configuration should be valid");
    let config = Config::builder().default_pool(pool).build().expect("the configuration should be valid");
    let allocator = Allocator::new(device, config).expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    (allocator, stream)
}

/// Returns a plan of one allocation.
fn plan_of_one(key: u64, stream: StreamId, requested_bytes: u64) -> Plan {
    let wanted = StepAllocation { stream, requested_bytes, until: Some(1) };
    Plan::new(key, StreamGroup::One(stream), vec![PlannedAllocation { wanted, offset_bytes: Some(0) }])
        .expect("it is valid")
}

/// Each step leaves an allocation to the next one, whose key may differ. While several keys have plans, their places exclude such
/// allocations, so no step finds its places occupied.
#[test]
fn plans_of_several_keys_do_not_overlap_allocations_that_stay_live() {
    let device = SimBackend::builder().build();
    let (allocator, stream) = planned_pool(&device, PlanPolicy::Learn, 512 * MIB);
    let mut left = None;
    let mut step = |key: u64| {
        allocator.begin_step(PoolId::DEFAULT, key).expect("no step should be open");
        let sizes = [3 + 2 * key, 7 - key].map(|mib| mib * MIB);
        let allocate = |size| allocator.allocate(PoolId::DEFAULT, stream, size).expect("memory should suffice").handle;
        let first = allocate(sizes[0]);
        left.take().into_iter().for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
        left = Some(allocate(sizes[1]));
        allocator.free(first).expect("the allocation should be live");
        let report = allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
        allocator.check().expect("the invariants should hold");
        report
    };
    for key in [0, 0, 0, 1, 1, 1] {
        step(key);
    }
    for key in [0, 1, 1, 0, 0, 1] {
        let report = step(key);
        assert_eq!((report.allocations, report.planned, report.difference), (2, 1, None), "key {key}");
    }
}

/// An allocation that lives for more than one step has no place in the plan. The others have one.
#[test]
fn a_step_is_learned_if_an_allocation_lives_to_the_end_of_the_next_step() {
    let device = SimBackend::builder().build();
    let (allocator, stream) = planned_pool(&device, PlanPolicy::Learn, 512 * MIB);
    let (mut left, mut planned) = (None, Vec::new());
    for _ in 0..4 {
        allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
        let made = [3 * MIB, 5 * MIB]
            .map(|size| allocator.allocate(PoolId::DEFAULT, stream, size).expect("memory should suffice"));
        left.replace(made[0].handle)
            .into_iter()
            .for_each(|handle| allocator.free(handle).expect("the allocation should be live"));
        allocator.free(made[1].handle).expect("the allocation should be live");
        planned.push(allocator.end_step(PoolId::DEFAULT).expect("a step should be open").planned);
    }
    assert_eq!(planned, [0, 0, 1, 1]);
}

/// Two ranks differ only in the order of their last plans, so only the order can tell their digests apart.
#[test]
fn the_order_of_adoption_is_in_the_digest() {
    let [same, swapped] = [0, 1].map(|last| {
        let device = SimBackend::builder().build();
        let (allocator, stream) = planned_pool(&device, PlanPolicy::Off, 512 * MIB);
        for key in [0, 1, last] {
            allocator.adopt_plan(PoolId::DEFAULT, plan_of_one(key, stream, MIB)).expect("memory should suffice");
        }
        let order: Vec<u64> =
            allocator.plans(PoolId::DEFAULT).expect("the pool should exist").iter().map(Plan::key).collect();
        assert_eq!(order, [1 - last, last]);
        allocator.digest(PoolId::DEFAULT).expect("the pool should exist")
    });
    assert_ne!(same, swapped);
}

/// A heap gives up its plans when their memory is refused. A plan that is adopted later is followed.
#[test]
fn a_heap_that_gave_up_its_plans_follows_a_new_one() {
    let device = SimBackend::builder().build();
    let (allocator, stream) = planned_pool(&device, PlanPolicy::Off, 64 * MIB);
    let step = |key: u64| {
        allocator.begin_step(PoolId::DEFAULT, key).expect("no step should be open");
        let made = allocator.allocate(PoolId::DEFAULT, stream, 20 * MIB).expect("memory should suffice");
        allocator.free(made.handle).expect("the allocation should be live");
        allocator.end_step(PoolId::DEFAULT).expect("a step should be open").planned
    };
    let adopt =
        || allocator.adopt_plan(PoolId::DEFAULT, plan_of_one(0, stream, 20 * MIB)).expect("memory should suffice");
    adopt();
    assert_eq!(step(0), 1);
    assert_eq!(step(1), 0, "this step uses the memory of the plan");
    let in_the_way =
        [(); 6].map(|()| allocator.allocate(PoolId::DEFAULT, stream, 10 * MIB).expect("memory should suffice"));
    allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
    let report = allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
    assert_eq!(report.difference.map(|difference| difference.cause), Some(DifferenceCause::Memory));
    in_the_way.into_iter().for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
    assert_eq!(step(0), 0, "it has given up");
    adopt();
    assert_eq!(step(0), 1, "it follows the new plan");
}

/// A learned plan holds what is live at its peak. The end of the first step that follows it releases the rest, on every rank at the same op,
/// and later steps release nothing.
#[test]
fn the_first_step_that_follows_a_plan_releases_the_rest() {
    let passes = |allocator: &Allocator<&SimBackend>, stream| {
        // Live at the peak: 9 MiB. Without a plan, the order of the frees leaves pieces.
        let made = |size_bytes| allocator.allocate(PoolId::DEFAULT, stream, size_bytes).expect("memory should suffice");
        let (one, two, three) = (made(3 * MIB), made(3 * MIB), made(3 * MIB));
        allocator.free(two.handle).expect("the allocation should be live");
        let four = made(2 * MIB);
        allocator.free(one.handle).expect("the allocation should be live");
        let five = made(4 * MIB);
        [three, four, five]
            .into_iter()
            .for_each(|made| allocator.free(made.handle).expect("the allocation should be live"));
    };
    let run = |plan: &str, seed| {
        let device = SimBackend::builder().seed(seed).build();
        let config = plan.parse::<Config>().expect("the text should be valid");
        let allocator: Allocator<_> = Allocator::new(&device, config).expect("the arguments should be valid");
        let stream = allocator.register_stream().expect("a stream id is available");
        let mut held = Vec::new();
        for _ in 0..6 {
            allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
            passes(&allocator, stream);
            let report = allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
            held.push((report.planned, allocator.stats().reserved_bytes.current, device.calls().of(Call::Unmap)));
        }
        let plan_bytes = allocator.stats().steps.plan_bytes;
        (held, plan_bytes, allocator.digest(PoolId::DEFAULT).expect("the pool should exist"))
    };
    let (held, plan_bytes, digest) = run("plan:learn", 1);
    let first = held.iter().position(|(planned, ..)| *planned > 0).expect("the plan is followed");
    assert!(held[first - 1].1 > 10 * MIB, "{held:?}");
    assert_eq!(plan_bytes, 9 * MIB, "live at the peak");
    assert_eq!(held[first].1, plan_bytes.next_multiple_of(2 * MIB), "in whole granules of the device: {held:?}");
    assert!(held[first..].iter().all(|later| *later == held[first]), "later steps release nothing: {held:?}");
    assert_eq!(run("plan:learn", 2).2, digest);
    // An observer holds the memory, so it stays.
    let device = SimBackend::builder().build();
    let allocator: Allocator<_> = Allocator::new(&device, "plan:learn".parse().expect("the text should be valid"))
        .expect("the arguments should be valid");
    let stream = allocator.register_stream().expect("a stream id is available");
    allocator.observe(PoolId::DEFAULT).expect("the pool should exist");
    for _ in 0..6 {
        allocator.begin_step(PoolId::DEFAULT, 0).expect("no step should be open");
        passes(&allocator, stream);
        allocator.end_step(PoolId::DEFAULT).expect("a step should be open");
    }
    assert!(allocator.stats().reserved_bytes.current > 10 * MIB);
    assert_eq!(allocator.stats().trim_count, 0);
}
