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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::backend::DeviceAddress;
    use crate::config::Config;
    use crate::errors::AllocateError;
    use crate::held::{Keepsake, Vacant};
    use crate::lock::Shared;
    use crate::sim::{Call, Fault, FaultRule, SimBackend};
    use crate::{Allocation, PoolId, StreamId};
    use std::sync::{Arc, Mutex};

    /// An allocator that its allocations keep alive, as those of `symmalloc-cuda` do.
    #[derive(Debug)]
    pub(crate) struct Owner {
        pub(crate) core: Allocator<SimBackend, Shared<Kept>>,
        /// How frees ended that were more than a block.
        pub(crate) late: Mutex<Vec<Result<(), FreeError>>>,
    }

    /// As many as it has room for.
    #[derive(Debug)]
    pub(crate) struct Kept {
        pub(crate) owners: Vec<Arc<Owner>>,
        pub(crate) room: usize,
    }

    impl Default for Kept {
        fn default() -> Self {
            Kept { owners: Vec::new(), room: 4 }
        }
    }

    impl Keepsake for Kept {
        type Held = Arc<Owner>;

        fn keep(&mut self, owner: Arc<Owner>) -> Option<Arc<Owner>> {
            if self.owners.len() == self.room {
                return Some(owner);
            }
            self.owners.push(owner);
            None
        }

        fn free_late(owner: &Arc<Owner>, heap: &mut Heap, handle: Handle) {
            let freed = owner.core.free_late(heap, handle);
            owner.late.lock().expect("no panic").push(freed);
        }

        fn vacant() -> &'static Vacant<Self> {
            static VACANT: Vacant<Kept> = Mutex::new(Vec::new());
            &VACANT
        }
    }

    pub(crate) fn owner() -> Arc<Owner> {
        let core = Allocator::new(SimBackend::builder().seed(1).build(), Config::default()).expect("valid");
        (0..2).for_each(|stream| assert_eq!(core.register_stream(), Ok(StreamId(stream))));
        Arc::new(Owner { core, late: Mutex::default() })
    }

    pub(crate) fn binding(owner: &Owner, stream: u16) -> Binding<Shared<Kept>> {
        owner.core.binding(PoolId::DEFAULT, StreamId(stream)).expect("both exist")
    }

    /// Allocates if a free block is at hand.
    fn allocate<R>(
        owner: &Owner,
        heap: &Binding<Shared<Kept>>,
        size_bytes: u64,
        address: &mut DeviceAddress,
        also: impl FnOnce(&mut Kept) -> R,
    ) -> Option<(Handle, R)> {
        heap.entrance().allocate(size_bytes, address, also, || &owner.core)
    }

    /// Frees as a thread does that waits for nobody. How that ended, and what was not kept.
    pub(crate) fn free(
        heap: &Binding<Shared<Kept>>,
        handle: Handle,
        owner: &Arc<Owner>,
    ) -> (Result<(), FreeError>, Option<Arc<Owner>>) {
        let mut freed = Ok(());
        let refused = |_: &Arc<Owner>, error| freed = Err(error);
        let left = heap.entrance().free(handle, Arc::clone(owner), |owner| &owner.core, refused);
        (freed, left)
    }

    fn kept(owner: &Owner, heap: &Binding<Shared<Kept>>) -> usize {
        owner.core.with_keepsake(heap, |kept| kept.owners.len())
    }

    #[test]
    fn what_is_done_at_hand_is_what_the_allocator_does() {
        let (direct, at_hand) = (owner(), owner());
        let heap = binding(&at_hand, 1);
        at_hand.core.with_keepsake(&heap, |kept| kept.room = 3);
        let sizes = [1, 4096, 3 << 20, 700, 64 << 20, 0];
        for (round, size) in sizes.into_iter().chain(sizes).enumerate() {
            let one = direct.core.allocate(PoolId::DEFAULT, StreamId(1), size).expect("memory");
            let (mut address, mut visits) = (DeviceAddress(0), 0);
            let other = allocate(&at_hand, &heap, size, &mut address, |_| visits += 1);
            let other = other.map(|(handle, ())| handle);
            assert_eq!(visits, u32::from(other.is_some()));
            let other = other.unwrap_or_else(|| {
                let placed = at_hand.core.allocate(PoolId::DEFAULT, StreamId(1), size).expect("memory");
                address = placed.address;
                placed.handle
            });
            if size > 0 {
                let placed = at_hand.core.allocation(other).expect("live");
                let expected = (one.placement, one.size_bytes, address);
                assert_eq!(expected, (placed.placement, placed.size_bytes, placed.address));
            }
            if size > 1000 {
                direct.core.free(one.handle).expect("live");
                let (freed, left) = free(&heap, other, &at_hand);
                assert_eq!(freed, Ok(()));
                assert_eq!(left.is_none(), round < 7, "three are kept");
            }
        }
        assert_eq!(kept(&at_hand, &heap), 3);
        assert_eq!(direct.core.digest(PoolId::DEFAULT), at_hand.core.digest(PoolId::DEFAULT));
        assert_eq!(direct.core.stats(), at_hand.core.stats());
        at_hand.core.check().expect("sane");
        let kept = at_hand.core.with_keepsake(&heap, std::mem::take);
        drop(kept);
    }

    #[test]
    fn what_is_not_at_hand_leaves_everything_as_it_was() {
        let owner = owner();
        let [one, other] = [0, 1].map(|stream| binding(&owner, stream));
        let mut address = DeviceAddress(7);
        let never = |_: &mut Kept| panic!("nothing is done");
        let nothing = |heap: Option<(Handle, ())>| assert_eq!(heap, None);
        nothing(allocate(&owner, &one, 512, &mut address, never));
        let used = owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        owner.core.record_use(used.handle, StreamId(1)).expect("live");
        let before = (owner.core.digest(PoolId::DEFAULT), owner.core.stats());
        nothing(allocate(&owner, &other, 0, &mut address, never));
        nothing(allocate(&owner, &other, 1 << 41, &mut address, never));
        assert_eq!((owner.core.digest(PoolId::DEFAULT), owner.core.stats()), before);
        assert_eq!(address, DeviceAddress(7));
        assert_eq!(owner.core.free(used.handle), Ok(()));
    }

    /// An allocation of stream 0 that stream 1 uses.
    fn used(owner: &Owner) -> Allocation {
        let placed = owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        owner.core.record_use(placed.handle, StreamId(1)).expect("live");
        placed
    }

    fn calls(owner: &Owner) -> [u64; 2] {
        [Call::Record, Call::Wait].map(|call| owner.core.backend().calls().of(call))
    }

    #[test]
    fn memory_that_another_stream_used_is_freed_and_waited_for_at_hand() {
        let (direct, at_hand) = (owner(), owner());
        let heap = binding(&at_hand, 0);
        let (one, other) = (used(&direct), used(&at_hand));
        direct.core.free_in_row(one.handle).expect("live");
        let (freed, left) = free(&heap, other.handle, &at_hand);
        assert!(freed.is_ok() && left.is_none() && kept(&at_hand, &heap) == 1);
        assert_eq!(calls(&at_hand), [1, 0]);
        let again = direct.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        let (mut address, mut visits) = (DeviceAddress(0), 0);
        let also = |_: &mut Kept| visits += 1;
        let (handle, ()) = allocate(&at_hand, &heap, 512, &mut address, also).expect("a free block");
        assert_eq!((calls(&at_hand), visits), ([1, 1], 1));
        let placed = at_hand.core.allocation(handle).expect("live");
        assert_eq!((placed.placement, placed.address), (again.placement, address));
        assert_eq!(direct.core.digest(PoolId::DEFAULT), at_hand.core.digest(PoolId::DEFAULT));
        assert_eq!(direct.core.stats(), at_hand.core.stats());
        at_hand.core.check().expect("sane");
        drop(at_hand.core.with_keepsake(&heap, std::mem::take));
    }

    #[test]
    #[should_panic(expected = "an entrance of another allocator")]
    fn an_entrance_makes_no_driver_calls_for_another_allocator() {
        let [one, other] = [owner(), owner()];
        one.core.free(used(&one).handle).expect("live");
        let never = |_: &mut Kept| panic!("nothing is done");
        let _taken: Option<(Handle, ())> = allocate(&other, &binding(&one, 0), 512, &mut DeviceAddress(0), never);
    }

    #[test]
    fn memory_that_cannot_be_waited_for_is_not_taken() {
        let owner = owner();
        let core = &owner.core;
        let heap = binding(&owner, 0);
        core.free(used(&owner).handle).expect("live");
        let before = (core.digest(PoolId::DEFAULT), core.stats());
        core.backend().inject(Some(Call::Wait), FaultRule::Every { calls: 1 }, Fault::Refused);
        let mut address = DeviceAddress(7);
        let never = |_: &mut Kept| panic!("nothing is done");
        let taken: Option<(Handle, ())> = allocate(&owner, &heap, 512, &mut address, never);
        assert_eq!(taken, None);
        assert!(matches!(core.allocate_in(&heap, 512), Err(AllocateError::Fence { .. })));
        assert_eq!((core.digest(PoolId::DEFAULT), core.stats(), address), (before.0, before.1, DeviceAddress(7)));
        core.check().expect("sane");
    }

    #[test]
    fn a_wait_that_is_refused_once_is_made_by_the_longer_way_and_moves_nothing() {
        let (direct, refused) = (owner(), owner());
        refused.core.backend().inject(Some(Call::Wait), FaultRule::At { ordinal: 0 }, Fault::Refused);
        let placed = [&direct, &refused].map(|owner| {
            owner.core.free(used(owner).handle).expect("live");
            owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("a free block").placement
        });
        assert_eq!(placed[0], placed[1]);
        assert_eq!((calls(&direct), calls(&refused)), ([1, 1], [1, 2]));
        assert_eq!(direct.core.digest(PoolId::DEFAULT), refused.core.digest(PoolId::DEFAULT));
        refused.core.check().expect("sane");
    }

    #[test]
    fn a_free_that_is_refused_keeps_nothing_and_one_of_another_heap_is_made_there() {
        let owner = owner();
        let [one, other] = [0, 1].map(|stream| binding(&owner, stream));
        let handle = used(&owner).handle;
        let free_used = |heap: &Binding<Shared<Kept>>| {
            let mut freed = Ok(());
            let refused = |_: &Arc<Owner>, error| freed = Err(error);
            let left = heap.entrance().free_used(handle, Arc::clone(&owner), |owner| &owner.core, refused);
            assert!(left.is_some() && kept(&owner, heap) == 0, "nothing is kept");
            freed
        };
        owner.core.backend().inject(Some(Call::Record), FaultRule::At { ordinal: 0 }, Fault::Refused);
        assert!(matches!(free_used(&one), Err(FreeError::Fence(_))));
        assert_eq!(owner.core.stats().usage.all.allocations.current, 1);
        assert_eq!(free_used(&other), Ok(()));
        assert_eq!(owner.core.stats().usage.all.allocations.current, 0);
        assert!(matches!(free_used(&one), Err(FreeError::Handle(_))), "once");
    }

    #[test]
    fn an_entrance_that_outlives_its_allocator_serves_and_frees_nothing_of_it() {
        let (late, handle) = {
            let owner = owner();
            let placed = owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
            (binding(&owner, 0), placed.handle)
        };
        let others: Vec<_> = (0..4).map(|_| owner()).collect();
        for other in &others {
            // The lock may serve another allocator's heap by now, which does not know the handle either.
            other.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
            let (freed, left) = free(&late, handle, other);
            assert!(freed.is_err() && left.is_some(), "it is gone");
            let never = |_: &mut Kept| panic!("nothing is done");
            let taken: Option<(Handle, ())> = allocate(other, &late, 512, &mut DeviceAddress(0), never);
            assert_eq!(taken, None, "there is a free block, of somebody else");
        }
        others.iter().for_each(|other| assert_eq!(other.core.stats().usage.all.allocations.current, 1));
    }
}
