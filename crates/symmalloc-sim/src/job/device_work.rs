//! What a correct program does on the device with its allocations, for the race detector to look at.
//!
//! Each stream that uses an allocation writes all of it, after waiting for the other users. All other order between
//! streams is the allocator's responsibility.

use crate::device::{Race, SimBackend};
use symmalloc_core::backend::{Backend, DeviceAddress};
use symmalloc_core::{Allocation, Handle, StreamId};

/// A live allocation of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveBlock {
    /// `None` for one of zero bytes whose pool was given up before its rank started again.
    pub(crate) handle: Option<Handle>,
    address: DeviceAddress,
    size_bytes: u64,
    /// Streams that use it, one bit each. Streams from 64 on are not followed.
    users: u64,
    last_user: StreamId,
}

impl LiveBlock {
    /// Work on `stream` uses the allocation for the first time.
    pub(crate) fn begin(device: &SimBackend, stream: StreamId, allocation: &Allocation) -> Result<Self, Race> {
        let Allocation { handle, address, size_bytes, .. } = *allocation;
        device.submit(stream, address, size_bytes)?;
        Ok(LiveBlock { handle: Some(handle), address, size_bytes, users: bit(stream), last_user: stream })
    }

    /// The first address; `None` for an allocation of zero bytes.
    pub(crate) fn address(&self) -> Option<DeviceAddress> {
        (self.size_bytes > 0).then_some(self.address)
    }

    /// An allocation of zero bytes.
    pub(crate) fn nothing(handle: Handle) -> Self {
        LiveBlock { handle: Some(handle), ..LiveBlock::of_a_pool_that_is_gone() }
    }

    /// An allocation of zero bytes that outlived its pool.
    pub(crate) fn of_a_pool_that_is_gone() -> Self {
        LiveBlock { handle: None, address: DeviceAddress(0), size_bytes: 0, users: 0, last_user: StreamId(0) }
    }

    /// Work on `stream` uses the allocation, too. A program that cannot wait does not use it.
    pub(crate) fn shared(&mut self, device: &SimBackend, stream: StreamId) -> Result<(), Race> {
        if self.users & bit(stream) == 0 {
            let mut earlier = (0..64).map(StreamId).filter(|user| self.users & bit(*user) != 0);
            if !earlier.all(|user| waits(device, stream, user)) {
                return Ok(());
            }
            self.users |= bit(stream);
            self.last_user = stream;
        }
        // An earlier user may not use it again without waiting for the later ones.
        if self.last_user == stream && bit(stream) != 0 {
            device.submit(stream, self.address, self.size_bytes)?;
        }
        Ok(())
    }
}

fn bit(stream: StreamId) -> u64 {
    1_u64.checked_shl(stream.0.into()).unwrap_or(0)
}

/// Makes `stream` wait for all work on `on`, behind the allocator's back. Whether it does.
pub(crate) fn waits(device: &SimBackend, stream: StreamId, on: StreamId) -> bool {
    let Ok(event) = device.record(on) else { return false };
    let waited = device.wait(stream, event);
    device.recycle(event);
    waited.is_ok()
}
