//! A job: a recorded program, carried out on many simulated ranks that are then compared.
//!
//! ```text
//!                      ┌─ rank 0 ──► decisions of each pass ◄───┐  compare, allocation by allocation
//! recording ─► Job ────┼─ rank 1 ─────────────────────────────► ┤
//!                      └─ rank N-1 ───────────────────────────► ┘ ─► Outcome
//! ```
//!
//! Every rank has a device of its own, made from (seed, rank): other addresses, other event timing, other handles. What
//! a rank does is one file per rule, `sequence` and `address`; how ranks are run and compared is in `ranks`.
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
mod outcome;
mod ranks;
mod sequence;
mod unknown;

pub(crate) use outcome::Steady;
pub use outcome::{Decision, Divergence, Outcome, Peaks, PlannedOps};
pub(crate) use unknown::{UnknownToModel, keys};

use clap::ValueEnum;
use ranks::{Report, Rule};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::ops::ControlFlow;
use std::sync::Arc;
use symmalloc_core::backend::BackendError;
use symmalloc_core::config::{Config, ConfigError, PoolConfig, SegmentPolicy, StreamPolicy};
use symmalloc_core::errors::FreeError;
use symmalloc_core::op::Op;
use symmalloc_core::units::Amount;
use symmalloc_core::{PoolId, StreamId};
use symmalloc_import::Recording;
use symmalloc_trace::plan::PlanFile;
use symmalloc_trace::replay::{Program, ReplayError, StepError};

/// How free blocks are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// By size, sequence and offset; other streams' uses are fenced (symmalloc)
    #[default]
    Sequence,
    /// By size and address; events are polled (the model of PyTorch)
    Address,
}

/// How the default pool obtains memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Segments {
    /// One growing range per heap
    Expandable,
    /// PyTorch's size rules
    Fixed,
}

/// How a job is replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of simulated ranks.
    pub ranks: NonZeroU32,
    /// The rule by which they place.
    pub order: Order,
    /// How the default pool obtains memory. `None`: as the recording says, else expandable.
    pub segments: Option<Segments>,
    /// Whether the default pool's streams share free blocks. `None`: as the recording says, else separate. The model of
    /// address order always keeps them separate.
    pub streams: Option<StreamPolicy>,
    /// Names the simulated job: the same seed gives the same addresses and timings on every rank for ever.
    pub seed: u64,
    /// How often a rank carries the program out on its allocator, freeing everything in between. The first pass alone
    /// flatters: a later one begins with all the memory there is, and best fit may spoil the part that a large request
    /// needs. In the model of address order rank 0 does them all, and the others one.
    pub passes: NonZeroU32,
    /// Plans that our rule follows, made for this job and its configuration. Each pass is a step, unless the program has its own.
    pub plan: Option<Arc<PlanFile>>,
}

impl Default for Options {
    /// Eight ranks, our rule, the recording's configuration, seed 0, five passes: one from nothing and four from what
    /// those before have left reserved.
    fn default() -> Self {
        Options {
            ranks: NonZeroU32::new(8).expect("8 is not zero"),
            order: Order::Sequence,
            segments: None,
            streams: None,
            seed: 0,
            passes: NonZeroU32::new(5).expect("5 is not zero"),
            plan: None,
        }
    }
}

/// A program and how its allocator is configured.
#[derive(Clone, Debug)]
pub struct Job {
    program: Program,
    /// What holds over all pools; its default pool does not count.
    config: Config,
    default_pool: PoolConfig,
}

impl Job {
    /// The job that a recording holds.
    ///
    /// # Errors
    /// When an op names an allocation that was not made before, which no reader lets through.
    pub fn new(recording: &Recording) -> Result<Self, ReplayError> {
        let program = Program::new(&recording.records)?;
        let config = recording.config.clone().unwrap_or_default();
        // A trace may say how the default pool is configured before it uses it.
        let stated = program.ops().iter().find_map(default_pool);
        let default_pool = stated.unwrap_or(config.default_pool()).clone();
        Ok(Job { program, config, default_pool })
    }

    /// The ops.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Number of streams that the program registers.
    pub fn stream_count(&self) -> usize {
        self.program.stream_count()
    }

    /// The configuration of every rank's allocator: the recording's, with the default pool's segments and streams as the
    /// options say. Where these name what the recording has anyway, its knobs stay.
    ///
    /// # Errors
    /// When the combination is not valid.
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

