//! Simulates whole jobs: thousands of ranks that run one program in surroundings of their own, and must place alike.
//!
//! The allocator's claim is that ranks cannot drift apart. A simulated job tries to make them: every rank has other
//! addresses, other event timing, threads that interleave differently, a driver that refuses calls, work of its own on
//! the side; ranks die and start again. The program is drawn from a seed, or taken from a recorded job.
//!
//! ```text
//!  seed ──► Plan ──► program (steps of several threads) ──┬─► rank 0    ─┐
//!             └────► surroundings of each rank            ├─► rank 1    ─┤ compared step by step,
//!                                                         └─► rank N-1  ─┘ digest by digest at every sync
//! ```
//!
//! A run has two phases. In the *safety* phase faults happen, and whatever happens, ranks that were not touched are
//! alike, ranks that came to differ are caught, and no invariant breaks. Then everything heals, and in the *liveness*
//! phase everything is freed and given back: nothing stays reserved on any rank, no event is forgotten.
//!
//! A run is a function of its plan, and a generated plan of its seed: no clock, no thread of this machine and no hash
//! order decides anything. A failure is [shrunk](shrink) and saved as a trace with its [story] on top, which
//! `symmalloc simulate` runs again.
//!
//! ```
//! use std::num::{NonZeroU32, NonZeroUsize};
//! use symmalloc_sim::job::{Plan, Size, simulate};
//!
//! let size = Size { ranks: NonZeroU32::new(8).unwrap(), ops: 200 };
//! let outcome = simulate(&Plan::from_seed(7, &size), NonZeroUsize::MIN, &mut |_| ())?;
//! assert!(outcome.ops > 8 * 150);
//! # Ok::<(), symmalloc_sim::job::Failure>(())
//! ```

mod agreement;
mod crew;
mod decision;
mod device_work;
mod failure;
mod journal;
mod order;
mod outcome;
mod plan;
mod private_work;
mod program;
mod rank;
mod rejoin;
mod run;
mod schedule;
pub mod shrink;
mod standing;
mod step;
pub mod story;
mod surroundings;
mod swarm;

pub use decision::{Decision, Refusal};
pub use failure::{Cause, Failure};
pub use journal::HeapName;
pub use outcome::{Faults, Outcome};
pub use plan::{Plan, Size};
pub use program::Step;
pub use run::{Progress, simulate};
pub use schedule::Schedule;
pub use surroundings::{AfterLoss, BadSurroundings, Deviation, RankFault, Surroundings};
