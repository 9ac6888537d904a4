//! Rules by which a heap that several streams share could prefer free blocks without waits, and the result of each.
//!
//! A model of the core, separate from it like [`fit_rules`](crate::fit_rules): growing ranges, best fit, and in
//! addition each free block's last owner and fences, and the streams' logical clocks. A request takes the first *ready*
//! block among its candidates: a block whose earlier users its stream need not wait for. Without one, it takes the best
//! fit. Candidates are in the order of the core, smallest first.
//!
//! ```text
//!  free blocks by size      5 of s1     6 of s0     6 of s1     9 of s0     80 of s1
//!  a request of 5 by s0     best fit    ready                   ready
//!  candidates               ─ Within 1/4 ─────────────────►
//!                           ─ First(2) ───────►
//!                           ─ AllButLargest ──────────────────────────►
//! ```

use crate::fit_rules::GRANULE_BYTES;
use crate::workload::{Step, Workload};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use symmalloc_core::ids::StreamId;

/// The unit to which the core rounds sizes, in bytes.
const UNIT_BYTES: u64 = 512;

/// The free blocks that a request may take because they are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidates {
    /// Only the best fit: the core's rule.
    BestFit,
    /// Blocks that are at most this many sixteenths of the request larger than it, and those of the best fit's size.
    Within {
        /// Sixteenths of the request.
        sixteenths: u64,
    },
    /// This many blocks from the best fit on.
    First(usize),
    /// All blocks that are smaller than the largest one.
    AllButLargest,
    /// All blocks that are large enough.
    All,
    /// Only the best fit. Requests of at most this size have a heap for each stream, and only larger ones share one.
    BestFitAbove {
        /// The largest size of a request that does not share.
        bytes: u64,
    },
}

/// The stream synchronization and the placements of one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pass {
    /// Recorded events.
    pub records: u64,
    /// Waits of a stream for an event.
    pub waits: u64,
    /// A hash of all placements.
    pub placements: u64,
}

/// The result of a rule on a job.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The final size of all ranges.
    pub reserved_bytes: u64,
    /// All passes, in order.
    pub passes: Vec<Pass>,
}

impl Outcome {
    /// Returns the number of the first pass with the placements of the last one. The first pass has the number 1.
    pub fn fixed_from(&self) -> Option<usize> {
        let last = self.passes.last()?.placements;
        self.passes.iter().position(|pass| pass.placements == last).map(|index| index + 1)
    }
}

impl Candidates {
    /// Runs a job several times on a heap that all its streams share, and on those of single streams that the rule adds.
    pub fn run(self, job: &Workload, passes: usize) -> Outcome {
        let mut clocks = Clocks::new(job.streams().into());
        // `None` is the heap that streams share.
        let mut heaps: BTreeMap<Option<StreamId>, Heap> = BTreeMap::new();
        let mut outcome = Outcome::default();
        for _ in 0..passes {
            let (mut live, mut hasher) = (vec![None; job.allocations()], DefaultHasher::new());
            clocks.pass = Pass::default();
            for step in job.steps() {
                match *step {
                    Step::Allocate { size_bytes: 0, .. } => {}
                    Step::Allocate { number, stream, size_bytes } => {
                        let size = size_bytes.next_multiple_of(UNIT_BYTES);
                        let heap = self.has_own_heap(size).then_some(stream);
                        let offset = heaps.entry(heap).or_default().allocate(self, &mut clocks, stream, size);
                        (heap, offset).hash(&mut hasher);
                        live[number as usize] = Some(Live { heap, offset, size, stream, uses: BTreeSet::new() });
                    }
                    Step::RecordUse { number, stream } => {
                        if let Some(block) = live[number as usize].as_mut().filter(|block| block.stream != stream) {
                            block.uses.insert(stream);
                        }
                    }
                    Step::Free { number, .. } => {
                        if let Some(block) = live[number as usize].take() {
                            let heap = heaps.get_mut(&block.heap).expect("the block was allocated there");
                            heap.free(&mut clocks, block);
                        }
                    }
                }
            }
            outcome.passes.push(Pass { placements: hasher.finish(), ..clocks.pass });
        }
        outcome.reserved_bytes = heaps.values().map(|heap| heap.end).sum();
        outcome
    }

