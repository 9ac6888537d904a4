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

/// A plan that is adopted.
#[derive(Debug)]
struct Adopted {
    plan: Arc<Plan>,
    expected: Vec<Expected>,
    /// Slots of places that were there before, see [`Schedule`].
    earlier: Vec<Slot>,
    /// Slots of places of what lives on in the next step, ascending.
    carried: Vec<Slot>,
    /// Steps of its key in a row that differed.
    differences: u32,
}

/// The request that comes next in a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn<'a> {
    /// What it asks for, as in a digest.
    pub(crate) op: u64,
    /// The slot of its place; `None` when it is placed the ordinary way.
    pub(crate) slot: Option<Slot>,
    /// Slots of the places that were there before.
    pub(crate) earlier: &'a [Slot],
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
    /// The number of the next allocation in it.
    next: usize,
    /// Where that one's earlier places begin.
    earlier_from: usize,
    /// The plan that the last step followed to its end. Only then do a plan's earlier places say who was last at each offset.
    last_whole: Option<usize>,
    /// Slots of places that were live when the step began, which the plan does not expect.
    late: Vec<Slot>,
    planned: u64,
    difference: Option<StepDifference>,
    /// Allocations of the heap before the step.
    allocations_before: u64,
    learner: Learner,
    /// Keys for which a plan was learned that could not be adopted.
    given_up: BTreeSet<u64>,
    stats: StepStats,
}

impl Follower {
    /// The request that comes next; `None` behind the last one.
    #[inline(always)]
    pub(crate) fn turn(&self) -> Option<Turn<'_>> {
        let Adopted { expected, earlier, .. } = &self.plans[self.current?];
        let &Expected { op, place, earlier_end } = expected.get(self.next)?;
        Some(Turn { op, slot: place, earlier: earlier.get(self.earlier_from..earlier_end as usize)? })
    }

    /// Goes on to the next request.
    #[inline(always)]
    pub(crate) fn advance(&mut self, turn_end: usize, is_planned: bool) {
        self.next += 1;
        self.earlier_from = turn_end;
        self.planned += u64::from(is_planned);
    }

    /// Where the earlier places of the next request end.
    #[inline(always)]
    pub(crate) fn turn_end(&self, turn: Turn<'_>) -> usize {
        self.earlier_from + turn.earlier.len()
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
        let planned = plan.and_then(|plan| plan.allocations().get(self.next));
        let planned = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        DifferenceCause::Request { planned, requested }
    }

    /// A step begins. Says what is to be done with its requests.
    pub(crate) fn begin(&mut self, key: u64, learns: bool, allocations: u64) -> Watch {
        (self.next, self.earlier_from, self.planned, self.difference) = (0, 0, 0, None);
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
        if self.current.is_some() { Watch::Plan } else { Watch::Nothing }
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
        let difference = StepDifference { number: self.next as u32, cause };
        (self.difference, self.last_whole) = (Some(difference), None);
        difference
    }

    /// The step ends. Says what became of it, and what is to be planned now for its key.
    pub(crate) fn end(&mut self, watch: Watch, allocations: u64) -> (StepReport, Option<Vec<StepAllocation>>) {
        if watch == Watch::Plan {
            let is_whole = self.turn().is_none();
            self.last_whole = self.current.filter(|_| is_whole);
            if !is_whole {
                self.differ(DifferenceCause::Ended);
            }
        }
        let is_followed = watch == Watch::Plan && self.difference.is_none();
        if let Some(current) = self.current {
            let differences = &mut self.plans[current].differences;
            *differences = if is_followed { 0 } else { differences.saturating_add(1) };
        }
        let report = StepReport {
            allocations: allocations - self.allocations_before,
            planned: self.planned,
            difference: self.difference,
            plan_bytes: self.memory_bytes,
        };
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
        for (plan, Schedule { places, expected, earlier, carried }) in plans {
            let slot_of = |place: &u32| slots[&places[*place as usize]];
            let expected = expected.iter();
            let expected = expected.map(|it| Expected { place: it.place.as_ref().map(slot_of), ..*it }).collect();
            let mut carried: Vec<Slot> = carried.iter().map(slot_of).collect();
            carried.sort_unstable();
            let earlier = earlier.iter().map(slot_of).collect();
            self.plans.push(Adopted { plan: Arc::clone(plan), expected, earlier, carried, differences: 0 });
        }
        (self.memory, self.memory_bytes) = (Some(memory), memory_bytes);
        self.stats.adoptions += 1;
    }

    /// Gives all plans up. The slots of their places are the caller's.
    pub(crate) fn clear(&mut self) -> Option<PlanMemory> {
        self.plans.clear();
        (self.current, self.last_whole, self.memory_bytes) = (None, None, 0);
        self.memory.take()
    }

    pub(crate) fn stats(&self) -> StepStats {
        StepStats { plans: self.plans.len() as u64, plan_bytes: self.memory_bytes, ..self.stats }
    }
}
