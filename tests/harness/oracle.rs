//! The oracle: computes the expected decisions of the allocator in a naive way.
//!
//! It is written from the rules (D2, D5, PyTorch's size rules and the table of the core's `obtain`), not from the core's code, and shares
//! no data structure with it. All quantities are in bytes, every query is a linear scan, and every total is recomputed, so no state can
//! become inconsistent:
//!
//! ```text
//!  Oracle ─► pools ─► heaps by streams ─► segments in order of birth ─► blocks in order of offset
//!  best fit = min over all free blocks that are large enough of (size, segment, offset)
//! ```
//!
//! The oracle does not model fences: it only knows which streams *may have used* a block, and the simulator's race
//! detector checks that waits suffice. It also omits digests, observers, and failing driver calls.

mod heap;
mod segment;
mod stitching;

pub use heap::Heap;
pub use segment::{Block, Content, Segment};

use heap::{Headroom, Shortage, round, unimplemented_policy};
use std::collections::BTreeMap;
use symmalloc_core::config::{Config, PoolConfig, Reclaim, SegmentPolicy, StreamPolicy};
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::units::SEGMENT_BYTES_MAX;
use symmalloc_core::{AllocationId, LimitScope, Op, Placement, PoolId, StreamId};

/// Outcome of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An allocation was created.
    Placed {
        /// Placement of the allocation.
        placement: Placement,
        /// Size of its block in bytes.
        size_bytes: u64,
    },
    /// Any other op was executed.
    Done,
    /// The op was refused without any effect.
    Refused(Refusal),
}

/// Reason for a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A configured limit.
    Limit(LimitScope),
    /// A reserved segment or an address range is too small.
    SegmentFull,
    /// The request exceeds the maximum size of a segment.
    TooLarge,
    /// The allocation is not live.
    NotLive,
    /// The pool no longer exists.
    UnknownPool,
    /// The stream does not exist.
    UnknownStream,
    /// The pool cannot be destroyed.
    PoolInUse,
    /// The pool sleeps.
    Sleeps,
    /// A driver call failed. The oracle never returns this.
    Driver,
}

/// A pool.
#[derive(Clone, Debug)]
pub struct Pool {
    config: PoolConfig,
    /// Heaps by the streams that share them.
    pub heaps: BTreeMap<StreamGroup, Heap>,
    is_asleep: bool,
}

#[derive(Clone, Debug)]
struct Live {
    pool: PoolId,
    stream: StreamId,
    /// Its heap; `None` for an allocation of zero bytes.
    heap: Option<StreamGroup>,
    requested: u64,
}

/// See the [module documentation](self).
#[derive(Clone, Debug)]
pub struct Oracle {
    granularity: u64,
    limit: Option<u64>,
    /// The group of each registered stream.
    groups: Vec<StreamId>,
    pools: Vec<Option<Pool>>,
    live: BTreeMap<AllocationId, Live>,
}

impl Oracle {
    /// Creates the state before the first op.
    pub fn new(config: &Config, granularity_bytes: u64) -> Self {
        let default_pool = Pool { config: config.default_pool().clone(), heaps: BTreeMap::new(), is_asleep: false };
        Oracle {
            granularity: granularity_bytes,
            limit: config.total_limit_bytes(),
            groups: Vec::new(),
            pools: vec![Some(default_pool)],
            live: BTreeMap::new(),
        }
    }

    /// Returns the live pools.
    pub fn pools(&self) -> impl Iterator<Item = (PoolId, &Pool)> {
        self.pools.iter().enumerate().filter_map(|(id, pool)| Some((PoolId(id as u32), pool.as_ref()?)))
    }

