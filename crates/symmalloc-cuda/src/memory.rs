//! Where a backend's bytes come from: virtual memory of a device, or whole allocations of a device or of the host.
//!
//! | kind | reserve | map | unmap | release |
//! |---|---|---|---|---|
//! | [`Virtual`] | addresses | `cuMemCreate`, `cuMemMap`, access | `cuMemUnmap` | addresses back |
//! | [`Prefetching`] | the same | the same, or nothing where a thread did it ahead | the same | the same |
//! | [`Whole`] | an allocation | nothing | nothing | the allocation back |
//!
//! A whole allocation has no addresses without memory, so that `reserve` takes what `map` would take. Pools of fixed and
//! reserved segments map what they reserve at once, and notice no difference; expandable ones need virtual memory.

mod addresses;
mod ahead;
mod backing;
mod prefetch;
mod properties;
mod spare;
mod virtual_memory;
mod whole;

pub(crate) use prefetch::Prefetching;
pub(crate) use virtual_memory::{Virtual, VirtualOptions};
pub(crate) use whole::{Source, Whole};

use crate::error::CudaError;
use symmalloc_core::backend::{BackendError, Range};

/// Memory in ranges. The contract is that of [`symmalloc_core::backend`].
#[doc(hidden)]
pub trait Memory: Send + Sync {
    fn granularity_bytes(&self) -> u64;
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError>;
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    fn release(&self, range: Range) -> Result<(), BackendError>;
    /// Lets another device read and write the memory, what is mapped already and what will be.
    fn grant_access(&self, peer: usize) -> Result<(), CudaError>;
    /// Bytes that the allocator gave up and the device could not take back yet.
    fn idle_bytes(&self) -> u64;
    /// Bytes that were made ahead and nobody has yet.
    fn spare_bytes(&self) -> u64 {
        0
    }
    /// Gives those back, and returns how many they were. What the driver refuses becomes idle.
    fn release_spare(&self) -> u64 {
        0
    }
}
