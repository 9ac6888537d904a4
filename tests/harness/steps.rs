//! Programs that repeat steps, compared with a naive model of following a plan.
//!
//! ```text
//!  bytes ──► a body of ops ──► step, step, step ...      each like the body, except for changes that the bytes select
//!                                 │
//!                                 ├─► Allocator ─► SimBackend      a race if a wait is missing, a leak at the end
//!                                 └─► model: the plan's next request? nothing live at its place? there if so, elsewhere otherwise
//! ```
//!
//! The model reads the plans from the allocator and validates them independently, by comparing all pairs of allocations. The oracle covers
//! ordinary placement; here ordinary allocations must only be outside of the memory of plans.

use crate::checker::DeviceWork;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::backend::Backend as _;
use symmalloc_core::config::{Config, PlanPolicy, PoolConfig, Stitching, StreamPolicy};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::lock::Lock;
use symmalloc_core::plans::{
    DifferenceCause, Plan, PlannedAllocation, SearchBudget, StepAllocation, StepReport, StepStats,
};
use symmalloc_core::units::{MIB, UNIT_BYTES};
use symmalloc_core::{Allocation, AllocationId, Digest, Op, Placement, PoolId, SegmentId, StreamId, generic};
use symmalloc_sim::SimBackend;

const POOL: PoolId = PoolId::DEFAULT;

/// Budget of the planner's search: enough for a few dozen allocations.
const BUDGET: SearchBudget = SearchBudget(20_000);

/// An op of a step. Allocations are numbered by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Allocate {
        stream: StreamId,
        size_bytes: u64,
    },
    /// Frees the allocation with this number, in this step or in the one before.
    Free {
        steps_ago: usize,
        number: usize,
    },
    Use {
        number: usize,
        stream: StreamId,
    },
}

/// A step to execute.
#[derive(Clone, Debug)]
struct Step {
    key: u64,
    calls: Vec<Call>,
}

/// Steps, and their configuration.
#[derive(Clone, Debug)]
pub struct StepScenario {
    config: Config,
    streams: u16,
    /// `true` if all streams form one group; otherwise s1 and s3 do not join that of s0.
    all_join: bool,
    /// Index of the step before which a plan for the body is adopted; `None` if the pool learns.
    adopts_before: Option<usize>,
    steps: Vec<Step>,
}

impl StepScenario {
    /// Returns the scenario that these bytes encode. Every sequence of bytes encodes one.
    ///
    /// # Panics
    /// Never panics: generated scenarios are valid.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let flags = byte(0);
        let learns = flags & 1 == 0;
        let policy = match (flags & 2 != 0, flags & 0x40 != 0) {
            (true, _) => StreamPolicy::Shared,
            (false, true) => StreamPolicy::Grouped,
            (false, false) => StreamPolicy::Separate,
        };
        let is_separate = policy == StreamPolicy::Separate;
        let streams = 1 + u16::from(flags >> 2 & if is_separate { 1 } else { 3 });
        let all_join = flags & 0x80 != 0;
        let step_count = 3 + usize::from(byte(1) % 7);
        let two_bodies = byte(2) % 4 == 3;
        let mut builder = PoolConfig::builder().streams(policy);
        builder = match flags >> 4 & 3 {
            0 => builder.reserved(8 << 30),
            1 => builder.fixed(),
            2 => builder.expandable(),
            _ => builder.expandable().stitching(Some(Stitching::with_granule(2 << 20))),
        };
        builder = builder.plan(if learns { PlanPolicy::Learn } else { PlanPolicy::Off });
        let config = Config::builder()
            .default_pool(builder.build().expect("the configuration should be valid"))
            .build()
            .expect("the configuration should be valid");
        let rest = bytes.get(4..).unwrap_or(&[]);
        let (first, changes) = rest.split_at(rest.len() * 2 / 3);
        let (one, other) = if two_bodies { first.split_at(first.len() / 2) } else { (first, first) };
        let bodies = [body(one, streams), body(other, streams)];
        let change = |at: usize| changes.get(at % changes.len().max(1)).copied().unwrap_or(0);
        let steps = (0..step_count).map(|number| {
            let which = usize::from(two_bodies && number % 3 == 2);
            let calls = changed(&bodies[which], change(2 * number), change(2 * number + 1));
            Step { key: which as u64, calls }
        });
        let steps = steps.collect();
        StepScenario { config, streams, all_join, adopts_before: (!learns).then(|| usize::from(byte(3) % 3)), steps }
    }

    /// Returns the first stream of a stream's group.
    fn group_of(&self, stream: StreamId) -> StreamId {
        if self.all_join || stream.0.is_multiple_of(2) { StreamId(0) } else { stream }
    }

    /// Returns the number of allocations, frees and uses in all steps.
    pub fn ops(&self) -> usize {
        self.steps.iter().map(|step| step.calls.len()).sum()
    }
}

