//! Swarm testing: each generated program draws the kinds of its ops, their frequencies and its pools.
//!
//! A program in which every op is equally likely rarely reaches extreme states, because it frees allocations soon and
//! trims memory that fills up. Each seed therefore first draws weights, many of them zero, and only then the steps.
//! (Groce and others, "Swarm testing", ISSTA 2012.)
//!
//! Half of the programs also have repeated steps: pools that learn plans run the same body several times. In half of
//! the programs without a limit over all pools, some pools sleep between syncs.

use crate::device::SplitMix64;
use crate::job::body::{Body, BodyOp};
use crate::job::context::{Purpose, sequence};
use crate::job::steps::JobStep;
use symmalloc_core::config::{
    Config, ExpandableSegments, FixedSegments, PlanPolicy, PoolConfig, Reclaim, RoundupPower2Divisions, SegmentPolicy,
    Stitching, StreamPolicy,
};
use symmalloc_core::groups::Groups;
use symmalloc_core::op::Contents;
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{AllocationId, Op, PoolId, StreamId};

/// The kinds of steps, which are drawn by weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepKind {
    Allocate,
    Free,
    RecordUse,
    Wait,
    Synchronize,
    Reserve,
    TrimPool,
    TrimAll,
    CreatePool,
    DestroyPool,
    Sync,
}

/// All kinds, each with four weights to choose from. The four weights are equally likely.
const KINDS: [(StepKind, [u32; 4]); 11] = [
    (StepKind::Allocate, [30, 40, 60, 100]),
    (StepKind::Free, [5, 25, 40, 60]),
    (StepKind::RecordUse, [0, 5, 15, 40]),
    (StepKind::Wait, [0, 0, 3, 12]),
    (StepKind::Synchronize, [0, 0, 2, 8]),
    (StepKind::Reserve, [0, 0, 2, 8]),
    (StepKind::TrimPool, [0, 0, 1, 6]),
    (StepKind::TrimAll, [0, 0, 1, 4]),
    (StepKind::CreatePool, [0, 0, 1, 2]),
    (StepKind::DestroyPool, [0, 0, 1, 3]),
    (StepKind::Sync, [1, 2, 4, 8]),
];

/// Sizes in bytes, on both sides of every boundary of the size rules.
pub const BOUNDARY_SIZES_BYTES: [u64; 24] = [
    1,
    512,
    513,
    4 * KIB,
    100 * KIB,
    512 * KIB,
    MIB,
    MIB + 1,
    2 * MIB - 512,
    2 * MIB,
    3 * MIB + 512,
    5 * MIB,
    6 * MIB - 1,
    10 * MIB - 512,
    10 * MIB,
    11 * MIB + 1,
    16 * MIB,
    20 * MIB,
    24 * MIB,
    30 * MIB,
    33 * MIB + 512,
    64 * MIB,
    0,
    (1 << 40) + 1,
];

/// Maximum number of live allocations.
const LIVE_MAX: usize = 300;
/// Maximum number of pools in addition to the default pool.
const POOLS_MAX: u32 = 6;

/// A program and its configuration.
pub(crate) struct Drawn {
    pub(crate) config: Config,
    pub(crate) granularity_bytes: u64,
    pub(crate) steps: Vec<JobStep>,
}

/// Draws the program of a seed.
pub(crate) fn draw(seed: u64, ops: usize) -> Drawn {
    let mut random = sequence(seed, Purpose::JobPlan, 0);
    let granularity_bytes = pick(&mut random, &[2 * MIB, 2 * MIB, 2 * MIB, 64 * KIB, 512, 4 * MIB]);
    let limit_bytes = pick(&mut random, &[None, None, None, Some(90 * MIB), Some(200 * MIB + 1)]);
    let mut repeats = Repeats::draw(seed);
    let default_pool = repeats.plan(PoolId::DEFAULT, pool_config(&mut random));
    let config = Config::builder()
        .default_pool(default_pool)
        .total_limit_bytes(limit_bytes)
        .build()
        .expect("every value should be in its range");
    let mut writer = Writer::new(seed, &mut random, repeats, limit_bytes.is_none());
    while writer.steps.len() < ops {
        writer.write();
    }
    // The last repeated step of a pool may be cut off in the middle.
    writer.steps.truncate(ops);
    Drawn { config, granularity_bytes, steps: writer.steps }
}

fn pick<T: Clone>(random: &mut SplitMix64, choices: &[T]) -> T {
    choices[random.below(choices.len() as u64) as usize].clone()
}

