//! Live allocations and the owners of memory.

use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::ids::{AllocationId, HeapId, Placement, StreamId};

/// A live allocation of at least one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Live {
    /// The allocation's id in the program.
    pub id: AllocationId,
    /// Heap that contains the allocation.
    pub heap: HeapId,
    /// Stream for which the memory was allocated.
    pub stream: StreamId,
    /// Segment and offset of the allocation.
    pub placement: Placement,
    /// Address of the first byte.
    pub address: DeviceAddress,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// Size of the block in bytes.
    pub block_bytes: u64,
}
