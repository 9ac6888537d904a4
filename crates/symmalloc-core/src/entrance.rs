//! Entrances: the shortest way to free, for whoever keeps something [beside the heap](crate::held).
//!
//! Nearly every free of a program in a steady state is nothing but to free a block. An [`Entrance`] serves those and no
//! others. It borrows nothing: what keeps the allocator alive may itself go into the keepsake, under the same lock.

use crate::allocator::Allocator;
use crate::backend::Backend;
use crate::bound::Binding;
use crate::errors::FreeError;
use crate::fencing::Fencing;
use crate::handle::Handle;
use crate::held::{HeapCell, Keepsake};
use crate::ids::HeapId;
use crate::lock::{LockCell, Shared};

/// The heap of a [`Binding`], to free what lies in it. Good for as long as the allocator lives; entered later, it frees
/// nothing: it may lead to another allocator's heap, which knows none of the handles. See [`Binding::entrance`].
#[derive(Debug)]
pub struct Entrance<K: Keepsake> {
    heap: &'static HeapCell<Shared<K>>,
    id: HeapId,
}

impl<K: Keepsake> Clone for Entrance<K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K: Keepsake> Copy for Entrance<K> {}

impl<K: Keepsake> Binding<Shared<K>> {
    /// The binding's heap, without the allocator.
    #[inline]
    pub fn entrance(&self) -> Entrance<K> {
        Entrance { heap: self.heap, id: self.id }
    }
}

impl<K: Keepsake> Entrance<K> {
    /// Frees an allocation of the heap if nothing but its block is to be freed, and lets `keep` have `held` under the same
    /// lock. Whether it did, and what `keep` did not keep; if it did not, nothing has changed, and
    /// [`free`](crate::Allocator::free) does what it takes, or says why not.
    #[inline]
    pub fn free_at_hand<T>(
        self,
        handle: Handle,
        held: T,
        keep: impl FnOnce(&mut K, T) -> Option<T>,
    ) -> (bool, Option<T>) {
        if handle.heap() != self.id {
            return (false, Some(held));
        }
        let mut guarded = self.heap.lock();
        if !guarded.free_at_hand(handle, |_, _| {}) {
            return (false, Some(held));
        }
        (true, keep(&mut guarded.keepsake, held))
    }

