//! One rank: its allocator, its device and its context.
//!
//! Between two syncs (a *stretch*), a rank runs the steps in the order of its schedule. Its decisions are compared,
//! step by step, with those of the reference rank. Only the reference writes a [`DecisionJournal`].
//!
//! [`crate::job::standing`] tracks how the rank differs from the reference, and `step.rs` runs single steps.

use crate::device::{Fault, FaultRule, SimBackend, SplitMix64};
use crate::job::context::{Purpose, RankContext, RankFault, sequence};
use crate::job::decision::{DecidedRefusal, Decision};
use crate::job::device_work::LiveBlock;
use crate::job::failure::FailureCause;
use crate::job::journal::{DecisionJournal, HeapDigest, first_difference};
use crate::job::outcome::JobFaults;
use crate::job::private_work::PrivateWork;
use crate::job::program::{JobProgram, Stretch};
use crate::job::schedule::Scheduler;
use crate::job::standing::RankStanding;
use symmalloc_core::backend::Backend;
use symmalloc_core::config::{Config, PointerLookup, SegmentPolicy};
use symmalloc_core::ids::{HeapId, StreamGroup};
use symmalloc_core::lock::Lock;
use symmalloc_core::{Op, PoolId, StreamId, generic};

/// The properties that all ranks of a job have in common.
#[derive(Clone, Debug)]
pub(crate) struct RankJob {
    pub(crate) seed: u64,
    pub(crate) config: Config,
    pub(crate) granularity_bytes: u64,
    pub(crate) program: JobProgram,
    /// `true` if ranks may use up the limit over all pools with private work, so that nonsymmetric pools may differ.
    pub(crate) may_starve: bool,
    /// A rank whose digests are compared after each step as long as it has no fault, to find the step at which it
    /// diverges.
    pub(crate) watched: Option<u32>,
}

impl RankJob {
    /// Returns `true` if ranks are compared in this pool.
    pub(crate) fn compares(&self, pool: PoolId) -> bool {
        !self.may_starve || self.program.policies.of(pool).symmetric()
    }

    /// Returns the pool that an op acts on, if it acts on a single pool.
    fn pool_of(&self, op: &Op) -> Option<PoolId> {
        match op {
            Op::Allocate { pool, .. } | Op::Reserve { pool, .. } | Op::DestroyPool { pool } => Some(*pool),
            Op::ResetPool { pool } => Some(*pool),
            Op::BeginStep { pool, .. } | Op::EndStep { pool } => Some(*pool),
            Op::Sleep { pool, .. } | Op::Wake { pool } => Some(*pool),
            Op::Trim { pool } => *pool,
            Op::Free { id } | Op::RecordUse { id, .. } => self.program.homes.get(id).map(|(pool, _)| *pool),
            _ => None,
        }
    }
}

/// The reason why a rank did not reach a sync.
#[derive(Clone, Debug)]
pub(crate) enum Stop {
    /// Its device is lost.
    Lost,
    /// The run failed.
    Failed { step: Option<usize>, cause: FailureCause },
}

/// One rank. See the [module documentation](self).
#[derive(Debug)]
pub(crate) struct Rank<L: Lock> {
    pub(crate) context: RankContext,
    /// Number of restarts so far.
    pub(crate) incarnation: u32,
    pub(crate) allocator: generic::Allocator<SimBackend, L>,
    /// Live allocations, by slot.
    pub(crate) live: Vec<Option<LiveBlock>>,
    /// The allocator's pools, by the program's pool ids.
    pub(crate) pools: Vec<PoolId>,
    /// Number of streams that the program has registered.
    pub(crate) streams: usize,
    private: Option<PrivateWork>,
    moments: SplitMix64,
    failed_calls: u64,
    pub(crate) standing: RankStanding,
    pub(crate) ops: u64,
    /// The step that the rank began last. It locates a panic.
    pub(crate) begun: Option<usize>,
    /// Allocations that were placed where a plan put them.
    pub(crate) planned: u64,
    /// Steps that deviated from their plan.
    pub(crate) differing: u64,
    /// Private ops of private work that has ended.
    private_ops: u64,
    /// Faults that occurred until they were removed; `None` before that.
    healed_of: Option<JobFaults>,
}

