//! Size rules: how large a block a request gets, which segment is obtained for it, and when a block is split.
//!
//! For fixed segments these are PyTorch's rules, number for number (`c10/cuda/CUDACachingAllocator.cpp`, functions
//! `round_size`, `get_allocation_size`, `should_split` and the oversize tests of `get_free_block`), so that a PyTorch
//! user's peak carries over. Expandable and reserved segments round in the same way and split whenever 512 bytes
//! remain. Integer arithmetic only: floats may differ between machines.

use crate::config::policy::{PoolConfig, RoundupPower2Divisions, SegmentPolicy};
use crate::types::units::{MIB, SEGMENT_BYTES_MAX, UNIT_BYTES, Units, bytes, units};

/// PyTorch's `kSmallSize`: the largest request of the small class, in bytes.
pub const SMALL_BYTES_MAX: u64 = MIB;
/// PyTorch's `kMinLargeAlloc`: requests from here on get a segment of their own size, in bytes.
const LARGE_BYTES_MIN: u64 = 10 * MIB;
/// PyTorch's `kSmallBuffer` and `kRoundLarge`, in bytes.
const SMALL_SEGMENT_BYTES: u64 = 2 * MIB;

/// The two classes in which sizes are counted, and with fixed segments also kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SizeClass {
    /// Blocks of at most 1 MiB.
    Small,
    /// Larger blocks.
    Large,
}

impl SizeClass {
    /// The class in which a block of this size is counted.
    #[inline]
    pub(crate) fn of(size: Units) -> Self {
        if size <= const { (SMALL_BYTES_MAX / UNIT_BYTES) as Units } { SizeClass::Small } else { SizeClass::Large }
    }
}

/// The rules of one heap: a pool's policy with the backend's granularity worked in.
#[derive(Debug)]
pub(crate) struct SizeRules {
    shape: Shape,
    /// Blocks up to this size have segments of their own: those of the small class where segments are fixed, else none.
    small_max: Units,
    divisions: Option<RoundupPower2Divisions>,
    /// The backend's granularity.
    pub(crate) granule: Units,
}

#[derive(Debug)]
enum Shape {
    Fixed { max_split: Units, max_non_split_rounding: Units, large_segment_bytes: u64 },
    Whole,
}

impl SizeRules {
    pub(crate) fn new(config: &PoolConfig, granularity_bytes: u64) -> Self {
        let shape = match &config.segments {
            SegmentPolicy::Fixed(fixed) => Shape::Fixed {
                max_split: fixed
                    .max_split_size_bytes
                    .map_or(Units::MAX, |bytes| Units::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(Units::MAX)),
                max_non_split_rounding: units(fixed.max_non_split_rounding_bytes.next_multiple_of(UNIT_BYTES)),
                large_segment_bytes: fixed.large_segment_bytes,
            },
            SegmentPolicy::Expandable(_) | SegmentPolicy::Reserved { .. } => Shape::Whole,
        };
        let divisions = config.roundup_power2_divisions;
        SizeRules {
            small_max: if matches!(shape, Shape::Fixed { .. }) { units(SMALL_BYTES_MAX) } else { 0 },
            shape,
            divisions: divisions.divisions().iter().any(|d| *d > 1).then_some(divisions),
            granule: units(granularity_bytes),
        }
    }

    /// The size of the block that serves a request of `requested` bytes, which is from 1 to [`SEGMENT_BYTES_MAX`].
    #[inline]
    pub(crate) fn block_size(&self, requested: u64) -> Units {
        debug_assert!((1..=SEGMENT_BYTES_MAX).contains(&requested));
        match &self.divisions {
            None => requested.div_ceil(UNIT_BYTES) as Units,
            Some(divisions) => units(round_to_division(requested, *divisions)),
        }
    }

    /// The class whose free blocks and segments serve a block of this size: one for all unless segments are fixed.
    #[inline]
    pub(crate) fn class_of(&self, size: Units) -> SizeClass {
        if size <= self.small_max { SizeClass::Small } else { SizeClass::Large }
    }

