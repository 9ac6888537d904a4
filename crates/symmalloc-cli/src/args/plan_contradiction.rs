//! Flags that contradict the configuration of a plan.

use super::policy::PolicyArgs;
use crate::job::Segments;
use symmalloc_core::config::{Config, StreamPolicy};

/// A flag that contradicts the configuration of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} contradicts the plan, which has {}", settings.word())]
pub(crate) struct PlanFlagContradiction {
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
    fn word(self) -> String {
        let word = match self {
            Setting::Segments(Some(Segments::Expandable)) => "`segments:expandable`",
            Setting::Segments(Some(Segments::Fixed)) => "`segments:fixed`",
            Setting::Segments(None) => "`segments:reserved`",
            Setting::Streams(streams) => return format!("`streams:{}`", streams.word()),
            Setting::Config => "other settings in its `config` line",
        };
        word.to_owned()
    }
}

impl PlanFlagContradiction {
    /// Returns the first flag that contradicts the plan's configuration.
    pub(crate) fn of(policy: &PolicyArgs, config: &Config) -> Option<Self> {
        let pool = config.default_pool();
        let segments = Segments::of(pool.segments());
        let streams = policy.streams.map(StreamPolicy::from);
        if policy.config().is_some_and(|wanted| wanted != config) {
            Some(PlanFlagContradiction { flag: "--config", settings: Setting::Config })
        } else if policy.segments.is_some_and(|wanted| Some(wanted) != segments) {
            Some(PlanFlagContradiction { flag: "--segments", settings: Setting::Segments(segments) })
        } else if streams.is_some_and(|wanted| wanted != pool.streams()) {
            Some(PlanFlagContradiction { flag: "--streams", settings: Setting::Streams(pool.streams()) })
        } else {
            None
        }
    }
}
