//! The check of a solution: a sweep over time that knows nothing of how it was found. O(n log n).
//!
//! At each moment the live rectangles are kept by offset. Two of them overlap exactly when two neighbours do, and that shows when
//! the later one comes. What lives into the next step of a repeated one is live at its beginning as well.

use crate::problem::Problem;
use std::collections::BTreeMap;
use thiserror::Error;

/// Why offsets are no solution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Two rectangles live at the same time in the same place.
    #[error("rectangles {first} and {second} overlap in time and place")]
    Overlap {
        /// The one that was there.
        first: usize,
        /// The one that came.
        second: usize,
    },
    /// A rectangle reaches higher than is said.
    #[error("rectangle {index} reaches up to {end}, above the height of {height}")]
    TooHigh {
        /// Which one.
        index: usize,
        /// How high it reaches.
        end: u64,
        /// How high it may.
        height: u64,
    },
    /// There is not one offset for each rectangle.
    #[error("{offsets} offsets are not one for each of {rectangles} rectangles")]
    Count {
        /// Offsets.
        offsets: usize,
        /// Rectangles.
        rectangles: usize,
    },
}

/// Checks offsets, by rectangle.
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
    // What ends at a moment is gone before anything begins then.
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
        // The highest that begins below the end of the new one.
        if let Some((&there, &first)) = live.range(..end).next_back()
            && there + rectangles[first].size > offset
        {
            return Err(PlacementError::Overlap { first, second });
        }
        live.insert(offset, second);
    }
    Ok(())
}
