//! Acquires memory if no free block fits. A part of [`Heap`].
//!
//! | policy | acquired memory |
//! |---|---|
//! | fixed | a segment of PyTorch's size for the request |
//! | reserved | its only segment, at the heap's first op; nothing afterwards |
//! | expandable, stitching, below one granule | for a request of at most half a granule, a tight segment: an eighth of a granule, the request, or as much as the heap holds, whichever is largest |
//! | expandable, growth 0 | nothing: only `reserve` makes it grow, in the lowest hole or at the end of the range |
//! | expandable | a stitched range, if the pool stitches; memory for the lowest hole that makes the request fit; otherwise growth at the end of the range |
//!
//! A *tight* segment is mapped to its end in the backend's granularity, and never grows. Most heaps of a program hold a
//! few small tensors, for which a whole granule would be too much. The first segments of a heap that stitches are
//! therefore tight. If a configured limit refuses more memory, but has room for the request alone, the heap acquires a
//! tight segment of exactly that size.
//!
//! On success the index contains a free block that is large enough, which the caller takes like any other. Budgets are
//! charged first, and everything is undone if a driver call fails: the heap is then unchanged (rule D4). A range from
//! the backend is checked before it becomes a segment.

use super::{DynContext, Heap, Shortage};
use crate::arena::addresses::FixedAddresses;
use crate::arena::fresh;
use crate::blocks::table::{Block, Slot};
use crate::config::errors::{LimitScope, OutOfMemoryCause};
use crate::config::size_rules::{SizeClass, SizeRules};
use crate::config::{ExpandableSegments, PoolConfig, SegmentPolicy};
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::{SegmentEvent, SegmentEventKind};
use crate::stats::budget::Budgets;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{Backend, BackendError, Range, RangeOffset, Reason};
use crate::types::ids::StreamId;
use crate::types::units::{UNIT_BYTES, Units, bytes, units};
use smallvec::SmallVec;

impl<L: Lock> Heap<L> {
    /// Creates a free block of at least `size` and returns it.
    #[cold]
    pub(super) fn acquire_memory(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
    ) -> Result<Slot, Box<Shortage>> {
        self.check_open()?;
        let (pool, size_bytes) = (self.id.pool.0, bytes(size));
        let span = tracing::debug_span!(target: "symmalloc", "heap.obtain", pool, stream = stream.0, size_bytes);
        let _entered = span.enter();
        let released_bytes = context.budget.released_bytes();
        let acquired = self.acquire_by_policy(context, stream, size);
        acquired
            .or_else(|shortage| self.acquire_tightly(context, stream, size, shortage))
            .map_err(|shortage| shortage.since(released_bytes))
    }

    fn acquire_by_policy(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
    ) -> Result<Slot, Box<Shortage>> {
        match self.config.segments().clone() {
            SegmentPolicy::Fixed(_) => {
                let class = self.arena.rules().class_of(size);
                let size = self.arena.rules().segment_size(size);
                self.create_segment(context, stream, class, size, size)
            }
            SegmentPolicy::Reserved { segment_bytes } => self.create_reserved(context, stream, segment_bytes, size),
            SegmentPolicy::Expandable(_) if self.config.has_quota() => {
                Err(Shortage::of(size, OutOfMemoryCause::SegmentFull { segment_bytes: self.arena.mapped_bytes() }))
            }
            SegmentPolicy::Expandable(knobs) => {
                // The ranges of a pool with a base are few, and heaps take them in the order of their first memory.
                if self.addresses.is_none()
                    && let Some(first) = self.arena.rules().first_segment(size, self.arena.mapped_bytes())
                {
                    return self.create_segment(context, stream, SizeClass::Large, first, first);
                }
                if let Some(stitching) = self.config.stitching().cloned()
                    && let Some(slot) = self.stitch(context, stream, size, &knobs, &stitching)?
                {
                    return Ok(slot);
                }
                if let Some(slot) = self.fill_hole(context, stream, size)? {
                    return Ok(slot);
                }
                let step = self.arena.rules().whole_granules(units(knobs.growth_bytes));
                let missing = Missing {
                    at_end: self.arena.rules().whole_granules(size - self.arena.free_at_end().min(size)),
                    in_new_range: self.arena.rules().whole_granules(size),
                };
                self.grow(context, stream, missing, &knobs, step)
            }
        }
    }

