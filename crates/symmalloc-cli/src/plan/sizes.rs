//! The amount to reserve for each heap, so that it obtains no memory later.
//!
//! A heap with more reserved memory makes different placements. For example, it serves a request from the large free block at its end,
//! where it would otherwise have obtained a smaller block. Therefore, the peak of a run without reservations is only the start of a search:
//!
//! ```text
//! reserve nothing ──► peak of each heap ──► + margin ──► run with that reserved ──┬─ nothing obtained: done
//!                                                ▲                               │
//!                                                └──────── the new peak ◄────────┘ something obtained
//! ```
//!
//! Every round reserves more than the previous one, up to at most the sum of all allocations, so the search terminates. With several ranks,
//! each heap gets the maximum that any rank needs, so that all ranks reserve the same amount.

use super::heap::{HeapPlan, Heaps};
use super::program::{Pools, groups_of, heaps_of, planned};
use crate::error::CliError;
use crate::job::JobError;
use crate::recorded::Recorded;
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::{Config, ConfigError, PoolConfig, SegmentPolicy};
use symmalloc_core::ids::{HeapId, PoolId, StreamGroup};
use symmalloc_core::op::Op;
use symmalloc_core::units::MIB;
use symmalloc_core::{Allocator, backend::Backend};
use symmalloc_sim::IdleBackend;
use symmalloc_trace::replay::{Program, Replay, StepError};

/// Number of rounds in which a heap grows by the missing amount only. Later rounds add an eighth, to bound the duration of the search.
const EXACT_ROUNDS: u32 = 32;

/// Parameters of a search.
pub(super) struct Search<'a> {
    pub(super) jobs: &'a [Recorded],
    /// Configuration of each pool, growable and without limits.
    pub(super) pools: &'a Pools,
    /// Settings that apply to all pools.
    pub(super) config: &'a Config,
    /// Pools in which every heap reserves the same amount.
    pub(super) equal: &'a BTreeSet<PoolId>,
    pub(super) margin_percent: u64,
}

/// Memory of a heap in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    reserved_bytes: u64,
    live_bytes: u64,
}

impl Search<'_> {
    /// Returns the amount to reserve for each heap.
    pub(super) fn run(&self) -> Result<Heaps, CliError> {
        let (mut heaps, groups) = (Heaps::new(), groups_of(self.jobs));
        for job in self.jobs {
            for (owner, stream) in heaps_of(&job.recording.records, &groups, self.pools) {
                let heap = heaps.entry(owner).or_insert(HeapPlan::new(stream));
                heap.stream = heap.stream.min(stream);
            }
        }
        for round in 0_u32.. {
            let taken = self.measure(&heaps)?;
            let mut grew = false;
            for (owner, heap) in &mut heaps {
                let Taken { reserved_bytes, live_bytes } = taken[owner];
                if round == 0 {
                    heap.grown_bytes = reserved_bytes;
                    heap.peak_live_bytes = live_bytes;
                    heap.reserve_bytes = with_margin(reserved_bytes, self.margin_percent);
                    grew = true;
                } else if reserved_bytes > heap.reserve_bytes {
                    let more = if round > EXACT_ROUNDS { reserved_bytes / 8 } else { 0 };
                    heap.reserve_bytes = (reserved_bytes + more).next_multiple_of(granularity());
                    grew = true;
                }
            }
            self.make_equal(&mut heaps);
            if !grew {
                break;
            }
        }
        Ok(heaps)
    }

    /// Runs every job with the current reservations, and returns the maximum over all ranks for each heap.
    fn measure(&self, heaps: &Heaps) -> Result<BTreeMap<HeapId, Taken>, CliError> {
        let mut most: BTreeMap<HeapId, Taken> = heaps.keys().map(|owner| (*owner, Taken::default())).collect();
        for (rank, job) in (0..).zip(self.jobs) {
            let failed = |source| CliError::Job { path: job.path.clone(), source };
            let planned = planned(&job.recording.records, &groups_of(self.jobs), self.pools, heaps);
            let program = Program::new(&planned.records);
            let program = program.map_err(|source| CliError::Program { path: job.path.clone(), source })?;
            let allocator = Allocator::new(IdleBackend::default(), self.config.clone());
            let allocator = allocator.map_err(|error| failed(error.into()))?;
            let mut replay = Replay::new(&allocator, &program);
            for (op, origin) in program.ops().iter().zip(&planned.origins) {
                if let Op::DestroyPool { pool } = op {
                    note(&allocator, heaps, Some(*pool), &mut most);
                }
                match (replay.step(op), op) {
                    // There is no limit, and the device refuses nothing, so the request exceeds the range of the pool.
                    (
                        Err(StepError::Allocate(_)),
                        Op::Reserve { pool, size_bytes, .. } | Op::Allocate { pool, size_bytes, .. },
                    ) => return Err(CliError::PlanBeyondRange { pool: *pool, needed_bytes: *size_bytes }),
                    (Err(error), _) => return Err(failed(JobError::Step { rank, op: *origin, error })),
                    (Ok(_), _) => {}
                }
            }
            note(&allocator, heaps, None, &mut most);
        }
        Ok(most)
    }

    fn make_equal(&self, heaps: &mut Heaps) {
        for pool in self.equal {
            let of_pool = |owner: &HeapId| owner.pool == *pool;
            let most = heaps.iter().filter(|(owner, _)| of_pool(owner)).map(|(_, heap)| heap.reserve_bytes).max();
            let most = most.unwrap_or(0);
            heaps.iter_mut().filter(|(owner, _)| of_pool(owner)).for_each(|(_, heap)| heap.reserve_bytes = most);
        }
    }
}