/// Returns the ops of an unchanged step.
fn body(bytes: &[u8], streams: u16) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut live: Vec<usize> = Vec::new();
    let mut made = 0;
    let mut carried = Vec::new();
    for &[what, size] in bytes.as_chunks::<2>().0.iter().take(60) {
        let stream = StreamId(u16::from(size >> 6) % streams);
        match what % 8 {
            0..4 => {
                let size_bytes = [512, 1, 4096, MIB, 3 * MIB + 512, 2 * MIB, 700, 6 * MIB][usize::from(size % 8)];
                live.push(made);
                made += 1;
                calls.push(Call::Allocate { stream, size_bytes });
            }
            4 if !live.is_empty() => calls.push(Call::Use { number: live[usize::from(size) % live.len()], stream }),
            5.. if !live.is_empty() => {
                let number = live.swap_remove(usize::from(size) % live.len());
                calls.push(Call::Free { steps_ago: 0, number });
            }
            _ => {}
        }
    }
    // Half of the remaining allocations are freed in the next step, after that many calls.
    for (at, number) in live.into_iter().enumerate() {
        if at % 2 == 0 {
            calls.push(Call::Free { steps_ago: 0, number });
        } else {
            carried.push(number);
        }
    }
    for (at, number) in carried.into_iter().enumerate() {
        let place = (at * 3).min(calls.len());
        calls.insert(place, Call::Free { steps_ago: 1, number });
    }
    calls
}

/// Returns a step like the body, with at most one change.
fn changed(body: &[Call], kind: u8, place: u8) -> Vec<Call> {
    let mut calls = body.to_vec();
    if calls.is_empty() {
        return calls;
    }
    let at = usize::from(place) % calls.len();
    match kind % 12 {
        // Allocations whose free is omitted are freed at the end of the run.
        0 => {
            if matches!(calls[at], Call::Free { .. } | Call::Use { .. }) {
                calls.remove(at);
            }
        }
        1 => {
            if let Call::Allocate { size_bytes, .. } = &mut calls[at] {
                *size_bytes += 4 * UNIT_BYTES;
            }
        }
        2 => calls.truncate(at),
        3 => calls.insert(at, Call::Allocate { stream: StreamId(0), size_bytes: 5 * MIB }),
        _ => {}
    }
    calls
}

/// Key of a heap: the streams that share it.
type HeapKey = StreamGroup;

/// A live allocation.
#[derive(Clone, Copy, Debug)]
struct Live {
    allocation: Allocation,
    heap: HeapKey,
    /// Start and end in bytes of the plan memory, if it was placed by a plan.
    place: Option<(u64, u64)>,
}

/// The model's knowledge of a heap.
#[derive(Debug, Default)]
struct HeapModel {
    plans: Vec<Plan>,
    /// Start of the memory of plans, once something has been placed there.
    base: Option<(SegmentId, u64)>,
    /// Number of times that plans were adopted.
    learned: u64,
    /// Number of consecutive differing steps, by key.
    differences: BTreeMap<u64, u32>,
}

