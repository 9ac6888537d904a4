//! A request for memory, and what a program may answer when it is about to fail.

use crate::types::ids::{PoolId, StreamId};

/// The answer of a failure callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was made available: try again.
    Again,
    /// Let the allocation fail.
    GiveUp,
}

/// What was asked for, for errors and digests.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    pub(super) size_bytes: u64,
}
