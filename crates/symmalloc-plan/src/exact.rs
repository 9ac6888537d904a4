//! Exact search: finds a placement within a given height, or proves that there is none.
//!
//! In every placement, rectangles can be lowered until each of them lies on the bottom or on another rectangle. The
//! lowered placement can be built from below, one rectangle at a time. No rectangle is lower than the previous one, and
//! each is as low as the earlier ones allow. The search explores these sequences depth first. Rectangles with equal
//! offsets are tried in one fixed order, called the preference, so that no placement is visited twice.
//!
//! ```text
//!  capacity ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
//!             ▲ unplaced ▲
//!           ┌───┐            ┌────┐     floor: no rectangle can be placed below it
//!           │ c ├────┐  ┌────┤ d  │     each section needs floor + its unplaced sizes ≤ capacity
//!         ┌─┴───┤ b  │  │ a  ├────┘
//!         └─────┴────┴──┴────┘
//!              sections of time
//! ```
//!
//! The search backtracks as early as possible:
//! - **Room.** In each section, the unplaced rectangles must fit below the capacity: above any height, there must be
//!   room for all rectangles that cannot begin below that height. No unplaced rectangle can begin below the last placed
//!   one.
//! - **Waste.** No rectangle is placed so high that another unplaced one would fit below it. The search tries the lower
//!   one first.
//! - **Twins.** If several rectangles have equal size and sections, only the first is tried.
//! - **Nothing above.** A rectangle that overlaps no unplaced one blocks nothing. If the search fails after placing it,
//!   the search would also fail without it.
//! - **Parts.** If no unplaced rectangle spans two adjacent sections, the times before and after their boundary are
//!   solved separately. The part with the fewest rectangles comes first. If one part has no solution, the placement
//!   before the cut was wrong, so the search tries no other solutions of the finished parts.
//!
//! The ideas come from MiniMalloc (Moffitt, ASPLOS 2023). The preference changes the duration of a search unpredictably
//! and by orders of magnitude. The caller therefore tries many preferences, and each attempt counts its
//! [failures](Failures) for the attempts after it. In the worst case, the overlapping pairs and the lists of unplaced
//! rectangles take O(n²) memory, about 150 MiB.

use crate::problem::Problem;
use crate::sections::{Run, Sections};
use std::cmp::Reverse;

/// Maximum number of rectangles, because the time per unit of work and the memory grow with their number.
pub(crate) const RECTANGLES_MAX: usize = 4096;

/// Number of rectangles, or of runs that span few sections, examined per unit of work.
const LOOKS_PER_UNIT: u64 = 8;

/// The order in which rectangles are tried at the same offset. The first few preferences sort by fixed criteria. All
/// later ones combine past failures with pseudorandom lengths of sections or lifetimes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Preference(pub(crate) u32);

impl Preference {
    /// Number of preferences by fixed criteria.
    pub(crate) const FIXED: u32 = 6;
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The offsets by index in the problem, within the capacity.
    Placed(Vec<u64>),
    /// No such placement exists.
    Impossible,
    OutOfWork,
}

/// The search and its current placement. Rectangles are numbered by index in the problem.
pub(crate) struct ExactSearch {
    sections: Sections,
    size: Vec<u64>,
    /// Lifetimes.
    life: Vec<u64>,
    capacity: u64,
    preference: Preference,
    /// Remaining budget, in looks.
    left: u64,
    /// By rectangle: its offset if it is placed, otherwise the lowest offset above all placed rectangles that overlap
    /// it.
    low: Vec<u64>,
    is_placed: Vec<bool>,
    /// By section: sum of the unplaced sizes.
    unplaced: Vec<u64>,
    /// By section: number of unplaced rectangles that span the section's end.
    bridges: Vec<u32>,
    /// Undo log of changes.
    changes: Vec<Change>,
    /// The nodes from the root to the current one.
    nodes: Vec<Node>,
    /// The rectangles of the parts of all nodes.
    lists: Vec<Ranked>,
    /// The candidates of all nodes.
    candidates: Vec<Candidate>,
    /// The parts of all nodes that must still be solved under their current placement.
    parts: Vec<Part>,
    failures: Failures,
    /// By section: sum of sizes. Scratch space of the room check.
    sums: Vec<u64>,
    /// The unplaced rectangles of a part by offset. Scratch space of the room check.
    by_low: Vec<(u64, u32)>,
}

