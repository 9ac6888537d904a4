//! Agreement: ranks compare what they did, and learn which op was the first that differed (rule D7).
//!
//! The allocator calls no collective (rule D6). At a point of its own choosing the *program* does, on every rank: each
//! gives a few words about its symmetric pools, and when all are equal that was it. When they differ, the ranks search
//! their recent histories together, in O(log n) further rounds, and all come to the same [`Disagreement`]: which op of
//! which heap, which ranks did what, and what the cause is likely to be. Pools that are not symmetric are not compared.
//!
//! ```text
//!   each rank                                              all ranks alike
//!   allocator ─► journal ─► Witness ── answer ──► all-gather ──► Inquiry ─► agreed, a disagreement,
//!                              ▲                                    │       or the next question
//!                              └──────────── question ──────────────┘
//! ```
//!
//! The parts do no input or output: [`Inquiry`] is a state machine that all ranks step alike, [`Witness`] answers for one
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
//! use symmalloc_core::agreement::{AgreementError, Point, Witness, agree_in_lockstep};
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
//! let witnesses: Vec<_> = ranks.iter().map(|allocator| Witness::new(allocator, Point::Sync)).collect();
//! let Err(AgreementError::Disagreed(disagreement)) = agree_in_lockstep(&witnesses) else { panic!("they differ") };
//! let first = disagreement.first_heap().expect("a heap differs");
//! // After the allocation of the weights, and the memory that was obtained for it.
//! assert_eq!((first.first_op, first.groups[1].ranks.to_string().as_str()), (2, "2"));
//! assert!(disagreement.to_string().contains("allocated 1,048,577 bytes \"gradient\""));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod account;
mod cause;
mod directory;
mod inquiry;
mod message;
mod mode;
mod policies;
mod question;
mod ranks;
mod report;
mod search;
mod threads;
mod transport;
mod witness;

pub use inquiry::{Inquiry, Progress, ProtocolError};
pub use mode::{Agreement, Mode};
pub use question::Question;
pub use ranks::RankSet;
pub use report::{Action, Cause, Difference, Disagreement, Group, HeapDifference, PolicyDifference};
pub use threads::ThreadTransport;
pub use transport::{Gathered, Transport, TransportError};
pub use witness::Witness;

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::lock::Lock;
use std::fmt;
use thiserror::Error;

/// What kind of point of the program a rank has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Point {
    /// Where the program synchronizes its ranks.
    Sync = 1,
    /// After an op, because the [`Mode`] says so.
    Op = 2,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Point::Sync => "a sync",
            Point::Op => "an op",
        })
    }
}

/// All ranks had the same history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agreed {
    /// Ops in it, over all symmetric heaps.
    pub ops: u64,
}

/// Why ranks did not agree.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// Their programs, configurations or devices differ, and here is where.
    #[error(transparent)]
    Disagreed(Box<Disagreement>),
    /// They could not hear each other.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// What one of them said means nothing.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// Compares this rank's symmetric pools with all other ranks'. Every rank calls it, at the same point of the program.
///
/// On success the history before this point is forgotten: it is known to be equal.
///
/// # Errors
/// [`AgreementError::Disagreed`] on every rank, with the same contents, when the ranks differ; another error when they
/// could not find out. The allocator is as it was.
pub fn agree<B: Backend, L: Lock>(
    allocator: &Allocator<B, L>,
    transport: &impl Transport,
    point: Point,
) -> Result<Agreed, AgreementError> {
    let (rank, ranks) = (transport.rank(), transport.ranks());
    let _entered = tracing::debug_span!(target: "symmalloc", "ranks.agree", rank, ranks, %point).entered();
    let witness = Witness::new(allocator, point);
    let mut inquiry = Inquiry::new(ranks);
    let mut message = Vec::new();
    loop {
        message.clear();
        witness.answer(inquiry.question(), &mut message);
        match inquiry.advance(&transport.all_gather(&message)?)? {
            Progress::Asked => {}
            Progress::Agreed(agreed) => {
                witness.settle();
                return Ok(agreed);
            }
            Progress::Disagreed(disagreement) => {
                disagreement.tell(transport.rank());
                return Err(AgreementError::Disagreed(disagreement));
            }
        }
    }
}

/// Compares any number of ranks in one thread: one inquiry serves them all. The n-th witness is rank n's.
///
/// # Errors
/// As [`agree`].
pub fn agree_in_lockstep(witnesses: &[Witness<'_>]) -> Result<Agreed, AgreementError> {
    let mut inquiry = Inquiry::new(witnesses.len() as u32);
    loop {
        let mut messages = Vec::with_capacity(witnesses.len() * inquiry.question().message_bytes());
        witnesses.iter().for_each(|witness| witness.answer(inquiry.question(), &mut messages));
        match inquiry.advance(&Gathered::new(messages, inquiry.question().message_bytes()))? {
            Progress::Asked => {}
            Progress::Agreed(agreed) => {
                witnesses.iter().for_each(Witness::settle);
                return Ok(agreed);
            }
            Progress::Disagreed(disagreement) => return Err(AgreementError::Disagreed(disagreement)),
        }
    }
}
