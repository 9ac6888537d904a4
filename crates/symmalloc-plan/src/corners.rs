//! Corner search: finds a placement within a height that leaves little memory unused.
//!
//! ```text
//!  offset ▲ ┌───┐             ┌────┐        A valley is lower than its neighbors. If no memory stays unused at its left end, the
//!         │ │   │             │    │        rectangle there begins where the valley begins: c or d. At its right end, one ends where
//!         │ │   ├───┬─────────┤    │        the valley ends.
//!         │ │ a │ c?│         │ b  │
//!         │ │   │ d?│ valley  │    │
//!         └─┴───┴───┴─────────┴────┴─► sections of time
//! ```
//!
//! In most states, only a few rectangles can be placed at a corner, because few rectangles begin or end at the same time. Often there is
//! one or none. The search therefore examines all valleys and continues at the corner with the fewest candidates. If some corner has none,
//! the search backtracks. In a section whose live memory is less than the height, memory may stay unused. The floor of the valley then
//! rises to its lower neighbor.
//!
//! Exact search chooses among all rectangles that can have the lowest offset. It therefore gives up on problems of hundreds of rectangles
//! that fill the height. Corner search can solve these problems, but it cannot prove that a height is infeasible, because it does not try
//! all ways to leave memory unused.

use crate::problem::Problem;
use crate::random::Random;
use crate::sections::Sections;

/// Number of runs and candidates examined per unit of work.
const LOOKS_PER_WORK: u64 = 8;

/// A rectangle: its range of sections and its size.
#[derive(Clone, Copy)]
struct Item {
    from: u32,
    to: u32,
    size: u64,
}

/// Adjacent sections with the same floor, which is the height of the rectangles that are already placed there.
#[derive(Clone, Copy)]
struct Run {
    from: u32,
    to: u32,
    floor: u64,
}

/// A step of the search.
#[derive(Clone, Copy)]
enum Move {
    Place {
        item: u32,
    },
    /// Leaves the memory of these sections unused, up to a higher floor.
    Waste {
        from: u32,
        to: u32,
        floor: u64,
    },
}

/// A decision and the moves that remain for it.
struct Node {
    /// Start of the node's moves in the list of moves.
    moves: usize,
    /// Start of the runs before the node's move, in the list of runs.
    runs: usize,
    /// The move that was made.
    made: Option<Move>,
}

/// One end of a valley.
#[derive(Clone, Copy)]
struct Corner {
    valley: Run,
    is_left: bool,
    /// Floor of the lower neighbor of the valley.
    brim: u64,
}

/// A search for placements of one problem.
pub(crate) struct CornerSearch {
    items: Vec<Item>,
    /// By section: the items that begin with the section, and the items that end before it.
    begins: Vec<Vec<u32>>,
    ends: Vec<Vec<u32>>,
    /// By section: sum of all sizes.
    load: Vec<u64>,
    random: Random,
    capacity: u64,
    /// By section: bytes that may stay unused.
    spare: Vec<u64>,
    offsets: Vec<Option<u64>>,
    /// By item: a random weight, which varies the order of candidates.
    weights: Vec<u64>,
    /// The runs before each decision. The runs before the last decision are current.
    runs: Vec<Run>,
    moves: Vec<Move>,
    nodes: Vec<Node>,
    /// Remaining budget.
    looks: u64,
    choice: Choice,
}

/// Chooses the corner at which the search continues, if every corner has several moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// The corner with the fewest moves.
    Fewest,
    /// The lowest corner.
    Lowest,
}

