//! The order of rule D2 as one integer.

use crate::blocks::table::{Block, Slot};
use crate::types::units::Units;

/// A free block's place in the order of rule D2, with its slot: size, sequence, offset, slot, 32 bits each.
///
/// The slot never decides: no two free blocks of a heap agree in (sequence, offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FreeKey(u128);

impl FreeKey {
    #[inline]
    pub(crate) fn of(block: &Block, slot: Slot) -> Self {
        let location = u128::from(block.location.word()) << 32;
        FreeKey(u128::from(block.size) << 96 | location | u128::from(slot))
    }

    /// The least key a block of this size can have.
    #[inline]
    pub(crate) fn least_of(size: Units) -> Self {
        FreeKey(u128::from(size) << 96)
    }

    pub(crate) fn size(self) -> Units {
        (self.0 >> 96) as Units
    }

    #[inline]
    pub(crate) fn slot(self) -> Slot {
        self.0 as Slot
    }
}