/// Draws a pool's policy.
fn pool_config(random: &mut SplitMix64) -> PoolConfig {
    let mut expandable = ExpandableSegments::default();
    let ranges = [(512 << 30, 2 * MIB), (500 << 30, 20 * MIB), (64 * MIB, 4 * MIB), (96 * MIB, 12 * MIB)];
    (expandable.range_bytes, expandable.growth_bytes) = pick(random, &ranges);
    let mut fixed = FixedSegments::default();
    fixed.max_split_size_bytes = pick(random, &[None, None, Some(20 * MIB), Some(32 * MIB)]);
    fixed.max_non_split_rounding_bytes = pick(random, &[20 * MIB, MIB]);
    let segments = match random.below(8) {
        0..4 => SegmentPolicy::Expandable(expandable),
        4..7 => SegmentPolicy::Fixed(fixed),
        _ => SegmentPolicy::Reserved { segment_bytes: pick(random, &[48 * MIB, 256 * MIB]) },
    };
    let divisions = RoundupPower2Divisions::uniform(pick(random, &[0, 0, 0, 4, 8])).expect("a power of two");
    let streams = pick(random, &[StreamPolicy::Separate, StreamPolicy::Grouped, StreamPolicy::Shared]);
    let is_symmetric = random.below(4) > 0;
    let limit_bytes = pick(random, &[None, None, None, Some(40 * MIB), Some(100 * MIB)]);
    let reclaim = pick(random, &[Reclaim::Heap, Reclaim::Pool, Reclaim::Never]);
    let threshold_bytes = pick(random, &[None, None, None, Some(24 * MIB)]);
    let segments = match segments {
        // Only ops that name the pool reserve and trim its memory.
        SegmentPolicy::Expandable(mut knobs)
            if streams == StreamPolicy::Shared && reclaim == Reclaim::Never && threshold_bytes.is_none() =>
        {
            knobs.growth_bytes = 0;
            SegmentPolicy::Expandable(knobs)
        }
        segments => segments,
    };
    let has_quota = matches!(&segments, SegmentPolicy::Expandable(knobs) if knobs.growth_bytes == 0);
    let may_stitch = !is_symmetric && matches!(&segments, SegmentPolicy::Expandable(_)) && !has_quota;
    PoolConfig::builder()
        .segments(segments)
        .streams(streams)
        .symmetric(is_symmetric)
        .stitching(may_stitch.then(small_stitching))
        .limit_bytes(limit_bytes)
        .reclaim(reclaim)
        .release_threshold_bytes(threshold_bytes)
        .roundup_power2_divisions(divisions)
        .build()
        .expect("every value should be in its range")
}

/// Returns bounds that are so low that a job of a few MiB reaches them.
pub(super) fn small_stitching() -> Stitching {
    let mut stitching = Stitching::default();
    (stitching.granule_bytes, stitching.least_bytes) = (2 * MIB, 3 * MIB);
    (stitching.maps_max, stitching.aliases_max) = (24, 40);
    stitching
}

/// The assignment of ops to threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Threads {
    /// One thread per stream, which also frees the stream's allocations.
    OfStream,
    /// One thread per stream; any thread may free.
    FreedByAny,
    /// Any thread may run any op.
    Any,
}

/// The choice of the allocation to free next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freed {
    Any,
    Newest,
    Oldest,
}

/// A live allocation and its stream.
type Live = (AllocationId, StreamId);

/// The repeated steps of a program.
struct Repeats {
    random: SplitMix64,
    /// Rate at which repeated steps begin, per million ops; 0 if the program has none.
    per_million: u32,
    /// Live pools that learn plans.
    pools: Vec<PoolId>,
    /// Pool of the open step.
    open: Option<PoolId>,
}

impl Repeats {
    fn draw(seed: u64) -> Self {
        let mut random = sequence(seed, Purpose::Repeats, 0);
        let per_million = pick(&mut random, &[0, 0, 0, 15_000, 40_000, 100_000]);
        Repeats { random, per_million, pools: Vec::new(), open: None }
    }

    /// Decides whether a pool learns plans, and returns the pool's configuration.
    fn plan(&mut self, pool: PoolId, config: PoolConfig) -> PoolConfig {
        if self.per_million == 0 || self.random.below(3) == 0 || config.has_quota() {
            return config;
        }
        self.pools.push(pool);
        config.to_builder().plan(PlanPolicy::Learn).build().expect("any expandable pool should be able to learn")
    }

    /// Returns the pool in which a repeated step begins now, if any.
    fn next(&mut self) -> Option<PoolId> {
        let begins = self.open.is_none() && !self.pools.is_empty() && self.random.chance(self.per_million);
        begins.then(|| pick(&mut self.random, &self.pools))
    }
}

