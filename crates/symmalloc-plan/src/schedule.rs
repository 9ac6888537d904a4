//! A placement made ready to be followed: which places must be free, and waited for, before each allocation.
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
//! Nor does c look at a place that an allocation of its stream looked at since it was last in use: it is free still, and the stream
//! waits for nobody twice. So a step of one stream looks at each of its places once, however many come to lie there.
//!
//! They are found by a sweep over two rounds of the step that remembers who was last at each offset. O(n log n).

use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Where an allocation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// From the start of the memory, in any unit.
    pub offset: u32,
    /// In the same unit; not 0.
    pub size: u32,
}

/// An allocation of a step that has a place. Time is counted in allocations of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedAllocation {
    /// Where it goes.
    pub place: Place,
    /// What is allocated for one stream is used in order.
    pub stream: u16,
    /// The number of the allocation before which it is free: more than its own, and at most one step later.
    pub until: u32,
}

/// Two allocations are live at the same time in the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("allocations {first} and {second} overlap in time and place")]
pub struct Overlap {
    /// The number of the one that was there.
    pub first: u32,
    /// The number of the one that came.
    pub second: u32,
}

/// The places of a step, and what was at each of them before.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    places: Vec<Place>,
    place_of: Vec<Option<u32>>,
    /// Numbers of places, those of one allocation side by side.
    checks: Vec<u32>,
    /// By allocation: where its checks end.
    check_ends: Vec<u32>,
    carried: Vec<u32>,
}

impl Schedule {
    /// Of a step that makes these allocations again and again; `None` for one without a place.
    ///
    /// # Errors
    /// When two of them overlap.
    pub fn new(step: &[Option<PlacedAllocation>]) -> Result<Self, Overlap> {
        let mut schedule = Schedule::default();
        let mut numbers: BTreeMap<Place, u32> = BTreeMap::new();
        let mut sweep = Sweep { step, last: BTreeMap::new(), seen: BTreeSet::new() };
        for (number, placed) in (0..).zip(step) {
            let place_of = placed.map(|PlacedAllocation { place, .. }| {
                *numbers.entry(place).or_insert_with(|| {
                    schedule.places.push(place);
                    schedule.places.len() as u32 - 1
                })
            });
            schedule.place_of.push(place_of);
            if let Some(placed) = placed {
                sweep.visit(number, placed, |_| {})?;
            }
        }
        let count = step.len() as u32;
        for (number, placed) in (0..).zip(step) {
            if let (Some(placed), Some(own)) = (placed, schedule.place_of[number as usize]) {
                sweep.visit(count + number, placed, |before| {
                    let there = schedule.place_of[(before % count) as usize].expect("only placed ones are visited");
                    schedule.checks.extend((there != own).then_some(there));
                })?;
                schedule.checks.push(own);
                if placed.until > count {
                    schedule.carried.push(own);
                }
            }
            schedule.check_ends.push(schedule.checks.len() as u32);
        }
        Ok(schedule)
    }

    /// The places, in the order in which they are first taken.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// By allocation: the number of its place.
    pub fn place_of(&self) -> &[Option<u32>] {
        &self.place_of
    }

    /// Numbers of the places that an allocation looks at, its own the last one: of the first allocation, then of the second, and so on.
    pub fn checks(&self) -> &[u32] {
        &self.checks
    }

    /// By allocation: where its part of [`checks`](Self::checks) ends. One without a place has none.
    pub fn check_ends(&self) -> &[u32] {
        &self.check_ends
    }

    /// Numbers of the places of what lives on in the next step.
    pub fn carried(&self) -> &[u32] {
        &self.carried
    }
}

/// Who was last at each offset.
struct Sweep<'a> {
    step: &'a [Option<PlacedAllocation>],
    /// By beginning: the end, and the number of the allocation, counted over both rounds. Disjoint.
    last: BTreeMap<u32, (u32, u32)>,
    /// Allocations that were looked at since, each with a stream that looked.
    seen: BTreeSet<(u32, u16)>,
}

impl Sweep<'_> {
    /// An allocation takes its place. Gives each one that was there to `before`, unless its stream looked at it already.
    fn visit(&mut self, number: u32, placed: &PlacedAllocation, mut before: impl FnMut(u32)) -> Result<(), Overlap> {
        let PlacedAllocation { place, stream, .. } = *placed;
        let count = self.step.len() as u32;
        let end = place.offset + place.size;
        let below = self.last.range(..place.offset).next_back().filter(|(_, (to, _))| *to > place.offset);
        let from = below.map_or(place.offset, |(from, _)| *from);
        let there: Vec<(u32, u32, u32)> =
            self.last.range(from..end).map(|(from, (to, by))| (*from, *to, *by)).collect();
        for (from, to, by) in there {
            let until = self.step[(by % count) as usize].map_or(0, |placed| placed.until);
            if by / count * count + until > number {
                return Err(Overlap { first: by % count, second: number % count });
            }
            if self.seen.insert((by, stream)) {
                before(by);
            }
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
