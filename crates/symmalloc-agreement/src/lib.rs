//! Agreement: ranks compare what they did, and learn which op was the first that differed (rule D7).
//!
//! The allocator calls no collective (rule D6). At a point of its own choosing the *program* does, on every rank: each
//! gives a few words about its symmetric pools, and when all are equal that was it. When they differ, the ranks search
//! their recent histories together, in O(log n) further rounds, and all come to the same [`Disagreement`]: which op of
//! which heap, which ranks did what, and what the cause is likely to be. Pools that are not symmetric are not compared.
//!
//! ```text
//!   each rank                                              all ranks alike
//!   allocator ─► journal ─► history ── answer ──► all-gather ──► Inquiry ─► agreed, a disagreement,
//!                              ▲                                    │       or the next question
//!                              └──────────── question ──────────────┘
//! ```
//!
//! The parts do no input or output: [`Inquiry`] is a state machine that all ranks step alike, [`RankHistory`] answers for one
//! rank. [`agree`] runs them over a [`Transport`]; [`agree_in_lockstep`] runs any number of ranks in one thread;
//! [`Agreement`] does it as often as a [`Mode`] says.
//!
//! # What is compared
//! The configurations of the symmetric pools with the granularity, the limit over all pools and the number of retries;
//! then, per heap, every op and the decision about it. Pools are matched by their ordinal *among symmetric pools*, so
//! that a rank may have private pools in between. Streams are matched by id: register the streams of symmetric pools
//! before a rank's private ones.
//!
//! # Ranks that come a different number of times
//! The n-th agreement of one rank meets the n-th of every other. When a rank left one out, the next meets another
//! rank's later one: the histories differ there (or the kind of [`Point`]), which is reported. When it comes to no
//! further one, the others wait for it until their transport says so: a [`TransportError`] that names it. Nothing hangs
//! as long as the transport has a timeout, and no placement depends on any of this.
//!
//! # Examples
//! ```
//! use symmalloc_agreement::{AgreementError, Point, RankHistory, agree_in_lockstep};
//! use symmalloc_core::{Allocator, Config, PoolConfig};
//! use symmalloc_sim::SimBackend;
//!
//! let pool = PoolConfig::builder().symmetric(true).build()?;
//! let mut ranks = Vec::new();
//! for rank in 0..4 {
//!     let device = SimBackend::builder().rank(rank).build();
//!     let allocator: Allocator<_> = Allocator::new(device, Config::default())?;
//!     let stream = allocator.register_stream()?;
//!     let pool = allocator.create_pool(pool.clone())?;
//!     allocator.allocate_named(pool, stream, 1 << 20, "weights")?;
//!     let gradient_bytes = if rank == 2 { (1 << 20) + 1 } else { 1 << 20 }; // the bug
//!     allocator.allocate_named(pool, stream, gradient_bytes, "gradient")?;
//!     ranks.push(allocator);
//! }
//! let histories: Vec<_> = ranks.iter().map(|allocator| RankHistory::new(allocator, Point::Sync)).collect();
//! let Err(AgreementError::Disagreed(disagreement)) = agree_in_lockstep(&histories) else { panic!("they differ") };
//! let first = disagreement.first_heap().expect("a heap differs");
//! // After the allocation of the weights, and the memory that was obtained for it.
//! assert_eq!((first.first_op, first.groups[1].ranks.to_string().as_str()), (2, "2"));
//! assert!(disagreement.to_string().contains("allocated 1,048,577 bytes \"gradient\""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod agree;
mod cause;
mod directory;
mod found;
mod inquiry;
mod message;
mod mode;
mod outcome;
mod point;
mod policies;
mod protocol;
mod question;
mod rank_history;
mod ranks;
mod report;
mod search;
#[cfg(test)]
mod tests;
mod threads;
mod transport;

pub use agree::{agree, agree_in_lockstep};
pub use inquiry::{Inquiry, Progress};
pub use mode::{Agreement, Mode};
pub use outcome::{Agreed, AgreementError};
pub use point::Point;
pub use protocol::ProtocolError;
pub use question::Question;
pub use rank_history::RankHistory;
pub use ranks::RankSet;
pub use report::{Action, Cause, Difference, Disagreement, Group, HeapDifference, PolicyDifference};
pub use threads::ThreadTransport;
pub use transport::{Gathered, Transport, TransportError};
