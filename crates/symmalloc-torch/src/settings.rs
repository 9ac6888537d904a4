//! Settings: the parser of `SYMMALLOC_CONF`.
//!
//! Most keys belong to the core (`docs/configuration.md`). This crate adds keys for the device:
//!
//! | key | values | default | meaning |
//! |---|---|---|---|
//! | `peers` | `[1,2]`, `[]` | `[]` | Devices that may read and write the memory. |
//! | `chunk_mb`, `chunk_bytes` | a multiple of the granularity | a granule of stitching; without stitching, 32 MiB, or more for ranges beyond 2 GiB | Largest physical chunk by which expandable ranges grow. |
//! | `prefetch_mb`, `prefetch_bytes` | 0, or a multiple of the granularity, at least a chunk | 0 | Maximum amount to prefetch for each expandable range. |
//! | `out_of_memory` | `trim`, `fail` | `trim` | The last resort before an allocation fails. |
//! | `on_out_of_memory` | `report:FOLDER` | none | Writes a page about each failed allocation into a folder. |
//!
//! A default pool that is expandable and private [stitches](symmalloc_core::config::Stitching) large blocks, with three exceptions: the
//! text turns stitching off; the text has a key for the size of growth or chunks, or turns prefetching on (stitching determines all three
//! itself); or a limit leaves no room for a block that would be stitched.
//!
//! The default pool of the process's allocators, which PyTorch uses, [groups](crate::streams#groups) its streams, unless the text has the
//! key `streams`, the pool is symmetric, or the pool has a quota. Other pools group their streams only if their own settings say so.
//!
//! The parser replaces this crate's keys with blanks before the core reads the text, so that the byte offsets in the core's errors are
//! correct.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use symmalloc_core::Config;
use symmalloc_core::config::{SegmentPolicy, Stitching, StreamPolicy};
use symmalloc_core::config_text::{ConfigTextError, did_you_mean, key_names, nearest};
use symmalloc_import::OnOutOfMemory;
use thiserror::Error;

/// The last resort before an allocation fails at a limit, or because the driver is out of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OutOfMemoryPolicy {
    /// Releases the free memory of pools that are neither symmetric nor a graph's, and retries the allocation. PyTorch programs rely on
    /// this. Symmetric pools are unaffected.
    #[default]
    Trim,
    /// Releases nothing (rule D4).
    Fail,
}

/// All settings of `SYMMALLOC_CONF`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TorchSettings {
    pub(crate) config: Config,
    pub(crate) peers: Vec<usize>,
    pub(crate) chunk_bytes: Option<u64>,
    pub(crate) prefetch_bytes: Option<u64>,
    pub(crate) out_of_memory: OutOfMemoryPolicy,
    pub(crate) on_out_of_memory: Option<OnOutOfMemory>,
}

/// An error in a settings text. The message names the error's byte offset, counted from 0.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(crate) enum SettingsError {
    /// The core rejected the text.
    #[error(transparent)]
    Config(#[from] ConfigTextError),
    /// No key has this name.
    #[error("byte {offset}: unknown key{}; the keys are {}", did_you_mean(*nearest), known_keys().collect::<Vec<_>>().join(", "))]
    UnknownKey {
        /// The byte offset of the key.
        offset: usize,
        /// The probably intended key.
        nearest: Option<&'static str>,
    },
    /// The key does not accept the value.
    #[error("byte {offset}: {key} must be {allowed}")]
    Value {
        /// The byte offset of the value.
        offset: usize,
        /// The key.
        key: &'static str,
        /// The values that the key accepts.
        allowed: &'static str,
    },
    /// The key is given twice, possibly in different units.
    #[error("byte {offset}: {key} is stated already; keep one of them")]
    Duplicate {
        /// The byte offset of the second occurrence.
        offset: usize,
        /// The key.
        key: &'static str,
    },
}

/// The keys of this crate.
const KEYS: [&str; 7] =
    ["peers", "chunk_mb", "chunk_bytes", "prefetch_mb", "prefetch_bytes", "out_of_memory", "on_out_of_memory"];

/// Iterates over all keys: those of the core and those of this crate.
fn known_keys() -> impl Iterator<Item = &'static str> {
    key_names().chain(KEYS)
}

