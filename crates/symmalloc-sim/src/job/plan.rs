//! The plan of a run: the program of a job and the context of each rank. A run is determined by its plan.

use crate::device::{Call, Fault, SplitMix64};
use crate::job::context::{AfterLoss, Deviation, Purpose, RankContext, RankFault, sequence};
use crate::job::program::JobProgram;
use crate::job::steps::JobStep;
use crate::job::swarm;
use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::units::MIB;
use symmalloc_core::{Op, PoolId, Record};

/// The size of a generated job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Number of ranks.
    pub ranks: NonZeroU32,
    /// Number of ops of the program, excluding the liveness phase.
    pub ops: usize,
}

/// The program of a job and the context of each rank. A run is determined by its plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPlan {
    pub(crate) seed: u64,
    pub(crate) config: Config,
    pub(crate) granularity_bytes: u64,
    pub(crate) steps: Vec<JobStep>,
    /// Contexts of the ranks; at least one. The first rank that is not faulty, does not restart and does no private
    /// work under a limit over all pools is the reference.
    pub(crate) ranks: Vec<RankContext>,
}

/// Maximum number of steps of a recorded job between two comparisons.
pub const STRETCH_MAX: usize = 2048;

/// Maximum number of host threads over which a program is spread if it names no threads.
const THREADS_BY_STREAM: u16 = 8;

/// Number of ops in the history of each heap of a recorded job.
const RECORDED_HISTORY_OPS: u32 = 256;

impl JobPlan {
    /// Draws a job from a seed.
    pub fn from_seed(seed: u64, size: &Size) -> Self {
        let drawn = swarm::draw(seed, size.ops);
        JobPlan {
            seed,
            config: drawn.config,
            granularity_bytes: drawn.granularity_bytes,
            steps: drawn.steps,
            ranks: contexts(seed, size.ranks, size.ops as u64),
        }
    }

    /// Creates a plan that runs a recorded job on `ranks` ranks, with contexts drawn from `seed`. All of its pools are
    /// treated as symmetric, so that the ranks compare them. The histories are short, because there may be thousands of
    /// ranks.
    pub fn of_recorded(config: &Config, records: &[Record], seed: u64, ranks: NonZeroU32) -> Self {
        let config = with_default_pool(config, &symmetric(config.default_pool()));
        let config =
            config.to_builder().history_ops(RECORDED_HISTORY_OPS).build().expect("every value should be in its range");
        let records = records.iter().map(|record| {
            let mut record = record.clone();
            if let Op::CreatePool { config, .. } = &mut record.op {
                **config = symmetric(config);
            }
            record
        });
        JobPlan::of_records(config, records, seed, ranks)
    }

    /// Creates a plan that runs a program on `ranks` ranks, with contexts drawn from `seed`. Streams are distributed
    /// over up to eight threads. The records must be consistent with each other, as the records of a trace are.
    pub fn of_records(
        mut config: Config,
        records: impl IntoIterator<Item = Record>,
        seed: u64,
        ranks: NonZeroU32,
    ) -> Self {
        let (mut steps, mut streams) = (Vec::new(), BTreeMap::new());
        // A program may choose the keys of its pools. Ranks number them in the order of their creation.
        let mut pools = BTreeMap::from([(PoolId::DEFAULT, PoolId::DEFAULT)]);
        for mut record in records {
            if let Op::CreatePool { pool, .. } = record.op {
                let number = PoolId(pools.len() as u32);
                pools.entry(pool).or_insert(number);
            }
            if let Some(pool) = pool_mut(&mut record.op) {
                *pool = pools[pool];
            }
            let thread = match record.op {
                // A trace may configure the default pool before using it.
                Op::CreatePool { pool: PoolId::DEFAULT, config: ref stated } => {
                    config = with_default_pool(&config, stated);
                    continue;
                }
                Op::Allocate { id, stream, .. } => {
                    streams.insert(id, stream);
                    stream.0
                }
                Op::Free { id } => streams.remove(&id).map_or(0, |stream| stream.0),
                Op::RecordUse { stream, .. }
                | Op::Wait { stream, .. }
                | Op::Synchronize { stream }
                | Op::Reserve { stream, .. } => stream.0,
                _ => 0,
            };
            steps.push(JobStep { op: record.op, thread: (thread % THREADS_BY_STREAM) as u8, name: record.name });
        }
        let ranks = contexts(seed, ranks, steps.len() as u64);
        JobPlan { seed, config, granularity_bytes: 2 * MIB, steps, ranks }
    }

    /// Sets the granularity of the devices: a power of two from 512 bytes to 1 GiB.
    #[must_use]
    pub fn with_granularity_bytes(mut self, granularity_bytes: u64) -> Self {
        self.granularity_bytes = granularity_bytes;
        self
    }

