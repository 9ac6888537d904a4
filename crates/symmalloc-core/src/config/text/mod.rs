//! Configurations as text, in the syntax of PyTorch's `PYTORCH_CUDA_ALLOC_CONF`: `key:value,key:[k:v,k:v]`.
//!
//! ```text
//!             parse                    build
//!   text ─────────────► settings ─────────────► Config, PoolConfig
//!     ▲  punctuation,     each key     ranges, contradictions   │
//!     └──────────────────────── Display ◄───────────────────────┘
//! ```
//!
//! Two dialects. [`FromStr`] is strict: what has no effect is an error. [`Config::from_pytorch_env`] takes a text that was
//! written for PyTorch, with PyTorch's defaults, and lists what has no effect. `docs/configuration.md` has the table of
//! all keys.
//!
//! `Display` writes the *canonical* text: every value that is set, defaults too, in a fixed order and unit. Equal
//! configurations have equal canonical texts, and [`Config::digest`] is a hash of it.

mod display;
mod error;
mod keys;
mod reason;
mod settings;

pub use crate::config::nearest::{DidYouMean, nearest};
pub use error::ConfigTextError;
pub use reason::{IgnoredKey, IgnoredReason, KeyRefusal};

use std::str::FromStr;

use self::keys::{EXPANDABLE, FIXED, Key, RESERVED, SEGMENTS};
use self::settings::{Dialect, Settings};
use crate::config::policy::{
    Config, ConfigError, ExpandableSegments, FixedSegments, PlanPolicy, PointerLookup, PoolConfig, Reclaim,
    SegmentPolicy, StreamPolicy,
};
use crate::config::stitching::Stitching;

/// A configuration that was written for PyTorch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PyTorchConfig {
    /// The configuration, with PyTorch's meanings and defaults.
    pub config: Config,
    /// What had no effect, in the order of the text: worth a warning.
    pub ignored: Vec<IgnoredKey>,
}

impl Config {
    /// Reads the value of `PYTORCH_CUDA_ALLOC_CONF` (or `PYTORCH_ALLOC_CONF`) as PyTorch does.
    ///
    /// Segments are fixed unless the text asks for expandable ones, the last of two equal keys counts, and keys that
    /// decide no placement are listed in [`PyTorchConfig::ignored`]. Keys of this library are taken too.
    ///
    /// # Errors
    /// When PyTorch would refuse the text as well, and for what cannot be equal on all ranks
    /// (`garbage_collection_threshold`) or is another allocator (`backend:cudaMallocAsync`).
    pub fn from_pytorch_env(text: &str) -> Result<PyTorchConfig, ConfigTextError> {
        let mut settings = Settings::parse(text, Dialect::PyTorch)?;
        let config = build_config(&mut settings)?;
        let mut ignored = settings.ignored;
        ignored.sort_by_key(|key| key.offset);
        Ok(PyTorchConfig { config, ignored })
    }

    /// A hash of the canonical text, for ranks to compare: 64-bit FNV-1a over its bytes.
    ///
    /// Equal for equal configurations in every process of one version of this library. It is no cryptographic hash.
    pub fn digest(&self) -> u64 {
        hash_of_text(&self.to_string())
    }
}

impl PoolConfig {
    /// A hash of the canonical text of one pool's policy, as [`Config::digest`].
    pub fn digest(&self) -> u64 {
        hash_of_text(&self.to_string())
    }
}

/// 64-bit FNV-1a.
pub(crate) fn hash_of_text(text: &str) -> u64 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    text.bytes().fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

impl FromStr for Config {
    type Err = ConfigTextError;

    fn from_str(text: &str) -> Result<Self, ConfigTextError> {
        build_config(&mut Settings::parse(text, Dialect::Strict)?)
    }
}

impl FromStr for PoolConfig {
    type Err = ConfigTextError;

    fn from_str(text: &str) -> Result<Self, ConfigTextError> {
        let mut settings = Settings::parse(text, Dialect::Strict)?;
        match settings.stated().iter().find(|stated| stated.key.is_for_the_allocator()) {
            Some(stated) => Err(ConfigTextError::Refused {
                offset: stated.offset,
                key: stated.name,
                reason: KeyRefusal::WholeAllocator,
            }),
            None => build_pool(&mut settings),
        }
    }
}

fn build_config(settings: &mut Settings) -> Result<Config, ConfigTextError> {
    let mut config = Config::builder().default_pool(build_pool(settings)?);
    config = config.limit_bytes(settings.number(Key::TotalLimit));
    if let Some(retries) = settings.number(Key::RetriesMax) {
        config = config.retries_max(u32::try_from(retries).unwrap_or(u32::MAX));
    }
    if let Some(ops) = settings.number(Key::HistoryOps) {
        config = config.history_ops(u32::try_from(ops).unwrap_or(u32::MAX));
    }
    if let Some(lookup) = settings.word(Key::PointerLookup) {
        config = config.pointer_lookup([PointerLookup::Off, PointerLookup::Exact][lookup]);
    }
    config.build().map_err(|source| out_of_range(settings, source))
}

