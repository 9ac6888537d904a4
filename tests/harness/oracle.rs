//! The oracle: what the allocator must decide, worked out the slow way.
//!
//! It is written from the rules (D2, D5, PyTorch's size rules and the table of the core's `obtain`), not from the
//! core's code, and shares no data structure with it. Everything is in bytes, every question is a linear scan, and every
//! total is summed anew, so there is no state that could be out of step:
//!
//! ```text
//!  Oracle ─► pools ─► heaps by stream ─► segments in order of birth ─► blocks in order of offset
//!  best fit = min over all free blocks that are large enough of (size, segment, offset)
//! ```
//!
//! What it leaves out: fences as such (it knows only *who may have used* a block; that waits suffice is what the
//! simulator's race detector is for), digests, observers, and drivers that refuse.

use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::{Config, PoolConfig, Reclaim, RoundupPower2Divisions, SegmentPolicy, StreamPolicy};
use symmalloc_core::units::{MIB, SEGMENT_BYTES_MAX, UNIT_BYTES};
use symmalloc_core::{AllocationId, LimitScope, Op, Placement, PoolId, SegmentId, StreamId};

/// What an op comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An allocation was made.
    Placed {
        /// Where it lies.
        placement: Placement,
        /// Bytes of its block.
        size_bytes: u64,
    },
    /// Anything else was done.
    Done,
    /// Nothing was done.
    Refused(Refusal),
}

/// Why an op was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A configured limit.
    Limit(LimitScope),
    /// A reserved segment, or an address range, is too small.
    SegmentFull,
    /// No segment can be that large.
    TooLarge,
    /// The allocation is not live.
    NotLive,
    /// The pool does not exist any more.
    UnknownPool,
    /// The stream does not exist.
    UnknownStream,
    /// The pool cannot be destroyed.
    PoolInUse,
    /// The driver refused: the oracle never says so.
    Driver,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A live allocation.
    Allocated(AllocationId),
    /// Free.
    Free,
    /// Without memory.
    Hole,
}

/// A part of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// From the start of the segment.
    pub offset: u64,
    /// Its size.
    pub size: u64,
    /// What it is.
    pub content: Content,
    /// Every stream that may have used any of its bytes since the memory was obtained.
    pub users: BTreeSet<StreamId>,
}

impl Block {
    fn end(&self) -> u64 {
        self.offset + self.size
    }

    fn is_free(&self) -> bool {
        self.content == Content::Free
    }
}

/// A segment; its blocks tile it.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Birth ordinal in its heap.
    pub ordinal: u32,
    /// Its blocks in offset order.
    pub blocks: Vec<Block>,
    /// Address space.
    range: u64,
    /// Whether it is for small blocks only (fixed segments).
    is_small: bool,
}

impl Segment {
    /// Bytes that its blocks tile.
    pub fn end(&self) -> u64 {
        self.blocks.last().map_or(0, Block::end)
    }

    /// Bytes of them that are backed by memory.
    pub fn mapped(&self) -> u64 {
        self.blocks.iter().filter(|block| block.content != Content::Hole).map(|block| block.size).sum()
    }

    fn is_unused(&self) -> bool {
        !self.blocks.iter().any(|block| matches!(block.content, Content::Allocated(_)))
    }

    /// Replaces a block by parts that cover it, and merges what must not stand side by side.
    fn replace(&mut self, index: usize, parts: impl IntoIterator<Item = Block>) {
        self.blocks.splice(index..=index, parts.into_iter().filter(|part| part.size > 0));
        self.normalize();
    }

    fn normalize(&mut self) {
        let mut merged: Vec<Block> = Vec::new();
        for block in self.blocks.drain(..) {
            match merged.last_mut() {
                Some(last)
                    if last.content == block.content && matches!(block.content, Content::Free | Content::Hole) =>
                {
                    last.size += block.size;
                    last.users.extend(block.users);
                }
                _ => merged.push(block),
            }
        }
        while merged.last().is_some_and(|block| block.content == Content::Hole) {
            merged.pop();
        }
        self.blocks = merged;
    }