impl<L: Lock> Rank<L> {
    /// Creates a rank that has not run any step yet.
    pub(crate) fn new(job: &RankJob, context: RankContext, incarnation: u32) -> Self {
        let mut device = SimBackend::builder()
            .seed(job.seed.wrapping_add(u64::from(incarnation) << 32))
            .rank(context.rank)
            .granularity_bytes(job.granularity_bytes)
            .delays(context.delays)
            .memory_bytes(context.memory_bytes.unwrap_or(1 << 50));
        // The loss of the device comes first in the list, because the first matching rule applies.
        let mut faults = context.faults.clone();
        faults.sort_by_key(|fault| fault.fault != Fault::DeviceLost);
        for fault in faults {
            device = device.fail(fault.call, FaultRule::At { ordinal: fault.ordinal }, fault.fault);
        }
        let config = job
            .config
            .to_builder()
            .pointer_lookup(PointerLookup::Exact)
            .build()
            .expect("the configuration should stay valid");
        let sequence_of = |purpose| sequence(job.seed, purpose, u64::from(context.rank)).split(incarnation.into());
        Rank {
            incarnation,
            allocator: generic::Allocator::with_lock(device.build(), config).expect("the granularity should be valid"),
            live: vec![None; job.program.slot_count],
            pools: vec![PoolId::DEFAULT],
            streams: 0,
            private: (context.private_per_million > 0)
                .then(|| PrivateWork::new(sequence_of(Purpose::Private), job.program.streams.max(1))),
            moments: sequence_of(Purpose::Moments),
            failed_calls: 0,
            standing: RankStanding::Alike,
            ops: 0,
            begun: None,
            planned: 0,
            differing: 0,
            private_ops: 0,
            healed_of: None,
            context,
        }
    }

    /// Runs a stretch and records its decisions in a journal.
    pub(crate) fn lead(
        &mut self,
        job: &RankJob,
        stretch: usize,
        scheduler: &mut Scheduler,
    ) -> Result<DecisionJournal, Stop> {
        let steps = job.program.stretches[stretch].steps.clone();
        let mut journal = DecisionJournal::new(steps.len(), self.digests(job));
        self.carry_out(job, stretch, scheduler, |rank, index, decision| {
            let digests = rank.touched_digests(job, &job.program.steps[steps.start + index].op);
            journal.enter(index, decision, digests);
            Ok(())
        })?;
        journal.last = self.digests(job);
        Ok(journal)
    }

    /// Runs a stretch and compares its decisions with the journal. If a rank without faults differs, it still runs to
    /// the sync, so that the failure can include the agreement's report.
    pub(crate) fn follow(
        &mut self,
        job: &RankJob,
        stretch: usize,
        scheduler: &mut Scheduler,
        journal: &DecisionJournal,
    ) -> Result<(), Stop> {
        let mut compared = Ok(());
        self.carry_out(job, stretch, scheduler, |rank, index, decision| {
            if compared.is_ok() {
                compared = rank.compare(job, stretch, index, decision, journal);
            }
            Ok(())
        })?;
        compared?;
        let digests = self.digests(job);
        match &mut self.standing {
            RankStanding::Alike => first_difference(&digests, &journal.last)
                .map_or(Ok(()), |heap| Err(Stop::Failed { step: None, cause: FailureCause::DifferentDigest { heap } })),
            RankStanding::Followed { .. } => Ok(()),
        }
    }

    fn carry_out(
        &mut self,
        job: &RankJob,
        stretch: usize,
        scheduler: &mut Scheduler,
        mut decided: impl FnMut(&mut Self, usize, Decision) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let Stretch { steps, order } = &job.program.stretches[stretch];
        let random = sequence(job.seed, Purpose::Schedule, self.context.rank.into());
        let random = random.split(self.incarnation.into()).split(stretch as u64);
        for &index in scheduler.schedule(order, self.context.schedule, random) {
            let index = index as usize;
            let number = steps.start + index;
            let failed = |race| Stop::Failed { step: Some(number), cause: FailureCause::Race(race) };
            self.begun = Some(number);
            self.between_steps(job).map_err(failed)?;
            let decision = self.step(job, number).map_err(failed)?;
            self.ops += 1;
            if self.is_lost() {
                return Err(Stop::Lost);
            }
            self.notice_refusals();
            decided(self, index, decision)?;
        }
        Ok(())
    }

