//! Entrances: the shortest way to allocate and free, for whoever keeps something [beside the heap](crate::held).
//!
//! Nearly every request of a program in a steady state takes a free block that is there, and nearly every free is nothing but to
//! free one. An [`Entrance`] serves those without the allocator, and those of memory that other streams used with it. It
//! borrows nothing: what keeps the allocator alive may itself go into the keepsake, under the same lock.
//!
//! What counts usage over all heaps is the allocator's: entrances are of locks that have [none](crate::tally).

use crate::allocator::Allocator;
use crate::backend::{Backend, DeviceAddress};
use crate::bound::Binding;
use crate::errors::FreeError;
use crate::fencing::Fencing;
use crate::free_index::Unfit;
use crate::handle::{Allocation, Handle};
use crate::heap::{Freed, Heap, Live, Surroundings};
use crate::held::{HeapCell, HeapGuard, Held, Keepsake as _};
use crate::ids::{HeapId, StreamId};
use crate::lock::Lock;
use crate::plain::Way;
use crate::units::SEGMENT_BYTES_MAX;
use std::mem::ManuallyDrop;

/// The heap of a [`Binding`], to allocate from it and to free what lies in it. Good for as long as the allocator lives; entered
/// later, it serves and frees nothing: it may lead to another allocator's heap, which knows none of the handles. See
/// [`Binding::entrance`].
#[derive(Debug)]
pub struct Entrance<L: Lock> {
    heap: L::HeapRef,
    id: HeapId,
    stream: StreamId,
    /// The allocator's number.
    owner: u16,
}

impl<L: Lock> Binding<L> {
    /// The binding's heap, without the allocator.
    #[inline]
    pub fn entrance(&self) -> Entrance<L> {
        Entrance { heap: self.heap.clone(), id: self.id, stream: self.stream(), owner: self.owner }
    }
}

impl<L: Lock<Tally = ()>> Entrance<L> {
    /// Allocates as [`Allocator::allocate_in`] does, if a free block is at hand, and does `also` with what is
    /// [kept beside the heap](crate::held), under the same lock. `None` else, and nothing has changed, as when the stream cannot
    /// be told to wait for the block's earlier users: [`Allocator::allocate_in`] does what it takes, or says why not.
    ///
    /// That is nearly every request of a program in a steady state. Only the handle, the address of the first byte and what
    /// `also` returned come back: for whoever keeps no more, this is the shortest way. `allocator` is asked where other streams
    /// used the block before.
    ///
    /// # Panics
    /// When it is asked and is another one than the entrance's.
    #[inline(always)]
    pub fn allocate<'a, B: Backend + 'a, R>(
        &self,
        size_bytes: u64,
        address: &mut DeviceAddress,
        also: impl FnOnce(&mut L::Keepsake) -> R,
        allocator: impl FnOnce() -> &'a Allocator<B, L>,
    ) -> Option<(Handle, R)> {
        if !(1..=SEGMENT_BYTES_MAX).contains(&size_bytes) {
            return None;
        }
        let mut guarded = self.heap.lock();
        if guarded.tags.owner() != self.owner {
            return None;
        }
        if guarded.way != Way::Plain {
            return allocate_by_rule::<L, _>(guarded, self.stream, size_bytes, address, also);
        }
        match guarded.allocate_at_once(size_bytes) {
            Ok(allocation) => Some(hand_over::<L, _>(guarded, &allocation, address, also)),
            Err(unfit) => allocate_used(guarded, unfit, size_bytes, address, also, allocator),
        }
    }

    /// Frees an allocation of the heap, and keeps `held` [beside it](crate::held) under the same lock. What keeps the allocator
    /// alive is `held`, and `allocator` finds it there: it is asked where more than the block is to be freed. Frees in a row
    /// may share an event, as with [`Allocator::free_in_row`]. Tells `refused` why an allocation is not freed. Returns what
    /// was not kept: where the free was refused, was recorded, or was one of another heap, that is all.
    ///
    /// If another thread is inside, or has the heap's lock to itself, it leaves the free and `held` for who comes next, where
    /// that is [allowed](Allocator::open_mail), and waits for nobody. No use by another stream may have been recorded with
    /// [`record_use_by_owner`](Allocator::record_use_by_owner) then: see [`free_used`](Self::free_used).
    #[inline(always)]
    pub fn free<B: Backend>(
        &self,
        handle: Handle,
        held: Held<L>,
        allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
        refused: impl FnOnce(&Held<L>, FreeError),
    ) -> Option<Held<L>> {
        if handle.heap() != self.id {
            return free_elsewhere(handle, held, allocator, refused);
        }
        // A panic from here on is a failed assertion about the heap. What comes with the free is not dropped then, which spares
        // the way a copy of it in memory.
        let held = ManuallyDrop::new(held);
        match self.heap.try_lock() {
            Some(guarded) => free_inside(guarded, handle, held, allocator, refused),
            None => free_past_others(&self.heap, handle, ManuallyDrop::into_inner(held), allocator, refused),
        }
    }

