//! The search: a first placement, then placements of the rectangles in several orders, then rounds of corner search,
//! exact search and repair.
//!
//! ```text
//!  in order of time ──► orders, best fit and lowest fit ──► round: corner search of all rectangles, exact search of the cores:
//!                                                             ▲    each at the bound, then between it and the best
//!                                                             │    repair of the best placement
//!                          one reaches the bound: done        └─── twice the work
//! ```
//!
//! Random choices come from a generator with a fixed seed. The budget determines when the search ends, but not what it does before. A
//! larger budget is therefore never worse.

use crate::corners::CornerSearch;
use crate::decode::{Decoded, Decoder, Fit};
use crate::exact::{ExactSearch, Preference, RECTANGLES_MAX, Verdict};
use crate::online::best_fit_by_time;
use crate::problem::{Problem, Rectangle};
use crate::repair::Repair;
use crate::sections::canonical;
use crate::solution::Solution;
use std::cmp::Reverse;

/// The search budget: approximately the number of rectangles that the search may examine. For large problems, placing
/// the rectangles in a given order examines ten to thirty million rectangles per second; repair and exact search
/// examine three to five million.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SearchBudget(pub u64);

impl Default for SearchBudget {
    /// Returns a budget that takes about a minute on hard problems.
    fn default() -> Self {
        SearchBudget(200_000_000)
    }
}

/// Work of one exact search in the first round.
const FIRST_ROUND_WORK: u64 = 50_000;

/// Work of the repair in a round, as a multiple of the work of one exact search.
const REPAIR_SHARE: u64 = 16;

/// Work of the exact searches with randomly varied preferences in a round, as a multiple of the work of one exact
/// search.
const VARIED_SHARE: u64 = 12;

/// Work of the corner search of a core in a round, as a multiple of the work of one exact search.
const CORNER_SHARE: u64 = 2;

/// The smallest budget of a corner search, as work per rectangle. A search that never backtracks needs less.
const CORNER_WORK: u64 = 50;

/// Corner search starts again at the lower bound when the difference between the best height and the last height that
/// failed is about 1/`CORNER_PRECISION` of the best height or less.
const CORNER_PRECISION: u64 = 512;

/// Work of the shortest attempt with a varied preference.
const ATTEMPT_WORK: u64 = 10_000;

/// Fractions of the peak, as denominators: 50 means 1/50. Rectangles that are live while the load is within such a
/// fraction of its peak are considered hard to place.
const PEAK_SHARES: [u64; 4] = [50, 20, 10, 5];

/// Places the rectangles of a problem as low as possible within the budget. The first placement, in order of time, takes one unit of work
/// per rectangle. It is always made, whatever the budget, so there is always a solution.
///
/// # Determinism
/// The solution is a function of the problem and the budget, and a larger budget is never worse. The search takes O(n log n)
/// memory for n rectangles, and up to 150 MiB more if exact search is used.
pub fn solve(problem: &Problem, budget: SearchBudget) -> Solution {
    solve_watched(problem, budget, |_| ())
}

/// The state of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SearchState {
    /// Work so far, in units of the budget.
    pub work: u64,
    /// Height of the best placement so far.
    pub height: u64,
    /// Height below which no placement exists, as far as the search knows.
    pub lower_bound: u64,
}