/// The sleeps of a program's pools.
struct Sleeps {
    random: SplitMix64,
    /// Rate at which pools fall asleep or wake, per million ops; 0 if no pool sleeps.
    per_million: u32,
    asleep: Vec<PoolId>,
}

impl Sleeps {
    /// Draws the rate. `may_sleep` is `false` if there is a limit over all pools, because the limit could keep a pool
    /// from waking before a sync.
    fn draw(seed: u64, may_sleep: bool) -> Self {
        let mut random = sequence(seed, Purpose::Sleeps, 0);
        let per_million = pick(&mut random, &[0, 0, 0, 10_000, 30_000, 80_000]) * u32::from(may_sleep);
        Sleeps { random, per_million, asleep: Vec::new() }
    }

    /// Returns the next sleep or wake, if any. If any pool is asleep, a wake is more likely than a sleep.
    fn next(&mut self, pools: &[PoolId]) -> Option<Op> {
        let per_million = if self.asleep.is_empty() { self.per_million } else { 4 * self.per_million };
        if !self.random.chance(per_million) {
            return None;
        }
        if !self.asleep.is_empty() && self.random.below(4) > 0 {
            let index = self.random.below(self.asleep.len() as u64) as usize;
            return Some(Op::Wake { pool: self.asleep.swap_remove(index) });
        }
        let index = self.random.below(pools.len() as u64 + 1) as usize;
        let pool = pools.get(index).copied().unwrap_or(PoolId::DEFAULT);
        if !self.asleep.contains(&pool) {
            self.asleep.push(pool);
        }
        Some(Op::Sleep { pool, contents: pick(&mut self.random, &Contents::ALL) })
    }
}

/// A generator of steps that are valid after the preceding ones.
struct Writer {
    sleeps: Sleeps,
    repeats: Repeats,
    random: SplitMix64,
    steps: Vec<JobStep>,
    weights: Vec<(StepKind, u32)>,
    sizes: Vec<u64>,
    threads: u8,
    by: Threads,
    freed: Freed,
    named_per_million: u32,
    /// Determines the groups that streams join.
    joins: SplitMix64,
    groups: Groups,
    streams: u16,
    streams_max: u16,
    pools: Vec<PoolId>,
    pools_made: u32,
    live: Vec<Live>,
    made: u64,
}

impl Writer {
    fn new(seed: u64, random: &mut SplitMix64, repeats: Repeats, may_sleep: bool) -> Self {
        let weights = KINDS.map(|(kind, weights)| (kind, pick(random, &weights))).to_vec();
        let sizes = match random.below(4) {
            0 => BOUNDARY_SIZES_BYTES.to_vec(),
            1 => BOUNDARY_SIZES_BYTES[..6].to_vec(),
            2 => BOUNDARY_SIZES_BYTES[5..22].to_vec(),
            // A few recurring sizes, as in a training loop.
            _ => (0..4).map(|_| pick(random, &BOUNDARY_SIZES_BYTES[..20])).collect(),
        };
        let streams_max = 1 + random.below(6) as u16;
        let mut writer = Writer {
            sleeps: Sleeps::draw(seed, may_sleep),
            repeats,
            random: sequence(seed, Purpose::Steps, 0),
            steps: Vec::new(),
            weights,
            sizes,
            threads: 1 + random.below(5) as u8,
            by: pick(random, &[Threads::OfStream, Threads::FreedByAny, Threads::Any]),
            freed: pick(random, &[Freed::Any, Freed::Any, Freed::Newest, Freed::Oldest]),
            named_per_million: pick(random, &[0, 0, 100_000, 1_000_000]),
            joins: sequence(seed, Purpose::Groups, 0),
            groups: Groups::default(),
            streams: 0,
            streams_max,
            pools: Vec::new(),
            pools_made: 1,
            live: Vec::new(),
            made: 0,
        };
        let first = if random.below(4) == 0 { 1 } else { streams_max };
        (0..first).for_each(|_| writer.register_stream());
        (0..random.below(4)).for_each(|_| writer.create_pool());
        writer.steps.push(JobStep::new(Op::Sync, 0));
        writer
    }

    fn push(&mut self, op: Op, thread: u8) {
        self.steps.push(JobStep::new(op, thread));
    }

