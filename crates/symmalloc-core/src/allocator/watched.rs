//! The path of ops that are recorded or debugged: what happens around the same functions that other ops run through.
//! See [`super::recording`] and [`super::debugging`].

use super::Allocator;
use super::gate::Request;
use crate::config::errors::{AllocateError, FreeError};
use crate::heap::Heap;
use crate::heap::debug::Debugged;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, DeviceAddress};
use crate::types::handle::{Allocation, Handle};
use std::sync::Arc;

impl<B: Backend, L: Lock> Allocator<B, L> {
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_watched(
        &self,
        request: Request,
        name: Option<&Arc<str>>,
    ) -> Result<Allocation, AllocateError> {
        let mut gate = self.gate();
        let Request { stream, size_bytes, .. } = request;
        let attempt = |heap: &mut Heap<L>| heap.allocate_debugged(&self.context, stream, size_bytes, name);
        let (heap, mut locked) = self.lock_heap(request)?;
        let placed = attempt(&mut locked);
        drop(locked);
        let placed = placed.or_else(|shortage| self.retry(request, heap, shortage, Some(&mut gate), attempt));
        let Debugged { allocation, size, requested_bytes } = placed.map_err(|error| self.with_suspects(error))?;
        if size > 0 {
            self.count_allocation(size, requested_bytes);
        }
        gate.note_allocation(&allocation, request, name.map(|name| &**name));
        Ok(allocation)
    }

    /// Frees the allocation that starts at an address. Returns the bytes that the program could use.
    #[cold]
    #[inline(never)]
    pub(super) fn free_at_watched(&self, address: DeviceAddress) -> Result<u64, FreeError> {
        self.free_watched(self.handle_at(address)?)
    }

    /// Frees an allocation. Returns the bytes that the program could use.
    #[cold]
    #[inline(never)]
    pub(super) fn free_watched(&self, handle: Handle) -> Result<u64, FreeError> {
        let mut gate = self.gate();
        let mut heap = self.heap_of(handle)?.lock();
        heap.collect_checks(&self.context);
        let (freed, usable_bytes) = match heap.free_debugged(&self.context, handle) {
            Ok(freed) => freed,
            Err(error) => {
                drop(heap);
                return Err(self.with_suspects_of_free(error));
            }
        };
        self.finish_free(heap, freed, Some(&mut gate));
        gate.note_free(handle);
        drop(gate);
        self.debug.totals().has_backlog().then(|| self.complete_checks(None));
        Ok(usable_bytes)
    }
}
