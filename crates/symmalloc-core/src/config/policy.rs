//! Configuration values: everything that the program chooses before its first allocation, equal on every rank.
//!
//! A [`PoolConfig`] is the policy of one pool. A [`Config`] belongs to an allocator: the policy of the default pool,
//! and settings that apply to all pools. Builders check every value, so a value of these types is valid by
//! construction. [`crate::config::text`] reads and writes them in PyTorch's `key:value,...` syntax.
//!
//! Configuration is an input of every decision (rule D1). Two ranks with different configurations run two different
//! programs; [`Config::digest`] detects this.

use crate::config::debug::DebugOptions;
use crate::config::stitching::Stitching;
use crate::types::base::{Base, BaseError};
use crate::types::groups::Groups;
use crate::types::ids::{StreamGroup, StreamId};
use crate::types::units::{GIB, MIB, SEGMENT_BYTES_MAX, UNIT_BYTES};
use std::fmt;

/// PyTorch's `kLargeBuffer`: the fixed segment for requests between 1 and 10 MiB, in bytes.
pub(crate) const LARGE_SEGMENT_BYTES: u64 = 20 * MIB;

/// Default range of an expandable heap in a pool with a base, in bytes. A heap that fills it starts another one.
pub(crate) const BASED_RANGE_BYTES: u64 = 64 * GIB;

