//! Programs from bytes: input for the property tests and the fuzz targets.
//!
//! A [`Tape`] of bytes becomes a [`Scenario`]: a configuration, and ops that are valid when executed in order. Any bytes are accepted. Each
//! op takes four of them, so a shrinker or fuzzer that deletes four adjacent bytes deletes one op and preserves the others.
//!
//! ```text
//!  8 bytes of configuration │ kind what where how │ kind what where how │ ...
//! ```
//!
//! The translation favors interesting cases. Sizes come from a short list around every boundary of the size rules and repeat often, so
//! exact fits, splits and merges are common. Pools are small, and limits are close to the program's needs.

use proptest::prelude::*;
use symmalloc_core::config::{
    Config, DebugOptions, ExpandableSegments, FixedSegments, PointerLookup, PoolConfig, Reclaim,
    RoundupPower2Divisions, SegmentPolicy, Stitching, StreamPolicy,
};
use symmalloc_core::op::{Contents, Op, Record};
use symmalloc_core::units::{KIB, MIB};
use symmalloc_core::{AllocationId, PoolId, StreamId};
use symmalloc_sim::job::BOUNDARY_SIZES_BYTES as SIZES;
use symmalloc_sim::{SimBackend, SimBuilder, SplitMix64};
use symmalloc_trace::TraceWriter;
use symmalloc_trace::replay::Program;

/// Bytes that determine the generated values; zeros once they are used up.
#[derive(Clone, Copy, Debug)]
pub struct Tape<'a> {
    bytes: &'a [u8],
}

impl<'a> Tape<'a> {
    /// Creates a tape of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Tape { bytes }
    }

    fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        *first
    }

    fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()].clone()
    }
}

/// The way in which an op identifies its allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// By the allocation's handle.
    Handle,
    /// By the allocation's first address, as in C and PyTorch, if addresses can be looked up.
    Address,
}

impl Access {
    /// Maps even bytes to one variant, odd ones to the other.
    pub fn from_byte(byte: u8) -> Self {
        if byte.is_multiple_of(2) { Access::Handle } else { Access::Address }
    }
}

/// A configuration and a valid program.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The allocator's configuration.
    pub config: Config,
    /// The backend's granularity in bytes.
    pub granularity_bytes: u64,
    /// The ops.
    pub program: Program,
    /// The access of each op.
    pub access: Vec<Access>,
}

/// Maximum number of ops in a scenario: longer tapes are truncated.
pub const OPS_MAX: usize = 400;

const CONFIG_BYTES: usize = 8;
const OP_BYTES: usize = 4;

impl Scenario {
    /// Creates a scenario of these ops under this configuration.
    ///
    /// # Panics
    /// Panics if an op names an allocation that does not exist yet.
    pub fn new(config: Config, granularity_bytes: u64, ops: impl IntoIterator<Item = (Op, Access)>) -> Self {
        let (records, access): (Vec<Record>, _) =
            ops.into_iter().map(|(op, access)| (Record::from(op), access)).unzip();
        Scenario {
            config,
            granularity_bytes,
            program: Program::new(&records).expect("the arguments should be valid"),
            access,
        }
    }

    /// Returns the ops with their access.
    pub fn ops(&self) -> impl Iterator<Item = (Op, Access)> {
        self.program.ops().iter().cloned().zip(self.access.iter().copied())
    }

    /// Returns the same scenario without stitching and sleep, so that every pool has a layout.
    ///
    /// # Panics
    /// Never panics: a policy without stitching is valid.
    #[must_use]
    pub fn with_layouts(self) -> Self {
        let plain =
            |pool: &PoolConfig| pool.to_builder().stitching(None).build().expect("the configuration should be valid");
        let config = self
            .config
            .to_builder()
            .default_pool(plain(self.config.default_pool()))
            .build()
            .expect("the configuration should be valid");
        let ops = self.ops().filter_map(|(op, access)| match op {
            Op::CreatePool { pool, config } => {
                Some((Op::CreatePool { pool, config: Box::new(plain(&config)) }, access))
            }
            Op::Sleep { .. } | Op::Wake { .. } => None,
            other => Some((other, access)),
        });
        Scenario::new(config, self.granularity_bytes, ops)
    }