/// An unplaced rectangle and its rank in the preference.
#[derive(Clone, Copy)]
struct Ranked {
    rectangle: u32,
    rank: u32,
}

/// A rectangle that may be placed next. Candidates are tried in ascending order of offset.
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

/// A set of rectangles that is solved separately.
#[derive(Clone)]
struct Part {
    sections: Run,
    /// Range in `lists`, sorted by rank.
    list: Run,
    /// Lower bound on the offset and rank of the next rectangle of the part.
    least: (u64, u32),
}

/// A part and its placed candidate.
struct Node {
    part: Part,
    /// Range of untried candidates in `candidates`.
    candidates: Run,
    /// Lengths of the stacks before this node.
    lists_end: usize,
    candidates_end: usize,
    parts_end: usize,
    /// Length of `changes` before the candidate was placed.
    changes_end: usize,
    /// `true` if a rectangle that blocks no other rectangle was tried.
    is_last: bool,
}

impl ExactSearch {
    /// Creates a search for a problem of at most [`RECTANGLES_MAX`] rectangles.
    pub(crate) fn new(problem: &Problem) -> Self {
        let rectangles = problem.rectangles();
        let sections = Sections::new(problem);
        let size: Vec<u64> = rectangles.iter().map(|it| it.size).collect();
        let (mut unplaced, mut bridges) = (vec![0; sections.count()], vec![0; sections.count()]);
        for rectangle in 0..size.len() as u32 {
            for run in sections.runs(rectangle) {
                unplaced[run].iter_mut().for_each(|sum| *sum += size[rectangle as usize]);
            }
            bridges[inner(sections.reach(rectangle))].iter_mut().for_each(|count| *count += 1);
        }
        ExactSearch {
            life: rectangles.iter().map(|it| it.upper - it.lower).collect(),
            low: vec![0; size.len()],
            is_placed: vec![false; size.len()],
            failures: Failures::new(sections.count()),
            sums: vec![0; sections.count()],
            by_low: Vec::new(),
            capacity: 0,
            preference: Preference(0),
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
        }
    }

    /// Searches for a placement whose height is at most the capacity.
    pub(crate) fn place_below(&mut self, capacity: u64, preference: Preference, budget: &mut u64) -> Verdict {
        if self.unplaced.iter().any(|sum| *sum > capacity) {
            return Verdict::Impossible;
        }
        (self.capacity, self.preference) = (capacity, preference);
        self.left = budget.saturating_mul(LOOKS_PER_UNIT);
        self.begin_root();
        let verdict = self.run();
        *budget = self.left / LOOKS_PER_UNIT;
        self.take_back(0);
        self.failures.fade();
        self.nodes.clear();
        self.lists.clear();
        self.candidates.clear();
        self.parts.clear();
        verdict
    }

