//! Configurations as text, in the syntax of PyTorch's `PYTORCH_CUDA_ALLOC_CONF`: `key:value,key:[k:v,k:v]`.
//!
//! ```text
//!             parse                    build
//!   text ─────────────► settings ─────────────► Config, PoolConfig
//!     ▲  punctuation,     each key     ranges, contradictions   │
//!     └──────────────────────── Display ◄───────────────────────┘
//! ```
//!
//! There are two dialects. [`FromStr`] is strict: a key without effect is an error. [`Config::from_pytorch_text`] reads a
//! text written for PyTorch, with PyTorch's defaults, and lists the keys without effect. `docs/configuration.md` has the
//! table of all keys.
//!
//! `Display` writes the *canonical* text: every value, including defaults, in a fixed order and unit. Equal
//! configurations have equal canonical texts, and [`Config::digest`] is a hash of it.

mod display;
mod error;
mod keys;
mod reason;
mod settings;

pub use crate::config::nearest::{did_you_mean, nearest};
pub use error::ConfigTextError;
pub use keys::names as key_names;
pub use reason::{IgnoredKey, IgnoredReason, KeyRefusal};

use std::str::FromStr;

use self::keys::{EXPANDABLE, FIXED, Of, RESERVED, SEGMENTS};
use self::settings::{Dialect, Settings};
use crate::config::policy::{
    BASED_RANGE_BYTES, Config, ConfigError, ExpandableSegments, FixedSegments, PlanPolicy, PointerLookup, PoolConfig,
    Reclaim, SegmentPolicy, StreamPolicy,
};
use crate::config::stitching::Stitching;

/// A configuration read from a text for PyTorch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PyTorchConfig {
    /// The configuration, with PyTorch's meanings and defaults.
    pub config: Config,
    /// The keys without effect, in the order of the text. A program should print them as a warning.
    pub ignored: Vec<IgnoredKey>,
}

impl Config {
    /// Reads the value of `PYTORCH_CUDA_ALLOC_CONF` (or `PYTORCH_ALLOC_CONF`) as PyTorch does.
    ///
    /// Segments are fixed unless the text requests expandable ones, the last of two equal keys wins, and keys without
    /// effect on placements are listed in [`PyTorchConfig::ignored`]. Keys of this library are accepted too.
    ///
    /// # Errors
    /// Returns an error if PyTorch would refuse the text as well, if a setting cannot be equal on all ranks
    /// (`garbage_collection_threshold`), or if the text selects another allocator (`backend:cudaMallocAsync`).
    pub fn from_pytorch_text(text: &str) -> Result<PyTorchConfig, ConfigTextError> {
        let mut settings = Settings::parse(text, Dialect::PyTorch)?;
        let config = build_config(&mut settings)?;
        let mut ignored = settings.ignored;
        ignored.sort_by_key(|key| key.offset);
        Ok(PyTorchConfig { config, ignored })
    }

    /// Returns a hash of the canonical text, for ranks to compare: 64-bit FNV-1a over its bytes.
    ///
    /// Equal configurations have equal hashes in every process of one version of this library. The hash is not
    /// cryptographic.
    pub fn digest(&self) -> u64 {
        hash_of_text(&self.to_string())
    }
}

impl PoolConfig {
    /// Returns a hash of the canonical text of one pool's policy; see [`Config::digest`].
    pub fn digest(&self) -> u64 {
        hash_of_text(&self.to_string())
    }
}

/// Returns the 64-bit FNV-1a hash.
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
        match settings.stated().iter().find(|stated| stated.key.of == Of::Allocator) {
            Some(stated) => Err(ConfigTextError::Refused {
                offset: stated.offset,
                key: stated.name,
                reason: KeyRefusal::WholeAllocator,
            }),
            None => build_pool(&mut settings),
        }
    }
}

fn build_config(settings: &mut Settings<'_>) -> Result<Config, ConfigTextError> {
    let default = Config::default();
    let count = |key, default: u32| settings.count(key).unwrap_or(default);
    let config = Config::builder()
        .total_limit_bytes(settings.number("total_limit"))
        .retries_max(count("retries_max", default.retries_max()))
        .history_ops(count("history_ops", default.history_ops()))
        .pointer_lookup(settings.one_of("pointer_lookup", [PointerLookup::Off, PointerLookup::Exact]));
    config.default_pool(build_pool(settings)?).build().map_err(|source| out_of_range(settings, source))
}

fn build_pool(settings: &mut Settings<'_>) -> Result<PoolConfig, ConfigTextError> {
    PoolConfig::builder()
        .base(settings.base())
        .segments(build_segments(settings)?)
        .stitching(build_stitching(settings))
        .tag(settings.text("tag"))
        .debug(settings.debug().unwrap_or_default())
        .streams(settings.one_of("streams", [StreamPolicy::Separate, StreamPolicy::Grouped, StreamPolicy::Shared]))
        .symmetric(settings.one_of("symmetric", [false, true]))
        .limit_bytes(settings.number("limit"))
        .release_threshold_bytes(settings.number("release_threshold"))
        .reclaim(settings.one_of("reclaim", [Reclaim::Never, Reclaim::Heap, Reclaim::Pool]))
        .roundup_power2_divisions(settings.divisions().unwrap_or_default())
        .plan(settings.one_of("plan", [PlanPolicy::Off, PlanPolicy::Learn]))
        .build()
        .map_err(|source| out_of_range(settings, source))
}

