//! Runs all ranks of a plan, one *stretch* (the steps between two syncs) at a time, and compares the ranks at every
//! sync.
//!
//! ```text
//!           ┌─ reference ──► journal ─┐
//!  stretch ─┤                         ├─ compared step by step ─► sync: digests, agreement, check()
//!           └─ the other ranks ◄──────┘                            │
//!                                                                  ├─ departed ranks restart
//!                                                                  └─ lost ranks restart or leave
//!  ... and after the last stretch of the safety phase: heal, free everything, release everything
//! ```

use crate::job::agreement::{Seated, agree, compare};
use crate::job::context::{AfterLoss, Purpose, RankContext, sequence};
use crate::job::crew::{Alone, Crew, Workers};
use crate::job::failure::{Failure, FailureCause};
use crate::job::journal::{DecisionJournal, first_difference};
use crate::job::outcome::JobOutcome;
use crate::job::plan::JobPlan;
use crate::job::rank::{Rank, RankJob, Stop};
use crate::job::rejoin::Checkpoint;
use crate::job::schedule::Scheduler;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symmalloc_core::lock::{Exclusive, Lock, Shared};
use symmalloc_trace::RecordLine;

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobProgress {
    /// Number of program steps that every rank has completed.
    pub steps: usize,
    /// Number of program steps, including those of the liveness phase.
    pub steps_total: usize,
}

/// Simulates a job on `workers` host threads. Calls `progress` at every sync.
///
/// # Errors
/// Returns the first failure: the failures before the same sync are ordered by step, then by rank.
///
/// # Determinism
/// The outcome or failure is determined by the plan. The number of threads does not affect it.
pub fn simulate(
    plan: &JobPlan,
    workers: NonZeroUsize,
    progress: &mut dyn FnMut(JobProgress),
) -> Result<JobOutcome, Failure> {
    let failure = match run(plan, workers, None, progress) {
        Ok(outcome) => return Ok(outcome),
        Err(failure) => failure,
    };
    let (FailureCause::DifferentDecision { .. } | FailureCause::DifferentDigest { .. }, Some(rank)) =
        (&failure.cause, failure.rank)
    else {
        return Err(failure);
    };
    // A rank may have diverged long before a decision shows it. To find the step, runs the plan again and compares this
    // rank's digests after each step.
    match run(plan, workers, Some(rank), &mut |_| ()) {
        Err(earlier) if earlier.rank == failure.rank && earlier.step != failure.step => Err(earlier),
        _ => Err(failure),
    }
}

fn run(
    plan: &JobPlan,
    workers: NonZeroUsize,
    watched: Option<u32>,
    progress: &mut dyn FnMut(JobProgress),
) -> Result<JobOutcome, Failure> {
    let Some(reference) = plan.reference() else {
        return Err(Failure {
            seed: plan.seed,
            rank: None,
            step: None,
            op: None,
            cause: FailureCause::NoReference,
            report: None,
        });
    };
    let has_private = plan.ranks.iter().any(|rank| rank.private_per_million > 0);
    let job = RankJob {
        seed: plan.seed,
        config: plan.config.clone(),
        granularity_bytes: plan.granularity_bytes,
        program: plan.program(),
        may_starve: has_private && plan.config.total_limit_bytes().is_some(),
        watched,
    };
    let run = AssertUnwindSafe(|| match workers.get() {
        1 => Run::<Exclusive, _>::new(&job, plan, reference, Alone).run(progress),
        _ => Run::<Shared, _>::new(&job, plan, reference, Workers(workers)).run(progress),
    });
    let failed = |rank, step: Option<usize>, cause| {
        let line = |step: usize| RecordLine(&job.program.steps[step].op.clone().into()).to_string().into();
        Failure { seed: plan.seed, rank, step, op: step.map(line), cause, report: None }
    };
    match catch_unwind(run) {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(Failed { rank, step, cause, report })) => Err(Failure { report, ..failed(rank, step, cause) }),
        Err(panic) => Err(failed(None, None, FailureCause::Panic(message(panic.as_ref())))),
    }
}

