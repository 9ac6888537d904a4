//! The PyTorch settings that the model supports: rounding of sizes and splitting of blocks.

use super::blocks::Class;
use symmalloc_core::config::{FixedSegments, PoolConfig, RoundupPower2Divisions, SegmentPolicy};
use symmalloc_core::units::{MIB, UNIT_BYTES};

/// Maximum size of a small request.
pub(super) const SMALL_MAX_BYTES: u64 = MIB;
/// Minimum size of a request that gets a fixed segment of its own.
const OWN_SEGMENT_MIN_BYTES: u64 = 10 * MIB;
/// Multiple to which the size of such a segment is rounded up, in bytes.
const OWN_SEGMENT_ROUND_BYTES: u64 = 2 * MIB;

/// Settings of all pools of a rank.
#[derive(Clone, Debug)]
pub(super) struct ModelRules {
    /// Rules of fixed segments; `None` for expandable segments.
    fixed: Option<FixedSegments>,
    divisions: RoundupPower2Divisions,
}

impl ModelRules {
    pub(super) fn of(config: &PoolConfig) -> Self {
        let fixed = match config.segments() {
            SegmentPolicy::Fixed(fixed) => Some(fixed.clone()),
            _ => None,
        };
        ModelRules { fixed, divisions: config.roundup_power2_divisions() }
    }

    pub(super) fn is_fixed(&self) -> bool {
        self.fixed.is_some()
    }

    /// Returns the size of the block for a request (`round_size` in PyTorch), or `None` if it exceeds every address space.
    pub(super) fn block_bytes(&self, requested_bytes: u64) -> Option<u64> {
        let log_mib = requested_bytes.ilog2().saturating_sub(MIB.ilog2()).min(15);
        let divisions = u64::from(self.divisions.divisions()[log_mib as usize]);
        let step = if divisions > 1 && requested_bytes > UNIT_BYTES * divisions {
            (1 << requested_bytes.ilog2()) / divisions
        } else {
            UNIT_BYTES
        };
        requested_bytes.checked_next_multiple_of(step).filter(|size| *size < 1 << 62)
    }

    /// Returns `true` if a free block that is large enough may serve a request. Blocks above the maximum split size are reserved
    /// for requests of similar size.
    pub(super) fn accepts(&self, class: Class, request: u64, block: u64) -> bool {
        let Some(fixed) = self.fixed.as_ref().filter(|_| class == Class::Large) else { return true };
        let Some(max_split) = fixed.max_split_size_bytes else { return true };
        if request < max_split { block < max_split } else { block - request < fixed.max_non_split_rounding_bytes }
    }

    /// Returns `true` if the rest of a block becomes a separate block.
    pub(super) fn splits(&self, class: Class, request: u64, rest: u64) -> bool {
        match (&self.fixed, class) {
            (Some(fixed), Class::Large) => {
                rest > SMALL_MAX_BYTES && fixed.max_split_size_bytes.is_none_or(|max_split| request < max_split)
            }
            _ => rest >= UNIT_BYTES,
        }
    }

    /// Returns the size of a fixed segment for a block.
    pub(super) fn segment_bytes(&self, class: Class, size: u64) -> u64 {
        match class {
            Class::Small => class.page_bytes(),
            Class::Large if size < OWN_SEGMENT_MIN_BYTES => {
                self.fixed.as_ref().map_or(class.page_bytes(), |fixed| fixed.large_segment_bytes)
            }
            Class::Large => size.next_multiple_of(OWN_SEGMENT_ROUND_BYTES),
        }
    }
}