/// Records the memory of the heaps of one pool, or of all existing pools.
fn note<B: Backend>(allocator: &Allocator<B>, heaps: &Heaps, pool: Option<PoolId>, most: &mut BTreeMap<HeapId, Taken>) {
    let first = HeapId { pool: pool.unwrap_or_default(), group: StreamGroup::All };
    for (owner, heap) in heaps.range(first..).take_while(|(owner, _)| pool.is_none_or(|pool| owner.pool == pool)) {
        // A destroyed pool was recorded before its destruction. A pool that this rank does not create has no memory.
        let Ok(stats) = allocator.heap_stats(owner.pool, heap.stream) else { continue };
        let taken = most.entry(*owner).or_default();
        taken.reserved_bytes = taken.reserved_bytes.max(stats.reserved_bytes.peak);
        taken.live_bytes = taken.live_bytes.max(stats.usage.all.requested_bytes.peak);
    }
}

/// Returns a pool's configuration for the search: it grows as needed, releases no memory, and
/// does not stitch.
pub(super) fn growing(config: &PoolConfig) -> Result<PoolConfig, ConfigError> {
    let mut builder = config.to_builder().limit_bytes(None).release_threshold_bytes(None).stitching(None);
    if config.has_quota() || !matches!(config.segments(), SegmentPolicy::Expandable(_)) {
        builder = builder.expandable();
    }
    builder.build()
}

fn with_margin(size_bytes: u64, percent: u64) -> u64 {
    let margin = u128::from(size_bytes) * u128::from(percent) / 100;
    size_bytes.saturating_add(u64::try_from(margin).unwrap_or(u64::MAX)).next_multiple_of(granularity())
}

/// Returns the mapping granularity of CUDA.
const fn granularity() -> u64 {
    2 * MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_margin_is_added_and_rounded_up_to_whole_granules() {
        assert_eq!(with_margin(100 * MIB, 0), 100 * MIB);
        assert_eq!(with_margin(100 * MIB, 1), 102 * MIB);
        assert_eq!(with_margin(100 * MIB, 50), 150 * MIB);
        assert_eq!(with_margin(0, 50), 0);
    }
}