/// Returns the message of a panic.
fn message(panic: &(dyn std::any::Any + Send)) -> Box<str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").into()
}

/// A failure without the fields that all failures of the run share.
#[derive(Debug)]
struct Failed {
    rank: Option<u32>,
    step: Option<usize>,
    cause: FailureCause,
    report: Option<Box<str>>,
}

impl Failed {
    fn new(rank: u32, step: Option<usize>, cause: FailureCause) -> Self {
        Failed { rank: Some(rank), step, cause, report: None }
    }
}

/// A position in the job that holds a rank, or is vacant.
#[derive(Debug)]
pub(crate) struct Seat<L: Lock>(Option<Box<Rank<L>>>);

/// The result of a stretch for one seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    AtSync,
    /// The rank's device is lost.
    Lost,
    /// No rank holds the seat, so nothing ran.
    Vacant,
}

impl<L: Lock> Seat<L> {
    /// Runs a stretch of the rank, if there is one.
    fn follow(
        &mut self,
        job: &RankJob,
        stretch: usize,
        scheduler: &mut Scheduler,
        journal: &DecisionJournal,
    ) -> Result<Arrival, Failed> {
        let Some(rank) = &mut self.0 else { return Ok(Arrival::Vacant) };
        let number = rank.context.rank;
        match catch_unwind(AssertUnwindSafe(|| rank.follow(job, stretch, scheduler, journal))) {
            Ok(Ok(())) => Ok(Arrival::AtSync),
            Ok(Err(Stop::Lost)) => Ok(Arrival::Lost),
            Ok(Err(Stop::Failed { step, cause })) => Err(Failed::new(number, step, cause)),
            Err(panic) => Err(Failed::new(number, rank.begun, FailureCause::Panic(message(panic.as_ref())))),
        }
    }
}

/// The owner of the layouts that a rank restarts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayoutSource {
    Own,
    Reference,
}

struct Run<'a, L: Lock, C> {
    job: &'a RankJob,
    seats: Vec<Seat<L>>,
    /// The seat of the reference.
    reference: usize,
    crew: C,
    outcome: JobOutcome,
}

/// The invariants of one rank in this many, and of the reference, are scanned at a sync.
const CHECKED_ONE_IN: u64 = 16;

impl<'a, L: Lock, C: Crew<Seat<L>>> Run<'a, L, C> {
    fn new(job: &'a RankJob, plan: &JobPlan, reference: usize, crew: C) -> Self {
        let seat = |context: &RankContext| Seat(Some(Box::new(Rank::new(job, context.clone(), 0))));
        let outcome = JobOutcome { ranks: plan.ranks.len() as u64, ..JobOutcome::default() };
        Run { job, seats: plan.ranks.iter().map(seat).collect(), reference, crew, outcome }
    }

    fn run(mut self, progress: &mut dyn FnMut(JobProgress)) -> Result<JobOutcome, Failed> {
        let program = &self.job.program;
        for stretch in 0..program.stretches.len() {
            if stretch == program.liveness {
                self.outcome.digest = self.digest();
                self.ranks_mut().for_each(Rank::heal);
            }
            let arrivals = self.stretch(stretch)?;
            self.sync(stretch, &arrivals)?;
            progress(JobProgress { steps: program.stretches[stretch].steps.end, steps_total: program.steps.len() });
        }
        for seat in 0..self.seats.len() {
            if let Some(rank) = self.seats[seat].0.take() {
                let failed = |cause| Failed::new(rank.context.rank, None, cause);
                rank.check_ended(self.job).map_err(failed)?;
                self.count(&rank);
            }
        }
        Ok(self.outcome)
    }

    fn ranks_mut(&mut self) -> impl Iterator<Item = &mut Rank<L>> {
        self.seats.iter_mut().filter_map(|seat| seat.0.as_deref_mut())
    }