impl FromStr for TorchSettings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let mut settings = TorchSettings::default();
        let mut rest = text.to_owned();
        let mut has_policy = false;
        let mut has_peers = false;
        for item in items(text) {
            let Some((key, value)) = text[item.clone()].split_once(':') else { continue };
            let Some(key) = KEYS.into_iter().find(|known| *known == key.trim()) else { continue };
            let key_at = item.start + text[item.clone()].len() - text[item.clone()].trim_start().len();
            let value_at = item.end - value.trim_start().len();
            let refuse = |allowed| SettingsError::Value { offset: value_at, key, allowed };
            let value = value.trim();
            let is_repeated = match key {
                "peers" => std::mem::replace(&mut has_peers, true),
                "out_of_memory" => std::mem::replace(&mut has_policy, true),
                "on_out_of_memory" => settings.on_out_of_memory.is_some(),
                "chunk_mb" | "chunk_bytes" => settings.chunk_bytes.is_some(),
                _ => settings.prefetch_bytes.is_some(),
            };
            if is_repeated {
                return Err(SettingsError::Duplicate { offset: key_at, key });
            }
            match key {
                "peers" => settings.peers = peers(value).ok_or_else(|| refuse("a list of device numbers: [1,2]"))?,
                "out_of_memory" => {
                    settings.out_of_memory = match value {
                        "trim" => OutOfMemoryPolicy::Trim,
                        "fail" => OutOfMemoryPolicy::Fail,
                        _ => return Err(refuse("trim or fail")),
                    }
                }
                "on_out_of_memory" => {
                    settings.on_out_of_memory = Some(value.parse().map_err(|_| refuse("report:FOLDER"))?);
                }
                _ => {
                    let unit: u64 = if key.ends_with("_mb") { 1 << 20 } else { 1 };
                    let number = value.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
                    let number = number.ok_or_else(|| refuse("a number"))?;
                    let is_chunk = key.starts_with("chunk");
                    *(if is_chunk { &mut settings.chunk_bytes } else { &mut settings.prefetch_bytes }) = Some(number);
                }
            }
            let end = if text[item.end..].starts_with(',') { item.end + 1 } else { item.end };
            rest.replace_range(item.start..end, &" ".repeat(end - item.start));
        }
        settings.config = rest.parse().map_err(|error| with_own_keys(text, error))?;
        let is_prefetched = settings.prefetch_bytes.is_some_and(|bytes| bytes > 0);
        if !is_prefetched && !items(text).into_iter().any(|item| decides_stitching(&text[item])) {
            settings.config = stitched(settings.config);
        }
        Ok(settings)
    }
}

impl TorchSettings {
    /// Parses the settings of the process's allocators.
    ///
    /// # Errors
    /// Returns an error if the text is invalid.
    pub(crate) fn of_process(text: &str) -> Result<Self, SettingsError> {
        let mut settings: TorchSettings = text.parse()?;
        if !items(text).into_iter().any(|item| key_of(&text[item]) == "streams") {
            settings.config = grouped(settings.config);
        }
        Ok(settings)
    }
}

/// Returns the stream policy of a pool that inherits the default pool's settings. The grouping of streams is not inherited.
pub(crate) fn without_groups(streams: StreamPolicy) -> StreamPolicy {
    if streams == StreamPolicy::Grouped { StreamPolicy::Separate } else { streams }
}

impl Default for TorchSettings {
    fn default() -> Self {
        TorchSettings {
            config: stitched(Config::default()),
            peers: Vec::new(),
            chunk_bytes: None,
            prefetch_bytes: None,
            out_of_memory: OutOfMemoryPolicy::default(),
            on_out_of_memory: None,
        }
    }
}

/// Returns `true` if an item decides whether the default pool stitches.
fn decides_stitching(item: &str) -> bool {
    ["stitching", "growth", "chunk"].into_iter().any(|word| key_of(item).starts_with(word))
}

fn key_of(item: &str) -> &str {
    item.split(':').next().unwrap_or_default().trim()
}

/// Returns the configuration with a default pool that groups its streams, if the pool is private and has no quota. A symmetric pool keeps
/// one heap per stream, which is independent of threads.
fn grouped(config: Config) -> Config {
    let pool = config.default_pool();
    if pool.symmetric() || pool.has_quota() {
        return config;
    }
    let pool = pool.to_builder().streams(StreamPolicy::Grouped).build().expect("only a quota needs other streams");
    config.to_builder().default_pool(pool).build().expect("the other settings are valid")
}

