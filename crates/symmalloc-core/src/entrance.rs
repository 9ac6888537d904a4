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
use crate::heap::Freed;
use crate::held::{HeapCell, HeapGuard, Held, Keepsake as _};
use crate::ids::HeapId;
use crate::lock::Lock;
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
    /// Frees an allocation of the heap if nothing but its block is to be freed, and keeps `held` [beside it](crate::held).
    /// Whether it did, and `held` if it was not kept; if it did not, nothing has changed, and
    /// [`free`](crate::Allocator::free) does what it takes, or says why not.
    ///
    /// If another thread is inside, or has the heap's lock to itself, it leaves the free and `held` for who comes next, where
    /// that is [allowed](crate::Allocator::open_mail), and waits for nobody. No use by another stream may have been recorded
    /// with [`record_use_by_owner`](crate::Allocator::record_use_by_owner) then.
    #[inline]
    pub fn free_at_hand(&self, handle: Handle, held: Held<L>) -> (bool, Option<Held<L>>) {
        if handle.heap() != self.id {
            return (false, Some(held));
        }
        match self.heap.try_lock() {
            Some(guarded) => free_inside::<L>(guarded, handle, held),
            None => free_past_others(&self.heap, handle, held),
        }
    }

    /// Frees an allocation as [`Allocator::free_in_row`] does, and keeps `held` beside the heap under the same lock. What keeps
    /// the allocator alive is `held`, and `allocator` finds it there. Returns what was not kept, with the outcome of the free:
    /// all of it where the free was refused, was recorded, or was one of another heap.
    pub fn free_in_row<B: Backend>(
        self,
        handle: Handle,
        held: Held<L>,
        allocator: impl FnOnce(&Held<L>) -> &Allocator<B, L>,
    ) -> Option<(Held<L>, Result<(), FreeError>)> {
        let mut guarded = self.heap.lock();
        let allocator = allocator(&held);
        if handle.heap() != self.id || guarded.is_recorded {
            drop(guarded);
            let freed = allocator.free_in_row(handle);
            return Some((held, freed));
        }
        match allocator.free_by_all_means(&mut guarded, handle, Fencing::InRow) {
            Ok(()) => guarded.keepsake.keep(held).map(|left| (left, Ok(()))),
            Err(error) => Some((held, Err(error))),
        }
    }
}

/// Somebody else is inside, or may come without asking.
#[cold]
#[inline(never)]
fn free_past_others<L: Lock>(heap: &HeapCell<L>, handle: Handle, held: Held<L>) -> (bool, Option<Held<L>>) {
    match heap.mail.leave(handle, held) {
        Ok(()) => (true, None),
        Err(held) => free_inside::<L>(heap.lock(), handle, held),
    }
}

#[inline(always)]
fn free_inside<L: Lock>(mut guarded: HeapGuard<'_, L>, handle: Handle, held: Held<L>) -> (bool, Option<Held<L>>) {
    // A panic in here is a failed assertion about the heap. What comes with the free is not dropped then, which spares the
    // way a copy of it in memory.
    let held = ManuallyDrop::new(held);
    let held = || ManuallyDrop::into_inner(held);
    match guarded.free_at_hand(handle, |_, _| {}) {
        Freed::Now => (true, guarded.keepsake.keep(held())),
        Freed::Used(..) | Freed::NotYet => (false, Some(held())),
    }
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
                let (is_freed, left) = heap.entrance().free_at_hand(other, Arc::clone(&at_hand));
                assert!(is_freed, "nobody else used it");
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
        for (heap, why) in [(&one, "another stream uses it"), (&other, "another heap's")] {
            let (is_freed, left) = heap.entrance().free_at_hand(used.handle, Arc::clone(&owner));
            assert!(!is_freed && left.is_some(), "{why}");
            assert_eq!(kept(&owner, heap), 0);
        }
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
        let left = heap.entrance().free_in_row(other.handle, Arc::clone(&at_hand), |owner| &owner.core);
        assert!(left.is_none() && kept(&at_hand, &heap) == 1);
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
    fn a_free_that_is_refused_keeps_nothing_and_one_of_another_heap_is_made_there() {
        let owner = owner();
        let [one, other] = [0, 1].map(|stream| binding(&owner, stream));
        let handle = used(&owner).handle;
        let free = |heap: &Binding<Shared<Kept>>| {
            let left = heap.entrance().free_in_row(handle, Arc::clone(&owner), |owner| &owner.core);
            assert_eq!(kept(&owner, heap), 0);
            left.expect("nothing is kept").1
        };
        owner.core.backend().inject(Some(Call::Record), FaultRule::At { ordinal: 0 }, Fault::Refused);
        assert!(matches!(free(&one), Err(FreeError::Fence(_))));
        assert_eq!(owner.core.stats().usage.all.allocations.current, 1);
        assert_eq!(free(&other), Ok(()));
        assert_eq!(owner.core.stats().usage.all.allocations.current, 0);
        assert!(matches!(free(&one), Err(FreeError::Handle(_))), "once");
    }

    #[test]
    fn an_entrance_that_outlives_its_allocator_serves_and_frees_nothing_of_it() {
        let (late, handle) = {
            let owner = owner();
            let placed = owner.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
            (binding(&owner, 0).entrance(), placed.handle)
        };
        let others: Vec<_> = (0..4).map(|_| owner()).collect();
        for other in &others {
            // The lock may serve another allocator's heap by now, which does not know the handle either.
            other.core.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
            let (is_freed, left) = late.free_at_hand(handle, Arc::clone(other));
            assert!(!is_freed && left.is_some(), "it is gone");
        }
        others.iter().for_each(|other| assert_eq!(other.core.stats().usage.all.allocations.current, 1));
    }
}
