//! Look-up of allocations and segments by handle or address, and the invariant check. Nothing here changes state.

use super::Allocator;
use super::pool::HeapGuard;
use crate::config::errors::HandleError;
use crate::heap::invariants::Violation;
use crate::heap::{Heap, is_nothing};
use crate::pointers::HeapHints;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{HeapId, PoolId, SegmentId, StreamId};

/// The position of a device address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentPosition {
    /// The heap of the segment.
    pub heap: HeapId,
    /// The segment, by its ordinal in the heap.
    pub segment: SegmentId,
    /// Address of its first byte.
    pub base: DeviceAddress,
    /// Bytes of it that are allocated or free, which is the length of a window on it.
    pub size_bytes: u64,
    /// The address's offset in it, in bytes.
    pub offset_bytes: u64,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// Returns the live allocation of a handle.
    ///
    /// # Errors
    /// Returns an error if the handle is not live here, or belongs to an allocation of zero bytes.
    pub fn allocation(&self, handle: Handle) -> Result<Allocation, HandleError> {
        self.heap_of(handle)?.lock().allocation(handle)
    }

    /// Returns `true` if a handle is that of a live allocation, which may have zero bytes.
    pub fn is_live(&self, handle: Handle) -> bool {
        self.heap_of(handle).is_ok_and(|heap| {
            let heap = heap.lock();
            heap.allocation(handle).is_ok() || is_nothing(handle) && heap.ledger().check_nothing(handle).is_ok()
        })
    }

    /// Returns the requested bytes of a live allocation.
    ///
    /// # Errors
    /// Returns an error if the handle is not live here, or belongs to an allocation of zero bytes.
    pub fn requested_bytes(&self, handle: Handle) -> Result<u64, HandleError> {
        self.heap_of(handle)?.lock().requested_bytes(handle)
    }

    /// Returns the stream for which a live allocation was allocated.
    ///
    /// # Errors
    /// Returns an error if the handle is not live here, or belongs to an allocation of zero bytes.
    pub fn stream_of(&self, handle: Handle) -> Result<StreamId, HandleError> {
        self.heap_of(handle)?.lock().stream_of(handle)
    }

    /// Returns the live allocation whose first byte is at a device address.
    ///
    /// # Errors
    /// Returns an error if there is no such allocation, or look-up by pointer is not configured.
    pub fn handle_at(&self, address: DeviceAddress) -> Result<Handle, HandleError> {
        self.at(address, |heap| heap.handle_at(address)).map(|(_, handle)| handle)
    }

    /// Passes the heap that contains an address to `ask`. Returns the locked heap and the result.
    #[inline(always)]
    pub(super) fn at<T>(
        &self,
        address: DeviceAddress,
        ask: impl Fn(&mut Heap<L>) -> Option<T>,
    ) -> Result<(HeapGuard<'_, L>, T), HandleError> {
        let hints = self.hints.as_ref().ok_or(HandleError::LookupOff)?;
        if let Some(heap) = hints.get(address).and_then(|id| self.heaps.get(id.index())) {
            let mut heap = heap.cell().lock();
            if let Some(answer) = ask(&mut heap) {
                return Ok((heap, answer));
            }
        }
        let mut heap = self.heap_around(address, hints)?;
        let answer = ask(&mut heap).ok_or(HandleError::InteriorAddress { address })?;
        Ok((heap, answer))
    }

    /// Returns the locked heap that contains an address according to the directory.
    #[cold]
    #[inline(never)]
    fn heap_around(&self, address: DeviceAddress, hints: &HeapHints) -> Result<HeapGuard<'_, L>, HandleError> {
        let entry = self.context.directory.lock().around(address).ok_or(HandleError::UnknownAddress { address })?;
        hints.set(address, entry.heap);
        Ok(self.heaps.get(entry.heap.index()).ok_or(HandleError::UnknownAddress { address })?.cell().lock())
    }

    /// Returns the live segment that contains a device address, allocated or not.
    pub fn segment_at(&self, address: DeviceAddress) -> Option<SegmentPosition> {
        let entry = self.context.directory.lock().around(address)?;
        let heap = self.heaps.get(entry.heap.index())?.cell().lock();
        // The segment may have been removed before its heap was locked. From now on it cannot be removed.
        if self.context.directory.lock().around(address) != Some(entry) {
            return None;
        }
        let (segment, Range { base, .. }, size_bytes) = heap.segment(entry.segment);
        let offset_bytes = address.0 - base.0;
        (offset_bytes < size_bytes).then_some(SegmentPosition {
            heap: heap.id(),
            segment,
            base,
            size_bytes,
            offset_bytes,
        })
    }

    /// Checks every invariant of every heap, and that the budgets equal the sums over heaps (`I10`). Slow; for tests.
    /// Call it only between ops: while another thread executes one, the sums may differ.
    ///
    /// # Errors
    /// Returns the first violation found, in (pool, stream) order.
    pub fn check(&self) -> Result<(), Violation> {
        let (mut reserved_in_all, mut segments_in_all) = (0, 0);
        for entry in self.listed_pools() {
            let mut reserved = 0;
            for heap in entry.heaps() {
                let heap = heap.lock();
                let (reserved_bytes, segments) = heap.check()?;
                reserved += reserved_bytes;
                segments_in_all += segments;
            }
            if reserved != entry.budget().reserved_bytes() {
                return Err(Violation::of_budgets(entry.id()));
            }
            reserved_in_all += reserved;
        }
        let is_directory_exact = self.context.directory.lock().len() == segments_in_all;
        if reserved_in_all != self.context.budget.reserved_bytes() || !is_directory_exact {
            return Err(Violation::of_budgets(PoolId::DEFAULT));
        }
        Ok(())
    }
}
