//! The cost of simulating a job, and the number of ranks that follows from it.
//!
//! ```text
//! work  =  checks  +  ranks × (replay + ops + heaps + checks / 16)        64 ranks by default, or as many as SIMULATED_WORK admits
//! ```
//!
//! All ranks replay the program. At each comparison, the reference and one other rank in 16 check all of their blocks.

use super::error::{OPS_PER_COMPARISON, SCANNED_MAX};
use super::{Job, JobError};
use std::collections::{BTreeMap, BTreeSet};
use symmalloc_core::config::{Config, StreamPolicy};
use symmalloc_core::groups::Groups;
use symmalloc_core::ids::StreamGroup;
use symmalloc_core::op::Op;
use symmalloc_core::work::{self, Allowance};
use symmalloc_core::{Allocator, PoolId};
use symmalloc_sim::SimBackend;
use symmalloc_trace::replay::{Replay, StepError};

/// Number of ranks that a simulation runs by default.
pub(crate) const SIMULATED_RANKS: u32 = 64;
/// Minimum number of ranks by default, for a job that takes much work.
const SIMULATED_RANKS_MIN: u32 = 2;

/// Maximum units of work over all ranks of a default simulation, which takes about 20 seconds or 1 GiB of memory. A job with more work runs
/// on fewer ranks.
const SIMULATED_WORK: u64 = 1_000_000_000;
/// Units of work that represent the time of an op, the memory of a heap, and the time to check a block.
const OP_WORK: u64 = 100;
const HEAP_WORK: u64 = 100_000;
const BLOCK_WORK: u64 = 8;
/// At a comparison, the reference and one in this many other ranks check their blocks.
const CHECKED_ONE_IN: u64 = 16;

/// The work of a simulation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimulatedWork {
    /// Units of work of each rank.
    each: u64,
    /// Blocks that the reference checks over all comparisons.
    blocks: u64,
}

impl SimulatedWork {
    /// Returns the number of ranks on which a simulation runs by default.
    pub(crate) fn ranks(self) -> u32 {
        let checks = BLOCK_WORK * self.blocks;
        let each = self.each + checks / CHECKED_ONE_IN;
        let ranks = SIMULATED_WORK.saturating_sub(checks) / each.max(1);
        ranks.clamp(SIMULATED_RANKS_MIN.into(), SIMULATED_RANKS.into()) as u32
    }
}

/// The heaps of the pools that exist.
struct Heaps {
    of_pools: BTreeMap<PoolId, (StreamPolicy, BTreeSet<StreamGroup>)>,
    count: usize,
    peak: usize,
}

impl Heaps {
    fn new(default_pool: StreamPolicy) -> Self {
        Heaps { of_pools: BTreeMap::from([(PoolId::DEFAULT, (default_pool, BTreeSet::new()))]), count: 0, peak: 0 }
    }

    /// Updates the heaps after an op. Must not be called for a refused destruction of a pool, which changes nothing.
    fn follow(&mut self, op: &Op, groups: &Groups) {
        match op {
            Op::CreatePool { pool, config } if *pool != PoolId::DEFAULT => {
                self.of_pools.insert(*pool, (config.streams(), BTreeSet::new()));
            }
            Op::DestroyPool { pool } => {
                self.count -= self.of_pools.remove(pool).map_or(0, |(_, heaps)| heaps.len());
            }
            Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => {
                let Some((streams, heaps)) = self.of_pools.get_mut(pool) else { return };
                self.count += usize::from(heaps.insert(streams.group_of(*stream, groups)));
                self.peak = self.peak.max(self.count);
            }
            _ => {}
        }
    }
}

