//! Handles and what an allocation returns.
//!
//! A handle names one allocation of one allocator, for ever: it is never given to another allocation, so using it after
//! the allocation was freed is an error and not somebody else's memory.
//!
//! ```text
//!  place 64 = heap 32 │ slot 32      tag 64 = owner 16 │ serial 48
//! ```
//! The block in `slot` carries the same tag while it is allocated: one comparison recognises a live handle.
//!
//! Slot and heap are one word of two halves, so that a handle is two words wherever it goes: calls pass and return it in
//! registers, and whoever stores it in memory and soon reads it again reads what was written, not parts of it. No tag is
//! zero: an `Option<Handle>` is two words as well.

use crate::backend::DeviceAddress;
use crate::ids::{HeapId, Placement};
use std::fmt;
use std::num::NonZeroU64;

/// Names one allocation. Copying it copies the name, not the memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    place: u64,
    tag: NonZeroU64,
}

impl Handle {
    /// The handle of an allocation with a tag that [`Tags`] gave.
    #[inline(always)]
    pub(crate) fn new(heap: HeapId, slot: u32, tag: NonZeroU64) -> Self {
        Handle { place: u64::from(heap.0) << 32 | u64::from(slot), tag }
    }

    #[inline(always)]
    pub(crate) fn heap(self) -> HeapId {
        HeapId((self.place >> 32) as u32)
    }

    #[inline(always)]
    pub(crate) fn slot(self) -> u32 {
        self.place as u32
    }

    #[inline(always)]
    pub(crate) fn tag(self) -> NonZeroU64 {
        self.tag
    }

    /// The handle as two words, for interfaces that carry integers only.
    #[inline]
    pub const fn into_raw(self) -> (u64, u64) {
        (self.place, self.tag.get())
    }

    /// The handle of [`into_raw`](Self::into_raw). Any two words are safe: what is not a live handle is refused by
    /// every call.
    #[inline]
    pub const fn from_raw((place, tag): (u64, u64)) -> Self {
        // No allocation has a tag of zero, and none lives to see the last one.
        let tag = match NonZeroU64::new(tag) {
            Some(tag) => tag,
            None => NonZeroU64::MAX,
        };
        Handle { place, tag }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (heap, slot, tag) = (self.heap(), self.slot(), self.tag());
        f.debug_struct("Handle").field("heap", &heap).field("slot", &slot).field("tag", &tag).finish()
    }
}

impl fmt::Display for Handle {
    /// Heap, slot and serial number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}#{}", self.heap(), self.slot(), self.tag().get() & SERIAL_MAX)
    }
}

const SERIAL_BITS: u32 = 48;
const SERIAL_MAX: u64 = (1 << SERIAL_BITS) - 1;

/// Gives the tags of one heap's allocations: the allocator's number and a serial.
#[derive(Debug)]
pub(crate) struct Tags {
    last: u64,
}

impl Tags {
    pub(crate) fn new(owner: u16) -> Self {
        Tags { last: u64::from(owner) << SERIAL_BITS }
    }

    /// The allocator's number.
    #[inline]
    pub(crate) fn owner(&self) -> u16 {
        (self.last >> SERIAL_BITS) as u16
    }

    #[inline]
    pub(crate) fn next(&mut self) -> NonZeroU64 {
        let tag = self.last.checked_add(1).and_then(NonZeroU64::new).expect("no serial is zero");
        // At a million allocations a second this takes nine years.
        debug_assert!(tag.get() & SERIAL_MAX != 0);
        self.last = tag.get();
        tag
    }

    /// Whether the tag is, or was, of an allocation of this heap.
    pub(crate) fn gave(&self, tag: NonZeroU64) -> bool {
        let tag = tag.get();
        tag >> SERIAL_BITS == self.last >> SERIAL_BITS && tag <= self.last && tag & SERIAL_MAX != 0
    }
}

/// An allocation: its name, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The name to use it by.
    pub handle: Handle,
    /// The first byte on the device; 0 for an allocation of zero bytes. Differs between ranks.
    pub address: DeviceAddress,
    /// Where it lies; equal on all ranks. [`Placement::NOWHERE`] for an allocation of zero bytes.
    pub placement: Placement,
    /// Bytes that may be used: the request, rounded up.
    pub size_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optional_handle_is_two_words() {
        assert_eq!(size_of::<Option<Handle>>(), 2 * size_of::<u64>());
    }

    #[test]
    fn any_two_words_make_a_handle_and_a_tag_of_zero_makes_one_that_nobody_has() {
        assert_eq!(Handle::from_raw((7, 9)).into_raw(), (7, 9));
        let nobody = Handle::from_raw((7, 0));
        assert!(!Tags::new(0).gave(nobody.tag()) && !Tags::new(u16::MAX).gave(nobody.tag()));
    }
}
