//! The device of a rerun. It grants every request, and records which memory is mapped and unmapped for each heap.

use std::cell::RefCell;
use std::collections::BTreeMap;

use symmalloc_core::backend::{Backend, BackendError, DeviceAddress, Event, Image, Part, Range, RangeOffset, Reason};
use symmalloc_core::base::{Base, BaseError, Occupant, SLOT_BYTES};
use symmalloc_core::ids::{PoolId, StreamGroup, StreamId};
use symmalloc_core::units::{GIB, MIB};

use symmalloc_core::ids::HeapId;

const GRANULARITY_BYTES: u64 = 2 * MIB;
/// Address of the first range.
const FIRST_ADDRESS: u64 = 1024 * GIB;
/// An address above every base.
const ABOVE_BASES: u64 = 1 << 48;
/// Gap between two ranges. It keeps viewers from merging adjacent ranges.
const GAP_BYTES: u64 = GRANULARITY_BYTES;

/// Memory mapped or unmapped on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryChange {
    /// `true` if the memory was mapped, `false` if it was unmapped.
    pub is_mapped: bool,
    /// The heap that the memory belongs to.
    pub heap: HeapId,
    /// The stream for which the segment was obtained.
    pub stream: StreamId,
    /// `true` for a part of an expandable segment, `false` for a whole segment.
    pub is_expandable: bool,
    /// Address of the first byte.
    pub address: DeviceAddress,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// Owner and purpose of a reserved range.
#[derive(Clone, Copy, Debug)]
struct Reserved {
    heap: HeapId,
    stream: StreamId,
    is_expandable: bool,
    /// `true` for a stitched range, which maps the memory of other ranges and has none of its own.
    is_stitched: bool,
}

#[derive(Debug)]
struct DeviceState {
    next_address: u64,
    /// The owner of ranges that are reserved during the current op; `None` if the op does not determine it.
    current: Option<Reserved>,
    /// Base addresses of ranges that were reserved while the heap was unknown.
    ownerless: Vec<DeviceAddress>,
    /// Reserved ranges by base.
    ranges: BTreeMap<DeviceAddress, Reserved>,
    /// Bases so far, each with its pool until the addresses are released. No range overlaps them.
    spaces: Vec<(Base, Option<PoolId>)>,
    changes: Vec<MemoryChange>,
    /// Bytes that are mapped now, by pool. As long as the pool is unknown, memory is counted for the default pool.
    mapped: BTreeMap<PoolId, u64>,
    /// The sum of `mapped`.
    mapped_bytes: u64,
}

impl DeviceState {
    fn note_range(&mut self, base: DeviceAddress) {
        let reserved = self.current.unwrap_or_else(|| {
            self.ownerless.push(base);
            let heap = HeapId { pool: PoolId::DEFAULT, group: StreamGroup::All };
            Reserved { heap, stream: StreamId(0), is_expandable: false, is_stitched: false }
        });
        self.ranges.insert(base, reserved);
    }
}

/// The simulated device. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct NotingDevice(RefCell<DeviceState>);

impl NotingDevice {
    pub(super) fn new() -> Self {
        let ranges = BTreeMap::new();
        NotingDevice(RefCell::new(DeviceState {
            next_address: FIRST_ADDRESS,
            current: None,
            ownerless: Vec::new(),
            ranges,
            spaces: Vec::new(),
            changes: Vec::new(),
            mapped: BTreeMap::new(),
            mapped_bytes: 0,
        }))
    }

    /// Returns the bytes that are mapped now.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.0.borrow().mapped_bytes
    }

    /// Returns the bytes of a pool that are mapped now.
    pub(super) fn mapped_bytes_of(&self, pool: PoolId) -> u64 {
        self.0.borrow().mapped.get(&pool).copied().unwrap_or(0)
    }

    /// Starts an op that may obtain memory for a heap and a stream.
    pub(super) fn begin(&self, heap: Option<(HeapId, StreamId)>, is_expandable: bool) {
        self.0.borrow_mut().current =
            heap.map(|(heap, stream)| Reserved { heap, stream, is_expandable, is_stitched: false });
    }

    /// Returns `true` if a range was reserved while the heap was unknown. The caller must then call
    /// [`assign`](Self::assign).
    pub(super) fn has_ownerless(&self) -> bool {
        !self.0.borrow().ownerless.is_empty()
    }

    /// Assigns owners to the ranges that were reserved while the heap was unknown, and to the changes of their memory. There are such
    /// ranges because plans reserve memory outside of allocations.
    pub(super) fn assign(&self, owner_at: impl Fn(DeviceAddress) -> (HeapId, StreamId, bool)) {
        let mut state = self.0.borrow_mut();
        let DeviceState { ownerless, ranges, changes, mapped, .. } = &mut *state;
        for base in ownerless.drain(..) {
            let (heap, stream, is_expandable) = owner_at(base);
            let end = ranges.range(base..).nth(1).map_or(DeviceAddress(u64::MAX), |(next, _)| *next);
            if let Some(range) = ranges.get_mut(&base) {
                *range = Reserved { heap, stream, is_expandable, ..*range };
            }
            for change in changes.iter_mut().filter(|change| (base..end).contains(&change.address)) {
                count(mapped, &MemoryChange { is_mapped: !change.is_mapped, ..*change });
                *change = MemoryChange { heap, stream, is_expandable, ..*change };
                count(mapped, change);
            }
        }
    }

    /// Ends the op and returns its changes.
    pub(super) fn end(&self) -> Vec<MemoryChange> {
        std::mem::take(&mut self.0.borrow_mut().changes)
    }

    fn note(&self, is_mapped: bool, range: Range, offset_bytes: u64, size_bytes: u64) {
        let mut state = self.0.borrow_mut();
        let Reserved { heap, stream, is_expandable, is_stitched } = state.ranges[&range.base];
        if is_stitched {
            return;
        }
        let address = DeviceAddress(range.base.0 + offset_bytes);
        let change = MemoryChange { is_mapped, heap, stream, is_expandable, address, size_bytes };
        count(&mut state.mapped, &change);
        let sign = if is_mapped { u64::wrapping_add } else { u64::wrapping_sub };
        state.mapped_bytes = sign(state.mapped_bytes, size_bytes);
        state.changes.push(change);
    }
}

