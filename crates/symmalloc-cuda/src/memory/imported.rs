//! Memory of another process, mapped here: a range of addresses, and chunks in their places.
//!
//! ```text
//!  one process    chunk ── retain, export ──► handle ═══ socket ═══► map ── ImportedMemory    another process
//! ```
//! A handle keeps the memory, as a mapping does: who maps it closes it then. Who sends handles, and when the memory may be used, is
//! decided elsewhere: `sharing/` for programs, the allocator of `symmalloc-torch` for tensors.

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

/// Addresses for memory of other processes, and what is mapped there. Dropping it waits until the device has done what was submitted
/// in this context, and unmaps. What the driver refuses then stays mapped, and is said in the log.
pub struct ImportedMemory {
    device: Arc<CudaDevice>,
    /// 0 once the addresses went back.
    base: u64,
    size_bytes: u64,
    /// Offsets of what is mapped, neighbours joined, in order.
    runs: Vec<Range<u64>>,
}

impl ImportedMemory {
    /// Takes addresses for so many bytes. Nothing is behind them yet.
    ///
    /// # Errors
    /// When the driver refuses: sizes are multiples of its granularity.
    pub fn reserve(device: &Arc<CudaDevice>, size_bytes: u64) -> Result<Self, DriverError> {
        let _current = device.enter()?;
        let _relaxed = device.driver().relax_capture();
        let mut base = 0;
        // SAFETY: `base` is valid for writing. 0: the driver's own alignment.
        unsafe { device.driver().address_reserve(&raw mut base, size_bytes as usize, 0, 0, 0) }?;
        Ok(ImportedMemory { device: Arc::clone(device), base, size_bytes, runs: Vec::new() })
    }

    /// Maps a chunk that came as a descriptor at its offsets, which lie behind those that are mapped.
    ///
    /// # Errors
    /// When the driver refuses: the descriptor is of no memory, or of another size or device.
    pub fn map_file(&mut self, chunk: &Range<u64>, file: &OwnedFd) -> Result<(), DriverError> {
        self.map(chunk, file.as_raw_fd() as usize as *mut c_void, HandleKind::FileDescriptor)
    }

    /// Maps a handle: a descriptor in place of a pointer, or a pointer to a fabric handle.
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
        // SAFETY: `handle` is valid for writing; the other is what the kind says. The driver checks both.
        unsafe { self.device.driver().import_handle(&raw mut handle, shareable, kind.flag()) }?;
        let mapped = self.map_handle(chunk, handle);
        if mapped.is_ok() {
            match self.runs.last_mut() {
                Some(run) if run.end == chunk.start => run.end = chunk.end,
                _ => self.runs.push(chunk.clone()),
            }
        }
        // The mapping keeps the memory.
        // SAFETY: the handle is ours, and not used again.
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
        // SAFETY: the addresses are reserved and no other chunk has them; the driver refuses a handle of another size.
        unsafe { driver.map(self.base + chunk.start, (chunk.end - chunk.start) as usize, 0, handle, 0) }
    }

    /// Lets the device use what is mapped.
    ///
    /// # Errors
    /// When the driver refuses.
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

    /// The first byte.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// How many bytes are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// As dropping it, which has nothing to do afterwards. What the driver did not take back stays mapped, and this can be called again.
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
            // SAFETY: whole chunks that are mapped, and that no work uses any more.
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
