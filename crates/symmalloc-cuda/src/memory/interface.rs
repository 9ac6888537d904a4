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
    /// The addresses of the chunks behind some addresses of one range, in order, each once; `None` when not all of them is memory that
    /// has chunks. `memory` is told before any of these addresses loses its memory.
    fn chunks_behind(&self, _parts: &[Part], _memory: Option<&Arc<ExportedMemory>>) -> Option<Vec<Part>> {
        None
    }
    /// A chunk at these addresses, as a handle for another process.
    fn export_chunk(&self, _chunk: &Part, _kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        Err(DriverError { call: "cuMemExportToShareableHandle", code: INVALID_VALUE })
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
