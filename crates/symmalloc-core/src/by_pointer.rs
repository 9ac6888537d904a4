//! By pointer: allocating and freeing for programs that keep the address and nothing else, as C and PyTorch do.
//!
//! ```text
//!  address ── address map ──► heap ── lock ── pointer table ──► slot ──► block
//!             no lock                 the heap's own, as are all lines that are written
//! ```
//! A free takes one lock, the heap's, and so does an allocation: threads with streams of their own meet nowhere. The pointer
//! table is part of the heap ([`PointerLookup`](crate::config::PointerLookup) turns it on); the address map is a guess that
//! the heap confirms, and whatever it cannot confirm goes through the directory of segments, the longer way.
//!
//! Placements and digests are the same as by handle. Both ways mix: an allocation by pointer can be freed by its handle.

use crate::allocator::Allocator;
use crate::backend::{Backend, DeviceAddress};
use crate::block_table::{BlockState, Slot};
use crate::bound::BoundHeap;
use crate::digest::{Mark, OpKind};
use crate::errors::{AllocateError, FreeError, HandleError, RecordUseError};
use crate::fencing::Fencing;
use crate::free_index::Unfit;
use crate::handle::{Allocation, Handle};
use crate::heap::{Heap, Live, note};
use crate::held::{HeapCell, HeapGuard};
use crate::ids::{PoolId, StreamId};
use crate::lock::Lock;
use crate::merging::Users;
use crate::plain::Way;
use crate::pointer_index::PointerIndex;
use crate::pointer_table::Place;
use crate::routes::Route;
use crate::size_rules::{Exact, Sizing};
use crate::tally::Tally;
use crate::units::{SEGMENT_BYTES_MAX, bytes};

impl<B: Backend, L: Lock> BoundHeap<'_, B, L> {
    /// As [`allocate`](Self::allocate), for programs that keep the address only: see [`Allocator::free_at`]. Zero bytes take
    /// no memory and cannot be told from others of their kind: their address is 0, and they cannot be freed.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    ///
    /// # Panics
    /// When lookup by pointer is not configured.
    #[inline]
    pub fn allocate_pointer(&self, size_bytes: u64) -> Result<DeviceAddress, AllocateError> {
        self.route().allocate_pointer(size_bytes).map_err(|error| *error)
    }
}

impl<B: Backend, L: Lock> Route<'_, B, L> {
    /// Allocates by pointer. The error is boxed, so that the answer fits into registers.
    #[inline(never)]
    fn allocate_pointer(&self, size_bytes: u64) -> Result<DeviceAddress, Box<AllocateError>> {
        if !(1..=SEGMENT_BYTES_MAX).contains(&size_bytes) {
            return self.allocate_pointer_rarely(size_bytes);
        }
        let mut heap = self.heap.lock();
        if heap.way != Way::PlainIndexed {
            return self.allocate_pointer_by_rule(heap, size_bytes);
        }
        let placed = match heap.allocate_at_once(size_bytes) {
            Ok(placed) => placed,
            Err(unfit) => return self.allocate_pointer_unfit(heap, size_bytes, unfit),
        };
        heap.note_pointer(&placed);
        Ok(self.count_pointer(heap, &placed, size_bytes))
    }

    /// Counts an allocation that the heap knows already.
    #[inline(always)]
    fn count_pointer(&self, heap: HeapGuard<'_, L>, placed: &Allocation, size_bytes: u64) -> DeviceAddress {
        let is_share_exceeded = heap.is_share_exceeded();
        drop(heap);
        self.allocator.tally(|tally| tally.allocate(placed.size_bytes, size_bytes));
        if is_share_exceeded {
            self.allocator.share_peak(self.heap);
        }
        placed.address
    }

    /// Allocates from a heap whose best fit others used, or that has none.
    #[inline(never)]
    fn allocate_pointer_unfit(
        &self,
        mut heap: HeapGuard<'_, L>,
        size_bytes: u64,
        unfit: Unfit,
    ) -> Result<DeviceAddress, Box<AllocateError>> {
        let Some(placed) = heap.allocate_behind_users(&self.allocator.around, size_bytes, unfit) else {
            let allocation = self.allocate_by::<Exact>(heap, size_bytes)?;
            self.allocator.note_peak(&allocation);
            return Ok(allocation.address);
        };
        heap.note_pointer(&placed);
        Ok(self.count_pointer(heap, &placed, size_bytes))
    }

    /// Allocates from a heap that is not plain.
    #[inline(never)]
    fn allocate_pointer_by_rule(
        &self,
        mut heap: HeapGuard<'_, L>,
        size_bytes: u64,
    ) -> Result<DeviceAddress, Box<AllocateError>> {
        let is_long_way = heap.is_recorded || heap.pointers.is_off();
        let placed = if is_long_way { None } else { heap.allocate_at_once_by_rule(self.stream, size_bytes) };
        let Some(placed) = placed else {
            drop(heap);
            return self.allocate_pointer_rarely(size_bytes);
        };
        Ok(self.count_pointer(heap, &placed, size_bytes))
    }

    /// Nothing, too much, or what a heap that is not plain has not at hand.
    #[cold]
    #[inline(never)]
    fn allocate_pointer_rarely(&self, size_bytes: u64) -> Result<DeviceAddress, Box<AllocateError>> {
        assert!(!self.heap.lock().pointers.is_off(), "allocation by pointer needs pointer_lookup:exact, or interior");
        let allocation = self.allocate(size_bytes)?;
        self.allocator.note_peak(&allocation);
        Ok(allocation.address)
    }
}

