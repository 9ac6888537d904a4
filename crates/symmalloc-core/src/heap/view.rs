//! The state of a heap that other modules may read. Nothing here changes it.

use super::Heap;
use crate::blocks::table::{Block, BlockState, QUARANTINED, Slot};
use crate::config::PoolConfig;
use crate::config::errors::HandleError;
use crate::config::size_rules::SizeClass;
use crate::history::digest::Digest;
use crate::history::segment_log::{Extents, SegmentEvent, SegmentEventKind, SegmentLog};
use crate::ledger::Ledger;
use crate::plans::report::StepStats;
use crate::stats::budget::Budget;
use crate::stats::usage::{ClassStats, RareCounts, Stat};
use crate::sync::lock::Lock;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{HeapId, HeapNumber, Placement, SegmentId, StreamGroup, StreamId};
use crate::types::units::{Units, bytes};
use std::sync::Arc;

/// Statistics of an allocator, a pool or a heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Usage by the program, by size class.
    pub usage: ClassStats,
    /// Bytes of device memory held, including dead segments that observers hold.
    pub reserved_bytes: Stat,
    /// Bytes of dead segments that observers hold or that the driver failed to release.
    pub retired_bytes: u64,
    /// Number of live segments.
    pub segment_count: u64,
    /// Number of segments created so far.
    pub segments_born: u64,
    /// Number of free blocks.
    pub free_block_count: u64,
    /// Bytes of the largest free block.
    pub largest_free_bytes: u64,
    /// Number of times that memory was acquired from the device: births and growths of segments.
    pub growth_count: u64,
    /// Number of trims of heaps, requested or automatic.
    pub trim_count: u64,
    /// Number of retries of requests, after an automatic trim or a failure callback.
    pub retry_count: u64,
    /// Number of requests that ended with [`OutOfMemory`](crate::config::errors::OutOfMemory).
    pub out_of_memory_count: u64,
    /// Steps and their use of plans.
    pub steps: StepStats,
    /// `true` if the peaks of `usage.all` are exact: for all heaps if one thread drives the allocator, and otherwise for one
    /// heap, if no destroyed pool had allocations since peaks were last reset.
    /// All other peaks, including those by class, are sums of the heaps' peaks. These may have occurred at different
    /// times, so their sum is an upper bound.
    pub peaks_are_exact: bool,
}

/// A live segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Its heap.
    pub heap: HeapId,
    /// Ordinal in its heap.
    pub segment: SegmentId,
    /// Address of its first byte. Differs between ranks.
    pub base: DeviceAddress,
    /// The size class of the requests that it serves. Only fixed segments separate small requests; all other segments
    /// are `Large`.
    pub class: SizeClass,
    /// Bytes that its blocks tile.
    pub size_bytes: u64,
    /// Bytes backed by memory while the pool is awake.
    pub mapped_bytes: u64,
    /// Its blocks in offset order.
    pub blocks: Vec<BlockSnapshot>,
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockSnapshot {
    /// Offset in its segment, in bytes.
    pub offset_bytes: u64,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Its state.
    pub state: BlockStateSnapshot,
}

/// The state of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockStateSnapshot {
    /// A live allocation.
    Allocated {
        /// The stream it was allocated for.
        stream: StreamId,
        /// Bytes that the program requested.
        requested_bytes: u64,
        /// The program's name for the allocation.
        name: Option<Arc<str>>,
        /// Other streams that use it.
        used_by: Vec<StreamId>,
    },
    /// Free.
    Free {
        /// Streams that its next user may have to wait for.
        fenced_by: Vec<StreamId>,
    },
    /// Memory that was released to the device; the addresses are kept.
    Hole,
    /// Memory that is allocated or free under other addresses of the heap: a stitched range aliases it, or the block is
    /// part of such a range.
    Elsewhere,
}

impl<L: Lock> Heap<L> {
    pub(crate) fn id(&self) -> HeapId {
        self.id
    }

    /// Returns the number of the heap in its allocator.
    pub(crate) fn number(&self) -> HeapNumber {
        self.number
    }

    /// Returns the record of the heap's decisions.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the digest before the first op.
    pub(crate) fn first_digest(&self) -> Digest {
        Self::digest_before_ops(&self.config, bytes(self.arena.rules().granule), self.id.group)
    }

