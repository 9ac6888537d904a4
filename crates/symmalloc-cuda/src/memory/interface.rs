//! What all kinds of memory do.

use super::chunks::Part;
use super::exported::ExportedMemory;
use super::handle::{ExportedHandle, HandleKind};
use crate::error::{CudaError, DriverError, INVALID_VALUE};
use std::sync::Arc;
use symmalloc_core::backend::{BackendError, Place, Range, Reason};

/// Memory in ranges. The contract is that of [`symmalloc_core::backend`].
#[doc(hidden)]
pub trait BackendMemory: Send + Sync {
    fn granularity_bytes(&self) -> u64;
    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError>;
    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    /// As `map`, in pieces that can be mapped elsewhere too.
    fn map_pieces(&self, at: Place, size_bytes: u64, _piece_bytes: u64) -> Result<(), BackendError> {
        self.map(at.0, at.1, size_bytes)
    }
    fn can_alias(&self) -> bool {
        false
    }
    /// Maps a piece of one range into another one.
    fn alias(&self, _at: Place, _source: Place, _piece_bytes: u64) -> Result<(), BackendError> {
        Err(BackendError::new("cuMemMap", INVALID_VALUE, Reason::Refused))
    }
    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError>;
    fn release(&self, range: Range) -> Result<(), BackendError>;
    /// Lets another device read and write the memory, what is mapped already and what will be.
    fn grant_access(&self, peer: usize) -> Result<(), CudaError>;
    /// The chunks behind some parts of a range, for other processes; `None` when not all of the parts is memory that has chunks. `memory`
    /// is told when one of them goes back to the device.
    fn share(&self, _base: u64, _parts: &[Part], _memory: &Arc<ExportedMemory>) -> Option<Vec<Part>> {
        None
    }
    /// A chunk that was shared as a handle.
    fn export_chunk(&self, _base: u64, _chunk: &Part, _kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        Err(DriverError { call: "cuMemExportToShareableHandle", code: INVALID_VALUE })
    }
    /// The physical chunks behind some addresses, as (address, size in bytes); none for memory that cannot be exported.
    fn chunks_behind(&self, _address: u64, _size_bytes: u64) -> Vec<(u64, u64)> {
        Vec::new()
    }
    /// Bytes that the allocator gave up and the device could not take back yet.
    fn idle_bytes(&self) -> u64;
    /// Bytes that were made ahead and are not handed out yet.
    fn spare_bytes(&self) -> u64 {
        0
    }
    /// Gives those back, and returns how many they were. What the driver refuses becomes idle.
    fn release_spare(&self) -> u64 {
        0
    }
}