    /// Checks that the heaps that live at the same time fit into a device's addresses.
    ///
    /// # Errors
    /// When they do not: on a device, too, every request of the heaps that come last would be refused.
    pub fn check_addresses(&self, config: &Config) -> Result<(), JobError> {
        let range_of = |config: &PoolConfig| match config.segments() {
            SegmentPolicy::Expandable(expandable) => (expandable.range_bytes, config.streams()),
            _ => (0, config.streams()),
        };
        let mut pools = BTreeMap::from([(PoolId::DEFAULT, range_of(config.default_pool()))]);
        let mut heaps: BTreeSet<(PoolId, Option<StreamId>)> = BTreeSet::new();
        let mut addresses = 0_u64;
        for op in self.program.ops() {
            match op {
                Op::CreatePool { pool: PoolId::DEFAULT, .. } => {}
                Op::CreatePool { pool, config } => drop(pools.insert(*pool, range_of(config))),
                Op::DestroyPool { pool } => {
                    let range_bytes = pools.remove(pool).map_or(0, |(bytes, _)| bytes);
                    let before = heaps.len();
                    heaps.retain(|(of, _)| of != pool);
                    addresses -= range_bytes * (before - heaps.len()) as u64;
                }
                Op::Allocate { pool, stream, size_bytes: 1.., .. } => {
                    let Some((range_bytes, streams)) = pools.get(pool) else { continue };
                    let heap = (*pool, (*streams != StreamPolicy::Shared).then_some(*stream));
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

    /// What one rank takes under a configuration once the job is repeated, following a plan or none.
    pub(crate) fn steady(&self, config: &Config, plan: Option<&Arc<PlanFile>>) -> Result<Steady, JobError> {
        let options = Options { plan: plan.cloned(), ..Options::default() };
        let rule = sequence::Sequence { program: &self.program, config, options: &options };
        let mut refused = 0;
        let report = rule.run(0, |_, decision| {
            refused += u64::from(decision.is_none());
            ControlFlow::Continue(())
        })?;
        let Report { peaks, planned, waits, maps, .. } = report;
        Ok(Steady { peaks, passes: options.passes.get(), refused, planned, waits, maps })
    }

    /// Carries the program out on every rank, on all cores, and compares them. `rank_done` is called, from any thread,
    /// whenever a rank is done.
    ///
    /// Memory: the decisions of rank 0 (24 bytes per allocation, for each pass that differs from the one before), and
    /// one rank's allocator per core. The outcome is a function of the job and the options.
    ///
    /// # Errors
    /// When an op cannot be carried out, other than by refusing memory, which is a decision like others.
    pub fn replay(&self, options: &Options, rank_done: &(dyn Fn() + Sync)) -> Result<Outcome, JobError> {
        let config = self.config(options)?;
        match options.order {
            Order::Sequence => {
                let rule = sequence::Sequence { program: &self.program, config: &config, options };
                ranks::replay(&rule, self, options, rank_done)
            }
            Order::Address => self.replay_by_address(config.default_pool(), options, rank_done),
        }
    }

    /// The same under PyTorch's rule with its defaults, whatever the recording says of the allocator.
    ///
    /// # Errors
    /// When an op cannot be carried out.
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
        ranks::replay(&rule, self, options, rank_done)
    }
}

fn default_pool(op: &Op) -> Option<&PoolConfig> {
    match op {
        Op::CreatePool { pool: PoolId::DEFAULT, config } => Some(config),
        _ => None,
    }
}

/// Bytes of addresses that heaps may reserve at the same time. A device has 2^47, of which ranges that lie anywhere fill some three
/// quarters before no other one fits.
const ADDRESSES_MAX: u64 = 3 << 45;

/// Why a job could not be replayed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The configuration that recording and options make together is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An op cannot be carried out.
    #[error("op {op} on rank {rank}: {error}")]
    Step {
        /// The rank.
        rank: u32,
        /// The op, counted from 0.
        op: usize,
        /// Why.
        error: StepError,
    },
    /// The job has more heaps than a device has addresses for.
    #[error(
        "{heaps} heaps at the same time reserve {} of addresses, more than a device has: reserve less for each with range_mb, \
         let streams share, or use segments:fixed", Amount(*addresses)
    )]
    Addresses {
        /// The heaps of that time, up to the first that does not fit.
        heaps: usize,
        /// The addresses that they reserve, in bytes.
        addresses: u64,
    },
    /// A plan is not followed here.
    #[error("following the plan, on rank {rank}: {error}")]
    Plan {
        /// The rank.
        rank: u32,
        /// Why.
        error: StepError,
    },
    /// Another pass cannot begin.
    #[error("beginning another pass, on rank {rank}: {error}")]
    Pass {
        /// The rank.
        rank: u32,
        /// Why.
        error: StepError,
    },
    /// What the program left allocated cannot be freed.
    #[error("freeing what the job left, on rank {rank}: {error}")]
    Free {
        /// The rank.
        rank: u32,
        /// Why.
        error: FreeError,
    },
    /// The simulated device under the model of address order refused a call.
    #[error("op {op} on rank {rank}, in the model of address order: {error}")]
    Model {
        /// The rank.
        rank: u32,
        /// The op, counted from 0.
        op: usize,
        /// Why.
        error: BackendError,
    },
}

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
    fn a_choice_that_the_recording_made_too_keeps_its_knobs() {
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
