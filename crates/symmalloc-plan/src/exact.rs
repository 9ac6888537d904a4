//! Exact search: is there a placement below a capacity, and which?
//!
//! Every placement can be let down until each rectangle lies on the bottom or on another one. What is left can be built from below:
//! rectangle by rectangle, each not lower than the one before it, and each as low as what was placed before lets it. The search
//! goes through these sequences, depth first. Rectangles of the same offset come in one order, the preference, so that no placement
//! is met twice.
//!
//! ```text
//!  capacity ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
//!             ▲ unplaced ▲
//!           ┌───┐            ┌────┐     floor: below it a section takes nothing more
//!           │ c ├────┐  ┌────┤ d  │     each section needs floor + what is unplaced in it ≤ capacity
//!         ┌─┴───┤ b  │  │ a  ├────┘
//!         └─────┴────┴──┴────┘
//!              sections of time
//! ```
//!
//! It turns back as soon as it can:
//! - **Room.** In each section what is unplaced must fit between the floor and the capacity. The floor is the lowest offset that
//!   any unplaced rectangle of the section still has, and not below the last one placed.
//! - **Waste.** No rectangle is placed so high that another one, which is unplaced, would fit below it: it could have come first.
//! - **Twins.** Of rectangles with the same size and sections only the first is tried.
//! - **Nothing above.** A rectangle that overlaps no unplaced one is in nobody's way. What fails with it fails without it.
//! - **Parts.** Where no unplaced rectangle lives in two neighbouring sections, the times before and after are solved one by one,
//!   the one with the fewest rectangles first. When one cannot be, the placement before the cut was wrong, and no other solution of
//!   the finished parts is looked for.
//!
//! The ideas are those of MiniMalloc (Moffitt, ASPLOS 2023). How long a search takes depends on the preference, by orders of
//! magnitude and not predictably, so the caller gives each a few steps in turn. Memory: O(n²) at worst, some
//! 50 MiB, for pairs that overlap and lists of what is unplaced.

use crate::problem::Problem;
use crate::sections::{Run, Sections};
use std::cmp::Reverse;

/// More rectangles are not searched: they are hardly ever solved, and heuristics do well on them.
const RECTANGLES_MAX: usize = 2048;

/// Rectangles, or runs of few sections, that are looked at in the time of a step.
const LOOKS_PER_STEP: u64 = 4;

/// Which of the rectangles that could go to the same offset is tried first. Each begins with one, and breaks ties with the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Preference {
    /// Long lives, then large areas.
    Life,
    /// Sections in which most is unplaced, then large areas.
    LoadThenArea,
    /// Sections in which most is unplaced, then long lives.
    LoadThenLife,
}

impl Preference {
    pub(crate) const ALL: [Preference; 3] = [Preference::Life, Preference::LoadThenArea, Preference::LoadThenLife];
}

/// What a search came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Offsets by place in the problem, all below the capacity.
    Placed(Vec<u64>),
    /// There is no such placement.
    Impossible,
    OutOfSteps,
}

/// The search, and the placement that it is at. Rectangles are numbered by place in the problem.
pub(crate) struct ExactSearch {
    sections: Sections,
    size: Vec<u64>,
    /// Length of life.
    life: Vec<u64>,
    capacity: u64,
    preference: Preference,
    /// Looks that the search may still take.
    left: u64,
    /// The lowest offset above all placed rectangles that overlap this one. For a placed one its offset.
    low: Vec<u64>,
    is_placed: Vec<bool>,
    /// By section: the sizes of what is unplaced.
    unplaced: Vec<u64>,
    /// By section: how many unplaced rectangles reach over its end.
    bridges: Vec<u32>,
    /// What was changed, so that it can be taken back.
    changes: Vec<Change>,
    /// The nodes from the root to where the search is.
    nodes: Vec<Node>,
    /// Of all nodes: rectangles of their parts.
    lists: Vec<Ranked>,
    /// Of all nodes: what is still to be tried.
    candidates: Vec<Candidate>,
    /// Of all nodes: what is still to be solved below the placement that they are at.
    parts: Vec<Part>,
    /// By section: its floor, while the room is checked.
    floor: Vec<u64>,
}

/// An unplaced rectangle, and its place in the preference.
#[derive(Clone, Copy)]
struct Ranked {
    rectangle: u32,
    rank: u32,
}