    /// Acquires exactly the memory of one block if a limit refused more than that with this shortage. A symmetric pool
    /// does not, if pools that differ between ranks use up the limit (rule D8).
    fn acquire_tightly(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
        shortage: Box<Shortage>,
    ) -> Result<Slot, Box<Shortage>> {
        let tight = self.arena.rules().tight_size(size);
        let (missing, scope) = match &*shortage {
            Shortage::Memory { missing, cause: OutOfMemoryCause::Limit { scope, .. }, .. } => (*missing, *scope),
            Shortage::Memory { cause: OutOfMemoryCause::SegmentFull { .. }, .. } => {
                return Err(shortage.demanding(tight));
            }
            _ => return Err(shortage),
        };
        if matches!(self.config.segments(), SegmentPolicy::Reserved { .. }) {
            return Err(shortage);
        }
        let is_foreign = self.config.symmetric() && scope == LimitScope::Allocator;
        let has_room = bytes(tight) <= self.budgets(context).headroom_bytes(&self.config);
        if is_foreign || tight >= missing || !has_room {
            return Err(shortage.demanding(tight));
        }
        let class = self.arena.rules().class_of(size);
        self.create_segment(context, stream, class, tight, tight)
    }

    /// Raises the heap's mapped memory to at least `target_bytes`.
    pub(crate) fn reserve(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        target_bytes: u64,
    ) -> Result<(), Box<Shortage>> {
        self.check_open()?;
        let (before, released_bytes) = (self.arena.mapped_bytes(), context.budget.released_bytes());
        if before < target_bytes {
            let target = units(target_bytes.next_multiple_of(UNIT_BYTES));
            let missing = self.arena.rules().whole_granules(target - units(before));
            let reserved = match self.config.segments().clone() {
                SegmentPolicy::Fixed(_) => self.create_segment(context, stream, SizeClass::Large, missing, missing),
                SegmentPolicy::Reserved { segment_bytes } => {
                    self.create_reserved(context, stream, segment_bytes, target)
                }
                SegmentPolicy::Expandable(knobs) => {
                    // A pool with a quota fills a hole first, because the end of the range has room only if no hole is left.
                    let has_room = |block: &Block| self.config.has_quota() && block.size >= missing;
                    match self.arena.find_hole(has_room) {
                        Some(hole) => self.fill(context, stream, hole, missing),
                        None => {
                            let missing = Missing { at_end: missing, in_new_range: missing };
                            self.grow(context, stream, missing, &knobs, self.arena.rules().granule)
                        }
                    }
                }
            };
            if let Err(shortage) = reserved {
                let shortage = shortage.since(released_bytes);
                if self.config.has_quota() || matches!(self.config.segments(), SegmentPolicy::Reserved { .. }) {
                    return Err(shortage);
                }
                let target = units(target_bytes.next_multiple_of(UNIT_BYTES));
                self.acquire_tightly(context, stream, target - units(before), shortage).map_err(|shortage| {
                    shortage.demanding(self.arena.rules().tight_size(target)).since(released_bytes)
                })?;
            }
        }
        self.ledger.fold(op_word(Mark::Reserve, stream, target_bytes), self.arena.mapped_bytes() - before);
        self.fold_offsets();
        Ok(())
    }

