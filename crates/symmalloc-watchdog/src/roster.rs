//! The known state of processes: the ranks of each process in communicators, their progress and state, and the time of the process's last
//! message.
//!
//! The hub knows all processes; every other process knows only the hub.

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use crate::message::{Departure, FailureReport, Member, Message, Standing};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

/// Limit on the ranks of one process, over all communicators that it has not left. An NCCL communicator takes megabytes, so no real process
/// has thousands of them.
const MEMBERSHIPS_MAX: usize = 4096;

/// The known processes; see the module documentation.
#[derive(Debug)]
pub(crate) struct Roster {
    processes: BTreeMap<ProcessId, Known>,
    /// By communicator, the rank that destroyed it after the fewest collectives. The endpoint removes the entry.
    first_left: BTreeMap<CommunicatorId, Leaver>,
    /// The processes that are gone, or have a rank that failed: few in a job that works. All news is about them.
    newsworthy: BTreeSet<ProcessId>,
}

/// A rank that destroyed its communicator.
#[derive(Clone, Copy, Debug)]
struct Leaver {
    process: ProcessId,
    rank: RankId,
    submitted: u64,
}

/// The known state of one process.
#[derive(Debug, Default)]
struct Known {
    heard: Duration,
    departure: Option<Departure>,
    memberships: BTreeMap<RankId, Membership>,
    /// `true` once the process has been part of a communicator.
    has_joined: bool,
}

/// One rank of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    progress: Progress,
    /// When `progress` last changed.
    moved: Duration,
    has_left: bool,
    failure: Option<FailureReport>,
}

impl Membership {
    pub(crate) fn new(now: Duration) -> Self {
        Membership { progress: Progress::default(), moved: now, has_left: false, failure: None }
    }

    /// Sets the progress, which was reached at `moved`.
    pub(crate) fn set_progress(&mut self, progress: Progress, moved: Duration) {
        if self.progress != progress {
            (self.progress, self.moved) = (progress, moved);
        }
    }