/// Progress of a heap in a step.
#[derive(Debug, Default)]
struct Progress {
    plan: Option<Plan>,
    /// `true` while the plan is followed.
    follows: bool,
    next: usize,
    allocations: u64,
    planned: u64,
    difference: Option<(u32, DifferenceCause)>,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepOutcome {
    /// All placements.
    pub placements: Vec<Placement>,
    /// Reports of the steps.
    pub reports: Vec<StepReport>,
    /// The digest at the end.
    pub digest: Digest,
    /// Statistics over all steps.
    pub stats: StepStats,
}

/// Executes a scenario and compares it with the model.
///
/// # Panics
/// Panics if an allocation is placed differently from the model, a report differs from the model's, an invariant is violated, a wait is
/// missing, or anything leaks.
pub fn run<L: Lock>(scenario: &StepScenario, device: &SimBackend) -> StepOutcome {
    let outcome = {
        let allocator = generic::Allocator::<_, L>::with_lock(device, scenario.config.clone())
            .expect("the granularity should be valid");
        for stream in (0..scenario.streams).map(StreamId) {
            let group = scenario.group_of(stream);
            let registered =
                if group == stream { allocator.register_stream() } else { allocator.register_stream_in(group) };
            assert_eq!(registered, Ok(stream));
        }
        let mut walk = Walk::new(scenario, &allocator, device);
        for number in 0..scenario.steps.len() {
            walk.step(number);
        }
        walk.finish()
    };
    assert!(device.leaks().is_empty(), "leaked: {}", device.leaks());
    outcome
}

/// A run in progress.
struct Walk<'a, 'd, L: Lock> {
    scenario: &'a StepScenario,
    allocator: &'a generic::Allocator<&'d SimBackend, L>,
    work: DeviceWork<'d>,
    heaps: BTreeMap<HeapKey, HeapModel>,
    live: BTreeMap<AllocationId, Live>,
    /// Allocations by step and number.
    made: Vec<Vec<AllocationId>>,
    placements: Vec<Placement>,
    reports: Vec<StepReport>,
}

impl<'a, 'd, L: Lock> Walk<'a, 'd, L> {
    fn new(
        scenario: &'a StepScenario,
        allocator: &'a generic::Allocator<&'d SimBackend, L>,
        device: &'d SimBackend,
    ) -> Self {
        Walk {
            scenario,
            allocator,
            work: DeviceWork::new(device),
            heaps: BTreeMap::new(),
            live: BTreeMap::new(),
            made: Vec::new(),
            placements: Vec::new(),
            reports: Vec::new(),
        }
    }

    fn heap_of(&self, stream: StreamId) -> HeapKey {
        match self.scenario.config.default_pool().streams() {
            StreamPolicy::Separate => StreamGroup::One(stream),
            StreamPolicy::Grouped => StreamGroup::Group(self.scenario.group_of(stream)),
            _ => StreamGroup::All,
        }
    }

