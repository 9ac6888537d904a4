//! Trimming: the only way in which memory returns from a heap to the device (rule D5). A part of [`Heap`].
//!
//! A heap that is in use is trimmed only in these cases: the program calls a trim, one of its frees crosses a
//! configured threshold, a configured limit would otherwise fail an allocation, a plan needs memory or was followed to
//! its end for the first time, or a wake needs room. Segments are released in sequence order.
//!
//! | free memory | effect |
//! |---|---|
//! | all of a segment | the segment is removed: the log gets an entry, and the memory is *retired* until every observer has acknowledged this entry |
//! | whole granules of an expandable segment | their memory is released, which leaves a hole or shortens the range; not while the pool is observed |
//! | a reserved segment | stays as long as its pool exists |
//! | a stitched range | is unmapped before the memory that it aliases is released |
//! | anything, while the pool sleeps | stays: its memory was released already, and the trim is not an op of the heap |
//!
//! Before memory is released, the host waits for the streams that used it. A trim may therefore block.

use super::acquire::{release_range, trace_segment};
use super::{DynContext, Heap, RequestMode};
use crate::arena::Removed;
use crate::arena::fencing::synchronize;
use crate::blocks::table::{BlockState, Location, Segment, Slot};
use crate::config::SegmentPolicy;
use crate::config::errors::TrimError;
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::{Extents, SegmentEventKind};
use crate::stats::budget::Budgets;
use crate::sync::lock::{Lock, LockCell};
use crate::types::backend::BackendError;
use crate::types::ids::{SegmentId, StreamId};
use crate::types::units::{Units, bytes};
use crate::types::work;
use smallvec::SmallVec;

/// The released memory, and the driver's error if one ended the release.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Released {
    pub(crate) bytes: u64,
    pub(crate) error: Option<BackendError>,
}

impl Released {
    /// Adds a later result. The first error is kept.
    pub(crate) fn plus(self, later: Released) -> Released {
        Released { bytes: self.bytes + later.bytes, error: self.error.or(later.error) }
    }

    pub(crate) fn into_result(self) -> Result<u64, TrimError> {
        let Released { bytes: released_bytes, error } = self;
        error.map_or(Ok(released_bytes), |error| Err(TrimError::Backend { released_bytes, error }))
    }
}

impl<L: Lock> Heap<L> {
    /// Releases the free memory of a heap that holds more free bytes than its threshold (rule D5). Returns the driver's
    /// error, if any.
    #[inline]
    pub(crate) fn release_above_threshold(&mut self, context: &DynContext<'_, L>) -> Option<BackendError> {
        let threshold_bytes = self.config.release_threshold_bytes()?;
        // The memory of plans and of the quarantine is not free. Live allocations in plans count twice, so that a step
        // releases too little rather than too much.
        let in_use_bytes = self.ledger.usage().allocated_bytes() + self.plan_bytes();
        let free_bytes = self.arena.mapped_bytes().saturating_sub(in_use_bytes);
        if free_bytes <= threshold_bytes || self.is_asleep() {
            return None;
        }
        if free_bytes.saturating_sub(self.quarantined_bytes()) <= threshold_bytes {
            return None;
        }
        self.trim(context, None).error
    }