    /// Gives one rank a different program. Only tests use this: the run must fail.
    #[must_use]
    pub fn with_deviation(mut self, rank: u32, deviation: Deviation) -> Self {
        if let Some(rank) = self.ranks.iter_mut().find(|context| context.rank == rank) {
            rank.deviation = Some(deviation);
        }
        self
    }

    /// Returns the seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the program, without the liveness phase.
    pub fn steps(&self) -> &[JobStep] {
        &self.steps
    }

    /// Returns the context of each rank.
    pub fn ranks(&self) -> &[RankContext] {
        &self.ranks
    }

    /// Returns the rank that all other ranks are compared with: the first one that has no faults, does not restart, and
    /// does no private work under a limit over all pools.
    pub(crate) fn reference(&self) -> Option<usize> {
        let is_private = |rank: &RankContext| rank.private_per_million > 0 && self.config.total_limit_bytes().is_some();
        self.ranks.iter().position(|rank| !rank.is_faulty() && rank.restart_at.is_none() && !is_private(rank))
    }

    pub(crate) fn program(&self) -> JobProgram {
        JobProgram::new(&self.config, &self.steps, STRETCH_MAX)
    }
}

fn with_default_pool(config: &Config, pool: &PoolConfig) -> Config {
    config.to_builder().default_pool(pool.clone()).build().expect("both parts are valid")
}

/// Returns the pool that an op names, if it names one.
fn pool_mut(op: &mut Op) -> Option<&mut PoolId> {
    match op {
        Op::CreatePool { pool, .. }
        | Op::DestroyPool { pool }
        | Op::ResetPool { pool }
        | Op::Allocate { pool, .. }
        | Op::Reserve { pool, .. }
        | Op::Trim { pool: Some(pool) }
        | Op::BeginStep { pool, .. }
        | Op::EndStep { pool }
        | Op::Sleep { pool, .. }
        | Op::Wake { pool } => Some(pool),
        _ => None,
    }
}

/// Makes a pool symmetric. Symmetric pools cannot be stitched.
fn symmetric(pool: &PoolConfig) -> PoolConfig {
    pool.to_builder().stitching(None).symmetric(true).build().expect("the configuration should stay valid")
}

/// Percentages of ranks with faults. Each job chooses one of them.
const UNLUCKY_PERCENT: [u64; 4] = [0, 3, 10, 50];

/// Draws the contexts of all ranks. One randomly chosen rank has no faults.
fn contexts(seed: u64, ranks: NonZeroU32, ops: u64) -> Vec<RankContext> {
    let mut random = sequence(seed, Purpose::JobFaults, 0);
    let mut choose = |choices: [u64; 4]| choices[random.below(4) as usize];
    let unlucky = choose(UNLUCKY_PERCENT);
    let private = choose([0, 0, 10, 60]);
    let restarting = choose([0, 0, 3, 20]);
    let reference = random.below(ranks.get().into()) as u32;
    let draw = |rank: u32| {
        let mut context = RankContext::adverse(seed, rank);
        let mut random = sequence(seed, Purpose::JobFaults, 1 + u64::from(rank));
        let mut happens = |percent| random.below(100) < percent;
        let (is_unlucky, is_private, restarts) = (happens(unlucky), happens(private), happens(restarting));
        if rank == reference {
            return context;
        }
        if is_unlucky {
            misfortune(&mut context, &mut random, ops);
        }
        if is_private {
            context.private_per_million = [20_000, 200_000, 600_000][random.below(3) as usize];
        }
        if restarts {
            context.restart_at = Some(1 + random.below(12) as u32);
        }
        context
    };
    (0..ranks.get()).map(draw).collect()
}

/// Draws the faults of one rank.
fn misfortune(context: &mut RankContext, random: &mut SplitMix64, ops: u64) {
    // Draws small ordinals as often as large ones, because early and late failures have different effects.
    let mut ordinal = |most: u64| {
        let bits = random.below(u64::from(most.max(2).ilog2()) + 1);
        random.below(1 << (bits + 1))
    };
    let (calls, other_calls, kind) = (ordinal(ops / 8), ordinal(ops), ordinal(8));
    let mut fail = |call, ordinal, fault| context.faults.push(RankFault { call, ordinal, fault });
    match kind % 8 {
        0 => fail(Some(Call::Map), calls, Fault::OutOfMemory),
        1 => fail(Some(Call::Reserve), calls, Fault::OutOfMemory),
        2 => context.memory_bytes = Some((8 + calls * 16) * MIB),
        3 => {
            fail(None, other_calls, Fault::DeviceLost);
            let restarts = other_calls.is_multiple_of(2);
            context.after_loss = if restarts { AfterLoss::Restart } else { AfterLoss::Leave };
        }
        4 => {
            fail(Some(Call::Record), calls, Fault::Refused);
            fail(Some(Call::Wait), other_calls, Fault::Refused);
        }
        5 => {
            fail(Some(Call::Unmap), calls, Fault::Refused);
            fail(Some(Call::Synchronize), other_calls, Fault::Refused);
        }
        6 => {
            fail(Some(Call::Release), calls, Fault::Refused);
            fail(Some(Call::Query), other_calls, Fault::Refused);
        }
        _ => fail(None, other_calls, Fault::Refused),
    }
}