    fn register_stream(&mut self) {
        let draw = self.joins.next_u64();
        let group = match self.streams {
            0 => None,
            streams if draw.is_multiple_of(2) => Some(self.groups.first_of(StreamId((draw >> 32) as u16 % streams))),
            _ => None,
        };
        let stream = self.groups.register(group).expect("the group should exist");
        self.push(Op::RegisterStream { stream, group: group.unwrap_or(stream) }, 0);
        self.streams += 1;
    }

    fn create_pool(&mut self) {
        let pool = PoolId(self.pools_made);
        self.pools_made += 1;
        self.pools.push(pool);
        let config = Box::new(self.repeats.plan(pool, pool_config(&mut self.random)));
        self.push(Op::CreatePool { pool, config }, 0);
    }

    fn destroy_pool(&mut self) {
        let index = self.random.below(self.pools.len() as u64) as usize;
        if self.repeats.open == Some(self.pools[index]) {
            return self.allocate();
        }
        let pool = self.pools.swap_remove(index);
        self.repeats.pools.retain(|other| *other != pool);
        let thread = self.any_thread();
        if self.sleeps.asleep.contains(&pool) {
            // If the pool is in use, destroying it fails and the pool survives. It must then be awake.
            self.sleeps.asleep.retain(|other| *other != pool);
            self.push(Op::Wake { pool }, thread);
        }
        self.push(Op::DestroyPool { pool }, thread);
    }

    fn stream(&mut self) -> StreamId {
        StreamId(self.random.below(self.streams.into()) as u16)
    }

    fn pool(&mut self) -> PoolId {
        let index = self.random.below(self.pools.len() as u64 + 1) as usize;
        self.pools.get(index).copied().unwrap_or(PoolId::DEFAULT)
    }

    fn any_thread(&mut self) -> u8 {
        self.random.below(self.threads.into()) as u8
    }

    /// Returns the thread of a step on a stream.
    fn thread_of(&mut self, stream: StreamId) -> u8 {
        match self.by {
            Threads::Any => self.any_thread(),
            _ => (self.groups.first_of(stream).0 % u16::from(self.threads)) as u8,
        }
    }

    fn kind(&mut self) -> StepKind {
        let total: u32 = self.weights.iter().map(|(_, weight)| weight).sum();
        let mut at = self.random.below(total.into()) as u32;
        for (kind, weight) in &self.weights {
            if at < *weight {
                return *kind;
            }
            at -= weight;
        }
        StepKind::Allocate
    }

    fn write(&mut self) {
        if let Some(pool) = self.repeats.next() {
            return self.repeat(pool);
        }
        if self.repeats.open.is_none()
            && let Some(op) = self.sleeps.next(&self.pools)
        {
            let thread = self.sleeps.random.below(self.threads.into()) as u8;
            return self.push(op, thread);
        }
        let kind = if self.live.len() >= LIVE_MAX { StepKind::Free } else { self.kind() };
        match kind {
            StepKind::Free => self.free(),
            StepKind::RecordUse => self.record_use(),
            StepKind::Wait => {
                let (stream, on) = (self.stream(), self.stream());
                let thread = self.thread_of(stream);
                self.push(Op::Wait { stream, on }, thread);
            }
            StepKind::Synchronize => {
                let stream = self.stream();
                let thread = self.thread_of(stream);
                self.push(Op::Synchronize { stream }, thread);
            }
            StepKind::Reserve => {
                let (pool, stream) = (self.pool(), self.stream());
                let (size_bytes, thread) = (self.size(), self.thread_of(stream));
                self.push(Op::Reserve { pool, stream, size_bytes }, thread);
            }
            StepKind::TrimPool => {
                let (pool, thread) = (self.pool(), self.any_thread());
                self.push(Op::Trim { pool: Some(pool) }, thread);
            }
            StepKind::TrimAll => {
                let thread = self.any_thread();
                self.push(Op::Trim { pool: None }, thread);
            }
            StepKind::CreatePool if self.pools_made <= POOLS_MAX => self.create_pool(),
            StepKind::CreatePool if self.streams < self.streams_max => self.register_stream(),
            // If the pool is still in use, destroying it fails, and later steps do not refer to it.
            StepKind::DestroyPool if !self.pools.is_empty() => self.destroy_pool(),
            StepKind::Sync => self.sync(),
            StepKind::Allocate | StepKind::CreatePool | StepKind::DestroyPool => self.allocate(),
        }
    }

    /// Wakes all pools and adds a sync. Ranks restart from layouts, and sleeping pools have no layouts.
    fn sync(&mut self) {
        for pool in std::mem::take(&mut self.sleeps.asleep) {
            self.push(Op::Wake { pool }, 0);
        }
        self.push(Op::Sync, 0);
    }

