//! A solution, which has an offset for every rectangle, and its check, which shares no code with the search.
//!
//! The check sweeps over time and keeps the live rectangles sorted by offset. If any two live rectangles overlap, then
//! two neighbors do. The check detects this when the later one begins. A rectangle of a repeated step that lives into
//! the next step is also live at the beginning of the step. The check takes O(n log n).

use crate::problem::Problem;
use std::collections::BTreeMap;
use thiserror::Error;

/// A placement of all rectangles of a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Solution {
    offsets: Vec<u64>,
    height: u64,
    is_optimal: bool,
    work: u64,
}

impl Solution {
    /// Creates a solution. `least` is a height below which no placement is known to exist.
    pub(crate) fn new(offsets: Vec<u64>, least: u64, work: u64, height: u64) -> Self {
        Solution { offsets, height, is_optimal: height == least, work }
    }

    /// Returns the solution of a larger problem. This solution's rectangles lie `base` higher, and placing each additional rectangle took
    /// one unit of work.
    pub(crate) fn raised(self, base: u64, offsets: Vec<u64>) -> Self {
        let work = self.work + (offsets.len() - self.offsets.len()) as u64;
        Solution { offsets, height: base + self.height, work, ..self }
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

    /// Returns the work of the search, in units of its [budget](crate::SearchBudget).
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Checks that no two rectangles of the problem overlap and that none reaches above [`height`](Self::height). Shares no code
    /// with the search.
    ///
    /// # Errors
    /// Returns [`PlacementError`] if this is not a valid solution of the problem.
    pub fn check(&self, problem: &Problem) -> Result<(), PlacementError> {
        check(problem, &self.offsets, self.height)
    }
}

/// An invalid set of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Two rectangles overlap in lifetime and offset.
    #[error("rectangles {first} and {second} overlap in time and place")]
    Overlap {
        /// Index of the earlier rectangle.
        first: usize,
        /// Index of the later rectangle.
        second: usize,
    },
    /// A rectangle ends above the stated height of the solution.
    #[error("rectangle {index} reaches up to {end}, above the height of {height}")]
    TooHigh {
        /// Index of the rectangle.
        index: usize,
        /// End of the rectangle: its offset plus its size.
        end: u64,
        /// Height of the solution.
        height: u64,
    },
    /// The number of offsets differs from the number of rectangles.
    #[error("{offsets} offsets for {rectangles} rectangles: each rectangle needs one")]
    Count {
        /// Number of offsets.
        offsets: usize,
        /// Number of rectangles.
        rectangles: usize,
    },
}

/// Checks the offsets, which are indexed by rectangle.
pub(crate) fn check(problem: &Problem, offsets: &[u64], height: u64) -> Result<(), PlacementError> {
    let rectangles = problem.rectangles();
    if offsets.len() != rectangles.len() {
        return Err(PlacementError::Count { offsets: offsets.len(), rectangles: rectangles.len() });
    }
    for (index, (rectangle, offset)) in rectangles.iter().zip(offsets).enumerate() {
        let end = offset.saturating_add(rectangle.size);
        if end > height {
            return Err(PlacementError::TooHigh { index, end, height });
        }
    }
    // Ends are processed before beginnings at the same time.
    let begins = problem.intervals().map(|it| (it.lower, true, it.owner as usize));
    let ends = problem.intervals().map(|it| (it.upper, false, it.owner as usize));
    let mut changes: Vec<(u64, bool, usize)> = begins.chain(ends).collect();
    changes.sort_unstable();
    let mut live: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, begins, second) in changes {
        let offset = offsets[second];
        if !begins {
            live.remove(&offset);
            continue;
        }
        let end = offset + rectangles[second].size;
        // Finds the highest live rectangle that begins below the end of the new one.
        if let Some((&there, &first)) = live.range(..end).next_back()
            && there + rectangles[first].size > offset
        {
            return Err(PlacementError::Overlap { first, second });
        }
        live.insert(offset, second);
    }
    Ok(())
}
