//! Entrances: the shortest way to free, for whoever keeps something [beside the heap](crate::held).
//!
//! Nearly every free of a program in a steady state is nothing but to free a block. An [`Entrance`] serves those without the
//! allocator, and those of memory that other streams used with it. It borrows nothing: what keeps the allocator alive may
//! itself go into the keepsake, under the same lock.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::bound::Binding;
use crate::errors::FreeError;
use crate::fencing::Fencing;
use crate::handle::Handle;
use crate::heap::{Freed, Live};
use crate::held::{HeapCell, HeapGuard, Held, Keepsake as _};
use crate::ids::HeapId;
use crate::lock::Lock;
use crate::tally::Tally;
use std::mem::ManuallyDrop;

/// The heap of a [`Binding`], to free what lies in it. Good for as long as the allocator lives; entered later, it frees
/// nothing: it may lead to another allocator's heap, which knows none of the handles. See [`Binding::entrance`].
#[derive(Debug)]
pub struct Entrance<L: Lock> {
    heap: L::HeapRef,
    id: HeapId,
}

impl<L: Lock> Binding<L> {
    /// The binding's heap, without the allocator.
    #[inline]
    pub fn entrance(&self) -> Entrance<L> {
        Entrance { heap: self.heap.clone(), id: self.id }
    }
}

impl<L: Lock> Entrance<L> {
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
        match self.heap.try_lock() {
            Some(guarded) => free_inside(guarded, handle, held, allocator, refused),
            None => free_past_others(&self.heap, handle, held, allocator, refused),
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
        free_inside(self.heap.lock(), handle, held, allocator, refused)
    }
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
    free_inside(heap.lock(), handle, held, allocator, refused)
}

#[inline(always)]
fn free_inside<B: Backend, L: Lock>(
    mut guarded: HeapGuard<'_, L>,
    handle: Handle,
    held: Held<L>,
    allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    refused: impl FnOnce(&Held<L>, FreeError),
) -> Option<Held<L>> {
    // A panic in here is a failed assertion about the heap. What comes with the free is not dropped then, which spares the
    // way a copy of it in memory.
    let held = ManuallyDrop::new(held);
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
    let allocator = allocator(&held);
    let tally = |allocated, requested| allocator.tally(|tally| tally.free(allocated, requested));
    let freed = guarded.free_used(&allocator.around, live, Fencing::InRow, tally).map_err(FreeError::from);
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
    use crate::held::{Heap, Keepsake, Vacant};
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
            let other = at_hand.core.allocate_at_hand_in(&heap, size, &mut address, |_| visits += 1);
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
        nothing(owner.core.allocate_at_hand_in(&one, 512, &mut address, never));
        let used = owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        owner.core.record_use(used.handle, StreamId(1)).expect("live");
        let before = (owner.core.digest(PoolId::DEFAULT), owner.core.stats());
        nothing(owner.core.allocate_at_hand_in(&other, 0, &mut address, never));
        nothing(owner.core.allocate_at_hand_in(&other, 1 << 41, &mut address, never));
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
        let (handle, ()) = at_hand
            .core
            .allocate_at_hand_in(&heap, 512, &mut address, |_: &mut Kept| visits += 1)
            .expect("a free block");
        assert_eq!((calls(&at_hand), visits), ([1, 1], 1));
        let placed = at_hand.core.allocation(handle).expect("live");
        assert_eq!((placed.placement, placed.address), (again.placement, address));
        assert_eq!(direct.core.digest(PoolId::DEFAULT), at_hand.core.digest(PoolId::DEFAULT));
        assert_eq!(direct.core.stats(), at_hand.core.stats());
        at_hand.core.check().expect("sane");
        drop(at_hand.core.with_keepsake(&heap, std::mem::take));
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
        let taken: Option<(Handle, ())> = core.allocate_at_hand_in(&heap, 512, &mut address, never);
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
        }
        others.iter().for_each(|other| assert_eq!(other.core.stats().usage.all.allocations.current, 1));
    }
}
