//! A run: all ranks of a plan, stretch by stretch, compared at every sync.
//!
//! ```text
//!           ┌─ reference ──► journal ─┐
//!  stretch ─┤                         ├─ compared step by step ─► sync: digests, agreement, check()
//!           └─ the other ranks ◄──────┘                            │
//!                                                                  ├─ departed ranks start again
//!                                                                  └─ lost ranks start again, or leave
//!  ... and after the last stretch of the safety phase: heal, free everything, give everything back
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

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobProgress {
    /// Steps of the program that every rank is through with.
    pub steps: usize,
    /// Steps of the program, those of the liveness phase included.
    pub steps_total: usize,
}

/// Simulates a job on so many threads of this machine. `progress` is called at every sync.
///
/// # Errors
/// When something went wrong that must not: the first thing, in the order of steps between two syncs and then of ranks.
///
/// # Determinism
/// The outcome, and a failure, is a function of the plan. The number of threads decides nothing.
pub fn simulate(
    plan: &JobPlan,
    workers: NonZeroUsize,
    progress: &mut dyn FnMut(JobProgress),
) -> Result<JobOutcome, Failure> {
    let failure = match run(plan, workers, None, progress) {
        Ok(outcome) => return Ok(outcome),
        Err(failure) => failure,
    };
    let (FailureCause::OtherDecision { .. } | FailureCause::OtherDigest { .. }, Some(rank)) =
        (&failure.cause, failure.rank)
    else {
        return Err(failure);
    };
    // Ranks may have parted long before a decision shows it. Once more, with a look at that rank's digests after each step.
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
        may_starve: has_private && plan.config.limit_bytes().is_some(),
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

/// What a panic said.
fn message(panic: &(dyn std::any::Any + Send)) -> Box<str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message").into()
}

/// A failure before it is told to people.
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

/// A place in the job: a rank that works, or nobody any more.
#[derive(Debug)]
pub(crate) struct Seat<L: Lock>(Option<Box<Rank<L>>>);

/// What became of a rank in a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    AtSync,
    /// Its device is lost.
    Lost,
    /// There was none.
    Nobody,
}

impl<L: Lock> Seat<L> {
    /// Lets its rank carry a stretch out, if there is one.
    fn follow(
        &mut self,
        job: &RankJob,
        stretch: usize,
        scheduler: &mut Scheduler,
        journal: &DecisionJournal,
    ) -> Result<Arrival, Failed> {
        let Some(rank) = &mut self.0 else { return Ok(Arrival::Nobody) };
        let number = rank.context.rank;
        match catch_unwind(AssertUnwindSafe(|| rank.follow(job, stretch, scheduler, journal))) {
            Ok(Ok(())) => Ok(Arrival::AtSync),
            Ok(Err(Stop::Lost)) => Ok(Arrival::Lost),
            Ok(Err(Stop::Failed { step, cause })) => Err(Failed::new(number, step, cause)),
            Err(panic) => Err(Failed::new(number, rank.begun, FailureCause::Panic(message(panic.as_ref())))),
        }
    }
}

/// Whose layouts a rank starts again from.
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

