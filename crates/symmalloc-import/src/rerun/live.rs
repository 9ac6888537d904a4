//! A live allocation, and whose memory it lies in.

use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::ids::{AllocationId, Placement, PoolId, StreamId};

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The pool.
    pub pool: PoolId,
    /// The stream of the heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
}

/// A live allocation of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Live {
    /// What the program calls it.
    pub id: AllocationId,
    /// Whose memory it lies in.
    pub owner: Owner,
    /// The stream it was allocated for.
    pub stream: StreamId,
    /// Where it lies.
    pub placement: Placement,
    /// The address of its first byte.
    pub address: DeviceAddress,
    /// Bytes that the program asked for.
    pub requested_bytes: u64,
    /// Bytes of its block.
    pub block_bytes: u64,
}
