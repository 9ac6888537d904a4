//! Sections in which exact search failed: a weight for each, which past failures raise.
//!
//! A search that places rectangles of a difficult section late explores all placements of the others before it
//! discovers that the section cannot be filled. Attempts that begin with the sections of past failures avoid this. The
//! idea is known from constraint solvers as weighted degrees (Boussemart et al., ECAI 2004).

use crate::sections::Run;

/// The weight of a section without failures.
const UNIT: u64 = 1024;

/// Weights by section.
pub(crate) struct Failures {
    weights: Vec<u64>,
}

impl Failures {
    pub(crate) fn new(sections: usize) -> Self {
        Failures { weights: vec![UNIT; sections] }
    }

    /// Returns the weight of a section: at least 1024.
    pub(crate) fn weight(&self, section: usize) -> u64 {
        self.weights[section]
    }

    /// Adds a failure of a section whose rectangles do not fit.
    pub(crate) fn add(&mut self, section: usize) {
        self.weights[section] += UNIT;
    }

    /// Adds a failure of a rectangle that does not fit in its sections. It counts less, because only one of them is to
    /// blame.
    pub(crate) fn add_run(&mut self, run: Run) {
        self.weights[run].iter_mut().for_each(|weight| *weight += UNIT / 10);
    }

    /// Makes past failures count less than future ones.
    pub(crate) fn fade(&mut self) {
        self.weights.iter_mut().for_each(|weight| *weight = UNIT + (*weight - UNIT) / 5 * 4);
    }
}