    /// Releases all free memory, or `goal_bytes` of it. Segments that an observer holds stay retired until it
    /// acknowledges them.
    ///
    /// A sleeping heap has no free memory. Trimming it is not an op, because one rank alone may trim to make room for a
    /// wake. It retries releases that the driver refused earlier, which the digest contains already.
    pub(crate) fn trim(&mut self, context: &DynContext<'_, L>, goal_bytes: Option<u64>) -> Released {
        if self.is_asleep() {
            return self.release_retired(context);
        }
        work::count(work::WORK_PER_TRIM);
        let (pool, stream) = (self.id.pool.0, self.id.group.first().map(|stream| stream.0));
        let span = tracing::debug_span!(target: "symmalloc", "heap.trim", pool, stream, goal_bytes);
        let _entered = span.enter();
        self.ledger.count_trim();
        let mapped_before = self.arena.mapped_bytes();
        let mut shrunk_bytes = 0;
        let mut failure = None;
        if let Err(error) = self.forget_stitched(context) {
            self.ledger.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
            failure = Some(error);
        }
        // Memory cannot be released while a stitched range aliases it. If nothing can be released, the trim does not
        // look at the segments, because a limit may cause a trim for each request that it refuses.
        let may_release = failure.is_none() && self.may_hold_free_granule();
        let segments = if may_release { self.arena.backed_segments() } else { Vec::new() };
        let granule = self.arena.rules().granule;
        let is_expandable = matches!(self.config.segments(), SegmentPolicy::Expandable(_));
        let whole = if is_expandable { self.arena.free_from(granule) } else { Vec::new() };
        let mut whole = whole.into_iter().peekable();
        for segment in segments {
            if goal_bytes.is_some_and(|goal_bytes| mapped_before - self.arena.mapped_bytes() >= goal_bytes) {
                break;
            }
            if self.is_unused(segment) {
                if !matches!(self.config.segments(), SegmentPolicy::Reserved { .. }) {
                    self.retire(context, segment);
                }
            } else if is_expandable && !self.log.is_observed() {
                let before = self.arena.mapped_bytes();
                let id = self.arena.segment(segment).id;
                while whole.next_if(|(earlier, _)| *earlier < id).is_some() {}
                let shrunk = self.shrink(context, std::iter::from_fn(|| whole.next_if(|(of, _)| *of == id)));
                shrunk_bytes += before - self.arena.mapped_bytes();
                if let Err(error) = shrunk {
                    self.ledger.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
                    failure = Some(error);
                    break;
                }
            }
        }
        self.ledger.fold(op_word(Mark::Trim, StreamId(0), 0), mapped_before - self.arena.mapped_bytes());
        self.arena.recycle_spent(context);
        let retired = self.release_retired(context);
        if retired.error.is_some() {
            // Memory that the driver fails to release counts toward the limits, so later decisions may differ from
            // other ranks'.
            self.ledger.fold(op_word(Mark::RefusedByDriver, StreamId(0), 0), 0);
        }
        let released = Released { bytes: shrunk_bytes, error: failure }.plus(retired);
        tracing::debug!(
            name: "heap.trimmed",
            target: "symmalloc",
            pool,
            stream,
            released_bytes = released.bytes,
            mapped_bytes = self.arena.mapped_bytes(),
        );
        if let Released { bytes: released_bytes, error: Some(error) } = &released {
            tracing::warn!(name: "trim.failed", target: "symmalloc", pool, stream, released_bytes, %error);
        }
        released
    }

    /// Destroys the heap, which has no live allocations: it refuses requests from then on, and releases all memory,
    /// including reserved segments.
    pub(crate) fn destroy(&mut self, context: &DynContext<'_, L>) -> Released {
        let mode = std::mem::replace(&mut self.mode, RequestMode::Closed);
        self.ledger.close();
        self.retire_all(context, &mode);
        self.release_retired(context)
    }

    /// Retires every segment. A segment of a heap that was asleep has only the memory that is still mapped.
    fn retire_all(&mut self, context: &DynContext<'_, L>, mode: &RequestMode) {
        self.dissolve_plans(context);
        // Stitched ranges are removed first: memory is not unmapped before its aliases.
        let mut segments = self.arena.segments_in_order();
        segments.sort_by_key(|segment| !self.arena.segment(*segment).is_stitched);
        for segment in segments {
            let range = self.arena.segment(segment).range;
            let mapped = match mode {
                RequestMode::Asleep(mappings) => Some(mappings.mapped_in(range)),
                _ => None,
            };
            self.retire_with(context, segment, mapped);
        }
        self.arena.recycle_spent(context);
    }

    /// Releases everything at the end of the allocator, including live allocations and observed segments. Memory that
    /// the driver fails to release exists until its context ends.
    pub(crate) fn abandon(&mut self, context: &DynContext<'_, L>) {
        self.dissolve_plans(context);
        self.arena.abandon_live();
        let mode = std::mem::replace(&mut self.mode, RequestMode::Closed);
        self.retire_all(context, &mode);
        self.log.forget_all();
        // A failure stops the attempt: a lost device fails every further call as well.
        let _released = self.release_retired(context);
    }

    /// Returns `false` if no free block is as large as a granule of the device. In that case nothing can be released,
    /// because the free blocks of an unused segment are at least that large: neighbors are merged (I2).
    fn may_hold_free_granule(&self) -> bool {
        self.largest_free_bytes() >= bytes(self.arena.rules().tight_size(1))
    }

    fn is_unused(&self, segment: u32) -> bool {
        let is_in_use = |slot| {
            let state = self.arena.block(slot).state;
            matches!(state, BlockState::Allocated { .. } | BlockState::Planned | BlockState::Elsewhere)
        };
        // Free memory is still aliased by a stitched range only while nothing may be unmapped.
        let is_named = self.log.is_observed() && !self.stitched.is_empty();
        !is_named && !self.arena.blocks_of(segment).any(is_in_use)
    }

