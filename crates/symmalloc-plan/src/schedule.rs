//! A schedule: a placement prepared for execution. It lists the places that must be free before each allocation, and
//! whose users the allocation waits for.
//!
//! A *place* is an offset with a size. Allocations with equal offset and size share one. The earlier users of an allocation's
//! place belong to the same step or, at offsets that the step has not used yet, to the previous one:
//!
//! ```text
//!  offset ▲ ┌───┐ ┌───────┐
//!         │ │ a │ │       │      c follows a and b: both must be free, and c's stream waits for their last users.
//!         │ └───┘ │   c   │      a and b follow c of the previous step.
//!         │ ┌───┐ │       │
//!         │ │ b │ │       │      c must check only the last place at each of its offsets:
//!         │ └───┘ └───────┘      earlier ones were waited for by these.
//!         └──────────────────► number
//! ```
//!
//! c also skips a place that an allocation of its stream has checked since the last use: the place is still free, and
//! the stream need not wait twice. A step of one stream therefore checks each use of a place once, however many
//! allocations overlap it.
//!
//! A sweep over two rounds of the step finds the checks by tracking the last place at each offset. O(n log n).

use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The place of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Offset from the start of the memory, in any unit.
    pub offset: u32,
    /// Size in the same unit; not 0.
    pub size: u32,
}

/// An allocation of a step with its place. Time is counted in allocations of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedAllocation {
    /// Its place.
    pub place: Place,
    /// Number of its stream. Work of one stream runs in order.
    pub stream: u16,
    /// Number of the allocation before which it is freed: greater than its own, and at most one step later.
    pub until: u32,
}

/// Two allocations that overlap in lifetime and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("allocations {first} and {second} overlap in time and place")]
pub struct Overlap {
    /// Number of the earlier allocation.
    pub first: u32,
    /// Number of the later allocation.
    pub second: u32,
}

/// The places of a step, and the places to check before each allocation.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    places: Vec<Place>,
    place_of: Vec<Option<u32>>,
    /// Numbers of places, grouped by allocation.
    checks: Vec<u32>,
    /// By allocation: end of its checks.
    check_ends: Vec<u32>,
    carried: Vec<u32>,
}

impl Schedule {
    /// Creates the schedule of a step that repeats these allocations; `None` stands for an allocation without a place.
    ///
    /// # Errors
    /// Returns [`Overlap`] if two of them overlap.
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
                    let there = schedule.place_of[(before % count) as usize]
                        .expect("only allocations with a place are visited");
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

    /// Returns the places in the order of their first use.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Returns the number of each allocation's place.
    pub fn place_of(&self) -> &[Option<u32>] {
        &self.place_of
    }

    /// Returns the numbers of the places that each allocation checks, grouped by allocation; its own place is the last of its group.
    pub fn checks(&self) -> &[u32] {
        &self.checks
    }

    /// Returns, for each allocation, the end of its group in [`checks`](Self::checks). The group of an allocation
    /// without a place is empty.
    pub fn check_ends(&self) -> &[u32] {
        &self.check_ends
    }

    /// Returns the numbers of the places whose allocations live into the next step.
    pub fn carried(&self) -> &[u32] {
        &self.carried
    }
}

/// The sweep, which tracks the last allocation at each offset.
struct Sweep<'a> {
    step: &'a [Option<PlacedAllocation>],
    /// By start: the end and the number of the allocation, counted over both rounds. Disjoint.
    last: BTreeMap<u32, (u32, u32)>,
    /// Allocations that were checked since their last use, each with a stream that checked it.
    seen: BTreeSet<(u32, u16)>,
}

impl Sweep<'_> {
    /// Processes an allocation. Passes each earlier allocation in its place to `before`, unless its stream has checked
    /// it already.
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
