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
//! All plans of a heap place in the same memory, one block of it. It is there from the first step that follows a plan to the next step
//! that follows none: such a step has the memory for itself. A place has a slot of the block table as long as that memory is there.
//! It is in no segment's ring, so it has no neighbours: that is how a place is told from a block.

use super::course::Course;
use super::plan::Plan;
use super::report::{DifferenceCause, StepDifference, StepReport, StepStats};
use crate::blocks::table::Slot;
use crate::types::backend::DeviceAddress;
use crate::types::ids::StreamId;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;
use symmalloc_plan::{Lived, Place, Schedule, StepLearner};

/// What is asked for: a stream and bytes.
type Request = (StreamId, u64);

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
    /// Refuses them: the pool sleeps, and no step is open.
    Refuse,
}

/// A plan that is known.
#[derive(Debug)]
struct Known {
    plan: Arc<Plan>,
    /// Steps of its key in a row that differed.
    differences: u32,
}

/// A plan in the plan memory.
#[derive(Debug)]
struct Placed {
    /// Lent to the heap while a step follows it.
    course: Course,
    /// Slots of places of what lives on in the next step, ascending.
    carried: Vec<Slot>,
}

/// The memory that plans place in.
#[derive(Debug)]
pub(crate) struct PlanMemory {
    /// Its block, which is in the segment's ring.
    pub(crate) block: Slot,
    /// The base of its segment.
    pub(crate) base: DeviceAddress,
    pub(crate) size_bytes: u64,
    /// The slots of all places.
    pub(crate) places: Vec<Slot>,
    /// Streams that plans allocate for, ascending.
    pub(crate) streams: SmallVec<[StreamId; 2]>,
}

/// The plans of one heap.
#[derive(Debug, Default)]
pub(crate) struct Follower {
    plans: Vec<Known>,
    memory: Option<PlanMemory>,
    /// The plans in that memory, in the same order; none while there is no memory.
    placed: Vec<Placed>,
    /// The plan of the step; `None` when no plan has its key.
    current: Option<usize>,
    /// The plan that the last step followed to its end. Only then does a plan know who was last at each offset.
    last_whole: Option<usize>,
    /// Slots of places that were live when the step began, which the plan does not expect.
    late: Vec<Slot>,
    difference: Option<StepDifference>,
    /// Allocations of the heap before the step.
    allocations_before: u64,
    learner: StepLearner<Request>,
    /// There was no memory for the plans: none is followed or learned any more.
    has_given_up: bool,
    stats: StepStats,
}

impl Follower {
    /// Slots of places that were live when the step began, which the plan does not expect.
    #[inline(always)]
    pub(crate) fn late(&self) -> &[Slot] {
        &self.late
    }

    /// An allocation was made in a step that is logged.
    pub(crate) fn note_allocation(&mut self, request: Request, slot: Slot) {
        self.learner.note_allocation(request, slot);
    }

    /// An allocation was freed, which need not be logged. Returns whether others are, or lie at places.
    pub(crate) fn note_free(&mut self, slot: Slot) -> bool {
        self.learner.note_free(slot);
        self.memory.is_some() || self.learner.is_waiting()
    }

    pub(crate) fn memory(&self) -> Option<&PlanMemory> {
        self.memory.as_ref()
    }