    fn extend(&mut self, size: u64) {
        let (offset, users) = (self.end(), BTreeSet::new());
        self.blocks.push(Block { offset, size, content: Content::Free, users });
        self.normalize();
    }
}

/// One (pool, stream), or a pool whose streams share.
#[derive(Clone, Debug, Default)]
pub struct Heap {
    /// Live segments in order of birth.
    pub segments: Vec<Segment>,
    born: u32,
}

/// A pool.
#[derive(Clone, Debug)]
pub struct Pool {
    config: PoolConfig,
    /// By stream; `None` when the streams share.
    pub heaps: BTreeMap<Option<StreamId>, Heap>,
}

/// How much may still be reserved.
#[derive(Clone, Copy, Debug)]
struct Headroom {
    pool: u64,
    all: u64,
}

impl Headroom {
    fn least(self) -> u64 {
        self.pool.min(self.all)
    }

    fn charge(self, missing: u64) -> Result<(), Shortage> {
        if missing > self.pool {
            return Err(Shortage::Limit(LimitScope::Pool, missing));
        }
        if missing > self.all {
            return Err(Shortage::Limit(LimitScope::Allocator, missing));
        }
        Ok(())
    }
}

enum Shortage {
    Limit(LimitScope, u64),
    SegmentFull,
}

#[derive(Clone, Debug)]
struct Live {
    pool: PoolId,
    /// `None` for an allocation of zero bytes.
    heap: Option<Option<StreamId>>,
    requested: u64,
}

/// See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Oracle {
    granularity: u64,
    limit: Option<u64>,
    streams: u32,
    pools: Vec<Option<Pool>>,
    live: BTreeMap<AllocationId, Live>,
}

impl Oracle {
    /// Before the first op.
    pub fn new(config: &Config, granularity_bytes: u64) -> Self {
        let default_pool = Pool { config: config.default_pool().clone(), heaps: BTreeMap::new() };
        Oracle {
            granularity: granularity_bytes,
            limit: config.limit_bytes(),
            streams: 0,
            pools: vec![Some(default_pool)],
            live: BTreeMap::new(),
        }
    }

    /// The live pools.
    pub fn pools(&self) -> impl Iterator<Item = (PoolId, &Pool)> {
        self.pools.iter().enumerate().filter_map(|(id, pool)| Some((PoolId(id as u32), pool.as_ref()?)))
    }

    /// Device memory held.
    pub fn reserved_bytes(&self) -> u64 {
        self.pools().map(|(_, pool)| pool.reserved_bytes()).sum()
    }

