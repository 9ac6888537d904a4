//! What a step of a plan expects, request by request, and how far it has come.

use super::plan::Plan;
use crate::blocks::table::Slot;
use crate::history::digest::{Mark, op_word};
use crate::types::backend::DeviceAddress;
use symmalloc_plan::Schedule;

/// What is expected of one allocation.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// What it asks for, as in a digest.
    op: u64,
    /// Where its places end in [`Course::checks`]. They begin where those of the allocation before end.
    checks_end: u32,
}

/// A plan that can be followed.
#[derive(Debug, Default)]
pub(crate) struct Course {
    expected: Vec<Expected>,
    /// Slots of places that must be free, of one allocation after the other. Its own is the last; one without a place has none.
    checks: Vec<Slot>,
    /// The base of the segment that all places lie in.
    base: DeviceAddress,
    /// Numbers of the allocations that are placed the ordinary way, ascending.
    unplaced: Vec<u32>,
    /// The number of the next allocation; more by [`LATE`] in a step that begins with something live that the plan does not expect.
    next: usize,
    /// Where its places begin.
    checks_from: usize,
}

/// More than any number of an allocation.
const LATE: usize = 1 << 30;

impl Course {
    /// `slot_of` gives the slot of a place by its number in the schedule.
    pub(crate) fn new(plan: &Plan, schedule: &Schedule, slot_of: impl Fn(&u32) -> Slot, base: DeviceAddress) -> Self {
        let expected = plan.allocations().iter().zip(schedule.check_ends()).map(|(planned, checks_end)| Expected {
            op: op_word(Mark::Allocate, planned.wanted.stream, planned.wanted.requested_bytes),
            checks_end: *checks_end,
        });
        let unplaced = (0..).zip(schedule.place_of()).filter(|(_, place)| place.is_none()).map(|(number, _)| number);
        Course {
            expected: expected.collect(),
            checks: schedule.checks().iter().map(slot_of).collect(),
            unplaced: unplaced.collect(),
            base,
            ..Course::default()
        }
    }

    /// The slots of the places that the next allocation needs free, if it is expected to ask for this: the last one is its own. Of none
    /// when it is placed the ordinary way. In a step that follows no plan nothing is expected, nor in one with something late, unless
    /// `OR_LATE`: these places do not tell all that may be in the way then.
    #[inline(always)]
    pub(crate) fn next_if<const OR_LATE: bool>(&self, op: u64) -> Option<&[Slot]> {
        let next = if OR_LATE { self.next % LATE } else { self.next };
        let expected = self.expected.get(next).filter(|expected| expected.op == op)?;
        self.checks.get(self.checks_from..expected.checks_end as usize)
    }

    /// The base of the segment that all places lie in.
    #[inline(always)]
    pub(crate) fn base(&self) -> DeviceAddress {
        self.base
    }

    /// Goes on to the next allocation. This one has so many places.
    #[inline(always)]
    pub(crate) fn advance(&mut self, checks: usize) {
        self.next += 1;
        self.checks_from += checks;
    }

    pub(crate) fn set_late(&mut self, has_late: bool) {
        self.next = if has_late { LATE } else { 0 };
    }

    /// The number of the next allocation.
    pub(crate) fn number(&self) -> u32 {
        (self.next % LATE) as u32
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.number() as usize == self.expected.len()
    }

    pub(crate) fn rewind(&mut self) {
        (self.next, self.checks_from) = (0, 0);
    }

    /// How many allocations so far have a place.
    pub(crate) fn planned(&self) -> u64 {
        u64::from(self.number()) - self.unplaced.partition_point(|number| *number < self.number()) as u64
    }
}