    /// Creates the root node. It has no candidates. Its parts are the time ranges that no rectangle connects.
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
        // A node continues with its next part as long as the earlier parts were solved. Otherwise it continues with its
        // next candidate.
        let mut is_solved = true;
        while let Some(node) = self.nodes.last() {
            if is_solved {
                if self.parts.len() > node.parts_end {
                    let part = self.parts.pop().expect("an unsolved part should be on the stack");
                    self.begin(part);
                    is_solved = false;
                } else {
                    self.leave();
                }
                continue;
            }
            if self.left == 0 {
                return Verdict::OutOfWork;
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

    /// Collects the candidates that may be placed first in a part.
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

    /// Removes the last node, but leaves its rectangle placed.
    fn leave(&mut self) {
        let node = self.nodes.pop().expect("the search should have a current node");
        self.lists.truncate(node.lists_end);
        self.candidates.truncate(node.candidates_end);
        self.parts.truncate(node.parts_end);
    }

    /// Returns the next candidate of the last node, skipping twins.
    fn next_candidate(&mut self) -> Option<Candidate> {
        let node = self.nodes.last_mut().expect("the search should have a current node");
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

    /// Places a candidate and adds the parts that remain to be solved. Returns `false` if the rest cannot fit.
    fn try_candidate(&mut self, Candidate { offset, rank, rectangle }: Candidate) -> bool {
        let fits = self.place(rectangle);
        let node = self.nodes.last().expect("the search should have a current node");
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

    /// Places a rectangle at its lowest offset and raises the rectangles that overlap it. Returns `false` if one of
    /// them then exceeds the capacity.
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
                if top + self.size[other as usize] > self.capacity {
                    fits = false;
                    self.sections.runs(other).for_each(|run| self.failures.add_run(run));
                }
            }
        }
        self.is_placed[rectangle as usize] = true;
        for run in self.sections.runs(rectangle) {
            self.unplaced[run].iter_mut().for_each(|sum| *sum -= self.size[rectangle as usize]);
        }
        self.bridges[inner(self.sections.reach(rectangle))].iter_mut().for_each(|count| *count -= 1);
        self.changes.push(Change::Placed { rectangle });
        self.nodes.last_mut().expect("the search should have a current node").is_last = !is_covered;
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

    /// Returns `true` if the unplaced rectangles of each section fit below the capacity, above each of their lowest
    /// offsets. `offset` is the offset of the last placed rectangle.
    fn has_room(&mut self, list: Run, sections: Run, offset: u64) -> bool {
        self.sums[sections.clone()].fill(0);
        self.by_low.clear();
        let low = |ranked: &Ranked| (self.low[ranked.rectangle as usize], ranked.rectangle);
        self.by_low.extend(self.lists[list].iter().map(low));
        self.by_low.sort_unstable();
        let mut looks = sections.len() + 4 * self.by_low.len();
        let mut full = None;
        'from_above: for &(low, rectangle) in self.by_low.iter().rev() {
            for run in self.sections.runs(rectangle) {
                looks += run.len();
                for section in run {
                    self.sums[section] += self.size[rectangle as usize];
                    if low.max(offset) + self.sums[section] > self.capacity {
                        full = Some(section);
                        break 'from_above;
                    }
                }
            }
        }
        self.spend(looks / 16);
        full.inspect(|section| self.failures.add(*section)).is_none()
    }

    /// Adds a part for each time range that no unplaced rectangle connects to another range. `ends` are the sections at
    /// which a part may end.
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
        // The last part in the list is solved first.
        self.parts[begin..].sort_by_key(|part| Reverse(part.list.len()));
    }

    /// Returns the sort key of a rectangle. The rectangle with the least key comes first.
    fn key(&self, rectangle: u32) -> Reverse<[u128; 3]> {
        let Preference(number) = self.preference;
        Reverse(match number.checked_sub(Preference::FIXED) {
            None => self.fixed_key(number, rectangle),
            Some(number) => self.varied_key(number, rectangle),
        })
    }

    fn fixed_key(&self, number: u32, rectangle: u32) -> [u128; 3] {
        let size = u128::from(self.size[rectangle as usize]);
        let life = u128::from(self.life[rectangle as usize]);
        let area = life * size;
        let loads = || self.sections_of(rectangle).map(|section| u128::from(self.unplaced[section]));
        let load = loads().max().unwrap_or(0);
        let is_unplaced = |other: &&u32| !self.is_placed[**other as usize];
        match number {
            0 => [life, area, load],
            1 => [load, area, life],
            2 => [load, life, area],
            3 => [self.sections.overlaps(rectangle).iter().filter(is_unplaced).count() as u128, size, life],
            4 => [loads().sum(), area, life],
            _ => [area, life, load],
        }
    }

