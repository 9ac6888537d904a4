//! Stitching: a large block made of free pieces. A part of [`Heap`].
//!
//! If no free block fits, a range of addresses is mapped onto free granules in different locations and becomes a
//! segment with one free block ([`stitching`](crate::stitching) has a picture). From then on it is a segment like any
//! other: its blocks are split, freed, merged and found by best fit. Once all of the segment is free, its memory
//! returns home. Only a request for which no free block fits takes additional steps:
//!
//! ```text
//!  gather   free granules of ranges that are partly in use return home, if that makes a block fit
//!  again    reuse the oldest range whose first granules are all free at home       no driver call
//!  stitch   memory grows by the missing granules, and a new range is mapped        a map for each granule
//! ```
//! An unused range stays mapped, so that *again* can reuse it. It is unmapped in a trim, or when too many granules are
//! mapped a second time. In both cases the host waits for the streams that used it. Nothing else in stitching blocks
//! the host. The stream that gets a stitched block waits, on the device, for all earlier users of all its granules
//! (rule D3).
//!
//! A refused request changes nothing. If the driver fails between growth and the last mapping, the heap stays grown,
//! and the digest records the growth and the failure.

use super::acquire::Missing;
use super::rejoin::give_back;
use super::{DynContext, Heap, Shortage};
use crate::arena::fencing::synchronize;
use crate::blocks::table::{BlockState, Slot};
use crate::config::errors::OutOfMemoryCause;
use crate::config::{ExpandableSegments, Stitching};
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::SegmentEventKind;
use crate::stitching::{FreeAtHome, Home, Run, first_free};
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::{BackendError, Range};
use crate::types::ids::StreamId;
use crate::types::units::{Units, bytes};
use crate::types::work;
use smallvec::SmallVec;

impl<L: Lock> Heap<L> {
    /// Creates a free block of at least `size` from free granules. Returns `None` if the heap should grow instead, as
    /// if it could not stitch.
    pub(super) fn stitch(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
        knobs: &ExpandableSegments,
        stitching: &Stitching,
    ) -> Result<Option<Slot>, Box<Shortage>> {
        if self.stitched.is_empty() && bytes(size) < stitching.least_bytes {
            return Ok(None);
        }
        self.forget_unfilled();
        let granule = self.arena.rules().granule;
        let Home { largest_joined, free } = self.stitched.look_home(&self.arena);
        if largest_joined >= size {
            self.stitched.gather(&mut self.arena);
            return Ok(self.arena.smallest_free(size));
        }
        let whole = self.arena.rules().whole_granules(size);
        let missing = u64::from(whole).saturating_sub(free.size()) as Units;
        let at_end = self.arena.rules().whole_granules(size - self.arena.free_at_end().min(size));
        if bytes(size) < stitching.least_bytes || missing >= at_end {
            return Ok(None);
        }
        if missing == 0
            && let Some(segment) = self.stitched.find_again(whole, &free)
        {
            self.stitched.gather(&mut self.arena);
            let again = self.stitch_again(context, stream, segment, whole);
            return again.map(Some).map_err(|error| Box::new(Shortage::Fence(error)));
        }
        // No range is added while the pool is observed. All existing ranges were mapped before the observer was added.
        if self.log.is_observed() {
            return Ok(None);
        }
        let (count, most) = ((whole / granule) as usize, stitching.aliases_max as usize);
        let unused = self.stitched.unused(&self.arena);
        let in_use = self.stitched.aliases(&self.arena) - unused.iter().map(|(_, aliases)| aliases).sum::<usize>();
        if count > stitching.maps_max as usize || in_use + count > most {
            return Ok(None);
        }
        // Taken before growth, because the other heaps of a pool with a base take parts at any time.
        let Some(part) = self.take_part(context, bytes(whole)).map_err(|error| self.failed(error, stream, size))?
        else {
            return Ok(None);
        };
        if missing > 0
            && let Err(shortage) =
                self.grow(context, stream, Missing { at_end: missing, in_new_range: missing }, knobs, granule)
        {
            self.give_back_part(part);
            // Without the stitched range, the addresses may suffice for growth.
            let is_full = matches!(*shortage, Shortage::Memory { cause: OutOfMemoryCause::AddressesFull { .. }, .. });
            return if is_full { Ok(None) } else { Err(shortage) };
        }
        self.stitched.gather(&mut self.arena);
        if let Err(error) = self.make_room(context, most, count) {
            self.give_back_part(part);
            return Err(self.failed(error, stream, size));
        }
        self.stitch_new(context, stream, whole, part).map(Some).map_err(|error| self.failed(error, stream, size))
    }

    /// Records that the driver failed after the heap may have grown.
    fn failed(&mut self, error: BackendError, stream: StreamId, size: Units) -> Box<Shortage> {
        self.ledger.fold(op_word(Mark::RefusedByDriver, stream, bytes(size)), 0);
        Box::new(Shortage::Fence(error))
    }

    /// Takes the addresses of a new range, which are `None` in a pool without a base. Returns `None` if there is no room
    /// for it.
    fn take_part(
        &mut self,
        context: &DynContext<'_, L>,
        size_bytes: u64,
    ) -> Result<Option<Option<Range>>, BackendError> {
        if !self.make_addresses(context, size_bytes)? {
            return Ok(None);
        }
        let Some(addresses) = &self.addresses else { return Ok(Some(None)) };
        // Another heap may have taken them.
        Ok(addresses.take(size_bytes).map(Some))
    }

    fn give_back_part(&self, part: Option<Range>) {
        if let (Some(addresses), Some(part)) = (&self.addresses, part) {
            addresses.give_back(part);
        }
    }

