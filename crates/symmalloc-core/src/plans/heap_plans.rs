//! A heap's plans, and the state of the step that follows one.
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
//! All plans of a heap share the *plan memory*, which is one block of the heap. It exists from the first step that
//! follows a plan until the next step that follows none, which uses it as ordinary memory. While the plan memory
//! exists, each place has a slot in the block table. Unlike a block, a place is in no segment's ring and has no
//! neighbors.

use super::plan::Plan;
use super::plan_cursor::PlanCursor;
use super::report::{DifferenceCause, StepDifference, StepReport, StepStats};
use crate::blocks::table::Slot;
use crate::types::backend::DeviceAddress;
use crate::types::ids::StreamId;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_plan::{Lived, Place, Schedule, StepLearner};

/// A request: a stream and bytes.
type Request = (StreamId, u64);

/// Maximum number of consecutive steps of one key that may differ before a heap learns them again.
const DIFFERENCES_MAX: u32 = 2;

/// The use of plans in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StepMode {
    /// None, or no step is open.
    #[default]
    Ordinary,
    /// Compares requests with a plan. The rest of the step is [`Ordinary`](Self::Ordinary) from the first difference.
    Follow,
    /// Logs requests, to learn a plan.
    Learn,
}

/// A known plan.
#[derive(Debug)]
struct Known {
    plan: Arc<Plan>,
    /// Number of consecutive steps of its key that differed.
    differences: u32,
}

/// A plan in the plan memory.
#[derive(Debug)]
struct Placed {
    /// The cursor; the heap takes it while a step follows the plan.
    cursor: PlanCursor,
    /// Slots of the places of allocations that live into the next step, ascending.
    carried_over: Vec<Slot>,
}

/// The memory in which plans place allocations.
#[derive(Debug)]
pub(crate) struct PlanMemory {
    /// Its block, which is in the segment's ring.
    pub(crate) block: Slot,
    /// The base of its segment.
    pub(crate) base: DeviceAddress,
    pub(crate) size_bytes: u64,
    /// The slots of all places.
    pub(crate) places: Vec<Slot>,
    /// The streams for which plans allocate, ascending.
    pub(crate) streams: SmallVec<[StreamId; 2]>,
}

/// The plans of one heap.
#[derive(Debug, Default)]
pub(crate) struct HeapPlans {
    plans: Vec<Known>,
    memory: Option<PlanMemory>,
    /// The plans in the plan memory, in the same order; empty while there is no memory.
    placed: Vec<Placed>,
    /// The use of plans in the open step.
    mode: StepMode,
    /// Index of the current step's plan; `None` if no plan has its key.
    current: Option<usize>,
    /// The plan that the last step followed to its end. A plan knows the last user of each offset only after such a
    /// step.
    last_whole: Option<usize>,
    /// Slots of places that were unexpectedly live when the step began.
    unexpected_live: Vec<Slot>,
    difference: Option<StepDifference>,
    /// Number of the heap's allocations before the step.
    allocations_before: u64,
    learner: StepLearner<Request>,
    /// `true` if there was no memory for the plans: plans are no longer followed or learned.
    has_given_up: bool,
    stats: StepStats,
}

impl HeapPlans {
    /// Returns the slots of places that were unexpectedly live when the step began.
    #[inline(always)]
    pub(crate) fn unexpected_live(&self) -> &[Slot] {
        &self.unexpected_live
    }

    /// Logs an allocation of the step.
    pub(crate) fn note_allocation(&mut self, request: Request, slot: Slot) {
        self.learner.note_allocation(request, slot);
    }

    /// Logs the free of an allocation outside of the plan memory.
    #[inline(never)]
    pub(crate) fn note_free(&mut self, slot: Slot) {
        self.learner.note_free(slot);
    }

    pub(crate) fn is_learning(&self) -> bool {
        self.mode == StepMode::Learn
    }

    pub(crate) fn memory(&self) -> Option<&PlanMemory> {
        self.memory.as_ref()
    }

