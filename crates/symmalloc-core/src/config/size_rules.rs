//! Size rules: the size of a request's block, the segment acquired for it, and the conditions under which a block is
//! split.
//!
//! For fixed segments these are PyTorch's rules, number for number (`c10/cuda/CUDACachingAllocator.cpp`: `round_size`,
//! `get_allocation_size`, `should_split` and the oversize tests of `get_free_block`), so that a PyTorch user sees the
//! same peak. Expandable and reserved segments round in the same way and split whenever 512 bytes remain. All
//! arithmetic is on integers, because floating-point results may differ between machines.

use crate::config::policy::{PoolConfig, RoundupPower2Divisions, SegmentPolicy};
use crate::types::units::{MIB, SEGMENT_BYTES_MAX, UNIT_BYTES, Units, bytes, units};

/// PyTorch's `kSmallSize`: the largest request of the small class, in bytes.
const SMALL_BYTES_MAX: u64 = MIB;
/// PyTorch's `kMinLargeAlloc`: a request of at least this size, in bytes, gets a segment of its own size, rounded up to
/// `kRoundLarge`.
const LARGE_BYTES_MIN: u64 = 10 * MIB;
/// PyTorch's `kSmallBuffer` and `kRoundLarge`, in bytes.
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;

/// The first tight segment of a heap is its granule divided by this number: 2 MiB of 16 MiB, PyTorch's small segment.
const FIRST_SEGMENT_DIVISOR: Units = 8;

/// The two classes by which usage is counted. In pools of fixed segments, each class also has separate segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SizeClass {
    /// Blocks of at most 1 MiB.
    Small,
    /// Larger blocks.
    Large,
}

impl SizeClass {
    /// Returns the class in which a block of this size is counted.
    #[inline]
    pub(crate) fn of(size: Units) -> Self {
        if size <= const { (SMALL_BYTES_MAX / UNIT_BYTES) as Units } { SizeClass::Small } else { SizeClass::Large }
    }
}

/// The rules of one heap: a pool's policy combined with the backend's granularity.
#[derive(Debug)]
pub(crate) struct SizeRules {
    shape: Shape,
    /// Largest block of the small class, if segments are fixed; otherwise 0.
    small_max: Units,
    rounding: Rounding,
    /// The unit in which memory is acquired and released: the backend's granularity, or the granule of stitching.
    pub(crate) granule: Units,
    /// The backend's granularity. A *tight* segment acquires memory in this unit: at the start of a heap, and if a limit
    /// has no room for whole granules.
    granularity: Units,
}

/// The rule for rounding up a request.
#[derive(Debug)]
enum Rounding {
    Units,
    Divisions(RoundupPower2Divisions),
    /// To whole granules: a block is a segment.
    Granules,
}

#[derive(Debug)]
enum Shape {
    Fixed { max_split: Units, max_non_split_rounding: Units, large_segment_bytes: u64 },
    Whole,
    Unsplit,
}

impl SizeRules {
    pub(crate) fn new(config: &PoolConfig, granularity_bytes: u64) -> Self {
        let shape = match config.segments() {
            SegmentPolicy::Fixed(fixed) if fixed.unsplit => Shape::Unsplit,
            SegmentPolicy::Fixed(fixed) => Shape::Fixed {
                max_split: fixed
                    .max_split_size_bytes
                    .map_or(Units::MAX, |bytes| Units::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(Units::MAX)),
                max_non_split_rounding: units(fixed.max_non_split_rounding_bytes.next_multiple_of(UNIT_BYTES)),
                large_segment_bytes: fixed.large_segment_bytes,
            },
            SegmentPolicy::Expandable(_) | SegmentPolicy::Reserved { .. } => Shape::Whole,
        };
        let divisions = config.roundup_power2_divisions();
        let rounding = match shape {
            Shape::Unsplit => Rounding::Granules,
            _ if divisions.divisions().iter().any(|d| *d > 1) => Rounding::Divisions(divisions),
            _ => Rounding::Units,
        };
        SizeRules {
            small_max: if matches!(shape, Shape::Fixed { .. }) { units(SMALL_BYTES_MAX) } else { 0 },
            shape,
            rounding,
            granule: units(
                config.stitching().map_or(1, |knobs| knobs.granule_bytes).next_multiple_of(granularity_bytes),
            ),
            granularity: units(granularity_bytes),
        }
    }