    /// Returns a key that sorts by the rectangle's most difficult section, then by its lifetime. There are four
    /// measures of difficulty and two of lifetime.
    fn varied_key(&self, number: u32, rectangle: u32) -> [u128; 3] {
        let seed = u64::from(number / 8) << 32;
        let difficulty = |section: usize| {
            let (load, weight) = (u128::from(self.unplaced[section]), self.failures.weight(section));
            match number % 4 {
                0 => load,
                1 => load * u128::from(weight),
                2 => u128::from(weight),
                _ => load * u128::from(40 + weight.ilog2()),
            }
        };
        let hardest = self.sections_of(rectangle).map(difficulty).max().unwrap_or(0);
        let life = self.life[rectangle as usize];
        let lifetime = if (number / 4).is_multiple_of(2) {
            // Random lengths of sections, most of them short.
            let length = |section: usize| (scrambled(seed | section as u64) % 1024 + 1).pow(2);
            self.sections_of(rectangle).map(length).sum()
        } else {
            life * (1024 + scrambled(seed | u64::from(rectangle)) % 256)
        };
        [hardest, lifetime.into(), u128::from(life) * u128::from(self.size[rectangle as usize])]
    }

    fn sections_of(&self, rectangle: u32) -> impl Iterator<Item = usize> {
        self.sections.runs(rectangle).flatten()
    }

    fn spend(&mut self, looks: usize) {
        self.left = self.left.saturating_sub(looks as u64);
    }
}

/// Maps a number to a pseudorandom one (SplitMix64).
fn scrambled(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns the run without its last section.
fn inner(run: Run) -> Run {
    run.start..run.end.max(1) - 1
}

/// The weight of a section without failures.
const UNIT: u64 = 1024;

/// Weights of the sections. A section's weight rises when the search fails there.
///
/// If a search places the rectangles of a difficult section late, it explores all placements of the other rectangles
/// before it discovers that the section cannot be filled. Attempts that begin with the sections of past failures avoid
/// this. Constraint solvers use the same idea under the name weighted degrees (Boussemart et al., ECAI 2004).
struct Failures {
    weights: Vec<u64>,
}

impl Failures {
    fn new(sections: usize) -> Self {
        Failures { weights: vec![UNIT; sections] }
    }

    /// Returns the weight of a section, which is at least 1024.
    fn weight(&self, section: usize) -> u64 {
        self.weights[section]
    }

    /// Counts a failure in a section whose rectangles do not fit.
    fn add(&mut self, section: usize) {
        self.weights[section] += UNIT;
    }

    /// Counts a failure of a rectangle that does not fit in its sections. Each section's weight rises less, because
    /// only one of them is to blame.
    fn add_run(&mut self, run: Run) {
        self.weights[run].iter_mut().for_each(|weight| *weight += UNIT / 10);
    }

    /// Makes past failures count less than future ones.
    fn fade(&mut self) {
        self.weights.iter_mut().for_each(|weight| *weight = UNIT + (*weight - UNIT) / 5 * 4);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Rectangle;
    use proptest::prelude::*;

    proptest! {
        /// Each preference explores all placements, in a different order.
        #[test]
        fn preferences_agree_on_the_minimum_height(
            rectangles in prop::collection::vec((0..16_u64, 1..=16_u64, 1..9_u64), 1..12),
        ) {
            let rectangle = |(lower, life, size)| Rectangle { lower, upper: lower + life, size };
            let problem = Problem::periodic(16, rectangles.into_iter().map(rectangle).collect()).expect("the problem is valid");
            let mut exact = ExactSearch::new(&problem);
            let least = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 29].map(|number| {
                let preference = Preference(number);
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
                crate::solution::check(&problem, &offsets, capacity).expect("the solution should be valid");
                capacity
            });
            prop_assert_eq!(heights, [heights[0]; 15]);
        }
    }
}
