//! A job: a recorded program that runs on many simulated ranks, whose placements are then compared.
//!
//! ```text
//!                      ┌─ rank 0 ──► decisions of each pass ◄───┐  compare, allocation by allocation
//! recording ─► Job ────┼─ rank 1 ─────────────────────────────► ┤
//!                      └─ rank N-1 ───────────────────────────► ┘ ─► Outcome
//! ```
//!
//! Every rank has a separate device, made from (seed, rank), with different addresses, event timing and handles. The modules `sequence` and
//! `address` each run one rank under one rule; `ranks` runs all ranks and compares them. `simulated` bounds the work of
//! `symmalloc simulate`, which runs jobs on ranks of its own.
//!
//! ```
//! use symmalloc_cli::job::{Job, Options};
//! use symmalloc_import::{ReadOptions, read_bytes};
//!
//! let trace = b"symmalloc-trace 1\nstream s0\na 0 1048576 s0\nf 0\nend 3\n";
//! let job = Job::new(&read_bytes(trace, &ReadOptions::default())?)?;
//! let outcome = job.replay(&Options::default(), &|| ())?;
//! assert!(outcome.is_aligned());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod error;
mod options;
mod outcome;
mod ranks;
mod sequence;
mod simulated;
mod unknown;

pub use error::{JobError, STREAMS_PER_HEAP_MAX};
pub use options::{Options, Order, Segments};
pub(crate) use outcome::Steady;
pub use outcome::{Decision, Divergence, Outcome, Peaks, PlannedOps};
pub(crate) use unknown::{UnknownToModel, keys};

use ranks::Report;
pub(crate) use sequence::{Attempt, Refused};
pub(crate) use simulated::SIMULATED_RANKS;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::sync::Arc;
use symmalloc_core::config::{Config, ConfigError, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::ids::{AllocationId, HeapId};
use symmalloc_core::op::{Op, Record};
use symmalloc_core::{PoolId, StreamId};
use symmalloc_import::Recording;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, ReplayError};

/// Minimum number of ops of a long job.
const LONG_JOB_OPS: usize = 500_000;

/// Minimum number of ops of a job that is repeated less often under each of many settings.
const FEWER_PASSES_OPS: usize = 200_000;

/// Number of passes over such a job, and number of ranks that replay a long job.
const FEWER_PASSES: NonZeroU32 = NonZeroU32::new(2).expect("2 is not zero");
const LONG_JOB_RANKS: NonZeroU32 = NonZeroU32::new(2).expect("2 is not zero");

/// A program and the configuration of its allocator.
#[derive(Clone, Debug)]
pub struct Job {
    program: Program,
    /// Settings that apply to all pools. Its default pool is ignored in favor of `default_pool`.
    config: Config,
    default_pool: PoolConfig,
}

impl Job {
    /// Returns the job of a recording.
    ///
    /// # Errors
    /// Returns an error if an op names an allocation that does not exist. Readers of recordings reject such ops.
    pub fn new(recording: &Recording) -> Result<Self, ReplayError> {
        let program = Program::new(&recording.records)?;
        let config = recording.config.clone().unwrap_or_default();
        // A trace may configure the default pool before its first use.
        let stated = program.ops().iter().find_map(default_pool);
        let default_pool = stated.unwrap_or(config.default_pool()).clone();
        Ok(Job { program, config, default_pool })
    }

    /// Returns the program with its ops.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the number of streams that the program registers.
    pub fn stream_count(&self) -> usize {
        self.program.stream_count()
    }

    /// Returns the configuration of every rank's allocator: the recording's, with the segments and streams of the default pool
    /// replaced by those in the options. An option that equals the recording's policy keeps the detailed settings of that policy.
    ///
    /// # Errors
    /// Returns an error if the combination is invalid.
    pub fn config(&self, options: &Options) -> Result<Config, ConfigError> {
        let mut builder = self.default_pool.to_builder();
        match (options.segments, self.default_pool.segments()) {
            (None, _)
            | (Some(Segments::Expandable), SegmentPolicy::Expandable(_))
            | (Some(Segments::Fixed), SegmentPolicy::Fixed(_)) => {}
            (Some(Segments::Expandable), _) => builder = builder.expandable(),
            (Some(Segments::Fixed), _) => builder = builder.fixed(),
        }
        if let Some(streams) = options.streams {
            builder = builder.streams(streams);
        }
        self.config.to_builder().default_pool(builder.build()?).build()
    }

