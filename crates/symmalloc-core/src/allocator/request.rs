//! Requests for memory, and the answers of the failure callback.

use crate::types::ids::{PoolId, StreamId};

/// The answer of a failure callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Memory was made available: retry.
    Again,
    /// Retry if the allocator released memory since the request failed, in the callback or on another thread. A callback
    /// that only trims returns this: if threads run out of memory together, one of them releases what the others need.
    /// Which of their requests succeed may then depend on timing, as with any limit that threads share.
    IfReleased,
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