    fn has_own_heap(self, size: u64) -> bool {
        matches!(self, Candidates::BestFitAbove { bytes } if size <= bytes)
    }
}

/// A live allocation, with the other streams that use it.
#[derive(Clone, Debug)]
struct Live {
    heap: Option<StreamId>,
    offset: u64,
    size: u64,
    stream: StreamId,
    uses: BTreeSet<StreamId>,
}

/// The end of a use, on its stream's clock. `has_event` if an event was recorded at that time.
#[derive(Clone, Copy, Debug)]
struct Fence {
    tick: u64,
    has_event: bool,
}

/// A free block. Its last owner has used it up to `since`, or never if that is 0.
#[derive(Clone, Debug)]
struct Free {
    size: u64,
    owner: StreamId,
    since: u64,
    fences: BTreeMap<StreamId, Fence>,
}

impl Free {
    fn fresh(size: u64, owner: StreamId) -> Self {
        Free { size, owner, since: 0, fences: BTreeMap::new() }
    }

    fn add_fence(&mut self, stream: StreamId, fence: Fence) {
        let there = self.fences.entry(stream).or_insert(fence);
        if fence.tick >= there.tick {
            *there = fence;
        }
    }

    /// Takes over the users of a neighbor.
    fn absorb(&mut self, other: Free) {
        other.fences.into_iter().for_each(|(stream, fence)| self.add_fence(stream, fence));
        if self.owner == other.owner {
            self.since = self.since.max(other.since);
        } else if self.since == 0 {
            (self.owner, self.since) = (other.owner, other.since);
        } else if other.since > 0 {
            self.add_fence(other.owner, Fence { tick: other.since, has_event: false });
        }
        self.size += other.size;
    }

    /// Returns the uses that a stream might have to wait for, in the order of the core.
    fn uses(&self) -> impl Iterator<Item = (StreamId, Fence)> {
        let owner = (self.owner, Fence { tick: self.since, has_event: false });
        self.fences.iter().map(|(stream, fence)| (*stream, *fence)).chain([owner])
    }
}

/// The logical clocks of all streams, and the synchronization of this pass.
#[derive(Debug, Default)]
struct Clocks {
    now: Vec<u64>,
    /// The tick of each other stream up to which each stream has waited.
    waited: Vec<BTreeMap<StreamId, u64>>,
    pass: Pass,
}

impl Clocks {
    fn new(streams: usize) -> Self {
        Clocks { now: vec![1; streams], waited: vec![BTreeMap::new(); streams], pass: Pass::default() }
    }

    /// Records an event. Returns the tick that it covers.
    fn record(&mut self, stream: StreamId) -> u64 {
        self.pass.records += 1;
        self.now[stream.index()] += 1;
        self.now[stream.index()] - 1
    }

    fn covers(&self, taker: StreamId, stream: StreamId, tick: u64) -> bool {
        let waited = || self.waited[taker.index()].get(&stream).copied().unwrap_or(0);
        tick == 0 || taker == stream || tick <= waited()
    }

    /// Makes `taker` wait for a use, unless it has waited for it.
    fn order_after(&mut self, taker: StreamId, on: StreamId, fence: Fence) {
        if self.covers(taker, on, fence.tick) {
            return;
        }
        self.pass.waits += 1;
        let (tick, indirect) = if fence.has_event {
            (fence.tick, BTreeMap::new())
        } else {
            (self.record(on), self.waited[on.index()].clone())
        };
        for (stream, tick) in indirect.into_iter().chain([(on, tick)]).filter(|(stream, _)| *stream != taker) {
            let waited = self.waited[taker.index()].entry(stream).or_insert(tick);
            *waited = tick.max(*waited);
        }
    }
}

