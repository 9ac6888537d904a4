//! The interface that every kind of memory implements.

use super::chunks::Part;
use super::exported::ExportedMemory;
use super::handle::{DmaBufRefusal, ExportedHandle, HandleKind, HeldDmaBuf};
use crate::error::{CudaError, DriverError, INVALID_VALUE};
use std::ffi::c_ulonglong;
use std::sync::Arc;
use symmalloc_core::backend::{BackendError, Range, RangeOffset, Reason};
use symmalloc_core::base::{Base, BaseError};
use symmalloc_core::ids::PoolId;

/// Memory that is reserved in ranges and mapped in parts. [`symmalloc_core::backend`] states the contract.
#[doc(hidden)]
pub trait BackendMemory: Send + Sync {
    fn granularity_bytes(&self) -> u64;
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError>;
    /// Reserves the addresses of a pool with a base.
    fn reserve_at(&self, _base: Base, _pool: PoolId) -> Result<Range, BaseError> {
        Err(BaseError::Unsupported)
    }
    /// Turns a part of these addresses into a range. Makes no driver call.
    fn carve(&self, _part: Range) -> Result<(), BackendError> {
        Err(BackendError::new("cuMemAddressReserve", INVALID_VALUE, Reason::Refused))
    }
    /// Releases these addresses. None of their parts is a range anymore.
    fn release_space(&self, _space: Range) -> Result<(), BackendError> {
        Err(BackendError::new("cuMemAddressFree", INVALID_VALUE, Reason::Refused))
    }
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    /// Like `map`, but in pieces of `_piece_bytes`, each of which can also be mapped at other addresses.
    fn map_pieces(&self, at: RangeOffset, size_bytes: u64, _piece_bytes: u64) -> Result<(), BackendError> {
        self.map(at.0, at.1, size_bytes)
    }
    fn can_alias(&self) -> bool {
        false
    }
    /// Maps a piece of one range a second time, at an address of another range.
    fn alias(&self, _at: RangeOffset, _source: RangeOffset, _piece_bytes: u64) -> Result<(), BackendError> {
        Err(BackendError::new("cuMemMap", INVALID_VALUE, Reason::Refused))
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    fn release(&self, range: Range) -> Result<(), BackendError>;
    /// Lets another device read and write the memory, including memory that is mapped later.
    fn grant_access(&self, peer: usize) -> Result<(), CudaError>;
    /// Returns the address range of each chunk behind some addresses of one range, in order and without duplicates, or `None` if an address
    /// has no chunk. Registers `memory` to be notified before any of these addresses is unmapped.
    fn chunks_behind(&self, _parts: &[Part], _memory: Option<&Arc<ExportedMemory>>) -> Option<Vec<Part>> {
        None
    }
    /// Exports the chunk at these addresses as a handle for another process.
    fn export_chunk(&self, _chunk: &Part, _kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        Err(DriverError { call: "cuMemExportToShareableHandle", code: INVALID_VALUE })
    }
    /// Creates a dma-buf of a part of one range, and holds the memory behind it. The part must start and end at boundaries of host pages.
    /// Registers `memory` to be notified before any of these addresses is unmapped.
    fn hold_dma_buf(&self, _part: &Part, _memory: &Arc<ExportedMemory>) -> Result<HeldDmaBuf, DmaBufRefusal> {
        Err(DmaBufRefusal::NotMapped)
    }
    /// Releases handles of a [`HeldDmaBuf`].
    fn release_held(&self, _handles: &[c_ulonglong]) {}
    /// Returns the number of bytes that the allocator has released but that could not be returned to the device yet.
    fn idle_bytes(&self) -> u64;
    /// Returns the number of prefetched bytes that are not in use yet.
    fn spare_bytes(&self) -> u64 {
        0
    }
    /// Releases prefetched memory and returns its size in bytes. Memory that the driver fails to release becomes idle.
    fn release_spare(&self) -> u64 {
        0
    }
}
