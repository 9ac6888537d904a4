//! The result of an agreement.

use super::protocol::ProtocolError;
use super::question::Ask;
use super::report::{Difference, Disagreement};
use super::transport::TransportError;
use thiserror::Error;

/// A successful agreement: all ranks had the same history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Agreed {
    /// Number of ops in the history, over all symmetric heaps.
    pub ops: u64,
}

/// The ways in which an agreement can fail. The list is complete.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AgreementError {
    /// The programs, configurations or devices of the ranks differ.
    #[error(transparent)]
    Disagreed(Box<Disagreement>),
    /// The ranks could not exchange messages.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A rank sent an invalid message.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// The next step of an inquiry after a round.
pub(crate) enum Next {
    Ask(Ask),
    Agreed(Agreed),
    Disagreed(Difference),
}
