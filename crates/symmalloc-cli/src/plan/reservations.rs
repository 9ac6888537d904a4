//! Computation of reservations with which a running job obtains no further memory and registers no further windows.
//!
//! ```text
//! ranks' recordings ──► sizes   bytes per heap, the maximum over all ranks
//!                         └───► plan: settings of each pool, and a `reserve` per heap
//!                                 └───► proof: each rank runs twice with it on a simulated device
//! ```
//!
//! Expandable and fixed pools become expandable pools with reservations. A symmetric or reserved pool becomes a reserved pool, in which
//! each heap is one segment, and therefore one permanent window.

use super::heap::Heaps;
use super::program::{self, Pools};
use super::proof::{self, Proof};
use super::sizes;
use crate::args::PlanArgs;
use crate::config_text;
use crate::destination::Destination;
use crate::error::CliError;
use crate::job::JobError;
use crate::recorded::Recorded;
use std::collections::BTreeSet;
use symmalloc_core::config::{Config, ConfigError, PoolConfig, SegmentPolicy};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::op::Op;
use symmalloc_trace::RecordLine;
use symmalloc_trace::replay::Program;

/// Reservations of a job, and their proof.
pub(super) struct ReservationPlan {
    /// The configuration, including that of the default pool.
    pub(super) config: Config,
    pub(super) pools: Pools,
    pub(super) heaps: Heaps,
    /// Proof of the job as recorded. With several ranks, each value is the maximum over the ranks.
    pub(super) without: Proof,
    /// Proof of the job with its reservations.
    pub(super) with: Proof,
}

impl ReservationPlan {
    pub(super) fn new(jobs: &[Recorded], args: &PlanArgs) -> Result<Self, CliError> {
        let own = pools_of(jobs)?;
        let invalid = |error: ConfigError| jobs[0].invalid(error);
        let is_reserved = |config: &PoolConfig| {
            args.reserved || config.symmetric() || matches!(config.segments(), SegmentPolicy::Reserved { .. })
        };
        let reserved: BTreeSet<PoolId> =
            own.iter().filter(|(_, config)| is_reserved(config)).map(|(pool, _)| *pool).collect();
        let growing = own.iter().map(|(pool, config)| Ok((*pool, sizes::growing(config)?)));
        let growing: Pools = growing.collect::<Result<_, _>>().map_err(invalid)?;
        let unlimited = jobs[0].config.to_builder().total_limit_bytes(None);
        let search = sizes::Search {
            jobs,
            pools: &growing,
            config: &unlimited.default_pool(growing[&PoolId::DEFAULT].clone()).build().map_err(invalid)?,
            equal: &reserved,
            margin_percent: args.margin.into(),
        };
        let mut heaps = search.run()?;
        heaps.retain(|_, heap| heap.reserve_bytes > 0);

        let mut pools = Pools::new();
        for (pool, config) in &growing {
            let of_pool = heaps.iter().filter(|(owner, _)| owner.pool == *pool).map(|(_, heap)| heap.reserve_bytes);
            let (needed_bytes, largest_bytes) = (of_pool.clone().sum(), of_pool.max());
            let mut builder = config.to_builder().limit_bytes(own[pool].limit_bytes());
            if let (true, Some(segment_bytes)) = (reserved.contains(pool), largest_bytes) {
                builder = builder.reserved(segment_bytes);
            }
            within(own[pool].limit_bytes(), needed_bytes, Some(*pool))?;
            pools.insert(*pool, builder.build().map_err(invalid)?);
        }
        let config = jobs[0].config.to_builder().default_pool(pools[&PoolId::DEFAULT].clone());
        let config = config.build().map_err(invalid)?;
        let (without, with) = (Proof::default(), Proof::default());
        let mut plan = ReservationPlan { config, pools, heaps, without, with };
        plan.prove(jobs)?;
        Ok(plan)
    }