    /// Removes a segment without live allocations. Its memory is released once every observer has acknowledged.
    pub(super) fn retire(&mut self, context: &DynContext<'_, L>, segment: u32) {
        self.retire_with(context, segment, None);
    }

    /// Removes a segment. Its parts `left` are still mapped; `None` stands for all parts that its blocks cover.
    fn retire_with(&mut self, context: &DynContext<'_, L>, segment: u32, left: Option<Extents>) {
        let mut mapped = self.arena.extents_of(segment);
        let stitched = self.stitched.remove(segment);
        let size_bytes = if stitched.is_some() { 0 } else { mapped.iter().map(|(_, size)| size).sum() };
        let event = self.segment_event(SegmentEventKind::Death, segment, 0, size_bytes);
        let Removed { segment: dead, users: mut streams } = self.arena.remove_segment(segment);
        if let Some(range) = &stitched {
            mapped = range.mapped();
            streams.extend_from_slice(range.users());
        }
        mapped = left.unwrap_or(mapped);
        streams.sort_unstable();
        streams.dedup();
        trace_segment(&event);
        context.directory.lock().remove(dead.range);
        self.ledger.fold(op_word(Mark::Death, StreamId(0), size_bytes), Location::new(dead.id, 0).word());
        self.log.append_death(event, dead.range, mapped, dead.is_stitched, streams);
    }

    /// Releases the memory of removed segments, oldest first. After a failure, the rest stays retired, and the next
    /// call tries again to release it.
    pub(crate) fn release_retired(&mut self, context: &DynContext<'_, L>) -> Released {
        let mut bytes = 0;
        let error = self.try_release_retired(context, &mut bytes).err();
        Released { bytes, error }
    }

    fn try_release_retired(
        &mut self,
        context: &DynContext<'_, L>,
        released_bytes: &mut u64,
    ) -> Result<(), BackendError> {
        while let Some(retired) = self.log.first_released() {
            let released_before = *released_bytes;
            while let Some(stream) = retired.streams.last().copied() {
                synchronize(context, stream)?;
                retired.streams.pop();
            }
            while let Some((offset_bytes, size_bytes)) = retired.mapped.last().copied() {
                context.backend.unmap(retired.range, offset_bytes, size_bytes)?;
                retired.mapped.pop();
                if !retired.is_stitched {
                    Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &context.budget }
                        .release(size_bytes);
                    *released_bytes += size_bytes;
                }
            }
            release_range(&context.backend, self.addresses.as_deref(), retired.range)?;
            self.log.drop_first_released();
            tracing::debug!(
                name: "segment.release",
                target: "symmalloc",
                pool = self.id.pool.0,
                stream = self.id.group.first().map(|stream| stream.0),
                size_bytes = *released_bytes - released_before,
            );
        }
        Ok(())
    }

    /// Releases the memory of every whole granule in a segment's free blocks, in offset order. The driver is called
    /// first: if the call fails, the block stays free and keeps its memory.
    fn shrink(
        &mut self,
        context: &DynContext<'_, L>,
        free: impl Iterator<Item = (SegmentId, Slot)>,
    ) -> Result<(), BackendError> {
        let mut synchronized: SmallVec<[StreamId; 2]> = SmallVec::new();
        for (_, slot) in free {
            let block = self.arena.block(slot);
            let granule = self.arena.rules().granule;
            let (from, to) = (block.offset().next_multiple_of(granule), block.end() / granule * granule);
            if from >= to {
                continue;
            }
            for stream in self.arena.streams_of(slot) {
                if !synchronized.contains(&stream) {
                    synchronize(context, stream)?;
                    synchronized.push(stream);
                }
            }
            self.give_memory_back(context, slot, from, to)?;
        }
        Ok(())
    }

    /// Releases the memory of `from..to`, which are whole granules of a free block. The host has already waited for the
    /// block's users.
    fn give_memory_back(
        &mut self,
        context: &DynContext<'_, L>,
        slot: Slot,
        from: Units,
        to: Units,
    ) -> Result<(), BackendError> {
        let segment = self.arena.block(slot).segment;
        let Segment { id, range, .. } = *self.arena.segment(segment);
        context.backend.unmap(range, bytes(from), bytes(to - from))?;
        self.budgets(context).release(bytes(to - from));
        self.arena.cut_hole(slot, from, to);
        self.log_segment(SegmentEventKind::Shrink, segment, from, bytes(to - from));
        let shrunk = Location::new(id, from);
        self.ledger.fold(op_word(Mark::Shrink, StreamId(0), bytes(to - from)), shrunk.word());
        Ok(())
    }
}
