//! Statistics and limits.

pub(crate) mod budget;
pub(crate) mod usage;

pub use usage::{ClassStats, Stat, UsageStats};
