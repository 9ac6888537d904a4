//! What carries the messages of an agreement: one collective, and nothing else.

use super::ranks::RankSet;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// A way for ranks to hear each other. NCCL, MPI, a TCP store or threads of one process can be one.
pub trait Transport {
    /// This rank's number, below [`ranks`](Self::ranks).
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn ranks(&self) -> u32;

    /// Gives this rank's message to all, and returns everybody's, in rank order. All ranks call it, with messages of the
    /// same length; the n-th call of one rank meets the n-th call of every other.
    ///
    /// # Errors
    /// When another rank is lost, does not come in time, or the medium fails. The transport is not used again then.
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

/// The messages of all ranks in one round, end to end in rank order. Cloning it shares them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered {
    messages: Arc<[u8]>,
    message_bytes: usize,
}

impl Gathered {
    /// Messages of `message_bytes` bytes each, end to end.
    pub fn new(messages: impl Into<Arc<[u8]>>, message_bytes: usize) -> Self {
        Gathered { messages: messages.into(), message_bytes }
    }

    /// Number of whole messages.
    pub fn len(&self) -> usize {
        self.messages.len().checked_div(self.message_bytes).unwrap_or(0)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one message.
    pub fn message_bytes(&self) -> usize {
        self.message_bytes
    }

    /// The messages in rank order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.messages.chunks_exact(self.message_bytes.max(1))
    }
}

/// Why ranks could not hear each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A rank died, is stopped or does not come.
    #[error(
        "rank {rank} is lost: it died, is stopped or does not come. Look for its error, and restart the job or go on without it"
    )]
    RankLost {
        /// The rank.
        rank: u32,
    },
    /// Some ranks did not come in time.
    #[error(
        "ranks {missing} did not come within {waited:?}: they died, are stuck, or reach fewer agreements than this one"
    )]
    TimedOut {
        /// The ranks that did not come.
        missing: RankSet,
        /// How long this rank waited.
        waited: Duration,
    },
    /// Some ranks did not come in time, and the medium cannot tell which. NCCL cannot.
    #[error(
        "some ranks did not come within {waited:?} (the transport cannot tell which): they died, are stuck, or reach fewer \
         agreements than this one. Look for the first error among the ranks"
    )]
    Overdue {
        /// How long this rank waited.
        waited: Duration,
    },
    /// The medium was closed or lost before.
    #[error("the transport is closed: an earlier error or the program ended it")]
    Closed,
    /// Ranks gave messages of different lengths: they are not in the same collective.
    #[error(
        "rank {rank} gave {given_bytes} bytes where others gave {expected_bytes}: the ranks are in different collectives"
    )]
    UnequalLengths {
        /// A rank that differs.
        rank: u32,
        /// Bytes it gave.
        given_bytes: usize,
        /// Bytes that the first rank gave.
        expected_bytes: usize,
    },
    /// The medium failed.
    #[error("{call} failed with code {code}")]
    Failed {
        /// The failing call.
        call: &'static str,
        /// Its code.
        code: i64,
    },
}
