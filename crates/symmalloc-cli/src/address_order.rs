//! A model of PyTorch 2.11's placement rule, for comparison: free blocks in address order, and events polled on the host.
//!
//! This models PyTorch 2.11's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`) closely enough to make the same placements and
//! reserve the same memory. Next to our allocator and on the same trace, it shows how two properties of PyTorch's allocator make ranks
//! differ: the order of free blocks, and the polling of events. PyTorch 2.12 and later order free blocks by a counter instead of by
//! address, but still poll:
//!
//! ```text
//! free blocks   ordered by (stream, size, ADDRESS)      the driver returns different addresses on each rank
//! other uses    record_stream ► at free: an event per stream, the block is set aside
//!                             ► at each allocation: POLL; done ► the block is free     the time differs between ranks
//! ```
//!
//! The rules, in bytes (K = 2^10, M = 2^20):
//!
//! | | small: request ≤ 1 M | large |
//! |---|---|---|
//! | rounding | 512 | 512 |
//! | fixed segment | 2 M | 20 M for requests below 10 M, else a multiple of 2 M |
//! | fixed: split if the rest is | ≥ 512 | > 1 M |
//! | expandable: page | 2 M | 20 M |
//! | expandable: split if the rest is | ≥ 512 | ≥ 512 |
//!
//! A PyTorch snapshot states when each free that waited for events was completed. [`AddressOrder::with_completions`] completes frees at
//! these points instead of by simulated events.
//!
//! A free block merges with its free neighbors immediately. The driver is a [`SimBackend`]. Its addresses and its event
//! timing are determined by (seed, rank), so a rank always replays identically, and two ranks differ as real ones do.
//!
//! Of the settings that are off by default, the model supports the maximum split size and power-of-two rounding
//! ([`AddressOrder::with_rules`]). It omits garbage collection, the flush when memory runs out (its memory is unlimited) and graph
//! capture. It ignores the configuration of the program's pools, but keeps the pools separate.

mod blocks;
mod expandable;
mod rules;

use blocks::{BlockKey, Blocks, Class, List, ModelBlock, ModelState};
use rules::{ModelRules, SMALL_MAX_BYTES};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use symmalloc_core::backend::{Backend, BackendError, Event, Range, Reason};
use symmalloc_core::config::PoolConfig;
use symmalloc_core::ids::{AllocationId, Placement, PoolId, SegmentId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::work;
use symmalloc_sim::{Delays, SimBackend, SplitMix64};
use symmalloc_trace::replay::Program;

/// Each rank draws its maximum event delay at random: a power of two, in ticks, whose exponent is below this bound.
const EVENT_TICKS_MAX_LOG2: u64 = 11;

/// Policy by which the model obtains memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelSegments {
    /// Obtains a segment of fixed size whenever no free block fits. This is PyTorch's default.
    Fixed,
    /// Grows one address range per pool, stream and size class (small or large): PyTorch's `expandable_segments`.
    Expandable,
}

/// Memory that the model maps or unmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelChange {
    pub(crate) is_mapped: bool,
    pub(crate) pool: PoolId,
    pub(crate) stream: StreamId,
    pub(crate) segment: SegmentId,
    pub(crate) offset_bytes: u64,
    pub(crate) size_bytes: u64,
}

/// One rank of a job under the rule of PyTorch 2.11. See the [module documentation](self).
#[derive(Debug)]
pub struct AddressOrder {
    rules: ModelRules,
    device: SimBackend,
    blocks: Blocks,
    /// All segments ever created, in order of creation.
    born: Vec<ModelSegment>,
    /// Memory mapped and unmapped since [`take_changes`](Self::take_changes).
    changes: Vec<ModelChange>,
    /// Live allocations, indexed by id: the ids of a program are dense.
    allocations: Vec<Option<Allocation>>,
    /// Pending events of each stream in the order of recording, each with the block that waits for it.
    pending: BTreeMap<StreamId, VecDeque<(Event, BlockKey)>>,
    requested_bytes: u64,
    requested_bytes_peak: u64,
    /// The completions that the recording states; `None` if simulated events complete frees.
    completions: Option<Completions>,
}