/// Places the rectangles like [`solve`], and calls `watch` after each phase of the search.
pub fn solve_watched(problem: &Problem, budget: SearchBudget, mut watch: impl FnMut(SearchState)) -> Solution {
    let (canonical, order) = canonical(problem);
    let end = canonical.rectangles().iter().map(|it| it.upper).max().unwrap_or(0);
    let whole = canonical.period().unwrap_or(end);
    // Small problems are searched exactly and are not extended, because a proof for the extended problem would not hold
    // for the original.
    let is_extended = canonical.rectangles().len() > RECTANGLES_MAX;
    let canonical = if is_extended { extended(canonical, whole) } else { canonical };
    let mut offsets = vec![0; order.len()];
    // Rectangles that are live for the whole period are placed at the bottom. This costs no height: in any placement, everything below such
    // a rectangle can move up by the rectangle's size, and the rectangle can move to 0.
    let (mut base, mut rest, mut rest_order) = (0, Vec::new(), Vec::new());
    for (rectangle, index) in canonical.rectangles().iter().zip(order) {
        if rectangle.upper - rectangle.lower == whole {
            offsets[index as usize] = base;
            base += rectangle.size;
        } else {
            rest.push(*rectangle);
            rest_order.push(index);
        }
    }
    let at_bottom = (offsets.len() - rest.len()) as u64;
    let proofs = if is_extended { Proofs::OfExtended } else { Proofs::Valid };
    let solution =
        search(&canonical.part(rest), proofs, SearchBudget(budget.0.saturating_sub(at_bottom)), &mut |state| {
            let SearchState { work, height, lower_bound } = state;
            watch(SearchState { work: work + at_bottom, height: height + base, lower_bound: lower_bound + base });
        });
    rest_order.into_iter().zip(solution.offsets()).for_each(|(index, offset)| offsets[index as usize] = base + *offset);
    solution.raised(base, offsets)
}

/// Extends the lifetimes of as many of the longest-lived rectangles as possible to the whole period, without raising the lower bound. These
/// rectangles are then placed at the bottom, which makes the search faster and its results better. The weights of a model are an example:
/// they are allocated shortly after the beginning and are never freed. Every placement of the extended problem is also one of the original
/// problem, but the optimum of the extended problem may be higher.
fn extended(problem: Problem, whole: u64) -> Problem {
    let life = |it: &Rectangle| it.upper - it.lower;
    let mut longest: Vec<usize> = (0..problem.rectangles().len()).collect();
    longest.retain(|index| life(&problem.rectangles()[*index]) > whole / 2);
    longest.sort_by_key(|index| Reverse(life(&problem.rectangles()[*index])));
    let with = |count: usize| {
        let mut rectangles = problem.rectangles().to_vec();
        longest[..count].iter().for_each(|index| (rectangles[*index].lower, rectangles[*index].upper) = (0, whole));
        problem.part(rectangles)
    };
    // The lower bound grows with the number of extended rectangles.
    let (mut fit, mut fail) = (0, longest.len() + 1);
    while fail - fit > 1 {
        let count = if fail > longest.len() { longest.len() } else { fit.midpoint(fail) };
        if with(count).lower_bound() == problem.lower_bound() { fit = count } else { fail = count }
    }
    if fit == 0 { problem } else { with(fit) }
}

/// Places the rectangles of a canonical problem.
fn search(problem: &Problem, proofs: Proofs, budget: SearchBudget, watch: &mut dyn FnMut(SearchState)) -> Solution {
    let decoder = Decoder::new(problem);
    let mut search = Search::new(problem, &decoder, proofs, budget);
    let orders = orders(&decoder);
    search.try_orders(&orders);
    watch(search.state());
    if !search.is_over() {
        let mut repair = Repair::new(&decoder);
        let mut cores = Core::all(problem, &decoder);
        let mut limit = FIRST_ROUND_WORK;
        while !search.is_over() {
            for core in &mut cores {
                search.search_corners(core, limit.saturating_mul(CORNER_SHARE));
                if !search.is_over() {
                    search.search_exactly(core, limit);
                    watch(search.state());
                }
            }
            search.repair(&mut repair, limit.saturating_mul(REPAIR_SHARE));
            watch(search.state());
            limit = limit.saturating_mul(2);
        }
    }
    let spent = problem.rectangles().len() as u64 + search.budget - search.left;
    Solution::new(decoder.by_place(&search.best), search.least, spent, search.best.height)
}

/// The problem for which proofs of infeasible heights hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proofs {
    Valid,
    /// Proofs hold only for the extended problem, whose lifetimes are longer.
    OfExtended,
}