impl CornerSearch {
    /// Creates a search. Returns `None` if a rectangle of a repeated step lives into the next step.
    pub(crate) fn new(problem: &Problem) -> Option<Self> {
        let sections = Sections::new(problem);
        let count = sections.count();
        let (mut begins, mut ends) = (vec![Vec::new(); count + 1], vec![Vec::new(); count + 1]);
        let mut load = vec![0; count];
        let mut items = Vec::with_capacity(problem.rectangles().len());
        for (number, it) in (0..).zip(problem.rectangles()) {
            let mut runs = sections.runs(number).filter(|run| !run.is_empty());
            let (run, None) = (runs.next()?, runs.next()) else { return None };
            begins[run.start].push(number);
            ends[run.end].push(number);
            load[run.clone()].iter_mut().for_each(|load| *load += it.size);
            items.push(Item { from: run.start as u32, to: run.end as u32, size: it.size });
        }
        Some(CornerSearch {
            begins,
            ends,
            random: Random::default(),
            capacity: 0,
            spare: vec![0; load.len()],
            load,
            offsets: vec![None; items.len()],
            weights: vec![0; items.len()],
            items,
            runs: Vec::new(),
            moves: Vec::new(),
            nodes: Vec::new(),
            looks: 0,
            choice: Choice::Fewest,
        })
    }

    /// Searches for a placement of at most this height, with at most this much work, and returns the offsets. The height must be at least
    /// the peak of live sizes. Each call makes different random choices.
    pub(crate) fn place_below(&mut self, capacity: u64, work: &mut u64) -> Option<Vec<u64>> {
        self.capacity = capacity;
        self.choice = if self.random.below(2) == 0 { Choice::Lowest } else { Choice::Fewest };
        self.looks = work.saturating_mul(LOOKS_PER_WORK).saturating_sub(self.items.len() as u64);
        self.spare.iter_mut().zip(&self.load).for_each(|(spare, load)| *spare = capacity - load);
        self.offsets.fill(None);
        self.weights.iter_mut().for_each(|weight| *weight = 1024 + self.random.below(1024));
        self.moves.clear();
        self.nodes.clear();
        self.runs.clear();
        self.runs.push(Run { from: 0, to: self.load.len() as u32, floor: 0 });
        let found = self.search();
        *work = self.looks / LOOKS_PER_WORK;
        found.then(|| self.offsets.iter().map(|offset| offset.expect("all items are placed")).collect())
    }

    /// Makes and reverts moves until all items are placed. Returns `false` if there is no further move or the budget is spent.
    fn search(&mut self) -> bool {
        let (mut unplaced, mut runs) = (self.items.len(), 0);
        while unplaced > 0 && self.looks > 0 {
            let moves = self.moves.len();
            self.add_moves(runs);
            self.nodes.push(Node { moves, runs, made: None });
            loop {
                let Some(node) = self.nodes.last_mut() else { return false };
                let (moves, begin) = (node.moves, node.runs);
                let before = node.made.take();
                if let Some(before) = before {
                    unplaced += usize::from(self.undo(before, begin));
                }
                if self.moves.len() == moves {
                    self.nodes.pop();
                    continue;
                }
                let next = self.moves.pop().expect("a move should have been appended");
                unplaced -= usize::from(matches!(next, Move::Place { .. }));
                runs = self.make(next, begin);
                self.nodes.last_mut().expect("the search should have a current node").made = Some(next);
                break;
            }
        }
        unplaced == 0
    }

    /// Returns the sections of a move.
    fn span(&self, of: Move) -> (u32, u32) {
        match of {
            Move::Place { item } => (self.items[item as usize].from, self.items[item as usize].to),
            Move::Waste { from, to, .. } => (from, to),
        }
    }

    /// Makes a move, which lies within one of the runs that begin at index `begin`. Returns the index at which the new
    /// runs begin.
    fn make(&mut self, next: Move, begin: usize) -> usize {
        let (from, to) = self.span(next);
        let end = self.runs.len();
        self.looks = self.looks.saturating_sub((end - begin) as u64 / 4);
        let mut before = 0;
        for at in begin..end {
            let run = self.runs[at];
            if run.to <= from || to <= run.from {
                self.add_run(end, run);
                continue;
            }
            before = run.floor;
            let floor = match next {
                Move::Place { item } => run.floor + self.items[item as usize].size,
                Move::Waste { floor, .. } => floor,
            };
            for part in [Run { to: from, ..run }, Run { from, to, floor }, Run { from: to, ..run }] {
                self.add_run(end, part);
            }
        }
        match next {
            Move::Place { item } => self.offsets[item as usize] = Some(before),
            Move::Waste { floor, .. } => {
                self.spare[from as usize..to as usize].iter_mut().for_each(|spare| *spare -= floor - before);
            }
        }
        end
    }

