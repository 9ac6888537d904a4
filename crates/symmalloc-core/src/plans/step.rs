//! The state of a heap's step, which determines how the heap serves requests.
//!
//! | state | begins | ends |
//! |---|---|---|
//! | none | | with the next step |
//! | following | with a step whose key has a plan, if there is memory for the plans | at the first difference, or with the step |
//! | diverged | at a difference from the plan, or with the step if there is no memory | with the step |
//! | learning | with a step that a learning heap has no good plan for | with the step |
//! | unplanned | with any other step, or when other plans replace the plans of an open step | with the step |

use super::plan::Plan;
use super::report::StepDifference;
use crate::arena::Arena;
use crate::blocks::table::Slot;
use crate::history::digest::{Mark, op_word};
use crate::types::ids::StreamId;
use symmalloc_plan::Schedule;

/// The state of a heap's step. In every state except [`Following`](Self::Following), requests are placed by best fit.
#[derive(Debug, Default)]
pub(crate) enum Step {
    /// No step is open.
    #[default]
    None,
    /// The step has no plan and is not logged.
    Unplanned {
        /// Number of the heap's allocations before the step.
        allocations_before: u64,
    },
    /// The step differed from its plan. Boxed, so that one comparison decodes the enum's tag.
    Diverged(Box<Diverged>),
    /// Each request is compared with the plan's next request.
    Following(Box<Following>),
    /// Each request is logged, to learn a plan.
    Learning {
        /// Number of the heap's allocations before the step.
        allocations_before: u64,
    },
}

/// A step that follows a plan.
#[derive(Debug)]
pub(crate) struct Following {
    /// Index of the plan in its heap.
    pub(super) plan: usize,
    pub(super) cursor: PlanCursor,
    /// Slots of places that were unexpectedly live when the step began. Every request also checks these places.
    pub(super) unexpected_live: Vec<Slot>,
    pub(super) allocations_before: u64,
}

impl Following {
    /// Returns the place of a request and advances, if the request is the plan's next one and its stream has nothing to
    /// wait for. Otherwise returns `None`, and [`HeapPlans::answer`](super::heap_plans::HeapPlans::answer) then decides
    /// where to place the request.
    #[inline(always)]
    pub(crate) fn next_place(&mut self, arena: &Arena, stream: StreamId, requested: u64) -> Option<Slot> {
        if !self.unexpected_live.is_empty() {
            return None;
        }
        self.cursor.take_if(op_word(Mark::Allocate, stream, requested), arena, stream)
    }

    /// Records that the plan's next allocation was made as expected.
    #[inline]
    pub(crate) fn note_served(&mut self) {
        self.cursor.advance();
    }
}

/// A step that differed from its plan, and is no longer compared with it.
#[derive(Debug)]
pub(crate) struct Diverged {
    pub(super) difference: StepDifference,
    /// Number of allocations that the plan placed before the difference.
    pub(super) planned: u64,
    pub(super) allocations_before: u64,
}

impl Diverged {
    pub(crate) fn difference(&self) -> StepDifference {
        self.difference
    }

    /// Returns the number of allocations before the step, the number of planned allocations, and the difference.
    pub(super) fn into_report(self) -> (u64, u64, Option<StepDifference>) {
        (self.allocations_before, self.planned, Some(self.difference))
    }
}

/// An allocation that the plan expects, and the places that must be free for it.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// The expected request, encoded as in a digest.
    op: u64,
    /// End of its places in [`PlanCursor::checks`]. They begin at the end of the previous allocation's places.
    checks_end: u32,
}

/// A position in a plan, and the plan's allocations in the form in which requests are compared with them.
#[derive(Debug, Default)]
pub(crate) struct PlanCursor {
    expected: Vec<Expected>,
    /// Slots of the places that must be free for each allocation, in allocation order. The last slot of an allocation
    /// is its own place. An allocation without a place has no slots.
    checks: Vec<Slot>,
    /// Numbers of the allocations that are placed by best fit, ascending.
    unplaced: Vec<u32>,
    /// Number of the next allocation.
    next: usize,
    /// Start of the next allocation's places in `checks`.
    checks_from: usize,
}

impl PlanCursor {
    /// Creates a cursor. `slot_of` maps the number of a place in the schedule to its slot.
    pub(crate) fn new(plan: &Plan, schedule: &Schedule, slot_of: impl Fn(&u32) -> Slot) -> Self {
        let expected = plan.allocations().iter().zip(schedule.check_ends()).map(|(planned, checks_end)| Expected {
            op: op_word(Mark::Allocate, planned.wanted.stream, planned.wanted.requested_bytes),
            checks_end: *checks_end,
        });
        let unplaced = (0..).zip(schedule.place_of()).filter(|(_, place)| place.is_none()).map(|(number, _)| number);
        PlanCursor {
            expected: expected.collect(),
            checks: schedule.checks().iter().map(slot_of).collect(),
            unplaced: unplaced.collect(),
            ..PlanCursor::default()
        }
    }

    /// Returns the place of the next allocation and advances, if `op` is the expected request and all places that must
    /// be free are ready for `stream`.
    #[inline(always)]
    pub(crate) fn take_if(&mut self, op: u64, arena: &Arena, stream: StreamId) -> Option<Slot> {
        let checks_end = self.expected.get(self.next).filter(|expected| expected.op == op)?.checks_end as usize;
        let [others @ .., own] = self.checks.get(self.checks_from..checks_end)? else { return None };
        let own = *own;
        for slot in others {
            if !arena.block(*slot).is_ready_for(stream) {
                return None;
            }
        }
        if !arena.block(own).is_ready_for(stream) {
            return None;
        }
        self.next += 1;
        self.checks_from = checks_end;
        Some(own)
    }

    /// Returns the slots of the places that must be free for the next allocation, or `None` if `op` is not the expected
    /// request. The last slot is the allocation's own place; there are no slots if it is placed by best fit.
    #[inline]
    pub(crate) fn checks_of(&self, op: u64) -> Option<&[Slot]> {
        let expected = self.expected.get(self.next).filter(|expected| expected.op == op)?;
        self.checks.get(self.checks_from..expected.checks_end as usize)
    }

    /// Advances to the next allocation.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.checks_from = self.expected[self.next].checks_end as usize;
        self.next += 1;
    }

    /// Returns the number of the next allocation.
    pub(crate) fn number(&self) -> u32 {
        self.next as u32
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.next == self.expected.len()
    }

    /// Returns the cursor, moved back to the first allocation.
    pub(crate) fn rewound(self) -> Self {
        PlanCursor { next: 0, checks_from: 0, ..self }
    }

    /// Returns the number of allocations so far that have a place in the plan.
    pub(crate) fn planned(&self) -> u64 {
        u64::from(self.number()) - self.unplaced.partition_point(|number| *number < self.number()) as u64
    }
}