    /// Bytes of memory that plans place in.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.size_bytes)
    }

    /// What was asked for when the plan expected something else for the allocation with this number.
    pub(crate) fn other_request(&self, number: u32, requested: (StreamId, u64)) -> DifferenceCause {
        let plan = self.current.map(|current| &self.plans[current].plan);
        let planned = plan.and_then(|plan| plan.allocations().get(number as usize));
        let planned = planned.map(|planned| (planned.wanted.stream, planned.wanted.requested_bytes));
        DifferenceCause::Request { planned, requested }
    }

    /// A step begins. Says what is to be done with its requests.
    pub(crate) fn begin(&mut self, key: u64, learns: bool, allocations: u64) -> Watch {
        self.difference = None;
        self.allocations_before = allocations;
        self.late.clear();
        self.current = self.plans.iter().position(|known| known.plan.key() == key);
        self.last_whole = self.last_whole.filter(|last| self.current == Some(*last));
        let is_good = self.current.is_some_and(|at| self.plans[at].differences < DIFFERENCES_MAX);
        if learns && !is_good && !self.has_given_up {
            self.learner.begin(key);
            return Watch::Learn;
        }
        self.learner.pause();
        if self.current.is_some() && !self.has_given_up { Watch::Plan } else { Watch::Nothing }
    }

    /// Lends what the requests of the step are compared with. The plans are in their memory.
    pub(crate) fn lend(&mut self) -> Course {
        self.current.map_or_else(Course::default, |current| std::mem::take(&mut self.placed[current].course))
    }

    /// Whether the step before followed the same plan to its end.
    pub(crate) fn is_continued(&self) -> bool {
        self.last_whole.is_some()
    }

    /// The step begins with these places live. Returns whether the plan does not expect some of them.
    pub(crate) fn note_live(&mut self, is_live: impl Fn(&Slot) -> bool) -> bool {
        let (Some(current), Some(memory)) = (self.current, &self.memory) else { return false };
        let carried = &self.placed[current].carried;
        let late = memory.places.iter().filter(|slot| is_live(slot) && carried.binary_search(slot).is_err());
        self.late.extend(late);
        !self.late.is_empty()
    }

    /// The step differs from its plan at the allocation with this number.
    pub(crate) fn differ(&mut self, number: u32, cause: DifferenceCause) -> StepDifference {
        let difference = StepDifference { number, cause };
        (self.difference, self.last_whole) = (Some(difference), None);
        difference
    }

    /// The step ends, and gives back what it was lent. Says what became of it, and what is to be planned now for its key.
    pub(crate) fn end(
        &mut self,
        watch: Watch,
        mut course: Course,
        allocations: u64,
    ) -> (StepReport, Option<Vec<Lived<Request>>>) {
        if watch == Watch::Plan {
            self.last_whole = self.current;
            if !course.is_at_end() {
                self.differ(course.number(), DifferenceCause::Ended);
            }
        }
        let is_followed = watch == Watch::Plan && self.difference.is_none();
        let report = StepReport {
            allocations: allocations - self.allocations_before,
            planned: course.planned(),
            difference: self.difference,
            plan_bytes: self.memory_bytes(),
        };
        if let Some(current) = self.current {
            let differences = &mut self.plans[current].differences;
            *differences = if is_followed { 0 } else { differences.saturating_add(1) };
            if let Some(placed) = self.placed.get_mut(current) {
                course.rewind();
                placed.course = course;
            }
        }
        self.stats.steps += 1;
        self.stats.followed += u64::from(is_followed);
        self.stats.allocations += report.allocations;
        self.stats.planned += report.planned;
        (report, if watch == Watch::Learn { self.learner.end() } else { None })
    }

    /// No plan is followed or learned any more.
    pub(crate) fn give_up(&mut self) {
        self.has_given_up = true;
    }

    /// Whether it knows or learns anything that later steps depend on.
    pub(crate) fn remembers(&self) -> bool {
        self.has_given_up || !self.plans.is_empty() || !self.learner.is_empty()
    }

    /// Knows nothing of earlier steps any more. There is no plan memory.
    pub(crate) fn forget(&mut self) {
        self.set_plans(std::iter::empty());
        self.learner = StepLearner::default();
    }

    /// The plans, in the order in which they came.
    pub(crate) fn plans(&self) -> Vec<Arc<Plan>> {
        self.plans.iter().map(|known| Arc::clone(&known.plan)).collect()
    }

    /// Knows these plans from now on, and no others. There is no plan memory.
    pub(crate) fn set_plans(&mut self, plans: impl Iterator<Item = Arc<Plan>>) {
        assert!(self.memory.is_none(), "plans change while they have no memory");
        self.plans = plans.map(|plan| Known { plan, differences: 0 }).collect();
        self.stats.learned += u64::from(!self.plans.is_empty());
        (self.current, self.last_whole, self.has_given_up) = (None, None, false);
    }

    /// The plans have memory. Every place of theirs has a slot in it.
    pub(crate) fn install(&mut self, schedules: &[Schedule], slots: &BTreeMap<Place, Slot>, memory: PlanMemory) {
        for (known, schedule) in self.plans.iter().zip(schedules) {
            let slot_of = |place: &u32| slots[&schedule.places()[*place as usize]];
            let mut carried: Vec<Slot> = schedule.carried().iter().map(slot_of).collect();
            carried.sort_unstable();
            let course = Course::new(&known.plan, schedule, slot_of, memory.base);
            self.placed.push(Placed { course, carried });
        }
        self.memory = Some(memory);
        self.stats.placed += 1;
    }

    /// The plans have no memory any more. The slots of their places are the caller's.
    pub(crate) fn take_memory(&mut self) -> Option<PlanMemory> {
        self.placed.clear();
        self.last_whole = None;
        self.memory.take()
    }

    pub(crate) fn stats(&self) -> StepStats {
        StepStats { plans: self.plans.len() as u64, plan_bytes: self.memory_bytes(), ..self.stats }
    }
}
