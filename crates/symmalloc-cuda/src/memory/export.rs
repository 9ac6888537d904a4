//! Export of virtual-memory chunks as handles that another process can import, and of ranges as dma-bufs for other devices.

use super::backing::Backed;
use super::chunks::Part;
use super::exported::ExportedMemory;
use super::handle::{DmaBufRefusal, ExportedHandle, FABRIC_BYTES, HandleKind, HeldDmaBuf};
use super::share_page::ExportState;
use super::virtual_memory::VirtualMemory;
use crate::error::{DriverError, INVALID_VALUE};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

impl VirtualMemory {
    /// See [`BackendMemory::hold_dma_buf`](super::interface::BackendMemory::hold_dma_buf).
    pub(super) fn make_dma_buf(&self, part: &Part, memory: &Arc<ExportedMemory>) -> Result<HeldDmaBuf, DmaBufRefusal> {
        let backing = self.backing_around(part.start).ok_or(DmaBufRefusal::NotMapped)?;
        let parts = std::slice::from_ref(part);
        let chunks = self.find_chunks(parts, Some(memory)).ok_or(DmaBufRefusal::NotMapped)?;
        // The lock keeps the chunks mapped. If they were unmapped before the lock was taken, `memory` has been notified.
        let _backed = backing.lock();
        if memory.state() != ExportState::Live {
            return Err(DmaBufRefusal::NotMapped);
        }
        let refused = |error| DmaBufRefusal::Driver { chunks: chunks.len(), error };
        let driver = self.device().driver();
        let _current = self.device().enter().map_err(refused)?;
        let _relaxed = driver.relax_capture();
        let handles = self.retain_all(&chunks).map_err(refused)?;
        let mut file: c_int = -1;
        // SAFETY: `file` is valid for writing. The caller passes whole pages, and memory is mapped at all of them.
        if let Err(error) = unsafe { driver.dma_buf(&raw mut file, part.start, (part.end - part.start) as usize) } {
            handles.into_iter().for_each(|handle| self.release_handle(handle));
            return Err(refused(error));
        }
        // SAFETY: the driver has just created it for the caller.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        Ok(HeldDmaBuf { file, handles, chunks })
    }

    /// Returns a handle of each chunk. On error no handle is kept.
    fn retain_all(&self, chunks: &[Part]) -> Result<Vec<c_ulonglong>, DriverError> {
        let mut handles = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let mut handle = 0;
            // SAFETY: `handle` is valid for writing; the address is only looked up.
            if let Err(error) = unsafe { self.device().driver().retain(&raw mut handle, chunk.start as *mut c_void) } {
                handles.into_iter().for_each(|handle| self.release_handle(handle));
                return Err(error);
            }
            handles.push(handle);
        }
        Ok(handles)
    }

    /// Releases handles for callers that have not entered the device's context. Handles that the driver fails to release are retried when
    /// memory is released later.
    pub(super) fn release_all(&self, handles: &[c_ulonglong]) {
        // If the context cannot be entered, each release fails and is retried later.
        let _current = self.device().enter();
        let _relaxed = self.device().driver().relax_capture();
        handles.iter().for_each(|handle| self.release_handle(*handle));
    }

    /// Returns the address range of each chunk behind some parts of one range, without duplicates, or `None` if a part is not mapped.
    /// Registers `memory` to be notified before one of the parts is unmapped.
    pub(super) fn find_chunks(&self, parts: &[Part], memory: Option<&Arc<ExportedMemory>>) -> Option<Vec<Part>> {
        let backing = self.backing_around(parts.first()?.start)?;
        let base = backing.range.base.0;
        let inside = |part: &Part| Some(part.start.checked_sub(base)?..part.end.checked_sub(base)?);
        let parts: Vec<Part> = parts.iter().map(inside).collect::<Option<_>>()?;
        let mut backed = backing.lock();
        let Backed { chunks, .. } = &*backed;
        if !parts.iter().all(|part| chunks.is_mapped(part)) {
            return None;
        }
        let behind = parts.iter().flat_map(|part| chunks.overlapping_chunks(part));
        let mut found: Vec<Part> = behind.map(|chunk| base + chunk.start..base + chunk.end).collect();
        found.sort_by_key(|chunk| chunk.start);
        found.dedup();
        if let Some(memory) = memory {
            backed.watch(parts.into_iter(), memory);
        }
        Some(found)
    }

    /// Exports a chunk, given by its address range, as a handle for another process.
    pub(super) fn export_one(&self, chunk: &Part, kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        let gone = DriverError { call: "cuMemRetainAllocationHandle", code: INVALID_VALUE };
        let backing = self.backing_around(chunk.start).ok_or(gone)?;
        let base = backing.range.base.0;
        // The lock keeps the chunk mapped.
        let backed = backing.lock();
        let inside = chunk.start - base..chunk.end.saturating_sub(base);
        if backed.chunks.overlapping_chunks(&inside).ne([inside.clone()]) {
            return Err(gone);
        }
        let driver = self.device().driver();
        let _current = self.device().enter()?;
        let _relaxed = driver.relax_capture();
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing; the address is only looked up.
        unsafe { driver.retain(&raw mut handle, chunk.start as *mut c_void) }?;
        let exported = match kind {
            HandleKind::FileDescriptor => {
                let mut file: c_int = -1;
                // SAFETY: `file` is valid for writing and has the type that this kind of handle requires; the handle is live.
                let exported = unsafe { driver.export_handle((&raw mut file).cast(), handle, kind.flag(), 0) };
                // SAFETY: the driver has just created it for the caller.
                exported.map(|()| ExportedHandle::FileDescriptor(unsafe { OwnedFd::from_raw_fd(file) }))
            }
            HandleKind::Fabric => {
                let mut bytes = Box::new([0_u8; FABRIC_BYTES]);
                // SAFETY: `bytes` is valid for writing and has the 64 bytes of a fabric handle; the handle is live.
                let exported = unsafe { driver.export_handle(bytes.as_mut_ptr().cast(), handle, kind.flag(), 0) };
                exported.map(|()| ExportedHandle::Fabric(bytes))
            }
        };
        self.release_handle(handle);
        exported
    }
}
