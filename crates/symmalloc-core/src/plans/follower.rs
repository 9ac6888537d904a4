//! A heap's plans, and how far it is in the one that it follows.
//!
//! ```text
//!             begin_step: a plan has the key            the request is the plan's next, and its place is free
//!   no step ──────────────────────────────► following ◄──────────────────────────────────────────────┐
//!      │  ▲                                   │    └───────────────────────────────────────────────────┘
//!      │  │                     anything else │
//!      ▼  │ end_step                          ▼
//!   learning, or nothing ◄──────── the ordinary way, to the end of the step
//! ```
//!
//! All plans of a heap place in the same memory, one block of it. A place has a slot of the block table for as long as there are plans.
//! It is in no segment's ring, so it has no neighbours: that is how a place is told from a block.

use super::learner::Learner;
use super::plan::{Plan, StepAllocation};
use super::report::{DifferenceCause, StepDifference, StepReport, StepStats};
use super::schedule::{Expected, Place, Schedule};
use crate::blocks::table::Slot;
use crate::types::ids::StreamId;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Steps of one key in a row that may differ before a heap that learns learns them anew.
const DIFFERENCES_MAX: u32 = 2;

/// What a heap does with the requests of a step, besides serving them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Nothing.
    #[default]
    Nothing,
    /// Compares them with a plan.
    Plan,
    /// Logs them.
    Learn,
}

/// What a plan expects, and how far a step has come in it.
#[derive(Debug, Default)]
pub(crate) struct Course {
    expected: Vec<Expected>,
    /// Slots of places: those of one allocation side by side, its own one first. See [`Schedule`].
    places_of: Vec<Slot>,
    /// The number of the next allocation, and where its places begin.
    next: usize,
    places_from: usize,
}

impl Course {
    /// The places of the next allocation, if it is expected to ask for this: its own one, then those that were there before. None
    /// when it is placed the ordinary way. In a step that follows no plan nothing is expected.
    #[inline(always)]
    pub(crate) fn places_if(&self, op: u64) -> Option<&[Slot]> {
        let expected = self.expected.get(self.next)?;
        if expected.op == op { self.places_of.get(self.places_from..expected.places_end as usize) } else { None }
    }

    /// Goes on to the next allocation. This one has so many places.
    #[inline(always)]
    pub(crate) fn advance(&mut self, places: usize) {
        self.next += 1;
        self.places_from += places;
    }

    fn is_at_end(&self) -> bool {
        self.next == self.expected.len()
    }

    fn rewind(&mut self) {
        (self.next, self.places_from) = (0, 0);
    }

    /// How many allocations so far have a place.
    fn planned(&self) -> u64 {
        let ends = |number: usize| self.expected[number].places_end;
        let begins = |number: usize| if number == 0 { 0 } else { ends(number - 1) };
        (0..self.next).filter(|number| ends(*number) > begins(*number)).count() as u64
    }
}

/// A plan that is adopted.
#[derive(Debug)]
struct Adopted {
    plan: Arc<Plan>,
    /// Lent to the follower while a step follows it.
    course: Course,
    /// Slots of places of what lives on in the next step, ascending.
    carried: Vec<Slot>,
    /// Steps of its key in a row that differed.
    differences: u32,
}

/// The memory that plans place in.
#[derive(Debug)]
pub(crate) struct PlanMemory {
    /// Its block, which is in the segment's ring.
    pub(crate) block: Slot,
    /// The slots of all places.
    pub(crate) places: Vec<Slot>,
    /// Streams that plans allocate for, ascending.
    pub(crate) streams: SmallVec<[StreamId; 2]>,
}

/// The plans of one heap.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    plans: Vec<Adopted>,
    /// There is some exactly when there are plans.
    memory: Option<PlanMemory>,
    memory_bytes: u64,
    /// The plan of the step; `None` when no plan has its key.
    current: Option<usize>,
    /// That of the plan that is followed; of nothing while none is.
    course: Course,
    /// The plan that the last step followed to its end. Only then does a plan know who was last at each offset.
    last_whole: Option<usize>,
    /// Slots of places that were live when the step began, which the plan does not expect.
    late: Vec<Slot>,
    difference: Option<StepDifference>,
    /// Allocations of the heap before the step.
    allocations_before: u64,
    learner: Learner,
    /// Keys for which a plan was learned that could not be adopted.
    given_up: BTreeSet<u64>,
    stats: StepStats,
}

impl Follower {
    #[inline(always)]
    pub(crate) fn course(&mut self) -> &mut Course {
        &mut self.course
    }

    /// Slots of places that were live when the step began, which the plan does not expect.
    #[inline(always)]
    pub(crate) fn late(&self) -> &[Slot] {
        &self.late
    }

    pub(crate) fn learner(&mut self) -> &mut Learner {
        &mut self.learner
    }

    pub(crate) fn memory(&self) -> Option<&PlanMemory> {
        self.memory.as_ref()
    }

