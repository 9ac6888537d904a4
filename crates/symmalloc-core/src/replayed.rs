//! What a replay says of a recorded request that was not served as it came.
//!
//! A replay's own requests may be served at once where the recorded ones were not: its device has more room. These calls
//! repeat what such a request did to the heap and to its digest.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::errors::UnknownError;
use crate::ids::{PoolId, StreamId};
use crate::lock::Lock;
use crate::op::Refusal;
use crate::out_of_memory::Request;

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Carries [`Op::Reclaim`](crate::Op::Reclaim) out: gives free memory back as the pool's `reclaim` says, until
    /// `missing_bytes` are back.
    ///
    /// # Errors
    /// When the pool or the stream is unknown.
    pub fn replay_reclaim(&self, pool: PoolId, stream: StreamId, missing_bytes: u64) -> Result<(), UnknownError> {
        self.reclaim_again(Request { pool, stream, size_bytes: missing_bytes })
    }

    /// Carries [`Op::Refuse`](crate::Op::Refuse) out: the heap's digest says that a request was refused, and why.
    ///
    /// # Errors
    /// When the pool or the stream is unknown.
    pub fn replay_refusal(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
        refusal: Refusal,
    ) -> Result<(), UnknownError> {
        self.refuse_again(Request { pool, stream, size_bytes }, refusal)
    }
}
