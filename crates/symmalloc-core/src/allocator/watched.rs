//! The path of ops that are recorded or debugged: what happens around the same functions that unwatched ops run through.
//! See [`super::recording`] and [`super::debugger`].

use super::Allocator;
use super::gate::{Gate, Request};
use crate::config::errors::{AllocateError, FreeError};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, Bytes};
use crate::types::handle::{Allocation, Handle};
use crate::types::units::bytes;
use std::sync::Arc;

impl<B: Backend, L: Lock> Allocator<B, L> {
    #[cold]
    pub(super) fn allocate_watched(
        &self,
        request: Request,
        name: Option<&Arc<str>>,
    ) -> Result<Allocation, AllocateError> {
        let mut gate = self.gate();
        let Request { pool, stream, size_bytes } = request;
        let allocation = match self.debug_options(pool) {
            Some(options) => self.allocate_debugged(request, options, name, &mut gate)?,
            None => self.allocate_in_pool(pool, stream, size_bytes, name, Some(&mut gate))?,
        };
        gate.note_allocation(&allocation, request, name.map(|name| &**name));
        self.report_block(&allocation, name.map(|name| &**name));
        Ok(allocation)
    }

    /// Frees an allocation. Returns the bytes that the program could use.
    #[cold]
    pub(super) fn free_watched(&self, handle: Handle) -> Result<u64, FreeError> {
        let mut gate = self.gate();
        let reported = self.report_free(handle);
        let freed = match self.free_debugged(handle, &mut gate) {
            Ok(None) => self.free_in_heap(handle, &mut gate),
            Ok(Some(usable_bytes)) => Ok(usable_bytes),
            Err(error) => Err(error),
        };
        match &freed {
            Ok(_) => gate.note_free(handle),
            Err(_) => reported.iter().for_each(|allocation| self.report_block(allocation, None)),
        }
        freed
    }

    /// Notifies a backend that reports blocks of a new one.
    fn report_block(&self, allocation: &Allocation, name: Option<&str>) {
        let backend = &self.context.backend;
        if backend.reports_blocks() && allocation.size_bytes > 0 {
            let Allocation { address, size_bytes, .. } = *allocation;
            backend.block_allocated(Bytes { address, size_bytes }, name);
        }
    }

    /// Notifies a backend that reports blocks of one that is about to be freed, and returns it.
    pub(super) fn report_free(&self, handle: Handle) -> Option<Allocation> {
        let backend = &self.context.backend;
        let allocation = if backend.reports_blocks() { self.allocation(handle).ok()? } else { return None };
        backend.block_freed(allocation.address);
        Some(allocation)
    }

    /// Frees an allocation whose heap may reuse it at once. Returns the bytes of its block.
    pub(super) fn free_in_heap(&self, handle: Handle, gate: &mut Gate<'_, L>) -> Result<u64, FreeError> {
        let mut heap = self.heap_of(handle)?.lock();
        let freed = heap.free(&self.context, handle)?;
        self.finish_free(heap, freed, Some(gate));
        Ok(bytes(freed.size))
    }
}
