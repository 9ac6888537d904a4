//! What can be asked at any time: where a buffer lies, what to cache by, and until when.

use crate::communicator::Communicator;
use crate::registrar::Registrar;
use crate::registrar::error::LookupError;
use crate::registrar::invalidation::{Invalidated, InvalidationCursor};
use crate::registrar::segment_key::{Generation, SegmentKey};
use crate::registrar::window::{Entry, RegisteredAs, WindowSpan};
use symmalloc_core::Handle;
use symmalloc_core::backend::DeviceAddress;
use symmalloc_core::sleep::Phase;
use symmalloc_cuda::{CudaBackend, DeviceBuffer, StreamAllocatorRef};

impl Registrar {
    /// The window that a buffer lies in, and where: equal offsets on all ranks.
    ///
    /// # Errors
    /// When the buffer is not registered on the communicator as a window, see [`LookupError`].
    pub fn window_of<T, A: StreamAllocatorRef<Memory = CudaBackend>>(
        &self,
        comm: &Communicator,
        buffer: &DeviceBuffer<T, A>,
    ) -> Result<WindowSpan, LookupError> {
        let (address, size_bytes) = self.place_of(buffer.handle(), buffer.is_empty())?;
        self.window_at(comm, address, size_bytes)
    }

    /// As [`window_of`](Self::window_of), for `size_bytes` bytes from an address on: of a part of a buffer, say.
    ///
    /// # Errors
    /// As [`window_of`](Self::window_of).
    pub fn window_at(&self, comm: &Communicator, address: u64, size_bytes: u64) -> Result<WindowSpan, LookupError> {
        let communicator = || comm.name().to_owned();
        let Some(attachment) = self.find(comm) else {
            return Err(LookupError::NotAttached { communicator: communicator() });
        };
        let entry = attachment.view().windows.find(address, size_bytes).copied();
        match entry {
            Some(Entry { segment, kind: RegisteredAs::Window(window), .. }) => {
                Ok(WindowSpan { window, offset_bytes: address - segment.base, segment })
            }
            Some(Entry { segment, kind: RegisteredAs::Plain, .. }) => {
                Err(LookupError::Plain { segment, communicator: communicator() })
            }
            None => {
                let segment = self.key_at(address)?;
                if self.phase(segment.generation.pool).is_ok_and(|phase| phase != Phase::Awake) {
                    return Err(LookupError::Asleep { segment, communicator: communicator() });
                }
                let is_capturing = self.allocator.is_capturing().unwrap_or(false);
                Err(if is_capturing {
                    LookupError::Capturing { segment, communicator: communicator() }
                } else {
                    LookupError::NotRegistered { segment, communicator: communicator() }
                })
            }
        }
    }

    /// The key of the segment that a buffer lies in: what channels, contexts and graphs are to be cached by.
    ///
    /// # Errors
    /// When the buffer is of another allocator or has no bytes.
    pub fn key_of<T, A: StreamAllocatorRef<Memory = CudaBackend>>(
        &self,
        buffer: &DeviceBuffer<T, A>,
    ) -> Result<SegmentKey, LookupError> {
        let (address, _) = self.place_of(buffer.handle(), buffer.is_empty())?;
        self.key_at(address)
    }

    /// As [`key_of`](Self::key_of), of any address in a segment.
    ///
    /// # Errors
    /// When no live segment of the allocator is there.
    pub fn key_at(&self, address: u64) -> Result<SegmentKey, LookupError> {
        let position = self.allocator.core().segment_at(DeviceAddress(address));
        let position = position.ok_or(LookupError::UnknownAddress { address })?;
        Ok(SegmentKey {
            base: position.base.0,
            size_bytes: position.size_bytes,
            generation: Generation { pool: position.pool, stream: position.stream, segment: position.segment },
        })
    }

    /// Which keys died on a communicator since the cursor, in the order of the log: those of windows are the same on every
    /// rank, those of buffers are this rank's own. Ask after each sync, and drop what is cached by them.
    ///
    /// A key dies when its segment dies or grows, and when its pool is detached; [`Invalidated::Everything`] when the
    /// communicator is gone.
    pub fn invalidations(&self, comm: &Communicator, cursor: &mut InvalidationCursor) -> Invalidated {
        match self.find(comm) {
            Some(attachment) => attachment.view().invalidations.since(cursor),
            None => Invalidated::Everything,
        }
    }

    /// Address and size of an allocation.
    fn place_of(&self, handle: Handle, is_empty: bool) -> Result<(u64, u64), LookupError> {
        if is_empty {
            return Err(LookupError::Empty);
        }
        let allocation = self.allocator.core().allocation(handle)?;
        Ok((allocation.address.0, allocation.size_bytes))
    }
}