    /// Number of live allocations of at least one byte, and the bytes they asked for.
    pub fn live(&self) -> (u64, u64) {
        let live = self.live.values().filter(|live| live.heap.is_some());
        live.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.requested))
    }

    /// Carries an op out.
    pub fn step(&mut self, op: &Op) -> Outcome {
        let done = match op {
            Op::RegisterStream { stream } => {
                self.streams = self.streams.max(u32::from(stream.0) + 1);
                Ok(())
            }
            Op::CreatePool { pool, config } => {
                if self.pools.len() <= pool.index() {
                    self.pools.resize(pool.index() + 1, None);
                }
                let new = || Pool { config: (**config).clone(), heaps: BTreeMap::new() };
                self.pools[pool.index()].get_or_insert_with(new);
                Ok(())
            }
            Op::DestroyPool { pool } => self.destroy_pool(*pool),
            Op::Allocate { id, pool, stream, size_bytes } => {
                return match self.allocate(*id, *pool, *stream, *size_bytes) {
                    Ok((placement, size_bytes)) => Outcome::Placed { placement, size_bytes },
                    Err(refusal) => Outcome::Refused(refusal),
                };
            }
            Op::Free { id } => self.free(*id),
            Op::RecordUse { id, stream } => self.record_use(*id, *stream),
            Op::Reserve { pool, stream, size_bytes } => self.reserve(*pool, *stream, *size_bytes),
            Op::Trim { pool } => self.trim(*pool),
            Op::Wait { stream, on } => self.known(*stream).and_then(|()| self.known(*on)),
            Op::Synchronize { stream } => self.known(*stream),
            _ => Ok(()),
        };
        done.map_or_else(Outcome::Refused, |()| Outcome::Done)
    }

    fn known(&self, stream: StreamId) -> Result<(), Refusal> {
        if u32::from(stream.0) < self.streams { Ok(()) } else { Err(Refusal::UnknownStream) }
    }

    fn pool(&mut self, pool: PoolId) -> Result<&mut Pool, Refusal> {
        self.pools.get_mut(pool.index()).and_then(Option::as_mut).ok_or(Refusal::UnknownPool)
    }

    fn headroom(&mut self, pool: PoolId) -> Result<Headroom, Refusal> {
        let all = self.limit.map_or(u64::MAX, |limit| limit - self.reserved_bytes());
        let pool = self.pool(pool)?;
        Ok(Headroom { pool: pool.config.limit_bytes().map_or(u64::MAX, |limit| limit - pool.reserved_bytes()), all })
    }

    fn destroy_pool(&mut self, id: PoolId) -> Result<(), Refusal> {
        let pool = self.pool(id)?;
        if id == PoolId::DEFAULT || !pool.heaps.values().flat_map(|heap| &heap.segments).all(Segment::is_unused) {
            return Err(Refusal::PoolInUse);
        }
        self.pools[id.index()] = None;
        Ok(())
    }

    /// Tries, and when a limit is in the way gives back what `reclaim` allows and tries once more.
    fn persist<T>(
        &mut self,
        id: PoolId,
        key: Option<StreamId>,
        mut attempt: impl FnMut(&mut Heap, &PoolConfig, Headroom, u64) -> Result<T, Shortage>,
    ) -> Result<T, Refusal> {
        for is_last in [false, true] {
            let (headroom, granularity) = (self.headroom(id)?, self.granularity);
            let pool = self.pool(id)?;
            let config = pool.config.clone();
            let heap = pool.heaps.entry(key).or_default();
            match attempt(heap, &config, headroom, granularity) {
                Ok(done) => return Ok(done),
                Err(Shortage::SegmentFull) => return Err(Refusal::SegmentFull),
                Err(Shortage::Limit(scope, _)) if is_last => return Err(Refusal::Limit(scope)),
                Err(Shortage::Limit(_, missing)) => match config.reclaim() {
                    Reclaim::Heap => heap.trim(&config, granularity, Some(missing)),
                    Reclaim::Pool => {
                        pool.heaps.values_mut().for_each(|heap| heap.trim(&config, granularity, Some(missing)));
                    }
                    _ => {}
                },
            }
        }
        unreachable!("the last attempt returns")
    }

    fn allocate(
        &mut self,
        id: AllocationId,
        pool: PoolId,
        stream: StreamId,
        requested: u64,
    ) -> Result<(Placement, u64), Refusal> {
        let key = self.pool(pool)?.key(stream);
        self.known(stream)?;
        if requested == 0 {
            self.live.insert(id, Live { pool, heap: None, requested });
            return Ok((Placement::NOWHERE, 0));
        }
        if requested > SEGMENT_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        let placed = self.persist(pool, key, |heap, config, headroom, granularity| {
            let size = round(requested, config.roundup_power2_divisions());
            let place = match heap.best_fit(config, size).filter(|place| heap.accepts(config, size, *place)) {
                Some(place) => place,
                None => {
                    heap.obtain(config, headroom, granularity, size)?;
                    match config.segments() {
                        // Of two blocks that fit, one may have been refused before: the new segment is meant.
                        SegmentPolicy::Fixed(_) => (heap.segments.len() - 1, 0),
                        _ => heap.best_fit(config, size).expect("memory was obtained"),
                    }
                }
            };
            Ok(heap.take(config, size, place, id, stream))
        })?;
        self.live.insert(id, Live { pool, heap: Some(key), requested });
        Ok(placed)
    }

    /// The segment and the index of the block of a live allocation.
    fn find(&mut self, id: AllocationId) -> Result<Option<(&mut Segment, usize)>, Refusal> {
        let Live { pool, heap, .. } = *self.live.get(&id).ok_or(Refusal::NotLive)?;
        let Some(key) = heap else { return Ok(None) };
        let heap = self.pool(pool)?.heaps.get_mut(&key).expect("a live allocation has a heap");
        let found = heap.segments.iter_mut().find_map(|segment| {
            let index = segment.blocks.iter().position(|block| block.content == Content::Allocated(id))?;
            Some((segment, index))
        });
        Ok(Some(found.expect("a live allocation has a block")))
    }

    fn free(&mut self, id: AllocationId) -> Result<(), Refusal> {
        if let Some((segment, index)) = self.find(id)? {
            segment.blocks[index].content = Content::Free;
            segment.normalize();
        }
        let Live { pool, heap, .. } = self.live.remove(&id).expect("found above");
        let Some(key) = heap else { return Ok(()) };
        let granularity = self.granularity;
        let pool = self.pool(pool)?;
        if let Some(threshold) = pool.config.release_threshold_bytes() {
            let heap = pool.heaps.get_mut(&key).expect("a live allocation has a heap");
            if heap.free_bytes() > threshold {
                heap.trim(&pool.config, granularity, None);
            }
        }
        Ok(())
    }

    fn record_use(&mut self, id: AllocationId, stream: StreamId) -> Result<(), Refusal> {
        if !self.live.contains_key(&id) {
            return Err(Refusal::NotLive);
        }
        self.known(stream)?;
        if let Some((segment, index)) = self.find(id)? {
            segment.blocks[index].users.insert(stream);
        }
        Ok(())
    }

    fn reserve(&mut self, pool: PoolId, stream: StreamId, target: u64) -> Result<(), Refusal> {
        let key = self.pool(pool)?.key(stream);
        self.known(stream)?;
        if target > SEGMENT_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        self.persist(pool, key, |heap, config, headroom, granularity| {
            let held: u64 = heap.segments.iter().map(Segment::mapped).sum();
            if held >= target {
                return Ok(());
            }
            let missing = (target - held).next_multiple_of(granularity);
            match config.segments() {
                SegmentPolicy::Fixed(_) => heap.bear(headroom, missing, missing, false),
                SegmentPolicy::Reserved { .. } => heap.obtain(config, headroom, granularity, target),
                SegmentPolicy::Expandable(knobs) => {
                    heap.grow(headroom, granularity, knobs.range_bytes, granularity, missing)
                }
                _ => unimplemented_policy(),
            }
        })
    }

    fn trim(&mut self, pool: Option<PoolId>) -> Result<(), Refusal> {
        if let Some(pool) = pool {
            self.pool(pool)?;
        }
        let granularity = self.granularity;
        for (id, entry) in self.pools.iter_mut().enumerate() {
            if let Some(entry) = entry.as_mut().filter(|_| pool.is_none_or(|pool| pool.index() == id)) {
                entry.heaps.values_mut().for_each(|heap| heap.trim(&entry.config, granularity, None));
            }
        }
        Ok(())
    }
}

