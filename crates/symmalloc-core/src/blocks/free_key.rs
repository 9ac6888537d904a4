//! The order of rule D2 as two integers.

use crate::blocks::table::{Block, Slot};
use crate::types::units::Units;

/// A free block's place in the order of rule D2, with its slot: size, sequence, offset, slot, 32 bits each. In two words, because most
/// comparisons are over with the first.
///
/// The slot never decides: no two free blocks of a heap agree in (sequence, offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FreeKey(u64, u64);

impl FreeKey {
    #[inline]
    pub(crate) fn of(block: &Block, slot: Slot) -> Self {
        let location = block.location.word();
        FreeKey(u64::from(block.size) << 32 | location >> 32, location << 32 | u64::from(slot))
    }

    /// The least key a block of this size can have.
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
