//! The queries of a registrar, which can be made at any time: a buffer's window, its cache key, and the invalidated keys.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::sync::error::LookupError;
use crate::windows::keys::{Invalidated, InvalidationCursor, SegmentKey};
use crate::windows::registrations::WindowSpan;
use crate::windows::segment::HeapSegment;
use symmalloc_core::Handle;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, StreamAllocatorRef};

impl Registrar {
    /// Returns the window that contains a buffer, and the buffer's offset in the window. The offset is equal on all ranks.
    ///
    /// # Errors
    /// Returns an error if no window on the communicator contains the buffer. See [`LookupError`].
    pub fn window_of<T, A: StreamAllocatorRef<Memory = CudaBackend>>(
        &self,
        comm: &Communicator,
        buffer: &DeviceBuffer<T, A>,
    ) -> Result<WindowSpan, LookupError> {
        let (address, size_bytes) = self.place_of(buffer.handle(), buffer.is_empty())?;
        self.window_at(comm, address, size_bytes)
    }

    /// Like [`window_of`](Self::window_of), for `size_bytes` bytes starting at an address, such as a part of a buffer.
    ///
    /// # Errors
    /// Same as [`window_of`](Self::window_of).
    pub fn window_at(&self, comm: &Communicator, address: u64, size_bytes: u64) -> Result<WindowSpan, LookupError> {
        let communicator = || comm.name().to_owned();
        let Some(attachment) = self.find(comm) else {
            return Err(LookupError::NotAttached { communicator: communicator() });
        };
        let found = attachment.view().registered.find(address, size_bytes).map(|entry| (entry.key, entry.handle()));
        match found {
            Some((segment, Some(window))) => Ok(WindowSpan { window, offset_bytes: address - segment.base, segment }),
            Some((segment, None)) => Err(LookupError::Plain { segment, communicator: communicator() }),
            None => {
                let segment = self.key_at(address)?;
                if self.phase(segment.segment.heap.pool).is_ok_and(|phase| phase != Phase::Awake) {
                    return Err(LookupError::Asleep { segment, communicator: communicator() });
                }
                let is_capturing = self.allocator().is_capturing().unwrap_or(false);
                Err(if is_capturing {
                    LookupError::Capturing { segment, communicator: communicator() }
                } else {
                    LookupError::NotRegistered { segment, communicator: communicator() }
                })
            }
        }
    }

    /// Returns the key of the segment that contains a buffer. Use it as the key of cached channels, contexts and graphs.
    ///
    /// # Errors
    /// Returns an error if the buffer belongs to another allocator or is empty.
    pub fn key_of<T, A: StreamAllocatorRef<Memory = CudaBackend>>(
        &self,
        buffer: &DeviceBuffer<T, A>,
    ) -> Result<SegmentKey, LookupError> {
        let (address, _) = self.place_of(buffer.handle(), buffer.is_empty())?;
        self.key_at(address)
    }

    /// Like [`key_of`](Self::key_of), for any address in a segment.
    ///
    /// # Errors
    /// Returns an error if no live segment of the allocator contains the address.
    pub fn key_at(&self, address: u64) -> Result<SegmentKey, LookupError> {
        let position = self.allocator().core().segment_at(DeviceAddress(address));
        let position = position.ok_or(LookupError::UnknownAddress { address })?;
        Ok(SegmentKey {
            base: position.base.0,
            size_bytes: position.size_bytes,
            segment: HeapSegment { heap: position.heap, id: position.segment },
        })
    }

    /// Returns the keys that were invalidated on a communicator since the cursor, in log order. Every rank invalidates the keys of the same
    /// windows, in the same order; keys of buffers are local to this rank. Call this function after each sync, and drop the cache entries
    /// of these keys.
    ///
    /// A key is invalidated when its segment is released or grows, or when its pool is detached. Returns [`Invalidated::Everything`] if the
    /// communicator has ended.
    pub fn invalidations(&self, comm: &Communicator, cursor: &mut InvalidationCursor) -> Invalidated {
        match self.find(comm) {
            Some(attachment) => attachment.view().invalidations.since(cursor),
            None => Invalidated::Everything,
        }
    }

    /// Returns the address and size in bytes of an allocation.
    fn place_of(&self, handle: Handle, is_empty: bool) -> Result<(u64, u64), LookupError> {
        if is_empty {
            return Err(LookupError::Empty);
        }
        let allocation = self.allocator().core().allocation(handle)?;
        Ok((allocation.address.0, allocation.size_bytes))
    }
}