    /// Returns the reserved device memory in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        self.pools().map(|(_, pool)| pool.reserved_bytes()).sum()
    }

    /// Returns the number of live allocations of at least one byte, and their requested bytes.
    pub fn live(&self) -> (u64, u64) {
        let live = self.live.values().filter(|live| live.heap.is_some());
        live.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.requested))
    }

    /// Executes an op.
    pub fn step(&mut self, op: &Op) -> Outcome {
        let done = match op {
            Op::RegisterStream { stream, group } => {
                if stream.index() == self.groups.len() {
                    self.groups.push(*group);
                }
                Ok(())
            }
            Op::CreatePool { pool, config } => {
                if self.pools.len() <= pool.index() {
                    self.pools.resize(pool.index() + 1, None);
                }
                let new = || Pool { config: (**config).clone(), heaps: BTreeMap::new(), is_asleep: false };
                self.pools[pool.index()].get_or_insert_with(new);
                Ok(())
            }
            Op::DestroyPool { pool } => self.destroy_pool(*pool),
            Op::ResetPool { pool } => self.reset_pool(*pool),
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
            Op::Sleep { pool, .. } => self.pool(*pool).map(|pool| pool.is_asleep = true),
            Op::Wake { pool } => self.wake(*pool),
            Op::Wait { stream, on } => self.known(*stream).and_then(|()| self.known(*on)),
            Op::Synchronize { stream } => self.known(*stream),
            _ => Ok(()),
        };
        done.map_or_else(Outcome::Refused, |()| Outcome::Done)
    }

    fn known(&self, stream: StreamId) -> Result<(), Refusal> {
        if stream.index() < self.groups.len() { Ok(()) } else { Err(Refusal::UnknownStream) }
    }

    /// Returns the streams that share a heap with a stream in this pool.
    fn key(&mut self, pool: PoolId, stream: StreamId) -> Result<StreamGroup, Refusal> {
        let policy = self.pool(pool)?.config.streams();
        self.known(stream)?;
        Ok(match policy {
            StreamPolicy::Separate => StreamGroup::One(stream),
            StreamPolicy::Grouped => StreamGroup::Group(self.groups[stream.index()]),
            _ => StreamGroup::All,
        })
    }

    fn pool(&mut self, pool: PoolId) -> Result<&mut Pool, Refusal> {
        self.pools.get_mut(pool.index()).and_then(Option::as_mut).ok_or(Refusal::UnknownPool)
    }

    /// Checks that a pool exists and is awake.
    fn awake(&mut self, pool: PoolId) -> Result<(), Refusal> {
        if self.pool(pool)?.is_asleep { Err(Refusal::Sleeps) } else { Ok(()) }
    }

    fn wake(&mut self, pool: PoolId) -> Result<(), Refusal> {
        let held = self.reserved_bytes();
        let limit = self.limit.unwrap_or(u64::MAX);
        let pool = self.pool(pool)?;
        if pool.is_asleep && held + pool.mapped_bytes() > limit {
            return Err(Refusal::Limit(LimitScope::Allocator));
        }
        pool.is_asleep = false;
        Ok(())
    }

    fn headroom(&mut self, pool: PoolId) -> Result<Headroom, Refusal> {
        let all = self.limit.map_or(u64::MAX, |limit| limit - self.reserved_bytes());
        let pool = self.pool(pool)?;
        Ok(Headroom {
            pool: pool.config.limit_bytes().map_or(u64::MAX, |limit| limit - pool.reserved_bytes()),
            all,
            is_symmetric: pool.config.symmetric(),
        })
    }

    fn destroy_pool(&mut self, id: PoolId) -> Result<(), Refusal> {
        let pool = self.pool(id)?;
        if id == PoolId::DEFAULT || pool.heaps.values().flat_map(|heap| &heap.segments).any(Segment::has_live) {
            return Err(Refusal::PoolInUse);
        }
        self.pools[id.index()] = None;
        Ok(())
    }

    /// Frees the live allocations of a pool in the order of their placements.
    fn reset_pool(&mut self, pool: PoolId) -> Result<(), Refusal> {
        let blocks =
            self.pool(pool)?.heaps.values().flat_map(|heap| &heap.segments).flat_map(|segment| &segment.blocks);
        let live = blocks.filter_map(|block| match block.content {
            Content::Allocated(id) => Some(id),
            _ => None,
        });
        live.collect::<Vec<_>>().into_iter().try_for_each(|id| self.free(id))
    }

    /// Returns the bytes of reserved segments that stay although nothing in them is live: those of the pool itself and,
    /// toward the limit over all pools, those of the default pool.
    fn staying_bytes(&self, pool: PoolId, scope: LimitScope) -> u64 {
        let is_counted = |id: PoolId| id == pool || id == PoolId::DEFAULT && scope == LimitScope::Allocator;
        let counted = self.pools().filter(|(id, _)| is_counted(*id));
        let stay = counted.filter(|(_, pool)| matches!(pool.config.segments(), SegmentPolicy::Reserved { .. }));
        stay.map(|(_, pool)| pool.reserved_bytes()).sum()
    }

    /// Tries an op that needs `demand` bytes if it gets no free memory. While a limit prevents it, releases the memory that `reclaim` allows
    /// and retries, until nothing is left to release. Does not retry requests that exceed the limit itself.
    fn retry<T>(
        &mut self,
        id: PoolId,
        key: StreamGroup,
        demand: u64,
        mut attempt: impl FnMut(&mut Heap, &PoolConfig, Headroom, u64) -> Result<T, Shortage>,
    ) -> Result<T, Refusal> {
        let limit = self.limit.unwrap_or(u64::MAX);
        loop {
            let (headroom, granularity) = (self.headroom(id)?, self.granularity);
            let pool = self.pool(id)?;
            let config = pool.config.clone();
            let granularity = granule(&config, granularity);
            let limit_of = |scope| match scope {
                LimitScope::Pool => config.limit_bytes().unwrap_or(u64::MAX),
                _ => limit,
            };
            // Memory in other pools can cause a symmetric one to be refused, but then nothing is released.
            let is_foreign = |scope| config.symmetric() && scope == LimitScope::Allocator;
            let heap = pool.heaps.entry(key).or_default();
            let (scope, missing) = match attempt(heap, &config, headroom, granularity) {
                Ok(done) => return Ok(done),
                Err(Shortage::SegmentFull) => return Err(Refusal::SegmentFull),
                Err(Shortage::Limit(scope, missing)) => (scope, missing),
            };
            let held: u64 = heap.segments.iter().map(Segment::mapped).sum();
            let available = limit_of(scope).saturating_sub(self.staying_bytes(id, scope)).max(held);
            let is_hopeless = demand > available;
            let pool = self.pool(id)?;
            if is_hopeless || is_foreign(scope) || pool.reclaim(key, granularity, missing) == 0 {
                return Err(Refusal::Limit(scope));
            }
        }
    }

    fn allocate(
        &mut self,
        id: AllocationId,
        pool: PoolId,
        stream: StreamId,
        requested: u64,
    ) -> Result<(Placement, u64), Refusal> {
        let key = self.key(pool, stream)?;
        if requested <= SEGMENT_BYTES_MAX {
            self.awake(pool)?;
        }
        if requested == 0 {
            self.live.insert(id, Live { pool, stream, heap: None, requested });
            return Ok((Placement::NOWHERE, 0));
        }
        if requested > SEGMENT_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        let (unit, config) = (self.granularity, self.pool(pool)?.config.clone());
        let size = match config.segments() {
            SegmentPolicy::Fixed(knobs) if knobs.unsplit => requested.next_multiple_of(unit),
            _ => round(requested, config.roundup_power2_divisions()),
        };
        let demand = demand(&config, size.next_multiple_of(unit), unit);
        let placed = self.retry(pool, key, demand, |heap, config, headroom, granularity| {
            let place = match heap.best_fit(config, size).filter(|place| heap.accepts(config, size, *place)) {
                Some(place) => place,
                None => {
                    heap.obtain_tightly(config, headroom, (granularity, unit), stream, size)?;
                    match config.segments() {
                        // Use the new segment. The best fit may be another block, which `accepts` rejected above.
                        SegmentPolicy::Fixed(_) => (heap.segments.len() - 1, 0),
                        _ => heap.best_fit(config, size).expect("memory was obtained"),
                    }
                }
            };
            Ok(heap.take(config, size, place, id, stream))
        })?;
        self.live.insert(id, Live { pool, stream, heap: Some(key), requested });
        Ok(placed)
    }

    /// Returns the segment of a live allocation, and the index of its block.
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
        let mut freed = None;
        if let Some((segment, index)) = self.find(id)? {
            segment.blocks[index].content = Content::Free;
            segment.normalize();
            freed = Some(segment.ordinal);
        }
        let Live { pool, stream, .. } = self.live.remove(&id).expect("found above");
        let granularity = self.granularity;
        // Allocations of zero bytes may outlive their pool.
        let Ok(key) = self.key(pool, stream) else { return Ok(()) };
        let pool = self.pool(pool)?;
        if let (Some(freed), Some(heap)) = (freed, pool.heaps.get_mut(&key)) {
            heap.empty_if_unused(freed, granule(&pool.config, granularity));
        }
        if let (Some(threshold), Some(heap)) = (pool.config.release_threshold_bytes(), pool.heaps.get_mut(&key))
            && heap.free_bytes() > threshold
            && !pool.is_asleep
        {
            heap.trim(&pool.config, granule(&pool.config, granularity), None);
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
        let key = self.key(pool, stream)?;
        if target > SEGMENT_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        self.awake(pool)?;
        let (unit, config) = (self.granularity, self.pool(pool)?.config.clone());
        let demand = demand(&config, target.next_multiple_of(unit), unit);
        self.retry(pool, key, demand, |heap, config, headroom, granularity| {
            let held: u64 = heap.segments.iter().map(Segment::mapped).sum();
            if held >= target {
                return Ok(());
            }
            let missing = (target - held).next_multiple_of(granularity);
            let reserved = match config.segments() {
                SegmentPolicy::Fixed(_) => heap.create_segment(headroom, missing, missing, false),
                SegmentPolicy::Reserved { .. } => heap.obtain(config, headroom, granularity, stream, target),
                SegmentPolicy::Expandable(knobs) => {
                    if knobs.growth_bytes == 0 && heap.fill_lowest(headroom, missing)? {
                        return Ok(());
                    }
                    heap.grow(headroom, granularity, knobs.range_bytes, granularity, missing)
                }
                _ => unimplemented_policy(),
            };
            reserved.or_else(|shortage| heap.squeeze(config, headroom, unit, target - held, shortage))
        })
    }

    fn trim(&mut self, pool: Option<PoolId>) -> Result<(), Refusal> {
        if let Some(pool) = pool {
            self.pool(pool)?;
        }
        let granularity = self.granularity;
        for (id, entry) in self.pools.iter_mut().enumerate() {
            // A quota is released only when its pool is named.
            let is_named = |entry: &Pool| pool.map_or(!entry.config.has_quota(), |pool| pool.index() == id);
            let is_meant = |entry: &&mut Pool| !entry.is_asleep && is_named(entry);
            if let Some(entry) = entry.as_mut().filter(is_meant) {
                for heap in entry.heaps.values_mut() {
                    heap.trim(&entry.config, granule(&entry.config, granularity), None);
                }
            }
        }
        Ok(())
    }
}

