//! Stitching: large blocks made of free pieces of a pool's memory.

use crate::types::units::MIB;

/// Settings of stitching in a pool of expandable segments. If no free block fits a large request, the heap maps free
/// granules into a second, contiguous range of addresses.
///
/// Stitching depends only on the ops (rule D1). Registered memory is not stitched, because a window covers one range of
/// addresses.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Stitching {
    /// The pool acquires, releases and stitches memory in pieces of this many bytes, rounded up to the backend's
    /// granularity. The driver takes the same time to map a piece of any size, so larger pieces take less time per
    /// byte. Smaller pieces leave less memory unused. Until a heap holds a granule, it acquires smaller segments, which
    /// are not stitched.
    pub granule_bytes: u64,
    /// Minimum size of a stitched request, in bytes. The default is [`LEAST_GRANULES`](Self::LEAST_GRANULES) times
    /// `granule_bytes`.
    pub least_bytes: u64,
    /// Maximum number of granules that one request maps. For a request that needs more, the heap grows instead.
    pub maps_max: u32,
    /// Maximum number of granules that are mapped a second time at once, in ranges that are in use or cached. Beyond
    /// this number, a heap drops its oldest cached ranges until at most seven eighths of the number remain. The host
    /// then waits for the streams that used these ranges, as in a trim.
    pub aliases_max: u32,
}

impl Stitching {
    /// The default minimum size of a stitched request, in granules. A stitched block takes whole granules, so this
    /// minimum bounds the memory that the block leaves unused, and the time per byte that its mapping takes.
    pub const LEAST_GRANULES: u64 = 8;

    /// Returns the default settings with a different granule.
    pub fn with_granule(granule_bytes: u64) -> Self {
        let least_bytes = granule_bytes.saturating_mul(Self::LEAST_GRANULES);
        Stitching { granule_bytes, least_bytes, maps_max: 1 << 14, aliases_max: 1 << 16 }
    }
}

impl Default for Stitching {
    /// Returns settings with granules of 16 MiB. On the recorded jobs, such granules save nearly as much memory as
    /// smaller ones, and mapping them takes no measurable part of a step.
    fn default() -> Self {
        Stitching::with_granule(16 * MIB)
    }
}
