//! Stitching: a large block made of free pieces. A part of [`Heap`].
//!
//! If no free block fits, a range of addresses is mapped onto free granules in different locations and becomes a
//! segment with one free block ([`stitched`](crate::blocks::stitched) has a picture). From then on it is a segment like
//! any other: its blocks are split, freed, merged and found by best fit. Only a miss takes additional steps:
//!
//! ```text
//!  gather   free the granules of stitched ranges at home, if that makes a block fit
//!  again    reuse the oldest range whose first granules are all free at home       no driver call
//!  stitch   memory grows by the missing granules, and a new range is mapped        a map for each granule
//! ```
//! An unused range stays mapped, for *again*. It is unmapped in a trim, or when too many granules are mapped a second
//! time. In both cases the host waits for the streams that used it; no other step blocks. The stream that gets a
//! stitched block waits, on the device, for all earlier users of all its granules (rule D3).
//!
//! A refused request has changed nothing. If the driver fails between growth and the last mapping, the memory has
//! grown, and the digest records both events.

use super::acquire::Missing;
use super::fencing::synchronize;
use super::rejoin::give_back;
use super::{DynContext, Heap, Shortage};
use crate::blocks::FreeKey;
use crate::blocks::stitched::{Granule, StitchedRange};
use crate::blocks::table::{BlockState, Slot};
use crate::config::size_rules::SizeClass;
use crate::config::{ExpandableSegments, Stitching};
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::SegmentEventKind;
use crate::streams::fences::FenceSetId;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{BackendError, Range};
use crate::types::ids::{SegmentId, StreamId};
use crate::types::units::{Units, bytes};
use smallvec::SmallVec;

/// A range of granule indices in a segment.
type Part = std::ops::Range<usize>;

impl<L: Lock> Heap<L> {
    /// Creates a free block of at least `size` from free granules. `None`: the heap grows as if it could not stitch.
    pub(super) fn stitch(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
        knobs: &ExpandableSegments,
        stitching: &Stitching,
    ) -> Result<Option<Slot>, Box<Shortage>> {
        let granule = self.rules.granule;
        let (largest, free) = self.look_home();
        if largest >= size {
            self.gather();
            return Ok(self.free.best_fit(self.table.blocks(), SizeClass::Large, size));
        }
        let count = size.div_ceil(granule) as usize;
        let missing = count.saturating_sub(free.len()) as Units * granule;
        let at_end = self.rules.whole_granules(size - self.free_at_end().min(size));
        if bytes(size) < stitching.least_bytes || missing >= at_end || self.log.is_observed() {
            return Ok(None);
        }
        if missing == 0
            && let Some(at) = self.find_again(count, free)
        {
            self.gather();
            let again = self.stitch_again(context, stream, at, count);
            return again.map(Some).map_err(|error| Box::new(Shortage::Fence(error)));
        }
        let most = stitching.aliases_max as usize;
        let in_use = self.aliases() - self.kept().iter().map(|(_, aliases)| aliases).sum::<usize>();
        if count > stitching.maps_max as usize || in_use + count > most {
            return Ok(None);
        }
        if missing > 0 {
            self.grow(context, stream, Missing { at_end: missing, in_new_range: missing }, knobs, granule)?;
        }
        self.gather();
        let stitched = self.make_room(context, most, count).and_then(|()| self.stitch_new(context, stream, count));
        stitched.map(Some).map_err(|error| {
            self.fold(op_word(Mark::RefusedByDriver, stream, bytes(size)), 0);
            Box::new(Shortage::Fence(error))
        })
    }

    /// Returns the largest free run at home and all whole free granules, as they would be after `gather`.
    fn look_home(&self) -> (Units, Vec<Granule>) {
        let unused = self.unused().into_iter();
        let mut away: Vec<_> =
            unused.flat_map(|(at, _, part)| self.stitched[at].home(part).unwrap_or_default()).collect();
        away.sort_unstable();
        let mut largest = 0;
        for segment in self.table.backed_segments() {
            let mut run = 0;
            for block in self.table.blocks_of(segment).map(|slot| self.table.block(slot)) {
                let granule = Granule { segment, offset: block.offset() };
                let is_free = block.is_free() || block.is_elsewhere() && away.binary_search(&granule).is_ok();
                run = if is_free { run + block.size } else { 0 };
                largest = largest.max(run);
            }
        }
        away.extend(self.free_granules());
        (largest, away)
    }