    fn reference(&mut self) -> &mut Rank<L> {
        self.seats[self.reference].0.as_deref_mut().expect("the reference has no faults")
    }

    /// Returns a digest over all heaps of the reference.
    fn digest(&mut self) -> u64 {
        let job = self.job;
        let digests = self.reference().digests(job).into_iter().map(|(_, digest)| digest.value);
        digests.fold(0, |all, one| all.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ one)
    }

    /// Runs a stretch on every rank, the reference first.
    fn stretch(&mut self, stretch: usize) -> Result<Vec<Arrival>, Failed> {
        let job = self.job;
        let reference = self.reference();
        let number = reference.context.rank;
        let led = catch_unwind(AssertUnwindSafe(|| reference.lead(job, stretch, &mut Scheduler::default())));
        let journal = match led {
            Ok(Ok(journal)) => journal,
            Ok(Err(Stop::Failed { step, cause })) => return Err(Failed::new(number, step, cause)),
            Ok(Err(Stop::Lost)) => unreachable!("the reference has no faults"),
            Err(panic) => {
                return Err(Failed::new(number, reference.begun, FailureCause::Panic(message(panic.as_ref()))));
            }
        };
        let leader = self.seats[self.reference].0.take();
        let answers = self.crew.each(&mut self.seats, |seat, scheduler| seat.follow(job, stretch, scheduler, &journal));
        self.seats[self.reference].0 = leader;
        self.first_failure(answers)
    }

    /// Returns the failure with the earliest step; among equal steps, the one of the first seat. The result does not
    /// depend on the timing of host threads.
    fn first_failure(&self, answers: Vec<Result<Arrival, Failed>>) -> Result<Vec<Arrival>, Failed> {
        let failed_at = |seat: usize| answers[seat].as_ref().err().map(|failed| failed.step.unwrap_or(usize::MAX));
        let first = (0..answers.len()).filter_map(|seat| Some((failed_at(seat)?, seat))).min();
        let Some((_, first)) = first else { return answers.into_iter().collect() };
        let is_at_sync = |seat: usize| !matches!(answers[seat], Ok(Arrival::Lost));
        let live: Vec<_> = self.live().into_iter().filter(|(seat, _)| is_at_sync(*seat)).collect();
        let mut failed = answers.into_iter().nth(first).and_then(Result::err).expect("the rank should have failed");
        // Adds the agreement's report of the ranks at the sync.
        if failed.cause.is_difference() {
            failed.report = Some(match compare(&live) {
                Ok(()) => "the ranks agree: their symmetric pools have equal histories".into(),
                Err(disagreement) => disagreement.to_string().into(),
            });
        }
        Err(failed)
    }

