//! Checks a solution by a sweep over time, independently of the search. O(n log n).
//!
//! The sweep keeps the live rectangles by offset. Two of them overlap exactly if two neighbors do, which is detected
//! when the later one begins. A rectangle that lives into the next step of a repeated one is also live at the beginning
//! of the step.

use crate::problem::Problem;
use std::collections::BTreeMap;
use thiserror::Error;

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
    /// A rectangle ends above the height of the solution.
    #[error("rectangle {index} reaches up to {end}, above the height of {height}")]
    TooHigh {
        /// Index of the rectangle.
        index: usize,
        /// End of the rectangle.
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
        // The highest live rectangle that begins below the end of the new one.
        if let Some((&there, &first)) = live.range(..end).next_back()
            && there + rectangles[first].size > offset
        {
            return Err(PlacementError::Overlap { first, second });
        }
        live.insert(offset, second);
    }
    Ok(())
}
