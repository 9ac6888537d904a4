//! A solution: an offset for every rectangle.

use crate::check::{self, PlacementError};
use crate::problem::Problem;

/// A placement of all rectangles of a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    offsets: Vec<u64>,
    height: u64,
    is_optimal: bool,
    steps: u64,
}

impl Solution {
    /// Creates a solution. `least` is a height below which no placement exists.
    pub(crate) fn new(offsets: Vec<u64>, least: u64, steps: u64, height: u64) -> Self {
        Solution { offsets, height, is_optimal: height == least, steps }
    }

    /// Returns the solution of a problem with more rectangles, each placed in one step: those of this one lie `base` higher.
    pub(crate) fn raised(self, base: u64, offsets: Vec<u64>) -> Self {
        let steps = self.steps + (offsets.len() - self.offsets.len()) as u64;
        Solution { offsets, height: base + self.height, steps, ..self }
    }

    /// Returns the offsets by rectangle.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Returns the height: the largest end (offset plus size) of any rectangle.
    pub fn height(&self) -> u64 {
        self.height
    }

    /// Returns `true` if no lower placement is known to exist: the height equals the peak of live sizes, or exact search has
    /// ruled out all lower heights.
    pub fn is_optimal(&self) -> bool {
        self.is_optimal
    }

    /// Returns the number of steps that the search took.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Checks that no two rectangles of the problem overlap and that none reaches above [`height`](Self::height). Shares no code
    /// with the search.
    ///
    /// # Errors
    /// Returns [`PlacementError`] if this is not a solution of the problem.
    pub fn check(&self, problem: &Problem) -> Result<(), PlacementError> {
        check::check(problem, &self.offsets, self.height)
    }
}