/// A rectangle that may come next. They are tried from the lowest offset.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    offset: u64,
    rank: u32,
    rectangle: u32,
}

enum Change {
    Placed { rectangle: u32 },
    Raised { rectangle: u32, low: u64 },
}

/// Rectangles that are solved by themselves.
#[derive(Clone)]
struct Part {
    sections: Run,
    /// In `lists`, by rank.
    list: Run,
    /// No rectangle comes before this offset and rank.
    least: (u64, u32),
}

/// A part, and the candidate of it that is placed.
struct Node {
    part: Part,
    /// In `candidates`: those that were not tried.
    candidates: Run,
    /// Where the stacks ended before this node.
    lists_end: usize,
    candidates_end: usize,
    parts_end: usize,
    /// Where `changes` ended before the candidate was placed.
    changes_end: usize,
    /// Whether a rectangle that is in nobody's way was tried.
    is_last: bool,
}

impl ExactSearch {
    /// `None` when the problem is too large.
    pub(crate) fn new(problem: &Problem) -> Option<Self> {
        let rectangles = problem.rectangles();
        if rectangles.len() > RECTANGLES_MAX {
            return None;
        }
        let sections = Sections::new(problem);
        let size: Vec<u64> = rectangles.iter().map(|it| it.size).collect();
        let (mut unplaced, mut bridges) = (vec![0; sections.count()], vec![0; sections.count()]);
        for rectangle in 0..size.len() as u32 {
            for run in sections.runs(rectangle) {
                unplaced[run].iter_mut().for_each(|sum| *sum += size[rectangle as usize]);
            }
            bridges[inner(sections.reach(rectangle))].iter_mut().for_each(|count| *count += 1);
        }
        Some(ExactSearch {
            life: rectangles.iter().map(|it| it.upper - it.lower).collect(),
            low: vec![0; size.len()],
            is_placed: vec![false; size.len()],
            floor: vec![0; sections.count()],
            capacity: 0,
            preference: Preference::Life,
            left: 0,
            changes: Vec::new(),
            nodes: Vec::new(),
            lists: Vec::new(),
            candidates: Vec::new(),
            parts: Vec::new(),
            sections,
            size,
            unplaced,
            bridges,
        })
    }

    /// Looks for a placement that reaches no higher than the capacity.
    pub(crate) fn place_below(&mut self, capacity: u64, preference: Preference, steps: &mut u64) -> Verdict {
        if self.unplaced.iter().any(|sum| *sum > capacity) {
            return Verdict::Impossible;
        }
        (self.capacity, self.preference) = (capacity, preference);
        self.left = steps.saturating_mul(LOOKS_PER_STEP);
        self.begin_root();
        let verdict = self.run();
        *steps = self.left / LOOKS_PER_STEP;
        self.take_back(0);
        self.nodes.clear();
        self.lists.clear();
        self.candidates.clear();
        self.parts.clear();
        verdict
    }

    /// The root has no candidates. Its parts are the times that no rectangle connects.
    fn begin_root(&mut self) {
        let sections = 0..self.sections.count();
        let part = Part { sections: sections.clone(), list: 0..0, least: (0, 0) };
        self.nodes.push(Node {
            part,
            candidates: 0..0,
            lists_end: 0,
            candidates_end: 0,
            parts_end: 0,
            changes_end: 0,
            is_last: true,
        });
        let all: Vec<u32> = (0..self.size.len() as u32).collect();
        self.cut(&all, sections.clone(), inner(sections), 0);
    }

    fn run(&mut self) -> Verdict {
        // A node goes on with its next part as long as all before it were solved, else with its next candidate.
        let mut is_solved = true;
        while let Some(node) = self.nodes.last() {
            if is_solved {
                if self.parts.len() > node.parts_end {
                    let part = self.parts.pop().expect("one more");
                    self.begin(part);
                    is_solved = false;
                } else {
                    self.leave();
                }
                continue;
            }
            if self.left == 0 {
                return Verdict::OutOfSteps;
            }
            let changes_end = node.changes_end;
            self.take_back(changes_end);
            match self.next_candidate() {
                Some(candidate) => is_solved = self.try_candidate(candidate),
                None => self.leave(),
            }
        }
        if is_solved { Verdict::Placed(self.low.clone()) } else { Verdict::Impossible }
    }