    /// Returns the same scenario with debugging options in every pool. Pools that keep their memory do not unmap.
    ///
    /// # Panics
    /// Never panics: the options are valid.
    #[must_use]
    pub fn with_debug(self, options: DebugOptions) -> Self {
        let debugged = |pool: &PoolConfig| {
            let keeps = pool.has_quota() || matches!(pool.segments(), SegmentPolicy::Reserved { .. });
            let mut options = options;
            options.unmap &= !keeps;
            pool.to_builder().debug(options).build().expect("valid")
        };
        let config = self.config.to_builder().default_pool(debugged(self.config.default_pool())).build();
        let ops = self.ops().map(|(op, access)| match op {
            Op::CreatePool { pool, config } => (Op::CreatePool { pool, config: Box::new(debugged(&config)) }, access),
            other => (other, access),
        });
        let ops: Vec<_> = ops.collect();
        Scenario::new(config.expect("valid"), self.granularity_bytes, ops)
    }

    /// Returns the same scenario, with the other access for every op.
    #[must_use]
    pub fn with_other_access(mut self) -> Self {
        for access in &mut self.access {
            *access = if *access == Access::Handle { Access::Address } else { Access::Handle };
        }
        self
    }

    /// Returns a suitable simulated device: more memory than any scenario needs, and all other properties drawn from the seed.
    pub fn device(&self, seed: u64) -> SimBackend {
        self.device_builder(seed).build()
    }

    /// Same as [`device`](Self::device), but returns the builder for further changes.
    pub fn device_builder(&self, seed: u64) -> SimBuilder {
        SimBackend::builder().seed(seed).granularity_bytes(self.granularity_bytes).memory_bytes(1 << 50)
    }

    /// Returns the scenario that these bytes encode. Every sequence of bytes encodes one.
    ///
    /// # Panics
    /// Never panics: generated scenarios are valid.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut tape = Tape::new(bytes);
        let granularity_bytes = tape.pick(&[2 * MIB, 2 * MIB, 64 * KIB, 512, 4 * MIB]);
        let byte = tape.byte();
        let streams = [2, 1, 3, 4][usize::from(byte & 3)];
        let groups = byte >> 2 & 15;
        let lookup = [PointerLookup::Exact, PointerLookup::Off, PointerLookup::Exact, PointerLookup::Exact];
        let lookup = lookup[usize::from(byte >> 6)];
        let limit = tape.pick(&[None, None, None, Some(40 * MIB), Some(90 * MIB), Some(65 * MIB + 1)]);
        let default_pool = pool_config(&mut tape);
        let config = Config::builder().default_pool(default_pool).total_limit_bytes(limit).pointer_lookup(lookup);
        let config = config.build().expect("the configuration should be valid");
        let mut writer = Writer::new(streams, groups);
        while !tape.is_empty() && writer.records.len() < OPS_MAX {
            let mut op = [0; OP_BYTES];
            op.fill_with(|| tape.byte());
            writer.write(op);
        }
        let program = Program::new(&writer.records).expect("the arguments should be valid");
        Scenario { config, granularity_bytes, program, access: writer.access }
    }

    /// Returns the scenario as a trace, to be saved and replayed elsewhere.
    ///
    /// # Panics
    /// Never panics: a valid program is a valid trace.
    pub fn trace(&self) -> String {
        let mut trace = TraceWriter::new(Vec::new(), Some(&self.config)).expect("writing to memory cannot fail");
        for op in self.program.ops() {
            trace.write(&op.clone().into()).expect("the input should be valid");
        }
        String::from_utf8(trace.finish().expect("writing to memory cannot fail")).expect("the contents should be UTF-8")
    }

    /// Returns a scenario of `ops` ops, which `seed` determines permanently.
    pub fn from_seed(seed: u64, ops: usize) -> Self {
        Scenario::from_bytes(&bytes_of_seed(seed, ops))
    }
}

/// Returns the bytes of a scenario of `ops` ops, which `seed` determines permanently.
pub fn bytes_of_seed(seed: u64, ops: usize) -> Vec<u8> {
    let mut random = SplitMix64::new(seed);
    (0..CONFIG_BYTES + OP_BYTES * ops).map(|_| random.next_u64() as u8).collect()
}

