//! Offline placement: computes an offset for every allocation of a job whose allocations are known in advance, with the
//! lowest peak that it can find.
//!
//! An allocation is a rectangle: a lifetime on one axis and a size on the other. Rectangles can move along the second
//! axis only and must not overlap. This problem is known as dynamic storage allocation. It is NP-hard, but the recorded
//! jobs of GPU programs are mostly easy: placing the largest rectangles first usually reaches the peak of live memory,
//! which is a lower bound.
//!
//! ```text
//!  offset ▲            ┌───────────┐
//!         │   ┌────────┤     c     │          a, b, c, d    rectangles: known sizes and lifetimes
//!         │   │   b    └─┬─────────┤          offsets       result: the total height is as small as possible
//!         │ ┌─┴──────────┤    d    │
//!         │ │     a      │         │          the peak of live memory is a lower bound
//!         └─┴────────────┴─────────┴─► time
//! ```
//!
//! [`solve`] places rectangles that live all the time at the bottom, and searches for offsets of all others. It tries several orders, then
//! alternates corner search, exact search and repair of the best placement until its budget is spent. The budget counts work rather than
//! time, so the same problem and budget give the same offsets on every machine.
//!
//! **Only the order of times matters.** The search replaces times by the sections that determine which rectangles overlap. The unit of time
//! and the numbering of events therefore do not change its result.
//!
//! **Repair** takes a rectangle at the top and the rectangles around it, and places them again, lower. It examines few rectangles at a
//! time, so it improves even placements of tens of thousands of rectangles.
//!
//! **Corner search** continues where the fewest rectangles can be placed without leaving memory unused. It solves problems of hundreds of
//! rectangles that fill the whole height.
//!
//! **Exact search** places up to 4096 rectangles: if the problem is larger, its largest ones. The remaining rectangles go into the gaps, or
//! on top. Exact search can prove that no smaller height is feasible, so [`Solution::is_optimal`] can also be `true` for a height above the
//! peak.
//!
//! **Repeated steps.** An allocation made in one step of a training job and freed in the next lives across the end of
//! the step. [`Problem::periodic`] accepts such lifetimes and assigns one offset to each.
//!
//! **Alignment** needs no setting: give sizes in units of the alignment, rounded up, and offsets are multiples of the
//! alignment. For 512 bytes, use `size: bytes.div_ceil(512)` and `offset * 512`. A larger unit also makes the search
//! faster, because more sizes become equal.
//!
//! # Examples
//! ```
//! use symmalloc_plan::{Problem, Rectangle, SearchBudget, solve};
//!
//! let rectangle = |lower, upper, size| Rectangle { lower, upper, size };
//! let problem = Problem::new(vec![rectangle(0, 2, 4), rectangle(1, 4, 2), rectangle(3, 6, 4)])?;
//! let solution = solve(&problem, SearchBudget::default());
//! assert_eq!((solution.height(), solution.is_optimal()), (6, true));
//! assert_eq!(solution.check(&problem), Ok(()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod corners;
mod decode;
mod exact;
mod learner;
mod online;
mod problem;
mod random;
mod repair;
mod schedule;
mod sections;
mod solution;
mod solve;
#[cfg(feature = "csv")]
mod table;

pub use learner::{Lived, StepLearner};
pub use problem::{Problem, ProblemError, Rectangle};
pub use schedule::{Overlap, Place, PlacedAllocation, Schedule, first_uses};
pub use solution::{PlacementError, Solution};
pub use solve::{SearchBudget, SearchState, solve, solve_watched};
#[cfg(feature = "csv")]
pub use table::{TableError, write_csv};