    /// Collects what may come first in a part.
    fn begin(&mut self, part: Part) {
        self.spend(part.list.len());
        let list = &self.lists[part.list.clone()];
        let top = |of: &Ranked| self.low[of.rectangle as usize] + self.size[of.rectangle as usize];
        let lowest_top = list.iter().map(top).min().expect("a part has rectangles");
        let begin = self.candidates.len();
        for &Ranked { rectangle, rank } in list {
            let offset = self.low[rectangle as usize];
            if offset < lowest_top && (offset, rank) >= part.least {
                self.candidates.push(Candidate { offset, rank, rectangle });
            }
        }
        self.candidates[begin..].sort_unstable();
        self.nodes.push(Node {
            part,
            candidates: begin..self.candidates.len(),
            lists_end: self.lists.len(),
            candidates_end: begin,
            parts_end: self.parts.len(),
            changes_end: self.changes.len(),
            is_last: false,
        });
    }

    /// Ends the last node. What is placed stays.
    fn leave(&mut self) {
        let node = self.nodes.pop().expect("a node");
        self.lists.truncate(node.lists_end);
        self.candidates.truncate(node.candidates_end);
        self.parts.truncate(node.parts_end);
    }

    /// The next candidate of the last node, unless it is a twin of the one before it.
    fn next_candidate(&mut self) -> Option<Candidate> {
        let node = self.nodes.last_mut().expect("a node");
        self.lists.truncate(node.lists_end);
        self.parts.truncate(node.parts_end);
        if node.is_last {
            return None;
        }
        let begin = node.candidates_end;
        let (sections, size) = (&self.sections, &self.size);
        let is_twin = |at: &usize| {
            let [before, this] = [at - 1, *at].map(|at| self.candidates[at].rectangle);
            size[before as usize] == size[this as usize] && sections.live_the_same(before, this)
        };
        let at = node.candidates.find(|at| *at == begin || !is_twin(at))?;
        Some(self.candidates[at])
    }

    /// Places a candidate. Whether there is room for the rest as far as it can be seen; then there are parts to be solved.
    fn try_candidate(&mut self, Candidate { offset, rank, rectangle }: Candidate) -> bool {
        let fits = self.place(rectangle);
        let node = self.nodes.last().expect("a node");
        let sections = node.part.sections.clone();
        let begin = self.lists.len();
        for at in node.part.list.clone() {
            let ranked = self.lists[at];
            if ranked.rectangle != rectangle {
                self.lists.push(ranked);
            }
        }
        let list = begin..self.lists.len();
        if !fits || !self.has_room(list.clone(), sections.clone(), offset) {
            return false;
        }
        let reach = inner(self.sections.reach(rectangle));
        if reach.clone().any(|section| self.bridges[section] == 0) {
            let rest: Vec<u32> = self.lists.drain(list).map(|it| it.rectangle).collect();
            self.cut(&rest, sections, reach, offset);
        } else if !list.is_empty() {
            self.parts.push(Part { sections, list, least: (offset, rank) });
        }
        true
    }

    /// Puts a rectangle at its lowest offset and raises those that overlap it. False if one of them is then too high.
    fn place(&mut self, rectangle: u32) -> bool {
        let overlaps = self.sections.overlaps(rectangle);
        let looks = overlaps.len() / 4;
        let top = self.low[rectangle as usize] + self.size[rectangle as usize];
        let (mut is_covered, mut fits) = (false, true);
        for &other in overlaps {
            if self.is_placed[other as usize] {
                continue;
            }
            is_covered = true;
            let low = &mut self.low[other as usize];
            if *low < top {
                self.changes.push(Change::Raised { rectangle: other, low: *low });
                *low = top;
                fits &= top + self.size[other as usize] <= self.capacity;
            }
        }
        self.is_placed[rectangle as usize] = true;
        for run in self.sections.runs(rectangle) {
            self.unplaced[run].iter_mut().for_each(|sum| *sum -= self.size[rectangle as usize]);
        }
        self.bridges[inner(self.sections.reach(rectangle))].iter_mut().for_each(|count| *count -= 1);
        self.changes.push(Change::Placed { rectangle });
        self.nodes.last_mut().expect("a node").is_last = !is_covered;
        self.spend(looks);
        fits
    }