    /// Returns every granule that is entirely free at home, in the order of rule D2's blocks.
    fn free_granules(&self) -> Vec<Granule> {
        let slots = self.free.keys(self.table.blocks(), SizeClass::Large).map(FreeKey::slot);
        let granules = slots.flat_map(|slot| {
            let (granules, segment) = (self.whole_granules_of(slot), self.table.block(slot).segment);
            granules.map(move |at| Granule { segment, offset: at as Units * self.rules.granule })
        });
        granules.filter(|granule| !self.table.segment(granule.segment).is_stitched).collect()
    }

    /// Returns the granules of its segment that a block covers entirely.
    fn whole_granules_of(&self, slot: Slot) -> Part {
        let (block, granule) = (self.table.block(slot), self.rules.granule);
        block.offset().div_ceil(granule) as usize..(block.end() / granule) as usize
    }

    /// Returns the stitched ranges, their free blocks, and the granules that these blocks cover entirely, oldest range
    /// first: the input of `gather`.
    fn unused(&self) -> Vec<(usize, Slot, Part)> {
        let free = |(at, range): (usize, &StitchedRange)| {
            let slots = self.table.blocks_of(range.segment).filter(|slot| self.table.block(*slot).is_free());
            slots.map(move |slot| (at, slot, self.whole_granules_of(slot))).collect::<Vec<_>>()
        };
        self.stitched.iter().enumerate().flat_map(free).filter(|(.., part)| !part.is_empty()).collect()
    }

    /// Moves the free granules of stitched ranges back home.
    fn gather(&mut self) {
        for (at, slot, part) in self.unused() {
            let users = self.streams_of(slot);
            let range = &mut self.stitched[at];
            range.users.extend_from_slice(&users);
            range.users.sort_unstable();
            range.users.dedup();
            let mut home = range.home(part.clone()).expect("what is free is mapped");
            home.sort_unstable();
            let (free, fences) = (self.table.block(slot).state, self.table.block(slot).fences);
            home.into_iter()
                .fold(None, |lower, granule| Some(self.bring_back(self.block_around(lower, granule), free, fences)));
            for granule in part {
                self.send_away(slot, granule as Units * self.rules.granule);
            }
        }
    }

    /// Marks a granule of a free block as elsewhere. The rest behind it keeps the slot.
    fn send_away(&mut self, slot: Slot, offset: Units) -> Slot {
        let part = self.carve(slot, offset, offset + self.rules.granule);
        self.table.block_mut(part).state = BlockState::Elsewhere;
        part
    }

    /// Marks a granule that is elsewhere as free, with these earlier users. Returns the block that then contains it.
    fn bring_back(&mut self, slot: Slot, free: BlockState, fences: FenceSetId) -> Slot {
        let fences = self.without_events(fences);
        let block = self.table.block_mut(slot);
        debug_assert!(block.is_elsewhere());
        (block.state, block.fences) = (free, fences);
        self.coalesce(slot)
    }

    /// Returns the block that contains a granule. The search starts at `lower`, the block of a lower granule.
    fn block_around(&self, lower: Option<Slot>, granule: Granule) -> Slot {
        let lower = lower.filter(|slot| self.table.block(*slot).segment == granule.segment);
        let mut slot = lower.unwrap_or_else(|| self.table.first(granule.segment));
        while self.table.block(slot).end() <= granule.offset {
            slot = self.table.block(slot).next;
        }
        slot
    }

    /// Returns the oldest stitched range whose first `count` granules are all free at home.
    fn find_again(&self, count: usize, mut free: Vec<Granule>) -> Option<usize> {
        free.sort_unstable();
        let is_free = |granule: &Granule| free.binary_search(granule).is_ok();
        self.stitched.iter().position(|range| range.home(0..count).is_some_and(|home| home.iter().all(is_free)))
    }

    fn stitch_again(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        at: usize,
        count: usize,
    ) -> Result<Slot, BackendError> {
        let StitchedRange { segment, .. } = self.stitched[at];
        let home = self.stitched[at].home(0..count).expect("all granules are free at home");
        self.take_from_home(context, stream, home, |_| Ok(()))?;
        let free = self.free_state(context, stream);
        let mut slot = self.bring_back(self.table.first(segment), free, FenceSetId::EMPTY);
        for _ in 1..count {
            slot = self.bring_back(self.table.block(slot).next, free, FenceSetId::EMPTY);
        }
        Ok(slot)
    }

    fn stitch_new(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        count: usize,
    ) -> Result<Slot, BackendError> {
        let mut granules = self.free_granules();
        granules.truncate(count);
        let range =
            self.take_from_home(context, stream, granules.clone(), |heap| heap.map_aliases(context, &granules))?;
        let id = self.next_segment;
        self.next_segment = SegmentId(id.0.checked_add(1).expect("2^32 segments were created in one heap"));
        let slot = self.table.add_stitched(id, range, self.free_state(context, stream));
        self.link(slot);
        let segment = self.table.block(slot).segment;
        let granules = granules.into_iter().map(Some).collect();
        self.stitched.push(StitchedRange { segment, granules, users: SmallVec::new() });
        context.directory.lock().insert(range, self.identity.id, segment);
        // The range adds no memory, because its memory is counted at home.
        self.log_segment(SegmentEventKind::Birth, segment, 0, 0);
        Ok(slot)
    }

