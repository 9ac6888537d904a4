//! A schedule: a placement prepared for execution. For each allocation it lists the places that must be free before the
//! allocation, and whose users its stream must wait for.
//!
//! A *place* is an offset with a size. Allocations with equal offset and size share one place. The earlier users of an allocation's place
//! belong to the same step or, at offsets that the step has not used yet, to the previous step:
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
//! c also skips a place that another allocation of c's stream has checked since the place was last used. The place is
//! still free, and the stream need not wait twice. A step that uses one stream therefore checks each use of a place
//! once, however many allocations overlap the place.
//!
//! The checks are found by a sweep over two rounds of the step, which tracks the last place at each offset. It takes
//! O(n log n).

use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// The place of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Offset from the start of the memory, in any unit.
    pub offset: u32,
    /// Size in the unit of `offset`; not 0.
    pub size: u32,
}

/// An allocation of a step with its place. Times are numbers of allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedAllocation {
    /// The allocation's place.
    pub place: Place,
    /// Number of the allocation's stream. Work of one stream runs in order.
    pub stream: u16,
    /// Number of the allocation before which it is freed: greater than its own number, and at most one step later.
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
    /// Returns [`Overlap`] if two allocations overlap.
    pub fn new(step: &[Option<PlacedAllocation>]) -> Result<Self, Overlap> {
        let mut schedule = Schedule::default();
        let mut sweep = Sweep::new(step);
        let uses: Vec<Place> = step.iter().flatten().map(|placed| placed.place).collect();
        let mut first_uses = first_uses(&uses).into_iter();
        // The place of each use.
        let mut places_used: Vec<u32> = Vec::with_capacity(uses.len());
        for (number, placed) in (0..).zip(step) {
            let place_of = placed.map(|PlacedAllocation { place, .. }| {
                let first = first_uses.next().expect("every place should have a first use");
                let known = places_used.get(first).copied();
                let place_of = known.unwrap_or_else(|| {
                    schedule.places.push(place);
                    schedule.places.len() as u32 - 1
                });
                places_used.push(place_of);
                place_of
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

    /// Returns the numbers of the places that each allocation checks, grouped by allocation. The last place of a group is the allocation's
    /// own.
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

/// Returns, for each place, the index of the first place equal to it. Takes O(n log n), because a long step has many
/// places.
pub fn first_uses(places: &[Place]) -> Vec<usize> {
    let mut sorted: Vec<usize> = (0..places.len()).collect();
    sorted.sort_unstable_by_key(|index| (places[*index], *index));
    let mut first_uses = vec![0; places.len()];
    for equal in sorted.chunk_by(|a, b| places[*a] == places[*b]) {
        equal.iter().for_each(|index| first_uses[*index] = equal[0]);
    }
    first_uses
}

/// The sweep, which tracks the last allocation at each offset. Allocations are numbered consecutively over both rounds.
struct Sweep<'a> {
    step: &'a [Option<PlacedAllocation>],
    /// By start: the end and the number of the allocation. The ranges are disjoint.
    last: BTreeMap<u32, (u32, u32)>,
    /// By allocation: the first stream that has checked it since its last use.
    seen_by: Vec<Option<u16>>,
    /// Allocations that several streams have checked since their last use, with each stream after the first.
    seen_by_others: BTreeSet<(u32, u16)>,
    /// The earlier allocations in the place that is being visited: start, end and number.
    there: Vec<(u32, u32, u32)>,
}

impl<'a> Sweep<'a> {
    fn new(step: &'a [Option<PlacedAllocation>]) -> Self {
        let seen_by = vec![None; 2 * step.len()];
        Sweep { step, last: BTreeMap::new(), seen_by, seen_by_others: BTreeSet::new(), there: Vec::new() }
    }

    /// Processes an allocation. Passes each earlier allocation in its place to `before`, unless the allocation's stream
    /// has already checked it.
    fn visit(&mut self, number: u32, placed: &PlacedAllocation, mut before: impl FnMut(u32)) -> Result<(), Overlap> {
        let PlacedAllocation { place, stream, .. } = *placed;
        let count = self.step.len() as u32;
        let end = place.offset + place.size;
        let mut there = std::mem::take(&mut self.there);
        // Iterates downward, from the last entry that begins before the end of the place.
        let in_place = self.last.range(..end).rev().take_while(|(_, (to, _))| *to > place.offset);
        there.extend(in_place.map(|(from, (to, by))| (*from, *to, *by)));
        for (from, to, by) in there.drain(..).rev() {
            let until = self.step[(by % count) as usize].map_or(0, |placed| placed.until);
            if by / count * count + until > number {
                return Err(Overlap { first: by % count, second: number % count });
            }
            if self.note_checked(by, stream) {
                before(by);
            }
            // An entry at the start of the place is replaced below.
            if from < place.offset {
                self.last.insert(from, (place.offset, by));
            } else if from > place.offset {
                self.last.remove(&from);
            }
            if end < to {
                self.last.insert(end, (to, by));
            }
        }
        self.there = there;
        self.last.insert(place.offset, (end, number));
        Ok(())
    }

    /// Notes that a stream checks an allocation. Returns `true` if the stream had not checked it since the allocation's
    /// last use.
    fn note_checked(&mut self, by: u32, stream: u16) -> bool {
        match &mut self.seen_by[by as usize] {
            Some(first) => *first != stream && self.seen_by_others.insert((by, stream)),
            none => {
                *none = Some(stream);
                true
            }
        }
    }
}