    /// Checks that all heaps that exist at the same time fit into a device's address space, and that no more streams than
    /// [`STREAMS_PER_HEAP_MAX`] use a shared heap.
    ///
    /// # Errors
    /// Returns an error if the heaps do not fit. On a real device, every request of the last heaps would then be refused. Returns an
    /// error if too many streams use a heap, because each of its free blocks may have to wait for all of them.
    pub fn check_addresses(&self, config: &Config) -> Result<(), JobError> {
        let range_of = |config: &PoolConfig| match config.segments() {
            SegmentPolicy::Expandable(expandable) => (expandable.range_bytes, config.streams()),
            _ => (0, config.streams()),
        };
        let mut pools = BTreeMap::from([(PoolId::DEFAULT, range_of(config.default_pool()))]);
        let mut heaps: BTreeSet<HeapId> = BTreeSet::new();
        let mut addresses = 0_u64;
        let groups = self.program.groups();
        let heap_in = |pools: &BTreeMap<PoolId, (u64, StreamPolicy)>, pool: PoolId, stream: StreamId| {
            pools.get(&pool).map(|(_, streams)| HeapId { pool, group: streams.group_of(stream, &groups) })
        };
        // For each heap that several streams may share: the streams that allocate from it or use its allocations.
        let mut sharing: BTreeMap<HeapId, BTreeSet<StreamId>> = BTreeMap::new();
        let mut heap_of: Vec<Option<HeapId>> = Vec::new();
        for op in self.program.ops() {
            let used = match *op {
                Op::Allocate { pool, stream, .. } => {
                    let heap = heap_in(&pools, pool, stream);
                    heap_of.push(heap);
                    heap.map(|heap| (heap, stream))
                }
                Op::RecordUse { id, stream } => {
                    heap_of.get(id.0 as usize).copied().flatten().map(|heap| (heap, stream))
                }
                _ => None,
            };
            if let Some((heap, stream)) = used.filter(|(heap, _)| heap.stream().is_none()) {
                let streams = sharing.entry(heap).or_default();
                if streams.insert(stream) && streams.len() > STREAMS_PER_HEAP_MAX {
                    return Err(JobError::SharedStreams { pool: heap.pool });
                }
            }
            match op {
                Op::CreatePool { pool: PoolId::DEFAULT, .. } => {}
                Op::CreatePool { pool, config } => drop(pools.insert(*pool, range_of(config))),
                Op::DestroyPool { pool } => {
                    let range_bytes = pools.remove(pool).map_or(0, |(bytes, _)| bytes);
                    let before = heaps.len();
                    sharing.retain(|heap, _| heap.pool != *pool);
                    heaps.retain(|heap| heap.pool != *pool);
                    addresses -= range_bytes * (before - heaps.len()) as u64;
                }
                Op::Allocate { pool, stream, size_bytes: 1.., .. } => {
                    let Some((range_bytes, _)) = pools.get(pool) else { continue };
                    let Some(heap) = heap_in(&pools, *pool, *stream) else { continue };
                    if *range_bytes > 0 && heaps.insert(heap) {
                        addresses += *range_bytes;
                    }
                }
                _ => {}
            }
            if addresses > ADDRESSES_MAX && heaps.len() > 1 {
                return Err(JobError::Addresses { heaps: heaps.len(), addresses });
            }
        }
        Ok(())
    }

    /// Returns the peaks and counters of one rank that repeats the job under a configuration, with or without a plan.
    pub(crate) fn steady(&self, config: &Config, plan: Option<&Arc<PlanFile>>) -> Result<Steady, JobError> {
        let options = Options { plan: plan.cloned(), passes: self.steady_passes(), ..Options::default() };
        let rule = sequence::Sequence { program: &self.program, config, options: &options };
        let mut of_passes = vec![0; options.passes.get() as usize];
        let report = rule.run_idle(|at, decision| {
            of_passes[at.pass as usize] += u64::from(decision.is_none());
        })?;
        let Report { peaks, planned, waits, maps, .. } = report;
        let refused = of_passes.iter().sum();
        let refused_each = of_passes.iter().all(|some| *some == of_passes[0]).then_some(of_passes[0]);
        Ok(Steady { peaks, passes: options.passes.get(), refused, refused_each, planned, waits, maps })
    }

