//! Simulation of whole jobs: thousands of ranks run one program, each in its own context, and must place identically.
//!
//! The allocator guarantees that ranks cannot diverge. A simulated job tries to make them diverge: every rank has
//! different addresses, different event timing, differently interleaved threads, driver calls that fail, and private
//! work on the side. Some ranks are lost or restart. The program is drawn from a seed, or taken from a recorded job.
//!
//! ```text
//!  seed ──► JobPlan ──► program (steps of several threads) ──┬─► rank 0    ─┐
//!             └────► context of each rank                 ├─► rank 1    ─┤ compared step by step,
//!                                                         └─► rank N-1  ─┘ digest by digest at every sync
//! ```
//!
//! A run has two phases. In the *safety* phase, faults happen. Ranks without faults must stay identical, ranks that
//! diverge must be detected, and no invariant may be violated. Then all faults are removed. In the *liveness* phase,
//! everything is freed and released: no memory may stay reserved on any rank, and no event may leak.
//!
//! A run is determined by its plan, and a generated plan by its seed. Clocks, host threads and hash orders do not
//! affect it. A failing plan is [shrunk](shrink) and saved as a trace that starts with its [story];
//! `symmalloc simulate` runs it again.
//!
//! ```
//! use std::num::{NonZeroU32, NonZeroUsize};
//! use symmalloc::sim::job::{JobPlan, Size, simulate};
//!
//! let size = Size { ranks: NonZeroU32::new(8).unwrap(), ops: 200 };
//! let outcome = simulate(&JobPlan::from_seed(7, &size), NonZeroUsize::MIN, &mut |_| ())?;
//! assert!(outcome.ops > 8 * 150);
//! # Ok::<(), symmalloc::sim::job::Failure>(())
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
#[doc(hidden)]
pub use crew::on_threads;
pub use decision::{DecidedRefusal, Decision};
pub use failure::{Failure, FailureCause};
pub use outcome::{JobFaults, JobOutcome};
#[doc(hidden)]
pub use plan::STRETCH_MAX;
pub use plan::{JobPlan, Size};
pub use run::{JobProgress, simulate};
pub use schedule::Schedule;
pub use steps::JobStep;
pub use swarm::BOUNDARY_SIZES_BYTES;