impl<B: Backend, L: Lock> Allocator<B, L> {
    /// As [`BoundHeap::allocate_pointer`], in the heap of a pool and a stream.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    ///
    /// # Panics
    /// When lookup by pointer is not configured.
    pub fn allocate_pointer(
        &self,
        pool: PoolId,
        stream: StreamId,
        size_bytes: u64,
    ) -> Result<DeviceAddress, AllocateError> {
        let heap = match self.route(pool, stream) {
            Some(heap) => heap,
            None => self.route_or_make(pool, stream)?.1,
        };
        Route { allocator: self, heap, pool, stream }.allocate_pointer(size_bytes).map_err(|error| *error)
    }

    /// Counts an allocation that was not made [by pointer](BoundHeap::allocate_pointer) for
    /// [`allocated_bytes_peak`](Self::allocated_bytes_peak).
    pub fn note_peak(&self, allocation: &Allocation) {
        if let Ok(heap) = self.heap_of(allocation.handle) {
            let is_share_exceeded = heap.lock().is_share_exceeded();
            if is_share_exceeded {
                self.share_peak(heap);
            }
        }
    }

    /// As [`free`](Self::free), by the first address of the allocation. Needs lookup by pointer,
    /// [`PointerLookup::Exact`](crate::config::PointerLookup::Exact) or
    /// [`Interior`](crate::config::PointerLookup::Interior); the former is faster.
    ///
    /// # Errors
    /// When no live allocation starts there, or as [`free`](Self::free).
    #[inline]
    pub fn free_at(&self, address: DeviceAddress) -> Result<(), FreeError> {
        match self.free_at_once(address) {
            Ok(()) => Ok(()),
            Err(None) => self.free_at_by_all_means(address),
            Err(Some(error)) => Err(*error),
        }
    }

    /// Frees an allocation of the heap where the address is likely to be. No error says why if it is not there. The error is
    /// boxed, so that the answer fits into registers.
    #[inline(never)]
    fn free_at_once(&self, address: DeviceAddress) -> Result<(), Option<Box<FreeError>>> {
        let Some(heap) = self.likely_heap(address) else { return Err(None) };
        let mut heap = heap.lock();
        let tally = |allocated, requested| self.tally(|tally| tally.free(allocated, requested));
        match heap.free_pointer_at_once(address, tally) {
            Outcome::Freed => Ok(()),
            Outcome::Used(live, place) => self.free_used_at(heap, live, place).map_err(Some),
            Outcome::Rare => Err(None),
        }
    }

    /// Frees an allocation of a plain heap that other streams used.
    #[inline(never)]
    fn free_used_at(&self, mut heap: HeapGuard<'_, L>, live: Live, place: Place) -> Result<(), Box<FreeError>> {
        let tally = |allocated, requested| self.tally(|tally| tally.free(allocated, requested));
        heap.free_used(&self.around, live, Fencing::Apart, tally).map_err(FreeError::from)?;
        heap.strike_place(place);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn free_at_by_all_means(&self, address: DeviceAddress) -> Result<(), FreeError> {
        let handle = self.handle_of_pointer(address)?;
        self.free(handle)
    }

    /// As [`record_use`](Self::record_use), by the first address of the allocation.
    ///
    /// # Errors
    /// When no live allocation starts there, or as [`record_use`](Self::record_use).
    pub fn record_use_at(&self, address: DeviceAddress, stream: StreamId) -> Result<(), RecordUseError> {
        if let Some(heap) = self.likely_heap(address) {
            self.known_stream(stream)?;
            let mut heap = heap.lock();
            if !heap.is_recorded
                && let Some(slot) = heap.slot_at(address)
            {
                let handle = heap.handle_in(slot)?;
                return Ok(heap.record_use(handle, stream)?);
            }
        }
        let handle = self.handle_of_pointer(address)?;
        self.record_use(handle, stream)
    }

    /// The handle of the live allocation that starts at a device address. As [`handle_at`](Self::handle_at), which with
    /// [`PointerLookup::Interior`](crate::config::PointerLookup::Interior) finds what an address lies in as well.
    ///
    /// # Errors
    /// When none does, or when lookup by pointer is not configured.
    pub fn handle_of_pointer(&self, address: DeviceAddress) -> Result<Handle, HandleError> {
        let handle = self.handle_at(address)?;
        let starts_there = self.allocation(handle).is_ok_and(|allocation| allocation.address == address);
        if starts_there { Ok(handle) } else { Err(HandleError::UnknownAddress { address }) }
    }

    /// The bytes that a live allocation was asked for with.
    ///
    /// # Errors
    /// When the handle is not live here, or names an allocation of zero bytes.
    pub fn requested_bytes(&self, handle: Handle) -> Result<u64, HandleError> {
        Ok(self.heap_of(handle)?.lock().live(handle)?.requested)
    }

    /// The heap that an address was found in before.
    #[inline(always)]
    pub(crate) fn likely_heap(&self, address: DeviceAddress) -> Option<&HeapCell<L>> {
        self.heaps.get(self.address_map.find(address)?.index()).map(|heap| &**heap)
    }
}

/// What became of a free by pointer.
enum Outcome {
    Freed,
    /// Other streams used the block of a plain heap, which has to be fenced first.
    Used(Live, Place),
    /// The allocation is not here, or freeing it takes the longer way.
    Rare,
}

impl Heap {
    /// Puts the address of an allocation into the pointer table.
    #[inline(always)]
    fn note_pointer(&mut self, placed: &Allocation) {
        let table = &self.table;
        if let PointerIndex::Exact(pointers) = &mut self.pointers {
            pointers.insert(placed.address, placed.handle.slot(), |slot| table.address(slot));
        }
    }

