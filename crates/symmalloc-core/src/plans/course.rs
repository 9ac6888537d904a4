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
    /// The number of the next allocation, and where its places begin.
    next: usize,
    checks_from: usize,
    /// Whether something is live from before the step that the plan does not expect: then the places do not tell all that may be in
    /// the way.
    has_late: bool,
}

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
    /// when it is placed the ordinary way. In a step that follows no plan nothing is expected.
    #[inline(always)]
    pub(crate) fn next_if(&self, op: u64) -> Option<&[Slot]> {
        let expected = self.expected.get(self.next).filter(|expected| expected.op == op)?;
        self.checks.get(self.checks_from..expected.checks_end as usize)
    }

    /// Whether these places tell all that may be in the way.
    #[inline(always)]
    pub(crate) fn tells_all(&self) -> bool {
        !self.has_late
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
        self.has_late = has_late;
    }

    /// The number of the next allocation.
    pub(crate) fn number(&self) -> u32 {
        self.next as u32
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.next == self.expected.len()
    }

    pub(crate) fn rewind(&mut self) {
        (self.next, self.checks_from, self.has_late) = (0, 0, false);
    }

    /// How many allocations so far have a place.
    pub(crate) fn planned(&self) -> u64 {
        (self.next - self.unplaced.partition_point(|number| *number < self.number())) as u64
    }
}
