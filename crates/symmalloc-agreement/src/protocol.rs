//! The protocol version and the errors for invalid messages.

use thiserror::Error;

/// Version of the protocol and of the data that enters a digest.
pub(crate) const VERSION: u32 = 2;

/// An invalid message or sequence of messages. Every rank receives the same error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A round has the wrong number of messages, or messages of the wrong length.
    #[error(
        "gathered {messages} messages of {message_bytes} bytes from {ranks} ranks: the transport mixes \
         rounds; check that each call gathers one message per rank"
    )]
    WrongShape {
        /// Number of messages gathered.
        messages: usize,
        /// Size of each message in bytes.
        message_bytes: usize,
        /// Number of ranks.
        ranks: u32,
    },
    /// A rank runs a different version of this library.
    #[error(
        "rank {rank} uses version {version} of the agreement protocol and this rank {VERSION}: run the same symmalloc \
         version on every rank"
    )]
    VersionMismatch {
        /// The rank.
        rank: u32,
        /// The version that the rank uses.
        version: u32,
    },
    /// A rank's message is not a valid answer to the question.
    #[error("rank {rank} sent a malformed answer: its memory or the transport corrupts data; check both")]
    Garbled {
        /// The rank.
        rank: u32,
    },
    /// The answers contradict those of earlier rounds.
    #[error(
        "the answers of the ranks contradict earlier ones: do not use symmetric pools from other threads during an \
         agreement"
    )]
    Contradiction,
    /// The inquiry did not converge.
    #[error("the agreement did not converge after {rounds} rounds: check the transport for damaged messages")]
    TooManyRounds {
        /// Number of rounds completed.
        rounds: u32,
    },
}
