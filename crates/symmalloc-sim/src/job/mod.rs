//! Simulates whole jobs: thousands of ranks that run one program in a context of its own, and must place alike.
//!
//! The allocator's claim is that ranks cannot drift apart. A simulated job tries to make them: every rank has other
//! addresses, other event timing, threads that interleave differently, a driver that refuses calls, work of its own on
//! the side; ranks die and start again. The program is drawn from a seed, or taken from a recorded job.
//!
//! ```text
//!  seed ──► JobPlan ──► program (steps of several threads) ──┬─► rank 0    ─┐
//!             └────► context of each rank                 ├─► rank 1    ─┤ compared step by step,
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
//! use symmalloc_sim::job::{JobPlan, Size, simulate};
//!
//! let size = Size { ranks: NonZeroU32::new(8).unwrap(), ops: 200 };
//! let outcome = simulate(&JobPlan::from_seed(7, &size), NonZeroUsize::MIN, &mut |_| ())?;
//! assert!(outcome.ops > 8 * 150);
//! # Ok::<(), symmalloc_sim::job::Failure>(())
//! ```

mod agreement;
mod body;
mod context;
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
mod steps;
pub mod story;
mod swarm;

pub use context::{AfterLoss, BadContext, Deviation, RankContext, RankFault};
pub use decision::{DecidedRefusal, Decision};
pub use failure::{Failure, FailureCause};
pub use journal::HeapName;
pub use outcome::{JobFaults, JobOutcome};
pub use plan::{JobPlan, Size};
pub use run::{JobProgress, simulate};
pub use schedule::Schedule;
pub use steps::JobStep;