    fn step(&mut self, number: usize) {
        let step = &self.scenario.steps[number];
        if self.scenario.adopts_before == Some(number) {
            self.adopt(step);
        }
        let mut progress = self.begin(step.key);
        for (heap, _) in progress.iter().filter(|(_, progress)| !progress.follows) {
            // The step uses the memory of plans exclusively: allocations that are live in it now count as ordinary
            // blocks.
            self.live.values_mut().filter(|live| live.heap == *heap).for_each(|live| live.place = None);
            self.heaps.entry(*heap).or_default().base = None;
        }
        self.allocator.begin_step(POOL, step.key).expect("no step is open");
        assert!(self.allocator.begin_step(POOL, 7).is_err() && self.allocator.drop_plans(POOL).is_err());
        self.made.push(Vec::new());
        for call in &step.calls {
            self.call(number, *call, &mut progress);
            self.allocator.check().unwrap_or_else(|violation| panic!("step {number}, {call:?}: {violation}"));
        }
        let report = self.allocator.end_step(POOL).expect("a heap with an open step should have plans");
        assert!(self.allocator.end_step(POOL).is_err());
        let (mut allocations, mut planned, mut difference) = (0, 0, None);
        for (heap, mut progress) in progress {
            let model = self.heaps.entry(heap).or_default();
            let count = progress.plan.as_ref().map_or(0, |plan| plan.allocations().len());
            if progress.follows && progress.next < count {
                progress.differ(DifferenceCause::Ended);
            }
            if progress.plan.is_some() {
                let differences = model.differences.entry(step.key).or_default();
                *differences = if progress.follows { 0 } else { *differences + 1 };
            }
            allocations += progress.allocations;
            planned += progress.planned;
            difference = difference.or(progress.difference);
        }
        assert_eq!((report.allocations, report.planned), (allocations, planned), "step {number}");
        let is_same = match (report.difference, difference) {
            (None, None) => true,
            (Some(there), Some((at, cause))) => {
                // The allocator may name any of several allocations that occupy the range.
                let is_occupied = |cause: DifferenceCause| matches!(cause, DifferenceCause::Occupied { .. });
                there.number == at && (there.cause == cause || is_occupied(there.cause) && is_occupied(cause))
            }
            _ => false,
        };
        assert!(is_same, "step {number}: {:?}, but the model expects {difference:?}", report.difference);
        self.reports.push(report);
        self.look_at_plans();
        self.allocator.check().unwrap_or_else(|violation| panic!("after step {number}: {violation}"));
    }

    /// Returns the state of each heap at the beginning of a step.
    fn begin(&self, key: u64) -> BTreeMap<HeapKey, Progress> {
        let learns = self.scenario.config.default_pool().plan() == PlanPolicy::Learn;
        let progress = self.heaps.iter().map(|(heap, model)| {
            let plan = model.plans.iter().find(|plan| plan.key() == key).cloned();
            let is_tired = learns && model.differences.get(&key).is_some_and(|differences| *differences >= 2);
            let follows = plan.is_some() && !is_tired;
            (*heap, Progress { plan, follows, ..Progress::default() })
        });
        progress.collect()
    }

    fn call(&mut self, number: usize, call: Call, progress: &mut BTreeMap<HeapKey, Progress>) {
        match call {
            Call::Allocate { stream, size_bytes } => {
                let heap = self.heap_of(stream);
                let place = self.turn(progress.entry(heap).or_default(), heap, stream, size_bytes);
                let made = self.allocator.allocate(POOL, stream, size_bytes);
                let allocation = made.unwrap_or_else(|error| panic!("step {number}: {error}"));
                self.check_placement(heap, &allocation, place, number);
                let id = AllocationId(self.placements.len() as u64);
                self.work.submit(&Op::Allocate { id, pool: POOL, stream, size_bytes }, &Ok(Some(allocation)));
                self.made[number].push(id);
                self.live.insert(id, Live { allocation, heap, place });
                self.placements.push(allocation.placement);
            }
            Call::Free { steps_ago, number: of } => {
                let step = number.checked_sub(steps_ago).and_then(|step| self.made.get(step));
                if let Some(id) = step.and_then(|made| made.get(of).copied()) {
                    self.free(id);
                }
            }
            Call::Use { number: of, stream } => {
                let Some(id) = self.made[number].get(of).copied() else { return };
                if let Some(live) = self.live.get(&id) {
                    self.allocator.record_use(live.allocation.handle, stream).expect("the allocation should be live");
                    self.work.submit(&Op::RecordUse { id, stream }, &Ok(None));
                }
            }
        }
    }

    fn free(&mut self, id: AllocationId) {
        if let Some(live) = self.live.remove(&id) {
            self.allocator.free(live.allocation.handle).expect("the allocation should be live");
            self.work.submit(&Op::Free { id }, &Ok(None));
            assert!(self.allocator.free(live.allocation.handle).is_err(), "a handle is never reused");
        }
    }