    /// Returns the bytes of the plan memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.size_bytes)
    }

    /// Returns the difference between a request and the plan's expectation for the allocation with this number.
    pub(crate) fn other_request(&self, number: u32, requested: (StreamId, u64)) -> DifferenceCause {
        let plan = self.current.map(|current| &self.plans[current].plan);
        let planned = plan.and_then(|plan| plan.allocations().get(number as usize));
        let planned = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        DifferenceCause::Request { planned, requested }
    }

    /// Begins a step. Returns the use of plans in it.
    pub(crate) fn begin(&mut self, key: u64, learns: bool, allocations: u64) -> StepMode {
        self.difference = None;
        self.allocations_before = allocations;
        self.unexpected_live.clear();
        self.current = self.plans.iter().position(|known| known.plan.key() == key);
        self.last_whole = self.last_whole.filter(|last| self.current == Some(*last));
        let is_good = self.current.is_some_and(|at| self.plans[at].differences < DIFFERENCES_MAX);
        self.mode = if self.has_given_up {
            StepMode::Ordinary
        } else if learns && !is_good {
            StepMode::Learn
        } else if self.current.is_some() {
            StepMode::Follow
        } else {
            StepMode::Ordinary
        };
        if self.mode == StepMode::Learn {
            self.learner.begin(key)
        } else {
            self.learner.pause()
        }
        self.mode
    }

    /// Takes the cursor of the step's plan. The plan memory exists.
    pub(crate) fn take_cursor(&mut self) -> PlanCursor {
        self.current.map_or_else(PlanCursor::default, |current| std::mem::take(&mut self.placed[current].cursor))
    }

    /// Returns `true` if the previous step followed the same plan to its end.
    pub(crate) fn is_continued(&self) -> bool {
        self.last_whole.is_some()
    }

    /// Records which places are live at the start of the step. Returns `true` if some of them are unexpected.
    pub(crate) fn note_live(&mut self, is_live: impl Fn(&Slot) -> bool) -> bool {
        let (Some(current), Some(memory)) = (self.current, &self.memory) else { return false };
        let carried_over = &self.placed[current].carried_over;
        let unexpected = memory.places.iter().filter(|slot| is_live(slot) && carried_over.binary_search(slot).is_err());
        self.unexpected_live.extend(unexpected);
        !self.unexpected_live.is_empty()
    }

    /// Records that the step differs from its plan at the allocation with this number.
    pub(crate) fn differ(&mut self, number: u32, cause: DifferenceCause) -> StepDifference {
        let difference = StepDifference { number, cause };
        (self.mode, self.difference, self.last_whole) = (StepMode::Ordinary, Some(difference), None);
        difference
    }

    /// Ends the step and takes its cursor back. Returns the report, and the allocations to plan for its key, if any.
    pub(crate) fn end(
        &mut self,
        mut cursor: PlanCursor,
        allocations: u64,
    ) -> (StepReport, Option<Vec<Lived<Request>>>) {
        if self.mode == StepMode::Follow {
            self.last_whole = self.current;
            if !cursor.is_at_end() {
                self.differ(cursor.number(), DifferenceCause::Ended);
            }
        }
        let mode = std::mem::take(&mut self.mode);
        let is_followed = mode == StepMode::Follow;
        let report = StepReport {
            allocations: allocations - self.allocations_before,
            planned: cursor.planned(),
            difference: self.difference,
            plan_bytes: self.memory_bytes(),
        };
        if let Some(current) = self.current {
            let differences = &mut self.plans[current].differences;
            *differences = if is_followed { 0 } else { differences.saturating_add(1) };
            if let Some(placed) = self.placed.get_mut(current) {
                cursor.rewind();
                placed.cursor = cursor;
            }
        }
        self.stats.steps += 1;
        self.stats.followed += u64::from(is_followed);
        self.stats.allocations += report.allocations;
        self.stats.planned += report.planned;
        (report, if mode == StepMode::Learn { self.learner.end() } else { None })
    }

    /// Stops following and learning plans.
    pub(crate) fn give_up(&mut self) {
        self.has_given_up = true;
    }

    /// Returns `true` if later steps depend on known plans or on earlier, logged steps.
    pub(crate) fn remembers(&self) -> bool {
        self.has_given_up || !self.plans.is_empty() || !self.learner.is_empty()
    }

    /// Forgets all earlier steps. There must be no plan memory.
    pub(crate) fn forget(&mut self) {
        self.set_plans(std::iter::empty());
        self.learner = StepLearner::default();
    }

    /// Returns the plans in the order of their adoption.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.iter().map(|known| Arc::clone(&known.plan)).collect()
    }

    /// Replaces the plans. There must be no plan memory.
    pub(crate) fn set_plans(&mut self, plans: impl Iterator<Item = Arc<Plan>>) {
        assert!(self.memory.is_none(), "plans must not change while the plan memory exists");
        self.plans = plans.map(|plan| Known { plan, differences: 0 }).collect();
        self.stats.learned += u64::from(!self.plans.is_empty());
        (self.current, self.last_whole, self.has_given_up) = (None, None, false);
    }

    /// Installs the plans in their memory, in which every place has a slot.
    pub(crate) fn install(&mut self, schedules: &[Schedule], slots: &BTreeMap<Place, Slot>, memory: PlanMemory) {
        for (known, schedule) in self.plans.iter().zip(schedules) {
            let slot_of = |place: &u32| slots[&schedule.places()[*place as usize]];
            let mut carried_over: Vec<Slot> = schedule.carried().iter().map(slot_of).collect();
            carried_over.sort_unstable();
            let cursor = PlanCursor::new(&known.plan, schedule, slot_of, memory.base);
            self.placed.push(Placed { cursor, carried_over });
        }
        self.memory = Some(memory);
        self.stats.placed += 1;
    }

    /// Removes the plan memory. The caller owns the slots of the places.
    pub(crate) fn take_memory(&mut self) -> Option<PlanMemory> {
        self.placed.clear();
        self.last_whole = None;
        self.memory.take()
    }

    pub(crate) fn stats(&self) -> StepStats {
        StepStats { plans: self.plans.len() as u64, plan_bytes: self.memory_bytes(), ..self.stats }
    }
}
