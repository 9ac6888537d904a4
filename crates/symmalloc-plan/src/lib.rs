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
//! [`solve`] tries several orders, and then improves the best one for as many steps as it is given. Steps are counted, no clock is
//! read: the same problem and the same steps give the same offsets on every machine. There is no exact search: problems that were
//! made to be hard, such as the challenging ones of `google/minimalloc`, end 13 to 33 % above what is possible.
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
mod online;
mod orders;
mod problem;
mod sections;
mod solution;
mod solve;
mod table;

pub use check::PlacementError;
pub use problem::{Problem, ProblemError, Rectangle};
pub use solution::Solution;
pub use solve::{Steps, solve};
pub use table::TableError;