/// From this first byte on, a trim or a synchronize is a sleep, if the pool is awake.
const SLEEPS: u8 = 144;

/// While pools sleep, an op whose first byte is a multiple of this is a wake.
/// Low bits of a byte that turn a trim into a reset.
const RESETS: u8 = 4;

const WAKES: u8 = 5;

/// First byte of a burst of ops.
const BURST: u8 = 255;

/// Last bytes of allocations that have a name.
const NAMED: std::ops::Range<u8> = 90..100;

/// Last bytes of allocations whose size is between the boundaries.
const SMOOTH: u8 = 150;
const SMOOTH_END: u8 = 200;

/// Returns a size from 512 bytes to 31 MiB, in 16 steps per power of two.
fn smooth_size(step: u8) -> u64 {
    u64::from(16 + (step & 15)) << (5 + (step >> 4))
}

/// Returns the bytes of a scenario that resembles a part of a recorded job: its streams, order and lifetimes, and approximately its sizes,
/// in the default pool. Allocations made before that part, and values that a byte cannot express, are omitted.
pub fn bytes_of_job(config: [u8; CONFIG_BYTES], ops: &[Op]) -> Vec<u8> {
    let mut bytes = config.to_vec();
    let mut live: Vec<AllocationId> = Vec::new();
    let place = |stream: StreamId| (stream.0 % 4) as u8;
    let find = |live: &[AllocationId], id: &AllocationId| live.iter().take(256).position(|live| live == id);
    for op in ops {
        bytes.extend(match op {
            Op::Allocate { id, stream, size_bytes, .. } => {
                live.push(*id);
                let what = (0..=u8::MAX).find(|step| smooth_size(*step) >= *size_bytes).unwrap_or(u8::MAX);
                [0, what, place(*stream), SMOOTH]
            }
            Op::Free { id } => {
                let Some(index) = find(&live, id) else { continue };
                live.swap_remove(index);
                [13, index as u8, 0, index as u8]
            }
            Op::RecordUse { id, stream } => {
                let Some(index) = find(&live, id) else { continue };
                [23, index as u8, index as u8, place(*stream)]
            }
            Op::Wait { stream, on } => [26, 0, place(*stream), place(*on)],
            Op::Synchronize { stream } => [27, 0, place(*stream), 0],
            Op::Trim { .. } => [28, 0, 0, 0],
            _ => continue,
        });
    }
    bytes
}

/// Generates bytes of scenarios with up to `ops` ops, for proptest.
pub fn scenario_bytes(ops: usize) -> impl Strategy<Value = Vec<u8>> {
    let config = prop::collection::vec(any::<u8>(), CONFIG_BYTES);
    let ops = prop::collection::vec(any::<[u8; OP_BYTES]>(), 0..ops);
    (config, ops).prop_map(|(mut bytes, ops)| {
        bytes.extend(ops.into_iter().flatten());
        bytes
    })
}

