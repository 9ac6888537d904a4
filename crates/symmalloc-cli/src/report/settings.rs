//! Settings to try: the same ops under other configurations of the default pool.

use crate::args::ReadingArgs;
use crate::config_text;
use crate::error::CliError;
use crate::escape::quoted;
use crate::job::Steady;
use crate::output::reason;
use crate::progress::Progress;
use crate::quantity::{count, counted};
use crate::recorded::Recorded;
use serde::Serialize;
use std::collections::BTreeMap;
use std::iter;
use std::mem;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use symmalloc_core::config::{
    Config, ConfigError, FixedSegments, PoolConfig, PoolConfigBuilder, Reclaim, RoundupPower2Divisions, SegmentPolicy,
    Stitching, StreamPolicy,
};
use symmalloc_core::op::Op;
use symmalloc_core::units::MIB;
use symmalloc_sim::job::on_threads;

/// Granule for jobs whose large blocks are too small for the default granule, in bytes. It takes more map calls.
const SMALL_GRANULE_BYTES: u64 = 2 * MIB;

/// Result of repeating the job under one configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Trial {
    /// The configuration, in the notation of `--config`.
    pub(super) settings: String,
    /// Command that reproduces the result.
    pub(super) command: String,
    /// `true` for the configuration of the recording and the flags.
    pub(super) is_own: bool,
    pub(super) peak_reserved_bytes: u64,
    /// Requests that a limit or a full segment refuses in all passes.
    pub(super) refused: u64,
    /// Number of requests that each pass refuses; `None` if the passes differ.
    #[serde(skip)]
    pub(super) refused_each: Option<u64>,
    /// Number of passes.
    #[serde(skip)]
    pub(super) passes: u32,
    /// Cross-stream waits per pass that the reuse of memory requires. Each is a fence on the device.
    pub(super) waits: u64,
    /// Map and unmap calls in a pass. Each takes a real driver several microseconds.
    pub(super) maps: u64,
}

impl Trial {
    /// Returns `true` if the trial refuses fewer requests than the job's own settings, or refuses the same number and reserves less. A
    /// refusal ends most jobs, so no saving outweighs one.
    pub(super) fn is_better_than(&self, own: &Trial) -> bool {
        self.rank() < own.rank()
    }

    /// Describes the refusals: `30 refused per pass (150 in 5 passes)`. `verb` follows the number.
    pub(super) fn refusals(&self, verb: &str) -> String {
        let passes = counted(self.passes, "pass");
        match self.refused_each {
            Some(each) => format!("{}{verb} per pass ({} in {passes})", count(each), count(self.refused)),
            None => format!("{}{verb} in {passes}", count(self.refused)),
        }
    }

    /// Returns the key that orders trials, the best first.
    fn rank(&self) -> (u64, u64) {
        (self.refused, self.peak_reserved_bytes)
    }
}

/// A configuration with which the job cannot complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ImpossibleTrial {
    /// The configuration, in the notation of `--config`.
    pub(super) settings: String,
    pub(super) reason: String,
}

/// Results under all settings that a report tries.
pub(super) struct Trials {
    /// In ascending order of refusals, then of peak memory, including the job's own settings.
    pub(super) trials: Vec<Trial>,
    /// Settings under which the job stops.
    pub(super) impossible: Vec<ImpossibleTrial>,
    /// Settings that are not tried because the job is long, in the notation of `--config`.
    pub(super) left_out: Vec<String>,
}

/// Tries the job's own settings and other candidates, on all cores.
///
/// # Errors
/// Returns an error if the job cannot complete with its own settings.
pub(super) fn trials(recorded: &Recorded, reading: &ReadingArgs) -> Result<Trials, CliError> {
    // A state without history shows nothing about settings.
    let has_history = recorded.recording.summary.state_only.is_none();
    let others = if has_history { candidates(recorded, &recorded.config) } else { Vec::new() };
    let op_count = recorded.op_count() * recorded.job.steady_passes().get() as usize;
    let (others, left_out) = within_budget(recorded, others, &recorded.config, op_count);
    let configs: Vec<Config> = iter::once(recorded.config.clone()).chain(others).collect();
    let progress = Progress::new(&recorded.path.to_string_lossy(), configs.len() as u64, "settings");
    let (next, cores) = (AtomicUsize::new(0), thread::available_parallelism().unwrap_or(NonZeroUsize::MIN));
    let run_next = || {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let measured = measure(recorded, configs.get(index)?);
        progress.step();
        Some((index, measured))
    };
    let some = on_threads(cores, || iter::from_fn(run_next).collect::<Vec<_>>());
    let measured: BTreeMap<usize, _> = some.into_iter().flatten().collect();
    let (mut trials, mut impossible) = (Vec::new(), Vec::new());
    for (index, (config, measured)) in configs.iter().zip(measured.into_values()).enumerate() {
        let settings = config_text::shortest(config);
        let Steady { peaks, refused, refused_each, passes, waits, maps, .. } = match measured {
            // Other settings may need more memory than a limit allows, for example to wake a pool.
            Err(error) if index > 0 => {
                impossible.push(ImpossibleTrial { settings, reason: reason(&error) });
                continue;
            }
            measured => measured?,
        };
        let command = format!(
            "symmalloc replay {}{} --ranks 1 --passes {passes} --config {}",
            quoted(&recorded.path.to_string_lossy()),
            reading.flags(),
            quoted(&settings)
        );
        let peak_reserved_bytes = peaks.reserved_bytes;
        let is_own = index == 0;
        trials.push(Trial {
            settings,
            command,
            is_own,
            peak_reserved_bytes,
            refused,
            refused_each,
            passes,
            waits,
            maps,
        });
    }
    trials.sort_by_key(Trial::rank);
    Ok(Trials { trials, impossible, left_out })
}