    /// Returns the budgets to which reservations are charged.
    pub(crate) fn budgets<'a>(&'a self, context: &'a DynContext<'_, L>) -> Budgets<'a, L> {
        Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &context.budget }
    }

    /// Acquires the one segment of a reserved heap. A heap that already has it gets no more memory.
    fn create_reserved(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        segment_bytes: u64,
        size: Units,
    ) -> Result<Slot, Box<Shortage>> {
        let whole = self.arena.rules().whole_granules(units(segment_bytes));
        if self.arena.segment_count() > 0 || size > whole {
            return Err(Shortage::of(size, OutOfMemoryCause::SegmentFull { segment_bytes: bytes(whole) }));
        }
        self.create_segment(context, stream, SizeClass::Large, whole, whole)
    }

    /// Acquires a new segment: `mapped` units of memory at the start of `range` units of address space.
    fn create_segment(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        class: SizeClass,
        mapped: Units,
        range: Units,
    ) -> Result<Slot, Box<Shortage>> {
        let size_bytes = bytes(mapped);
        // If a limit refuses the memory, unused ranges stay.
        if size_bytes <= self.budgets(context).headroom_bytes(&self.config) {
            let made = self.make_addresses(context, bytes(range));
            made.map_err(|error| Shortage::of(mapped, OutOfMemoryCause::Driver(error)))?;
        }
        let charge = self.budgets(context).charge(size_bytes).map_err(|cause| Shortage::of(mapped, cause))?;
        let driver = |error| Shortage::of(mapped, OutOfMemoryCause::Driver(error));
        let range = self.reserve_range(context, bytes(range)).map_err(|cause| Shortage::of(mapped, cause))?;
        if let Err(error) = back(context, (&self.config, self.arena.rules()), (range, 0), size_bytes) {
            drop(charge);
            if release_range(&context.backend, self.addresses.as_deref(), range).is_err() {
                // This costs only addresses; the next trim tries again.
                self.log.add_stray(range, SmallVec::new(), false);
            }
            return Err(driver(error));
        }
        charge.confirm();
        let slot = self.arena.add_segment(range, class, mapped, fresh(stream));
        let segment = self.arena.block(slot).segment;
        context.directory.lock().insert(range, self.number, segment);
        self.note_offset(range);
        self.log_segment(SegmentEventKind::Birth, segment, 0, size_bytes);
        Ok(slot)
    }

    /// Acquires a range of addresses: a part of the pool's addresses if it has a base, and a reservation otherwise.
    pub(super) fn reserve_range(
        &self,
        context: &DynContext<'_, L>,
        size_bytes: u64,
    ) -> Result<Range, OutOfMemoryCause> {
        let Some(addresses) = self.addresses.as_deref() else {
            return self.reserve_anywhere(context, size_bytes).map_err(OutOfMemoryCause::Driver);
        };
        let part = addresses.take(size_bytes).ok_or_else(|| OutOfMemoryCause::AddressesFull {
            needed_bytes: size_bytes,
            largest_free_bytes: addresses.largest_free_bytes(),
        })?;
        self.carve(context, addresses, part).map_err(OutOfMemoryCause::Driver)
    }

    /// Acquires the range of a saved segment, at its offset from the pool's base if there is one.
    pub(super) fn reserve_saved(
        &self,
        context: &DynContext<'_, L>,
        size_bytes: u64,
        offset_bytes: Option<u64>,
    ) -> Result<Range, BackendError> {
        let Some(addresses) = self.addresses.as_deref() else {
            return self.reserve_anywhere(context, size_bytes);
        };
        let part = offset_bytes.and_then(|offset_bytes| addresses.take_at(offset_bytes, size_bytes));
        let part = part.ok_or_else(|| BackendError::new("Layout", 0, Reason::BadRange))?;
        self.carve(context, addresses, part)
    }

    pub(super) fn carve(
        &self,
        context: &DynContext<'_, L>,
        addresses: &FixedAddresses<L>,
        part: Range,
    ) -> Result<Range, BackendError> {
        if let Err(error) = context.backend.carve(addresses.space(), part) {
            addresses.give_back(part);
            return Err(error);
        }
        Ok(part)
    }

    /// Returns `true` if a new range of this size can be acquired, as far as the pool's base decides it.
    pub(super) fn has_addresses(&self, size_bytes: u64) -> bool {
        self.addresses.as_ref().is_none_or(|addresses| addresses.largest_free_bytes() >= size_bytes)
    }

    /// Notes a new range of a pool with a base for [`fold_offsets`](Self::fold_offsets).
    pub(super) fn note_offset(&mut self, range: Range) {
        if self.addresses.is_some() {
            self.carved.push(range);
        }
    }

    /// Adds the offsets of the new ranges to the digest of a pool with a base. Threads that acquire memory in another
    /// order than on other ranks get other addresses, which the ranks then notice. The offsets follow the request in the
    /// history, so that ranks with different requests differ in these first.
    pub(super) fn fold_offsets(&mut self) {
        if let Some(addresses) = &self.addresses {
            for range in self.carved.drain(..) {
                let offset_bytes = addresses.offset_of(range.base);
                self.ledger.fold(op_word(Mark::Carve, StreamId(0), range.size_bytes), offset_bytes);
            }
        }
    }

    /// Reserves a range and checks what the backend returned.
    pub(super) fn reserve_anywhere(&self, context: &DynContext<'_, L>, size_bytes: u64) -> Result<Range, BackendError> {
        let range = context.backend.reserve(size_bytes)?;
        let granule_bytes = context.backend.granularity_bytes();
        // The length must be exact: growth continues at the end of a range, and no backend may choose that end (rule
        // D1).
        let has_size = range.size_bytes == size_bytes && range.base.0.checked_add(size_bytes).is_some();
        if has_size && range.base.0.is_multiple_of(granule_bytes) {
            if !context.directory.lock().overlaps(range) {
                return Ok(range);
            }
        } else {
            let _taken_back = context.backend.release(range);
        }
        // A range that overlaps a live segment is not released, because that could release the segment.
        Err(BackendError::new("Backend::reserve", 0, Reason::BadRange))
    }

    /// Grows the newest range at its end, or starts a new one if there is none or it is full. Returns the free block
    /// that contains the new memory.
    pub(super) fn grow(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        missing: Missing,
        knobs: &ExpandableSegments,
        step: Units,
    ) -> Result<Slot, Box<Shortage>> {
        let newest = self.arena.newest_growable();
        let room = newest.map_or(0, |newest| {
            let segment = self.arena.segment(newest);
            units(segment.range.size_bytes) - segment.end
        });
        match newest.filter(|_| missing.at_end <= room) {
            Some(segment) => {
                let growth = self.growth(context, missing.at_end, step, room)?;
                let offset = self.arena.segment(segment).end;
                self.map(context, segment, offset, growth)?;
                let slot = self.arena.extend(segment, growth, fresh(stream));
                self.log_segment(SegmentEventKind::Growth, segment, offset, bytes(growth));
                Ok(slot)
            }
            None => {
                let range = self.arena.rules().whole_granules(units(knobs.range_bytes.next_multiple_of(UNIT_BYTES)));
                let needed = missing.in_new_range;
                if needed > range {
                    return Err(Shortage::of(needed, OutOfMemoryCause::SegmentFull { segment_bytes: bytes(range) }));
                }
                let growth = self.growth(context, needed, step, range)?;
                self.create_segment(context, stream, SizeClass::Large, growth, range)
            }
        }
    }

    /// Returns the amount to map if `needed` is missing: whole steps, or less at the end of the range or at a limit.
    fn growth(
        &self,
        context: &DynContext<'_, L>,
        needed: Units,
        step: Units,
        room: Units,
    ) -> Result<Units, Box<Shortage>> {
        let wanted = bytes(needed.div_ceil(step)).saturating_mul(u64::from(step)).min(bytes(room));
        let granule_bytes = bytes(self.arena.rules().granule);
        let allowed = wanted.min(self.budgets(context).headroom_bytes(&self.config) / granule_bytes * granule_bytes);
        // If even `needed` exceeds a limit, charging it reports the limit.
        Ok(units(allowed).max(needed))
    }

    /// Maps and charges memory of a segment that is reserved but not backed.
    fn map(&self, context: &DynContext<'_, L>, segment: u32, offset: Units, size: Units) -> Result<(), Box<Shortage>> {
        let size_bytes = bytes(size);
        let charge = self.budgets(context).charge(size_bytes).map_err(|cause| Shortage::of(size, cause))?;
        let range = self.arena.segment(segment).range;
        let driver = |error| Shortage::of(size, OutOfMemoryCause::Driver(error));
        back(context, (&self.config, self.arena.rules()), (range, bytes(offset)), size_bytes).map_err(driver)?;
        charge.confirm();
        Ok(())
    }

    /// Maps memory into the lowest hole that then has `size` units together with its free neighbors. It maps as little
    /// as necessary, from the hole's start.
    fn fill_hole(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
    ) -> Result<Option<Slot>, Box<Shortage>> {
        let fits =
            |block: &Block| self.arena.free_size(block.prev) + block.size + self.arena.free_size(block.next) >= size;
        let Some(found) = self.arena.find_hole(fits) else { return Ok(None) };
        let hole = self.arena.block(found.0);
        let missing = self.arena.rules().whole_granules(size - self.arena.free_size(hole.prev)).min(hole.size);
        self.fill(context, stream, found, missing).map(Some)
    }

    /// Maps memory into the first units of a hole. Returns the free block that contains them.
    fn fill(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        (slot, segment): (Slot, u32),
        missing: Units,
    ) -> Result<Slot, Box<Shortage>> {
        let offset = self.arena.block(slot).offset();
        self.map(context, segment, offset, missing)?;
        let slot = self.arena.fill_hole(slot, missing, fresh(stream));
        self.log_segment(SegmentEventKind::Growth, segment, offset, bytes(missing));
        Ok(slot)
    }

    pub(super) fn log_segment(&mut self, kind: SegmentEventKind, segment: u32, offset: Units, size_bytes: u64) {
        let event = self.segment_event(kind, segment, bytes(offset), size_bytes);
        trace_segment(&event);
        if kind != SegmentEventKind::Shrink {
            self.ledger.count_growth();
        }
        self.log.append(event);
    }

    pub(super) fn segment_event(
        &self,
        kind: SegmentEventKind,
        segment: u32,
        offset_bytes: u64,
        size_bytes: u64,
    ) -> SegmentEvent {
        let segment = self.arena.segment(segment);
        SegmentEvent { kind, heap: self.id, segment: segment.id, base: segment.range.base, offset_bytes, size_bytes }
    }
}