/// The best placement so far and the remaining budget.
struct Search<'a> {
    decoder: &'a Decoder,
    proofs: Proofs,
    budget: u64,
    /// Remaining work.
    left: u64,
    best: Decoded,
    /// A height below which no placement exists.
    least: u64,
    /// Greatest common divisor of all heights.
    unit: u64,
}

impl<'a> Search<'a> {
    fn new(problem: &Problem, decoder: &'a Decoder, proofs: Proofs, SearchBudget(units): SearchBudget) -> Self {
        let best = decoder.by_item(&best_fit_by_time(problem));
        let budget = units.saturating_sub(problem.rectangles().len() as u64);
        let unit = problem.rectangles().iter().fold(0, |unit, it| greatest_common_divisor(unit, it.size));
        Search { decoder, proofs, budget, left: budget, best, least: problem.lower_bound(), unit }
    }

    fn is_over(&self) -> bool {
        self.left == 0 || self.best.height == self.least
    }

    fn state(&self) -> SearchState {
        SearchState { work: self.budget - self.left, height: self.best.height, lower_bound: self.least }
    }

    fn try_orders(&mut self, orders: &[Vec<u32>]) {
        for fit in [Fit::Best, Fit::Lowest] {
            for order in orders {
                if !self.is_over() {
                    self.attempt(order, fit);
                }
            }
        }
    }

    /// Tries an order. Replaces the best placement if the new one is lower.
    fn attempt(&mut self, order: &[u32], fit: Fit) {
        if let Some(lower) = self.decoder.decode(order, fit, self.best.height - 1, &mut self.left) {
            self.best = lower;
        }
    }

    /// Repairs the best placement with at most this much work.
    fn repair(&mut self, repair: &mut Repair<'_>, work: u64) {
        let mut within = work.min(self.left);
        self.left -= within;
        repair.lower(&mut self.best, self.least, &mut within);
        self.left += within;
    }

    /// Runs corner search with about this much work: first at the lowest height that is not ruled out, then halfway between the last
    /// failure and the best height, and so on. Restarts of different lengths compensate for unlucky choices. Returns early if the search at
    /// the lowest height has tried all of its moves.
    fn search_corners(&mut self, core: &mut Core, steps: u64) {
        let end = self.left.saturating_sub(steps);
        let shortest = ATTEMPT_WORK.max(core.items.len() as u64 * CORNER_WORK);
        // Large cores wait for a later round, because a single attempt would take most of the round's work.
        if steps / 4 < shortest {
            return;
        }
        let (mut capacity, mut failed, mut is_exhausted) = (self.least, self.least, false);
        while self.left > end && !self.is_over() {
            let Some(corners) = &mut core.corners else { return };
            let steps = (shortest << luby(core.corner_attempts + 1)).min(self.left);
            core.corner_attempts += 1;
            let mut unused = steps;
            let placed = corners.place_below(capacity, &mut unused);
            self.left -= (steps - unused).max(1);
            let has_ended = placed.is_some() || unused > 0;
            if let Some(offsets) = placed {
                self.attempt(&core.order(&offsets), Fit::Lowest);
            }
            if self.best.height > capacity {
                failed = capacity;
                is_exhausted |= has_ended && capacity == self.least;
            }
            let last = self.best.height - self.unit;
            if last <= failed || last - failed <= self.best.height / CORNER_PRECISION {
                if is_exhausted {
                    return;
                }
                (capacity, failed) = (self.least, self.least);
            } else {
                capacity = failed + self.unit + (last - failed) / self.unit / 2 * self.unit;
            }
            capacity = capacity.min(last.max(self.least));
        }
    }