/// Counts a change for its pool. To move a change to a different pool, the opposite change is counted first, so sums may be negative in
/// between.
fn count(mapped: &mut BTreeMap<PoolId, u64>, change: &MemoryChange) {
    let bytes = mapped.entry(change.heap.pool).or_default();
    let sign = if change.is_mapped { u64::wrapping_add } else { u64::wrapping_sub };
    *bytes = sign(*bytes, change.size_bytes);
}

impl Backend for NotingDevice {
    fn granularity_bytes(&self) -> u64 {
        GRANULARITY_BYTES
    }

    fn reserve(&self, size_bytes: u64) -> Result<Range, BackendError> {
        let mut state = self.0.borrow_mut();
        let base = state.next_address;
        let is_taken = |space: u64| base < space + SLOT_BYTES && space < base + size_bytes;
        let base = if state.spaces.iter().any(|(space, _)| is_taken(space.address())) { ABOVE_BASES } else { base };
        let next = base.checked_add(size_bytes).and_then(|end| end.checked_add(GAP_BYTES));
        let full = || BackendError::new("reserve", 2, Reason::OutOfMemory);
        state.next_address = next.and_then(|next| next.checked_next_multiple_of(GRANULARITY_BYTES)).ok_or_else(full)?;
        state.note_range(DeviceAddress(base));
        Ok(Range { base: DeviceAddress(base), size_bytes })
    }

    fn reserve_at(&self, base: Base, pool: PoolId) -> Result<Range, BaseError> {
        let mut state = self.0.borrow_mut();
        let live = state.spaces.iter().filter_map(|(other, pool)| pool.map(|pool| (*other, pool)));
        if let Some((other, pool)) = live.clone().find(|(other, _)| other.overlaps(base)) {
            let occupant = Occupant::Pool { pool, device: 0, base: other };
            return Err(BaseError::Occupied {
                base,
                occupant,
                free_slot: Base::free_slot(&live.map(|(other, _)| other)),
            });
        }
        state.spaces.push((base, Some(pool)));
        Ok(Range { base: DeviceAddress(base.address()), size_bytes: SLOT_BYTES })
    }

    fn carve(&self, _: Range, part: Range) -> Result<(), BackendError> {
        self.0.borrow_mut().note_range(part.base);
        Ok(())
    }

    fn release_space(&self, space: Range) -> Result<(), BackendError> {
        for (_, pool) in self.0.borrow_mut().spaces.iter_mut().filter(|(base, _)| base.address() == space.base.0) {
            *pool = None;
        }
        Ok(())
    }

    fn map(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.note(true, range, offset_bytes, size_bytes);
        Ok(())
    }

    fn can_alias(&self) -> bool {
        true
    }

    fn alias(&self, at: RangeOffset, _: RangeOffset, _: u64) -> Result<(), BackendError> {
        self.0
            .borrow_mut()
            .ranges
            .get_mut(&at.0.base)
            .expect("the range should have been reserved before")
            .is_stitched = true;
        Ok(())
    }

    fn unmap(&self, range: Range, offset_bytes: u64, size_bytes: u64) -> Result<(), BackendError> {
        self.note(false, range, offset_bytes, size_bytes);
        Ok(())
    }

    fn release(&self, range: Range) -> Result<(), BackendError> {
        self.0.borrow_mut().ranges.remove(&range.base);
        Ok(())
    }

    fn record(&self, _: StreamId) -> Result<Event, BackendError> {
        Ok(Event(0))
    }

    fn wait(&self, _: StreamId, _: Event) -> Result<(), BackendError> {
        Ok(())
    }

    /// Always returns `false`, so that a snapshot shows every remaining fence.
    fn query(&self, _: Event) -> Result<bool, BackendError> {
        Ok(false)
    }

    fn recycle(&self, _: Event) {}

    fn synchronize(&self, _: StreamId) -> Result<(), BackendError> {
        Ok(())
    }

    fn save(&self, _: PoolId, _: &[Part]) -> Result<Image, BackendError> {
        Ok(Image(0))
    }

    fn load(&self, _: Image, _: &[Part]) -> Result<(), BackendError> {
        Ok(())
    }

    fn zero(&self, _: &[Part]) -> Result<(), BackendError> {
        Ok(())
    }
}