    /// Frees an allocation as [`Allocator::free_in_row`] does, and lets `keep` have `held` under the same lock. What keeps the
    /// allocator alive is `held`, and `allocator` finds it there. Returns what `keep` did not keep, with the outcome of the free:
    /// all of it where the free was refused, was recorded, or was one of another heap.
    pub fn free_in_row<B: Backend, T>(
        self,
        handle: Handle,
        held: T,
        allocator: impl FnOnce(&T) -> &Allocator<B, Shared<K>>,
        keep: impl FnOnce(&mut K, T) -> Option<T>,
    ) -> Option<(T, Result<(), FreeError>)> {
        let mut guarded = self.heap.lock();
        let allocator = allocator(&held);
        if handle.heap() != self.id || guarded.is_recorded {
            drop(guarded);
            let freed = allocator.free_in_row(handle);
            return Some((held, freed));
        }
        match allocator.free_by_all_means(&mut guarded, handle, Fencing::InRow) {
            Ok(()) => keep(&mut guarded.keepsake, held).map(|left| (left, Ok(()))),
            Err(error) => Some((held, Err(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DeviceAddress;
    use crate::config::Config;
    use crate::errors::AllocateError;
    use crate::sim::{Call, Fault, FaultRule, SimBackend};
    use crate::{Allocation, PoolId, SharedAllocator, StreamId};

    fn allocator() -> SharedAllocator<SimBackend> {
        let allocator = SharedAllocator::new(SimBackend::builder().seed(1).build(), Config::default()).expect("valid");
        for _ in 0..2 {
            allocator.register_stream().expect("few streams");
        }
        allocator
    }

    fn binding(allocator: &SharedAllocator<SimBackend>, stream: u16) -> Binding<Shared> {
        allocator.binding(PoolId::DEFAULT, StreamId(stream)).expect("both exist")
    }

    #[test]
    fn what_is_done_at_hand_is_what_the_allocator_does() {
        let (direct, at_hand) = (allocator(), allocator());
        let heap = binding(&at_hand, 1);
        let sizes = [1, 4096, 3 << 20, 700, 64 << 20, 0];
        for size in sizes.into_iter().chain(sizes) {
            let one = direct.allocate(PoolId::DEFAULT, StreamId(1), size).expect("memory");
            let (mut address, mut visits) = (DeviceAddress(0), 0);
            let other = at_hand.allocate_at_hand_in(&heap, size, &mut address, |()| visits += 1);
            let other = other.map(|(handle, ())| handle);
            assert_eq!(visits, u32::from(other.is_some()));
            let other = other.unwrap_or_else(|| {
                let placed = at_hand.allocate(PoolId::DEFAULT, StreamId(1), size).expect("memory");
                address = placed.address;
                placed.handle
            });
            if size > 0 {
                let placed = at_hand.allocation(other).expect("live");
                let expected = (one.placement, one.size_bytes, address);
                assert_eq!(expected, (placed.placement, placed.size_bytes, placed.address));
            }
            if size > 1000 {
                direct.free(one.handle).expect("live");
                assert_eq!(
                    heap.entrance().free_at_hand(other, 7, |(), held| Some(held + 1)),
                    (true, Some(8)),
                    "nobody else used it"
                );
            }
        }
        assert_eq!(direct.digest(PoolId::DEFAULT), at_hand.digest(PoolId::DEFAULT));
        assert_eq!(direct.stats(), at_hand.stats());
        at_hand.check().expect("sane");
    }

    #[test]
    fn what_is_not_at_hand_leaves_everything_as_it_was() {
        let allocator = allocator();
        let [one, other] = [0, 1].map(|stream| binding(&allocator, stream));
        let mut address = DeviceAddress(7);
        let never = |(): &mut ()| panic!("nothing is done");
        let nor_kept = |(): &mut (), _: u8| panic!("nothing is done");
        assert_eq!(allocator.allocate_at_hand_in(&one, 512, &mut address, never), None, "no memory yet");
        let used = allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        allocator.record_use(used.handle, StreamId(1)).expect("live");
        let before = (allocator.digest(PoolId::DEFAULT), allocator.stats());
        assert_eq!(one.entrance().free_at_hand(used.handle, 7, nor_kept), (false, Some(7)), "another stream uses it");
        assert_eq!(other.entrance().free_at_hand(used.handle, 7, nor_kept), (false, Some(7)), "another heap's");
        assert_eq!(allocator.allocate_at_hand_in(&other, 0, &mut address, never), None, "no bytes");
        assert_eq!(allocator.allocate_at_hand_in(&other, 1 << 41, &mut address, never), None, "larger than a segment");
        assert_eq!((allocator.digest(PoolId::DEFAULT), allocator.stats()), before);
        assert_eq!(address, DeviceAddress(7));
        assert_eq!(allocator.free(used.handle), Ok(()));
    }

    /// An allocation of stream 0 that stream 1 uses.
    fn used(allocator: &SharedAllocator<SimBackend>) -> Allocation {
        let placed = allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        allocator.record_use(placed.handle, StreamId(1)).expect("live");
        placed
    }

    fn calls(allocator: &SharedAllocator<SimBackend>) -> [u64; 2] {
        [Call::Record, Call::Wait].map(|call| allocator.backend().calls().of(call))
    }

    #[test]
    fn memory_that_another_stream_used_is_freed_and_waited_for_at_hand() {
        let (direct, at_hand) = (allocator(), allocator());
        let heap = binding(&at_hand, 0);
        let (one, other) = (used(&direct), used(&at_hand));
        direct.free_in_row(one.handle).expect("live");
        let mut kept = None;
        let keep = |(): &mut (), held: &SharedAllocator<SimBackend>| {
            kept = Some(held.owner);
            None
        };
        let left = heap.entrance().free_in_row(other.handle, &at_hand, |held| held, keep);
        assert!(left.is_none() && kept == Some(at_hand.owner));
        assert_eq!(calls(&at_hand), [1, 0]);
        let again = direct.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        let (mut address, mut visits) = (DeviceAddress(0), 0);
        let (handle, ()) =
            at_hand.allocate_at_hand_in(&heap, 512, &mut address, |()| visits += 1).expect("a free block");
        assert_eq!((calls(&at_hand), visits), ([1, 1], 1));
        let placed = at_hand.allocation(handle).expect("live");
        assert_eq!((placed.placement, placed.address), (again.placement, address));
        assert_eq!(direct.digest(PoolId::DEFAULT), at_hand.digest(PoolId::DEFAULT));
        assert_eq!(direct.stats(), at_hand.stats());
        at_hand.check().expect("sane");
    }

    #[test]
    fn memory_that_cannot_be_waited_for_is_not_taken() {
        let allocator = allocator();
        let heap = binding(&allocator, 0);
        allocator.free(used(&allocator).handle).expect("live");
        let before = (allocator.digest(PoolId::DEFAULT), allocator.stats());
        allocator.backend().inject(Some(Call::Wait), FaultRule::Every { calls: 1 }, Fault::Refused);
        let mut address = DeviceAddress(7);
        let never = |(): &mut ()| panic!("nothing is done");
        assert_eq!(allocator.allocate_at_hand_in(&heap, 512, &mut address, never), None);
        assert!(matches!(allocator.allocate_in(&heap, 512), Err(AllocateError::Fence { .. })));
        assert_eq!(
            (allocator.digest(PoolId::DEFAULT), allocator.stats(), address),
            (before.0, before.1, DeviceAddress(7))
        );
        allocator.check().expect("sane");
    }

    #[test]
    fn a_free_that_is_refused_keeps_nothing_and_one_of_another_heap_is_made_there() {
        let allocator = allocator();
        let [one, other] = [0, 1].map(|stream| binding(&allocator, stream));
        let handle = used(&allocator).handle;
        let free = |heap: &Binding<Shared>| {
            let nor_kept = |(): &mut (), _: &SharedAllocator<SimBackend>| panic!("nothing is kept");
            heap.entrance().free_in_row(handle, &allocator, |held| held, nor_kept).expect("nothing is kept").1
        };
        allocator.backend().inject(Some(Call::Record), FaultRule::At { ordinal: 0 }, Fault::Refused);
        assert!(matches!(free(&one), Err(FreeError::Fence(_))));
        assert_eq!(allocator.stats().usage.all.allocations.current, 1);
        assert_eq!(free(&other), Ok(()));
        assert_eq!(allocator.stats().usage.all.allocations.current, 0);
        assert!(matches!(free(&one), Err(FreeError::Handle(_))), "once");
    }

    #[test]
    fn an_entrance_that_outlives_its_allocator_serves_and_frees_nothing_of_it() {
        let (late, handle) = {
            let allocator = allocator();
            let placed = allocator.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
            (binding(&allocator, 0).entrance(), placed.handle)
        };
        let never = |(): &mut (), _: u8| panic!("it is gone");
        assert_eq!(late.free_at_hand(handle, 7, never), (false, Some(7)));
        // The lock may serve another allocator's heap by now, which does not know the handle either.
        let others: Vec<_> = (0..4).map(|_| allocator()).collect();
        for other in &others {
            other.allocate(PoolId::DEFAULT, StreamId(0), 512).expect("memory");
        }
        assert_eq!(late.free_at_hand(handle, 7, never), (false, Some(7)));
        others.iter().for_each(|other| assert_eq!(other.stats().usage.all.allocations.current, 1));
    }
}