    /// Tries the lowest height that is not ruled out, then heights between it and the best. The lowest height gets most
    /// of the budget, because most solvable problems reach it.
    fn search_exactly(&mut self, core: &mut Core, limit: u64) {
        let mut capacity = self.least;
        // Heights below `from` are ruled out, or could not be decided within the limit.
        let mut from = self.least;
        while !self.is_over() && (from == self.least || self.best.height - from > self.best.height / 1024) {
            let limit = if capacity == self.least { limit } else { limit / 16 };
            match core.decide(capacity, limit, &mut self.left) {
                Verdict::Placed(offsets) => {
                    self.attempt(&core.order(&offsets), Fit::Lowest);
                    if self.best.height > capacity {
                        from = capacity + self.unit;
                    }
                }
                Verdict::Impossible if self.proofs == Proofs::Valid => {
                    self.least = capacity + self.unit;
                    from = self.least;
                }
                Verdict::Impossible | Verdict::OutOfWork => from = capacity + self.unit,
            }
            if from >= self.best.height {
                break;
            }
            let last = self.best.height - self.unit;
            capacity = from + (last - from) / self.unit / 2 * self.unit;
        }
    }
}

/// Some of the rectangles, which corner search and exact search place. All remaining rectangles go into the gaps above
/// them or on top.
struct Core {
    exact: ExactSearch,
    /// `None` if the core is only a part of the problem, or if a rectangle of a repeated step lives into the next step.
    corners: Option<CornerSearch>,
    /// By rectangle of the core: its item in the decoder.
    items: Vec<u32>,
    /// The items outside the core, in decreasing order of size.
    others: Vec<u32>,
    /// Number of attempts with varied preferences.
    attempts: u32,
    /// Number of corner searches.
    corner_attempts: u32,
}

impl Core {
    /// Returns the cores of a problem: the rectangles that live while the load is near its peak, and the largest rectangles. A solution of
    /// a core near the peak usually leaves space for all other rectangles.
    fn all(problem: &Problem, decoder: &Decoder) -> Vec<Self> {
        let mut largest: Vec<u32> = (0..decoder.len() as u32).collect();
        largest.sort_by_key(|item| Reverse(decoder.extent(*item)));
        let loads = decoder.loads();
        let mut cores: Vec<Core> = Vec::new();
        for share in PEAK_SHARES {
            let is_at_peak = at_peak(&loads, share);
            let (items, others): (Vec<u32>, Vec<u32>) = largest.iter().partition(|item| is_at_peak[**item as usize]);
            let is_new = cores.last().is_none_or(|core| core.items.len() * 2 <= items.len());
            if is_new && items.len() * 2 <= largest.len().min(RECTANGLES_MAX) {
                cores.push(Core::new(problem, decoder, items, others));
            }
        }
        let others = largest.split_off(largest.len().min(RECTANGLES_MAX));
        cores.push(Core::new(problem, decoder, largest, others));
        cores
    }

    fn new(problem: &Problem, decoder: &Decoder, mut items: Vec<u32>, others: Vec<u32>) -> Self {
        items.sort_unstable();
        let rectangles = items.iter().map(|item| problem.rectangles()[decoder.place(*item) as usize]).collect();
        let part = problem.part(rectangles);
        // A placement of a part that leaves no memory unused says little about the gaps that remain for the other
        // items.
        let corners = if others.is_empty() { CornerSearch::new(&part) } else { None };
        let exact = ExactSearch::new(&part);
        Core { exact, corners, items, others, attempts: 0, corner_attempts: 0 }
    }

    /// Tries to place the core within the capacity, by each fixed preference and then by as many varied ones as their
    /// share of the budget allows. A case that one preference cannot decide is often easy for another.
    fn decide(&mut self, capacity: u64, limit: u64, left: &mut u64) -> Verdict {
        for number in 0..Preference::FIXED {
            let verdict = self.attempt(capacity, Preference(number), limit, left);
            if verdict != Verdict::OutOfWork {
                return verdict;
            }
        }
        let end = left.saturating_sub(limit.saturating_mul(VARIED_SHARE));
        while *left > end {
            let limit = ATTEMPT_WORK << luby(self.attempts + 1);
            let verdict = self.attempt(capacity, Preference(Preference::FIXED + self.attempts), limit, left);
            self.attempts += 1;
            if verdict != Verdict::OutOfWork {
                return verdict;
            }
        }
        Verdict::OutOfWork
    }