    /// As [`free`](Self::free), and waits for its turn.
    #[inline]
    pub fn free_used<B: Backend>(
        &self,
        handle: Handle,
        held: Held<L>,
        allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
        refused: impl FnOnce(&Held<L>, FreeError),
    ) -> Option<Held<L>> {
        if handle.heap() != self.id {
            return free_elsewhere(handle, held, allocator, refused);
        }
        free_inside(self.heap.lock(), handle, ManuallyDrop::new(held), allocator, refused)
    }
}

/// Allocates where other streams used the block before.
#[inline(never)]
fn allocate_used<'a, B: Backend + 'a, L: Lock, R>(
    mut guarded: HeapGuard<'_, L>,
    unfit: Unfit,
    size_bytes: u64,
    address: &mut DeviceAddress,
    also: impl FnOnce(&mut L::Keepsake) -> R,
    allocator: impl FnOnce() -> &'a Allocator<B, L>,
) -> Option<(Handle, R)> {
    let around = around_of(allocator(), &guarded);
    let allocation = guarded.allocate_behind_users(around, size_bytes, unfit)?;
    Some(hand_over::<L, _>(guarded, &allocation, address, also))
}

/// Allocates in a heap that is not plain.
#[inline(never)]
fn allocate_by_rule<L: Lock, R>(
    mut guarded: HeapGuard<'_, L>,
    stream: StreamId,
    size_bytes: u64,
    address: &mut DeviceAddress,
    also: impl FnOnce(&mut L::Keepsake) -> R,
) -> Option<(Handle, R)> {
    if guarded.is_recorded {
        return None;
    }
    let allocation = guarded.allocate_at_once_by_rule(stream, size_bytes)?;
    Some(hand_over::<L, _>(guarded, &allocation, address, also))
}

/// What the heap's driver calls go to.
#[inline]
fn around_of<'a, B: Backend, L: Lock>(allocator: &'a Allocator<B, L>, heap: &Heap) -> &'a Surroundings<B, L> {
    assert!(heap.tags.owner() == allocator.owner, "an entrance of another allocator");
    &allocator.around
}

/// Does what is to be done under the lock beside an allocation, and lets go of the heap.
#[inline(always)]
fn hand_over<L: Lock, R>(
    mut guarded: HeapGuard<'_, L>,
    allocation: &Allocation,
    address: &mut DeviceAddress,
    also: impl FnOnce(&mut L::Keepsake) -> R,
) -> (Handle, R) {
    let done = also(&mut guarded.keepsake);
    drop(guarded);
    *address = allocation.address;
    (allocation.handle, done)
}

/// Somebody else is inside, or may come without asking.
#[cold]
#[inline(never)]
fn free_past_others<B: Backend, L: Lock>(
    heap: &HeapCell<L>,
    handle: Handle,
    held: Held<L>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    let held = heap.mail.leave(handle, held).err()?;
    free_inside(heap.lock(), handle, ManuallyDrop::new(held), allocator, refused)
}

#[inline(always)]
fn free_inside<B: Backend, L: Lock>(
    mut guarded: HeapGuard<'_, L>,
    handle: Handle,
    held: ManuallyDrop<Held<L>>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    let held = || ManuallyDrop::into_inner(held);
    match guarded.free_at_hand(handle, |_, _| {}) {
        Freed::Now => guarded.keepsake.keep(held()),
        Freed::Used(live) => free_used(guarded, live, held(), allocator, refused),
        Freed::NotYet => free_by_all_means(guarded, handle, held(), allocator, refused),
    }
}

/// Frees an allocation of a plain heap that other streams used.
#[inline(never)]
fn free_used<B: Backend, L: Lock>(
    mut guarded: HeapGuard<'_, L>,
    live: Live,
    held: Held<L>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    let around = around_of(allocator(&held), &guarded);
    let freed = guarded.free_used(around, live, Fencing::InRow, |_, _| {}).map_err(FreeError::from);
    keep_if_freed::<L>(guarded, freed, held, refused)
}

/// Frees what a heap frees that is not plain, or nothing.
#[inline(never)]
fn free_by_all_means<B: Backend, L: Lock>(
    mut guarded: HeapGuard<'_, L>,
    handle: Handle,
    held: Held<L>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    if guarded.is_recorded {
        drop(guarded);
        return free_elsewhere(handle, held, allocator, refused);
    }
    let freed = allocator(&held).free_by_all_means(&mut guarded, handle, Fencing::InRow);
    keep_if_freed::<L>(guarded, freed, held, refused)
}

#[inline(always)]
fn keep_if_freed<L: Lock>(
    mut guarded: HeapGuard<'_, L>,
    freed: Result<(), FreeError>,
    held: Held<L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    match freed {
        Ok(()) => guarded.keepsake.keep(held),
        Err(error) => {
            drop(guarded);
            refused(&held, error);
            Some(held)
        }
    }
}

/// Frees an allocation of another heap, or one that is recorded.
#[cold]
#[inline(never)]
fn free_elsewhere<B: Backend, L: Lock>(
    handle: Handle,
    held: Held<L>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    if let Err(error) = allocator(&held).free_in_row(handle) {
        refused(&held, error);
    }
    Some(held)
}