    /// Whether a free block that is large enough may serve the request: oversize blocks are kept for oversize requests.
    #[inline]
    pub(crate) fn accepts(&self, request: Units, block: Units) -> bool {
        match self.shape {
            Shape::Whole => true,
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

    /// Whether what remains of a block behind the request becomes a block of its own.
    #[inline]
    pub(crate) fn splits(&self, class: SizeClass, request: Units, block: Units) -> bool {
        match self.shape {
            Shape::Whole => block > request,
            Shape::Fixed { max_split, .. } => match class {
                SizeClass::Small => block > request,
                SizeClass::Large => request < max_split && bytes(block - request) > SMALL_BYTES_MAX,
            },
        }
    }

    /// The fixed segment that is obtained for a block: PyTorch's `get_allocation_size`, in whole granules.
    pub(crate) fn segment_size(&self, block: Units) -> Units {
        let Shape::Fixed { large_segment_bytes, .. } = self.shape else { return self.whole_granules(block) };
        let wanted = match bytes(block) {
            small if small <= SMALL_BYTES_MAX => SMALL_SEGMENT_BYTES,
            medium if medium < LARGE_BYTES_MIN => large_segment_bytes,
            large => large.next_multiple_of(SMALL_SEGMENT_BYTES),
        };
        self.whole_granules(units(wanted))
    }

    /// The size rounded up to the backend's granularity.
    pub(crate) fn whole_granules(&self, size: Units) -> Units {
        size.next_multiple_of(self.granule)
    }
}

/// PyTorch's `round_size` with `roundup_power2_divisions`.
fn round_to_division(requested: u64, divisions: RoundupPower2Divisions) -> u64 {
    let log_mib = requested.ilog2().saturating_sub(MIB.ilog2()).min(15);
    let divisions = u64::from(divisions.divisions()[log_mib as usize]);
    if divisions > 1 && requested > UNIT_BYTES * divisions {
        let step = (1 << requested.ilog2()) / divisions;
        requested.next_multiple_of(step)
    } else {
        requested.next_multiple_of(UNIT_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::policy::FixedSegments;

    fn fixed(knobs: FixedSegments) -> SizeRules {
        let config = PoolConfig::builder().segments(SegmentPolicy::Fixed(knobs)).build().expect("valid");
        SizeRules::new(&config, 2 * MIB)
    }

    #[test]
    fn segments_have_pytorchs_sizes() {
        let rules = fixed(FixedSegments::default());
        for (block, segment) in [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
            (33 * MIB, 34 * MIB),
        ] {
            assert_eq!(bytes(rules.segment_size(units(block))), segment, "for a block of {block} bytes");
        }
    }

    #[test]
    fn a_large_block_is_split_only_when_more_than_a_mebibyte_remains() {
        let rules = fixed(FixedSegments::default());
        let request = units(5 * MIB);
        assert!(!rules.splits(SizeClass::Large, request, request + units(MIB)));
        assert!(rules.splits(SizeClass::Large, request, request + units(MIB) + 1));
        assert!(rules.splits(SizeClass::Small, 1, 2));
    }

    #[test]
    fn oversize_blocks_are_neither_split_nor_given_to_small_requests() {
        let rules = fixed(FixedSegments {
            max_split_size_bytes: Some(64 * MIB),
            max_non_split_rounding_bytes: 20 * MIB,
            ..FixedSegments::default()
        });
        assert!(!rules.accepts(units(63 * MIB), units(64 * MIB)));
        assert!(rules.accepts(units(63 * MIB), units(64 * MIB) - 1));
        assert!(rules.accepts(units(64 * MIB), units(84 * MIB) - 1));
        assert!(!rules.accepts(units(64 * MIB), units(84 * MIB)));
        assert!(!rules.splits(SizeClass::Large, units(64 * MIB), units(80 * MIB)));
    }

    #[test]
    fn power_of_two_divisions_round_as_in_pytorchs_documentation() {
        // "with divisions 4, a request of 1200 is rounded up to 1280": 1024 + 256.
        let four = RoundupPower2Divisions::uniform(4).expect("valid");
        assert_eq!(round_to_division(1200 * KIB, four), 1280 * KIB);
        assert_eq!(round_to_division(1024 * KIB, four), 1024 * KIB);
        assert_eq!(round_to_division(1, four), 512);
        assert_eq!(round_to_division(2048, four), 2048);
        assert_eq!(round_to_division(2049, four), 2560);
    }

    use crate::types::units::KIB;
}
