//! What other rooms may see of a heap. Nothing here changes anything but statistics, the segment log and what agreement forgets.

use super::{Heap, HeapIdentity};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::errors::HandleError;
use crate::config::size_rules::SizeClass;
use crate::history::digest::Digest;
use crate::history::journal::Journal;
use crate::history::segment_log::{SegmentEvent, SegmentEventKind, SegmentLog};
use crate::stats::budget::Budget;
use crate::stats::usage::{RareCounts, Usage};
use crate::sync::lock::Lock;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{SegmentId, StreamId};
use crate::types::units::{Units, bytes};

/// A live segment, for reports, layouts and look-ups.
pub(crate) struct SegmentView {
    pub(crate) id: SegmentId,
    pub(crate) range: Range,
    pub(crate) class: SizeClass,
    /// Bytes that its blocks tile.
    pub(crate) size_bytes: u64,
    /// Bytes of them that are backed by memory.
    pub(crate) mapped_bytes: u64,
}

/// A block of a live segment.
pub(crate) struct BlockView<'a> {
    pub(crate) offset_bytes: u64,
    pub(crate) size_bytes: u64,
    pub(crate) state: BlockState,
    /// Allocated: other streams that use it. Free: streams that its next user may have to wait for.
    pub(crate) other_streams: Vec<StreamId>,
    /// What the program called the allocation.
    pub(crate) name: Option<&'a str>,
    /// Of a live allocation.
    pub(crate) allocation: Option<Allocation>,
}

impl<L: Lock> Heap<L> {
    pub(crate) fn identity(&self) -> HeapIdentity {
        self.identity
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// The digest before the first op.
    pub(crate) fn first_digest(&self) -> Digest {
        super::first_digest(&self.config, bytes(self.rules.granule), self.identity.stream)
    }

    /// The handle of the live allocation whose first byte is at an address.
    #[inline]
    pub(crate) fn handle_at(&self, address: DeviceAddress) -> Option<Handle> {
        let slot = self.pointers.as_ref()?.find(address)?;
        match self.table.block(slot).state {
            BlockState::Allocated { serial, .. } => Some(self.handle(slot, serial)),
            _ => None,
        }
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_deref()
    }

    /// Whether the heap has carried out an op. A heap without ops was made for a request that failed early, for example
    /// because its pool was destroyed at the same time. It counts as not there, since other ranks, and this one after a
    /// restart, have no such heap.
    pub(crate) fn has_history(&self) -> bool {
        self.digest.ops > 0
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed_after_ops.is_some()
    }

    /// Whether agreement has compared the whole history, to its end.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Whether nothing ever happened here.
    pub(crate) fn is_fresh(&self) -> bool {
        self.digest.ops == 0 && self.next_segment == SegmentId(0)
    }

    pub(crate) fn budget(&self) -> &Budget<L> {
        &self.budget
    }

    pub(crate) fn usage(&self) -> &Usage {
        &self.usage
    }

    pub(crate) fn usage_mut(&mut self) -> &mut Usage {
        &mut self.usage
    }

    pub(crate) fn rare_counts(&self) -> RareCounts {
        self.rare
    }

    pub(crate) fn log(&self) -> &SegmentLog {
        &self.log
    }

    pub(crate) fn log_mut(&mut self) -> &mut SegmentLog {
        &mut self.log
    }

    /// Whether addresses name memory a second time, or did and the driver has not taken them back.
    pub(crate) fn has_stitched(&self) -> bool {
        !self.stitched.is_empty() || self.log.has_stitched()
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// The ordinal of the next segment; the number of segments so far.
    pub(crate) fn next_segment(&self) -> SegmentId {
        self.next_segment
    }

    pub(crate) fn segment_count(&self) -> u64 {
        self.table.segment_count() as u64
    }

    pub(crate) fn free_block_count(&self) -> u64 {
        let count = |class| self.free.keys(self.table.blocks(), class).count() as u64;
        count(SizeClass::Small) + count(SizeClass::Large)
    }

    /// Bytes of the largest free block.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.free.largest(self.table.blocks()).map_or(0, bytes)
    }

    /// The live allocation behind a handle.
    pub(crate) fn allocation(&self, handle: Handle) -> Result<Allocation, HandleError> {
        let slot = self.live(handle)?.slot;
        let (address, placement) = (self.table.address(slot), self.placement(slot));
        Ok(Allocation { handle, address, placement, size_bytes: bytes(self.table.block(slot).size) })
    }

    /// Bytes that a live allocation was asked for with.
    pub(crate) fn requested_bytes(&self, handle: Handle) -> Result<u64, HandleError> {
        Ok(self.live(handle)?.requested)
    }

    /// The slots of the live segments, in sequence order.
    pub(crate) fn segments(&self) -> Vec<u32> {
        self.table.segments_in_order()
    }

    /// The slots of all blocks, in (sequence, offset) order.
    pub(super) fn all_blocks(&self) -> Vec<Slot> {
        self.segments().into_iter().flat_map(|segment| self.table.blocks_of(segment)).collect()
    }

    pub(crate) fn segment(&self, segment: u32) -> SegmentView {
        let there = self.table.segment(segment);
        SegmentView {
            id: there.id,
            range: there.range,
            class: self.table.block(self.table.first(segment)).class,
            size_bytes: bytes(there.end),
            mapped_bytes: bytes(there.mapped),
        }
    }

    /// A segment's blocks, in offset order. What lies in the memory of plans stands in place of that memory.
    pub(crate) fn blocks(&self, segment: u32) -> impl Iterator<Item = BlockView<'_>> {
        self.table.blocks_of(segment).flat_map(|slot| match self.table.block(slot).state {
            BlockState::Planned => self.views_of_plan_memory(slot),
            _ => vec![self.view(slot)],
        })
    }

    /// A block, or a place of a plan.
    pub(super) fn view(&self, slot: Slot) -> BlockView<'_> {
        let &Block { location, size, state, fences, .. } = self.table.block(slot);
        let (placement, size_bytes) = (location.placement(), bytes(size));
        let allocation = |serial| Allocation {
            handle: self.handle(slot, serial),
            address: self.table.address(slot),
            placement,
            size_bytes,
        };
        BlockView {
            offset_bytes: placement.offset_bytes,
            size_bytes,
            state,
            other_streams: self.fences.fences(fences).iter().map(|fence| fence.stream).collect(),
            name: self.names.find(slot),
            allocation: match state {
                BlockState::Allocated { serial, .. } => Some(allocation(serial)),
                _ => None,
            },
        }
    }

    /// What an observer that was there from the start would know of a live segment: a birth with the memory at its start,
    /// and growths for what lies behind holes.
    pub(crate) fn events_of_live_segment(&self, segment: u32) -> Vec<SegmentEvent> {
        let mut runs: Vec<(Units, Units)> = vec![(0, 0)];
        let is_stitched = self.table.segment(segment).is_stitched;
        let blocks = self.table.blocks_of(segment).map(|slot| self.table.block(slot));
        for block in blocks.filter(|block| !block.is_hole() && !is_stitched) {
            match runs.last_mut() {
                Some((from, size)) if *from + *size == block.offset() => *size += block.size,
                _ => runs.push((block.offset(), block.size)),
            }
        }
        let kinds = std::iter::once(SegmentEventKind::Birth).chain(std::iter::repeat(SegmentEventKind::Growth));
        let event = |(kind, (from, size))| self.segment_event(kind, segment, bytes(from), bytes(size));
        kinds.zip(runs).map(event).collect()
    }
}
