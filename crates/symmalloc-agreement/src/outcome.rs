//! What an agreement comes to.

use super::protocol::ProtocolError;
use super::question::Ask;
use super::report::{Difference, Disagreement};
use super::transport::TransportError;
use thiserror::Error;

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

/// What follows from a round.
pub(crate) enum Next {
    Ask(Ask),
    Agreed(Agreed),
    Disagreed(Difference),
}
