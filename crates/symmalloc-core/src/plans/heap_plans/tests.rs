//! Unit tests of `plans/heap_plans.rs`.

use super::*;
use crate::config::PoolConfig;
use crate::config::size_rules::{SizeClass, SizeRules};
use crate::plans::plan::PlannedAllocation;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::ids::{HeapId, PoolId, StreamGroup};
use crate::types::units::{MIB, units};
use std::num::NonZeroU64;

const S0: StreamId = StreamId(0);
const KEY: u64 = 7;
const HEAP: HeapId = HeapId { pool: PoolId(0), group: StreamGroup::One(S0) };

/// A component with its arena, without a heap: one segment of 64 MiB.
struct Job {
    config: PoolConfig,
    arena: Arena,
    plans: HeapPlans,
    step: Step,
    made: u64,
}

impl Job {
    fn new() -> Self {
        let config = PoolConfig::default();
        let mut arena = Arena::new(SizeRules::new(&config, 2 * MIB), Some(S0));
        let range = Range { base: DeviceAddress(1 << 40), size_bytes: 64 * MIB };
        arena.add_segment(range, SizeClass::Large, units(64 * MIB), fresh(S0));
        Job { config, arena, plans: HeapPlans::default(), step: Step::None, made: 0 }
    }

    /// Adopts a plan of two requests. The second is placed over the first, which is freed before it.
    fn with_plan() -> Self {
        Job::with_plan_of(&[3, 5])
    }

    /// Adopts a plan of requests, in MiB. Each is freed before the next, which is placed over it.
    fn with_plan_of(mib: &[u64]) -> Self {
        let mut job = Job::new();
        let planned = |(mib, until): (&u64, u32)| PlannedAllocation {
            wanted: StepAllocation { stream: S0, requested_bytes: mib * MIB, until: Some(until) },
            offset_bytes: Some(0),
        };
        let plan = Plan::new(KEY, HEAP.group, mib.iter().zip(1..).map(planned).collect())
            .expect("the arguments should be valid");
        let inputs = PlanInputs { heap: HEAP, config: &job.config, rules: job.arena.rules() };
        let prepared = job.plans.prepare_with(plan, inputs).expect("it fits the pool");
        assert_eq!((prepared.memory_bytes(), prepared.streams()), (5 * MIB, &[S0][..]));
        let free = job.arena.best_fit(prepared.size()).expect("64 MiB are free");
        let (memory, _) = job.arena.take_front(free, prepared.size(), BlockState::Planned);
        job.plans.set_plans(prepared.plans());
        job.plans.install(&prepared, memory, &mut job.arena);
        job
    }

    /// Begins a step. Returns `true` if streams must wait for all places of its plan.
    fn begin(&mut self, policy: PlanPolicy) -> bool {
        let allocations_before = self.made;
        let (step, must_wait) = match self.plans.begin(KEY, policy) {
            Treatment::BestFit => (Step::Unplanned { allocations_before }, false),
            Treatment::Learn => (Step::Learning { allocations_before }, false),
            Treatment::Follow(plan) => {
                let (step, must_wait) = self.plans.follow(plan, allocations_before, &self.arena);
                (Step::Following(step), must_wait)
            }
        };
        self.step = step;
        must_wait
    }

    fn differ(&mut self, cause: DifferenceCause) {
        let Step::Following(step) = std::mem::take(&mut self.step) else { panic!("the step follows its plan") };
        self.step = Step::Diverged(self.plans.diverge(*step, cause));
    }

    /// Makes the next allocation of the step where the component places it, without its slow path. Returns its slot.
    fn next(&mut self, requested: u64) -> Option<Slot> {
        let Step::Following(step) = &mut self.step else { panic!("the step follows its plan") };
        let slot = step.next_place(&self.arena, S0, requested)?;
        self.take(slot, requested);
        Some(slot)
    }

    fn take(&mut self, slot: Slot, requested: u64) {
        self.made += 1;
        self.arena.take_place(slot, S0, requested, NonZeroU64::MIN);
    }

    fn answer(&self, requested: u64) -> Answer {
        let Step::Following(step) = &self.step else { panic!("the step follows its plan") };
        self.plans.answer(step, &self.arena, S0, requested)
    }

    fn free(&mut self, slot: Slot) {
        self.arena.mark_free(slot, S0, 0);
    }

    fn end(&mut self) -> StepReport {
        let inputs = PlanInputs { heap: HEAP, config: &self.config, rules: self.arena.rules() };
        self.plans.end(std::mem::take(&mut self.step), KEY, self.made, inputs)
    }
}

#[test]
fn a_step_that_matches_its_plan_gets_the_planned_placements() {
    let mut job = Job::with_plan();
    for _ in 0..2 {
        job.begin(PlanPolicy::Off);
        let first = job.next(3 * MIB).expect("the plan's first request");
        job.free(first);
        let second = job.next(5 * MIB).expect("the plan's second request");
        assert_eq!(job.arena.block(first).offset(), job.arena.block(second).offset());
        job.free(second);
        let report = job.end();
        assert_eq!((report.allocations, report.planned, report.difference), (2, 2, None));
    }
    assert_eq!((job.plans.stats().steps, job.plans.stats().followed), (2, 2));
}

