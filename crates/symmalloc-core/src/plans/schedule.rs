//! A plan made ready to be followed: what each allocation takes, and which places must be free and waited for by then.
//!
//! A *place* is an offset with a size. Allocations with the same one share it. What lies at an allocation's place when its turn
//! comes was there before it, in this step or, for what the step touches first, in the one before:
//!
//! ```text
//!  offset ▲ ┌───┐ ┌───────┐
//!         │ │ a │ │       │      c is behind a and b: both must be free, and c's stream waits for their last users.
//!         │ └───┘ │   c   │      a and b are behind c, of the step before.
//!         │ ┌───┐ │       │
//!         │ │ b │ │       │      The places that were there last, at every offset of c, are all that c has to look at:
//!         │ └───┘ └───────┘      what lay there before them was waited for by them.
//!         └──────────────────► number
//! ```
//!
//! They are found by a sweep over two rounds of the step that remembers who was last at each offset. O(n log n).

use super::error::PlanError;
use super::plan::Plan;
use crate::config::size_rules::SizeRules;
use crate::history::digest::{Mark, op_word};
use crate::types::units::Units;
use std::collections::BTreeMap;

/// Where allocations of a plan go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) offset: Units,
    pub(crate) size: Units,
}

/// What is expected of one allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// What it asks for, as in a digest.
    pub(crate) op: u64,
    /// The number of its place; `None` when it is placed the ordinary way.
    pub(crate) place: Option<u32>,
    /// Where the places that were there before end in [`Schedule::earlier`]. They begin where those of the allocation before end.
    pub(crate) earlier_end: u32,
}

/// A plan for one way of rounding.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) places: Vec<Place>,
    pub(crate) expected: Vec<Expected>,
    /// Numbers of places that were there before, those of one allocation side by side.
    pub(crate) earlier: Vec<u32>,
    /// Places of what lives on in the next step.
    pub(crate) carried: Vec<u32>,
}

impl Schedule {
    /// Checks that no two allocations overlap.
    pub(crate) fn new(plan: &Plan, rules: &SizeRules) -> Result<Self, PlanError> {
        plan.end(rules).ok_or(PlanError::TooLarge)?;
        let mut schedule =
            Schedule { places: Vec::new(), expected: Vec::new(), earlier: Vec::new(), carried: Vec::new() };
        let mut numbers: BTreeMap<Place, u32> = BTreeMap::new();
        let mut sweep = Sweep { plan, last: BTreeMap::new() };
        let count = plan.allocations().len();
        let place_of = |number: usize| plan.place(number, rules).map(|(offset, size)| Place { offset, size });
        for number in 0..count {
            if let Some(place) = place_of(number) {
                sweep.visit(number as u32, place, |_| {})?;
                numbers.entry(place).or_insert_with(|| {
                    schedule.places.push(place);
                    schedule.places.len() as u32 - 1
                });
            }
        }
        // By place: the allocation whose list has it, so that it has it once.
        let mut listed = vec![u32::MAX; schedule.places.len()];
        for number in 0..count {
            let wanted = plan.allocations()[number].wanted;
            let place = place_of(number);
            let own = place.map(|place| numbers[&place]);
            if let (Some(place), Some(own)) = (place, own) {
                listed[own as usize] = number as u32;
                sweep.visit((count + number) as u32, place, |before| {
                    let there = numbers[&place_of(before as usize % count).expect("only placed ones are visited")];
                    if listed[there as usize] != number as u32 {
                        listed[there as usize] = number as u32;
                        schedule.earlier.push(there);
                    }
                })?;
                if wanted.until.is_some_and(|until| until as usize > count) {
                    schedule.carried.push(own);
                }
            }
            schedule.expected.push(Expected {
                op: op_word(Mark::Allocate, wanted.stream, wanted.requested_bytes),
                place: own,
                earlier_end: schedule.earlier.len() as u32,
            });
        }
        Ok(schedule)
    }
}

/// Who was last at each offset.
struct Sweep<'a> {
    plan: &'a Plan,
    /// By beginning: the end, and the number of the allocation, counted over both rounds. Disjoint.
    last: BTreeMap<Units, (Units, u32)>,
}

impl Sweep<'_> {
    /// An allocation takes its place. Gives each one that was there to `before`.
    fn visit(&mut self, number: u32, place: Place, mut before: impl FnMut(u32)) -> Result<(), PlanError> {
        let count = self.plan.allocations().len() as u32;
        let end = place.offset + place.size;
        let below = self.last.range(..place.offset).next_back().filter(|(_, (to, _))| *to > place.offset);
        let from = below.map_or(place.offset, |(from, _)| *from);
        let there: Vec<(Units, Units, u32)> =
            self.last.range(from..end).map(|(from, (to, by))| (*from, *to, *by)).collect();
        for (from, to, by) in there {
            let until = self.plan.allocations()[(by % count) as usize].wanted.until.expect("a placed one has an end");
            if by / count * count + until > number {
                return Err(PlanError::Overlap { first: by % count, second: number % count });
            }
            before(by);
            self.last.remove(&from);
            if from < place.offset {
                self.last.insert(from, (place.offset, by));
            }
            if end < to {
                self.last.insert(end, (to, by));
            }
        }
        self.last.insert(place.offset, (end, number));
        Ok(())
    }
}