    /// Returns the model's answer to a request: its range in the plan, or `None` for ordinary placement.
    fn turn(&self, progress: &mut Progress, heap: HeapKey, stream: StreamId, size_bytes: u64) -> Option<(u64, u64)> {
        progress.allocations += 1;
        let plan = progress.plan.as_ref().filter(|_| progress.follows)?;
        let planned = plan.allocations().get(progress.next).copied();
        let wanted = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        if wanted != Some((stream, size_bytes)) {
            progress.differ(DifferenceCause::Request { planned: wanted, requested: (stream, size_bytes) });
            return None;
        }
        let Some(place) = planned.and_then(place_of) else {
            progress.next += 1;
            return None;
        };
        let taken = self.live.values().filter(|live| live.heap == heap).filter_map(|live| live.place);
        if taken.into_iter().any(|(from, to)| from < place.1 && place.0 < to) {
            // The allocator may name any of several allocations.
            progress.differ(DifferenceCause::Occupied { offset_bytes: 0 });
            return None;
        }
        progress.next += 1;
        progress.planned += 1;
        Some(place)
    }

    /// Checks that an allocation is where the plan puts it, or outside of the memory of plans.
    fn check_placement(&mut self, heap: HeapKey, allocation: &Allocation, place: Option<(u64, u64)>, number: usize) {
        let Placement { segment, offset_bytes, .. } = allocation.placement;
        let model = self.heaps.entry(heap).or_default();
        if let Some((from, _)) = place {
            let base = (segment, offset_bytes.checked_sub(from).expect("the memory begins in the segment"));
            assert_eq!(*model.base.get_or_insert(base), base, "step {number}: placed differently from the plan");
        } else if let Some((memory, base)) = model.base.filter(|(memory, _)| *memory == segment) {
            let config = self.scenario.config.default_pool();
            let granularity_bytes = self.allocator.backend().granularity_bytes();
            let size = model.plans.iter().map(|plan| plan.memory_bytes(config, granularity_bytes)).max();
            let is_outside = offset_bytes + allocation.size_bytes <= base || base + size.unwrap_or(0) <= offset_bytes;
            assert!(is_outside, "step {number}: placed in the memory of plans, in segment {memory}");
        }
    }

    /// Adopts plans for a step, for each heap that has one.
    fn adopt(&mut self, step: &Step) {
        let heaps: BTreeSet<HeapKey> = (0..self.scenario.streams).map(|id| self.heap_of(StreamId(id))).collect();
        for heap in heaps {
            let wanted = wanted(&step.calls, |stream| self.heap_of(stream) == heap);
            if wanted.is_empty() {
                continue;
            }
            let config = self.scenario.config.default_pool();
            let granularity_bytes = self.allocator.backend().granularity_bytes();
            let plan = Plan::solve(config, granularity_bytes, heap, step.key, &wanted, BUDGET)
                .expect("the plan should be valid");
            self.allocator.adopt_plan(POOL, plan).expect("memory should suffice");
            self.allocator.check().expect("sound with a plan");
        }
        self.look_at_plans();
    }

    /// Reads the current plans, and validates new ones.
    fn look_at_plans(&mut self) {
        let mut plans: BTreeMap<HeapKey, Vec<Plan>> = BTreeMap::new();
        for plan in self.allocator.plans(POOL).expect("the pool should exist") {
            plans.entry(plan.group()).or_default().push(plan);
        }
        let heaps: BTreeSet<HeapKey> = self.heaps.keys().chain(plans.keys()).copied().collect();
        for heap in heaps {
            let plans = plans.remove(&heap).unwrap_or_default();
            let model = self.heaps.entry(heap).or_default();
            // The plan memory changes whenever plans are adopted, even if a learned plan equals the previous one.
            let stats =
                self.allocator.heap_stats(POOL, heap.first().unwrap_or_default()).expect("the pool should exist").steps;
            assert_eq!(stats.plans, plans.len() as u64);
            plans.iter().for_each(check_plan);
            if model.learned != stats.learned {
                (model.learned, model.base) = (stats.learned, None);
                model.differences.clear();
                self.live.values_mut().filter(|live| live.heap == heap).for_each(|live| live.place = None);
            } else {
                assert_eq!(model.plans, plans);
            }
            model.plans = plans;
        }
    }