#[derive(Debug, Default)]
struct Heap {
    end: u64,
    /// Free blocks by offset, never adjacent.
    free: BTreeMap<u64, Free>,
    /// The same blocks, as (size, offset).
    by_size: BTreeSet<(u64, u64)>,
}

impl Heap {
    fn allocate(&mut self, candidates: Candidates, clocks: &mut Clocks, stream: StreamId, size: u64) -> u64 {
        let offset = self.choose(candidates, clocks, stream, size).unwrap_or_else(|| self.grow(stream, size));
        let mut block = self.remove(offset);
        for (on, fence) in block.uses().collect::<Vec<_>>() {
            clocks.order_after(stream, on, fence);
        }
        if block.size > size {
            block.size -= size;
            self.insert(offset + size, block);
        }
        offset
    }

    /// Returns the offset of the block to take.
    fn choose(&self, candidates: Candidates, clocks: &Clocks, stream: StreamId, size: u64) -> Option<u64> {
        let mut fitting = self.by_size.range((size, 0)..);
        let best = fitting.clone().next()?;
        let largest = self.by_size.last()?.0;
        let (size_max, count) = match candidates {
            Candidates::BestFit | Candidates::BestFitAbove { .. } => (best.0, 1),
            Candidates::Within { sixteenths } => ((size + size * sixteenths / 16).max(best.0), usize::MAX),
            Candidates::First(count) => (u64::MAX, count),
            Candidates::AllButLargest => ((largest - 1).max(best.0), usize::MAX),
            Candidates::All => (u64::MAX, usize::MAX),
        };
        let is_ready = |offset: &u64| self.free[offset].uses().all(|(on, fence)| clocks.covers(stream, on, fence.tick));
        let ready = fitting.by_ref().take(count).take_while(|(size, _)| *size <= size_max).find(|(_, at)| is_ready(at));
        Some(ready.unwrap_or(best).1)
    }

    /// Grows the range until the block fits at its end. Returns the offset of the free block there.
    fn grow(&mut self, stream: StreamId, size: u64) -> u64 {
        let at_end = self.free.last_key_value().filter(|(offset, block)| **offset + block.size == self.end);
        let missing = (size - at_end.map_or(0, |(_, block)| block.size)).next_multiple_of(GRANULE_BYTES);
        self.end += missing;
        self.release(self.end - missing, Free::fresh(missing, stream))
    }

    fn free(&mut self, clocks: &mut Clocks, Live { offset, size, stream, uses, .. }: Live) {
        let mut block = Free::fresh(size, stream);
        for on in uses {
            let tick = clocks.record(on);
            block.add_fence(on, Fence { tick, has_event: true });
        }
        block.since = clocks.now[stream.index()];
        self.release(offset, block);
    }

    /// Adds a free block, merged with its neighbors. Returns the offset of the result.
    fn release(&mut self, mut offset: u64, mut block: Free) -> u64 {
        let end = offset + block.size;
        let before = self.free.range(..offset).next_back().filter(|(at, block)| **at + block.size == offset);
        let before = before.map(|(at, _)| *at);
        if let Some(before) = before {
            let given = std::mem::replace(&mut block, self.remove(before));
            block.absorb(given);
            offset = before;
        }
        if self.free.contains_key(&end) {
            let mut next = self.remove(end);
            // The first merged neighbor absorbs the second.
            if before.is_none() {
                std::mem::swap(&mut block, &mut next);
            }
            block.absorb(next);
        }
        self.insert(offset, block);
        offset
    }

    fn insert(&mut self, offset: u64, block: Free) {
        self.by_size.insert((block.size, offset));
        self.free.insert(offset, block);
    }

    fn remove(&mut self, offset: u64) -> Free {
        let block = self.free.remove(&offset).expect("a free block starts there");
        assert!(self.by_size.remove(&(block.size, offset)), "both orders have the same blocks");
        block
    }
}
