//! Configuration: what the program decides before the first allocation, equal on every rank.
//!
//! A [`PoolConfig`] is the policy of one pool, a [`Config`] is an allocator's: the default pool's policy and what holds
//! over all pools. Both are made by builders that check every value, so a value of these types is valid by
//! construction. [`crate::config::text`] reads and writes them in PyTorch's `key:value,...` syntax.
//!
//! Configuration is an input of every decision (rule D1): two ranks with different configurations are two different
//! programs, which is why [`Config::digest`] exists.

use crate::config::stitching::Stitching;
use crate::types::units::{GIB, MIB, SEGMENT_BYTES_MAX, UNIT_BYTES};

/// PyTorch's `kLargeBuffer`: the fixed segment for requests between 1 and 10 MiB, in bytes.
pub(crate) const LARGE_SEGMENT_BYTES: u64 = 20 * MIB;

/// What a configuration says of each of these, and a builder that sets it.
macro_rules! settings {
    ($config:ident, $builder:ident: $($(#[$doc:meta])* $name:ident: $value:ty,)*) => {
        impl $config {
            /// Starts from the defaults.
            pub fn builder() -> $builder { Self::default().to_builder() }

            /// Starts from this one.
            pub fn to_builder(&self) -> $builder { $builder { config: self.clone() } }

            $($(#[$doc])* pub fn $name(&self) -> $value { self.$name })*
        }

        /// Makes a configuration.
        #[derive(Clone, Debug)]
        #[must_use]
        pub struct $builder { config: $config }

        impl $builder {
            $($(#[$doc])* pub fn $name(mut self, $name: $value) -> Self { self.config.$name = $name; self })*
        }
    };
}

/// How a pool obtains backing memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentPolicy {
    /// PyTorch's size rules: small and large segments of fixed sizes, each obtained whole.
    Fixed(FixedSegments),
    /// One virtual range per heap that grows at its end, mapped in granules. The default.
    Expandable(ExpandableSegments),
    /// One segment per heap, obtained whole at the heap's first op; the heap never grows. For registered memory.
    Reserved {
        /// Size of the segment in bytes; a multiple of 512, rounded up to the backend's granularity when obtained.
        segment_bytes: u64,
    },
}

impl Default for SegmentPolicy {
    fn default() -> Self {
        SegmentPolicy::Expandable(ExpandableSegments::default())
    }
}

/// Knobs of [`SegmentPolicy::Fixed`], with PyTorch's names, meanings and defaults.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct FixedSegments {
    /// Blocks of at least this many bytes are never split (`max_split_size_mb`). `None`: no bound.
    pub max_split_size_bytes: Option<u64>,
    /// How much larger than the request an unsplittable block may be (`max_non_split_rounding_mb`).
    pub max_non_split_rounding_bytes: u64,
    /// The segment for requests between 1 and 10 MiB (`large_segment_size_mb`); a multiple of 2 MiB, more than 10 MiB.
    pub large_segment_bytes: u64,
    /// Every allocation has a segment of its own, of its size in whole granules (`unsplit`): the other knobs and PyTorch's sizes say
    /// nothing then. A free segment serves requests of its own size alone. For memory that is registered piece by piece.
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

/// Knobs of [`SegmentPolicy::Expandable`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ExpandableSegments {
    /// Address space reserved per heap, in bytes. Costs no memory; a heap cannot grow beyond it.
    pub range_bytes: u64,
    /// The range grows by multiples of this many bytes; a multiple of the backend's granularity. Larger steps make
    /// fewer driver calls, smaller ones leave less memory unused at the end. 0: the pool has a *quota*, which is what `reserve` made it
    /// hold. No allocation makes it grow, and only a trim that names the pool makes it smaller.
    pub growth_bytes: u64,
}

impl Default for ExpandableSegments {
    fn default() -> Self {
        ExpandableSegments { range_bytes: 512 * GIB, growth_bytes: 2 * MIB }
    }
}

/// Whether the streams of a pool share free blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StreamPolicy {
    /// A heap per stream: a block is reused only on the stream it was allocated on. Threads that drive different
    /// streams do not disturb each other (rule D8).
    #[default]
    Separate,
    /// One heap for all streams of the pool: a free block serves any stream, which waits for the earlier users on the
    /// device. For programs in which one host thread drives all streams.
    Shared,
}

/// What an allocation does, before it fails, when a configured limit would be exceeded (rule D5). It gives back as much as is
/// missing, and retries, until it is served or nothing that it may give back is left. What a failure callback frees
/// without trimming is used where it is, and not given back.
///
/// It never reaches beyond the pool, and a symmetric pool gives nothing back for the limit over all pools, so that what
/// happens in one pool cannot move a block of a symmetric one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reclaim {
    /// Fail at once.
    Never,
    /// Give back the free memory of the heap that asks, in sequence order. The default: a heap stays independent of
    /// its neighbours.
    #[default]
    Heap,
    /// Give back the free memory of the whole pool, in (stream, sequence) order. For pools driven by one host thread.
    Pool,
}

/// Whether a pool plans its steps by itself. See [`Plan`](crate::plans::Plan).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlanPolicy {
    /// Only plans that the program hands over are followed.
    #[default]
    Off,
    /// A step that asks for the same twice in a row is planned when it ends, and followed from then on. Which steps there are says
    /// the program, with `begin_step` and `end_step`.
    Learn,
}

/// `roundup_power2_divisions`: how many steps a request is rounded up to between two powers of two.
///
/// Element i is for sizes from 2^i MiB up (element 0 also for all smaller ones, the last also for all larger ones), as
/// in PyTorch. 0 or 1: no rounding beyond 512 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RoundupPower2Divisions([u32; 16]);

impl RoundupPower2Divisions {
    /// The same number of divisions for all sizes.
    ///
    /// # Errors
    /// When `divisions` is not zero or a power of two.
    pub fn uniform(divisions: u32) -> Result<Self, ConfigError> {
        Self::per_size([divisions; 16])
    }

    /// Divisions for sizes from 1, 2, 4, ... 32768 MiB up.
    ///
    /// # Errors
    /// When one of them is not zero or a power of two.
    pub fn per_size(divisions: [u32; 16]) -> Result<Self, ConfigError> {
        match divisions.iter().find(|d| **d != 0 && !d.is_power_of_two()) {
            Some(&divisions) => {
                Err(ConfigError::NotAPowerOfTwo { key: "roundup_power2_divisions", value: divisions.into() })
            }
            None => Ok(RoundupPower2Divisions(divisions)),
        }
    }

    /// The divisions by size, as given.
    pub fn divisions(&self) -> [u32; 16] {
        self.0
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
    /// `None` unless segments are expandable and the pool is not symmetric.
    stitching: Option<Stitching>,
    tag: Option<Box<str>>,
}

impl PoolConfig {
    /// How the pool obtains backing memory.
    pub fn segments(&self) -> &SegmentPolicy {
        &self.segments
    }

    /// What the pool is for: pools of one tag sleep and wake together.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Whether the pool holds what `reserve` made it hold: expandable segments with a growth of 0.
    pub fn has_quota(&self) -> bool {
        matches!(&self.segments, SegmentPolicy::Expandable(expandable) if expandable.growth_bytes == 0)
    }

    /// What of the policy a backend can serve. What is left out is not in the digest either.
    pub(crate) fn that_works(mut self, can_alias: bool) -> Self {
        self.stitching = self.stitching.filter(|_| can_alias);
        self
    }

    /// How large blocks are put together from free pieces, if they are. `None` also where the backend cannot do that.
    pub fn stitching(&self) -> Option<&Stitching> {
        self.stitching.as_ref()
    }
}

settings! {
    PoolConfig, PoolConfigBuilder:
    /// Whether the pool's streams share free blocks.
    streams: StreamPolicy,
    /// Whether all ranks place alike in this pool: only symmetric pools are compared between ranks.
    symmetric: bool,
    /// The most device memory the pool may hold, in bytes.
    limit_bytes: Option<u64>,
    /// A heap that holds more free bytes than this after a free gives its free memory back (CUDA's release threshold).
    release_threshold_bytes: Option<u64>,
    /// What happens before an allocation fails at a limit.
    reclaim: Reclaim,
    /// How requests are rounded beyond 512 bytes.
    roundup_power2_divisions: RoundupPower2Divisions,
    /// Whether the pool plans its steps by itself.
    plan: PlanPolicy,
}

impl PoolConfigBuilder {
    /// How the pool obtains backing memory. Only expandable segments are stitched.
    pub fn segments(mut self, segments: SegmentPolicy) -> Self {
        self.config.stitching = self.config.stitching.filter(|_| matches!(segments, SegmentPolicy::Expandable(_)));
        self.config.segments = segments;
        self
    }

    /// PyTorch's fixed segments with their default knobs.
    pub fn fixed(self) -> Self {
        self.segments(SegmentPolicy::Fixed(FixedSegments::default()))
    }

    /// One growing range per heap with default knobs.
    pub fn expandable(self) -> Self {
        self.segments(SegmentPolicy::default())
    }

    /// One segment of `segment_bytes` per heap, obtained up front.
    pub fn reserved(self, segment_bytes: u64) -> Self {
        self.segments(SegmentPolicy::Reserved { segment_bytes })
    }

    /// Whether large blocks are put together from free pieces, and how.
    pub fn stitching(mut self, stitching: Option<Stitching>) -> Self {
        self.config.stitching = stitching;
        self
    }

    /// What the pool is for, for example `weights` or `kv_cache`: 1 to 24 lower-case letters, digits, `_` and `-`.
    pub fn tag(mut self, tag: Option<Box<str>>) -> Self {
        self.config.tag = tag;
        self
    }

    /// Checks the values. A pool with a quota gives nothing back by itself: it has [`Reclaim::Never`].
    ///
    /// # Errors
    /// When a value is out of its range, with the key, the value and the range; when what is registered or fixed shall be
    /// stitched; when a pool with a quota shall also grow or shrink by itself.
    pub fn build(mut self) -> Result<PoolConfig, ConfigError> {
        if self.config.has_quota() {
            self.config.reclaim = Reclaim::Never;
            let PoolConfig { stitching, plan, release_threshold_bytes, streams, .. } = &self.config;
            let moves = stitching.is_some() || *plan != PlanPolicy::Off || release_threshold_bytes.is_some();
            if moves || *streams == StreamPolicy::Separate {
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
    limit_bytes: Option<u64>,
    retries_max: u32,
    pointer_lookup: PointerLookup,
    history_ops: u32,
}

/// Whether allocations can be found by device pointer, and what that costs.
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
            limit_bytes: None,
            retries_max: 3,
            pointer_lookup: PointerLookup::Off,
            history_ops: 4096,
        }
    }
}

impl Config {
    /// The policy of pool 0.
    pub fn default_pool(&self) -> &PoolConfig {
        &self.default_pool
    }
}

settings! {
    Config, ConfigBuilder:
    /// The most device memory all pools together may hold, in bytes.
    limit_bytes: Option<u64>,
    /// How often the failure callback may ask for another attempt at one allocation.
    retries_max: u32,
    /// Whether allocations can be found by device pointer.
    pointer_lookup: PointerLookup,
    /// How many ops each heap of a symmetric pool remembers, for agreement to name the first that differs: 32 bytes each, and up
    /// to 112 more where the allocation has a name. 0: none. Decides no placement.
    history_ops: u32,
}

impl ConfigBuilder {
    /// The policy of pool 0.
    pub fn default_pool(mut self, pool: PoolConfig) -> Self {
        self.config.default_pool = pool;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    /// When a value is out of its range, with the key, the value and the range.
    pub fn build(self) -> Result<Config, ConfigError> {
        in_range("retries_max", self.config.retries_max.into(), 0, 1000)?;
        in_range("history_ops", self.config.history_ops.into(), 0, 1 << 24)?;
        Ok(self.config)
    }
}

/// A configuration value that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The value is outside of its range.
    #[error("{key} is {value}, but must be from {min} to {max}")]
    OutOfRange {
        /// The key, without its unit.
        key: &'static str,
        /// The value given.
        value: u64,
        /// The least value.
        min: u64,
        /// The greatest value.
        max: u64,
    },
    /// The value is not a multiple of what it must be a multiple of.
    #[error("{key} is {value}, but must be a multiple of {of}")]
    NotAMultiple {
        /// The key, without its unit.
        key: &'static str,
        /// The value given.
        value: u64,
        /// What it must be a multiple of.
        of: u64,
    },
    /// The value is not a power of two.
    #[error("{key} is {value}, but must be zero or a power of two")]
    NotAPowerOfTwo {
        /// The key.
        key: &'static str,
        /// The value given.
        value: u64,
    },
    /// A tag is empty, too long, or has other characters.
    #[error("a tag has 1 to 24 lower-case letters, digits, `_` and `-`")]
    NotATag,
    /// A pool with a quota neither grows nor shrinks by itself.
    #[error("growth 0 gives a quota: say streams:shared, and leave stitching, plan and release_threshold out")]
    HasQuota,
    /// Memory that may be registered, or has sizes of its own, is not stitched.
    #[error(
        "{} is not stitched: remove stitching, or use another pool, with expandable segments",
        if *symmetric { "a symmetric pool" } else { "a pool of fixed or reserved segments" }
    )]
    NotStitched {
        /// Whether that is because the pool is symmetric.
        symmetric: bool,
    },
}

pub(crate) fn in_range(key: &'static str, value: u64, min: u64, max: u64) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(ConfigError::OutOfRange { key, value, min, max }) }
}

fn multiple_of(key: &'static str, value: u64, of: u64) -> Result<(), ConfigError> {
    if value.is_multiple_of(of) { Ok(()) } else { Err(ConfigError::NotAMultiple { key, value, of }) }
}