    /// Adds a run to those from index `begin` on. Neighbors with the same floor are merged.
    fn add_run(&mut self, begin: usize, run: Run) {
        match self.runs[begin..].last_mut() {
            _ if run.from == run.to => {}
            Some(last) if last.floor == run.floor => last.to = run.to,
            _ => self.runs.push(run),
        }
    }

    /// Reverts a move. `begin` is the index of the runs before it. Returns `true` if the move had placed an item.
    fn undo(&mut self, made: Move, begin: usize) -> bool {
        let (from, to) = self.span(made);
        let sections = self.load.len() as u32;
        let last = self.runs[begin..].iter().position(|run| run.to == sections);
        self.runs.truncate(begin + last.expect("runs cover all sections") + 1);
        if let Move::Waste { floor, .. } = made {
            let before = self.runs[begin..].iter().find(|run| from < run.to).map_or(0, |run| run.floor);
            self.spare[from as usize..to as usize].iter_mut().for_each(|spare| *spare += floor - before);
        } else if let Move::Place { item } = made {
            self.offsets[item as usize] = None;
        }
        matches!(made, Move::Place { .. })
    }

    /// Adds the moves at the corner that has the fewest moves, with the best one last. Adds nothing if some corner has
    /// no move.
    fn add_moves(&mut self, begin: usize) {
        let mut best: Option<((u64, u64), Corner)> = None;
        let runs = &self.runs[begin..];
        let mut looks = runs.len() as u64;
        for (at, &valley) in runs.iter().enumerate() {
            let left = at.checked_sub(1).map_or(self.capacity, |at| runs[at].floor);
            let right = runs.get(at + 1).map_or(self.capacity, |run| run.floor);
            let brim = left.min(right);
            if brim <= valley.floor {
                continue;
            }
            for is_left in [true, false] {
                let corner = Corner { valley, is_left, brim };
                let items = self.items_at(corner);
                looks += 1 + items.len() as u64;
                let fitting = items.iter().filter(|item| self.fits(**item, valley)).count() as u64;
                let at = if is_left { valley.from } else { valley.to - 1 };
                let may_waste = self.spare[at as usize] >= brim - valley.floor;
                let options = fitting + u64::from(may_waste);
                if options == 0 {
                    self.looks = self.looks.saturating_sub(looks);
                    return;
                }
                let counted = if self.choice == Choice::Lowest { options.min(2) } else { options };
                let key = (counted, valley.floor);
                if best.is_none_or(|(least, _)| key < least) {
                    best = Some((key, corner));
                }
            }
        }
        self.looks = self.looks.saturating_sub(looks);
        let Some((_, corner)) = best else { return };
        self.moves.extend(self.waste(corner));
        let mut fitting: Vec<u32> =
            self.items_at(corner).iter().copied().filter(|item| self.fits(*item, corner.valley)).collect();
        let key = |item: u32| {
            let Item { from, to, size } = self.items[item as usize];
            (u128::from(to - from) * u128::from(self.weights[item as usize]), size, item)
        };
        fitting.sort_by_key(|item| key(*item));
        let is_twin = |one: &Item, other: &Item| (one.from, one.to, one.size) == (other.from, other.to, other.size);
        for (at, item) in fitting.iter().enumerate() {
            if !fitting[..at].iter().any(|other| is_twin(&self.items[*item as usize], &self.items[*other as usize])) {
                self.moves.push(Move::Place { item: *item });
            }
        }
    }

    fn items_at(&self, corner: Corner) -> &[u32] {
        match corner.is_left {
            true => &self.begins[corner.valley.from as usize],
            false => &self.ends[corner.valley.to as usize],
        }
    }

    fn fits(&self, item: u32, valley: Run) -> bool {
        let it = &self.items[item as usize];
        self.offsets[item as usize].is_none() && valley.from <= it.from && it.to <= valley.to
    }