    fn take_back(&mut self, changes_end: usize) {
        for change in self.changes.drain(changes_end..).rev() {
            match change {
                Change::Raised { rectangle, low } => self.low[rectangle as usize] = low,
                Change::Placed { rectangle } => {
                    self.is_placed[rectangle as usize] = false;
                    for run in self.sections.runs(rectangle) {
                        self.unplaced[run].iter_mut().for_each(|sum| *sum += self.size[rectangle as usize]);
                    }
                    self.bridges[inner(self.sections.reach(rectangle))].iter_mut().for_each(|count| *count += 1);
                }
            }
        }
    }

    /// Whether in each section what is unplaced fits between the floor and the capacity. `offset` is the last one.
    fn has_room(&mut self, list: Run, sections: Run, offset: u64) -> bool {
        self.floor[sections.clone()].fill(self.capacity);
        let mut looks = sections.len() + list.len();
        for ranked in &self.lists[list] {
            let low = self.low[ranked.rectangle as usize];
            for run in self.sections.runs(ranked.rectangle) {
                looks += run.len();
                self.floor[run].iter_mut().for_each(|floor| *floor = low.min(*floor));
            }
        }
        self.spend(looks / 16);
        let mut floors = self.floor[sections.clone()].iter().zip(&self.unplaced[sections]);
        floors.all(|(floor, unplaced)| *unplaced == 0 || offset.max(*floor) + unplaced <= self.capacity)
    }

    /// Makes a part of each time that no unplaced rectangle connects with another. `ends` are the sections that may be the last of
    /// one.
    fn cut(&mut self, rectangles: &[u32], sections: Run, ends: Run, offset: u64) {
        let begin = self.parts.len();
        let cuts = ends.filter(|section| self.bridges[*section] == 0).map(|section| section + 1);
        let mut from = sections.start;
        for to in cuts.chain([sections.end]).collect::<Vec<usize>>() {
            let is_within = |rectangle: &u32| (from..to).contains(&self.sections.reach(*rectangle).start);
            let mut within: Vec<u32> = rectangles.iter().copied().filter(is_within).collect();
            within.sort_by_cached_key(|rectangle| (self.key(*rectangle), *rectangle));
            let list_begin = self.lists.len();
            self.lists.extend((0..).zip(&within).map(|(rank, &rectangle)| Ranked { rectangle, rank }));
            if !within.is_empty() {
                let list = list_begin..self.lists.len();
                self.parts.push(Part { sections: from..to, list, least: (offset, 0) });
            }
            from = to;
        }
        // The last is taken first.
        self.parts[begin..].sort_by_key(|part| Reverse(part.list.len()));
    }

    /// What comes first has the least key.
    fn key(&self, rectangle: u32) -> Reverse<[u128; 3]> {
        let life = u128::from(self.life[rectangle as usize]);
        let area = life * u128::from(self.size[rectangle as usize]);
        let sums = self.sections.runs(rectangle).flat_map(|run| &self.unplaced[run]);
        let load = u128::from(*sums.max().expect("it lives"));
        Reverse(match self.preference {
            Preference::Life => [life, area, load],
            Preference::LoadThenArea => [load, area, life],
            Preference::LoadThenLife => [load, life, area],
        })
    }

    fn spend(&mut self, looks: usize) {
        self.left = self.left.saturating_sub(looks as u64);
    }
}

/// Without the last section.
fn inner(run: Run) -> Run {
    run.start..run.end.max(1) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Rectangle;
    use proptest::prelude::*;

    proptest! {
        /// Each goes through all placements, in another order.
        #[test]
        fn preferences_agree_on_the_least_height(
            rectangles in prop::collection::vec((0..16_u64, 1..=16_u64, 1..9_u64), 1..12),
        ) {
            let rectangle = |(lower, life, size)| Rectangle { lower, upper: lower + life, size };
            let problem = Problem::periodic(16, rectangles.into_iter().map(rectangle).collect()).expect("sane");
            let mut exact = ExactSearch::new(&problem).expect("few");
            let least = Preference::ALL.map(|preference| {
                let placed_below = |capacity| {
                    let verdict = exact.place_below(capacity, preference, &mut { u64::MAX });
                    let Verdict::Placed(offsets) = verdict else {
                        assert_eq!(verdict, Verdict::Impossible);
                        return None;
                    };
                    Some((capacity, offsets))
                };
                (0..).find_map(placed_below)
            });
            let heights = least.map(|found| {
                let (capacity, offsets) = found.expect("high enough");
                crate::check::check(&problem, &offsets, capacity).expect("a placement");
                capacity
            });
            prop_assert_eq!(heights, [heights[0]; 3]);
        }
    }
}