/// Returns the configuration with a default pool that stitches, if the pool is expandable, private, and large enough.
fn stitched(config: Config) -> Config {
    let (pool, stitching) = (config.default_pool(), Stitching::default());
    let SegmentPolicy::Expandable(expandable) = pool.segments() else { return config };
    let bounds = [Some(expandable.range_bytes), pool.limit_bytes(), config.total_limit_bytes()];
    if pool.symmetric() || bounds.into_iter().flatten().any(|bytes| bytes < stitching.least_bytes) {
        return config;
    }
    let pool = pool.to_builder().stitching(Some(stitching)).build();
    let pool = pool.expect("an expandable, private pool can stitch, and a quota needs a key for its growth");
    config.to_builder().default_pool(pool).build().expect("the other settings are valid")
}

impl fmt::Display for TorchSettings {
    /// Returns the canonical text: all values, including defaults, in a fixed order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config)?;
        if !self.peers.is_empty() {
            let peers: Vec<String> = self.peers.iter().map(ToString::to_string).collect();
            write!(f, ",peers:[{}]", peers.join(","))?;
        }
        if let Some(chunk_bytes) = self.chunk_bytes {
            write!(f, ",chunk_bytes:{chunk_bytes}")?;
        }
        if let Some(prefetch_bytes) = self.prefetch_bytes {
            write!(f, ",prefetch_bytes:{prefetch_bytes}")?;
        }
        f.write_str(match self.out_of_memory {
            OutOfMemoryPolicy::Trim => ",out_of_memory:trim",
            OutOfMemoryPolicy::Fail => ",out_of_memory:fail",
        })?;
        match &self.on_out_of_memory {
            Some(action) => write!(f, ",on_out_of_memory:report:{}", action.folder().display()),
            None => Ok(()),
        }
    }
}

/// Splits the text at commas outside of brackets.
fn items(text: &str) -> Vec<Range<usize>> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 0_usize);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                items.push(start..at);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(start..text.len());
    items
}

fn peers(value: &str) -> Option<Vec<usize>> {
    let list = value.strip_prefix('[')?.strip_suffix(']')?.trim();
    if list.is_empty() {
        return Some(Vec::new());
    }
    list.split(',').map(|number| number.trim().parse().ok()).collect()
}

