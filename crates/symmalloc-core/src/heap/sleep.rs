//! Sleep and wake: a sleeping heap has no memory but keeps all of its blocks. A part of [`Heap`].
//!
//! The blocks, the free index and the history are unchanged. A sleeping heap is in the mode
//! [`Asleep`](RequestMode::Asleep), which refuses requests and owns the [`Mappings`] to release and to restore. Frees work
//! as usual but release no memory.

use super::acquire::back;
use super::trim::Released;
use super::{DynContext, Heap, RequestMode};
use crate::blocks::table::BlockState;
use crate::config::errors::OutOfMemoryCause;
use crate::config::op::Contents;
use crate::history::digest::{Mark, op_word};
use crate::plans::step::Step;
use crate::sleep::mappings::{Mapping, Mappings};
use crate::stats::budget::Budgets;
use crate::stitching::{Run, StitchedRange};
use crate::sync::lock::Lock;
use crate::types::backend::Part;
use crate::types::ids::StreamId;
use crate::types::units::bytes;
use crate::types::work;
use std::collections::BTreeSet;

impl<L: Lock> Heap<L> {
    /// Returns `true` if the heap refuses requests because its pool sleeps.
    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep().is_some()
    }

    /// Returns the mappings of a sleeping heap.
    pub(crate) fn asleep(&self) -> Option<&Mappings> {
        if let RequestMode::Asleep(mappings) = &self.mode { Some(mappings) } else { None }
    }

    /// Starts to refuse requests. At this time the memory still exists, and no step is open.
    pub(crate) fn fall_asleep(&mut self) {
        if !self.is_asleep() {
            debug_assert!(matches!(self.mode, RequestMode::Serving(Step::None)), "{:?}", self.mode);
            self.mode = RequestMode::Asleep(Box::new(Mappings::new(self.mappings())));
        }
    }

    /// Starts to serve requests again, after all memory was mapped. In a heap that is awake, an open step continues.
    pub(crate) fn wake_up(&mut self) {
        if self.is_asleep() {
            self.mode = RequestMode::Serving(Step::None);
        }
    }

    /// Returns all mappings: the memory first, then its aliases.
    fn mappings(&self) -> Vec<Mapping> {
        let in_segments = self.arena.backed_segments().into_iter().flat_map(|segment| {
            let range = self.arena.segment(segment).range;
            let mapping = move |(offset, size_bytes)| Mapping { at: (range, offset), size_bytes, source: None };
            self.arena.extents_of(segment).into_iter().map(mapping)
        });
        let mut mappings: Vec<Mapping> = in_segments.collect();
        let granule = self.arena.rules().granule;
        for stitched in self.stitched.ranges() {
            let range = self.arena.segment(stitched.segment()).range;
            for (offset, Run { start, size }) in stitched.mapped_pieces() {
                let home = self.arena.segment(start.segment).range;
                for at in (0..size).step_by(granule as usize) {
                    let source = (home, bytes(start.offset + at));
                    mappings.push(Mapping {
                        at: (range, bytes(offset + at)),
                        size_bytes: bytes(granule),
                        source: Some(source),
                    });
                }
            }
        }
        mappings
    }

    /// Returns the streams whose work may use the heap's memory.
    pub(crate) fn users(&self) -> BTreeSet<StreamId> {
        let mut users: BTreeSet<StreamId> = self.id.stream().into_iter().collect();
        users.extend(self.stitched.ranges().iter().flat_map(StitchedRange::users));
        for slot in self.arena.all_blocks().into_iter().chain(self.places().iter().copied()) {
            users.extend(self.arena.streams_of(slot));
            if let BlockState::Allocated { stream, .. } = self.arena.block(slot).state {
                users.insert(stream);
            }
        }
        users
    }

    /// Returns `true` if a dead stitched range still aliases memory of the heap, because an observer or the driver
    /// holds the range.
    pub(crate) fn has_retired_stitched(&mut self, context: &DynContext<'_, L>) -> bool {
        self.log.has_stitched() && {
            let _tried = self.release_retired(context);
            self.log.has_stitched()
        }
    }

    /// Adds the runs of adjacent live blocks, each within one segment, in segment order. In an image, all runs are
    /// adjacent.
    pub(crate) fn add_live_parts(&self, parts: &mut Vec<Part>) {
        for segment in self.segments() {
            let first = parts.len();
            let slots = self.arena.blocks_of(segment).flat_map(|slot| match self.arena.block(slot).state {
                BlockState::Planned => self.live_places(),
                // The program freed the blocks in a quarantine.
                BlockState::Allocated { .. } if !self.arena.block(slot).is_quarantined() => vec![slot],
                _ => Vec::new(),
            });
            for slot in slots {
                let (address, size_bytes) = (self.arena.address(slot), bytes(self.arena.block(slot).size));
                match parts[first..].last_mut() {
                    Some(part) if part.address.plus(part.size_bytes) == address => part.size_bytes += size_bytes,
                    _ => {
                        let last = parts.last();
                        let image_offset_bytes = last.map_or(0, |part| part.image_offset_bytes + part.size_bytes);
                        parts.push(Part { address, size_bytes, image_offset_bytes });
                    }
                }
            }
        }
    }

    /// Releases the memory of a sleeping heap to the device. No work may use the memory any more.
    pub(crate) fn unmap_asleep(&mut self, context: &DynContext<'_, L>) -> Released {
        let mut released = Released::default();
        let RequestMode::Asleep(mappings) = &mut self.mode else { return released };
        let outcome = mappings.unmap_all(|mapping| {
            work::count(work::WORK_PER_MAP);
            let (range, offset_bytes) = mapping.at;
            context.backend.unmap(range, offset_bytes, mapping.size_bytes)?;
            let budgets = Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &context.budget };
            budgets.release(mapping.memory_bytes());
            released.bytes += mapping.memory_bytes();
            Ok(())
        });
        released.error = outcome.err();
        released
    }

    /// Maps the memory of a sleeping heap at its old addresses. After an error, another call maps the rest.
    pub(crate) fn map_asleep(&mut self, context: &DynContext<'_, L>) -> Result<(), OutOfMemoryCause> {
        let RequestMode::Asleep(mappings) = &mut self.mode else { return Ok(()) };
        mappings.map_all(|mapping| {
            work::count(work::WORK_PER_MAP);
            let Mapping { at, size_bytes, source } = *mapping;
            let budgets = Budgets { heap: &self.budget, pool: &self.pool_budget, allocator: &context.budget };
            let charge = budgets.charge(mapping.memory_bytes())?;
            let mapped = match source {
                None => back(context, (&self.config, self.arena.rules()), at, size_bytes),
                Some(source) => context.backend.alias(at, source, size_bytes),
            };
            mapped.map_err(OutOfMemoryCause::Driver)?;
            charge.confirm();
            Ok(())
        })
    }

    /// Records that a sleep or a wake of the pool was requested. The outcome is not part of the history, so ranks that
    /// make the same calls have the same digests.
    pub(crate) fn note_asked(&mut self, asked: Option<Contents>) {
        if self.ledger.has_history() {
            let (mark, what) = asked.map_or((Mark::Wake, 0), |contents| (Mark::Sleep, contents as u64));
            self.ledger.fold(op_word(mark, StreamId(0), what), 0);
        }
    }
}
