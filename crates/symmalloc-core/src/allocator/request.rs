//! Requests for memory, and the answers of the failure callback.

use crate::types::ids::{PoolId, StreamId};

/// The answer of a failure callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was made available: retry.
    Again,
    /// Let the allocation fail.
    GiveUp,
}

/// The request, for errors and digests.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) pool: PoolId,
    pub(super) stream: StreamId,
    pub(super) size_bytes: u64,
}