/// Approximate number of ops that a report of a long job replays under other settings than the job's own. They take a few seconds.
const TRIED_OPS: usize = 4_000_000;

/// Minimum number of other settings that a report tries.
const OTHERS_MIN: usize = 2;

/// Returns the settings to try if each trial executes this many ops, and, as text, the settings that are left out because the job is long.
pub(super) fn within_budget(
    recorded: &Recorded,
    others: Vec<Config>,
    own: &Config,
    op_count: usize,
) -> (Vec<Config>, Vec<String>) {
    let most = if recorded.job.is_repeated_less() { TRIED_OPS / op_count.max(1) } else { usize::MAX };
    let (tried, left_out) = most_useful(others, own, most.max(OTHERS_MIN));
    (tried, left_out.iter().map(config_text::shortest).collect())
}

/// Returns the settings to try, and those that are left out. All settings with a different `reclaim` are tried, because `reclaim` is often
/// the remedy for a failed request. Of the other settings, `most` are tried, refinements last.
fn most_useful(others: Vec<Config>, own: &Config, most: usize) -> (Vec<Config>, Vec<Config>) {
    let own = own.default_pool();
    let reclaims = |config: &Config| config.default_pool().reclaim() != own.reclaim();
    let mut by_priority: Vec<usize> = (0..others.len()).filter(|index| !reclaims(&others[*index])).collect();
    by_priority.sort_by_key(|index| is_refinement(others[*index].default_pool(), own));
    let mut is_tried: Vec<bool> = others.iter().map(reclaims).collect();
    by_priority.into_iter().take(most).for_each(|index| is_tried[index] = true);
    let (tried, left_out): (Vec<_>, Vec<_>) = others.into_iter().zip(is_tried).partition(|(_, is_tried)| *is_tried);
    let configs = |some: Vec<(Config, bool)>| some.into_iter().map(|(config, _)| config).collect();
    (configs(tried), configs(left_out))
}

/// Returns `true` for a variation of another candidate: with a bound on splitting, different rounding, small granules, or two changed
/// policies.
fn is_refinement(pool: &PoolConfig, own: &PoolConfig) -> bool {
    let bounds_splitting =
        matches!(pool.segments(), SegmentPolicy::Fixed(fixed) if fixed.max_split_size_bytes.is_some());
    let has_small_granules = pool.stitching().is_some_and(|stitching| *stitching != Stitching::default());
    let is_rounded = pool.roundup_power2_divisions() != own.roundup_power2_divisions();
    let changes_streams = pool.streams() != own.streams();
    let changes_segments = mem::discriminant(pool.segments()) != mem::discriminant(own.segments());
    let obtains_differently = pool.stitching() != own.stitching() || changes_segments;
    bounds_splitting || has_small_granules || is_rounded || changes_streams && obtains_differently
}

/// Runs the job several times under a configuration.
fn measure(recorded: &Recorded, config: &Config) -> Result<Steady, CliError> {
    let steady = recorded.job.steady(config, None);
    steady.map_err(|source| CliError::Job { path: recorded.path.clone(), source })
}

/// Returns distinct configurations that differ from the job's own in how the default pool obtains, splits and rounds memory. Settings that
/// have an effect only on larger requests than the job makes are left out.
pub(super) fn candidates(recorded: &Recorded, own: &Config) -> Vec<Config> {
    let streams = recorded.job.stream_count();
    let bytes_of = |op: &Op| match *op {
        Op::Allocate { size_bytes, .. } | Op::Reserve { size_bytes, .. } | Op::Refuse { size_bytes, .. } => size_bytes,
        _ => 0,
    };
    let largest_bytes = recorded.program().ops().iter().map(bytes_of).max().unwrap_or(0);
    let joins = |op: &Op| matches!(op, Op::RegisterStream { stream, group } if stream != group);
    let has_groups = recorded.program().ops().iter().any(joins);
    let mut configs = Vec::new();
    for config in candidates_for(own, streams, has_groups) {
        if matters(config.default_pool(), largest_bytes) && config != *own && !configs.contains(&config) {
            configs.push(config);
        }
    }
    configs
}

