//! Agreement between ranks: ranks compare their allocator histories and identify the first op that differs (rule D7).
//!
//! The allocator never calls a collective (rule D6). Instead, the *program* runs an agreement at a point of its choice,
//! on every rank. Each rank sends a short summary of its symmetric pools. If all summaries are equal, the agreement is
//! complete. Otherwise the ranks search their recent histories together, in O(log n) further rounds, and all arrive at
//! the same [`Disagreement`]: the op and the heap that differ, what each rank did, and the likely cause. Pools that are
//! not symmetric are not compared.
//!
//! ```text
//!   each rank                                              identical on all ranks
//!   allocator ─► journal ─► history ── answer ──► all-gather ──► Inquiry ─► agreed, a disagreement,
//!                              ▲                                    │       or the next question
//!                              └──────────── question ──────────────┘
//! ```
//!
//! The parts perform no I/O. [`Inquiry`] is a state machine that advances identically on all ranks, and [`RankHistory`] answers the
//! inquiry's questions for one rank. [`Exchange`] runs these parts over a [`Transport`], with extra bytes of the caller, and [`agree`] runs
//! them without extra bytes. [`agree_in_lockstep`] runs any number of ranks in one thread, and [`Agreement`] runs agreements as often as
//! its [`Mode`] requires.
//!
//! # What is compared
//! Ranks first compare the configurations of their symmetric pools, together with the granularity, the limit over all
//! pools and the number of retries. They then compare, per heap, every op and the decision about it. Pools are matched
//! by their ordinal *among symmetric pools*, so a rank may create private pools in between. Streams are matched by id,
//! so register the streams of symmetric pools before a rank's private streams.
//!
//! # Ranks that reach a different number of agreements
//! The n-th agreement of one rank is matched with the n-th agreement of every other rank. If a rank skips an agreement,
//! its next one is matched with the agreement that the other ranks did not skip. The histories or the kinds of
//! [`Point`] then differ, and the difference is reported. If a rank reaches no further agreement, the other ranks wait
//! until their transport fails with a [`TransportError`]. The error names the missing rank if the transport can
//! identify it. No rank blocks indefinitely as long as the transport has a timeout, and no placement depends on any of
//! this.
//!
//! # Examples
//! ```
//! use symmalloc::agreement::{AgreementError, Point, RankHistory, agree_in_lockstep};
//! use symmalloc::{Allocator, Config, PoolConfig};
//! use symmalloc::sim::SimBackend;
//!
//! let pool = PoolConfig::builder().symmetric(true).build()?;
//! let mut ranks = Vec::new();
//! for rank in 0..4 {
//!     let device = SimBackend::builder().rank(rank).build();
//!     let allocator = Allocator::new(device, Config::default())?;
//!     let stream = allocator.register_stream()?;
//!     let pool = allocator.create_pool(pool.clone())?;
//!     allocator.allocate_named(pool, stream, 1 << 20, "weights")?;
//!     let gradient_bytes = if rank == 2 { (1 << 20) + 1 } else { 1 << 20 }; // the bug
//!     allocator.allocate_named(pool, stream, gradient_bytes, "gradient")?;
//!     ranks.push(allocator);
//! }
//! let histories: Vec<_> = ranks.iter().map(|allocator| RankHistory::new(allocator, Point::Sync)).collect();
//! let Err(AgreementError::Disagreed(disagreement)) = agree_in_lockstep(&histories) else { panic!("they differ") };
//! let first = disagreement.first_heap().expect("a heap should differ");
//! // Op 0 allocates the weights, and op 1 records the memory obtained for them.
//! assert_eq!((first.first_op, first.groups[1].ranks.to_string().as_str()), (2, "2"));
//! assert!(disagreement.to_string().contains("allocated 1,048,577 bytes \"gradient\""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod agree;
mod cause;
mod directory;
mod exchange;
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
pub use exchange::{Exchange, Exchanged};
pub use inquiry::{Inquiry, Progress};
pub use mode::{Agreement, Mode};
pub use outcome::{Agreed, AgreementError};
pub use point::Point;
pub use protocol::ProtocolError;
pub use question::Question;
pub use rank_history::RankHistory;
pub use ranks::{RankSet, Ranks};
pub use report::{Action, Cause, Difference, Disagreement, Group, HeapDifference, PolicyDifference};
pub use threads::ThreadTransport;
pub use transport::{Gathered, Transport, TransportError};
