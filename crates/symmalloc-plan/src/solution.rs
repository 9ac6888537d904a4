//! A solution: an offset for every rectangle.

use crate::check::{self, PlacementError};
use crate::problem::Problem;

/// Where each rectangle goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    offsets: Vec<u64>,
    height: u64,
    is_optimal: bool,
    steps: u64,
}

impl Solution {
    /// `least` is a height below which no placement is.
    pub(crate) fn new(offsets: Vec<u64>, least: u64, steps: u64, height: u64) -> Self {
        Solution { offsets, height, is_optimal: height == least, steps }
    }

    /// By rectangle.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The most that any rectangle reaches: offset and size.
    pub fn height(&self) -> u64 {
        self.height
    }

    /// Whether it is known that no placement is lower: it has the height of what is live at the peak, or the exact search has
    /// gone through all that are lower.
    pub fn is_optimal(&self) -> bool {
        self.is_optimal
    }

    /// Steps that the search took.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Checks that no two rectangles of the problem overlap, and that none reaches higher than [`height`](Self::height). It shares
    /// no code with the search.
    ///
    /// # Errors
    /// When the solution is not one of this problem.
    pub fn check(&self, problem: &Problem) -> Result<(), PlacementError> {
        check::check(problem, &self.offsets, self.height)
    }
}