/// Builds a pool's policy from five bytes.
fn pool_config(tape: &mut Tape<'_>) -> PoolConfig {
    let mut expandable = ExpandableSegments::default();
    // Its highest bits select stitching of large blocks, or unsplit fixed segments.
    let stitches = tape.bytes.first().map_or(0, |byte| byte >> 5);
    (expandable.range_bytes, expandable.growth_bytes) =
        tape.pick(&[(512 << 30, 2 * MIB), (64 * MIB, 2 * MIB), (32 * MIB, 8 * MIB), (96 * MIB, 12 * MIB)]);
    let mut fixed = FixedSegments::default();
    fixed.max_split_size_bytes = tape.pick(&[None, None, Some(20 * MIB), Some(32 * MIB)]);
    let rounding = tape.byte();
    fixed.max_non_split_rounding_bytes = [20 * MIB, MIB][usize::from(rounding & 1)];
    fixed.unsplit = stitches == 5;
    let is_grouped = rounding & 0x80 != 0;
    let segments = tape.pick(&[
        SegmentPolicy::Expandable(expandable.clone()),
        SegmentPolicy::Fixed(fixed.clone()),
        SegmentPolicy::Expandable(expandable),
        SegmentPolicy::Fixed(fixed),
        SegmentPolicy::Reserved { segment_bytes: 48 * MIB },
    ]);
    let flags = tape.byte();
    let divisions = if flags & 0xc0 == 0xc0 { 4 } else { 0 };
    // A pool with a quota shares its streams, and releases nothing automatically.
    let (is_shared, has_threshold) = (flags & 1 != 0, flags & 0x30 == 0x30);
    let segments = match segments {
        SegmentPolicy::Expandable(mut knobs) if is_shared && !has_threshold && flags & 0xc0 == 0x40 => {
            knobs.growth_bytes = 0;
            SegmentPolicy::Expandable(knobs)
        }
        segments => segments,
    };
    let has_quota = matches!(&segments, SegmentPolicy::Expandable(knobs) if knobs.growth_bytes == 0);
    let may_stitch = flags & 2 == 0 && matches!(segments, SegmentPolicy::Expandable(_)) && !has_quota;
    PoolConfig::builder()
        .stitching(may_stitch.then(|| stitching(stitches)).flatten())
        .segments(segments)
        .streams(match (is_shared, is_grouped) {
            (true, _) => StreamPolicy::Shared,
            (false, true) => StreamPolicy::Grouped,
            (false, false) => StreamPolicy::Separate,
        })
        .symmetric(flags & 2 != 0)
        .limit_bytes([None, None, Some(36 * MIB), Some(70 * MIB)][usize::from(flags >> 2) & 3])
        .reclaim([Reclaim::Heap, Reclaim::Pool, Reclaim::Never][usize::from(flags >> 4) % 3])
        .release_threshold_bytes(has_threshold.then_some(24 * MIB))
        .roundup_power2_divisions(RoundupPower2Divisions::uniform(divisions).expect("a power of two"))
        .build()
        .expect("the configuration should be valid")
}

/// Returns small bounds, so that a short program reaches them.
fn stitching(choice: u8) -> Option<Stitching> {
    let mut stitching = Stitching::default();
    (stitching.granule_bytes, stitching.least_bytes) =
        [(2 * MIB, 2 * MIB), (4 * MIB, 9 * MIB)][usize::from(choice & 1)];
    (stitching.maps_max, stitching.aliases_max) = [(1 << 10, 1 << 16), (12, 24)][usize::from(choice >> 1 & 1)];
    (choice & 4 != 0).then_some(stitching)
}

/// A writer that converts four bytes at a time to an op that is valid after the preceding ones.
struct Writer {
    records: Vec<Record>,
    access: Vec<Access>,
    streams: u16,
    /// Live pools other than the default one, and the number of pools ever created.
    pools: Vec<PoolId>,
    pools_made: u32,
    /// Pools that were put to sleep and not woken.
    asleep: Vec<PoolId>,
    /// Allocations made and not yet freed by the program. Some of them were refused, and are not live.
    live: Vec<AllocationId>,
    made: u64,
}

impl Writer {
    /// The bits of `groups` select the streams after s0 that join a group: that of s0 or, if the last bit is set, that
    /// of their predecessor.
    fn new(streams: u16, groups: u8) -> Self {
        let mut group = StreamId(0);
        let records = (0..streams).map(StreamId).map(|stream| {
            let joins = stream.0 > 0 && groups >> (stream.0 - 1) & 1 != 0;
            if !joins && (stream.0 == 0 || groups & 8 != 0) {
                group = stream;
            }
            Record::from(Op::RegisterStream { stream, group: if joins { group } else { stream } })
        });
        let records = records.collect();
        let access = vec![Access::Handle; usize::from(streams)];
        Writer {
            records,
            access,
            streams,
            pools: Vec::new(),
            pools_made: 1,
            asleep: Vec::new(),
            live: Vec::new(),
            made: 0,
        }
    }

