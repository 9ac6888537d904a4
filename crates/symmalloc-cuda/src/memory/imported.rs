//! Memory of another process that is mapped into this one: a range of addresses with chunks at given offsets.
//!
//! ```text
//!  one process    chunk ── retain, export ──► handle ═══ socket ═══► map ── ImportedMemory    another process
//! ```
//! Both a handle and a mapping keep the memory alive, so a handle is closed as soon as its memory is mapped. Other modules send the handles
//! and decide when the memory may be used: `sharing/` for programs, and the allocator of `symmalloc-torch` for tensors.

use super::exported::Access;
use super::handle::HandleKind;
use crate::device::CudaDevice;
use crate::driver::{ACCESS_READ, ACCESS_READ_WRITE, MemAccess, MemLocation, MemProperties};
use crate::error::{DriverError, INVALID_DEVICE};
use std::ffi::{c_ulonglong, c_void};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use symmalloc_files::is_forked;

/// Reserved addresses and the memory of other processes that is mapped there. Dropping waits until the device has finished the work that
/// was submitted in this context, and unmaps the memory. Memory that the driver fails to unmap stays mapped, and a warning is logged.
pub struct ImportedMemory {
    device: Arc<CudaDevice>,
    /// Address of the first byte; 0 once the addresses were released.
    base: u64,
    size_bytes: u64,
    /// Offsets of the mapped parts, in order, with neighbors merged.
    runs: Vec<Range<u64>>,
}

impl ImportedMemory {
    /// Reserves `size_bytes` bytes of addresses, with no memory behind them.
    ///
    /// # Errors
    /// Returns an error if a driver call fails. The size must be a multiple of the driver's granularity.
    pub fn reserve(device: &Arc<CudaDevice>, size_bytes: u64) -> Result<Self, DriverError> {
        let _current = device.enter()?;
        let _relaxed = device.driver().relax_capture();
        let mut base = 0;
        // SAFETY: `base` is valid for writing. Alignment 0 selects the driver's default.
        unsafe { device.driver().address_reserve(&raw mut base, size_bytes as usize, 0, 0, 0) }?;
        Ok(ImportedMemory { device: Arc::clone(device), base, size_bytes, runs: Vec::new() })
    }

    /// Maps a chunk from a file descriptor at the given offsets, which must be after the parts that are already mapped.
    ///
    /// # Errors
    /// Returns an error if a driver call fails because the descriptor refers to no memory, or to memory of a different size or device.
    pub fn map_file(&mut self, chunk: &Range<u64>, file: &OwnedFd) -> Result<(), DriverError> {
        self.map(chunk, file.as_raw_fd() as usize as *mut c_void, HandleKind::FileDescriptor)
    }

    /// Maps the memory of a handle. `shareable` is either a file descriptor, passed in place of a pointer, or a pointer to a fabric handle.
    pub(crate) fn map(
        &mut self,
        chunk: &Range<u64>,
        shareable: *mut c_void,
        kind: HandleKind,
    ) -> Result<(), DriverError> {
        debug_assert!(self.runs.last().is_none_or(|run| run.end <= chunk.start) && chunk.end <= self.size_bytes);
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing, and `shareable` has the form that the kind requires. The driver checks both.
        unsafe { self.device.driver().import_handle(&raw mut handle, shareable, kind.flag()) }?;
        let mapped = self.map_handle(chunk, handle);
        if mapped.is_ok() {
            match self.runs.last_mut() {
                Some(run) if run.end == chunk.start => run.end = chunk.end,
                _ => self.runs.push(chunk.clone()),
            }
        }
        // The mapping keeps the memory alive.
        // SAFETY: this function owns the handle and does not use it again.
        let released = unsafe { self.device.driver().release(handle) };
        mapped.and(released)
    }

    fn map_handle(&self, chunk: &Range<u64>, handle: c_ulonglong) -> Result<(), DriverError> {
        let driver = self.device.driver();
        let location = MemLocation::device(self.device.raw_device());
        let mut properties = MemProperties::of(location, 0, 0);
        // SAFETY: valid for writing, and the handle is live.
        unsafe { driver.handle_properties(&raw mut properties, handle) }?;
        if properties.location != location {
            return Err(DriverError { call: "cuMemGetAllocationPropertiesFromHandle", code: INVALID_DEVICE });
        }
        // SAFETY: the addresses are reserved and no other chunk uses them; the call fails for a handle of another size.
        unsafe { driver.map(self.base + chunk.start, (chunk.end - chunk.start) as usize, 0, handle, 0) }
    }

    /// Gives the device access to the mapped memory.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn set_access(&self, access: Access) -> Result<(), DriverError> {
        let _current = self.device.enter()?;
        let _relaxed = self.device.driver().relax_capture();
        let flags = match access {
            Access::Read => ACCESS_READ,
            Access::ReadWrite => ACCESS_READ_WRITE,
        };
        let access = MemAccess { location: MemLocation::device(self.device.raw_device()), flags };
        self.runs.iter().try_for_each(|run| {
            let size = (run.end - run.start) as usize;
            // SAFETY: the run is mapped, and the descriptor is valid for reading.
            unsafe { self.device.driver().set_access(self.base + run.start, size, &raw const access, 1) }
        })
    }

    /// Returns the address of the first byte.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// Returns the number of mapped bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Unmaps the memory and releases the addresses, so that dropping has nothing left to do. Memory that the driver does not unmap stays
    /// mapped, and the call can be repeated.
    pub(crate) fn unmap(&mut self) -> Result<(), DriverError> {
        if self.base == 0 {
            return Ok(());
        }
        let driver = self.device.driver();
        let _current = self.device.enter()?;
        let _relaxed = driver.relax_capture();
        if !self.runs.is_empty() {
            // SAFETY: takes no pointers, and the context is current.
            unsafe { driver.context_synchronize() }?;
        }
        while let Some(run) = self.runs.last() {
            // SAFETY: the run consists of whole mapped chunks that no work uses anymore.
            unsafe { driver.unmap(self.base + run.start, (run.end - run.start) as usize) }?;
            self.runs.pop();
        }
        // SAFETY: reserved with this size, and nothing is mapped there.
        unsafe { driver.address_free(self.base, self.size_bytes as usize) }?;
        self.base = 0;
        Ok(())
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        if let Err(error) = self.unmap() {
            tracing::warn!(name: "memory.import_kept", target: "symmalloc", size_bytes = self.size_bytes, %error);
        }
    }
}

impl fmt::Debug for ImportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ImportedMemory { base, size_bytes, runs, .. } = self;
        f.debug_struct("ImportedMemory")
            .field("base", &format_args!("{base:#x}"))
            .field("size_bytes", size_bytes)
            .field("runs", runs)
            .finish_non_exhaustive()
    }
}