impl Pool {
    /// Releases the memory that `reclaim` allows for a request of one heap, until `missing` bytes are released. Returns the number of bytes
    /// released.
    fn reclaim(&mut self, key: StreamGroup, granularity: u64, missing: u64) -> u64 {
        let mut given = 0;
        for (owner, heap) in &mut self.heaps {
            let may_give = match self.config.reclaim() {
                Reclaim::Heap => *owner == key,
                Reclaim::Pool => true,
                _ => false,
            };
            if may_give && given < missing {
                given += heap.trim(&self.config, granularity, Some(missing - given));
            }
        }
        given
    }

    /// Returns the reserved device memory in bytes.
    pub fn reserved_bytes(&self) -> u64 {
        if self.is_asleep { 0 } else { self.mapped_bytes() }
    }

    /// Returns the device memory that the pool's blocks need, in bytes.
    fn mapped_bytes(&self) -> u64 {
        self.heaps.values().flat_map(|heap| &heap.segments).map(Segment::mapped).sum()
    }
}

/// Returns the memory that a request needs if it gets no free memory: a reserved segment is obtained as a whole.
fn demand(config: &PoolConfig, bytes: u64, granularity: u64) -> u64 {
    match config.segments() {
        SegmentPolicy::Reserved { segment_bytes } => segment_bytes.next_multiple_of(granularity),
        _ => bytes,
    }
}

/// Returns the unit in which a pool obtains and releases memory, in bytes.
fn granule(config: &PoolConfig, granularity: u64) -> u64 {
    config.stitching().map_or(granularity, |stitching| stitching.granule_bytes.next_multiple_of(granularity))
}