    fn attempt(&mut self, capacity: u64, preference: Preference, limit: u64, left: &mut u64) -> Verdict {
        let mut work = limit.min(*left);
        *left -= work;
        let verdict = self.exact.place_below(capacity, preference, &mut work);
        *left += work;
        verdict
    }

    /// Returns an order of all items that, decoded by lowest fit, places the core as low as these offsets, or lower.
    fn order(&self, offsets: &[u64]) -> Vec<u32> {
        let mut core: Vec<(u64, u32)> = offsets.iter().copied().zip(self.items.iter().copied()).collect();
        core.sort_unstable();
        core.into_iter().map(|(_, item)| item).chain(self.others.iter().copied()).collect()
    }
}

/// Returns the exponents of the sequence of Luby, Sinclair and Zuckerman (1993): 0, 0, 1, 0, 0, 1, 2 and so on. Most attempts are short,
/// and in total, attempts of every length get the same amount of work. `number` begins at 1.
fn luby(mut number: u32) -> u32 {
    while !(number + 1).is_power_of_two() {
        number -= (1 << number.ilog2()) - 1;
    }
    number.ilog2()
}

/// Returns the greatest common divisor. If one number is 0, returns the other number.
fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other > 0 {
        (one, other) = (other, one % other);
    }
    one
}

/// Returns orders of placement that usually do well, the best first: by size and area, because large rectangles need space while there is
/// some, and by lifetime, because long rectangles block many others. After them come variants that begin with the rectangles that live
/// while the load is near its peak, because all other rectangles have more space. Ties are broken by birth, so an order is a function of
/// the problem.
fn orders(decoder: &Decoder) -> Vec<Vec<u32>> {
    let area = |(size, life): (u64, u64)| u128::from(size) * u128::from(life);
    let mut orders = vec![
        descending(decoder, |extent| (u128::from(extent.0), extent.1)),
        descending(decoder, |extent| (area(extent), extent.1)),
        descending(decoder, |extent| (u128::from(extent.1), extent.0)),
        (0..decoder.len() as u32).collect(),
    ];
    // Most of these orders fail after a few rectangles, so they cost little.
    let loads = decoder.loads();
    for share in PEAK_SHARES {
        let is_at_peak = at_peak(&loads, share);
        for order in 0..3 {
            let mut first = orders[order].clone();
            first.sort_by_key(|item| !is_at_peak[*item as usize]);
            orders.push(first);
        }
    }
    orders
}

/// Returns, by item, `true` if the item lives while the load is above the peak minus one `share`-th of it.
fn at_peak(loads: &[u64], share: u64) -> Vec<bool> {
    let peak = loads.iter().copied().max().unwrap_or(0);
    loads.iter().map(|load| *load >= peak - peak / share).collect()
}

fn descending<K: Ord>(decoder: &Decoder, key: impl Fn((u64, u64)) -> K) -> Vec<u32> {
    let mut order: Vec<u32> = (0..decoder.len() as u32).collect();
    order.sort_by_cached_key(|item| Reverse(key(decoder.extent(*item))));
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns 104 shuffled rectangles that fill their bounding box completely.
    fn filled() -> Problem {
        let (problem, _) = Problem::read_csv(include_bytes!("../tests/filled.csv").as_slice()).expect("a table");
        problem
    }

    #[test]
    fn exact_search_solves_problems_that_heuristics_do_not() {
        let problem = filled();
        let decoder = Decoder::new(&problem);
        let mut heuristics = Search::new(&problem, &decoder, Proofs::Valid, SearchBudget(3_000_000));
        let orders = orders(&decoder);
        heuristics.try_orders(&orders);
        heuristics.repair(&mut Repair::new(&decoder), u64::MAX);
        assert!(heuristics.best.height > 1_000, "the heuristics solve it");
        let solution = solve(&problem, SearchBudget(100_000));
        assert_eq!((solution.height(), solution.is_optimal(), solution.check(&problem)), (1_000, true, Ok(())));
    }
}