/// One rank in so many is scanned at a sync, besides the reference.
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
                rank.ended(self.job).map_err(failed)?;
                self.count(&rank);
            }
        }
        Ok(self.outcome)
    }

    fn ranks_mut(&mut self) -> impl Iterator<Item = &mut Rank<L>> {
        self.seats.iter_mut().filter_map(|seat| seat.0.as_deref_mut())
    }

    fn reference(&mut self) -> &mut Rank<L> {
        self.seats[self.reference].0.as_deref_mut().expect("nothing happens to the reference")
    }

    /// Over all digests of the reference.
    fn digest(&mut self) -> u64 {
        let job = self.job;
        let digests = self.reference().digests(job).into_iter().map(|(_, digest)| digest.value);
        digests.fold(0, |all, one| all.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ one)
    }

    /// Lets every rank carry a stretch out: the reference first.
    fn stretch(&mut self, stretch: usize) -> Result<Vec<Arrival>, Failed> {
        let job = self.job;
        let reference = self.reference();
        let number = reference.context.rank;
        let led = catch_unwind(AssertUnwindSafe(|| reference.lead(job, stretch, &mut Scheduler::default())));
        let journal = match led {
            Ok(Ok(journal)) => journal,
            Ok(Err(Stop::Failed { step, cause })) => return Err(Failed::new(number, step, cause)),
            Ok(Err(Stop::Lost)) => unreachable!("nothing happens to the reference"),
            Err(panic) => {
                return Err(Failed::new(number, reference.begun, FailureCause::Panic(message(panic.as_ref()))));
            }
        };
        let leader = self.seats[self.reference].0.take();
        let answers = self.crew.each(&mut self.seats, |seat, scheduler| seat.follow(job, stretch, scheduler, &journal));
        self.seats[self.reference].0 = leader;
        self.first_failure(answers)
    }

    /// The failure of the earliest step, then of the first seat: whichever thread of this machine was faster.
    fn first_failure(&self, answers: Vec<Result<Arrival, Failed>>) -> Result<Vec<Arrival>, Failed> {
        let failed_at = |seat: usize| answers[seat].as_ref().err().map(|failed| failed.step.unwrap_or(usize::MAX));
        let first = (0..answers.len()).filter_map(|seat| Some((failed_at(seat)?, seat))).min();
        let Some((_, first)) = first else { return answers.into_iter().collect() };
        let is_at_sync = |seat: usize| !matches!(answers[seat], Ok(Arrival::Lost));
        let live: Vec<_> = self.live().into_iter().filter(|(seat, _)| is_at_sync(*seat)).collect();
        let mut failed = answers.into_iter().nth(first).and_then(Result::err).expect("it failed");
        // What do the ranks at the sync think of it?
        if failed.cause.is_difference() {
            failed.report = Some(match compare(&live) {
                Ok(()) => "the ranks agree: their symmetric pools have equal histories".into(),
                Err(disagreement) => disagreement.to_string().into(),
            });
        }
        Err(failed)
    }

    /// The ranks that are left, by seat.
    fn live(&self) -> Vec<Seated<'_, L>> {
        self.seats.iter().enumerate().filter_map(|(seat, rank)| Some((seat, rank.0.as_deref()?))).collect()
    }

    /// All ranks are together: they are compared, and what happened to some is repaired.
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
        // Lost ranks have nothing to say any more.
        let live: Vec<_> = self.live().into_iter().filter(|(seat, _)| !restarting.contains_key(seat)).collect();
        let reported = agree(self.job, &live, self.reference).map_err(|disputed| {
            let rank = self.seats[disputed.seat].0.as_ref().map(|rank| rank.context.rank);
            Failed { rank, step: disputed.step, cause: disputed.cause, report: Some(disputed.report) }
        })?;
        let syncs = stretch as u32 + 1;
        for (seat, rank) in live {
            // Those that differ in other pools only are nobody's business but the simulator's, which compares these, too.
            if reported.contains(&seat) || rank.standing.first_departed().is_some() {
                restarting.insert(seat, LayoutSource::Reference);
            } else if rank.context.restart_at == Some(syncs) {
                restarting.insert(seat, LayoutSource::Own);
            }
        }
        self.outcome.caught += reported.len() as u64;
        if restarting.is_empty() { Ok(()) } else { self.restart(&restarting, stretch + 1) }
    }

    /// Scans some ranks.
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

    /// Starts ranks again, which have the same future as the others from here on.
    fn restart(&mut self, seats: &BTreeMap<usize, LayoutSource>, stretches: usize) -> Result<(), Failed> {
        let job = self.job;
        let reference = self.seats[self.reference].0.as_deref().expect("nothing happens to the reference");
        let Some(checkpoint) = Checkpoint::take(job, reference, stretches) else {
            // A pool with stitched ranges or plans has no layout: who would start again from that of the reference leaves.
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
            // The old process is gone before the new one begins.
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

    /// Adds what a rank did and what happened to it.
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
