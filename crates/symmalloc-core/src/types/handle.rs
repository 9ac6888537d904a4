//! Handles, and the result of an allocation.
//!
//! A handle names exactly one allocation and is never reused. Using it after the allocation was freed, or with another
//! allocator, is therefore an error and never reaches another allocation's memory.
//!
//! ```text
//!  heap 32 │ slot 32   the position of the block in its allocator           serial 64   the allocation, numbered in the process
//! ```
//! An allocated block in `slot` carries the same serial, so one comparison recognizes a live handle. A heap takes
//! serials from the process 2^32 at a time, so no two heaps issue the same serial. No serial is zero, so an
//! `Option<Handle>` is as large as a handle.

use crate::types::backend::DeviceAddress;
use crate::types::ids::{HeapNumber, Placement};
use smallvec::SmallVec;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, Ordering};

/// A reference to one allocation. Copies of a handle refer to the same allocation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    /// Heap and slot in one word, so that a handle fits into two registers.
    place: u64,
    serial: NonZeroU64,
}

impl Handle {
    #[inline]
    pub(crate) fn new(heap: HeapNumber, slot: u32, serial: NonZeroU64) -> Self {
        Handle { place: (u64::from(heap.0) << 32) | u64::from(slot), serial }
    }

    #[inline]
    pub(crate) fn heap(self) -> HeapNumber {
        HeapNumber((self.place >> 32) as u32)
    }

    #[inline]
    pub(crate) fn slot(self) -> u32 {
        self.place as u32
    }

    #[inline]
    pub(crate) fn serial(self) -> NonZeroU64 {
        self.serial
    }

    /// Returns the handle as two words, for interfaces that pass integers only.
    #[inline]
    pub const fn into_raw(self) -> (u64, u64) {
        (self.place, self.serial.get())
    }

    /// Restores a handle from [`into_raw`](Self::into_raw). Any two words are safe to pass: every call returns an error
    /// for a handle that is not live.
    #[inline]
    pub const fn from_raw((place, serial): (u64, u64)) -> Self {
        // Serial zero is never assigned, and no process runs long enough to assign the last one.
        let serial = match NonZeroU64::new(serial) {
            Some(serial) => serial,
            None => NonZeroU64::MAX,
        };
        Handle { place, serial }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({self})")
    }
}

impl fmt::Display for Handle {
    /// Writes heap, slot and serial. The serial is written as its range and its number in the range.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let serial = self.serial.get();
        write!(f, "{}/{}#{}.{}", self.heap(), self.slot(), serial >> RANGE_BITS, serial as u32)
    }
}

/// A heap takes 2^RANGE_BITS serials from the process at a time.
const RANGE_BITS: u32 = 32;

/// The serials of one heap's allocations. They are part of handles but influence no decision.
#[derive(Debug)]
pub(crate) struct Serials {
    /// The last assigned serial. The first serial of a range is never assigned.
    last: u64,
    /// The ranges taken so far, newest last.
    ranges: SmallVec<[u32; 2]>,
}

impl Default for Serials {
    /// Starts at the end of a range that no heap owns, so that the first allocation takes a range.
    fn default() -> Self {
        Serials { last: u64::from(u32::MAX), ranges: SmallVec::new() }
    }
}

impl Serials {
    #[inline(always)]
    pub(crate) fn next(&mut self) -> NonZeroU64 {
        if self.last as u32 == u32::MAX {
            self.take_range();
        }
        self.last += 1;
        NonZeroU64::new(self.last).expect("the first serial of a range is never assigned")
    }

    #[cold]
    fn take_range(&mut self) {
        static TAKEN: AtomicU32 = AtomicU32::new(0);
        let before = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| taken.checked_add(1));
        let range = before.expect("a process makes fewer than 2^32 heaps") + 1;
        self.ranges.push(range);
        self.last = u64::from(range) << RANGE_BITS;
    }

    /// Returns `true` if the serial belongs, or belonged, to an allocation of this heap.
    pub(crate) fn gave(&self, serial: NonZeroU64) -> bool {
        let (range, newest) = ((serial.get() >> RANGE_BITS) as u32, (self.last >> RANGE_BITS) as u32);
        self.ranges.contains(&range) && serial.get() as u32 != 0 && (range != newest || serial.get() <= self.last)
    }
}

/// An allocation: its handle and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "the memory stays allocated until its handle is freed"]
pub struct Allocation {
    /// The handle that names it in later calls.
    pub handle: Handle,
    /// Address of the first byte on the device; 0 for an allocation of zero bytes. Differs between ranks.
    pub address: DeviceAddress,
    /// Segment and offset; equal on all ranks. [`Placement::NOWHERE`] for an allocation of zero bytes.
    pub placement: Placement,
    /// Usable bytes: the request, rounded up.
    pub size_bytes: u64,
}

#[cfg(test)]
mod tests;