fn build_pool(settings: &mut Settings) -> Result<PoolConfig, ConfigTextError> {
    let mut pool = PoolConfig::builder().segments(build_segments(settings)?);
    if let Some(streams) = settings.word(Key::Streams) {
        pool = pool.streams([StreamPolicy::Separate, StreamPolicy::Shared][streams]);
    }
    if let Some(reclaim) = settings.word(Key::Reclaim) {
        pool = pool.reclaim([Reclaim::Never, Reclaim::Heap, Reclaim::Pool][reclaim]);
    }
    if let Some(plan) = settings.word(Key::Plan) {
        pool = pool.plan([PlanPolicy::Off, PlanPolicy::Learn][plan]);
    }
    if let Some(symmetric) = settings.flag(Key::Symmetric) {
        pool = pool.symmetric(symmetric);
    }
    if let Some(divisions) = settings.divisions() {
        pool = pool.roundup_power2_divisions(divisions);
    }
    pool.stitching(build_stitching(settings))
        .tag(settings.tag())
        .limit_bytes(settings.number(Key::Limit))
        .release_threshold_bytes(settings.number(Key::ReleaseThreshold))
        .build()
        .map_err(|source| out_of_range(settings, source))
}

/// A knob of stitching asks for it.
fn build_stitching(settings: &Settings) -> Option<Stitching> {
    let default = Stitching::default();
    let number = |key, default| settings.number(key).unwrap_or(default);
    let count = |key, default: u32| u32::try_from(number(key, default.into())).unwrap_or(u32::MAX);
    let knobs = [Key::StitchingGranule, Key::StitchingLeast, Key::StitchingMaps, Key::StitchingAliases];
    let is_on = settings.flag(Key::Stitching).unwrap_or(knobs.into_iter().any(|key| settings.find(key).is_some()));
    is_on.then(|| Stitching {
        granule_bytes: number(Key::StitchingGranule, default.granule_bytes),
        least_bytes: number(Key::StitchingLeast, default.least_bytes),
        maps_max: count(Key::StitchingMaps, default.maps_max),
        aliases_max: count(Key::StitchingAliases, default.aliases_max),
    })
}

fn build_segments(settings: &mut Settings) -> Result<SegmentPolicy, ConfigTextError> {
    let kind = segment_kind(settings)?;
    check_segment_keys(settings, kind)?;
    Ok(match kind {
        FIXED => {
            let default = FixedSegments::default();
            let large_segment_bytes = settings.number(Key::LargeSegmentSize).unwrap_or(default.large_segment_bytes);
            SegmentPolicy::Fixed(FixedSegments {
                max_split_size_bytes: settings.number(Key::MaxSplitSize),
                // PyTorch's default follows the large segment.
                max_non_split_rounding_bytes: settings.number(Key::MaxNonSplitRounding).unwrap_or(large_segment_bytes),
                large_segment_bytes,
            })
        }
        RESERVED => match settings.number(Key::SegmentSize) {
            Some(segment_bytes) => SegmentPolicy::Reserved { segment_bytes },
            None => {
                let offset = settings.find(Key::Segments).map_or(0, |stated| stated.offset);
                return Err(ConfigTextError::MissingSegmentSize { offset });
            }
        },
        _ => {
            let default = ExpandableSegments::default();
            SegmentPolicy::Expandable(ExpandableSegments {
                range_bytes: settings.number(Key::Range).unwrap_or(default.range_bytes),
                growth_bytes: settings.number(Key::Growth).unwrap_or(default.growth_bytes),
            })
        }
    })
}

/// Which segments are asked for, with our key or PyTorch's.
fn segment_kind(settings: &Settings) -> Result<usize, ConfigTextError> {
    let ours = settings.word(Key::Segments);
    let theirs = settings.find(Key::ExpandableSegments).zip(settings.flag(Key::ExpandableSegments));
    match (ours, theirs) {
        (Some(kind), Some((stated, flag))) if flag != (kind == EXPANDABLE) => {
            Err(ConfigTextError::Contradiction { offset: stated.offset })
        }
        (Some(kind), _) => Ok(kind),
        (None, Some((_, true))) => Ok(EXPANDABLE),
        (None, Some((_, false))) => Ok(FIXED),
        (None, None) if settings.dialect == Dialect::PyTorch => Ok(FIXED),
        (None, None) => Ok(EXPANDABLE),
    }
}

/// Keys for other segments are errors; in a text for PyTorch, PyTorch's own are listed instead.
fn check_segment_keys(settings: &mut Settings, kind: usize) -> Result<(), ConfigTextError> {
    let others = |stated: &settings::Setting| stated.key.segments().is_some_and(|segments| segments != kind);
    let others: Vec<_> = settings.stated().iter().copied().filter(others).collect();
    for stated in others {
        let segments = stated.key.segments().unwrap_or(kind);
        if settings.dialect == Dialect::PyTorch && segments == FIXED {
            settings.ignore(stated.name, stated.offset, IgnoredReason::OtherSegments)?;
        } else {
            let (offset, key) = (stated.offset, stated.name);
            return Err(ConfigTextError::OtherSegments { offset, key, segments: SEGMENTS[segments] });
        }
    }
    Ok(())
}

/// Finds the key that the builder found out of range. A key that is not stated has a default that does not fit the
/// others; the text as a whole is at fault then.
fn out_of_range(settings: &Settings, source: ConfigError) -> ConfigTextError {
    let key = match source {
        ConfigError::NotStitched { .. } => "stitching",
        ConfigError::OutOfRange { key, .. }
        | ConfigError::NotAMultiple { key, .. }
        | ConfigError::NotAPowerOfTwo { key, .. } => key,
    };
    let stated = settings.stated().iter().find(|stated| {
        let unit = stated.name.strip_prefix(key);
        matches!(unit, Some("" | "_mb" | "_bytes"))
    });
    ConfigTextError::OutOfRange { offset: stated.map_or(0, |stated| stated.offset), source }
}
