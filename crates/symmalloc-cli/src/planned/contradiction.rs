//! Flags that contradict the configuration of a plan.

use crate::args::PolicyArgs;
use crate::job::Segments;
use symmalloc_core::config::{Config, SegmentPolicy, StreamPolicy};

/// A flag that contradicts the configuration of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} contradicts the plan, which has {}", settings.word())]
pub(crate) struct Contradiction {
    flag: &'static str,
    settings: Setting,
}

/// The contradicted part of the plan's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Segments(Option<Segments>),
    Streams(StreamPolicy),
    Config,
}

impl Setting {
    fn word(self) -> &'static str {
        match self {
            Setting::Segments(Some(Segments::Expandable)) => "`segments:expandable`",
            Setting::Segments(Some(Segments::Fixed)) => "`segments:fixed`",
            Setting::Segments(None) => "`segments:reserved`",
            Setting::Streams(StreamPolicy::Shared) => "`streams:shared`",
            Setting::Streams(_) => "`streams:separate`",
            Setting::Config => "other settings in its `config` line",
        }
    }
}

impl Contradiction {
    /// Returns the first flag that contradicts the plan's configuration.
    pub(super) fn of(policy: &PolicyArgs, config: &Config) -> Option<Self> {
        let pool = config.default_pool();
        let segments = match pool.segments() {
            SegmentPolicy::Expandable(_) => Some(Segments::Expandable),
            SegmentPolicy::Fixed(_) => Some(Segments::Fixed),
            _ => None,
        };
        let streams = policy.streams.map(StreamPolicy::from);
        if policy.config().is_some_and(|wanted| wanted != config) {
            Some(Contradiction { flag: "--config", settings: Setting::Config })
        } else if policy.segments.is_some_and(|wanted| Some(wanted) != segments) {
            Some(Contradiction { flag: "--segments", settings: Setting::Segments(segments) })
        } else if streams.is_some_and(|wanted| wanted != pool.streams()) {
            Some(Contradiction { flag: "--streams", settings: Setting::Streams(pool.streams()) })
        } else {
            None
        }
    }
}