    fn finish(mut self) -> StepOutcome {
        let ids: Vec<AllocationId> = self.live.keys().copied().collect();
        ids.into_iter().for_each(|id| self.free(id));
        let digest = self.allocator.digest(POOL).expect("the pool should exist");
        self.allocator.check().unwrap_or_else(|violation| panic!("at the end: {violation}"));
        let stats = self.allocator.stats().steps;
        self.allocator.drop_plans(POOL).expect("no step is open");
        self.allocator.check().unwrap_or_else(|violation| panic!("without plans: {violation}"));
        assert_eq!(self.allocator.stats().usage.all.allocations.current, 0);
        self.allocator.trim_all().expect("no fault should be injected");
        self.allocator.check().unwrap_or_else(|violation| panic!("trimmed: {violation}"));
        StepOutcome { placements: self.placements, reports: self.reports, digest, stats }
    }
}

impl Progress {
    fn differ(&mut self, cause: DifferenceCause) {
        self.follows = false;
        let (number, cause) = (self.next as u32, cause);
        self.difference = Some((number, cause));
    }
}

/// Returns start and end in bytes of the plan memory.
fn place_of(planned: PlannedAllocation) -> Option<(u64, u64)> {
    let offset = planned.offset_bytes?;
    Some((offset, offset + planned.wanted.requested_bytes.next_multiple_of(UNIT_BYTES)))
}

/// Checks that no two allocations overlap, in this step or into the next one: compares all pairs.
fn check_plan(plan: &Plan) {
    let count = plan.allocations().len() as u64;
    let lives = plan
        .allocations()
        .iter()
        .zip(0_u64..)
        .filter_map(|(planned, number)| Some((number, u64::from(planned.wanted.until?), place_of(*planned)?)));
    let lives: Vec<_> = lives.collect();
    for (at, one) in lives.iter().enumerate() {
        assert!(one.1 > one.0 && one.1 <= one.0 + count);
        for other in &lives[at + 1..] {
            let in_place = one.2.0 < other.2.1 && other.2.0 < one.2.1;
            let in_time = [0, count].iter().any(|shift| {
                one.0 < other.1 + shift && other.0 + shift < one.1 || one.0 + shift < other.1 && other.0 < one.1 + shift
            });
            assert!(!(in_place && in_time), "{one:?} and {other:?} overlap");
        }
    }
}

/// Returns the requests of a step to the heap of these streams. Allocations that it leaves live are assumed to be freed where the step frees those of the
/// previous one.
fn wanted(calls: &[Call], is_of_heap: impl Fn(StreamId) -> bool) -> Vec<StepAllocation> {
    let mut wanted: Vec<StepAllocation> = Vec::new();
    // Maps the number in the step to the number in the heap.
    let mut numbers: Vec<Option<usize>> = Vec::new();
    for call in calls {
        match *call {
            Call::Allocate { stream, size_bytes } => {
                numbers.push(is_of_heap(stream).then_some(wanted.len()));
                if is_of_heap(stream) {
                    wanted.push(StepAllocation { stream, requested_bytes: size_bytes, until: None });
                }
            }
            Call::Free { steps_ago: 0, number } => {
                if let Some(Some(of)) = numbers.get(number) {
                    wanted[*of].until = Some(wanted.len() as u32);
                }
            }
            _ => {}
        }
    }
    let (count, mut made) = (wanted.len() as u32, 0);
    for call in calls {
        match *call {
            Call::Allocate { stream, .. } => made += u32::from(is_of_heap(stream)),
            Call::Free { steps_ago: 1, number } => {
                if let Some(Some(of)) = numbers.get(number)
                    && wanted[*of].until.is_none()
                    && made <= *of as u32
                {
                    wanted[*of].until = Some(count + made);
                }
            }
            _ => {}
        }
    }
    wanted
}