/// Replaces the core's error about an unknown key with an error that also considers this crate's keys.
fn with_own_keys(text: &str, error: ConfigTextError) -> SettingsError {
    let ConfigTextError::UnknownKey { offset, bytes, nearest: theirs } = error else { return error.into() };
    let word = &text[offset..offset + bytes];
    SettingsError::UnknownKey { offset, nearest: nearest(word, theirs.into_iter().chain(KEYS)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_this_crate_may_appear_anywhere_in_the_text() {
        let text = "peers:[1, 2],segments:fixed , out_of_memory:fail,roundup_power2_divisions:[256:1,>:8],chunk_mb:20,\
                    prefetch_bytes:67108864,on_out_of_memory:report:/tmp/a b";
        let settings: TorchSettings = text.parse().expect("valid");
        let core: Config = "segments:fixed,roundup_power2_divisions:[256:1,>:8]".parse().expect("valid");
        assert_eq!(settings.config, core);
        assert_eq!((settings.peers.as_slice(), settings.chunk_bytes), ([1, 2].as_slice(), Some(20 << 20)));
        assert_eq!(settings.prefetch_bytes, Some(64 << 20));
        assert_eq!(settings.out_of_memory, OutOfMemoryPolicy::Fail);
        assert_eq!(settings.on_out_of_memory, "report:/tmp/a b".parse().ok());
        assert_eq!(settings.to_string().parse::<TorchSettings>(), Ok(settings));
    }

    #[test]
    fn errors_state_the_offset_in_the_whole_text() {
        let parse = |text: &str| text.parse::<TorchSettings>().expect_err("wrong").to_string();
        assert_eq!(parse("peers:[1],out_of_memory: never"), "byte 25: out_of_memory must be trim or fail");
        assert_eq!(parse("on_out_of_memory:page"), "byte 17: on_out_of_memory must be report:FOLDER");
        assert_eq!(parse("peers:1"), "byte 6: peers must be a list of device numbers: [1,2]");
        assert_eq!(parse("chunk_mb:1, chunk_bytes:2"), "byte 12: chunk_bytes is stated already; keep one of them");
        assert_eq!(
            parse("prefetch_mb:1,prefetch_bytes:2"),
            "byte 14: prefetch_bytes is stated already; keep one of them"
        );
        assert_eq!(parse("prefetch_mb:much"), "byte 12: prefetch_mb must be a number");
        assert!(
            parse("segments:fixed,pears:[1]").starts_with("byte 15: unknown key, did you mean `peers`?; the keys are ")
        );
        let listed = parse("nothing_like_a_key:1");
        let (_, listed) = listed.split_once("; the keys are ").expect("a list");
        let listed: Vec<&str> = listed.split(", ").collect();
        let probes = key_names().chain(["chunk_mb", "prefetch_mb", "peers", "out_of_memory"]);
        probes.for_each(|key| assert!(listed.contains(&key), "{key}"));
        // Every key that the parser accepts is listed, and every listed one is accepted.
        assert!(listed.iter().all(|key| !parse(&format!("{key}:?")).contains("unknown key")));
        assert!(parse("peers:[1],segment:fixed").starts_with("byte 10: unknown key, did you mean `segments`?"));
        assert_eq!(parse("peers:[]extra"), "byte 6: peers must be a list of device numbers: [1,2]");
    }

    #[test]
    fn the_default_pool_of_the_process_groups_streams_unless_the_text_says_otherwise() {
        let streams = |text: &str| TorchSettings::of_process(text).expect("valid").config.default_pool().streams();
        for grouped in
            ["", "segments:fixed", "peers:[1]", "limit_mb:64,reclaim:pool", "plan:learn", "streams : grouped"]
        {
            assert_eq!(streams(grouped), StreamPolicy::Grouped, "{grouped}");
        }
        for separate in ["streams:separate", " streams : separate ,segments:fixed", "symmetric:true"] {
            assert_eq!(streams(separate), StreamPolicy::Separate, "{separate}");
        }
        for shared in ["streams:shared", "growth_mb:0,streams:shared"] {
            assert_eq!(streams(shared), StreamPolicy::Shared, "{shared}");
        }
        assert_eq!(
            "".parse::<TorchSettings>().map(|own| own.config.default_pool().streams()),
            Ok(StreamPolicy::Separate)
        );
        let settings = TorchSettings::of_process("streams:separate").expect("valid");
        assert_eq!("".parse(), Ok(settings), "nothing else differs");
        let text = TorchSettings::of_process("").expect("valid").to_string();
        assert_eq!(TorchSettings::of_process(&text), TorchSettings::of_process(""), "{text}");
    }

    #[test]
    fn an_expandable_private_default_pool_stitches_unless_the_text_contradicts_it() {
        let default: TorchSettings = "".parse().expect("valid");
        assert_eq!(default, TorchSettings::default());
        let core = |text: &str| text.parse::<Config>().expect("valid");
        let parsed = |text: &str| text.parse::<TorchSettings>().expect("valid").config;
        assert_eq!(default.config, core("stitching:true"));
        for more in ["streams:shared", "plan:learn", "limit_mb:1024,reclaim:pool", "total_limit_mb:128"] {
            assert_eq!(parsed(more), core(&format!("{more},stitching:true")), "{more}");
        }
        for of_the_device in ["peers:[0]", "prefetch_mb:0", "out_of_memory:fail", "chunk_mb:2,stitching:true"] {
            assert_eq!(parsed(of_the_device), core("stitching:true"), "{of_the_device}");
        }
        for plain in [
            "segments:fixed",
            "segments:reserved,segment_mb:64",
            "expandable_segments:False",
            "symmetric:true",
            "stitching:false",
            "stitching_granule_mb:2",
            " growth_mb : 20,range_mb:1000",
            "growth_mb:0,streams:shared",
            "limit_mb:127",
            "total_limit_mb:9",
            "range_mb:64",
        ] {
            assert_eq!(parsed(plain), core(plain), "{plain}");
        }
        for units in ["chunk_mb:32", "chunk_bytes:2097152", "prefetch_mb:64"] {
            assert_eq!(parsed(units), core(""), "{units}");
        }
    }
}
