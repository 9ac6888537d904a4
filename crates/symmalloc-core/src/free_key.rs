//! The order of rule D2 as one integer.

use crate::block_table::{Block, Slot};
use crate::units::Units;

/// A free block's place in the order of rule D2, with its slot: size, sequence, offset, slot, 32 bits each.
///
/// The slot never decides: no two free blocks of a heap agree in (sequence, offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FreeKey(u128);

impl FreeKey {
    /// Less than every key of a block: no block has the size 0.
    pub(crate) const MIN: FreeKey = FreeKey(0);

    #[inline]
    fn new(size: Units, sequence: u32, offset: Units, slot: Slot) -> Self {
        let high = (u64::from(size) << 32) | u64::from(sequence);
        let low = (u64::from(offset) << 32) | u64::from(slot);
        FreeKey((u128::from(high) << 64) | u128::from(low))
    }

    #[inline]
    pub(crate) fn of(block: &Block, slot: Slot) -> Self {
        FreeKey::new(block.size, block.sequence.0, block.offset, slot)
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