/// Returns the stitching settings, if a key requests stitching.
fn build_stitching(settings: &Settings<'_>) -> Option<Stitching> {
    let knobs = ["stitching_granule", "stitching_least", "stitching_maps", "stitching_aliases"];
    let is_on = settings.number("stitching").map(|flag| flag == 1);
    let granule_bytes = settings.number("stitching_granule");
    let default = granule_bytes.map_or_else(Stitching::default, Stitching::with_granule);
    is_on.unwrap_or(knobs.into_iter().any(|key| settings.find(key).is_some())).then(|| Stitching {
        granule_bytes: default.granule_bytes,
        least_bytes: settings.number("stitching_least").unwrap_or(default.least_bytes),
        maps_max: settings.count("stitching_maps").unwrap_or(default.maps_max),
        aliases_max: settings.count("stitching_aliases").unwrap_or(default.aliases_max),
    })
}

fn build_segments(settings: &mut Settings<'_>) -> Result<SegmentPolicy, ConfigTextError> {
    let kind = segment_kind(settings)?;
    check_segment_keys(settings, kind)?;
    let number = |key, default| settings.number(key).unwrap_or(default);
    Ok(match kind {
        FIXED => {
            let large_segment_bytes = number("large_segment_size", FixedSegments::default().large_segment_bytes);
            SegmentPolicy::Fixed(FixedSegments {
                max_split_size_bytes: settings.number("max_split_size"),
                // PyTorch's default follows the large segment.
                max_non_split_rounding_bytes: number("max_non_split_rounding", large_segment_bytes),
                large_segment_bytes,
                unsplit: number("unsplit", 0) == 1,
            })
        }
        RESERVED => match settings.number("segment") {
            Some(segment_bytes) => SegmentPolicy::Reserved { segment_bytes },
            None => {
                let offset = settings.find("segments").map_or(0, |stated| stated.offset);
                return Err(ConfigTextError::MissingSegmentSize { offset });
            }
        },
        _ => {
            let ExpandableSegments { range_bytes, growth_bytes } = ExpandableSegments::default();
            let range_bytes = settings.base().map_or(range_bytes, |_| BASED_RANGE_BYTES);
            SegmentPolicy::Expandable(ExpandableSegments {
                range_bytes: number("range", range_bytes),
                growth_bytes: number("growth", growth_bytes),
            })
        }
    })
}

/// Returns the requested kind of segments, from our key or PyTorch's.
fn segment_kind(settings: &Settings<'_>) -> Result<usize, ConfigTextError> {
    let ours = settings.number("segments").map(|kind| kind as usize);
    let is_expandable = settings.number("expandable_segments").map(|flag| flag == 1);
    match (ours, is_expandable, settings.find("expandable_segments")) {
        (Some(kind), Some(flag), Some(stated)) if flag != (kind == EXPANDABLE) => {
            Err(ConfigTextError::Contradiction { offset: stated.offset })
        }
        (Some(kind), ..) => Ok(kind),
        (None, Some(false), _) => Ok(FIXED),
        (None, None, _) if settings.dialect == Dialect::PyTorch => Ok(FIXED),
        _ => Ok(EXPANDABLE),
    }
}

/// Refuses keys for other segments. In a text for PyTorch, PyTorch's own keys are listed as ignored instead.
fn check_segment_keys(settings: &mut Settings<'_>, kind: usize) -> Result<(), ConfigTextError> {
    for stated in settings.stated().to_vec() {
        let Of::Segments(segments) = stated.key.of else { continue };
        if segments == kind {
            continue;
        }
        if settings.dialect == Dialect::PyTorch && segments == FIXED {
            settings.ignore(stated.name, stated.offset, IgnoredReason::WrongSegments)?;
        } else {
            let (offset, key) = (stated.offset, stated.name);
            return Err(ConfigTextError::WrongSegments { offset, key, segments: SEGMENTS[segments] });
        }
    }
    Ok(())
}

/// Finds the key whose value the builder found out of range. If the key is not in the text, its default conflicts with
/// the other values, and the error points at the whole text.
fn out_of_range(settings: &Settings<'_>, source: ConfigError) -> ConfigTextError {
    let key = match source {
        ConfigError::NotStitched { .. } => "stitching",
        ConfigError::NotATag => "tag",
        ConfigError::Base(_) => "base",
        ConfigError::NotUnmapped | ConfigError::OutOfRange { key: "quarantine", .. } => "debug",
        ConfigError::HasQuota => "growth",
        ConfigError::OutOfRange { key, .. }
        | ConfigError::NotAMultiple { key, .. }
        | ConfigError::NotAPowerOfTwo { key, .. } => key,
    };
    let stated = settings.find(key);
    ConfigTextError::OutOfRange { offset: stated.map_or(0, |stated| stated.offset), source }
}