    /// Returns the handle of the live allocation whose first byte is at an address.
    #[inline]
    pub(crate) fn handle_at(&self, address: DeviceAddress) -> Option<Handle> {
        let slot = self.ledger.pointers()?.find(address).copied()?;
        match self.arena.block(slot).state {
            BlockState::Allocated { serial, .. } => Some(self.handle(slot, serial)),
            _ => None,
        }
    }

    /// Returns the digest of an empty history. It includes all inputs of decisions other than ops, so that
    /// different configurations never agree.
    pub(super) fn digest_before_ops(config: &PoolConfig, granularity_bytes: u64, group: StreamGroup) -> Digest {
        let mut digest = Digest::new(config.digest());
        digest.fold(granularity_bytes, if group == StreamGroup::All { u64::MAX } else { group.code().into() });
        Digest { ops: 0, ..digest }
    }

    /// Returns `true` if the heap was never used.
    pub(crate) fn is_fresh(&self) -> bool {
        !self.ledger.has_history() && self.arena.next_segment() == SegmentId(0)
    }

    pub(crate) fn budget(&self) -> &Budget<L> {
        &self.budget
    }

    /// Adds the heap's statistics, except for the bytes that it reserved.
    pub(crate) fn add_to(&self, stats: &mut MemoryStats) {
        let free_blocks = |class| self.arena.free_keys(class).count() as u64;
        stats.usage = stats.usage + self.ledger.usage().stats();
        stats.retired_bytes += self.log.retired_bytes();
        stats.segment_count += self.arena.segment_count() as u64;
        stats.segments_born += u64::from(self.arena.next_segment().0);
        stats.free_block_count += free_blocks(SizeClass::Small) + free_blocks(SizeClass::Large);
        stats.largest_free_bytes = stats.largest_free_bytes.max(self.largest_free_bytes());
        stats.steps = stats.steps + self.step_stats();
        let RareCounts { growths, trims, retries, refusals } = *self.ledger.counts();
        stats.growth_count += growths;
        stats.trim_count += trims;
        stats.retry_count += retries;
        stats.out_of_memory_count += refusals;
    }

    pub(crate) fn log(&self) -> &SegmentLog {
        &self.log
    }

    /// Returns `true` if an address range, live or dead, aliases memory.
    pub(crate) fn has_stitched(&self) -> bool {
        !self.stitched.is_empty() || self.log.has_stitched()
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.arena.mapped_bytes()
    }

    /// Returns the ordinal of the next segment, which is the number of segments so far.
    pub(crate) fn next_segment(&self) -> SegmentId {
        self.arena.next_segment()
    }