/// The condition that completes the free of memory that other streams used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Completion {
    /// The events of the streams that used the memory.
    Events,
    /// A completion in the recording.
    Recorded,
}

/// Frees that the recording completes after a delay. The delay is measured in entries of the recording: ops and completions.
#[derive(Debug, Default)]
struct Completions {
    /// Blocks by the number of entries at which their completion is due, then by op.
    due: BTreeMap<(u64, usize), BlockKey>,
    /// Number of entries so far.
    entries: u64,
}

#[derive(Debug)]
struct ModelSegment {
    range: Range,
    alive: bool,
}

#[derive(Debug)]
struct Allocation {
    block: BlockKey,
    requested_bytes: u64,
    /// Streams that use the allocation, apart from its own.
    uses: BTreeSet<StreamId>,
}

impl AddressOrder {
    /// Creates a rank of the job with this `seed`.
    pub fn new(seed: u64, segments: ModelSegments, rank: u32) -> Self {
        let ticks = 1 << SplitMix64::new(seed).split(rank.into()).below(EVENT_TICKS_MAX_LOG2);
        let device = SimBackend::builder().seed(seed).rank(rank).delays(Delays::UpTo { ticks });
        AddressOrder::on(device.memory_bytes(u64::MAX).build(), segments)
    }

    /// Creates a rank whose driver is `device`.
    pub fn on(device: SimBackend, segments: ModelSegments) -> Self {
        let config = PoolConfig::builder();
        let config = match segments {
            ModelSegments::Fixed => config.fixed(),
            ModelSegments::Expandable => config.expandable(),
        };
        AddressOrder {
            rules: ModelRules::of(&config.build().expect("defaults are valid")),
            device,
            blocks: Blocks::default(),
            born: Vec::new(),
            changes: Vec::new(),
            allocations: Vec::new(),
            pending: BTreeMap::new(),
            requested_bytes: 0,
            requested_bytes_peak: 0,
            completions: None,
        }
    }

    /// Applies settings to all pools: the segment policy, and the settings that the model supports (see the [module
    /// documentation](self)). Call it before the first step.
    #[must_use]
    pub fn with_rules(mut self, config: &PoolConfig) -> Self {
        self.rules = ModelRules::of(config);
        self
    }

    /// Completes each free at the point at which the recording completed it, if the program states such a point for any free. Otherwise,
    /// simulated events complete frees. Call it before the first step, and run the program with [`step_of`](Self::step_of).
    #[must_use]
    pub fn with_completions(mut self, program: &Program) -> Self {
        self.completions = program.has_pending().then(Completions::default);
        self
    }

    /// Executes the op with this index of a program, counted from 0. See [`step`](Self::step).
    ///
    /// # Errors
    /// See [`step`](Self::step).
    pub fn step_of(&mut self, program: &Program, number: usize) -> Result<Option<Placement>, BackendError> {
        let op = &program.ops()[number];
        if self.completions.is_some() {
            self.complete(matches!(op, Op::DestroyPool { .. } | Op::Trim { .. } | Op::Synchronize { .. }));
        }
        let Some(completions) = &mut self.completions else { return self.step(op) };
        completions.entries += 1;
        let entries = completions.entries;
        let Op::Free { id } = op else { return self.step(op) };
        let Some(allocation) = self.live(*id) else { return self.step(op) };
        // The recording states completions, so a free without one was completed immediately.
        allocation.uses.clear();
        let Some(pending) = program.pending(number) else { return self.step(op) };
        let due = (entries.saturating_add(pending.entries()), number);
        let block = allocation.block;
        self.completions.get_or_insert_default().due.insert(due, block);
        self.device.tick(1);
        self.free(*id, Completion::Recorded)?;
        Ok(None)
    }

    /// Completes the frees that are due, or all pending frees.
    fn complete(&mut self, all: bool) {
        while let Some(completions) = &mut self.completions
            && let Some(next) = completions.due.first_entry()
            && (all || next.key().0 <= completions.entries)
        {
            let block = next.remove();
            completions.entries += 1;
            self.blocks.event_done(block);
        }
    }