    fn write(&mut self, [kind, what, place, how]: [u8; OP_BYTES]) {
        let stream = StreamId(u16::from(place & 3) % self.streams);
        let other = StreamId(u16::from(how & 3) % self.streams);
        let pool = match usize::from(place >> 2) % (self.pools.len() + 3) {
            index if index < self.pools.len() => self.pools[index],
            _ => PoolId::DEFAULT,
        };
        if kind == BURST {
            return self.burst(pool, stream, what);
        }
        // Pools do not sleep for long.
        if kind % WAKES == 0 && !self.asleep.is_empty() {
            let pool = self.asleep.swap_remove(usize::from(what) % self.asleep.len());
            return self.push(Op::Wake { pool }.into(), how);
        }
        let op = match kind % 32 {
            0..13 => Some(self.allocate(pool, stream, what, how)),
            13..23 => self.take_live(what).map(|id| Op::Free { id }),
            23..26 => self.find_live(what).map(|id| Op::RecordUse { id, stream: other }),
            26 => Some(Op::Wait { stream, on: other }),
            27 | 28 if what >= SLEEPS && !self.asleep.contains(&pool) => {
                self.asleep.push(pool);
                Some(Op::Sleep { pool, contents: Contents::ALL[usize::from(what) % 3] })
            }
            27 => Some(Op::Synchronize { stream }),
            28 if how & 7 == RESETS => Some(Op::ResetPool { pool }),
            28 => Some(Op::Trim { pool: (how & 1 != 0).then_some(pool) }),
            29 => Some(Op::Reserve { pool, stream, size_bytes: SIZES[usize::from(what) % SIZES.len()] }),
            30 if self.pools.len() < 3 => Some(self.create_pool([what, place, how, what ^ how, place ^ how])),
            30 | 31 => self.destroy_pool(what),
            _ => None,
        };
        // An impossible op becomes an allocation, the most common op that is always possible.
        let op = op.unwrap_or_else(|| self.allocate(pool, stream, what, how));
        let record = Record::from(op);
        let is_named = matches!(record.op, Op::Allocate { .. }) && NAMED.contains(&how);
        // The access comes from the byte that has no other meaning for the op.
        let access = if matches!(record.op, Op::RecordUse { .. }) { place } else { how };
        self.push(if is_named { record.with_name("named") } else { record }, access);
    }

    fn push(&mut self, record: Record, access: u8) {
        self.records.push(record);
        self.access.push(Access::from_byte(access));
    }

    /// Allocates many blocks of one size and frees every second one, so many that the free index keeps them in a tree instead of a list.
    fn burst(&mut self, pool: PoolId, stream: StreamId, what: u8) {
        let first = self.live.len();
        for _ in 0..40 {
            let op = self.allocate(pool, stream, what % 5, 0);
            self.push(op.into(), what);
        }
        for index in (first..first + 20).rev() {
            let id = self.live.remove(first + 2 * (index - first));
            self.push(Op::Free { id }.into(), index as u8);
        }
    }

    fn allocate(&mut self, pool: PoolId, stream: StreamId, what: u8, how: u8) -> Op {
        let size_bytes = match SIZES[usize::from(what) % SIZES.len()] {
            _ if (SMOOTH..SMOOTH_END).contains(&how) => smooth_size(what),
            odd @ (0 | 0x100_0000_0001) if how >= 16 => odd % 512 + 2 * MIB,
            size => size + if how >= 200 { u64::from(how) * 512 } else { 0 },
        };
        let id = AllocationId(self.made);
        self.made += 1;
        self.live.push(id);
        Op::Allocate { id, pool, stream, size_bytes }
    }

    fn find_live(&self, what: u8) -> Option<AllocationId> {
        self.live.get(usize::from(what).checked_rem(self.live.len())?).copied()
    }

    fn take_live(&mut self, what: u8) -> Option<AllocationId> {
        let index = usize::from(what).checked_rem(self.live.len())?;
        Some(self.live.swap_remove(index))
    }

    fn create_pool(&mut self, bytes: [u8; 5]) -> Op {
        let pool = PoolId(self.pools_made);
        self.pools_made += 1;
        self.pools.push(pool);
        Op::CreatePool { pool, config: Box::new(pool_config(&mut Tape::new(&bytes))) }
    }

    /// Destroys a pool. If the pool is still in use, this is refused, and the pool remains without being named again.
    fn destroy_pool(&mut self, what: u8) -> Option<Op> {
        let index = usize::from(what).checked_rem(self.pools.len())?;
        let pool = self.pools.swap_remove(index);
        self.asleep.retain(|asleep| *asleep != pool);
        Some(Op::DestroyPool { pool })
    }
}