#[test]
fn after_its_first_difference_a_step_is_placed_without_the_plan() {
    let mut job = Job::with_plan();
    job.begin(PlanPolicy::Off);
    let first = job.next(3 * MIB).expect("the plan's first request");
    assert_eq!(job.next(4 * MIB), None);
    let Answer::Differs(cause) = job.answer(4 * MIB) else { panic!("the plan expects 5 MiB") };
    let planned = Some((S0, 5 * MIB));
    assert_eq!(cause, DifferenceCause::Request { planned, requested: (S0, 4 * MIB) });
    job.differ(cause);
    job.free(first);
    assert!(matches!(job.step, Step::Diverged(_)), "the plan is not followed any more");
    assert_eq!(job.end().difference, Some(StepDifference { number: 1, cause }));
    job.begin(PlanPolicy::Off);
    assert!(matches!(job.step, Step::Following(_)), "the next step follows it again");
}

#[test]
fn a_place_that_is_not_free_in_time_is_a_difference() {
    let mut job = Job::with_plan();
    job.begin(PlanPolicy::Off);
    job.next(3 * MIB).expect("the plan's first request");
    assert_eq!(job.next(5 * MIB), None);
    let Answer::Differs(cause) = job.answer(5 * MIB) else { panic!("the first allocation is live") };
    assert_eq!(cause, DifferenceCause::Occupied { offset_bytes: 0 });
}

#[test]
fn a_step_that_ends_early_differs() {
    let mut job = Job::with_plan();
    job.begin(PlanPolicy::Off);
    let first = job.next(3 * MIB).expect("the plan's first request");
    job.free(first);
    let difference = job.end().difference.expect("the second request is missing");
    assert_eq!((difference.number, difference.cause), (1, DifferenceCause::Ended));
    // The last users of the places are unknown after such a step.
    assert!(job.begin(PlanPolicy::Off), "streams must wait for all places");
}

/// The first allocation checks only its own place, because the third, which has the same place, checks that of the second.
#[test]
fn each_request_also_checks_what_is_unexpectedly_live() {
    let mut job = Job::with_plan_of(&[3, 5, 3]);
    job.begin(PlanPolicy::Off);
    let first = job.next(3 * MIB).expect("the plan's first request");
    job.free(first);
    let late = job.next(5 * MIB).expect("the plan's second request");
    let Answer::Differs(cause) = job.answer(3 * MIB) else { panic!("the second allocation is live") };
    job.differ(cause);
    job.end();
    job.begin(PlanPolicy::Off);
    assert_eq!(job.next(3 * MIB), None, "the fast path does not look at it");
    assert!(matches!(job.answer(3 * MIB), Answer::Differs(DifferenceCause::Occupied { offset_bytes: 0 })));
    job.free(late);
    assert!(matches!(job.answer(3 * MIB), Answer::Place { slot, .. } if slot == first));
}

#[test]
fn a_step_that_occurs_twice_is_planned_and_the_third_follows() {
    let mut job = Job::new();
    for _ in 0..2 {
        job.begin(PlanPolicy::Learn);
        assert!(matches!(job.step, Step::Learning { .. }));
        for requested in [3 * MIB, 5 * MIB] {
            let size = job.arena.rules().block_size(requested);
            let free = job.arena.best_fit(size).expect("a free block should be large enough");
            let state = BlockState::Allocated { stream: S0, requested, serial: NonZeroU64::MIN };
            let (slot, _) = job.arena.take_front(free, size, state);
            job.plans.note_logged((S0, requested), slot);
            job.plans.note_free(slot);
            job.arena.mark_free(slot, S0, 0);
            job.arena.coalesce(slot);
        }
        job.end();
    }
    // The plan is known, but its memory does not exist yet.
    assert_eq!(job.plans.begin(KEY, PlanPolicy::Learn), Treatment::Follow(0));
    let plan = &job.plans.plans()[0];
    assert_eq!(plan.allocations().iter().map(|planned| planned.offset_bytes).collect::<Vec<_>>(), [Some(0); 2]);
}

#[test]
fn dissolving_a_plan_frees_all_memory_but_live_allocations() {
    let mut job = Job::with_plan();
    job.begin(PlanPolicy::Off);
    let live = job.next(3 * MIB).expect("the plan's first request");
    job.end();
    assert_eq!((job.plans.memory_bytes(), job.plans.places().len()), (5 * MIB, 2));
    job.plans.dissolve(&mut job.arena, Some(S0), |_| 0);
    assert_eq!((job.plans.memory_bytes(), job.plans.places().len()), (0, 0));
    assert!(!job.arena.block(live).is_place(), "the live allocation is an ordinary block");
    let blocks = job.arena.all_blocks();
    let tiling: Vec<_> =
        blocks.iter().map(|slot| (job.arena.block(*slot).is_free(), job.arena.block(*slot).size)).collect();
    assert_eq!(tiling, [(false, units(3 * MIB)), (true, units(61 * MIB))]);
    assert_eq!(job.arena.best_fit(units(61 * MIB)), Some(blocks[1]));
}