    /// Returns `true` if the job has so many ops that, by default, commands replay it less often and spend less time on a plan.
    pub(crate) fn is_long(&self) -> bool {
        self.program.ops().len() >= LONG_JOB_OPS
    }

    /// Returns `true` if the job has so many ops that a report repeats it less often and tries fewer settings.
    pub(crate) fn is_repeated_less(&self) -> bool {
        self.program.ops().len() >= FEWER_PASSES_OPS
    }

    /// Returns the number of passes that show how much memory the job needs when it repeats. Reports run a job under many settings, so
    /// they repeat it less often if it has many ops: above 200,000 they run it twice, because the second pass shows what the first one
    /// hides. Above 500,000 ops they run it once: such a job repeats its own steps.
    pub(crate) fn steady_passes(&self) -> NonZeroU32 {
        match self.program.ops().len() {
            LONG_JOB_OPS.. => NonZeroU32::MIN,
            FEWER_PASSES_OPS.. => FEWER_PASSES,
            _ => Options::default().passes,
        }
    }

    /// Returns the default number of passes over the job in a replay.
    pub(crate) fn replayed_passes(&self) -> NonZeroU32 {
        if self.is_long() { FEWER_PASSES } else { Options::default().passes }
    }

    /// Returns the default number of ranks on which a replay runs the job.
    pub(crate) fn replayed_ranks(&self) -> NonZeroU32 {
        if self.is_long() { LONG_JOB_RANKS } else { Options::default().ranks }
    }

    /// Runs a program of this job once under a configuration, up to and including an op.
    ///
    /// # Errors
    /// Returns an error if an op fails. A refusal of memory is not a failure.
    pub(crate) fn attempt(&self, program: &Program, config: &Config, last_op: usize) -> Result<Attempt, JobError> {
        let options = Options { passes: NonZeroU32::MIN, ..Options::default() };
        let rule = sequence::Sequence { program, config, options: &options };
        rule.attempt(last_op, |_| ControlFlow::Continue(()))
    }

    /// Returns the first op whose request is refused under a configuration, and why.
    ///
    /// # Errors
    /// Returns an error if an op before it fails.
    pub(crate) fn first_refusal(&self, config: &Config) -> Result<Option<Refused>, JobError> {
        let options = Options { passes: NonZeroU32::MIN, ..Options::default() };
        let rule = sequence::Sequence { program: &self.program, config, options: &options };
        let attempt = rule.attempt(self.program.ops().len(), |_| ControlFlow::Break(()))?;
        Ok(attempt.refused.into_iter().next())
    }

    /// Runs the program on every rank, on all cores, and compares the ranks. Calls `rank_done`, from any thread, whenever a rank
    /// finishes.
    ///
    /// Memory: the decisions of rank 0 (24 bytes per allocation, for each pass that differs from the previous one), and one
    /// allocator per core. The outcome is a function of the job and the options.
    ///
    /// # Errors
    /// Returns an error if an op fails. A refusal of memory is not a failure but a decision.
    pub fn replay(&self, options: &Options, rank_done: &(dyn Fn() + Sync)) -> Result<Outcome, JobError> {
        let config = self.config(options)?;
        match options.order {
            Order::Sequence => {
                let rule = sequence::Sequence { program: &self.program, config: &config, options };
                ranks::replay(&rule, &self.program, options, rank_done)
            }
            Order::Address => self.replay_by_address(config.default_pool(), options, rank_done),
        }
    }

