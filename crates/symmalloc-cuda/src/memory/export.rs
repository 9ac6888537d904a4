//! Chunks of virtual memory as handles that another process can import.

use super::backing::Backed;
use super::chunks::Part;
use super::exported::ExportedMemory;
use super::handle::{ExportedHandle, FABRIC_BYTES, HandleKind};
use super::virtual_memory::VirtualMemory;
use crate::error::{DriverError, INVALID_VALUE};
use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

impl VirtualMemory {
    /// The chunks behind some parts of a range, in order, each once, when they cover the parts; `memory` is told when one of them goes
    /// back to the device.
    pub(super) fn share_parts(&self, base: u64, parts: &[Part], memory: &Arc<ExportedMemory>) -> Option<Vec<Part>> {
        let backing = self.backing_at(base)?;
        let mut backed = backing.lock();
        let Backed { chunks, .. } = &*backed;
        let mut shared: Vec<Part> = Vec::new();
        for part in parts {
            if !chunks.is_mapped(part) {
                return None;
            }
            shared.extend(chunks.overlapping_chunks(part));
        }
        shared.sort_by_key(|chunk| chunk.start);
        shared.dedup();
        backed.watch(&shared, memory);
        Some(shared)
    }

    /// A chunk of a range as a handle for another process.
    pub(super) fn export_one(&self, base: u64, chunk: &Part, kind: HandleKind) -> Result<ExportedHandle, DriverError> {
        let gone = DriverError { call: "cuMemRetainAllocationHandle", code: INVALID_VALUE };
        let backing = self.backing_at(base).ok_or(gone)?;
        // The chunk stays where it is meanwhile.
        let backed = backing.lock();
        if backed.chunks.overlapping_chunks(chunk).ne([chunk.clone()]) {
            return Err(gone);
        }
        let driver = self.device().driver();
        let _current = self.device().enter()?;
        let _relaxed = driver.relax_capture();
        let mut handle = 0;
        // SAFETY: `handle` is valid for writing; the address is only looked up.
        unsafe { driver.retain(&raw mut handle, (base + chunk.start) as *mut c_void) }?;
        let exported = match kind {
            HandleKind::FileDescriptor => {
                let mut file: c_int = -1;
                // SAFETY: `file` is valid for writing, and what a descriptor is written to; the handle is live.
                let exported = unsafe { driver.export_handle((&raw mut file).cast(), handle, kind.flag(), 0) };
                // SAFETY: the driver has just made it for the caller.
                exported.map(|()| ExportedHandle::FileDescriptor(unsafe { OwnedFd::from_raw_fd(file) }))
            }
            HandleKind::Fabric => {
                let mut bytes = Box::new([0_u8; FABRIC_BYTES]);
                // SAFETY: 64 bytes that are valid for writing, as a fabric handle has; the handle is live.
                let exported = unsafe { driver.export_handle(bytes.as_mut_ptr().cast(), handle, kind.flag(), 0) };
                exported.map(|()| ExportedHandle::Fabric(bytes))
            }
        };
        self.release_handle(handle);
        exported
    }
}
