//! Questions about one allocation or one address. Nothing here changes anything.

use crate::allocator::Allocator;
use crate::backend::{Backend, DeviceAddress};
use crate::config::PointerLookup;
use crate::errors::HandleError;
use crate::handle::{Allocation, Handle};
use crate::ids::{PoolId, SegmentId, StreamId};
use crate::lock::{Lock, LockCell};
use crate::units::bytes;

/// Where a device address lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentPosition {
    /// The pool of the segment.
    pub pool: PoolId,
    /// The stream of its heap; `None` when the pool's streams share.
    pub stream: Option<StreamId>,
    /// The segment, by birth ordinal in its heap.
    pub segment: SegmentId,
    /// Address of its first byte.
    pub base: DeviceAddress,
    /// Bytes of it that are in use or free: what a window on it covers.
    pub size_bytes: u64,
    /// The address's offset in it, in bytes.
    pub offset_bytes: u64,
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// The live allocation behind a handle.
    ///
    /// # Errors
    /// When the handle is not live here, or names an allocation of zero bytes.
    pub fn allocation(&self, handle: Handle) -> Result<Allocation, HandleError> {
        let heap = self.heap_of(handle)?.lock();
        heap.live(handle)?;
        let size_bytes = bytes(heap.table.block(handle.slot()).size);
        let (address, placement) = (heap.address(handle.slot()), heap.placement(handle.slot()));
        Ok(Allocation { handle, address, placement, size_bytes })
    }

    /// The live allocation that a device address names: its first byte, or with [`PointerLookup::Interior`] any of its
    /// bytes.
    ///
    /// # Errors
    /// When none does, or when lookup by pointer is not configured.
    pub fn handle_at(&self, address: DeviceAddress) -> Result<Handle, HandleError> {
        let lookup = self.config().pointer_lookup();
        if lookup == PointerLookup::Off {
            return Err(HandleError::LookupOff);
        }
        if let Some(heap) = self.likely_heap(address) {
            let heap = heap.lock();
            if let Some(slot) = heap.slot_around(address) {
                return heap.handle_in(slot);
            }
        }
        let unknown = HandleError::UnknownAddress { address };
        let entry = self.around.directory.lock().around(address).ok_or(unknown)?;
        let heap = self.heaps.get(entry.heap.index()).ok_or(unknown)?.lock();
        let Some(slot) = heap.slot_around(address) else {
            return Err(if lookup == PointerLookup::Exact {
                HandleError::InteriorAddress { address }
            } else {
                unknown
            });
        };
        self.address_map.note(address, entry.heap);
        heap.handle_in(slot)
    }

    /// The live segment that a device address lies in, whether it is allocated there or not.
    pub fn segment_at(&self, address: DeviceAddress) -> Option<SegmentPosition> {
        let entry = self.around.directory.lock().around(address)?;
        let heap = self.heaps.get(entry.heap.index())?.lock();
        // The segment may have died before its heap was locked. Now it cannot.
        if self.around.directory.lock().around(address) != Some(entry) {
            return None;
        }
        let segment = heap.table.segment(entry.segment);
        let offset_bytes = address.0 - segment.range.base.0;
        (offset_bytes < bytes(segment.end)).then_some(SegmentPosition {
            pool: heap.pool,
            stream: heap.stream,
            segment: segment.id,
            base: segment.range.base,
            size_bytes: bytes(segment.end),
            offset_bytes,
        })
    }
}
