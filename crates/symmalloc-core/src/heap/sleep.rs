//! Sleep and wake: a heap without memory that keeps all of its blocks. A part of [`Heap`].
//!
//! The blocks, the free index and the history are unchanged. Requests are refused on the path that compares steps with
//! plans, so an awake heap needs no additional check. Frees work as usual but release no memory.
//!
//! ```text
//!  mappings   memory, memory, ... in segment order, then its aliases in stitched ranges
//!             ├── mapped ──┤
//! ```
//! The list follows from segments and stitched ranges, which do not change while a heap sleeps. Waking maps from first
//! to last, and sleeping unmaps from last to first. Whichever driver call fails, the mapped entries are therefore a
//! prefix of the list, and memory exists whenever an alias maps it a second time.

use super::trim::Released;
use super::{DynContext, Heap, Shortage};
use crate::blocks::table::BlockState;
use crate::config::errors::OutOfMemoryCause;
use crate::config::op::Contents;
use crate::history::digest::{Mark, op_word};
use crate::history::segment_log::Extents;
use crate::plans::heap_plans::RequestMode;
use crate::sync::lock::Lock;
use crate::types::backend::{Part, Place};
use crate::types::ids::StreamId;
use crate::types::units::bytes;
use std::collections::BTreeSet;

/// The result of one mapping call.
#[derive(Clone, Copy)]
struct Mapping {
    at: Place,
    size_bytes: u64,
    /// The aliased memory, for a stitched range.
    source: Option<Place>,
}

impl Mapping {
    /// Returns the bytes of device memory that the mapping takes.
    fn memory_bytes(&self) -> u64 {
        if self.source.is_none() { self.size_bytes } else { 0 }
    }
}

impl<L: Lock> Heap<L> {
    pub(crate) fn is_asleep(&self) -> bool {
        self.mapped_asleep.is_some()
    }

    /// Returns the error for a request to a sleeping pool.
    #[cold]
    pub(super) fn refuse_asleep(&self) -> Box<Shortage> {
        Box::new(if self.is_closed() { Shortage::Closed } else { Shortage::Asleep })
    }

    /// Starts to refuse requests. The memory still exists, and no step is open.
    pub(crate) fn fall_asleep(&mut self) {
        if !self.is_asleep() {
            debug_assert!(self.request_mode == RequestMode::Ordinary);
            self.mapped_asleep = Some(self.mappings().len());
            self.set_request_mode(RequestMode::Refuse);
        }
    }

    /// Starts to serve requests. All memory exists. In an awake heap, an open step continues.
    pub(crate) fn wake_up(&mut self) {
        if self.mapped_asleep.take().is_some() {
            self.set_request_mode(RequestMode::Ordinary);
        }
    }

    /// Returns all mappings: the memory first, then its aliases.
    fn mappings(&self) -> Vec<Mapping> {
        let in_segments = self.table.backed_segments().into_iter().flat_map(|segment| {
            let range = self.table.segment(segment).range;
            let mapping = move |(offset, size_bytes)| Mapping { at: (range, offset), size_bytes, source: None };
            self.extents_of(segment).into_iter().map(mapping)
        });
        let mut mappings: Vec<Mapping> = in_segments.collect();
        let size_bytes = bytes(self.rules.granule);
        for stitched in &self.stitched {
            let range = self.table.segment(stitched.segment).range;
            for (granule, at) in stitched.granules.iter().zip(0..) {
                let Some(granule) = granule else { continue };
                let source = (self.table.segment(granule.segment).range, bytes(granule.offset));
                mappings.push(Mapping { at: (range, at * size_bytes), size_bytes, source: Some(source) });
            }
        }
        mappings
    }

    /// Returns the streams whose work may use the heap's memory.
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

    /// Returns `true` if a dead range still aliases memory of the heap, because an observer or the driver holds it.
    pub(crate) fn has_retired_stitched(&mut self, context: &DynContext<'_, L>) -> bool {
        self.log.has_stitched() && {
            let _tried = self.release_retired(context);
            self.log.has_stitched()
        }
    }