    /// Executes an op as PyTorch does. Returns the placement of an allocation, with segments numbered in order of creation over the
    /// whole device, and `None` for other ops and for allocations without bytes. Ignores a free or a use of an id that is not
    /// live.
    ///
    /// # Errors
    /// Returns an error if a device call fails, because memory or addresses run out or because of an injected fault.
    /// The rank has then left the job, and the results of later calls are meaningless.
    pub fn step(&mut self, op: &Op) -> Result<Option<Placement>, BackendError> {
        self.device.tick(1);
        match *op {
            Op::Allocate { id, pool, stream, size_bytes } => return self.allocate(id, pool, stream, size_bytes),
            Op::Free { id } => self.free(id, Completion::Events)?,
            Op::RecordUse { id, stream } => {
                let blocks = &self.blocks;
                if let Some(allocation) = self.allocations.get_mut(id.index()).and_then(Option::as_mut)
                    && blocks.at(allocation.block).list.stream != stream
                {
                    allocation.uses.insert(stream);
                }
            }
            Op::Synchronize { stream } => self.device.synchronize(stream)?,
            Op::Trim { pool } => self.empty_cache(pool)?,
            Op::DestroyPool { pool } => self.empty_cache(Some(pool))?,
            // The model ignores waits: it only considers which streams use an allocation. Other ops have no counterpart in PyTorch.
            _ => {}
        }
        Ok(None)
    }

    /// Frees all live allocations in the order of their ids, each in a separate step.
    ///
    /// # Errors
    /// See [`step`](Self::step).
    pub fn free_all(&mut self) -> Result<(), BackendError> {
        self.complete(true);
        for index in 0..self.allocations.len() {
            if self.allocations[index].is_some() {
                self.step(&Op::Free { id: AllocationId(index as u64) })?;
            }
        }
        Ok(())
    }

    /// Removes and returns the memory mapped and unmapped since the last call, in order.
    pub(crate) fn take_changes(&mut self) -> Vec<ModelChange> {
        std::mem::take(&mut self.changes)
    }