    /// Performs the random events of this rank between two steps.
    fn between_steps(&mut self, job: &RankJob) -> Result<(), crate::device::Race> {
        let RankContext { pace_ticks, asks_per_million, private_per_million, .. } = self.context;
        if pace_ticks > 0 {
            self.allocator.backend().tick(self.moments.below(u64::from(pace_ticks) + 1));
        }
        if asks_per_million > 0 && self.moments.chance(asks_per_million) {
            // The driver's answer must not affect any decision.
            let _answer = self.allocator.drop_completed_fences();
        }
        let has_all =
            self.pools.len() == job.program.pools() && self.streams == job.program.streams && self.streams > 0;
        if let Some(private) = self.private.as_mut().filter(|_| has_all)
            && self.moments.chance(private_per_million)
        {
            private.work(&self.allocator)?;
        }
        Ok(())
    }

    /// Returns `true` if the device is lost.
    fn is_lost(&self) -> bool {
        let is_end = |fault: &RankFault| fault.fault == Fault::DeviceLost && self.has_happened(fault);
        self.healed_of.is_none() && self.context.faults.iter().any(is_end)
    }

    /// Returns `true` if the call that should fail with this fault has been made.
    fn has_happened(&self, fault: &RankFault) -> bool {
        let calls = self.allocator.backend().calls();
        fault.call.map_or(calls.fallible(), |call| calls.of(call)) > fault.ordinal
    }

    /// Returns the faults that occurred on this rank.
    pub(crate) fn faults(&self) -> JobFaults {
        if let Some(faults) = self.healed_of {
            return faults;
        }
        let happened = |fault| {
            let faults = self.context.faults.iter().filter(|entry| entry.fault == fault);
            faults.filter(|fault| self.has_happened(fault)).count() as u64
        };
        let failed_calls = self.allocator.backend().calls().failed();
        let is_small = self.context.memory_bytes.is_some() && failed_calls > 0;
        JobFaults {
            failed_calls,
            ranks: u64::from(failed_calls > 0),
            out_of_memory: happened(Fault::OutOfMemory),
            refused: happened(Fault::Refused),
            losses: happened(Fault::DeviceLost),
            small_devices: u64::from(is_small),
        }
    }

    /// Starts to follow the rank's digests once one of its driver calls has failed.
    fn notice_refusals(&mut self) {
        if !self.context.is_faulty() {
            return;
        }
        let failed_calls = self.allocator.backend().calls().failed();
        if failed_calls > self.failed_calls {
            self.failed_calls = failed_calls;
            self.standing.begin_to_follow();
        }
    }

    /// Compares the rank's decision about the step at `index` of a stretch with the reference's.
    fn compare(
        &mut self,
        job: &RankJob,
        stretch: usize,
        index: usize,
        decision: Decision,
        journal: &DecisionJournal,
    ) -> Result<(), Stop> {
        let number = job.program.stretches[stretch].steps.start + index;
        let op = &job.program.steps[number].op;
        let expected = journal.decision(index);
        let is_compared = job.pool_of(op).is_none_or(|pool| job.compares(pool));
        if let RankStanding::Alike = self.standing
            && decision != expected
            && is_compared
        {
            let starved = Decision::Refused(DecidedRefusal::LimitOverAll);
            if !(job.may_starve && [decision, expected].contains(&starved)) {
                let cause = FailureCause::DifferentDecision { decision, expected };
                return Err(Stop::Failed { step: Some(number), cause });
            }
            self.standing.begin_to_follow();
        }
        // Private work may leave no memory under the limit for a plan. No decision shows this immediately.
        if job.may_starve && matches!(op, Op::BeginStep { .. }) {
            self.standing.begin_to_follow();
        }
        let is_alike = matches!(self.standing, RankStanding::Alike);
        if is_alike && job.watched != Some(self.context.rank) {
            return Ok(());
        }
        let digests = self.touched_digests(job, op);
        if !is_alike {
            self.standing.follow(&digests, journal, index, number);
            return Ok(());
        }
        first_difference(&digests, journal.digests(index)).map_or(Ok(()), |heap| {
            Err(Stop::Failed { step: Some(number), cause: FailureCause::DifferentDigest { heap } })
        })
    }

    /// Returns the digests of all compared heaps.
    pub(crate) fn digests(&self, job: &RankJob) -> Vec<HeapDigest> {
        let mut digests = Vec::new();
        for pool in (0..self.pools.len() as u32).map(PoolId).filter(|pool| job.compares(*pool)) {
            self.add_digests(pool, |_| true, &mut digests);
        }
        digests
    }