/// Generates the getters of a configuration and its builder.
macro_rules! settings {
    (
        $config:ident, $builder:ident
        { $($(#[$doc:meta])* $name:ident: $value:ty,)* }
        optional { $($(#[$optional_doc:meta])* $optional:ident: $some:ty,)* }
    ) => {
        impl $config {
            /// Returns a builder that starts from the defaults.
            pub fn builder() -> $builder { Self::default().to_builder() }

            /// Returns a builder that starts from this configuration.
            pub fn to_builder(&self) -> $builder { $builder { config: self.clone() } }

            $($(#[$doc])* pub fn $name(&self) -> $value { self.$name })*
            $($(#[$optional_doc])* pub fn $optional(&self) -> Option<$some> { self.$optional })*
        }

        /// A builder of a configuration.
        #[derive(Clone, Debug)]
        #[must_use]
        pub struct $builder { config: $config }

        impl $builder {
            $($(#[$doc])* pub fn $name(mut self, $name: $value) -> Self { self.config.$name = $name; self })*
            $(
                $(#[$optional_doc])*
                pub fn $optional(mut self, $optional: impl Into<Option<$some>>) -> Self {
                    self.config.$optional = $optional.into();
                    self
                }
            )*
        }
    };
}

/// A pool's method of acquiring backing memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentPolicy {
    /// PyTorch's size rules: small and large segments of fixed sizes, each acquired as a whole.
    Fixed(FixedSegments),
    /// One virtual range per heap that grows at its end, mapped in granules. The default.
    Expandable(ExpandableSegments),
    /// One segment per heap, acquired as a whole at the heap's first op. The heap never grows. For registered memory.
    Reserved {
        /// Size of the segment in bytes; a multiple of 512, rounded up to the backend's granularity when it is
        /// acquired.
        segment_bytes: u64,
    },
}

impl Default for SegmentPolicy {
    fn default() -> Self {
        SegmentPolicy::Expandable(ExpandableSegments::default())
    }
}

/// Settings of [`SegmentPolicy::Fixed`], with PyTorch's names, meanings and defaults.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct FixedSegments {
    /// Blocks of at least this many bytes are never split (`max_split_size_mb`). `None`: no bound.
    pub max_split_size_bytes: Option<u64>,
    /// Maximum number of bytes by which an unsplittable block may exceed the request (`max_non_split_rounding_mb`).
    pub max_non_split_rounding_bytes: u64,
    /// The segment for requests between 1 and 10 MiB (`large_segment_size_mb`); a multiple of 2 MiB, more than 10 MiB.
    pub large_segment_bytes: u64,
    /// Every allocation has its own segment of its size in whole granules (`unsplit`). The other settings and PyTorch's
    /// sizes then have no effect. A free segment serves only requests of exactly its size. For memory whose allocations
    /// are registered individually.
    pub unsplit: bool,
}

impl Default for FixedSegments {
    fn default() -> Self {
        FixedSegments {
            max_split_size_bytes: None,
            max_non_split_rounding_bytes: LARGE_SEGMENT_BYTES,
            large_segment_bytes: LARGE_SEGMENT_BYTES,
            unsplit: false,
        }
    }
}

/// Settings of [`SegmentPolicy::Expandable`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ExpandableSegments {
    /// Address space reserved per heap, in bytes. It takes no memory, and a heap cannot grow beyond it.
    pub range_bytes: u64,
    /// The range grows by multiples of this many bytes; a multiple of the backend's granularity. Larger steps need
    /// fewer driver calls, smaller ones leave less unused memory at the end. With 0, the pool has a *quota*: the amount
    /// set by `reserve`. No allocation makes it grow, and only a trim that names the pool shrinks it.
    pub growth_bytes: u64,
}

impl Default for ExpandableSegments {
    fn default() -> Self {
        ExpandableSegments { range_bytes: 512 * GIB, growth_bytes: 2 * MIB }
    }
}

/// The policy for sharing free blocks between the streams of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StreamPolicy {
    /// One heap per stream: a block is reused only on the stream for which it was allocated. Threads that drive
    /// different streams do not affect each other (rule D8).
    #[default]
    Separate,
    /// One heap per group of streams, see [`Groups`]: a free block serves any stream of its group, which waits for the
    /// earlier users on the device. Threads that drive different groups do not affect each other (rule D8).
    Grouped,
    /// One heap for all streams of the pool: a free block serves any stream, which waits for the earlier users on the
    /// device. For programs in which one host thread drives all streams.
    Shared,
}

impl StreamPolicy {
    /// Returns the streams that share a heap with `stream`, which is one of them.
    #[inline]
    pub fn group_of(self, stream: StreamId, groups: &Groups) -> StreamGroup {
        match self {
            StreamPolicy::Separate => StreamGroup::One(stream),
            StreamPolicy::Grouped => StreamGroup::Group(groups.first_of(stream)),
            StreamPolicy::Shared => StreamGroup::All,
        }
    }

    /// Returns `true` if a pool with this policy can have a heap of these streams.
    pub const fn makes(self, group: StreamGroup) -> bool {
        match group {
            StreamGroup::One(_) => matches!(self, StreamPolicy::Separate),
            StreamGroup::Group(_) => matches!(self, StreamPolicy::Grouped),
            StreamGroup::All => matches!(self, StreamPolicy::Shared),
        }
    }

    /// Returns the word for this policy in a configuration.
    pub const fn word(self) -> &'static str {
        match self {
            StreamPolicy::Separate => "separate",
            StreamPolicy::Grouped => "grouped",
            StreamPolicy::Shared => "shared",
        }
    }
}

/// The policy for an allocation that would exceed a configured limit (rule D5). Before it fails, the allocator releases
/// as much memory as is missing and retries, until it succeeds or there is nothing left to release. Memory that a
/// failure callback frees without trimming is reused in place and not released.
///
/// Reclaiming never affects other pools. A symmetric pool releases nothing for the limit over all pools, so that events
/// in another pool cannot move its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reclaim {
    /// Fails at once.
    Never,
    /// Releases the free memory of the requesting heap, in sequence order. The default: a heap stays independent of the
    /// others.
    #[default]
    Heap,
    /// Releases the free memory of the whole pool, in (stream, sequence) order. For pools driven by one host thread.
    Pool,
}

/// The source of a pool's plans. See [`Plan`](crate::plans::Plan).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlanPolicy {
    /// The pool follows only plans that the program supplies.
    #[default]
    Off,
    /// The pool plans a step that makes the same requests twice in a row, and follows the plan from then on. The
    /// program marks steps with `begin_step` and `end_step`.
    Learn,
}

/// `roundup_power2_divisions`: the number of steps between two powers of two to which requests are rounded up.
///
/// Element i applies to sizes from 2^i MiB up (element 0 also to all smaller ones, the last one also to all larger
/// ones), as in PyTorch. 0 or 1: no rounding beyond 512 bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RoundupPower2Divisions {
    /// For each size, 0 for no division, and otherwise the exponent plus one. A quarter of the numbers' size, because
    /// the configuration of a destroyed pool is kept.
    codes: [u8; 16],
}

impl RoundupPower2Divisions {
    /// Uses the same number of divisions for all sizes.
    ///
    /// # Errors
    /// Returns an error if `divisions` is neither zero nor a power of two.
    pub fn uniform(divisions: u32) -> Result<Self, ConfigError> {
        Self::per_size([divisions; 16])
    }

    /// Uses one number of divisions per size, from 1, 2, 4, ... 32768 MiB up.
    ///
    /// # Errors
    /// Returns an error if one of them is neither zero nor a power of two.
    pub fn per_size(divisions: [u32; 16]) -> Result<Self, ConfigError> {
        match divisions.iter().find(|d| **d != 0 && !d.is_power_of_two()) {
            Some(&divisions) => {
                Err(ConfigError::NotAPowerOfTwo { key: "roundup_power2_divisions", value: divisions.into() })
            }
            None => Ok(RoundupPower2Divisions { codes: divisions.map(|d| (u32::BITS - d.leading_zeros()) as u8) }),
        }
    }

    /// Returns the divisions by size.
    pub fn divisions(&self) -> [u32; 16] {
        std::array::from_fn(|index| self.at(index))
    }

    /// Returns the divisions of the sizes at this index.
    pub(crate) fn at(&self, index: usize) -> u32 {
        ((1_u64 << self.codes[index]) >> 1) as u32
    }
}

impl fmt::Debug for RoundupPower2Divisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RoundupPower2Divisions").field(&self.divisions()).finish()
    }
}

/// The policy of one pool. The default has expandable segments, separate streams and no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PoolConfig {
    segments: SegmentPolicy,
    streams: StreamPolicy,
    symmetric: bool,
    limit_bytes: Option<u64>,
    release_threshold_bytes: Option<u64>,
    reclaim: Reclaim,
    roundup_power2_divisions: RoundupPower2Divisions,
    plan: PlanPolicy,
    /// `None` unless segments are expandable and the pool is not symmetric. Boxed because it is usually absent, and the
    /// configuration of a destroyed pool is kept.
    stitching: Option<Box<Stitching>>,
    /// `None` if all options are off. Boxed for the same reason.
    debug: Option<Box<DebugOptions>>,
    tag: Option<Box<str>>,
    base: Option<Base>,
}

impl PoolConfig {
    /// Returns the pool's method of acquiring backing memory.
    pub fn segments(&self) -> &SegmentPolicy {
        &self.segments
    }

    /// Returns the tag. Pools with the same tag sleep and wake together.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the first address of the pool's memory, if the program chose it.
    pub fn base(&self) -> Option<Base> {
        self.base
    }

    /// Returns `true` if the pool has a quota: expandable segments with a growth of 0.
    pub fn has_quota(&self) -> bool {
        matches!(&self.segments, SegmentPolicy::Expandable(expandable) if expandable.growth_bytes == 0)
    }

    /// Returns the part of the policy that a backend can serve. The digest does not include the rest.
    pub(crate) fn that_works(mut self, can_alias: bool) -> Self {
        self.stitching = self.stitching.filter(|_| can_alias);
        self
    }

    /// Returns the options that find memory errors of the program.
    pub fn debug(&self) -> DebugOptions {
        self.debug.as_deref().copied().unwrap_or_default()
    }

    /// Returns the stitching settings. `None` if the pool does not stitch, or the backend cannot alias memory.
    pub fn stitching(&self) -> Option<&Stitching> {
        self.stitching.as_deref()
    }
}

settings! {
    PoolConfig, PoolConfigBuilder {
        /// The policy for sharing free blocks between the pool's streams.
        streams: StreamPolicy,
        /// `true` if all ranks must place alike in this pool. Only symmetric pools are compared between ranks.
        symmetric: bool,
        /// The policy for an allocation that would exceed a limit.
        reclaim: Reclaim,
        /// Rounding of requests beyond 512 bytes.
        roundup_power2_divisions: RoundupPower2Divisions,
        /// The source of the pool's plans.
        plan: PlanPolicy,
    } optional {
        /// The maximum device memory that the pool may hold, in bytes.
        limit_bytes: u64,
        /// A heap with more free bytes than this after a free releases its free memory (CUDA's release threshold).
        release_threshold_bytes: u64,
    }
}

impl PoolConfigBuilder {
    /// Sets the pool's method of acquiring backing memory. Only expandable segments are stitched.
    pub fn segments(mut self, segments: SegmentPolicy) -> Self {
        self.config.stitching = self.config.stitching.filter(|_| matches!(segments, SegmentPolicy::Expandable(_)));
        self.config.segments = segments;
        self
    }

    /// Uses PyTorch's fixed segments with their default settings.
    pub fn fixed(self) -> Self {
        self.segments(SegmentPolicy::Fixed(FixedSegments::default()))
    }

    /// Uses one growing range per heap with default settings.
    pub fn expandable(self) -> Self {
        self.segments(SegmentPolicy::default())
    }

    /// Uses one segment of `segment_bytes` per heap, acquired in advance.
    pub fn reserved(self, segment_bytes: u64) -> Self {
        self.segments(SegmentPolicy::Reserved { segment_bytes })
    }

    /// Sets stitching, which makes large blocks from free pieces where no free block fits.
    pub fn stitching(mut self, stitching: impl Into<Option<Stitching>>) -> Self {
        self.config.stitching = stitching.into().map(Box::new);
        self
    }

    /// Sets the options that find memory errors of the program.
    pub fn debug(mut self, options: DebugOptions) -> Self {
        self.config.debug = (!options.is_off()).then(|| Box::new(options));
        self
    }

    /// Sets the purpose of the pool, for example `weights` or `kv_cache`: 1 to 24 lower-case letters, digits, `_` and
    /// `-`.
    pub fn tag<'a>(mut self, tag: impl Into<Option<&'a str>>) -> Self {
        self.config.tag = tag.into().map(Into::into);
        self
    }

    /// Sets the first address of the pool's memory, which is then the same in every process, or removes it. All memory of
    /// the pool lies in the [`SLOT_BYTES`](crate::base::SLOT_BYTES) addresses from there on. Expandable segments with the
    /// default range get a range of 64 GiB, of which a slot holds sixteen, and the default range again if the base is
    /// removed. Call [`segments`](Self::segments) afterwards for another range.
    pub fn base(mut self, base: impl Into<Option<Base>>) -> Self {
        let default_range = |base: Option<Base>| match base {
            Some(_) => BASED_RANGE_BYTES,
            None => ExpandableSegments::default().range_bytes,
        };
        let before = std::mem::replace(&mut self.config.base, base.into());
        if let SegmentPolicy::Expandable(expandable) = &mut self.config.segments
            && expandable.range_bytes == default_range(before)
        {
            expandable.range_bytes = default_range(self.config.base);
        }
        self
    }

    /// Checks the values. A pool with a quota releases nothing on its own: its policy is [`Reclaim::Never`].
    ///
    /// # Errors
    /// Returns an error if a value is out of its range, with the key, the value and the range; if a symmetric pool or
    /// one without expandable segments would stitch; if a pool with a quota would also grow or shrink on its own; or if a
    /// pool that keeps its memory would unmap freed blocks.
    pub fn build(mut self) -> Result<PoolConfig, ConfigError> {
        if self.config.has_quota() {
            self.config.reclaim = Reclaim::Never;
            let PoolConfig { stitching, plan, release_threshold_bytes, streams, .. } = &self.config;
            let moves = stitching.is_some() || *plan != PlanPolicy::Off || release_threshold_bytes.is_some();
            if moves || *streams != StreamPolicy::Shared {
                return Err(ConfigError::HasQuota);
            }
        }
        match &self.config.segments {
            SegmentPolicy::Fixed(fixed) => {
                in_range("large_segment_size", fixed.large_segment_bytes, 12 * MIB, SEGMENT_BYTES_MAX)?;
                multiple_of("large_segment_size", fixed.large_segment_bytes, 2 * MIB)?;
                if let Some(max_split) = fixed.max_split_size_bytes {
                    in_range("max_split_size", max_split, fixed.large_segment_bytes, u64::MAX)?;
                }
                in_range("max_non_split_rounding", fixed.max_non_split_rounding_bytes, 0, SEGMENT_BYTES_MAX)?;
            }
            SegmentPolicy::Expandable(expandable) => {
                in_range("range", expandable.range_bytes, 2 * MIB, SEGMENT_BYTES_MAX)?;
                let step_bytes = if expandable.growth_bytes == 0 { UNIT_BYTES } else { expandable.growth_bytes };
                in_range("growth", step_bytes, UNIT_BYTES, expandable.range_bytes)?;
                multiple_of("growth", step_bytes, UNIT_BYTES)?;
                multiple_of("range", expandable.range_bytes, step_bytes)?;
            }
            SegmentPolicy::Reserved { segment_bytes } => {
                in_range("segment", *segment_bytes, UNIT_BYTES, SEGMENT_BYTES_MAX)?;
                multiple_of("segment", *segment_bytes, UNIT_BYTES)?;
            }
        }
        if let Some(stitching) = &self.config.stitching {
            if self.config.symmetric || !matches!(self.config.segments, SegmentPolicy::Expandable(_)) {
                return Err(ConfigError::NotStitched { symmetric: self.config.symmetric });
            }
            in_range("stitching_granule", stitching.granule_bytes, UNIT_BYTES, 1 << 30)?;
            multiple_of("stitching_granule", stitching.granule_bytes, UNIT_BYTES)?;
            in_range("stitching_least", stitching.least_bytes, UNIT_BYTES, SEGMENT_BYTES_MAX)?;
            in_range("stitching_maps", stitching.maps_max.into(), 1, 1 << 20)?;
            in_range("stitching_aliases", stitching.aliases_max.into(), stitching.maps_max.into(), 1 << 24)?;
        }
        if let Some(debug) = &self.config.debug {
            in_range("quarantine", debug.quarantine_bytes, 0, SEGMENT_BYTES_MAX)?;
            let keeps = self.config.has_quota() || matches!(self.config.segments, SegmentPolicy::Reserved { .. });
            if debug.unmap && keeps {
                return Err(ConfigError::NotUnmapped);
            }
            // A pool that keeps its memory, such as one for graphs, unmaps it at its end.
            if debug.unmap && self.config.reclaim != Reclaim::Never {
                self.config.release_threshold_bytes = Some(0);
            }
        }
        let is_in_tags = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
        let is_tag = |tag: &str| (1..=24).contains(&tag.len()) && tag.bytes().all(is_in_tags);
        if self.config.tag().is_some_and(|tag| !is_tag(tag)) {
            return Err(ConfigError::NotATag);
        }
        Ok(self.config)
    }
}

/// An allocator's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    default_pool: PoolConfig,
    total_limit_bytes: Option<u64>,
    retries_max: u32,
    pointer_lookup: PointerLookup,
    history_ops: u32,
}

