//! The step of a heap, which decides what happens to its requests.
//!
//! | state | begins | ends |
//! |---|---|---|
//! | none | | with the next step |
//! | following | with a step whose key has a plan, if there is memory for the plans | at the first difference, or with the step |
//! | diverged | at a difference from the plan, or with the step if there is no memory | with the step |
//! | learning | with a step that a learning heap has no good plan for | with the step |
//! | unplanned | with any other step, or when other plans replace the plans of an open step | with the step |

use super::plan_cursor::PlanCursor;
use super::report::StepDifference;
use crate::arena::Arena;
use crate::blocks::table::Slot;
use crate::history::digest::{Mark, op_word};
use crate::types::ids::StreamId;

/// The state of a heap's step. Only [`Following`](Self::Following) places requests otherwise than by best fit.
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
    /// The step differed from its plan.
    Diverged(Diverged),
    /// Each request is compared with the plan's next one.
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
    /// Slots of places that were unexpectedly live when the step began, which every request also checks.
    pub(super) unexpected_live: Vec<Slot>,
    pub(super) allocations_before: u64,
}

impl Following {
    /// Returns the place of a request that is the plan's next, if its stream has nothing to wait for. Advances to the
    /// next request. Otherwise, [`HeapPlans::answer`](super::heap_plans::HeapPlans::answer) decides.
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

    /// Returns the number of allocations before the step, and the report's numbers of planned allocations and difference.
    pub(super) fn into_report(self) -> (u64, u64, Option<StepDifference>) {
        (self.allocations_before, self.planned, Some(self.difference))
    }
}