    /// Frees the live allocation that starts at an address, if nobody else used its block and no book but the journal has to
    /// be kept.
    #[inline(always)]
    fn free_pointer_at_once(&mut self, address: DeviceAddress, tally: impl FnOnce(u64, u64)) -> Outcome {
        let PointerIndex::Exact(pointers) = &self.pointers else { return Outcome::Rare };
        let table = &self.table;
        let Some((place, slot)) = pointers.find(address, |slot| table.address(slot) == address) else {
            return Outcome::Rare;
        };
        let block = table.block(slot);
        let BlockState::Allocated { stream, requested, .. } = block.state else { return Outcome::Rare };
        let (live, is_used) = (Live { slot, stream, requested }, !block.fences.is_empty());
        match self.way {
            Way::PlainIndexed if is_used => Outcome::Used(live, place),
            Way::PlainIndexed => {
                self.strike_place(place);
                let home = Exact::home_of(&self.rules, 0);
                self.give_back(live, home, Users::Owner, self.own.frees, 0, tally);
                Outcome::Freed
            }
            _ if is_used || self.is_recorded || self.has_rare_books() => Outcome::Rare,
            _ => {
                self.free_pointer_by_rule(live, tally);
                Outcome::Freed
            }
        }
    }

    /// Takes an address that was found in the pointer table out of it.
    #[inline(always)]
    fn strike_place(&mut self, place: Place) {
        if let PointerIndex::Exact(pointers) = &mut self.pointers {
            pointers.remove(place);
        }
    }

    /// Frees a live allocation of a heap that is not plain, and keeps no book but the journal.
    #[inline(never)]
    fn free_pointer_by_rule(&mut self, live: Live, tally: impl FnOnce(u64, u64)) {
        self.strike_pointer(live.slot);
        let (home, frees) = (self.table.block(live.slot).home, OpKind::new(Mark::Free, live.stream));
        let placed = self.give_back(live, home, Users::Owner, frees, 0, tally);
        note(&mut self.journal, frees.with(0), placed, self.digest);
    }

    /// Takes the address of a live allocation out of the index.
    #[inline(always)]
    pub(crate) fn strike_pointer(&mut self, slot: Slot) {
        if !self.pointers.is_off() {
            self.pointers.remove(self.address(slot), slot);
        }
    }

    /// The slot of the live allocation that starts at an address, or with interior lookup holds it.
    pub(crate) fn slot_around(&self, address: DeviceAddress) -> Option<Slot> {
        let slot = self.pointers.at_or_before(address, |slot| self.address(slot) == address)?;
        let end = self.address(slot).0 + bytes(self.table.block(slot).size);
        (address.0 < end).then_some(slot)
    }

    /// The slot of the live allocation that starts at an address.
    #[inline(always)]
    fn slot_at(&self, address: DeviceAddress) -> Option<Slot> {
        let starts_there = |slot| self.address(slot) == address;
        self.pointers.at_or_before(address, starts_there).filter(|slot| starts_there(*slot))
    }

    /// The handle of the allocation in a slot.
    #[inline]
    pub(crate) fn handle_in(&self, slot: Slot) -> Result<Handle, HandleError> {
        match self.table.block(slot).state {
            BlockState::Allocated { tag, .. } => Ok(Handle::new(self.id, slot, tag)),
            _ => Err(HandleError::UnknownAddress { address: self.address(slot) }),
        }
    }
}