impl fmt::Display for JobPlan {
    /// Writes a readable summary of the plan.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JobPlan { seed, config, granularity_bytes, steps, ranks } = self;
        let threads = steps.iter().map(|step| step.thread + 1).max().unwrap_or(1);
        let pools = steps.iter().filter_map(|step| match &step.op {
            Op::CreatePool { pool, config } => Some((pool, config)),
            _ => None,
        });
        writeln!(f, "seed {seed}: {} ops of {threads} threads on {} ranks", steps.len(), ranks.len())?;
        writeln!(f, "granularity {granularity_bytes}")?;
        writeln!(f, "config {config}")?;
        for (pool, config) in pools {
            writeln!(f, "pool {pool} {config}")?;
        }
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        steps.iter().for_each(|step| *kinds.entry(kind(&step.op)).or_default() += 1);
        for (kind, count) in kinds {
            writeln!(f, "op {kind} {count}")?;
        }
        for rank in ranks.iter().filter(|rank| is_notable(rank)) {
            writeln!(f, "{rank}")?;
        }
        Ok(())
    }
}

/// Returns `true` if a rank has faults, private work or a restart.
fn is_notable(rank: &RankContext) -> bool {
    rank.is_faulty() || rank.private_per_million > 0 || rank.restart_at.is_some()
}

/// Returns the kind of an op, in the terms of the trace format.
fn kind(op: &Op) -> &'static str {
    match op {
        Op::RegisterStream { .. } => "stream",
        Op::CreatePool { .. } => "pool",
        Op::DestroyPool { .. } => "destroy",
        Op::ResetPool { .. } => "reset",
        Op::Allocate { .. } => "allocate",
        Op::Free { .. } => "free",
        Op::RecordUse { .. } => "use",
        Op::Wait { .. } => "wait",
        Op::Synchronize { .. } => "synchronize",
        Op::Reserve { .. } => "reserve",
        Op::Trim { .. } => "trim",
        Op::BeginStep { .. } => "begin_step",
        Op::EndStep { .. } => "end_step",
        Op::Sleep { .. } => "sleep",
        Op::Wake { .. } => "wake",
        _ => "sync",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::simulate;
    use std::num::NonZeroUsize;
    use symmalloc_core::{AllocationId, StreamId};

    fn runs(config: &str, ops: impl IntoIterator<Item = Op>) {
        let ranks = NonZeroU32::new(3).expect("the number should not be zero");
        let config = config.parse().expect("a configuration");
        let plan = JobPlan::of_records(config, ops.into_iter().map(Record::from), 0, ranks);
        simulate(&plan, NonZeroUsize::MIN, &mut |_| ()).expect("the ranks should agree");
    }

    fn allocate(id: u64, pool: u32, stream: u16) -> Op {
        Op::Allocate { id: AllocationId(id), pool: PoolId(pool), stream: StreamId(stream), size_bytes: 3 * MIB }
    }

    #[test]
    fn pools_may_have_keys() {
        let create = |pool| Op::CreatePool { pool: PoolId(pool), config: Box::default() };
        let stream = Op::register(StreamId(0));
        let uses = [allocate(0, 7, 0), allocate(1, 3, 0), Op::Free { id: AllocationId(0) }];
        runs("", [stream, create(7), create(3)].into_iter().chain(uses).chain([Op::DestroyPool { pool: PoolId(7) }]));
    }

    /// Regression test: other streams did not wait for the work of a stream whose users are not tracked.
    #[test]
    fn allocations_of_any_stream_may_be_used_by_others() {
        let streams = (0..70).map(|stream| Op::register(StreamId(stream)));
        let shared = [(0, 69, 0), (1, 0, 69), (2, 68, 69)].map(|(id, owner, user)| {
            [allocate(id, 0, owner), Op::RecordUse { id: AllocationId(id), stream: StreamId(user) }]
        });
        runs("segments:fixed", streams.chain(shared.into_iter().flatten()));
    }
}
