//! Sleep and wake: a heap without memory, and with all of its blocks. A part of [`Heap`].
//!
//! The blocks, the free index and the history stay what they are. Requests are refused where those of steps are compared with plans,
//! so that an allocation in a heap that is awake looks at nothing more. Frees go their ordinary way, but give nothing back. What
//! is mapped, and what is not, stands in [`Dormant`].

use super::fencing::synchronize;
use super::trim::Released;
use super::{Context, Heap, Shortage};
use crate::blocks::table::BlockState;
use crate::config::errors::OutOfMemoryCause;
use crate::config::op::Contents;
use crate::history::digest::{Mark, op_word};
use crate::plans::follower::Watch;
use crate::sleep::dormant::{Dormant, Mapping};
use crate::sync::lock::Lock;
use crate::types::backend::{Backend, BackendError, DeviceAddress, Part};
use crate::types::ids::StreamId;
use crate::types::units::{bytes, units};
use std::collections::BTreeSet;

impl<L: Lock> Heap<L> {
    pub(crate) fn is_asleep(&self) -> bool {
        self.dormant.is_some()
    }

    /// Why a request is refused while the pool sleeps.
    #[cold]
    pub(super) fn refuse_asleep(&self) -> Box<Shortage> {
        Box::new(if self.is_closed() { Shortage::Closed } else { Shortage::Asleep })
    }

    /// From now on requests are refused. The memory is there still. No step is open.
    pub(crate) fn fall_asleep(&mut self) {
        debug_assert!(self.watch == Watch::Nothing && !self.is_asleep());
        self.dormant = Some(Box::new(Dormant::new(self.mappings())));
        self.set_watch(Watch::Refuse);
    }

    /// From now on requests are served. All memory is there.
    pub(crate) fn wake_up(&mut self) {
        self.dormant = None;
        self.set_watch(Watch::Nothing);
    }

    /// All that is mapped: the memory, then what names it a second time.
    fn mappings(&self) -> Vec<Mapping> {
        let mut mappings: Vec<Mapping> = Vec::new();
        for segment in self.table.homes_in_order() {
            let range = self.table.segment(segment).range;
            for block in
                self.table.blocks_of(segment).map(|slot| self.table.block(slot)).filter(|block| !block.is_hole())
            {
                let (offset_bytes, size_bytes) = (bytes(block.offset()), bytes(block.size));
                match mappings.last_mut() {
                    Some(last) if last.segment == segment && last.at.1 + last.size_bytes == offset_bytes => {
                        last.size_bytes += size_bytes;
                    }
                    _ => mappings.push(Mapping { segment, at: (range, offset_bytes), size_bytes, source: None }),
                }
            }
        }
        let size_bytes = bytes(self.rules.granule);
        for stitched in &self.stitched {
            let range = self.table.segment(stitched.segment).range;
            for (granule, at) in stitched.granules.iter().zip(0..) {
                let Some(granule) = granule else { continue };
                let source = (self.table.segment(granule.segment).range, bytes(granule.offset));
                let (segment, at) = (stitched.segment, (range, at * size_bytes));
                mappings.push(Mapping { segment, at, size_bytes, source: Some(source) });
            }
        }
        mappings
    }

    /// The streams whose work may use the heap's memory.
    pub(crate) fn users(&self) -> BTreeSet<StreamId> {
        let mut users: BTreeSet<StreamId> = self.identity.stream.into_iter().collect();
        users.extend(self.stitched.iter().flat_map(|stitched| stitched.users.iter()));
        for slot in self.all_blocks().into_iter().chain(self.places().iter().copied()) {
            users.extend(self.streams_of(slot));
            if let BlockState::Allocated { stream, .. } = self.table.block(slot).state {
                users.insert(stream);
            }
        }
        users
    }

    /// Whether what is dead names memory of the heap still: an observer holds it, or the driver does.
    pub(crate) fn has_retired_stitched<B: Backend>(&mut self, context: &Context<B, L>) -> bool {
        self.log.has_stitched() && {
            let _tried = self.release_retired(context);
            self.log.has_stitched()
        }
    }

    /// Runs of live blocks, each in one segment, in segment order.
    fn live_runs(&self) -> Vec<(DeviceAddress, u64)> {
        let mut runs: Vec<(DeviceAddress, u64)> = Vec::new();
        for segment in self.segments() {
            let first_run = runs.len();
            let slots = self.table.blocks_of(segment).flat_map(|slot| match self.table.block(slot).state {
                BlockState::Planned => self.live_places(),
                BlockState::Allocated { .. } => vec![slot],
                _ => Vec::new(),
            });
            for slot in slots {
                let (start, size) = (self.table.address(slot), bytes(self.table.block(slot).size));
                match runs[first_run..].last_mut() {
                    Some((address, size_bytes)) if address.plus(*size_bytes) == start => *size_bytes += size,
                    _ => runs.push((start, size)),
                }
            }
        }
        runs
    }