    fn size(&mut self) -> u64 {
        let index = self.random.below(self.sizes.len() as u64) as usize;
        match self.sizes[index] {
            // Zero and oversized requests are rare.
            odd @ (0 | 0x100_0000_0001) if self.random.below(8) > 0 => odd % 512 + 2 * MIB,
            size => size,
        }
    }

    /// Writes a body several times, each time as one step of the pool, with unrelated ops in between.
    fn repeat(&mut self, pool: PoolId) {
        let sizes: Vec<u64> = (0..3).map(|_| self.size()).collect();
        let mut repeats = self.repeats.random.split(self.made);
        let mut drawn = repeats.split(1);
        let body = Body::draw(&mut repeats, self.streams, || pick(&mut drawn, &sizes));
        let (key, times) = (repeats.below(2), 3 + repeats.below(4));
        self.repeats.open = Some(pool);
        if let Some(at) = self.sleeps.asleep.iter().position(|asleep| *asleep == pool) {
            self.sleeps.asleep.swap_remove(at);
            let thread = self.sleeps.random.below(self.threads.into()) as u8;
            self.push(Op::Wake { pool }, thread);
        }
        // Allocations of the previous step, by their number within the step.
        let mut before = vec![None; body.allocation_count()];
        for _ in 0..times {
            let thread = self.any_thread();
            self.push(Op::BeginStep { pool, key }, thread);
            let mut made = Vec::new();
            for op in body.ops(&mut repeats) {
                if repeats.below(50) == 0 {
                    self.write();
                }
                self.write_body_op(pool, op, &mut made, &mut before);
            }
            let thread = self.any_thread();
            self.push(Op::EndStep { pool }, thread);
            if repeats.below(3) == 0 {
                self.sync();
            }
            self.live.extend(before.iter_mut().filter_map(Option::take));
            before[..made.len()].clone_from_slice(&made);
        }
        self.live.extend(before.into_iter().flatten());
        self.repeats.open = None;
    }

    /// Writes one op of a body. `made` contains the allocations of this step by number, and `before` the live
    /// allocations of the previous step.
    fn write_body_op(&mut self, pool: PoolId, op: BodyOp, made: &mut Vec<Option<Live>>, before: &mut [Option<Live>]) {
        match op {
            BodyOp::Allocate { stream, size_bytes } => made.push(Some(self.push_allocate(pool, stream, size_bytes))),
            BodyOp::Free { number } => {
                if let Some(live) = made[number].take() {
                    self.push_free(live);
                }
            }
            BodyOp::FreeOfStepBefore { number } => {
                if let Some(live) = before[number].take() {
                    self.push_free(live);
                }
            }
            BodyOp::RecordUse { number, stream } => {
                if let Some((id, _)) = made[number] {
                    let thread = self.thread_of(stream);
                    self.push(Op::RecordUse { id, stream }, thread);
                }
            }
        }
    }

    fn allocate(&mut self) {
        let (pool, stream) = (self.pool(), self.stream());
        let size_bytes = self.size();
        let live = self.push_allocate(pool, stream, size_bytes);
        self.live.push(live);
    }

    fn push_allocate(&mut self, pool: PoolId, stream: StreamId, size_bytes: u64) -> Live {
        let id = AllocationId(self.made);
        self.made += 1;
        let thread = self.thread_of(stream);
        self.push(Op::Allocate { id, pool, stream, size_bytes }, thread);
        if self.random.chance(self.named_per_million)
            && let Some(step) = self.steps.last_mut()
        {
            step.name = Some(format!("tensor {}", id.0 % 17).into());
        }
        (id, stream)
    }

    fn free(&mut self) {
        let count = self.live.len();
        if count == 0 {
            return self.allocate();
        }
        let index = match self.freed {
            Freed::Any => self.random.below(count as u64) as usize,
            Freed::Newest => count - 1 - self.random.below(count.min(3) as u64) as usize,
            Freed::Oldest => self.random.below(count.min(3) as u64) as usize,
        };
        let live = self.live.remove(index);
        self.push_free(live);
    }

    fn push_free(&mut self, (id, stream): Live) {
        let thread = if self.by == Threads::FreedByAny { self.any_thread() } else { self.thread_of(stream) };
        self.push(Op::Free { id }, thread);
    }

    fn record_use(&mut self) {
        if self.live.is_empty() {
            return self.allocate();
        }
        let (id, _) = self.live[self.random.below(self.live.len() as u64) as usize];
        let stream = self.stream();
        let thread = self.thread_of(stream);
        self.push(Op::RecordUse { id, stream }, thread);
    }
}