    /// Returns the reserved device memory, in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.device.mapped_bytes()
    }

    /// Returns the peak of reserved device memory, in bytes.
    pub fn reserved_bytes_peak(&self) -> u64 {
        self.device.mapped_bytes_peak()
    }

    /// Returns the bytes that the program has requested and not freed.
    pub fn requested_bytes(&self) -> u64 {
        self.requested_bytes
    }

    /// Returns the peak of [`requested_bytes`](Self::requested_bytes).
    pub fn requested_bytes_peak(&self) -> u64 {
        self.requested_bytes_peak
    }

    /// Returns the number of live segments.
    pub fn segment_count(&self) -> usize {
        self.born.iter().filter(|segment| segment.alive).count()
    }

    /// Returns a live allocation.
    fn live(&mut self, id: AllocationId) -> Option<&mut Allocation> {
        self.allocations.get_mut(id.index()).and_then(Option::as_mut)
    }

    fn allocate(
        &mut self,
        id: AllocationId,
        pool: PoolId,
        stream: StreamId,
        requested_bytes: u64,
    ) -> Result<Option<Placement>, BackendError> {
        if requested_bytes == 0 {
            return Ok(None);
        }
        self.poll()?;
        let Some(size) = self.rules.block_bytes(requested_bytes) else {
            return Err(BackendError::new("reserve", 2, Reason::OutOfMemory));
        };
        let class = if size <= SMALL_MAX_BYTES { Class::Small } else { Class::Large };
        let list = List { pool, class, stream };
        let found = match self.rules.is_fixed() {
            true => self.blocks.best_fit(list, size),
            false => self.blocks.best_fit_expandable(list, size),
        };
        let found = found.filter(|&key| self.rules.accepts(class, size, self.blocks.at(key).size_bytes));
        let key = match found {
            Some(key) => key,
            None if self.rules.is_fixed() => self.fixed_segment(list, size)?,
            None => self.expanded_block(list, size)?,
        };
        let block = self.blocks.at(key);
        self.blocks.set_state(key, ModelState::Allocated);
        if self.rules.splits(class, size, block.size_bytes - size) {
            let rest = self.blocks.split(key, size);
            self.blocks.set_state(rest, ModelState::Free);
        }
        if self.allocations.len() <= id.index() {
            self.allocations.resize_with(id.index() + 1, || None);
        }
        self.allocations[id.index()] = Some(Allocation { block: key, requested_bytes, uses: BTreeSet::new() });
        self.requested_bytes += requested_bytes;
        self.requested_bytes_peak = self.requested_bytes_peak.max(self.requested_bytes);
        let base = self.born[block.segment.index()].range.base.0;
        Ok(Some(Placement { segment: block.segment, offset_bytes: block.address - base }))
    }

    /// Obtains a segment for a request, as one free block.
    fn fixed_segment(&mut self, list: List, size: u64) -> Result<BlockKey, BackendError> {
        let segment_bytes = self.rules.segment_bytes(list.class, size);
        let range = self.device.reserve(segment_bytes)?;
        self.device.map(range, 0, segment_bytes)?;
        let key = self.add_segment(list, range, ModelState::Free);
        self.note(true, &self.blocks.at(key), 0, segment_bytes);
        Ok(key)
    }

    /// Records that memory of a block's segment was mapped or unmapped.
    fn note(&mut self, is_mapped: bool, block: &ModelBlock, offset_bytes: u64, size_bytes: u64) {
        let List { pool, stream, .. } = block.list;
        self.changes.push(ModelChange { is_mapped, pool, stream, segment: block.segment, offset_bytes, size_bytes });
    }

    /// Adds a new segment as one block.
    fn add_segment(&mut self, list: List, range: Range, state: ModelState) -> BlockKey {
        let segment = SegmentId(self.born.len() as u32);
        self.born.push(ModelSegment { range, alive: true });
        let Range { base, size_bytes } = range;
        self.blocks.add(ModelBlock { address: base.0, size_bytes, segment, list, state })
    }

    fn free(&mut self, id: AllocationId, completion: Completion) -> Result<(), BackendError> {
        let live = self.allocations.get_mut(id.index()).and_then(Option::take);
        let Some(Allocation { block, requested_bytes, uses }) = live else { return Ok(()) };
        self.requested_bytes -= requested_bytes;
        let mut events = u32::from(completion == Completion::Recorded);
        for stream in uses {
            let event = self.device.record(stream)?;
            self.pending.entry(stream).or_default().push_back((event, block));
            events += 1;
        }
        let state = if events > 0 { ModelState::Pending { events } } else { ModelState::Free };
        self.blocks.set_state(block, state);
        Ok(())
    }

    /// Queries the oldest event of each stream, and the following ones until one is pending.
    fn poll(&mut self) -> Result<(), BackendError> {
        for queue in self.pending.values_mut() {
            work::count(1);
            while let Some(&(event, block)) = queue.front()
                && self.device.query(event)?
            {
                queue.pop_front();
                self.device.recycle(event);
                self.blocks.event_done(block);
            }
        }
        self.pending.retain(|_, queue| !queue.is_empty());
        Ok(())
    }

    /// Executes PyTorch's `emptyCache` for one pool or all pools: waits for every event, then releases memory that is entirely free.
    fn empty_cache(&mut self, pool: Option<PoolId>) -> Result<(), BackendError> {
        for (&stream, queue) in &mut self.pending {
            let mut index = 0;
            while let Some(&(event, block)) = queue.get(index) {
                work::count(1);
                if pool.is_some_and(|pool| pool != self.blocks.at(block).list.pool) {
                    index += 1;
                    continue;
                }
                self.device.synchronize(stream)?;
                queue.remove(index);
                self.device.recycle(event);
                self.blocks.event_done(block);
            }
        }
        for key in self.blocks.free_of(pool) {
            match self.rules.is_fixed() {
                true => self.release_if_whole(key)?,
                false => self.unmap_whole_pages(key)?,
            }
        }
        Ok(())
    }

    fn release_if_whole(&mut self, key: BlockKey) -> Result<(), BackendError> {
        let block = self.blocks.at(key);
        let segment = &mut self.born[block.segment.index()];
        if block.size_bytes != segment.range.size_bytes {
            return Ok(());
        }
        self.device.unmap(segment.range, 0, block.size_bytes)?;
        self.device.release(segment.range)?;
        segment.alive = false;
        self.blocks.remove(key);
        self.note(false, &block, 0, block.size_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
