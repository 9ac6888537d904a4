//! The state of a heap that other modules may read, and its history, which ranks compare.

use super::{Heap, HeapIdentity, RequestMode};
use crate::blocks::table::{Block, BlockState, Slot};
use crate::config::PoolConfig;
use crate::config::errors::HandleError;
use crate::config::op::Refusal;
use crate::config::size_rules::SizeClass;
use crate::history::digest::{Digest, Mark, op_word};
use crate::history::journal::{Journal, ProgramOrder};
use crate::history::segment_log::{Extents, SegmentEvent, SegmentEventKind, SegmentLog};
use crate::plans::report::StepStats;
use crate::pointers::PointerMap;
use crate::stats::budget::Budget;
use crate::stats::usage::{ClassStats, Stat, Usage};
use crate::sync::lock::Lock;
use crate::types::backend::{DeviceAddress, Range};
use crate::types::handle::{Allocation, Handle};
use crate::types::ids::{Placement, PoolId, SegmentId, StreamId};
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
    /// `true` if the peaks of `usage.all` are exact: for one heap, or for all heaps if one thread drives the allocator.
    /// All other peaks, including those by class, are sums of the heaps' peaks. These may have occurred at different
    /// times, so their sum is an upper bound.
    pub peaks_are_exact: bool,
}