/// The least memory to map, in whole granules.
#[derive(Clone, Copy)]
pub(super) struct Missing {
    /// Units to map at the end of the newest range, whose last block may already be free.
    pub(super) at_end: Units,
    pub(super) in_new_range: Units,
}

/// Backs a part of a range with new memory, in separate pieces if the pool stitches, or unmaps what is freed: a backend may
/// unmap larger pieces only as a whole.
pub(super) fn back<L: Lock>(
    context: &DynContext<'_, L>,
    (config, rules): (&PoolConfig, &SizeRules),
    (range, offset_bytes): RangeOffset,
    size_bytes: u64,
) -> Result<(), BackendError> {
    if config.stitching().is_some() || config.debug().unmap {
        return context.backend.map_pieces((range, offset_bytes), size_bytes, bytes(rules.granule));
    }
    context.backend.map(range, offset_bytes, size_bytes)
}

/// Releases a range in which nothing is mapped.
pub(super) fn release_range<L: Lock>(
    backend: &dyn Backend,
    addresses: Option<&FixedAddresses<L>>,
    range: Range,
) -> Result<(), BackendError> {
    backend.release(range)?;
    if let Some(addresses) = addresses {
        addresses.give_back(range);
    }
    Ok(())
}

/// Reports a segment event to `tracing`. Names and fields are stable.
pub(super) fn trace_segment(event: &SegmentEvent) {
    let SegmentEvent { heap, segment, offset_bytes, size_bytes, .. } = *event;
    let (pool, stream, segment) = (heap.pool.0, heap.group.first().map(|stream| stream.0), segment.0);
    macro_rules! segment {
        ($name:literal) => {
            tracing::debug!(name: $name, target: "symmalloc", pool, stream, segment, offset_bytes, size_bytes)
        };
    }
    match event.kind {
        SegmentEventKind::Birth => segment!("segment.birth"),
        SegmentEventKind::Growth => segment!("segment.growth"),
        SegmentEventKind::Shrink => segment!("segment.shrink"),
        SegmentEventKind::Death => segment!("segment.death"),
    }
}