    /// Runs every rank, as recorded and with the reservations.
    fn prove(&mut self, jobs: &[Recorded]) -> Result<(), CliError> {
        let unlimited =
            self.config.to_builder().total_limit_bytes(None).build().map_err(|error| jobs[0].invalid(error))?;
        for (rank, job) in (0..).zip(jobs) {
            let failed = |source| CliError::Job { path: job.path.clone(), source };
            let without = proof::prove(job.program(), &job.config, rank).map_err(failed)?;
            self.without = self.without.max(without);
            let planned = self.program(jobs, job);
            let program = Program::new(&planned.records);
            let program = program.map_err(|source| CliError::Program { path: job.path.clone(), source })?;
            // The total limit is checked afterward against the peak, because not all pools exist at the same time.
            let with = proof::prove(&program, &unlimited, rank).map_err(|error| match error {
                JobError::Step { rank, op, error } => JobError::Step { rank, op: planned.origins[op], error },
                other => other,
            });
            self.with = self.with.max(with.map_err(failed)?);
        }
        within(self.config.total_limit_bytes(), self.with.peak_reserved_bytes, None)
    }

    fn program(&self, jobs: &[Recorded], job: &Recorded) -> program::PlannedProgram {
        program::planned(&job.recording.records, &program::groups_of(jobs), &self.pools, &self.heaps)
    }

    /// Writes the job with its reservations as a trace.
    pub(super) fn write(&self, job: &Recorded, out: &Destination) -> Result<(), CliError> {
        let records = self.program(std::slice::from_ref(job), job).records.into_iter().map(|mut record| {
            // The recorded placements do not apply, because the reservations change the layout.
            (record.placement, record.pending) = (None, None);
            record
        });
        out.write_trace(Some(&self.config), records)
    }

    pub(super) fn reserve_bytes(&self) -> u64 {
        self.heaps.values().map(|heap| heap.reserve_bytes).sum()
    }

    /// Returns the lines that the plan adds to a trace: settings, followed by reservations.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = vec![format!("config {}", self.settings())];
        let others = self.pools.iter().filter(|(pool, _)| **pool != PoolId::DEFAULT);
        lines.extend(others.map(|(pool, config)| format!("pool {pool} {config}")));
        let reserved = self.heaps.iter().map(|(owner, heap)| heap.reserve(owner.pool));
        lines.extend(reserved.map(|op| RecordLine(&op.into()).to_string()));
        lines
    }

    /// Returns the configuration in its shortest form.
    pub(super) fn settings(&self) -> String {
        config_text::shortest(&self.config)
    }

    pub(super) fn is_reserved(&self, pool: PoolId) -> bool {
        matches!(self.pools[&pool].segments(), SegmentPolicy::Reserved { .. })
    }
}

/// Returns the recorded configuration of each pool. The recordings must not contradict each other.
fn pools_of(jobs: &[Recorded]) -> Result<Pools, CliError> {
    let mut pools = Pools::from([(PoolId::DEFAULT, jobs[0].config.default_pool().clone())]);
    for job in jobs {
        let differ = |pool| CliError::PlanOfOtherSettings { path: jobs[0].path.clone(), other: job.path.clone(), pool };
        if job.config != jobs[0].config {
            return Err(differ(PoolId::DEFAULT));
        }
        let (groups, others) = (jobs[0].program().groups(), job.program().groups());
        let mut streams = (0..groups.stream_count().min(others.stream_count())).map(|stream| StreamId(stream as u16));
        if let Some(stream) = streams.find(|stream| groups.first_of(*stream) != others.first_of(*stream)) {
            return Err(CliError::PlanOfOtherGroups { path: jobs[0].path.clone(), other: job.path.clone(), stream });
        }
        for record in &job.recording.records {
            if let Op::CreatePool { pool, config } = &record.op
                && *pool != PoolId::DEFAULT
                && pools.entry(*pool).or_insert_with(|| (**config).clone()) != &**config
            {
                return Err(differ(*pool));
            }
        }
    }
    Ok(pools)
}

/// Checks that a limit leaves room for the reservations of one pool, or of all pools.
fn within(limit_bytes: Option<u64>, needed_bytes: u64, pool: Option<PoolId>) -> Result<(), CliError> {
    match limit_bytes {
        Some(limit_bytes) if limit_bytes < needed_bytes => {
            Err(CliError::PlanBeyondLimit { pool, needed_bytes, limit_bytes })
        }
        _ => Ok(()),
    }
}