    /// Records a failure. Returns `true` if it is the rank's first. Later ones are ignored.
    pub(crate) fn fail(&mut self, report: &FailureReport) -> bool {
        let is_first = self.failure.is_none();
        self.failure.get_or_insert_with(|| report.clone());
        is_first
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    pub(crate) fn submitted(&self) -> u64 {
        self.progress.submitted
    }

    pub(crate) fn standing(&self, rank: RankId, now: Duration) -> Standing {
        Standing { rank, progress: self.progress, still_ms: millis(now.saturating_sub(self.moved)) }
    }

    pub(crate) fn member(&self, rank: RankId, process: ProcessId, silent: Duration, now: Duration) -> Member {
        Member {
            rank: rank.rank,
            process,
            progress: self.progress,
            still_ms: millis(now.saturating_sub(self.moved)),
            silent_ms: millis(silent),
            departure: None,
            has_left: self.has_left,
            failure: self.failure.clone(),
        }
    }

    /// Returns `true` if the departure of the rank's process would affect the other ranks.
    fn is_live(&self) -> bool {
        !self.has_left && self.failure.is_none()
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}

impl Known {
    /// Returns the report of a communicator that the process ended, if any.
    fn last_words(&self) -> Option<FailureReport> {
        self.memberships.values().find_map(|it| it.failure.clone())
    }

    /// Returns `true` if the process is part of no communicator any longer: it is gone, or has left or failed each one that it joined.
    fn has_left_all(&self) -> bool {
        self.departure.is_some() || self.has_joined && !self.memberships.values().any(Membership::is_live)
    }
}

impl Roster {
    pub(crate) fn new(processes: Range<u32>, now: Duration) -> Self {
        let known = |process| (ProcessId(process), Known { heard: now, ..Known::default() });
        Roster { processes: processes.map(known).collect(), first_left: BTreeMap::new(), newsworthy: BTreeSet::new() }
    }

    /// Records the time of a message from the process. Returns `false` if the process is unknown or gone.
    pub(crate) fn hear(&mut self, process: ProcessId, now: Duration) -> bool {
        let known = self.processes.get_mut(&process).filter(|known| known.departure.is_none());
        known.map(|known| known.heard = now).is_some()
    }

    pub(crate) fn silence(&self, process: ProcessId, now: Duration) -> Duration {
        self.processes.get(&process).map_or(Duration::ZERO, |known| now.saturating_sub(known.heard))
    }

    /// Returns the first process other than `own` that has been silent for at least `limit` and is not gone, with the time of its silence.
    pub(crate) fn silent(&self, own: ProcessId, limit: Duration, now: Duration) -> Option<(ProcessId, Duration)> {
        let others = self.alive().filter(|process| *process != own);
        others.map(|process| (process, self.silence(process, now))).find(|(_, silence)| *silence >= limit)
    }

    pub(crate) fn is_gone(&self, process: ProcessId) -> bool {
        self.processes.get(&process).is_none_or(|known| known.departure.is_some())
    }

    /// Returns the processes that are not gone.
    pub(crate) fn alive(&self) -> impl Iterator<Item = ProcessId> {
        self.processes.iter().filter(|(_, known)| known.departure.is_none()).map(|(process, _)| *process)
    }

    /// Returns `true` if no process is part of a communicator any longer.
    pub(crate) fn have_all_left(&self) -> bool {
        self.processes.values().all(Known::has_left_all)
    }

    /// Records that a process has a rank of a communicator. A repeated join resets the rank, except for a failure.
    ///
    /// # Errors
    /// Returns an error if the process has too many ranks.
    pub(crate) fn join(&mut self, process: ProcessId, rank: RankId, now: Duration) -> Result<(), Departure> {
        let Some(known) = self.processes.get_mut(&process) else { return Ok(()) };
        known.has_joined = true;
        if known.memberships.get(&rank).is_some_and(Membership::has_failed) {
            return Ok(());
        }
        known.memberships.insert(rank, Membership::new(now));
        // A rank that has left stays until the others have left too. It does not count, so that a job can create and destroy many
        // communicators.
        if known.memberships.values().filter(|it| !it.has_left).count() > MEMBERSHIPS_MAX {
            return Err(Departure::Broken { error: format!("it has more than {MEMBERSHIPS_MAX} communicators") });
        }
        Ok(())
    }

    /// Returns `true` if the process has a rank of the communicator.
    pub(crate) fn is_in(&self, process: ProcessId, communicator: CommunicatorId) -> bool {
        let known = self.processes.get(&process);
        known.is_some_and(|known| known.memberships.range(ranks_of(communicator)).next().is_some())
    }

    /// Forgets who destroyed a communicator. The hub calls it once all ranks have left, and another process once its own ranks have.
    pub(crate) fn forget_leaver(&mut self, communicator: CommunicatorId) {
        self.first_left.remove(&communicator);
    }

    /// Returns `true` if a rank of the communicator has not left.
    pub(crate) fn is_in_use(&self, communicator: CommunicatorId) -> bool {
        let is_in = |known: &Known| known.memberships.range(ranks_of(communicator)).any(|(_, it)| !it.has_left);
        self.processes.values().any(is_in)
    }

    /// Records that the rank destroyed its communicator, with its last progress. Returns `true` if it did so after fewer collectives than
    /// all before it, so that other ranks may already need it for the next one.
    pub(crate) fn leave(&mut self, process: ProcessId, last: &Standing, now: Duration) -> bool {
        self.note_standing(process, last, now);
        let mut is_first = false;
        if let Some(it) = self.membership(process, last.rank) {
            it.has_left = true;
            let leaver = Leaver { process, rank: last.rank, submitted: last.progress.submitted };
            let before = self.first_left.get(&last.rank.communicator);
            is_first = last.progress.is_destroying && before.is_none_or(|first| leaver.submitted < first.submitted);
            if is_first {
                self.first_left.insert(last.rank.communicator, leaver);
            }
        }
        self.forget_if_over(last.rank.communicator);
        is_first
    }

    pub(crate) fn withdraw(&mut self, process: ProcessId, rank: RankId) {
        if let Some(known) = self.processes.get_mut(&process) {
            known.memberships.remove(&rank);
        }
        self.forget_if_over(rank.communicator);
    }

    /// Returns `true` if the process has that rank, and this is the rank's first failure.
    pub(crate) fn fail(&mut self, process: ProcessId, rank: RankId, report: &FailureReport) -> bool {
        let is_first = self.membership(process, rank).is_some_and(|it| it.fail(report));
        if is_first {
            self.newsworthy.insert(process);
        }
        is_first
    }

    /// Returns `true` if more than `limit` ranks of the communicator have failed.
    pub(crate) fn has_failures_beyond(&self, limit: usize, communicator: CommunicatorId) -> bool {
        let known = self.newsworthy.iter().filter_map(|process| self.processes.get(process));
        let ranks = known.flat_map(|known| known.memberships.range(ranks_of(communicator)));
        ranks.filter(|(_, it)| it.has_failed()).nth(limit).is_some()
    }

    /// Removes and returns the rank that destroyed the communicator before collective `submitted` of another rank, which never completes
    /// without it. Marks it as failed.
    pub(crate) fn take_early_leaver(
        &mut self,
        communicator: CommunicatorId,
        submitted: u64,
    ) -> Option<(RankId, FailureReport)> {
        let leaver = *self.first_left.get(&communicator).filter(|leaver| leaver.submitted < submitted)?;
        self.first_left.remove(&communicator);
        let text = format!(
            "it destroyed the communicator after collective {}, but other ranks need it for collective {submitted}",
            leaver.submitted
        );
        let report = FailureReport { text, first_rank: None, stopped_ms: None };
        self.fail(leaver.process, leaver.rank, &report);
        Some((leaver.rank, report))
    }

    /// Returns the number of collectives that the rank furthest ahead has submitted.
    pub(crate) fn submitted_max(&self, communicator: CommunicatorId) -> u64 {
        let ranks = self.processes.values().flat_map(|known| known.memberships.range(ranks_of(communicator)));
        ranks.map(|(_, it)| it.progress.submitted).max().unwrap_or(0)
    }

    /// Records the progress that a process reports for one of its ranks.
    pub(crate) fn note_standing(&mut self, process: ProcessId, standing: &Standing, now: Duration) {
        if let Some(it) = self.membership(process, standing.rank) {
            it.set_progress(standing.progress, now.saturating_sub(Duration::from_millis(standing.still_ms)));
        }
    }

    /// Records that a process is gone. Returns the message for the other processes, or `None` if the process had left all communicators or
    /// was already gone.
    pub(crate) fn lose(&mut self, process: ProcessId, departure: &Departure, now: Duration) -> Option<Message> {
        let known = self.processes.get_mut(&process).filter(|known| known.departure.is_none())?;
        (known.departure, known.heard) = (Some(departure.clone()), now);
        self.newsworthy.insert(process);
        let live = known.memberships.iter().filter(|(_, it)| it.is_live());
        let ranks: Vec<RankId> = live.map(|(rank, _)| *rank).collect();
        let departure = departure.clone();
        match known.has_joined {
            false => Some(Message::NeverJoined { process, departure }),
            true => (!ranks.is_empty()).then(|| Message::Gone { departure, ranks, after: known.last_words() }),
        }
    }

    /// Returns the failures and departures of the communicator's ranks so far, and of processes that never joined a communicator, for a
    /// process that joins late.
    pub(crate) fn news_of(&self, communicator: CommunicatorId) -> Vec<Message> {
        let mut news = Vec::new();
        for &process in &self.newsworthy {
            let Some(known) = self.processes.get(&process) else { continue };
            if let Some(departure) = known.departure.clone().filter(|_| !known.has_joined) {
                news.push(Message::NeverJoined { process, departure });
            }
            let of_it = known.memberships.range(ranks_of(communicator)).filter(|(_, it)| !it.has_left);
            for (&rank, it) in of_it {
                if let Some(report) = it.failure.clone() {
                    news.push(Message::RankFailed { rank, report });
                } else if let Some(departure) = known.departure.clone() {
                    news.push(Message::Gone { departure, ranks: vec![rank], after: known.last_words() });
                }
            }
        }
        news
    }

    /// Returns the ranks of the communicator. The asking process `own` is never silent.
    pub(crate) fn members(&self, communicator: CommunicatorId, own: ProcessId, now: Duration) -> Vec<Member> {
        let mut members = Vec::new();
        for (process, known) in &self.processes {
            let silent = if *process == own { Duration::ZERO } else { now.saturating_sub(known.heard) };
            let of_it = known.memberships.range(ranks_of(communicator));
            members.extend(of_it.map(|(rank, it)| Member {
                departure: known.departure.clone(),
                ..it.member(*rank, *process, silent, now)
            }));
        }
        members
    }

    /// Forgets a communicator once all its ranks have left. One with a rank that failed or is gone is kept for late joiners.
    fn forget_if_over(&mut self, communicator: CommunicatorId) {
        if self.is_in_use(communicator) {
            return;
        }
        for known in self.processes.values_mut() {
            let ranks: Vec<RankId> = known.memberships.range(ranks_of(communicator)).map(|(rank, _)| *rank).collect();
            ranks.iter().for_each(|rank| drop(known.memberships.remove(rank)));
        }
    }

    fn membership(&mut self, process: ProcessId, rank: RankId) -> Option<&mut Membership> {
        self.processes.get_mut(&process)?.memberships.get_mut(&rank)
    }
}

/// Returns the range of all possible ranks of a communicator.
fn ranks_of(communicator: CommunicatorId) -> RangeInclusive<RankId> {
    RankId { communicator, rank: 0 }..=RankId { communicator, rank: u32::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(communicator: u64, rank: u32) -> RankId {
        RankId { communicator: CommunicatorId(communicator), rank }
    }

    #[test]
    fn communicators_that_a_rank_has_left_do_not_count() {
        let now = Duration::ZERO;
        let own = ProcessId(0);
        let mut roster = Roster::new(0..3, now);
        for communicator in 0..MEMBERSHIPS_MAX as u64 + 10 {
            assert_eq!(roster.join(own, rank(communicator, 0), now), Ok(()));
            // The slow rank does not leave, so the roster keeps the communicator.
            let slow = ProcessId(1 + communicator as u32 % 2);
            assert_eq!(roster.join(slow, rank(communicator, 1), now), Ok(()));
            let last = Standing { rank: rank(communicator, 0), progress: Progress::default(), still_ms: 0 };
            roster.leave(own, &last, now);
        }
        assert_eq!(roster.members(CommunicatorId(0), own, now).len(), 2);
    }

    #[test]
    fn a_process_with_too_many_communicators_is_refused() {
        let now = Duration::ZERO;
        let mut roster = Roster::new(0..1, now);
        for communicator in 0..MEMBERSHIPS_MAX as u64 {
            assert_eq!(roster.join(ProcessId(0), rank(communicator, 0), now), Ok(()));
        }
        assert!(matches!(roster.join(ProcessId(0), rank(u64::MAX, 0), now), Err(Departure::Broken { .. })));
    }
}
