//! A model of a communicator's symmetric address space that follows NCCL's own accounting.
//!
//! Every rank maps the windows of all ranks of its NVLink domain into one large range per rank. A window has the same offset in the ranges
//! of all ranks. The ranges are reserved once and never grow. If a window does not fit, NCCL fails with an internal error, possibly in the
//! middle of a registration. This model detects the failure in advance.
//!
//! ```text
//!  0                                                                 limit: the largest device of all ranks,
//!  ├──────────┬───────┬╌╌╌╌╌╌╌╌╌┬───────────────┬╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌┤  rounded up to 4 GiB, or NCCL_WIN_STRIDE
//!  │ NCCL own │ win 0 │  free   │     win 2     │                 │
//!  └──────────┴───────┴╌╌╌╌╌╌╌╌╌┴───────────────┴╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌┘  first fit from the start (`ncclSpaceAlloc`)
//! ```
//!
//! All ranks register and deregister windows in the same order, so the model is the same on every rank.

use crate::windows::segment::HeapSegment;
use std::collections::BTreeMap;

/// Granularity in bytes to which NCCL rounds the range up (`ncclDevrInitOnce`).
const LIMIT_STEP_BYTES: u64 = 4 << 30;

/// Returns an upper bound on the bytes that NCCL reserves for itself with the first window: buffers for its low-latency kernels, 1 MiB per
/// rank of the domain, and barriers (`ncclSymkInitOnce`).
const fn reserved_bytes(ranks: u32) -> u64 {
    (ranks as u64 + 8) << 20
}

#[derive(Clone, Debug)]
pub(crate) struct SymmetricSpace {
    limit_bytes: u64,
    granularity_bytes: u64,
    /// Bytes that NCCL reserves at the start of the range.
    reserved_bytes: u64,
    /// Sizes of the windows, by offset. Windows are disjoint.
    taken: BTreeMap<u64, u64>,
    /// Offset of each segment's window.
    offsets: BTreeMap<HeapSegment, u64>,
}

impl SymmetricSpace {
    /// Creates the space of a communicator with `ranks` ranks. `largest_device_bytes` is the maximum of [`configured_bytes`] over all
    /// ranks.
    pub(crate) fn new(largest_device_bytes: u64, granularity_bytes: u64, ranks: u32) -> Self {
        let granularity_bytes = granularity_bytes.max(1);
        SymmetricSpace {
            limit_bytes: largest_device_bytes.max(1).checked_next_multiple_of(LIMIT_STEP_BYTES).unwrap_or(u64::MAX),
            granularity_bytes,
            reserved_bytes: reserved_bytes(ranks).next_multiple_of(granularity_bytes),
            taken: BTreeMap::new(),
            offsets: BTreeMap::new(),
        }
    }

    /// Reserves space for a segment's window. If the window does not fit, returns `false` and changes nothing.
    #[must_use]
    pub(crate) fn allocate(&mut self, segment: HeapSegment, size_bytes: u64) -> bool {
        let Some(offset) = self.find(size_bytes) else { return false };
        self.taken.insert(offset, size_bytes.next_multiple_of(self.granularity_bytes));
        self.offsets.insert(segment, offset);
        true
    }

    fn find(&self, size_bytes: u64) -> Option<u64> {
        let size_bytes = size_bytes.checked_next_multiple_of(self.granularity_bytes)?;
        let mut offset = self.reserved_bytes;
        for (taken, taken_bytes) in &self.taken {
            if taken - offset >= size_bytes {
                break;
            }
            offset = taken + taken_bytes;
        }
        (self.limit_bytes.checked_sub(offset)? >= size_bytes).then_some(offset)
    }

    /// Releases the space of a segment's window.
    pub(crate) fn free(&mut self, segment: HeapSegment) {
        if let Some(offset) = self.offsets.remove(&segment) {
            self.taken.remove(&offset);
        }
    }

    /// Returns the segments whose windows have space reserved.
    pub(crate) fn segments(&self) -> impl Iterator<Item = HeapSegment> {
        self.offsets.keys().copied()
    }

    /// Returns the bytes in use by windows and NCCL itself.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.reserved_bytes + self.taken.values().sum::<u64>()
    }

    /// Returns the size of the space in bytes.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }
}

/// Returns the size of the space that this rank requests: `NCCL_WIN_STRIDE` if set, otherwise the device's memory. All ranks use the
/// largest request.
pub(crate) fn configured_bytes(device_bytes: u64, win_stride: Option<&str>) -> u64 {
    let stride = win_stride.and_then(|text| text.trim().parse::<i64>().ok()).filter(|stride| *stride > 0);
    stride.map_or(device_bytes, i64::unsigned_abs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::HeapId;
    use symmalloc_core::ids::StreamGroup;
    use symmalloc_core::{PoolId, SegmentId};

    const GIB: u64 = 1 << 30;
    const GRANULARITY: u64 = 2 << 20;

    #[test]
    fn the_limit_is_the_largest_device_rounded_up_or_the_stride() {
        assert_eq!(SymmetricSpace::new(141 * GIB, GRANULARITY, 8).limit_bytes(), 144 * GIB);
        assert_eq!(SymmetricSpace::new(144 * GIB, GRANULARITY, 8).limit_bytes(), 144 * GIB);
        assert_eq!(configured_bytes(141 * GIB, None), 141 * GIB);
        assert_eq!(configured_bytes(141 * GIB, Some("-1")), 141 * GIB);
        assert_eq!(configured_bytes(141 * GIB, Some("none")), 141 * GIB);
        assert_eq!(configured_bytes(141 * GIB, Some(" 4294967296")), 4 * GIB);
    }

    fn segment(ordinal: u32) -> HeapSegment {
        HeapSegment { heap: HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All }, id: SegmentId(ordinal) }
    }

    #[test]
    fn windows_are_allocated_first_fit_and_freed() {
        let mut space = SymmetricSpace::new(1, GRANULARITY, 2);
        let own = space.used_bytes();
        assert_eq!(own, 10 << 20);
        assert!(space.allocate(segment(0), GRANULARITY) && space.allocate(segment(1), GIB));
        assert_eq!(space.offsets[&segment(0)], own);
        space.free(segment(0));
        assert!(space.allocate(segment(2), 2 * GRANULARITY));
        assert_eq!(space.offsets[&segment(2)], own + GRANULARITY + GIB, "the gap is too small");
        assert!(space.allocate(segment(3), 1));
        assert_eq!(space.offsets[&segment(3)], own, "rounded up to the granularity, it fits the gap");
        assert_eq!(space.used_bytes(), own + GIB + 3 * GRANULARITY);
    }

    #[test]
    fn a_window_that_does_not_fit_changes_nothing() {
        let mut space = SymmetricSpace::new(1, GRANULARITY, 2);
        let before = space.used_bytes();
        assert!(!space.allocate(segment(0), 4 * GIB));
        assert!(!space.allocate(segment(0), u64::MAX));
        assert_eq!(space.used_bytes(), before);
        assert!(space.allocate(segment(0), 4 * GIB - before));
        assert!(!space.allocate(segment(1), 1));
        space.free(segment(0));
        assert_eq!(space.used_bytes(), before);
    }
}