    /// Returns the remaining ranks by seat.
    fn live(&self) -> Vec<Seated<'_, L>> {
        self.seats.iter().enumerate().filter_map(|(seat, rank)| Some((seat, rank.0.as_deref()?))).collect()
    }

    /// Compares all ranks at a sync. Ranks that are lost or differ restart or leave the job.
    fn sync(&mut self, stretch: usize, arrivals: &[Arrival]) -> Result<(), Failed> {
        self.outcome.syncs += 1;
        let mut restarting = BTreeMap::new();
        for (seat, arrival) in arrivals.iter().enumerate() {
            if *arrival == Arrival::Lost {
                let after_loss = self.seats[seat].0.as_ref().map(|rank| rank.context.after_loss);
                if after_loss == Some(AfterLoss::Restart) {
                    restarting.insert(seat, LayoutSource::Reference);
                } else if let Some(rank) = self.seats[seat].0.take() {
                    self.outcome.left += 1;
                    self.count(&rank);
                }
            }
        }
        self.check(stretch)?;
        // Lost ranks do not take part in the agreement.
        let live: Vec<_> = self.live().into_iter().filter(|(seat, _)| !restarting.contains_key(seat)).collect();
        let reported = agree(self.job, &live, self.reference).map_err(|disputed| {
            let rank = self.seats[disputed.seat].0.as_ref().map(|rank| rank.context.rank);
            Failed { rank, step: disputed.step, cause: disputed.cause, report: Some(disputed.report) }
        })?;
        let syncs = stretch as u32 + 1;
        for (seat, rank) in live {
            // The agreement compares only symmetric pools. The simulator compares all pools, and also restarts ranks
            // that differ in a nonsymmetric one.
            if reported.contains(&seat) || rank.standing.first_departed().is_some() {
                restarting.insert(seat, LayoutSource::Reference);
            } else if rank.context.restart_at == Some(syncs) {
                restarting.insert(seat, LayoutSource::Own);
            }
        }
        self.outcome.caught += reported.len() as u64;
        if restarting.is_empty() { Ok(()) } else { self.restart(&restarting, stretch + 1) }
    }

    /// Checks the invariants of the reference and of some other ranks.
    fn check(&mut self, stretch: usize) -> Result<(), Failed> {
        let mut random = sequence(self.job.seed, Purpose::Checks, stretch as u64);
        for (seat, rank) in self.seats.iter().enumerate().filter_map(|(seat, rank)| Some((seat, rank.0.as_ref()?))) {
            if random.below(CHECKED_ONE_IN) == 0 || seat == self.reference {
                self.outcome.checks += 1;
                let failed = |cause| Failed::new(rank.context.rank, None, cause);
                rank.allocator.check().map_err(|error| failed(FailureCause::Violation(error.to_string().into())))?;
            }
        }
        Ok(())
    }

    /// Restarts ranks, which must then behave like the other ranks.
    fn restart(&mut self, seats: &BTreeMap<usize, LayoutSource>, stretches: usize) -> Result<(), Failed> {
        let job = self.job;
        let reference = self.seats[self.reference].0.as_deref().expect("the reference has no faults");
        let Some(checkpoint) = Checkpoint::take(job, reference, stretches) else {
            // A pool with stitched ranges or plans has no layout, so ranks that need the reference's layouts leave.
            for (seat, _) in seats.iter().filter(|(_, source)| **source == LayoutSource::Reference) {
                let Some(rank) = self.seats[*seat].0.take() else { continue };
                self.outcome.left += 1;
                self.count(&rank);
            }
            return Ok(());
        };
        let expected = reference.digests(job);
        for (seat, source) in seats {
            let Some(rank) = self.seats[*seat].0.take() else { continue };
            self.count(&rank);
            self.outcome.restarts += 1;
            let own = match source {
                LayoutSource::Own => Checkpoint::take(job, &rank, stretches),
                LayoutSource::Reference => None,
            };
            let (context, incarnation) = (rank.context.clone(), rank.incarnation + 1);
            // The old process ends before the new one starts.
            drop(rank);
            let failed = |cause| Failed::new(context.rank, None, cause);
            let mut rank = own.as_ref().unwrap_or(&checkpoint).resume(job, &context, incarnation).map_err(failed)?;
            if let Some(heap) = first_difference(&rank.digests(job), &expected) {
                return Err(failed(FailureCause::Rejoined { heap }));
            }
            if stretches > job.program.liveness {
                rank.heal();
            }
            self.seats[*seat].0 = Some(Box::new(rank));
        }
        compare(&self.live()).map_err(|disagreement| Failed {
            rank: None,
            step: None,
            cause: FailureCause::FalseAlarm,
            report: Some(disagreement.to_string().into()),
        })
    }

    /// Adds the ops and faults of a rank to the outcome.
    fn count(&mut self, rank: &Rank<L>) {
        let outcome = &mut self.outcome;
        outcome.ops += rank.ops;
        outcome.private_ops += rank.private_ops();
        outcome.planned += rank.planned;
        outcome.differing += rank.differing;
        outcome.faults += rank.faults();
        outcome.device_bytes_peak = outcome.device_bytes_peak.max(rank.allocator.backend().mapped_bytes_peak());
    }
}
