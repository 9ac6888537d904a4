//! The version of the protocol, and what a rank may say that means nothing.

use thiserror::Error;

/// Of the protocol and of what goes into a digest.
pub(crate) const VERSION: u32 = 1;

/// What a rank said means nothing. Every rank gets the same error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A round has another number of messages, or messages of another length, than was asked for.
    #[error(
        "{messages} messages of {message_bytes} bytes were gathered from {ranks} ranks: the transport mixes rounds"
    )]
    WrongShape {
        /// Messages that came.
        messages: usize,
        /// Bytes of each.
        message_bytes: usize,
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank runs another version of this library.
    #[error("rank {rank} speaks version {version} of the agreement protocol, this one {VERSION}: run one version")]
    OtherVersion {
        /// The rank.
        rank: u32,
        /// Its version.
        version: u32,
    },
    /// A rank's message is no answer to the question.
    #[error("rank {rank} sent something that is no answer: its memory or the transport is damaged")]
    Garbled {
        /// The rank.
        rank: u32,
    },
    /// The answers contradict those of earlier rounds.
    #[error("the ranks contradict what they said before: do other threads use symmetric pools during an agreement?")]
    Contradiction,
    /// The ranks do not come to an end.
    #[error("no end after {rounds} rounds")]
    TooManyRounds {
        /// Rounds so far.
        rounds: u32,
    },
}
