//! Live allocations and the owners of memory.

use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::ids::{AllocationId, Placement, PoolId, StreamId};

/// Owner of memory: a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// The pool.
    pub pool: PoolId,
    /// The heap's stream; `None` if the pool's streams share one heap.
    pub stream: Option<StreamId>,
}

/// A live allocation of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Live {
    /// The allocation's id in the program.
    pub id: AllocationId,
    /// Heap that contains the allocation.
    pub owner: Owner,
    /// Stream for which the memory was allocated.
    pub stream: StreamId,
    /// Segment and offset.
    pub placement: Placement,
    /// Address of the first byte.
    pub address: DeviceAddress,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Size of the block in bytes.
    pub block_bytes: u64,
}