    /// What is to be saved, behind this many bytes of the image.
    pub(crate) fn parts_to_save(&mut self, image_bytes: &mut u64) -> Vec<Part> {
        let place = |(address, size_bytes)| {
            let part = Part { address, size_bytes, image_offset_bytes: *image_bytes };
            *image_bytes += size_bytes;
            part
        };
        let parts: Vec<Part> = self.live_runs().into_iter().map(place).collect();
        if let Some(dormant) = &mut self.dormant {
            dormant.save(parts.clone());
        }
        parts
    }

    /// What is to be made what it was: what was saved and is live still, or all that is live.
    pub(crate) fn parts_to_fill(&self, contents: Contents) -> Vec<Part> {
        match (contents, &self.dormant) {
            (Contents::Keep, Some(dormant)) => dormant.find_saved(&self.live_runs()),
            (Contents::Zero, _) => {
                let part = |(address, size_bytes)| Part { address, size_bytes, image_offset_bytes: 0 };
                self.live_runs().into_iter().map(part).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Device memory of a heap that sleeps: what is mapped, and what is not.
    pub(crate) fn dormant_bytes(&self) -> (u64, u64) {
        self.dormant.as_ref().map_or((0, 0), |dormant| dormant.memory_bytes())
    }

    /// What a segment has mapped while the heap sleeps.
    pub(super) fn mapped_asleep(&self, segment: u32) -> Option<impl Iterator<Item = (u64, u64)> + '_> {
        self.dormant.as_ref().map(|dormant| dormant.mapped_of(segment))
    }

    /// Gives the memory of a heap that sleeps back to the device. Nobody uses it.
    pub(crate) fn unmap_asleep<B: Backend>(&mut self, context: &Context<B, L>) -> Released {
        let mut released = Released::default();
        while let Some(mapping) = self.dormant.as_ref().and_then(|dormant| dormant.next_to_unmap()) {
            let (range, offset_bytes) = mapping.at;
            released.error = context.backend.unmap(range, offset_bytes, mapping.size_bytes).err();
            if released.error.is_some() {
                break;
            }
            self.budgets(context).refund(mapping.memory_bytes());
            released.bytes += mapping.memory_bytes();
            self.dormant.as_mut().expect("as before").note_unmapped();
        }
        released
    }

    /// Gives a heap that sleeps its memory, at its old addresses. Returns the bytes that were mapped.
    pub(crate) fn map_asleep<B: Backend>(&mut self, context: &Context<B, L>) -> Result<u64, Box<Shortage>> {
        let mut mapped_bytes = 0;
        while let Some(mapping) = self.dormant.as_ref().and_then(|dormant| dormant.next_to_map()) {
            let Mapping { at, size_bytes, .. } = mapping;
            let missing = units(size_bytes);
            let charged = self.budgets(context).charge(mapping.memory_bytes());
            let charge = charged.map_err(|cause| Shortage::of(missing, cause))?;
            let mapped = match mapping.source {
                None => self.back(context, at.0, at.1, size_bytes),
                Some(source) => context.backend.alias(at, source, size_bytes),
            };
            mapped.map_err(|error| Shortage::of(missing, OutOfMemoryCause::Driver(error)))?;
            charge.confirm();
            mapped_bytes += mapping.memory_bytes();
            self.dormant.as_mut().expect("as before").note_mapped();
        }
        Ok(mapped_bytes)
    }

    /// A sleep or a wake of the pool was asked for. What became of it is no part of the history: ranks that make the same calls have
    /// the same digests.
    pub(crate) fn note_asked(&mut self, asked: Option<Contents>) {
        if self.has_history() {
            let (mark, what) = asked.map_or((Mark::Wake, 0), |contents| (Mark::Sleep, contents as u64));
            self.fold(op_word(mark, StreamId(0), what), 0);
        }
    }
}

/// Waits on the host for the work of streams. On an error, says of which one it could not be waited for.
pub(crate) fn wait_for_all<B: Backend, L: Lock>(
    context: &Context<B, L>,
    streams: BTreeSet<StreamId>,
) -> Result<(), (StreamId, BackendError)> {
    streams.into_iter().try_for_each(|stream| synchronize(context, stream).map_err(|error| (stream, error)))
}
