//! Handles and what an allocation returns.
//!
//! A handle names one allocation of one allocator, for ever: it is never given to another allocation, so using it after
//! the allocation was freed is an error, and never reaches another allocation's memory.
//!
//! ```text
//!  owner 64   the allocator, numbered in the process      heap 32 │ slot 32   where its block is kept
//!  serial 64  the allocation, numbered in its heap
//! ```
//! The block in `slot` carries the same serial while it is allocated: one comparison recognises a live handle. No serial is
//! zero, so an `Option<Handle>` is as large as a handle.

use crate::types::backend::DeviceAddress;
use crate::types::ids::{HeapId, Placement};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names one allocation. Copying it copies the name, not the memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle {
    owner: u64,
    heap: HeapId,
    slot: u32,
    serial: NonZeroU64,
}

impl Handle {
    #[inline]
    pub(crate) fn new(owner: u64, heap: HeapId, slot: u32, serial: NonZeroU64) -> Self {
        Handle { owner, heap, slot, serial }
    }

    #[inline]
    pub(crate) fn owner(self) -> u64 {
        self.owner
    }

    #[inline]
    pub(crate) fn heap(self) -> HeapId {
        self.heap
    }

    #[inline]
    pub(crate) fn slot(self) -> u32 {
        self.slot
    }

    #[inline]
    pub(crate) fn serial(self) -> NonZeroU64 {
        self.serial
    }

    /// The handle as three words, for interfaces that carry integers only.
    #[inline]
    pub const fn into_raw(self) -> (u64, u64, u64) {
        (self.owner, ((self.heap.0 as u64) << 32) | self.slot as u64, self.serial.get())
    }

    /// The handle of [`into_raw`](Self::into_raw). Any three words are safe: what is not a live handle is refused by
    /// every call.
    #[inline]
    pub const fn from_raw((owner, place, serial): (u64, u64, u64)) -> Self {
        // No allocation has the serial zero, and no heap lives to give the last one.
        let serial = match NonZeroU64::new(serial) {
            Some(serial) => serial,
            None => NonZeroU64::MAX,
        };
        Handle { owner, heap: HeapId((place >> 32) as u32), slot: place as u32, serial }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({self} of allocator {})", self.owner)
    }
}

impl fmt::Display for Handle {
    /// Heap, slot and serial.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}#{}", self.heap, self.slot, self.serial)
    }
}

/// Numbers the allocators of this process, and never gives a number twice. Goes into handles, never into a decision.
pub(crate) fn next_owner() -> u64 {
    static NEXT_OWNER: AtomicU64 = AtomicU64::new(1);
    NEXT_OWNER.fetch_add(1, Ordering::Relaxed)
}

/// Numbers the allocations of one heap.
#[derive(Debug, Default)]
pub(crate) struct Serials {
    last: u64,
}

impl Serials {
    #[inline]
    pub(crate) fn next(&mut self) -> NonZeroU64 {
        self.last += 1;
        NonZeroU64::new(self.last).expect("a heap makes fewer than 2^64 allocations")
    }

    /// Whether the serial is, or was, of an allocation of this heap.
    pub(crate) fn gave(&self, serial: NonZeroU64) -> bool {
        serial.get() <= self.last
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