/// Returns `false` if a bound on splitting, or stitching, has no effect on requests of at most this many bytes.
fn matters(pool: &PoolConfig, largest_bytes: u64) -> bool {
    let is_rounded = pool.roundup_power2_divisions() != RoundupPower2Divisions::default();
    let largest_bytes = if is_rounded { largest_bytes.saturating_mul(2) } else { largest_bytes };
    if let Some(stitching) = pool.stitching() {
        return largest_bytes >= stitching.least_bytes;
    }
    match pool.segments() {
        SegmentPolicy::Fixed(fixed) => fixed.max_split_size_bytes.is_none_or(|bound_bytes| {
            // The largest segment under PyTorch's size rules.
            let segment_bytes = largest_bytes.saturating_add(2 * MIB).max(fixed.large_segment_bytes);
            segment_bytes >= bound_bytes
        }),
        _ => true,
    }
}

fn candidates_for(own: &Config, streams: usize, has_groups: bool) -> Vec<Config> {
    let fixed = |max_split_size_mb: Option<u64>| {
        move |pool: PoolConfigBuilder| {
            let mut fixed = FixedSegments::default();
            fixed.max_split_size_bytes = max_split_size_mb.map(|mb| mb * MIB);
            Ok(pool.segments(SegmentPolicy::Fixed(fixed)))
        }
    };
    let rounded = |divisions: u32| {
        move |pool: PoolConfigBuilder| Ok(pool.roundup_power2_divisions(RoundupPower2Divisions::uniform(divisions)?))
    };
    let mut configs = vec![with(own, |pool| Ok(pool.expandable()))];
    let stitching = |streams: StreamPolicy, stitching: Stitching| {
        move |pool: PoolConfigBuilder| Ok(pool.expandable().streams(streams).stitching(Some(stitching)))
    };
    let granules = || [Stitching::default(), Stitching::with_granule(SMALL_GRANULE_BYTES)];
    configs.extend(granules().map(|some| with(own, stitching(own.default_pool().streams(), some))));
    configs.extend([None, Some(128), Some(256), Some(512)].map(|mb| with(own, fixed(mb))));
    configs.extend([4, 8].map(|divisions| with(own, rounded(divisions))));
    if streams > 1 {
        if has_groups {
            configs.push(with(own, |pool| Ok(pool.expandable().streams(StreamPolicy::Grouped))));
        }
        configs.push(with(own, |pool| Ok(pool.expandable().streams(StreamPolicy::Shared))));
        configs.extend(granules().map(|some| with(own, stitching(StreamPolicy::Shared, some))));
        configs.push(with(own, |pool| Ok(pool.fixed().streams(StreamPolicy::Shared))));
    }
    if own.default_pool().reclaim() == Reclaim::Never {
        configs.push(with(own, |pool| Ok(pool.reclaim(Reclaim::Heap))));
        configs.push(with(own, |pool| Ok(pool.expandable().reclaim(Reclaim::Heap))));
        if streams > 1 {
            configs.push(with(own, |pool| Ok(pool.reclaim(Reclaim::Pool))));
        }
    }
    // Invalid combinations are dropped.
    configs.into_iter().flatten().collect()
}

fn with(
    own: &Config,
    change: impl FnOnce(PoolConfigBuilder) -> Result<PoolConfigBuilder, ConfigError>,
) -> Result<Config, ConfigError> {
    let pool = change(own.default_pool().to_builder())?.build()?;
    own.to_builder().default_pool(pool).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_valid_and_keep_the_limits() {
        let own: Config = "segments:reserved,segment_mb:64,total_limit_mb:512".parse().unwrap();
        let configs = candidates_for(&own, 2, false);
        assert_eq!((configs.len(), candidates_for(&own, 2, true).len()), (13, 14));
        // A report of a long job tries those with one change.
        let (tried, left_out) = most_useful(configs.clone(), &own, 3);
        assert_eq!((tried.len(), left_out.len()), (3, 10));
        assert!(tried.iter().all(|config| !is_refinement(config.default_pool(), own.default_pool())));
        assert_eq!(most_useful(configs.clone(), &own, usize::MAX), (configs.clone(), Vec::new()));
        // A different `reclaim` is always tried.
        for own in ["", "segments:fixed", "stitching:true", "reclaim:never"] {
            let own: Config = own.parse().unwrap();
            let configs = candidates_for(&own, 2, false);
            let distinct: Vec<Config> = configs.into_iter().filter(|config| *config != own).collect();
            let (tried, _) = most_useful(distinct, &own, 0);
            assert!(tried.iter().all(|config| config.default_pool().reclaim() != Reclaim::Never));
            assert_eq!(tried.is_empty(), own.default_pool().reclaim() != Reclaim::Never);
        }
        assert!(configs.iter().all(|config| config.total_limit_bytes() == Some(512 * MIB)));
    }
}