    /// Returns the move that leaves memory unused at a corner, up to the next section in which an item may be placed.
    fn waste(&self, Corner { valley, is_left, brim }: Corner) -> Option<Move> {
        let Run { from, to, floor } = valley;
        let has_item = |items: &[u32]| items.iter().any(|item| self.fits(*item, valley));
        let (from, to) = match is_left {
            true => (from, (from + 1..to).find(|at| has_item(&self.begins[*at as usize])).unwrap_or(to)),
            false => ((from + 1..to).rev().find(|at| has_item(&self.ends[*at as usize])).unwrap_or(from), to),
        };
        let spare = self.spare[from as usize..to as usize].iter().min()?;
        (*spare >= brim - floor).then_some(Move::Waste { from, to, floor: brim })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Rectangle;
    use crate::sections::canonical;
    use crate::solution::check;
    use proptest::prelude::*;

    /// Returns rectangles that fill a box of 20,000 sections and this height. Each cut divides one of the larger rectangles.
    fn filled(count: usize, height: u64, random: &mut Random) -> Vec<Rectangle> {
        let mut filled = vec![([0, 20_000], [0, height])];
        while filled.len() < count {
            let area = |([a, b], [c, d]): ([u64; 2], [u64; 2])| (b - a) * (d - c);
            let some: Vec<usize> = (0..8).map(|_| random.below(filled.len() as u64) as usize).collect();
            let number = some.into_iter().max_by_key(|number| area(filled[*number])).expect("there are eight");
            let (times, offsets) = filled[number];
            let is_in_time = random.below(2) == 0;
            let [from, to] = if is_in_time { times } else { offsets };
            if to - from < 2 {
                continue;
            }
            let at = from + 1 + random.below(to - from - 1);
            let parts = [[from, at], [at, to]].map(|part| if is_in_time { (part, offsets) } else { (times, part) });
            filled[number] = parts[0];
            filled.push(parts[1]);
        }
        let rectangle =
            |([lower, upper], [from, to]): ([u64; 2], [u64; 2])| Rectangle { lower, upper, size: to - from };
        filled.into_iter().map(rectangle).collect()
    }

    /// Returns the height bound divided by the height that a search of about a second reaches.
    fn share(rectangles: Vec<Rectangle>) -> f64 {
        let problem = Problem::new(rectangles).expect("the problem is valid");
        let solution = crate::solve(&problem, crate::SearchBudget(1_000_000));
        assert_eq!(solution.check(&problem), Ok(()));
        problem.lower_bound() as f64 / solution.height() as f64
    }

    #[test]
    fn problems_that_fill_the_height_are_solved() {
        let mut random = Random::default();
        for count in [50, 100, 100, 150, 200, 250] {
            assert!(share(filled(count, 1 << 20, &mut random)) >= 1.0, "{count} rectangles");
        }
        // Without corner search, the result is 0.72 to 0.84.
        for (count, least) in [(100, 1.0), (200, 0.85), (400, 0.8)] {
            let mut rectangles = filled(count, 1 << 20, &mut random);
            for _ in 0..count / 30 {
                let number = random.below(rectangles.len() as u64) as usize;
                rectangles.swap_remove(number);
            }
            let share = share(rectangles);
            assert!(share >= least, "{count} rectangles, a thirtieth of them left out: {share}");
        }
    }

    proptest! {
        /// A placement is valid and not higher than the given height, whether or not memory stays unused.
        #[test]
        fn placements_are_valid(
            rectangles in prop::collection::vec((0..40_u64, 1..=20_u64, 1..30_u64), 1..40),
            spare in 0..20_u64,
            steps in 0..3_000_u64,
        ) {
            let rectangle = |(lower, life, size)| Rectangle { lower, upper: lower + life, size };
            let problem = Problem::new(rectangles.into_iter().map(rectangle).collect()).expect("the problem is valid");
            let (problem, _) = canonical(&problem);
            let mut search = CornerSearch::new(&problem).expect("no rectangle lives into the next step");
            let capacity = problem.lower_bound() + spare;
            for _ in 0..4 {
                let mut left = steps;
                if let Some(offsets) = search.place_below(capacity, &mut left) {
                    prop_assert_eq!(check(&problem, &offsets, capacity), Ok(()));
                }
                prop_assert!(left <= steps);
            }
        }
    }
}