    /// Bytes of memory that plans place in.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// What was asked for when the plan expected something else.
    pub(crate) fn other_request(&self, requested: (StreamId, u64)) -> DifferenceCause {
        let plan = self.current.map(|current| &self.plans[current].plan);
        let planned = plan.and_then(|plan| plan.allocations().get(self.course.next));
        let planned = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        DifferenceCause::Request { planned, requested }
    }

    /// A step begins. Says what is to be done with its requests.
    pub(crate) fn begin(&mut self, key: u64, learns: bool, allocations: u64) -> Watch {
        self.difference = None;
        self.allocations_before = allocations;
        self.late.clear();
        self.current = self.plans.iter().position(|adopted| adopted.plan.key() == key);
        self.last_whole = self.last_whole.filter(|last| self.current == Some(*last));
        let is_good = self.current.is_some_and(|at| self.plans[at].differences < DIFFERENCES_MAX);
        if learns && !is_good && !self.given_up.contains(&key) {
            self.learner.begin(key);
            return Watch::Learn;
        }
        self.learner.pause();
        let Some(current) = self.current else { return Watch::Nothing };
        self.course = std::mem::take(&mut self.plans[current].course);
        Watch::Plan
    }

    /// Whether the step before followed the same plan to its end.
    pub(crate) fn is_continued(&self) -> bool {
        self.last_whole.is_some()
    }

    /// These places are live as the step begins.
    pub(crate) fn note_live(&mut self, live: impl Iterator<Item = Slot>) {
        let carried = self.current.map_or(&[][..], |current| &self.plans[current].carried);
        self.late.extend(live.filter(|slot| carried.binary_search(slot).is_err()));
    }

    /// The step differs from its plan here.
    pub(crate) fn differ(&mut self, cause: DifferenceCause) -> StepDifference {
        let difference = StepDifference { number: self.course.next as u32, cause };
        (self.difference, self.last_whole) = (Some(difference), None);
        difference
    }

    /// The step ends. Says what became of it, and what is to be planned now for its key.
    pub(crate) fn end(&mut self, watch: Watch, allocations: u64) -> (StepReport, Option<Vec<StepAllocation>>) {
        if watch == Watch::Plan {
            self.last_whole = self.current;
            if !self.course.is_at_end() {
                self.differ(DifferenceCause::Ended);
            }
        }
        let is_followed = watch == Watch::Plan && self.difference.is_none();
        let report = StepReport {
            allocations: allocations - self.allocations_before,
            planned: self.course.planned(),
            difference: self.difference,
            plan_bytes: self.memory_bytes,
        };
        let mut course = std::mem::take(&mut self.course);
        if let Some(current) = self.current {
            let adopted = &mut self.plans[current];
            adopted.differences = if is_followed { 0 } else { adopted.differences.saturating_add(1) };
            if !course.expected.is_empty() {
                course.rewind();
                adopted.course = course;
            }
        }
        self.stats.steps += 1;
        self.stats.followed += u64::from(is_followed);
        self.stats.allocations += report.allocations;
        self.stats.planned += report.planned;
        (report, if watch == Watch::Learn { self.learner.end() } else { None })
    }

    /// No plan is learned for this key any more.
    pub(crate) fn give_up(&mut self, key: u64) {
        self.given_up.insert(key);
    }

    /// The plans that are adopted, in the order in which they came.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.iter().map(|adopted| Arc::clone(&adopted.plan)).collect()
    }

    /// Takes up plans. Every place of theirs has a slot, all in this memory.
    pub(crate) fn install(
        &mut self,
        plans: &[(Arc<Plan>, Schedule)],
        slots: &BTreeMap<Place, Slot>,
        memory: PlanMemory,
        memory_bytes: u64,
    ) {
        for (plan, Schedule { places, expected, places_of, carried }) in plans {
            let slot_of = |place: &u32| slots[&places[*place as usize]];
            let mut carried: Vec<Slot> = carried.iter().map(slot_of).collect();
            carried.sort_unstable();
            let places_of = places_of.iter().map(slot_of).collect();
            let course = Course { expected: expected.clone(), places_of, next: 0, places_from: 0 };
            self.plans.push(Adopted { plan: Arc::clone(plan), course, carried, differences: 0 });
        }
        (self.memory, self.memory_bytes) = (Some(memory), memory_bytes);
        self.stats.adoptions += 1;
    }

    /// Gives all plans up. The slots of their places are the caller's.
    pub(crate) fn clear(&mut self) -> Option<PlanMemory> {
        self.plans.clear();
        self.course = Course::default();
        (self.current, self.last_whole, self.memory_bytes) = (None, None, 0);
        self.memory.take()
    }

    pub(crate) fn stats(&self) -> StepStats {
        StepStats { plans: self.plans.len() as u64, plan_bytes: self.memory_bytes, ..self.stats }
    }
}