impl Job {
    /// Replays the job on a device that tracks the order of streams, checks that a simulation would not take too much work, and returns the
    /// work of a simulation. In a simulation, each rank replays the job, and keeps a clock for every pair of streams and a history for
    /// every heap. At each comparison, all ranks compare their heaps, and some check all of their blocks.
    ///
    /// # Errors
    /// Returns an error that names the op at which an allowance is exhausted. The simulation itself reports all other errors.
    pub(crate) fn check_work(&self, config: &Config) -> Result<SimulatedWork, JobError> {
        let device = SimBackend::builder().memory_bytes(u64::MAX).build();
        let allocator = Allocator::new(device, config.clone())?;
        let (mut replay, groups) = (Replay::new(&allocator, &self.program), self.program.groups());
        let (begun, mut allowance) = (work::so_far(), Allowance::default());
        let (mut scans, mut blocks, mut comparisons) = (Allowance::of(SCANNED_MAX), 0, 0);
        let (mut streams, mut heaps) = (0, Heaps::new(config.default_pool().streams()));
        // Ops since the last comparison. A sync without such ops compares nothing.
        let mut uncompared = 0;
        for (op, call) in self.program.ops().iter().enumerate() {
            let is_sync = matches!(call, Op::Sync);
            let compares = if is_sync { uncompared > 0 } else { uncompared == OPS_PER_COMPARISON };
            let scanned = scans.charge(|| {
                if compares {
                    comparisons += 1;
                    // This call counts the heaps as work.
                    let stats = allocator.stats();
                    let scanned = stats.usage.all.allocations.current + stats.free_block_count;
                    work::count(scanned as usize);
                    blocks += scanned;
                }
            });
            scanned.map_err(|_| JobError::Comparisons { op, comparisons })?;
            uncompared = if compares || is_sync { 0 } else { uncompared } + usize::from(!is_sync);
            let stepped = allowance.charge(|| {
                if let Op::RegisterStream { .. } = call {
                    streams += 1;
                    work::count(streams);
                }
                replay.step(call)
            });
            match stepped {
                Ok(Err(error @ StepError::TooMuchWork(_))) => return Err(JobError::Step { rank: 0, op, error }),
                // A refused destruction leaves the pool's heaps. A refused request still creates its heap.
                Ok(Err(_)) if matches!(call, Op::DestroyPool { .. }) => {}
                Ok(_) => heaps.follow(call, &groups),
                Err(exhausted) => return Err(JobError::Step { rank: 0, op, error: exhausted.into() }),
            }
        }
        let counted = work::so_far().wrapping_sub(begun) - blocks;
        let (ops, heaps) = (self.program.ops().len() as u64, heaps.peak as u64);
        Ok(SimulatedWork { each: counted + OP_WORK * ops + HEAP_WORK * heaps, blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Options;
    use symmalloc_import::{ReadOptions, read_bytes};

    fn work(lines: &[String]) -> Result<SimulatedWork, JobError> {
        let text = lines.join("\n");
        let trace = format!("symmalloc-trace 2\nstream s0\n{text}\nend {}\n", text.lines().count() + 1);
        let job = Job::new(&read_bytes(trace.as_bytes(), &ReadOptions::default()).unwrap()).unwrap();
        job.check_work(&job.config(&Options::default()).unwrap())
    }

    fn allocations(ids: std::ops::Range<usize>) -> impl Iterator<Item = String> {
        ids.map(|id| format!("a {id} 512 s0"))
    }

    /// Regression test: allocations that a reset freed counted at every later sync.
    #[test]
    fn a_reset_frees_blocks() {
        const STEPS: usize = 300;
        let steps = |end: fn(usize) -> String| -> Vec<String> {
            let step = |step: usize| {
                let ids = 100 * step..100 * (step + 1);
                let ends = ids.clone().filter_map(move |id| Some(end(id)).filter(|line| !line.is_empty()));
                allocations(ids).chain(["sync".to_owned()]).chain(ends).collect::<Vec<_>>()
            };
            (0..STEPS).flat_map(step).collect()
        };
        let freed = work(&steps(|id| format!("f {id}"))).unwrap();
        let reset = work(&steps(|id| if id % 100 == 99 { "reset p0".to_owned() } else { String::new() })).unwrap();
        assert_eq!(reset.blocks, freed.blocks);
        assert!((STEPS as u64 * 100..STEPS as u64 * 110).contains(&reset.blocks), "{reset:?}");
    }

    /// Regression test: heaps of destroyed pools counted.
    #[test]
    fn a_destroyed_pool_has_no_heaps() {
        let pools = |destroy: bool| -> Vec<String> {
            let pool = |pool: usize| {
                let used = format!("pool p{pool} segments:fixed\na {pool} 512 s0 p{pool}\nsync\nf {pool}");
                if destroy { format!("{used}\ndestroy p{pool}") } else { used }
            };
            (1..=500).map(pool).collect()
        };
        let (destroyed, kept) = (work(&pools(true)).unwrap(), work(&pools(false)).unwrap());
        assert!(destroyed.each < 5 * HEAP_WORK && kept.each > 500 * HEAP_WORK, "{destroyed:?} {kept:?}");
        assert_eq!((destroyed.ranks(), kept.ranks()), (64, 19));
        let shared = (0..400).map(|id| format!("stream s{}\na {id} 512 s{} p1", id + 1, id % 200));
        let shared: Vec<_> = std::iter::once("pool p1 streams:shared".to_owned()).chain(shared).collect();
        assert!(work(&shared).unwrap().each < 3 * HEAP_WORK, "streams share one heap");
    }

    /// Regression test: a simulation of many syncs was refused on any number of ranks, with an error that did not mention the syncs.
    #[test]
    fn syncs_over_many_blocks_reduce_the_ranks_before_they_are_refused() {
        let syncs = |live: usize, syncs: usize| {
            let compared = (0..syncs).map(|id| format!("a {0} 512 s0\nf {0}\nsync", live + id));
            work(&allocations(0..live).chain(compared).collect::<Vec<_>>())
        };
        let ranks =
            [(10, 100), (3000, 10_000), (3000, 40_000)].map(|(live, count)| syncs(live, count).unwrap().ranks());
        assert!(ranks[0] == 64 && (3..64).contains(&ranks[1]) && ranks[2] == 2, "{ranks:?}");
        let refused = syncs(20_000, 30_000).expect_err("too many syncs");
        assert!(matches!(refused, JobError::Comparisons { comparisons: 10_000..20_000, .. }), "{refused:?}");
        assert!(refused.to_string().contains("at syncs"), "{refused}");
        // Only the first of several syncs compares anything.
        let idle = allocations(0..20_000).chain(std::iter::repeat_n("sync".to_owned(), 30_000)).collect::<Vec<_>>();
        assert!(work(&idle).unwrap().blocks < 1_000_000);
    }
}
