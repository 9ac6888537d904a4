//! The flags that configure the allocator, and the check that they agree with each other.

use crate::job::Segments;
use clap::ValueEnum;
use std::str::FromStr;
use symmalloc_core::config::text::ConfigTextError;
use symmalloc_core::config::{Config, SegmentPolicy, StreamPolicy};

/// Configuration of the allocator, from flags.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct PolicyArgs {
    /// Segments of the default pool [default: the trace's, else expandable]
    #[arg(long)]
    pub(crate) segments: Option<Segments>,
    /// Separate, grouped or shared free blocks for the default pool's streams [default: the trace's, else separate]
    #[arg(long)]
    pub(crate) streams: Option<Streams>,
    /// Settings that replace the trace's, as in docs/configuration.md: segments:fixed,max_split_size_mb:256
    #[arg(long = "config", value_name = "SETTINGS", value_parser = Settings::from_str)]
    settings: Option<Settings>,
}

/// The value of `--config`, and which policies it sets explicitly.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    config: Config,
    states_segments: bool,
    states_streams: bool,
}

impl FromStr for Settings {
    type Err = ConfigTextError;

    fn from_str(text: &str) -> Result<Self, ConfigTextError> {
        let config = text.parse()?;
        // The text is valid, so each colon outside brackets follows a key. Brackets contain only numbers.
        let states = |keys: &[&str]| text.split([',', '[', ']']).any(|part| keys.contains(&key_of(part)));
        Ok(Settings {
            config,
            states_segments: states(&["segments", "expandable_segments"]),
            states_streams: states(&["streams"]),
        })
    }
}

fn key_of(pair: &str) -> &str {
    pair.split(':').next().unwrap_or_default().trim()
}

/// A flag whose value contradicts `--config`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} contradicts --config, which sets `{setting}`")]
pub(crate) struct FlagContradiction {
    flag: &'static str,
    setting: String,
}

impl PolicyArgs {
    /// Returns the configuration of `--config`, if given.
    pub(crate) fn config(&self) -> Option<&Config> {
        self.settings.as_ref().map(|settings| &settings.config)
    }

    /// Checks that the flags agree with each other.
    ///
    /// # Errors
    /// Returns an error if `--segments` or `--streams` contradicts `--config`.
    pub(crate) fn check(&self) -> Result<(), FlagContradiction> {
        let Some(Settings { config, states_segments, states_streams }) = &self.settings else { return Ok(()) };
        let pool = config.default_pool();
        if *states_segments && self.segments.is_some_and(|wanted| Some(wanted) != Segments::of(pool.segments())) {
            let setting = match pool.segments() {
                SegmentPolicy::Fixed(_) => "segments:fixed",
                SegmentPolicy::Expandable(_) => "segments:expandable",
                _ => "segments:reserved",
            };
            return Err(FlagContradiction { flag: "--segments", setting: setting.to_owned() });
        }
        if *states_streams && self.streams.is_some_and(|wanted| StreamPolicy::from(wanted) != pool.streams()) {
            let setting = format!("streams:{}", pool.streams().word());
            return Err(FlagContradiction { flag: "--streams", setting });
        }
        Ok(())
    }

    /// Returns the command-line flags that set the same configuration, each preceded by a space.
    pub(crate) fn flags(&self) -> String {
        let word =
            |value: Option<clap::builder::PossibleValue>| value.map_or_else(String::new, |it| it.get_name().into());
        let mut flags = String::new();
        if let Some(segments) = &self.segments {
            flags += &format!(" --segments {}", word(segments.to_possible_value()));
        }
        if let Some(streams) = &self.streams {
            flags += &format!(" --streams {}", word(streams.to_possible_value()));
        }
        if let Some(config) = self.config() {
            flags += &format!(" --config '{config}'");
        }
        flags
    }
}

/// Choice of the streams that share free blocks.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Streams {
    /// A heap per stream
    Separate,
    /// A heap per group of streams
    Grouped,
    /// One heap for all streams
    Shared,
}

impl From<Streams> for StreamPolicy {
    fn from(streams: Streams) -> Self {
        match streams {
            Streams::Separate => StreamPolicy::Separate,
            Streams::Grouped => StreamPolicy::Grouped,
            Streams::Shared => StreamPolicy::Shared,
        }
    }
}