    /// Replays the job under PyTorch's rule with its default settings, and ignores the recording's allocator configuration.
    ///
    /// # Errors
    /// Returns an error if an op fails.
    pub fn replay_as_pytorch(
        &self,
        segments: Segments,
        options: &Options,
        rank_done: &(dyn Fn() + Sync),
    ) -> Result<Outcome, JobError> {
        let rules = match segments {
            Segments::Fixed => PoolConfig::builder().fixed(),
            Segments::Expandable => PoolConfig::builder().expandable(),
        };
        let options = Options { order: Order::Address, plan: None, ..options.clone() };
        self.replay_by_address(&rules.build()?, &options, rank_done)
    }

    fn replay_by_address(
        &self,
        rules: &PoolConfig,
        options: &Options,
        rank_done: &(dyn Fn() + Sync),
    ) -> Result<Outcome, JobError> {
        let passes = options.passes.get();
        let rule = address::Address { program: &self.program, rules, seed: options.seed, passes };
        ranks::replay(&rule, &self.program, options, rank_done)
    }
}

/// Returns an id that no record uses.
pub(crate) fn unused_id(records: &[Record]) -> AllocationId {
    let id = |record: &Record| match record.op {
        Op::Allocate { id, .. } => Some(id.0),
        _ => None,
    };
    let highest = records.iter().filter_map(id).max();
    AllocationId(highest.map_or(0, |id| id.wrapping_add(1)))
}

/// Replaces each request that the recorded allocator refused by an allocation that is freed immediately, so that a replay under a limit
/// decides whether the request fits.
pub(crate) fn request_again(recording: &mut Recording) {
    let AllocationId(mut next) = unused_id(&recording.records);
    let mut records = Vec::with_capacity(recording.records.len());
    for mut record in recording.records.drain(..) {
        let Op::Refuse { pool, stream, size_bytes, .. } = record.op else {
            records.push(record);
            continue;
        };
        let id = AllocationId(next);
        next = next.wrapping_add(1);
        record.op = Op::Allocate { id, pool, stream, size_bytes };
        records.extend([record, Op::Free { id }.into()]);
    }
    recording.records = records;
}

fn default_pool(op: &Op) -> Option<&PoolConfig> {
    match op {
        Op::CreatePool { pool: PoolId::DEFAULT, config } => Some(config),
        _ => None,
    }
}

/// Maximum number of bytes of address space that heaps may reserve at the same time. A device has 2^47 bytes. Ranges at arbitrary addresses
/// fill about three quarters of it before no further range fits.
const ADDRESSES_MAX: u64 = 3 << 45;

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_import::{ReadOptions, read_bytes};

    fn policy(trace: &str, segments: Option<Segments>) -> SegmentPolicy {
        let recording = read_bytes(trace.as_bytes(), &ReadOptions::default()).unwrap();
        let options = Options { segments, ..Options::default() };
        Job::new(&recording).unwrap().config(&options).unwrap().default_pool().segments().clone()
    }

    #[test]
    fn choosing_the_recorded_policy_keeps_its_settings() {
        let trace = "symmalloc-trace 1\nconfig segments:fixed,max_split_size_mb:512\nend 0\n";
        let stated = policy(trace, None);
        assert!(matches!(&stated, SegmentPolicy::Fixed(fixed) if fixed.max_split_size_bytes == Some(512 << 20)));
        assert_eq!(policy(trace, Some(Segments::Fixed)), stated);
        assert!(matches!(policy(trace, Some(Segments::Expandable)), SegmentPolicy::Expandable(_)));
    }

    #[test]
    fn the_stated_default_pool_overrides_the_stated_configuration() {
        let trace = "symmalloc-trace 1\nconfig segments:fixed\npool p0 segments:reserved,segment_mb:2\nend 1\n";
        assert_eq!(policy(trace, None), SegmentPolicy::Reserved { segment_bytes: 2 << 20 });
    }

    #[test]
    fn the_outcome_is_a_function_of_the_job_and_the_options() {
        let trace = b"symmalloc-trace 1\nstream s0\na 0 512 s0\na 1 3000000 s0\nf 0\na 2 512 s0\nend 5\n";
        let job = Job::new(&read_bytes(trace, &ReadOptions::default()).unwrap()).unwrap();
        for order in [Order::Sequence, Order::Address] {
            let options = Options { order, ..Options::default() };
            assert_eq!(job.replay(&options, &|| ()), job.replay(&options, &|| ()));
        }
    }
}
