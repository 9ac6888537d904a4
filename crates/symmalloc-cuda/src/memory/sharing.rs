//! Memory between processes: a chunk leaves as a file descriptor, and is mapped again where the descriptor arrives.
//!
//! ```text
//!  one process     chunk ── retain, export ──► descriptor ═══ socket ═══► import, map ── ImportedMemory     another process
//! ```
//!
//! A descriptor keeps the memory, as a mapping does: close it when nobody is to open it any more. Who sends descriptors, and when
//! the memory may be used, is the program's.

use crate::device::CudaDevice;
use crate::driver::{HANDLE_POSIX_FD, MemAccess, MemLocation};
use crate::error::{CudaError, DriverError, INVALID_VALUE};
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// A chunk as a file descriptor.
#[derive(Debug)]
pub struct SharedPiece {
    /// Bytes of the chunk.
    pub size_bytes: u64,
    /// What the driver exported.
    pub file: OwnedFd,
}

/// Exports the chunk that is mapped at an address.
pub(crate) fn export(device: &CudaDevice, address: u64, size_bytes: u64) -> Result<SharedPiece, CudaError> {
    let _current = device.enter()?;
    let driver = device.driver();
    let mut handle = 0;
    // SAFETY: `handle` is valid for writing; the address is only looked up.
    unsafe { driver.retain(&raw mut handle, address as *mut c_void) }?;
    let mut file: c_int = -1;
    // SAFETY: `file` is what this kind of handle is written to, and the handle is ours.
    let exported = unsafe { driver.export_handle((&raw mut file).cast(), handle, HANDLE_POSIX_FD, 0) };
    // SAFETY: retained above, and not used after this.
    let released = unsafe { driver.release(handle) };
    exported?;
    // SAFETY: a descriptor that the driver made for us.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    released?;
    Ok(SharedPiece { size_bytes, file })
}

/// Memory of another process, mapped one piece behind the other. It is unmapped when this is dropped: wait for its users first.
pub struct ImportedMemory {
    device: Arc<CudaDevice>,
    base: u64,
    size_bytes: u64,
    /// How much of it is mapped, from the start.
    mapped_bytes: u64,
}

impl ImportedMemory {
    /// Maps the pieces, in order, for a device. The descriptors are closed; the mappings keep the memory.
    ///
    /// # Errors
    /// When the driver refuses: of another device than the memory's, for example.
    pub fn open(device: &Arc<CudaDevice>, pieces: Vec<SharedPiece>) -> Result<Self, CudaError> {
        let size_bytes: u64 = pieces.iter().map(|piece| piece.size_bytes).sum();
        if size_bytes == 0 {
            return Err(DriverError { call: "cuMemImportFromShareableHandle", code: INVALID_VALUE }.into());
        }
        let _current = device.enter()?;
        let driver = device.driver();
        let mut base: CUdeviceptr = 0;
        // SAFETY: `base` is valid for writing.
        unsafe { driver.address_reserve(&raw mut base, size_bytes as usize, 0, 0, 0) }?;
        let mut memory = ImportedMemory { device: Arc::clone(device), base, size_bytes, mapped_bytes: 0 };
        for piece in pieces {
            memory.map_next(&piece)?;
        }
        let access = MemAccess { location: MemLocation::device(device.raw_device()), flags: 3 };
        // SAFETY: all of it is mapped, and the descriptor is valid for reading.
        unsafe { driver.set_access(base, size_bytes as usize, &raw const access, 1) }?;
        Ok(memory)
    }

    fn map_next(&mut self, piece: &SharedPiece) -> Result<(), DriverError> {
        let driver = self.device.driver();
        let mut handle = 0;
        let file = piece.file.as_raw_fd() as usize as *mut c_void;
        // SAFETY: `handle` is valid for writing; this kind of handle is a descriptor by value, and it is open.
        unsafe { driver.import_handle(&raw mut handle, file, HANDLE_POSIX_FD) }?;
        // SAFETY: the addresses are reserved and free; the driver refuses a handle of another size.
        let mapped = unsafe { driver.map(self.base + self.mapped_bytes, piece.size_bytes as usize, 0, handle, 0) };
        if mapped.is_ok() {
            self.mapped_bytes += piece.size_bytes;
        }
        // SAFETY: imported above, and not used after this; the mapping keeps the memory.
        let released = unsafe { driver.release(handle) };
        mapped.and(released)
    }

    /// The first byte.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// How many bytes there are.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        let unmap = || {
            let _current = self.device.enter()?;
            let driver = self.device.driver();
            if self.mapped_bytes > 0 {
                // SAFETY: mapped by `map_next`, and by the contract of this type nobody uses it any more.
                unsafe { driver.unmap(self.base, self.mapped_bytes as usize) }?;
            }
            // SAFETY: reserved by `open` with this size, and nothing is mapped there.
            unsafe { driver.address_free(self.base, self.size_bytes as usize) }
        };
        if let Err(error) = unmap() {
            tracing::warn!(name: "memory.import_kept", target: "symmalloc", size_bytes = self.size_bytes, %error);
        }
    }
}

impl fmt::Debug for ImportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ImportedMemory { base, size_bytes, .. } = self;
        f.debug_struct("ImportedMemory").field("base", base).field("size_bytes", size_bytes).finish_non_exhaustive()
    }
}