    /// Adds the runs of live blocks, each within one segment, in segment order. In an image, they are adjacent.
    pub(crate) fn add_live_parts(&self, parts: &mut Vec<Part>) {
        for segment in self.segments() {
            let first = parts.len();
            let slots = self.table.blocks_of(segment).flat_map(|slot| match self.table.block(slot).state {
                BlockState::Planned => self.live_places(),
                BlockState::Allocated { .. } => vec![slot],
                _ => Vec::new(),
            });
            for slot in slots {
                let (address, size_bytes) = (self.table.address(slot), bytes(self.table.block(slot).size));
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

    /// Returns the mapped and the unmapped device memory of a sleeping heap.
    pub(crate) fn asleep_bytes(&self) -> (u64, u64) {
        let Some(mapped) = self.mapped_asleep else { return (0, 0) };
        let sum = |mappings: &[Mapping]| mappings.iter().map(Mapping::memory_bytes).sum();
        let mappings = self.mappings();
        (sum(&mappings[..mapped]), sum(&mappings[mapped..]))
    }

    /// Removes and returns the mapped parts of a segment of a sleeping heap. The heap no longer has these mappings.
    pub(super) fn take_held(&mut self, segment: u32) -> Option<Extents> {
        let mapped = self.mapped_asleep?;
        let range = self.table.segment(segment).range;
        let mappings = self.mappings();
        let of_segment = mappings[..mapped].iter().filter(|mapping| mapping.at.0 == range);
        let held: Extents = of_segment.map(|mapping| (mapping.at.1, mapping.size_bytes)).collect();
        self.mapped_asleep = Some(mapped - held.len());
        Some(held)
    }

    /// Releases the memory of a sleeping heap to the device. No work may use it.
    pub(crate) fn unmap_asleep(&mut self, context: &DynContext<'_, L>) -> Released {
        let (mut released, mapped) = (Released::default(), self.mapped_asleep.unwrap_or(0));
        for (at, mapping) in self.mappings().iter().enumerate().take(mapped).rev() {
            let (range, offset_bytes) = mapping.at;
            if let Err(error) = context.backend.unmap(range, offset_bytes, mapping.size_bytes) {
                released.error = Some(error);
                break;
            }
            self.budgets(context).refund(mapping.memory_bytes());
            released.bytes += mapping.memory_bytes();
            self.mapped_asleep = Some(at);
        }
        released
    }

    /// Maps the memory of a sleeping heap at its old addresses. Returns the mapped bytes.
    pub(crate) fn map_asleep(&mut self, context: &DynContext<'_, L>) -> Result<u64, OutOfMemoryCause> {
        let Some(mapped) = self.mapped_asleep else { return Ok(0) };
        let mut mapped_bytes = 0;
        for (mapping, count) in self.mappings()[mapped..].iter().zip(mapped + 1..) {
            let Mapping { at, size_bytes, source } = *mapping;
            let charge = self.budgets(context).charge(mapping.memory_bytes())?;
            let mapped = match source {
                None => self.back(context, at.0, at.1, size_bytes),
                Some(source) => context.backend.alias(at, source, size_bytes),
            };
            mapped.map_err(OutOfMemoryCause::Driver)?;
            charge.confirm();
            mapped_bytes += mapping.memory_bytes();
            self.mapped_asleep = Some(count);
        }
        Ok(mapped_bytes)
    }

    /// Records that a sleep or a wake of the pool was requested. Its outcome is not part of the history: ranks that
    /// make the same calls have the same digests.
    pub(crate) fn note_asked(&mut self, asked: Option<Contents>) {
        if self.has_history() {
            let (mark, what) = asked.map_or((Mark::Wake, 0), |contents| (Mark::Sleep, contents as u64));
            self.fold(op_word(mark, StreamId(0), what), 0);
        }
    }
}