impl Pool {
    fn key(&self, stream: StreamId) -> Option<StreamId> {
        (self.config.streams() == StreamPolicy::Separate).then_some(stream)
    }

    /// Device memory held.
    pub fn reserved_bytes(&self) -> u64 {
        self.heaps.values().flat_map(|heap| &heap.segments).map(Segment::mapped).sum()
    }
}

impl Heap {
    fn free_bytes(&self) -> u64 {
        let blocks = self.segments.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.is_free()).map(|block| block.size).sum()
    }

    /// Rule D2: segment and block index of the best fit.
    fn best_fit(&self, config: &PoolConfig, size: u64) -> Option<(usize, usize)> {
        let is_small = is_small(config, size);
        let mut fits = Vec::new();
        for (s, segment) in self.segments.iter().enumerate().filter(|(_, segment)| segment.is_small == is_small) {
            for (b, block) in
                segment.blocks.iter().enumerate().filter(|(_, block)| block.is_free() && block.size >= size)
            {
                fits.push((block.size, segment.ordinal, block.offset, s, b));
            }
        }
        fits.into_iter().min().map(|(_, _, _, s, b)| (s, b))
    }

    /// Whether the best fit may be given out: PyTorch keeps blocks of at least `max_split_size` for requests of that size.
    fn accepts(&self, config: &PoolConfig, size: u64, (s, b): (usize, usize)) -> bool {
        let block = self.segments[s].blocks[b].size;
        match config.segments() {
            SegmentPolicy::Fixed(knobs) => match knobs.max_split_size_bytes {
                Some(max_split) if size < max_split => block < max_split,
                Some(_) => block < size + knobs.max_non_split_rounding_bytes,
                None => true,
            },
            _ => true,
        }
    }

    fn take(
        &mut self,
        config: &PoolConfig,
        size: u64,
        (s, b): (usize, usize),
        id: AllocationId,
        stream: StreamId,
    ) -> (Placement, u64) {
        let segment = &mut self.segments[s];
        let whole = segment.blocks[b].clone();
        let rest = whole.size - size;
        let is_split = match config.segments() {
            SegmentPolicy::Fixed(knobs) if !segment.is_small => {
                knobs.max_split_size_bytes.is_none_or(|max_split| size < max_split) && rest > MIB
            }
            _ => true,
        };
        let taken = if is_split { size } else { whole.size };
        let mut lower = Block { size: taken, content: Content::Allocated(id), ..whole.clone() };
        lower.users.insert(stream);
        let upper = Block { offset: whole.offset + taken, size: whole.size - taken, ..whole };
        let placement = Placement { segment: SegmentId(segment.ordinal), offset_bytes: lower.offset };
        segment.replace(b, [lower, upper]);
        (placement, taken)
    }

    /// Makes room for a block of this size that no free block can serve.
    fn obtain(&mut self, config: &PoolConfig, headroom: Headroom, granularity: u64, size: u64) -> Result<(), Shortage> {
        match config.segments() {
            SegmentPolicy::Fixed(knobs) => {
                let segment = match size {
                    small if small <= MIB => 2 * MIB,
                    medium if medium < knobs.large_segment_bytes / 2 => knobs.large_segment_bytes,
                    large => large.next_multiple_of(2 * MIB),
                };
                let segment = segment.next_multiple_of(granularity);
                self.bear(headroom, segment, segment, size <= MIB)
            }
            SegmentPolicy::Reserved { segment_bytes } => {
                let segment = segment_bytes.next_multiple_of(granularity);
                if !self.segments.is_empty() || size > segment {
                    return Err(Shortage::SegmentFull);
                }
                self.bear(headroom, segment, segment, false)
            }
            SegmentPolicy::Expandable(knobs) => {
                if self.fill_hole(headroom, granularity, size)? {
                    return Ok(());
                }
                let at_end = self.segments.last().and_then(|segment| segment.blocks.last());
                let at_end = at_end.filter(|block| block.is_free()).map_or(0, |block| block.size);
                let range = knobs.range_bytes.next_multiple_of(granularity);
                let missing = (size - at_end).next_multiple_of(granularity);
                let has_room = self.segments.last().is_some_and(|segment| segment.end() + missing <= segment.range);
                let missing = if has_room { missing } else { size.next_multiple_of(granularity) };
                self.grow(headroom, granularity, range, knobs.growth_bytes.next_multiple_of(granularity), missing)
            }
            _ => unimplemented_policy(),
        }
    }

    /// A new segment.
    fn bear(&mut self, headroom: Headroom, range: u64, mapped: u64, is_small: bool) -> Result<(), Shortage> {
        headroom.charge(mapped)?;
        let mut segment = Segment { ordinal: self.born, blocks: Vec::new(), range, is_small };
        segment.extend(mapped);
        self.segments.push(segment);
        self.born += 1;
        Ok(())
    }

    /// `missing` more bytes at the end of the newest range, or of a new one if it has no room for them. More than that
    /// up to a multiple of `step`, as far as the range and the limits go.
    fn grow(
        &mut self,
        headroom: Headroom,
        granularity: u64,
        range: u64,
        step: u64,
        missing: u64,
    ) -> Result<(), Shortage> {
        let range = range.next_multiple_of(granularity);
        let newest = self.segments.last_mut().filter(|segment| segment.end() + missing <= segment.range);
        let room = newest.as_ref().map_or(range, |segment| segment.range - segment.end());
        if missing > room {
            return Err(Shortage::SegmentFull);
        }
        let wanted = missing.next_multiple_of(step).min(room);
        let allowed = headroom.least() / granularity * granularity;
        let growth = wanted.min(allowed).max(missing);
        match newest {
            Some(segment) => {
                headroom.charge(growth)?;
                segment.extend(growth);
                Ok(())
            }
            None => self.bear(headroom, range, growth, false),
        }
    }

    /// Gives memory to the lowest hole that, with its free neighbours, then holds a block of this size.
    fn fill_hole(&mut self, headroom: Headroom, granularity: u64, size: u64) -> Result<bool, Shortage> {
        for segment in &mut self.segments {
            for index in 0..segment.blocks.len() {
                let hole = segment.blocks[index].clone();
                let free = |index: Option<usize>| {
                    let block = index.and_then(|index| segment.blocks.get(index));
                    block.filter(|block| block.is_free()).map_or(0, |block| block.size)
                };
                let (before, behind) = (free(index.checked_sub(1)), free(Some(index + 1)));
                if hole.content != Content::Hole || before + hole.size + behind < size {
                    continue;
                }
                let filled = (size - before).next_multiple_of(granularity).min(hole.size);
                headroom.charge(filled)?;
                let lower = Block { size: filled, content: Content::Free, ..hole.clone() };
                let upper = Block { offset: hole.offset + filled, size: hole.size - filled, ..hole };
                segment.replace(index, [lower, upper]);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Gives memory back, segment by segment, until `goal` bytes are given up.
    fn trim(&mut self, config: &PoolConfig, granularity: u64, goal: Option<u64>) {
        let mut given = 0;
        for segment in &mut self.segments {
            if goal.is_some_and(|goal| given >= goal) {
                break;
            }
            let before = segment.mapped();
            match config.segments() {
                SegmentPolicy::Reserved { .. } => {}
                _ if segment.is_unused() => segment.blocks.clear(),
                SegmentPolicy::Expandable(_) => segment.shrink(granularity),
                _ => {}
            }
            given += before - segment.mapped();
        }
        self.segments.retain(|segment| !segment.blocks.is_empty());
    }
}

impl Segment {
    /// Takes the memory of whole free granules away.
    fn shrink(&mut self, granularity: u64) {
        let mut parts = Vec::new();
        for block in self.blocks.drain(..) {
            let from = block.offset.next_multiple_of(granularity);
            let to = block.end() / granularity * granularity;
            if !block.is_free() || from >= to {
                parts.push(block);
                continue;
            }
            let part = |offset, end, content, users| Block { offset, size: end - offset, content, users };
            parts.push(part(block.offset, from, Content::Free, block.users.clone()));
            parts.push(part(from, to, Content::Hole, BTreeSet::new()));
            parts.push(part(to, block.end(), Content::Free, block.users));
        }
        self.blocks = parts.into_iter().filter(|block| block.size > 0).collect();
        self.normalize();
    }
}

fn is_small(config: &PoolConfig, size: u64) -> bool {
    matches!(config.segments(), SegmentPolicy::Fixed(_)) && size <= MIB
}

/// PyTorch's `round_size`: to 512 bytes, or to a fraction of the power of two below.
fn round(requested: u64, divisions: RoundupPower2Divisions) -> u64 {
    let index = (0..15).take_while(|index| requested >= 2 * MIB << index).count();
    let divisions = u64::from(divisions.divisions()[index]);
    if divisions > 1 && requested > UNIT_BYTES * divisions {
        let power = (0..63).map(|bit| 1 << bit).filter(|power| *power <= requested).max().expect("at least 1");
        requested.next_multiple_of(power / divisions)
    } else {
        requested.next_multiple_of(UNIT_BYTES)
    }
}

fn unimplemented_policy() -> ! {
    panic!("the oracle does not know this segment policy: teach it")
}