    /// Orders `stream` behind the earlier users of free granules at home, maps them, and marks them as elsewhere.
    fn take_from_home<T>(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        mut granules: Vec<Granule>,
        map: impl FnOnce(&mut Self) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        granules.sort_unstable();
        let mut lower = None;
        for granule in &granules {
            let slot = self.block_around(lower, *granule);
            self.wait_for_earlier_users(context, slot, stream)?;
            lower = Some(slot);
        }
        let mapped = map(self)?;
        lower = None;
        for granule in granules {
            lower = Some(self.send_away(self.block_around(lower, granule), granule.offset));
        }
        Ok(mapped)
    }

    /// Maps a new range onto granules: all or none.
    fn map_aliases(&mut self, context: &DynContext<'_, L>, granules: &[Granule]) -> Result<Range, BackendError> {
        let size_bytes = bytes(self.rules.granule);
        let range = self.reserve_range(context, granules.len() as u64 * size_bytes)?;
        for (at, Granule { segment, offset }) in granules.iter().enumerate() {
            let (home, offset_bytes) = ((self.table.segment(*segment).range, bytes(*offset)), at as u64 * size_bytes);
            if let Err(error) = context.backend.alias((range, offset_bytes), home, size_bytes) {
                let mut mapped: SmallVec<_> = (at > 0).then_some((0, offset_bytes)).into_iter().collect();
                if give_back(&context.backend, range, &mut mapped).is_err() {
                    self.log.keep_stray(range, mapped, true);
                }
                return Err(error);
            }
        }
        Ok(range)
    }

    /// Returns the state of a free block whose next user waits only for `stream`, which has waited for all others.
    fn free_state(&self, context: &DynContext<'_, L>, stream: StreamId) -> BlockState {
        let since = if self.identity.stream.is_some() { 0 } else { context.clocks.lock().now(stream) };
        BlockState::Free { stream, since }
    }

    /// Returns the segments of unused ranges, oldest first, each with the number of its mapped granules.
    fn kept(&self) -> Vec<(u32, usize)> {
        let is_in_use =
            |slot| matches!(self.table.block(slot).state, BlockState::Allocated { .. } | BlockState::Planned);
        let kept = self.stitched.iter().filter(|range| !self.table.blocks_of(range.segment).any(is_in_use));
        kept.map(|range| (range.segment, range.aliases())).collect()
    }

    /// Returns the number of granules that are mapped a second time.
    fn aliases(&self) -> usize {
        self.stitched.iter().map(StitchedRange::aliases).sum()
    }

    /// Unmaps the oldest unused ranges if `count` more granules would exceed the limit.
    fn make_room(&mut self, context: &DynContext<'_, L>, most: usize, count: usize) -> Result<(), BackendError> {
        if self.aliases() + count <= most {
            return Ok(());
        }
        for (segment, _) in self.kept() {
            if self.aliases() > (most - most / 8).min(most - count) {
                self.retire(context, segment);
            }
        }
        self.release_retired(context).error.map_or(Ok(()), Err)
    }

    /// Unmaps the unused ranges and the unused parts of others, so that memory can be released.
    pub(super) fn forget_stitched(&mut self, context: &DynContext<'_, L>) -> Result<(), BackendError> {
        if self.config.stitching().is_none() {
            return Ok(());
        }
        self.gather();
        self.kept().into_iter().for_each(|(segment, _)| self.retire(context, segment));
        self.release_retired(context).error.map_or(Ok(()), Err)?;
        let others = if self.log.is_observed() { &mut [] } else { &mut self.stitched[..] };
        for StitchedRange { segment, granules, users } in others {
            let range = self.table.segment(*segment).range;
            for slot in self.table.blocks_of(*segment).filter(|slot| self.table.block(*slot).is_elsewhere()) {
                let offset = self.table.block(slot).offset();
                let granule = &mut granules[(offset / self.rules.granule) as usize];
                if granule.is_some() {
                    while let Some(stream) = users.last().copied() {
                        synchronize(context, stream)?;
                        users.pop();
                    }
                    context.backend.unmap(range, bytes(offset), bytes(self.rules.granule))?;
                    *granule = None;
                }
            }
        }
        Ok(())
    }
}