    /// Returns the digests of the compared heaps that an op touched.
    fn touched_digests(&self, job: &RankJob, op: &Op) -> Vec<HeapDigest> {
        let policies = &job.program.policies;
        let mut digests = Vec::new();
        match op {
            Op::Trim { pool: None } => return self.digests(job),
            Op::Trim { pool: Some(pool) }
            | Op::DestroyPool { pool }
            | Op::ResetPool { pool }
            | Op::BeginStep { pool, .. }
            | Op::EndStep { pool }
            | Op::Sleep { pool, .. }
            | Op::Wake { pool }
                if job.compares(*pool) =>
            {
                self.add_digests(*pool, |_| true, &mut digests);
            }
            Op::Allocate { .. } | Op::Reserve { .. } | Op::Free { .. } | Op::RecordUse { .. } => {
                let (pool, stream) = match op {
                    Op::Allocate { pool, stream, .. } | Op::Reserve { pool, stream, .. } => (*pool, *stream),
                    Op::Free { id } | Op::RecordUse { id, .. } => job.program.homes[id],
                    _ => unreachable!("matched above"),
                };
                let is_whole = policies.reclaims_as_a_whole(pool);
                let touched = policies.heap(pool, stream).group;
                if job.compares(pool) {
                    self.add_digests(pool, |heap| is_whole || heap == touched, &mut digests);
                }
            }
            _ => {}
        }
        digests
    }

    fn add_digests(&self, pool: PoolId, wanted: impl Fn(StreamGroup) -> bool, digests: &mut Vec<HeapDigest>) {
        let Some(own) = self.pools.get(pool.index()) else { return };
        let all = self.allocator.heap_digests(*own).unwrap_or_default();
        let wanted = all.into_iter().filter(|(group, _)| wanted(*group));
        let start = digests.len();
        digests.extend(wanted.map(|(group, digest)| (HeapId { pool, group }, digest)));
        digests[start..].sort_unstable_by_key(|(heap, _)| *heap);
    }

    /// Removes all faults and ends private work.
    pub(crate) fn heal(&mut self) {
        self.healed_of = Some(self.faults());
        self.allocator.backend().heal();
        if let Some(mut private) = self.private.take() {
            private.end(&self.allocator);
            self.private_ops += private.ops;
        }
    }

    /// Returns the number of private ops so far.
    pub(crate) fn private_ops(&self) -> u64 {
        self.private_ops + self.private.as_ref().map_or(0, |private| private.ops)
    }

    /// Releases the memory of freed blocks that quarantines hold back.
    fn release_quarantines(&self) {
        let has_quarantine =
            |pool: &&PoolId| self.allocator.pool_config(**pool).is_ok_and(|config| config.debug().quarantine_bytes > 0);
        for pool in self.pools.iter().filter(has_quarantine) {
            let _kept_by_live_allocations = self.allocator.reset_unused_pool(*pool);
            self.allocator.trim_all().expect("the driver should work without injected faults");
        }
    }

    /// Checks, at the end of the liveness phase, that everything was freed and released.
    pub(crate) fn check_ended(&self, job: &RankJob) -> Result<(), FailureCause> {
        // Waits for the last users of the remaining segments, so that their fences can be dropped.
        for stream in (0..self.allocator.stream_count() as u16).map(StreamId) {
            self.allocator.backend().synchronize(stream).expect("the driver should work without injected faults");
            self.allocator.note_synchronized(stream).expect("the stream is registered");
        }
        self.release_quarantines();
        self.allocator.drop_completed_fences().expect("the driver should work without injected faults");
        self.allocator.check().map_err(|violation| FailureCause::Violation(violation.to_string().into()))?;
        let stats = self.allocator.stats();
        let kept = match job.program.policies.of(PoolId::DEFAULT).segments() {
            // A reserved segment is never released, and the default pool is never destroyed.
            SegmentPolicy::Reserved { .. } => {
                self.allocator.pool_stats(PoolId::DEFAULT).map_or(0, |stats| stats.reserved_bytes.current)
            }
            _ => 0,
        };
        // The addresses of a pool with a base stay reserved until its end.
        let has_base = |pool: &&PoolId| self.allocator.pool_config(**pool).is_ok_and(|config| config.base().is_some());
        let bases = self.pools.iter().filter(has_base).count();
        let leaks = self.allocator.backend().leaks();
        let allocations = stats.usage.all.allocations.current;
        let is_clean = allocations == 0
            && stats.reserved_bytes.current == kept
            && stats.retired_bytes == 0
            && leaks.mapped_bytes == kept
            && leaks.events == 0
            && (leaks.ranges <= bases || kept > 0);
        let reserved_bytes = stats.reserved_bytes.current;
        if is_clean { Ok(()) } else { Err(FailureCause::LeftBehind { allocations, reserved_bytes, leaks }) }
    }
}
