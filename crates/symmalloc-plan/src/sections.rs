//! Sections of time: the coarsest division of time that determines which rectangles overlap.
//!
//! A section is a maximal set of rectangles that are live at one moment: no adjacent moment has all of these rectangles
//! and another one. Any two overlapping rectangles share a section. A rectangle lives in one contiguous run of
//! sections, or in two if it lives into the next step.
//!
//! ```text
//!   a ───────────────       ─────── c
//!          b ──────────────────────────           live: a│ab│b│bc│b      sections: ab, bc
//! ```

use crate::problem::{Problem, Rectangle};
use std::ops::Range;

/// A run of sections.
pub(crate) type Run = Range<usize>;

/// The sections of a problem and the pairs that overlap. Rectangles are numbered by index in the problem.
pub(crate) struct Sections {
    count: usize,
    /// By rectangle: its runs. The second run is usually empty.
    runs: Vec<[Run; 2]>,
    /// Rectangles that overlap each rectangle, grouped by rectangle.
    overlaps: Vec<u32>,
    /// By rectangle: start of its group in `overlaps`, followed by the end of the last group.
    begins: Vec<usize>,
}

impl Sections {
    /// Computes the sections. The memory for all overlapping pairs limits the problem to a few thousand rectangles.
    pub(crate) fn new(problem: &Problem) -> Self {
        let (runs, count) = runs(problem);
        let (overlaps, begins) = overlaps(&runs, count);
        Sections { count, runs, overlaps, begins }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the runs of a rectangle.
    pub(crate) fn runs(&self, rectangle: u32) -> impl Iterator<Item = Run> {
        let [first, second] = &self.runs[rectangle as usize];
        [first.clone(), second.clone()].into_iter()
    }

    /// Returns the range from a rectangle's first section to its last. As long as the rectangle is unplaced, it
    /// connects all sections in this range.
    pub(crate) fn reach(&self, rectangle: u32) -> Run {
        let [first, second] = &self.runs[rectangle as usize];
        if second.is_empty() { first.clone() } else { first.start..second.end }
    }

    pub(crate) fn live_the_same(&self, rectangle: u32, other: u32) -> bool {
        self.runs[rectangle as usize] == self.runs[other as usize]
    }

    /// Returns the rectangles that share a section with this one.
    pub(crate) fn overlaps(&self, rectangle: u32) -> &[u32] {
        let rectangle = rectangle as usize;
        &self.overlaps[self.begins[rectangle]..self.begins[rectangle + 1]]
    }
}

/// Returns the same problem with sections as times, and the index in `problem` of each of its rectangles. The
/// rectangles are sorted by beginning, end and size. Problems whose rectangles overlap in the same order have equal
/// canonical problems, regardless of the unit of time and of the order of events within a section.
pub(crate) fn canonical(problem: &Problem) -> (Problem, Vec<u32>) {
    let (runs, count) = runs(problem);
    let timed = |index: u32| {
        let [first, second] = &runs[index as usize];
        let size = problem.rectangles()[index as usize].size;
        let (lower, upper) =
            if second.is_empty() { (first.start, first.end) } else { (second.start, count + first.end) };
        Rectangle { lower: lower as u64, upper: upper as u64, size }
    };
    let mut order: Vec<u32> = (0..runs.len() as u32).collect();
    order.sort_by_key(|index| {
        let Rectangle { lower, upper, size } = timed(*index);
        (lower, upper, size)
    });
    let rectangles = order.iter().map(|index| timed(*index)).collect();
    let canonical = match problem.period() {
        Some(_) => Problem::periodic((count as u64).max(1), rectangles),
        None => Problem::new(rectangles),
    };
    (canonical.expect("sections preserve a valid problem"), order)
}

/// Returns the runs of each rectangle and the number of sections.
fn runs(problem: &Problem) -> (Vec<[Run; 2]>, usize) {
    let begins = problem.intervals().map(|it| (it.lower, true, it.owner));
    let ends = problem.intervals().map(|it| (it.upper, false, it.owner));
    let mut changes: Vec<(u64, bool, u32)> = begins.chain(ends).collect();
    changes.sort_unstable();
    // A section is complete when one of its rectangles ends.
    let (mut count, mut has_grown) = (0, false);
    let mut runs = vec![[0..0, 0..0]; problem.rectangles().len()];
    for (_, begins, owner) in changes {
        let [first, second] = &mut runs[owner as usize];
        if begins {
            *(if first.end == 0 { &mut *first } else { second }) = count..usize::MAX;
            has_grown = true;
            continue;
        }
        count += usize::from(has_grown);
        has_grown = false;
        *(if first.end == usize::MAX { &mut first.end } else { &mut second.end }) = count;
    }
    (runs, count)
}

/// Returns the rectangles that overlap each rectangle, grouped by rectangle, and the start of each group.
fn overlaps(runs: &[[Run; 2]], count: usize) -> (Vec<u32>, Vec<usize>) {
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); count];
    for (rectangle, own) in (0_u32..).zip(runs) {
        for run in own {
            members[run.clone()].iter_mut().for_each(|members| members.push(rectangle));
        }
    }
    let (mut overlaps, mut begins) = (Vec::new(), Vec::with_capacity(runs.len() + 1));
    let mut seen_by = vec![u32::MAX; runs.len()];
    for (rectangle, own) in (0_u32..).zip(runs) {
        begins.push(overlaps.len());
        seen_by[rectangle as usize] = rectangle;
        for other in own.iter().flat_map(|run| members[run.clone()].iter().flatten()) {
            if seen_by[*other as usize] != rectangle {
                seen_by[*other as usize] = rectangle;
                overlaps.push(*other);
            }
        }
    }
    begins.push(overlaps.len());
    (overlaps, begins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Rectangle;

    fn at(lower: u64, upper: u64) -> Rectangle {
        Rectangle { lower, upper, size: 1 }
    }

    #[test]
    fn a_section_contains_exactly_the_overlapping_rectangles() {
        let problem = Problem::new(vec![at(0, 4), at(2, 10), at(5, 9)]).expect("the problem is valid");
        let sections = Sections::new(&problem);
        assert_eq!((sections.count(), sections.runs), (2, vec![[0..1, 0..0], [0..2, 0..0], [1..2, 0..0]]));
    }

    #[test]
    fn a_rectangle_that_lives_into_the_next_step_has_two_runs() {
        let problem = Problem::periodic(10, vec![at(8, 12), at(1, 9), at(3, 5), at(6, 7), at(9, 10)])
            .expect("the problem is valid");
        let sections = Sections::new(&problem);
        assert_eq!(sections.runs[0], [0..1, 3..5]);
        assert_eq!(sections.reach(0), 0..5);
        assert_eq!((sections.overlaps(0), sections.overlaps(2)), (&[1, 4][..], &[1][..]));
    }
}
