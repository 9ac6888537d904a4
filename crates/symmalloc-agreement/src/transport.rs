//! The transport of an agreement, which provides a single collective operation: an all-gather.

use super::protocol::ProtocolError;
use super::ranks::{RankSet, Ranks};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A means for ranks to exchange messages, such as NCCL, MPI, a TCP store, or threads of one process.
pub trait Transport {
    /// Returns this rank's number, which is less than [`ranks`](Self::ranks).
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn ranks(&self) -> u32;

    /// Sends this rank's message to all ranks and returns the messages of all ranks, in rank order. All ranks must call
    /// it with messages of the same length. The n-th call on one rank is matched with the n-th call on every other
    /// rank.
    ///
    /// # Errors
    /// Fails if another rank is lost or does not arrive in time, or if the medium fails. The transport must not be used
    /// after an error.
    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError>;
}

impl<T: Transport + ?Sized> Transport for &T {
    fn rank(&self) -> u32 {
        (**self).rank()
    }

    fn ranks(&self) -> u32 {
        (**self).ranks()
    }

    fn all_gather(&self, message: &[u8]) -> Result<Gathered, TransportError> {
        (**self).all_gather(message)
    }
}

/// The messages of all ranks in one round, concatenated in rank order. Clones share the messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    messages: Arc<[u8]>,
    message_bytes: usize,
}

impl Gathered {
    /// Wraps concatenated messages of `message_bytes` bytes each.
    pub fn new(messages: impl Into<Arc<[u8]>>, message_bytes: usize) -> Self {
        Gathered { messages: messages.into(), message_bytes }
    }

    /// Returns the number of complete messages.
    pub fn len(&self) -> usize {
        self.messages.len().checked_div(self.message_bytes).unwrap_or(0)
    }

    /// Returns `true` if there are no messages.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of one message in bytes.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// Checks that there is one message of `message_bytes` bytes per rank.
    ///
    /// # Errors
    /// Returns [`ProtocolError::WrongShape`] otherwise.
    pub fn check_shape(&self, ranks: u32, message_bytes: usize) -> Result<(), ProtocolError> {
        if self.len() == ranks as usize && self.message_bytes == message_bytes {
            return Ok(());
        }
        Err(ProtocolError::WrongShape { messages: self.len(), message_bytes: self.message_bytes, ranks })
    }

    /// Returns an iterator over the messages in rank order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.messages.chunks_exact(self.message_bytes.max(1))
    }
}

/// A failed exchange of messages.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A rank died, is stopped, gave up because of an error, or does not respond.
    #[error(
        "rank {rank} is lost: it died, is stopped, gave up or does not respond. Check its log for an error, then restart \
         the job or continue without it"
    )]
    RankLost {
        /// The rank.
        rank: u32,
    },
    /// Some ranks did not arrive in time.
    #[error(
        "{} did not arrive within {waited:?}: look for a process that died, is stuck, or reaches fewer agreements than this \
         rank, and check its log for the first error",
        Ranks(missing)
    )]
    TimedOut {
        /// The ranks that did not arrive.
        missing: RankSet,
        /// The time that this rank waited.
        waited: Duration,
    },
    /// Some ranks did not arrive in time, and the medium, such as NCCL, cannot identify them.
    #[error(
        "some ranks did not arrive within {waited:?} (the transport cannot identify them): they died, are stuck, or reach \
         fewer agreements than this rank. Check the logs of all ranks for the first error"
    )]
    Overdue {
        /// The time that this rank waited.
        waited: Duration,
    },
    /// The medium was already closed or lost.
    #[error("the transport is closed: an earlier error or the program ended it; create a new one")]
    Closed,
    /// Ranks sent messages of different lengths, so the ranks are not in the same collective.
    #[error(
        "rank {rank} sent {given_bytes} bytes where others sent {expected_bytes}: the ranks are in different collectives; \
         call the same agreements in the same order on every rank"
    )]
    UnequalLengths {
        /// The first rank whose message length differs.
        rank: u32,
        /// Size of this rank's message in bytes.
        given_bytes: usize,
        /// Size of rank 0's message in bytes.
        expected_bytes: usize,
    },
    /// The medium failed.
    #[error("{call} failed with code {code}: look up the code in the documentation of the transport")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// The error code that it returned.
        code: i64,
    },
}
