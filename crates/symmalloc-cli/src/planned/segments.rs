//! Computes the segments of reserved pools for a job that follows its plans.
//!
//! ```text
//! plans ──► run with these pools expandable ──► peak of each heap ──► segments ──► run ──┬─ nothing refused: done
//!                                                                        ▲               │
//!                                                                        └──── + 1/8 ◄───┘ refused
//! ```
//!
//! A heap that has its whole segment from the start makes different placements from one that grows, and may need
//! slightly more memory. The search ignores limits; adopting the plans then checks whether the segments fit.

use super::draft::{GRANULE_BYTES, contradicts};
use super::refusal::not_followed;
use crate::error::CliError;
use crate::job::{JobError, Options};
use crate::recorded::Recorded;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::{Config, ConfigError, PoolConfig, PoolConfigBuilder, SegmentPolicy};
use symmalloc_core::ids::{HeapId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::IdleBackend;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Replay, StepError};

/// Maximum number of rounds in which segments grow. If requests are still refused after them, the job's results report
/// the refusals.
const ROUNDS: u32 = 16;

/// Segment sizes in bytes of the reserved pools that have plans.
type Segments = BTreeMap<PoolId, u64>;

/// Returns the same plans, with the segments of reserved pools as large as the job needs.
pub(super) fn exact(recorded: &Recorded, file: PlanFile) -> Result<PlanFile, CliError> {
    let is_reserved = |pool| matches!(config_of(&file, pool).segments(), SegmentPolicy::Reserved { .. });
    let mut segments: Segments =
        file.plans().map(|(heap, _)| heap.pool).filter(|pool| is_reserved(*pool)).map(|pool| (pool, 0)).collect();
    if segments.is_empty() {
        return Ok(file);
    }
    let growing = with_pools(recorded, &file, None, |pool, builder| {
        if segments.contains_key(&pool) { builder.expandable().limit_bytes(None) } else { builder }
    })?;
    let (peaks, _) = run(recorded, &growing, segments)?;
    segments = peaks.into_iter().map(|(pool, bytes)| (pool, bytes.max(GRANULE_BYTES))).collect();
    let with_segments = |segments: &Segments, limit_bytes, has_limits| {
        with_pools(recorded, &file, limit_bytes, |pool, builder| match segments.get(&pool) {
            Some(bytes) if has_limits => builder.reserved(*bytes),
            Some(bytes) => builder.reserved(*bytes).limit_bytes(None),
            None => builder,
        })
    };
    for _ in 0..ROUNDS {
        let (_, refused) = run(recorded, &with_segments(&segments, None, false)?, segments.clone())?;
        if refused == 0 {
            break;
        }
        segments.values_mut().for_each(|bytes| *bytes = (*bytes + *bytes / 8).next_multiple_of(GRANULE_BYTES));
    }
    with_segments(&segments, file.config().total_limit_bytes(), true)
}

fn config_of(file: &PlanFile, pool: PoolId) -> &PoolConfig {
    file.pool_config(pool).expect("plans are of pools of the file")
}

/// Returns the plans of a file with its pools' configurations changed.
fn with_pools(
    recorded: &Recorded,
    file: &PlanFile,
    limit_bytes: Option<u64>,
    change: impl Fn(PoolId, PoolConfigBuilder) -> PoolConfigBuilder,
) -> Result<PlanFile, CliError> {
    let changed = |pool: PoolId, config: &PoolConfig| change(pool, config.to_builder()).build();
    let config = || -> Result<Config, ConfigError> {
        let default_pool = changed(PoolId::DEFAULT, file.config().default_pool())?;
        file.config().to_builder().total_limit_bytes(limit_bytes).default_pool(default_pool).build()
    };
    let mut with_pools = PlanFile::new(config().map_err(|error| recorded.invalid(error))?);
    for (pool, config) in file.pools() {
        let config = changed(pool, config).map_err(|error| recorded.invalid(error))?;
        with_pools.add_pool(pool, config).map_err(|source| contradicts(recorded, source))?;
    }
    for (HeapId { pool, .. }, plan) in file.plans() {
        with_pools.add_plan(pool, plan.clone()).map_err(|source| contradicts(recorded, source))?;
    }
    Ok(with_pools)
}

/// Runs the job with its plans. Returns the largest heap of each of these pools, in bytes, and the number of requests
/// that they refuse.
fn run(recorded: &Recorded, file: &PlanFile, mut most: Segments) -> Result<(Segments, u64), CliError> {
    let failed = |error| not_followed(recorded, error);
    let program = recorded.program();
    let allocator: Allocator<_> =
        Allocator::new(IdleBackend::default(), file.config().clone()).map_err(|error| recorded.invalid(error))?;
    let replay = Replay::following(&allocator, program, file);
    let mut replay = replay.map_err(|error| failed(JobError::Plan { rank: 0, error }))?;
    let mut streams: BTreeMap<PoolId, BTreeSet<StreamId>> = BTreeMap::new();
    for op in program.ops() {
        if let Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } = op {
            streams.entry(*pool).or_default().insert(*stream);
        }
    }
    let none = BTreeSet::new();
    let note = |replay: &Replay<'_, _, _>, pool: PoolId, most: &mut u64| {
        let allocating = streams.get(&pool).unwrap_or(&none);
        let Some(pool) = replay.pool_of(pool) else { return };
        let heaps = allocating.iter().filter_map(|stream| allocator.heap_stats(pool, *stream).ok());
        *most = heaps.map(|stats| stats.reserved_bytes.peak).fold(*most, u64::max);
    };
    let mut refused = 0;
    for _ in 0..Options::default().passes.get() {
        replay.begin_pass().map_err(|error| failed(JobError::Pass { rank: 0, error }))?;
        for (op, call) in program.ops().iter().enumerate() {
            if let Op::DestroyPool { pool } = call
                && let Some(most) = most.get_mut(pool)
            {
                note(&replay, *pool, most);
            }
            match (replay.step(call), call) {
                (Ok(_) | Err(StepError::NotLive { .. }), _) => {}
                (Err(StepError::Allocate(_)), Op::Allocate { pool, .. }) => {
                    refused += u64::from(most.contains_key(pool));
                }
                (Err(StepError::Allocate(_)), _) => {}
                (Err(error), _) => return Err(failed(JobError::Step { rank: 0, op, error })),
            }
        }
        replay.free_all().map_err(|error| failed(JobError::Free { rank: 0, error }))?;
        most.iter_mut().for_each(|(pool, most)| note(&replay, *pool, most));
    }
    Ok((most, refused))
}
