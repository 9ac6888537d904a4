//! The order of rule D2 as two integers.

use crate::blocks::table::{Block, Slot};
use crate::types::units::Units;
use std::cmp::Ordering;

/// A free block's position in the order of rule D2, with its slot: size, sequence, offset and slot, 32 bits each. The
/// first of the two words decides most comparisons.
///
/// The slot decides none: no two free blocks of a heap have the same (sequence, offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeKey(u64, u64);

/// Equal to the derived order, with one comparison if the first words differ.
impl Ord for FreeKey {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        if self.0 == other.0 {
            self.1.cmp(&other.1)
        } else if self.0 < other.0 {
            Ordering::Less
        } else {
            Ordering::Greater
        }
    }
}

impl PartialOrd for FreeKey {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl FreeKey {
    #[inline]
    pub(crate) fn of(block: &Block, slot: Slot) -> Self {
        let location = block.location.word();
        FreeKey(u64::from(block.size) << 32 | location >> 32, location << 32 | u64::from(slot))
    }

    /// Returns the least key that a block of this size can have.
    #[inline]
    pub(crate) fn least_of(size: Units) -> Self {
        FreeKey(u64::from(size) << 32, 0)
    }

    pub(crate) fn size(self) -> Units {
        (self.0 >> 32) as Units
    }

    #[inline]
    pub(crate) fn slot(self) -> Slot {
        self.1 as Slot
    }
}