    /// Returns the size of the block for a request of `requested` bytes, which is from 1 to [`SEGMENT_BYTES_MAX`].
    #[inline]
    pub(crate) fn block_size(&self, requested: u64) -> Units {
        debug_assert!((1..=SEGMENT_BYTES_MAX).contains(&requested));
        match &self.rounding {
            Rounding::Units => requested.div_ceil(UNIT_BYTES) as Units,
            Rounding::Divisions(divisions) => units(round_to_division(requested, *divisions)),
            Rounding::Granules => self.whole_granules(requested.div_ceil(UNIT_BYTES) as Units),
        }
    }

    /// Returns the class whose free blocks and segments serve a block of this size. Unless segments are fixed, this is
    /// the same class for all sizes.
    #[inline]
    pub(crate) fn class_of(&self, size: Units) -> SizeClass {
        if size <= self.small_max { SizeClass::Small } else { SizeClass::Large }
    }

    /// Returns `true` if a free block that is large enough may serve the request. Oversize blocks are kept for oversize
    /// requests.
    #[inline]
    pub(crate) fn accepts(&self, request: Units, block: Units) -> bool {
        match self.shape {
            Shape::Whole => true,
            Shape::Unsplit => block == request,
            Shape::Fixed { max_split, max_non_split_rounding, .. } => {
                if request < max_split {
                    block < max_split
                } else {
                    // A best fit is never smaller than the request.
                    block - request < max_non_split_rounding
                }
            }
        }
    }

    /// Returns `true` if the rest of a block after the request becomes a separate block.
    #[inline]
    pub(crate) fn splits(&self, class: SizeClass, request: Units, block: Units) -> bool {
        match self.shape {
            Shape::Whole => block > request,
            Shape::Unsplit => false,
            Shape::Fixed { max_split, .. } => match class {
                SizeClass::Small => block > request,
                SizeClass::Large => request < max_split && bytes(block - request) > SMALL_BYTES_MAX,
            },
        }
    }

    /// Returns the size of the fixed segment that is acquired for a block: PyTorch's `get_allocation_size`, in whole
    /// granules.
    pub(crate) fn segment_size(&self, block: Units) -> Units {
        let Shape::Fixed { large_segment_bytes, .. } = self.shape else { return self.whole_granules(block) };
        let wanted = match bytes(block) {
            small if small <= SMALL_BYTES_MAX => SMALL_SEGMENT_BYTES,
            medium if medium < LARGE_BYTES_MIN => large_segment_bytes,
            large => large.next_multiple_of(SMALL_SEGMENT_BYTES),
        };
        self.whole_granules(units(wanted))
    }

    /// Returns the least memory that holds a block: its size, rounded up to the backend's granularity.
    pub(crate) fn tight_size(&self, block: Units) -> Units {
        block.next_multiple_of(self.granularity)
    }

    /// Returns the size of the tight segment with which a heap of `mapped_bytes` serves a block, if it has less memory
    /// than a granule and the block is at most half of one. These segments double the heap until it has a granule.
    pub(crate) fn first_segment(&self, block: Units, mapped_bytes: u64) -> Option<Units> {
        if self.granule == self.granularity || mapped_bytes >= bytes(self.granule) {
            return None;
        }
        let size = self.tight_size(block.max(units(mapped_bytes)).max(self.granule / FIRST_SEGMENT_DIVISOR));
        (size <= self.granule / 2).then_some(size)
    }

    /// Returns `true` if a segment that ends here is tight: its memory fills its range, and it never grows. All other
    /// segments consist of whole granules.
    pub(crate) fn is_tight(&self, end: Units) -> bool {
        !end.is_multiple_of(self.granule)
    }

    /// Rounds the size up to whole granules.
    pub(crate) fn whole_granules(&self, size: Units) -> Units {
        size.next_multiple_of(self.granule)
    }
}

/// Rounds a size as PyTorch's `round_size` does with `roundup_power2_divisions`.
fn round_to_division(requested: u64, divisions: RoundupPower2Divisions) -> u64 {
    let log_mib = requested.ilog2().saturating_sub(MIB.ilog2()).min(15);
    let divisions = u64::from(divisions.at(log_mib as usize));
    if divisions > 1 && requested > UNIT_BYTES * divisions {
        let step = (1 << requested.ilog2()) / divisions;
        requested.next_multiple_of(step)
    } else {
        requested.next_multiple_of(UNIT_BYTES)
    }
}

#[cfg(test)]
mod tests;
