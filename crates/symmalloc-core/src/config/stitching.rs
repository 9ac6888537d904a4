//! Stitching: whether a pool puts large blocks together from free pieces of its memory.

use crate::types::units::MIB;

/// How a pool of expandable segments stitches: where no free block fits, a large one is put together from free granules, which
/// get a second range of addresses.
///
/// All of it follows from the ops (rule D1). It is not for registered memory: a window covers one range of addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Stitching {
    /// The pool obtains memory, gives it back and stitches it in pieces of this many bytes, rounded up to the backend's
    /// granularity. A piece takes the driver as long to map whatever its size; smaller ones leave less memory unused.
    pub granule_bytes: u64,
    /// Requests of fewer bytes are not stitched.
    pub least_bytes: u64,
    /// The most granules that one request maps; a larger request makes the range grow.
    pub maps_max: u32,
    /// The most granules that are mapped a second time at once, in ranges that are in use or kept for later. Beyond it a heap
    /// forgets the oldest ranges that are kept, down to seven eighths of this; the host then waits for their streams, as in a
    /// trim.
    pub aliases_max: u32,
}

impl Default for Stitching {
    fn default() -> Self {
        Stitching { granule_bytes: 2 * MIB, least_bytes: 16 * MIB, maps_max: 1 << 14, aliases_max: 1 << 16 }
    }
}