    /// Makes room for a range of this size among the addresses of a pool with a base: unmaps the oldest unused ranges
    /// until it fits. Returns `false` if it does not fit.
    pub(super) fn make_addresses(
        &mut self,
        context: &DynContext<'_, L>,
        size_bytes: u64,
    ) -> Result<bool, BackendError> {
        if self.has_addresses(size_bytes) {
            return Ok(true);
        }
        self.stitched.gather(&mut self.arena);
        for (segment, _) in self.stitched.unused(&self.arena) {
            self.retire(context, segment);
            self.release_retired(context).error.map_or(Ok(()), Err)?;
            if self.has_addresses(size_bytes) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reuses the first `size` units of an existing range. Their memory is free at home.
    fn stitch_again(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        segment: u32,
        size: Units,
    ) -> Result<Slot, BackendError> {
        let home = FreeAtHome::new(&self.arena);
        self.wait_for_users_of(context, stream, &home, &self.stitched.home_of_front(segment, size))?;
        let free = self.free_state(context, stream);
        Ok(self.stitched.reuse(&mut self.arena, &home, segment, size, free))
    }

    /// Maps a new range onto `size` units that are free at home.
    fn stitch_new(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        size: Units,
        part: Option<Range>,
    ) -> Result<Slot, BackendError> {
        let home = FreeAtHome::new(&self.arena);
        let runs = first_free(&self.arena, size);
        if let Err(error) = self.wait_for_users_of(context, stream, &home, &runs) {
            self.give_back_part(part);
            return Err(error);
        }
        let range = match (&self.addresses, part) {
            (Some(addresses), Some(part)) => self.carve(context, addresses, part)?,
            _ => self.reserve_anywhere(context, bytes(size))?,
        };
        self.map_aliases(context, &runs, range)?;
        let free = self.free_state(context, stream);
        let slot = self.stitched.add(&mut self.arena, &home, range, &runs, free);
        let segment = self.arena.block(slot).segment;
        context.directory.lock().insert(range, self.number, segment);
        self.note_offset(range);
        // The range adds no memory, because its memory is counted at home.
        self.log_segment(SegmentEventKind::Birth, segment, 0, 0);
        Ok(slot)
    }

    /// Orders `stream` after the earlier users of memory that is free at home.
    fn wait_for_users_of(
        &mut self,
        context: &DynContext<'_, L>,
        stream: StreamId,
        home: &FreeAtHome,
        runs: &[Run],
    ) -> Result<(), BackendError> {
        let mut blocks: Vec<Slot> = home.blocks_around(runs).collect();
        work::count_sort(blocks.len());
        blocks.sort_unstable_by_key(|slot| self.arena.block(*slot).location);
        blocks.dedup();
        blocks.into_iter().try_for_each(|slot| self.arena.wait_for_earlier_users(context, slot, stream))
    }

    /// Maps a new range onto these runs, granule by granule. If a call fails, nothing stays mapped unless the driver
    /// also fails to unmap it.
    fn map_aliases(&mut self, context: &DynContext<'_, L>, runs: &[Run], range: Range) -> Result<(), BackendError> {
        let granule = self.arena.rules().granule;
        let granules = runs.iter().flat_map(|run| {
            let offsets = (run.start.offset..run.start.offset + run.size).step_by(granule as usize);
            offsets.map(|offset| (run.start.segment, bytes(offset)))
        });
        for ((segment, source_bytes), at_bytes) in granules.zip((0..).step_by(bytes(granule) as usize)) {
            work::count(work::WORK_PER_MAP);
            let home = self.arena.segment(segment).range;
            if let Err(error) = context.backend.alias((range, at_bytes), (home, source_bytes), bytes(granule)) {
                let mut mapped: SmallVec<_> = (at_bytes > 0).then_some((0, at_bytes)).into_iter().collect();
                if give_back(&context.backend, self.addresses.as_deref(), range, &mut mapped).is_err() {
                    self.log.add_stray(range, mapped, true);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the state of a free block whose next user waits only for `stream`, which has waited for all earlier
    /// users.
    fn free_state(&self, context: &DynContext<'_, L>, stream: StreamId) -> BlockState {
        let since = if self.id.stream().is_some() { 0 } else { context.clocks.lock().now(stream) };
        BlockState::Free { stream, since }
    }

    /// Unmaps the oldest unused ranges if `count` more granules would exceed the limit.
    fn make_room(&mut self, context: &DynContext<'_, L>, most: usize, count: usize) -> Result<(), BackendError> {
        let mut aliases = self.stitched.aliases(&self.arena);
        if aliases + count <= most {
            return Ok(());
        }
        let least = (most - most / 8).min(most - count);
        for (segment, unmapped) in self.stitched.unused(&self.arena) {
            if aliases <= least {
                break;
            }
            self.retire(context, segment);
            aliases -= unmapped;
        }
        self.release_retired(context).error.map_or(Ok(()), Err)
    }

    /// Unmaps the unused ranges and the unused parts of the other ranges, so that the memory can be released.
    pub(super) fn forget_stitched(&mut self, context: &DynContext<'_, L>) -> Result<(), BackendError> {
        if self.config.stitching().is_none() {
            return Ok(());
        }
        self.stitched.gather(&mut self.arena);
        let unused = self.stitched.unused(&self.arena);
        unused.into_iter().for_each(|(segment, _)| self.retire(context, segment));
        self.release_retired(context).error.map_or(Ok(()), Err)?;
        if self.log.is_observed() {
            return Ok(());
        }
        self.stitched.unmap_unused(
            &self.arena,
            |stream| synchronize(context, stream),
            |range, offset, size| context.backend.unmap(range, bytes(offset), bytes(size)),
        )
    }
}
