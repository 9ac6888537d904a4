//! Offline placement: when all allocations of a job are known beforehand, how little memory do they need, and where does each go?
//!
//! An allocation is a rectangle: a lifetime on one axis, a size on the other. Rectangles may be moved along the second axis only,
//! and must not overlap. The problem is known as dynamic storage allocation. It is NP-hard, and the recorded jobs of GPU programs
//! are mostly easy: placing the largest first reaches the peak of what is live, below which nothing can go.
//!
//! ```text
//!  offset ▲            ┌───────────┐
//!         │   ┌────────┤     c     │          a, b, c, d    rectangles: known sizes and lifetimes
//!         │   │   b    └─┬─────────┤          offsets       wanted: the lowest top of all
//!         │ ┌─┴──────────┤    d    │
//!         │ │     a      │         │          the peak of what is live is a bound from below
//!         └─┴────────────┴─────────┴─► time
//! ```
//!
//! [`solve`] tries several orders, and goes on with exact search and improvement in turn for as many steps as it is given. Steps
//! are counted, no clock is read: the same problem and the same steps give the same offsets on every machine.
//!
//! **Exact search** takes part for up to 2048 rectangles. It decides whether a height can be reached at all, so that
//! [`Solution::is_optimal`] also holds where the peak cannot be reached. The challenging problems of `google/minimalloc` (154 to 454
//! rectangles) come out at the height that they were made for, or lower, with the default steps. Larger problems are left to the
//! orders and their improvement.
//!
//! **Repeated steps.** What is allocated in one step of a training job and freed in the next lives around the end of the step:
//! [`Problem::periodic`] takes such lives, and gives them one offset.
//!
//! **Alignment** needs no setting: count sizes in units of it, rounded up, and offsets are multiples of it. With 512 bytes,
//! `size: bytes.div_ceil(512)` and `offset * 512`. A larger unit also makes the search faster, because more sizes are the same.
//!
//! # Examples
//! ```
//! use symmalloc_plan::{Problem, Rectangle, Steps, solve};
//!
//! let rectangle = |lower, upper, size| Rectangle { lower, upper, size };
//! let problem = Problem::new(vec![rectangle(0, 2, 4), rectangle(1, 4, 2), rectangle(3, 6, 4)])?;
//! let solution = solve(&problem, Steps::default());
//! assert_eq!((solution.height(), solution.is_optimal()), (6, true));
//! assert_eq!(solution.check(&problem), Ok(()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod check;
mod decode;
mod exact;
mod learner;
mod online;
mod orders;
mod problem;
mod schedule;
mod sections;
mod solution;
mod solve;
#[cfg(feature = "csv")]
mod table;

pub use check::PlacementError;
pub use learner::{Lived, StepLearner};
pub use problem::{Problem, ProblemError, Rectangle};
pub use schedule::{Overlap, Place, PlacedAllocation, Schedule};
pub use solution::Solution;
pub use solve::{Steps, solve};
#[cfg(feature = "csv")]
pub use table::TableError;
