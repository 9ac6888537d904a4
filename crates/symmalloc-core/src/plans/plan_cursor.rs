//! The cursor of a plan: the expected requests of a step, and the position in them.

use super::plan::Plan;
use crate::blocks::table::Slot;
use crate::history::digest::{Mark, op_word};
use crate::types::backend::DeviceAddress;
use symmalloc_plan::Schedule;

/// One expected allocation.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// The expected request, encoded as in a digest.
    op: u64,
    /// End of its places in [`PlanCursor::checks`]. They begin at the end of the previous allocation's places.
    checks_end: u32,
}

/// The cursor of a plan that can be followed.
#[derive(Debug, Default)]
pub(crate) struct PlanCursor {
    expected: Vec<Expected>,
    /// Slots of the places that must be free for each allocation, in allocation order. The last slot of an allocation
    /// is its own place. An allocation without a place has no slots.
    checks: Vec<Slot>,
    /// Base of the segment that contains all places.
    base: DeviceAddress,
    /// Numbers of the allocations that are placed the ordinary way, ascending.
    unplaced: Vec<u32>,
    /// Number of the next allocation, plus [`UNEXPECTED`] in a step that begins with a live allocation that the plan does not
    /// expect.
    next: usize,
    /// Start of the next allocation's places in `checks`.
    checks_from: usize,
}

/// A flag in [`PlanCursor::next`], larger than any number of an allocation.
const UNEXPECTED: usize = 1 << 30;

impl PlanCursor {
    /// Creates a cursor. `slot_of` maps the number of a place in the schedule to its slot.
    pub(crate) fn new(plan: &Plan, schedule: &Schedule, slot_of: impl Fn(&u32) -> Slot, base: DeviceAddress) -> Self {
        let expected = plan.allocations().iter().zip(schedule.check_ends()).map(|(planned, checks_end)| Expected {
            op: op_word(Mark::Allocate, planned.wanted.stream, planned.wanted.requested_bytes),
            checks_end: *checks_end,
        });
        let unplaced = (0..).zip(schedule.place_of()).filter(|(_, place)| place.is_none()).map(|(number, _)| number);
        PlanCursor {
            expected: expected.collect(),
            checks: schedule.checks().iter().map(slot_of).collect(),
            unplaced: unplaced.collect(),
            base,
            ..PlanCursor::default()
        }
    }

    /// Returns the slots of the places that must be free for the next allocation, or `None` if `op` is not the expected
    /// request. The last slot is the allocation's own place; there are no slots if it is placed the ordinary way.
    ///
    /// In a step that follows no plan, every request is unexpected. Unless `OR_UNEXPECTED`, this also holds for a step
    /// with an unexpected live allocation, for which these places are not sufficient.
    #[inline(always)]
    pub(crate) fn next_if<const OR_UNEXPECTED: bool>(&self, op: u64) -> Option<&[Slot]> {
        let next = if OR_UNEXPECTED { self.next % UNEXPECTED } else { self.next };
        let expected = self.expected.get(next).filter(|expected| expected.op == op)?;
        self.checks.get(self.checks_from..expected.checks_end as usize)
    }

    /// Returns the base of the segment that contains all places.
    #[inline(always)]
    pub(crate) fn base(&self) -> DeviceAddress {
        self.base
    }

    /// Advances to the next allocation. The current one has `checks` places.
    #[inline(always)]
    pub(crate) fn advance(&mut self, checks: usize) {
        self.next += 1;
        self.checks_from += checks;
    }

    pub(crate) fn set_unexpected(&mut self, has_unexpected: bool) {
        self.next = if has_unexpected { UNEXPECTED } else { 0 };
    }

    /// Returns the number of the next allocation.
    pub(crate) fn number(&self) -> u32 {
        (self.next % UNEXPECTED) as u32
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.number() as usize == self.expected.len()
    }

    pub(crate) fn rewind(&mut self) {
        (self.next, self.checks_from) = (0, 0);
    }

    /// Returns the number of allocations so far that have a place.
    pub(crate) fn planned(&self) -> u64 {
        u64::from(self.number()) - self.unplaced.partition_point(|number| *number < self.number()) as u64
    }
}