/// The methods for looking up allocations, and their cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PointerLookup {
    /// By handle only. Costs nothing.
    #[default]
    Off,
    /// Also by the pointer that `allocate` returned, with a hash table.
    Exact,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            default_pool: PoolConfig::default(),
            total_limit_bytes: None,
            retries_max: 3,
            pointer_lookup: PointerLookup::Off,
            history_ops: 4096,
        }
    }
}

impl Config {
    /// Returns the policy of pool 0.
    pub fn default_pool(&self) -> &PoolConfig {
        &self.default_pool
    }
}

settings! {
    Config, ConfigBuilder {
        /// Maximum number of retries of one allocation that the failure callback may request.
        retries_max: u32,
        /// Look-up of allocations by device pointer.
        pointer_lookup: PointerLookup,
        /// Number of ops that each heap of a symmetric pool remembers, so that agreement can name the first one that
        /// differs: 32 bytes each, and up to 112 more if the allocation has a name. 0 disables the history. Has no effect
        /// on placements.
        history_ops: u32,
    } optional {
        /// The maximum device memory that all pools together may hold, in bytes.
        total_limit_bytes: u64,
    }
}

impl ConfigBuilder {
    /// Sets the policy of pool 0.
    pub fn default_pool(mut self, pool: PoolConfig) -> Self {
        self.config.default_pool = pool;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// Returns an error if a value is out of its range, with the key, the value and the range.
    pub fn build(self) -> Result<Config, ConfigError> {
        in_range("retries_max", self.config.retries_max.into(), 0, 1000)?;
        in_range("history_ops", self.config.history_ops.into(), 0, 1 << 24)?;
        Ok(self.config)
    }
}

/// An invalid configuration value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The value is out of its range.
    #[error("{key} is {value}, but must be from {min} to {max}")]
    OutOfRange {
        /// The key, without its unit.
        key: &'static str,
        /// The given value.
        value: u64,
        /// The smallest allowed value.
        min: u64,
        /// The largest allowed value.
        max: u64,
    },
    /// The value is not a multiple of the required unit.
    #[error("{key} is {value}, but must be a multiple of {of}")]
    NotAMultiple {
        /// The key, without its unit.
        key: &'static str,
        /// The given value.
        value: u64,
        /// The required unit.
        of: u64,
    },
    /// The value is not a power of two.
    #[error("{key} is {value}, but must be zero or a power of two")]
    NotAPowerOfTwo {
        /// The key.
        key: &'static str,
        /// The given value.
        value: u64,
    },
    /// The tag is empty, too long, or contains other characters.
    #[error("a tag must consist of 1 to 24 lower-case letters, digits, `_` and `-`")]
    NotATag,
    /// A pool with a quota must not grow or shrink on its own.
    #[error("growth 0 sets a quota: use streams:shared, and omit stitching, plan and release_threshold")]
    HasQuota,
    /// The addresses of the default pool cannot be reserved.
    #[error("the default pool cannot have its base: {0}")]
    Base(#[from] Box<BaseError>),
    /// A pool with a quota or a reserved segment keeps its memory, so freed blocks stay mapped.
    #[error(
        "debug:unmap has no effect on a reserved segment or a quota: use expandable or fixed segments, or remove it"
    )]
    NotUnmapped,
    /// Memory that may be registered, or that has fixed sizes, cannot be stitched.
    #[error(
        "{} cannot be stitched: remove stitching, or use another pool, with expandable segments",
        if *symmetric { "a symmetric pool" } else { "a pool of fixed or reserved segments" }
    )]
    NotStitched {
        /// `true` if the reason is that the pool is symmetric.
        symmetric: bool,
    },
}

pub(crate) fn in_range(key: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { key, value, min, max }) }
}

fn multiple_of(key: &'static str, value: u64, of: u64) -> Result<(), ConfigError> {
    if value.is_multiple_of(of) { Ok(()) } else { Err(ConfigError::NotAMultiple { key, value, of }) }
}
