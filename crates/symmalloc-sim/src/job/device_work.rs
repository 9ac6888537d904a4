//! Device work of a correct program, as input for the race detector.
//!
//! Each stream that uses an allocation writes all of it, after waiting for the streams that already use it. The
//! allocator is responsible for all further ordering between streams.

use crate::device::{Race, SimBackend};
use symmalloc_core::backend::{Backend, DeviceAddress};
use symmalloc_core::{Allocation, Handle, StreamId};

/// A live allocation of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveBlock {
    /// `None` for a zero-byte allocation whose pool was destroyed before its rank restarted.
    pub(crate) handle: Option<Handle>,
    address: DeviceAddress,
    size_bytes: u64,
    /// Streams that use the allocation, one bit each. Streams with ids of 64 and above are not tracked: they use only their own
    /// allocations, and no other stream uses these.
    users: u64,
    last_user: StreamId,
}

impl LiveBlock {
    /// Submits the first work that uses the allocation.
    pub(crate) fn begin(device: &SimBackend, stream: StreamId, allocation: &Allocation) -> Result<Self, Race> {
        let Allocation { handle, address, size_bytes, .. } = *allocation;
        device.submit(stream, address, size_bytes)?;
        Ok(LiveBlock { handle: Some(handle), address, size_bytes, users: bit(stream), last_user: stream })
    }

    /// Returns the address of the first byte, or `None` for a zero-byte allocation.
    pub(crate) fn address(&self) -> Option<DeviceAddress> {
        (self.size_bytes > 0).then_some(self.address)
    }

    /// Creates a zero-byte allocation.
    pub(crate) fn nothing(handle: Handle) -> Self {
        LiveBlock { handle: Some(handle), ..LiveBlock::outliving_its_pool() }
    }

    /// Creates a zero-byte allocation that outlived its pool.
    pub(crate) fn outliving_its_pool() -> Self {
        LiveBlock { handle: None, address: DeviceAddress(0), size_bytes: 0, users: 0, last_user: StreamId(0) }
    }

    /// Submits work on `stream`, which also uses the allocation from now on. Submits nothing if the driver fails to
    /// make `stream` wait for the earlier users.
    pub(crate) fn shared(&mut self, device: &SimBackend, stream: StreamId) -> Result<(), Race> {
        if self.users == 0 || bit(stream) == 0 {
            return Ok(());
        }
        if self.users & bit(stream) == 0 {
            let mut earlier = (0..64).map(StreamId).filter(|user| self.users & bit(*user) != 0);
            if !earlier.all(|user| waits(device, stream, user)) {
                return Ok(());
            }
            self.users |= bit(stream);
            self.last_user = stream;
        }
        // Only the last user submits more work. An earlier user would first have to wait for the later ones.
        if self.last_user == stream {
            device.submit(stream, self.address, self.size_bytes)?;
        }
        Ok(())
    }
}

fn bit(stream: StreamId) -> u64 {
    1_u64.checked_shl(stream.0.into()).unwrap_or(0)
}

/// Makes `stream` wait for all work on `on`, without notifying the allocator. Returns `true` on success.
pub(crate) fn waits(device: &SimBackend, stream: StreamId, on: StreamId) -> bool {
    let Ok(event) = device.record(on) else { return false };
    let waited = device.wait(stream, event);
    device.recycle(event);
    waited.is_ok()
}