/// A live segment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentSnapshot {
    /// Its pool.
    pub pool: PoolId,
    /// The stream of its heap; `None` if the pool's streams share a heap.
    pub stream: Option<StreamId>,
    /// Ordinal in its heap.
    pub segment: SegmentId,
    /// Address of its first byte. Differs between ranks.
    pub base: DeviceAddress,
    /// The size class of the requests that it serves. Only fixed segments separate small requests; all other segments
    /// are `Large`.
    pub class: SizeClass,
    /// Bytes that its blocks tile.
    pub size_bytes: u64,
    /// Bytes backed by memory.
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
        /// Requested bytes.
        requested_bytes: u64,
        /// The program's name for the allocation.
        name: Option<Box<str>>,
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
    pub(crate) fn identity(&self) -> HeapIdentity {
        self.identity
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the digest before the first op.
    pub(crate) fn first_digest(&self) -> Digest {
        Self::digest_before_ops(&self.config, bytes(self.rules.granule), self.identity.stream)
    }

    /// Returns the handle of the live allocation whose first byte is at an address.
    #[inline]
    pub(crate) fn handle_at(&self, address: DeviceAddress) -> Option<Handle> {
        let slot = self.pointers.as_ref()?.find(address).copied()?;
        match self.table.block(slot).state {
            BlockState::Allocated { serial, .. } => Some(self.handle(slot, serial)),
            _ => None,
        }
    }

    /// Returns the digest of an empty history. It includes all inputs of decisions other than ops, so that
    /// different configurations never agree.
    pub(super) fn digest_before_ops(config: &PoolConfig, granularity_bytes: u64, stream: Option<StreamId>) -> Digest {
        let mut digest = Digest::new(config.digest());
        digest.fold(granularity_bytes, stream.map_or(u64::MAX, |stream| stream.0.into()));
        Digest { ops: 0, ..digest }
    }

    /// Starts to index allocations by address.
    pub(crate) fn keep_pointers(&mut self) {
        self.pointers = Some(PointerMap::default());
    }

    /// Starts to remember the last ops, for agreement.
    pub(crate) fn keep_journal(&mut self, history_ops: u32, order: Arc<ProgramOrder>) {
        self.journal = Some(Box::new(Journal::new(history_ops, self.digest, order)));
    }

    /// Replaces the heap's history with the one that a digest represents. Its own ops no longer count, and the journal
    /// drops them.
    pub(super) fn begin_history(&mut self, digest: Digest) {
        self.digest = digest;
        if let Some(journal) = &mut self.journal {
            journal.begin(digest);
        }
    }

    /// Records that the pool is destroyed, which is the last op of the heap's history that ranks compare. Returns the
    /// mode before.
    pub(super) fn close(&mut self) -> RequestMode {
        if self.has_history() {
            self.fold(op_word(Mark::Destroy, StreamId(0), 0), 0);
        }
        self.closed_after_ops = Some(self.digest.ops);
        std::mem::replace(&mut self.mode, RequestMode::Closed)
    }

    /// Records that all ranks had this digest at this op, and forgets the history before it.
    pub(crate) fn settle(&mut self, digest: Digest) {
        // Depends on the agreed history, not on later ops of this rank.
        self.is_settled = self.closed_after_ops.is_some_and(|ops| ops <= digest.ops);
        if let Some(journal) = &mut self.journal {
            journal.agree(digest);
            if self.is_settled {
                journal.close();
            }
        }
    }

    /// Folds the refusal of a request for `size_bytes`.
    pub(crate) fn fold_refusal(&mut self, refusal: Refusal, stream: StreamId, size_bytes: u64) {
        self.fold(op_word(refusal.into(), stream, size_bytes), 0);
        self.rare.refusals += 1;
    }

    pub(crate) fn count_retry(&mut self) {
        self.rare.retries += 1;
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_deref()
    }

    /// Returns `true` if the heap has executed an op. A heap without ops was created for a request that failed early,
    /// for example because its pool was destroyed at the same time. It counts as absent: other ranks have no such heap,
    /// and neither has this rank after a restart.
    pub(crate) fn has_history(&self) -> bool {
        self.digest.ops > 0
    }

    pub(crate) fn take_journal(&mut self) -> Option<Box<Journal>> {
        self.journal.take()
    }

    /// Returns `true` if agreement has compared the whole history to its end.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Returns `true` if the heap was never used.
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

    /// Adds the heap's statistics, except for the bytes that it reserved.
    pub(crate) fn add_to(&self, stats: &mut MemoryStats) {
        let free_blocks = |class| self.free.keys(self.table.blocks(), class).count() as u64;
        stats.usage = stats.usage + self.usage.stats();
        stats.retired_bytes += self.log.retired_bytes();
        stats.segment_count += self.table.segment_count() as u64;
        stats.segments_born += u64::from(self.next_segment.0);
        stats.free_block_count += free_blocks(SizeClass::Small) + free_blocks(SizeClass::Large);
        stats.largest_free_bytes = stats.largest_free_bytes.max(self.largest_free_bytes());
        stats.steps = stats.steps + self.step_stats();
        stats.growth_count += self.rare.growths;
        stats.trim_count += self.rare.trims;
        stats.retry_count += self.rare.retries;
        stats.out_of_memory_count += self.rare.refusals;
    }

    pub(crate) fn log(&self) -> &SegmentLog {
        &self.log
    }

    pub(crate) fn log_mut(&mut self) -> &mut SegmentLog {
        &mut self.log
    }

    /// Returns `true` if an address range, live or dead, aliases memory.
    pub(crate) fn has_stitched(&self) -> bool {
        !self.stitched.is_empty() || self.log.has_stitched()
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Returns the ordinal of the next segment, which is the number of segments so far.
    pub(crate) fn next_segment(&self) -> SegmentId {
        self.next_segment
    }

    /// Returns the bytes of the largest free block.
    pub(crate) fn largest_free_bytes(&self) -> u64 {
        self.free.largest(self.table.blocks()).map_or(0, bytes)
    }

    /// Returns the live allocation of a handle.
    pub(crate) fn allocation(&self, handle: Handle) -> Result<Allocation, HandleError> {
        Ok(self.allocation_in(self.live(handle)?.slot, handle))
    }

    pub(super) fn allocation_in(&self, slot: Slot, handle: Handle) -> Allocation {
        let (address, placement) = (self.table.address(slot), self.placement(slot));
        Allocation { handle, address, placement, size_bytes: bytes(self.table.block(slot).size) }
    }

    /// Iterates over the live allocations outside of plans in (sequence, offset) order, each with its stream, requested
    /// bytes and name.
    pub(crate) fn live_allocations(&self) -> impl Iterator<Item = (Allocation, StreamId, u64, Option<&str>)> {
        self.all_blocks().into_iter().filter_map(|slot| match self.table.block(slot).state {
            BlockState::Allocated { stream, requested, serial } => {
                let name = self.names.find(slot).map(AsRef::as_ref);
                Some((self.allocation_in(slot, self.handle(slot, serial)), stream, requested, name))
            }
            _ => None,
        })
    }

    pub(super) fn placement(&self, slot: Slot) -> Placement {
        self.table.block(slot).location.placement()
    }

    /// Names a live allocation.
    pub(super) fn set_name(&mut self, slot: Slot, name: &str) {
        let placed = self.table.block(slot).location.word();
        if let Some(journal) = &mut self.journal {
            journal.name_allocation(placed, name);
        }
        self.names.insert(slot, name.into());
    }

    /// Returns the requested bytes of a live allocation.
    pub(crate) fn requested_bytes(&self, handle: Handle) -> Result<u64, HandleError> {
        Ok(self.live(handle)?.requested)
    }

    /// Returns the slots of the live segments in sequence order.
    pub(crate) fn segments(&self) -> Vec<u32> {
        self.table.segments_in_order()
    }

    /// Returns the slots of all blocks in (sequence, offset) order.
    pub(super) fn all_blocks(&self) -> Vec<Slot> {
        self.segments().into_iter().flat_map(|segment| self.table.blocks_of(segment)).collect()
    }

    /// Returns ordinal and range of a live segment, and the bytes that its blocks tile.
    pub(crate) fn segment(&self, segment: u32) -> (SegmentId, Range, u64) {
        let there = self.table.segment(segment);
        (there.id, there.range, bytes(there.end))
    }

    /// Returns the live segments with their blocks, in sequence order.
    pub(crate) fn snapshot(&self) -> Vec<SegmentSnapshot> {
        let snapshot = |slot: u32| {
            let segment = self.table.segment(slot);
            SegmentSnapshot {
                pool: self.identity.pool,
                stream: self.identity.stream,
                segment: segment.id,
                base: segment.range.base,
                class: self.table.block(self.table.first(slot)).class,
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
        for slot in self.table.blocks_of(segment) {
            let block = self.table.block(slot);
            if block.state != BlockState::Planned {
                blocks.push(self.block(slot));
                continue;
            }
            let mut at = block.offset();
            for place in self.live_places() {
                let there = self.table.block(place);
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
        let &Block { location, size, state, fences, .. } = self.table.block(slot);
        let others = self.fences.fences(fences).iter().map(|fence| fence.stream).collect();
        let state = match state {
            BlockState::Allocated { stream, requested: requested_bytes, .. } => {
                let name = self.names.find(slot).cloned();
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
    /// memory at its start, and a growth for each extent behind a hole.
    pub(crate) fn events_of_live_segment(&self, segment: u32) -> Vec<SegmentEvent> {
        let is_stitched = self.table.segment(segment).is_stitched;
        let mut extents = if is_stitched { Extents::new() } else { self.extents_of(segment) };
        if extents.first().is_none_or(|(from, _)| *from > 0) {
            extents.insert(0, (0, 0));
        }
        let kinds = std::iter::once(SegmentEventKind::Birth).chain(std::iter::repeat(SegmentEventKind::Growth));
        let event = |(kind, (from, size))| self.segment_event(kind, segment, from, size);
        kinds.zip(extents).map(event).collect()
    }

    /// Returns the mapped parts of a segment, between its holes.
    pub(super) fn extents_of(&self, segment: u32) -> Extents {
        let mut extents = Extents::new();
        for block in self.table.blocks_of(segment).map(|slot| self.table.block(slot)).filter(|block| !block.is_hole()) {
            let (offset, size_bytes) = (bytes(block.offset()), bytes(block.size));
            match extents.last_mut() {
                Some((from, size)) if *from + *size == offset => *size += size_bytes,
                _ => extents.push((offset, size_bytes)),
            }
        }
        extents
    }
}

/// Returns the free memory between places of plans.
fn free_gap(from: Units, to: Units) -> Option<BlockSnapshot> {
    let state = BlockStateSnapshot::Free { fenced_by: Vec::new() };
    (from < to).then(|| BlockSnapshot { offset_bytes: bytes(from), size_bytes: bytes(to - from), state })
}