    /// Returns the bytes of the largest free block.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.arena.largest_free().map_or(0, bytes)
    }

    /// Returns the live allocation of a handle.
    pub(crate) fn allocation(&self, handle: Handle) -> Result<Allocation, HandleError> {
        let slot = self.live(handle)?.slot;
        Ok(Allocation { size_bytes: self.usable_bytes(slot), ..self.allocation_in(slot, handle) })
    }

    /// Returns the allocation in a slot.
    #[inline(always)]
    pub(super) fn allocation_in(&self, slot: Slot, handle: Handle) -> Allocation {
        let (address, placement) = (self.arena.address(slot), self.placement(slot));
        Allocation { handle, address, placement, size_bytes: bytes(self.arena.block(slot).size) }
    }

    /// Iterates over the live allocations outside of plans in (sequence, offset) order, each with its stream, requested
    /// bytes and name.
    pub(crate) fn live_allocations(&self) -> impl Iterator<Item = (Allocation, StreamId, u64, Option<&str>)> {
        self.arena.all_blocks().into_iter().filter_map(|slot| match self.arena.block(slot).state {
            BlockState::Allocated { stream, requested, serial } if serial != QUARANTINED => {
                let name = self.ledger.name_of(slot).map(|name| &**name);
                Some((self.allocation_in(slot, self.handle(slot, serial)), stream, requested, name))
            }
            _ => None,
        })
    }

    pub(super) fn placement(&self, slot: Slot) -> Placement {
        self.arena.block(slot).location.placement()
    }

    /// Returns the requested bytes of a live allocation.
    pub(crate) fn requested_bytes(&self, handle: Handle) -> Result<u64, HandleError> {
        Ok(self.config.debug().program_bytes(self.live(handle)?.requested))
    }

    /// Returns the stream of a live allocation.
    pub(crate) fn stream_of(&self, handle: Handle) -> Result<StreamId, HandleError> {
        Ok(self.live(handle)?.stream)
    }

    /// Returns the slots of the live segments in sequence order.
    pub(crate) fn segments(&self) -> Vec<u32> {
        self.arena.segments_in_order()
    }

    /// Returns ordinal and range of a live segment, and the bytes that its blocks tile.
    pub(crate) fn segment(&self, segment: u32) -> (SegmentId, Range, u64) {
        let there = self.arena.segment(segment);
        (there.id, there.range, bytes(there.end))
    }

    /// Returns the live segments with their blocks, in sequence order.
    pub(crate) fn snapshot(&self) -> Vec<SegmentSnapshot> {
        let snapshot = |slot: u32| {
            let segment = self.arena.segment(slot);
            SegmentSnapshot {
                heap: self.id,
                segment: segment.id,
                base: segment.range.base,
                class: self.arena.block(self.arena.first_block(slot)).class,
                size_bytes: bytes(segment.end),
                mapped_bytes: bytes(segment.mapped),
                blocks: self.blocks(slot),
            }
        };
        self.segments().into_iter().map(snapshot).collect()
    }

    /// Returns a segment's blocks in offset order. Blocks in the memory of plans replace that memory.
    fn blocks(&self, segment: u32) -> Vec<BlockSnapshot> {
        let mut blocks = Vec::new();
        for slot in self.arena.blocks_of(segment) {
            let block = self.arena.block(slot);
            if block.state != BlockState::Planned {
                blocks.push(self.block(slot));
                continue;
            }
            let mut at = block.offset();
            for place in self.live_places() {
                let there = self.arena.block(place);
                blocks.extend(free_gap(at, there.offset()));
                blocks.push(self.block(place));
                at = there.end();
            }
            blocks.extend(free_gap(at, block.end()));
        }
        blocks
    }

    /// Returns a block, or a place of a plan.
    fn block(&self, slot: Slot) -> BlockSnapshot {
        let &Block { location, size, state, .. } = self.arena.block(slot);
        let others = self.arena.fences_of(slot).iter().map(|fence| fence.stream).collect();
        let state = match state {
            // Its memory is free for the program, although the heap does not reuse it yet.
            BlockState::Allocated { serial: QUARANTINED, .. } => BlockStateSnapshot::Free { fenced_by: others },
            BlockState::Allocated { stream, requested: requested_bytes, .. } => {
                let name = self.ledger.name_of(slot).cloned();
                let requested_bytes = self.config.debug().program_bytes(requested_bytes);
                BlockStateSnapshot::Allocated { stream, requested_bytes, name, used_by: others }
            }
            BlockState::Free { .. } => BlockStateSnapshot::Free { fenced_by: others },
            BlockState::Hole => BlockStateSnapshot::Hole,
            BlockState::Elsewhere => BlockStateSnapshot::Elsewhere,
            BlockState::Planned | BlockState::Vacant => unreachable!("a segment's snapshot contains no such block"),
        };
        BlockSnapshot { offset_bytes: bytes(location.offset()), size_bytes: bytes(size), state }
    }

    /// Returns the events that an observer would have received for a live segment from the start: a birth with the
    /// memory at its start, and a growth for each extent after a hole.
    pub(crate) fn events_of_live_segment(&self, segment: u32) -> Vec<SegmentEvent> {
        let is_stitched = self.arena.segment(segment).is_stitched;
        let mut extents = if is_stitched { Extents::new() } else { self.arena.extents_of(segment) };
        if extents.first().is_none_or(|(from, _)| *from > 0) {
            extents.insert(0, (0, 0));
        }
        let kinds = std::iter::once(SegmentEventKind::Birth).chain(std::iter::repeat(SegmentEventKind::Growth));
        let event = |(kind, (from, size))| self.segment_event(kind, segment, from, size);
        kinds.zip(extents).map(event).collect()
    }
}

/// Returns the free memory between places of plans.
fn free_gap(from: Units, to: Units) -> Option<BlockSnapshot> {
    let state = BlockStateSnapshot::Free { fenced_by: Vec::new() };
    (from < to).then(|| BlockSnapshot { offset_bytes: bytes(from), size_bytes: bytes(to - from), state })
}
