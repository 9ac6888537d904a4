//! The protocol between the processes of a job, without I/O and without a clock.
//!
//! Process 0 of a job is the hub, and all others communicate only with it. Its [`Roster`] records which ranks are in which communicator and
//! how far each has progressed, and it notifies all processes when one is gone. Times are durations since an arbitrary moment that the
//! caller chooses.

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use crate::message::{Departure, FailureReport, Member, Message, Standing};
use crate::roster::{Membership, Roster};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// Interval between heartbeats of a process.
const BEAT_EVERY: Duration = Duration::from_millis(250);

/// Silence after which a process counts as stopped, or its machine as unreachable. A process that is computing sends four heartbeats a
/// second.
pub const SILENT_AFTER: Duration = Duration::from_secs(1);

/// Number of failed ranks of a communicator of which the hub notifies the others as soon as it hears of them. Those that join later learn
/// about all of them.
const FAILURES_TOLD: usize = 16;

/// The process with which all others communicate.
pub(crate) const HUB: ProcessId = ProcessId(0);

/// An event at another rank of a communicator that this process is part of, or at a process that should have joined one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// The rank's process is gone without having left the communicator.
    Gone {
        /// The rank.
        rank: RankId,
        /// The end of its connection.
        departure: Departure,
        /// Its report about another communicator that it had ended before, if any, which is a possible cause of its departure.
        after: Option<FailureReport>,
    },
    /// A process ended before it joined any communicator. Communicators that span all processes can no longer complete.
    NeverJoined {
        /// The process.
        process: ProcessId,
        /// The end of its connection.
        departure: Departure,
    },
    /// The rank ended the communicator because of an error.
    Failed {
        /// The rank.
        rank: RankId,
        /// The report that it sent.
        report: FailureReport,
    },
}

/// A question to the hub about a communicator that the asking process is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Question {
    /// Asks for the ranks that failed or are gone; implied by a join.
    News(CommunicatorId),
    /// Asks for all ranks and their progress.
    Members(CommunicatorId),
}

/// One process's end of the protocol.
#[derive(Debug)]
pub struct Endpoint {
    own: ProcessId,
    /// The ranks of this process. A failed rank stays here until it leaves.
    memberships: BTreeMap<RankId, Membership>,
    /// On the hub, all processes including itself; on any other process, the hub alone.
    roster: Roster,
    /// The hub's latest answer about each communicator that this process has a rank of, with its time of arrival.
    answers: BTreeMap<CommunicatorId, (Duration, Vec<Member>)>,
    has_joined: bool,
    last_beat: Option<Duration>,
    outbox: Vec<(ProcessId, Message)>,
    /// On the hub: pending questions. Each process has at most two per communicator that it is part of.
    questions: BTreeMap<ProcessId, BTreeSet<Question>>,
    /// The process that received the last answer; the next answer goes to a different one.
    last_answered: ProcessId,
    events: Vec<PeerEvent>,
}

impl Endpoint {
    /// Creates the endpoint of process `own` in a job of `processes` processes.
    pub fn new(own: ProcessId, processes: u32, now: Duration) -> Self {
        Endpoint {
            own,
            memberships: BTreeMap::new(),
            roster: Roster::new(if own == HUB { 0..processes } else { 0..1 }, now),
            answers: BTreeMap::new(),
            has_joined: false,
            last_beat: None,
            outbox: Vec::new(),
            questions: BTreeMap::new(),
            last_answered: HUB,
            events: Vec::new(),
        }
    }

    /// Announces that this process has a rank of a communicator.
    pub fn join(&mut self, rank: RankId, now: Duration) {
        self.has_joined = true;
        self.memberships.insert(rank, Membership::new(now));
        self.say(Message::Joined { rank }, now);
        if self.own != HUB {
            // News about the hub itself is already known, and a hub that is gone cannot be asked.
            let news = self.roster.news_of(rank.communicator);
            news.into_iter().for_each(|message| self.note(message));
        }
    }

    /// Announces that the rank destroyed its communicator normally.
    pub fn leave(&mut self, rank: RankId, now: Duration) {
        let Some(membership) = self.memberships.remove(&rank) else { return };
        if self.ranks_of(rank.communicator).next().is_none() {
            self.answers.remove(&rank.communicator);
            if self.own != HUB {
                self.roster.forget_leaver(rank.communicator);
            }
        }
        // A failure has already been reported.
        if !membership.has_failed() {
            self.say(Message::Left { last: membership.standing(rank, now) }, now);
        }
    }

    /// Retracts a join, because the rank was not created or joined under another number. A failure stays, for ranks that join later.
    pub fn withdraw(&mut self, rank: RankId, now: Duration) {
        if self.memberships.remove(&rank).is_some_and(|membership| !membership.has_failed()) {
            self.say(Message::Withdrawn { rank }, now);
        }
    }

    /// Announces that the rank ended its communicator because of an error. Only the first report is sent.
    pub fn fail(&mut self, rank: RankId, report: &FailureReport, now: Duration) {
        let Some(membership) = self.memberships.get_mut(&rank) else { return };
        let report = report.as_received();
        if membership.fail(&report) {
            self.say(Message::Failed { rank, report: report.clone() }, now);
            self.note(Message::RankFailed { rank, report });
        }
    }

    /// Sets the progress of a rank of this process. The next heartbeat sends it to other processes.
    pub fn set_progress(&mut self, rank: RankId, progress: Progress, now: Duration) {
        let Some(membership) = self.memberships.get_mut(&rank) else { return };
        membership.set_progress(progress, now);
        if self.own == HUB {
            let standing = membership.standing(rank, now);
            self.roster.note_standing(HUB, &standing, now);
        }
        self.check_leavers(rank.communicator, progress.submitted);
    }

    /// Asks the hub for the communicator's ranks and their progress. [`has_answer`](Self::has_answer) reports the answer, and
    /// [`members`](Self::members) returns it.
    pub fn ask(&mut self, communicator: CommunicatorId, now: Duration) {
        if self.own != HUB {
            self.say(Message::Ask { communicator }, now);
        }
    }

    /// Returns `true` if the hub has answered the question of time `asked`, or will not answer because it is gone or silent. On the hub,
    /// always returns `true`.
    pub fn has_answer(&self, communicator: CommunicatorId, asked: Duration, now: Duration) -> bool {
        let is_answered = || self.answers.get(&communicator).is_some_and(|(answered, _)| *answered >= asked);
        self.own == HUB || is_answered() || self.roster.is_gone(HUB) || self.roster.silence(HUB, now) >= SILENT_AFTER
    }

    /// Returns a process that is stopped or cannot be reached, with the time of its silence. On the hub, this can be any other process. On
    /// other processes, it can only be the hub.
    pub(crate) fn silent_process(&self, now: Duration) -> Option<(ProcessId, Duration)> {
        self.roster.silent(self.own, SILENT_AFTER, now)
    }

    /// Returns the ranks of the communicator. On the hub, these are all ranks. On other processes, they are the ranks of this process,
    /// those of the hub, and those that the hub reported within the last [`SILENT_AFTER`].
    pub fn members(&self, communicator: CommunicatorId, now: Duration) -> Vec<Member> {
        let mut members = self.roster.members(communicator, self.own, now);
        if self.own != HUB {
            let own = self.ranks_of(communicator);
            members.extend(own.map(|(rank, it)| it.member(*rank, self.own, Duration::ZERO, now)));
            let answer =
                self.answers.get(&communicator).filter(|(answered, _)| now.saturating_sub(*answered) <= SILENT_AFTER);
            let known = answer.map_or(&[][..], |(_, members)| members);
            let others = known.iter().filter(|known| members.iter().all(|it| it.rank != known.rank));
            let others: Vec<Member> = others.cloned().collect();
            members.extend(others);
        }
        members.sort_by_key(|member| member.rank);
        members
    }

    /// Returns `true` if this endpoint is no longer needed: its process was part of communicators and has left them all. The hub is needed
    /// as long as other processes communicate through it.
    pub fn is_over(&self) -> bool {
        self.has_joined && self.memberships.is_empty() && (self.own != HUB || self.roster.have_all_left())
    }

    /// Advances the time and sends any heartbeat that is due.
    pub fn tick(&mut self, now: Duration) {
        if self.last_beat.is_some_and(|last| now.saturating_sub(last) < BEAT_EVERY) {
            return;
        }
        self.last_beat = Some(now);
        let standings: Vec<Standing> = self.memberships.iter().map(|(rank, it)| it.standing(*rank, now)).collect();
        let beat = Message::Beat { standings };
        if self.own == HUB {
            self.tell_others(None, &beat);
        }
        self.say(beat, now);
    }

    /// Processes a message from another process.
    ///
    /// # Errors
    /// Returns the departure of a process that exceeds a bound. The caller must then close its connection and report its
    /// [loss](Self::lose).
    pub(crate) fn receive(&mut self, from: ProcessId, message: Message, now: Duration) -> Result<(), Departure> {
        if self.own == HUB {
            self.hear(from, message, now)?;
        } else if from == HUB {
            self.hear_the_hub(message, now)?;
        }
        Ok(())
    }

    /// Returns `true` if a question is pending.
    pub(crate) fn has_questions(&self) -> bool {
        !self.questions.is_empty()
    }

    /// Answers one question, serving the processes in turn. Returns `false` if no question is pending.
    pub(crate) fn answer(&mut self, now: Duration) -> bool {
        let later = (Bound::Excluded(self.last_answered), Bound::Unbounded);
        let next = self.questions.range(later).next().or_else(|| self.questions.iter().next());
        let Some(process) = next.map(|(process, _)| *process) else { return false };
        self.last_answered = process;
        let questions = self.questions.entry(process).or_default();
        let question = questions.pop_first();
        if questions.is_empty() {
            self.questions.remove(&process);
        }
        match question {
            Some(Question::News(communicator)) => {
                let news = self.roster.news_of(communicator);
                self.outbox.extend(news.into_iter().map(|message| (process, message)));
            }
            Some(Question::Members(communicator)) => {
                let answer = Message::Told { communicator, members: self.members(communicator, now) };
                self.outbox.push((process, answer));
            }
            None => {}
        }
        true
    }

    /// Queues a question of another process. Ignores questions about communicators that the process is not part of.
    fn ask_hub(&mut self, process: ProcessId, question: Question) {
        let (Question::News(communicator) | Question::Members(communicator)) = question;
        if self.roster.is_in(process, communicator) {
            self.questions.entry(process).or_default().insert(question);
        }
    }

    /// Records that the connection to a process ended.
    pub fn lose(&mut self, process: ProcessId, departure: &Departure, now: Duration) {
        self.questions.remove(&process);
        let Some(gone) = self.roster.lose(process, departure, now) else { return };
        if self.own == HUB {
            self.tell_others(Some(process), &gone);
        }
        self.note(gone);
    }

    /// Takes the messages to send, with their recipients.
    pub(crate) fn take_outbox(&mut self) -> Vec<(ProcessId, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<PeerEvent> {
        std::mem::take(&mut self.events)
    }

    /// Sends a message to the hub; the hub itself processes it immediately.
    fn say(&mut self, message: Message, now: Duration) {
        if self.own == HUB {
            // The bounds on other processes do not apply to the hub's own process.
            let _within_bounds = self.hear(HUB, message, now);
        } else {
            self.outbox.push((HUB, message));
        }
    }

    /// On the hub: sends a message to every process that is not gone, except `but`.
    fn tell_others(&mut self, but: Option<ProcessId>, message: &Message) {
        let to = self.roster.alive().filter(|process| *process != HUB && Some(*process) != but);
        self.outbox.extend(to.map(|process| (process, message.clone())));
    }

    /// On the hub: processes a message from any process, including itself. Forwards messages about the hub's own ranks to all processes,
    /// which need them once the hub is gone.
    fn hear(&mut self, from: ProcessId, message: Message, now: Duration) -> Result<(), Departure> {
        if !self.roster.hear(from, now) {
            return Ok(());
        }
        match message {
            Message::Beat { standings } => {
                for it in &standings {
                    self.roster.note_standing(from, it, now);
                    if self.roster.is_in(from, it.rank.communicator) {
                        self.check_leavers(it.rank.communicator, it.progress.submitted);
                    }
                }
            }
            Message::Joined { rank } => {
                let joined = self.roster.join(from, rank, now);
                self.pass_on_if_own(from, &message);
                if from == HUB {
                    let news = self.roster.news_of(rank.communicator);
                    news.into_iter().for_each(|message| self.note(message));
                } else {
                    joined?;
                    self.ask_hub(from, Question::News(rank.communicator));
                }
            }
            Message::Left { ref last } => {
                let communicator = last.rank.communicator;
                let is_first = self.roster.leave(from, last, now);
                self.pass_on_if_own(from, &message);
                // Of a later one, only its own collectives are new.
                let submitted =
                    if is_first { self.roster.submitted_max(communicator) } else { last.progress.submitted };
                self.check_leavers(communicator, submitted);
                if !self.roster.is_in_use(communicator) {
                    self.roster.forget_leaver(communicator);
                }
            }
            Message::Withdrawn { rank } => {
                self.roster.withdraw(from, rank);
                self.pass_on_if_own(from, &message);
            }
            Message::Failed { rank, report } => {
                if self.roster.fail(from, rank, &report) {
                    let failed = Message::RankFailed { rank, report };
                    // A rank ends its communicator at the first report, and then reports that: each of a thousand ranks to all others.
                    let is_known = self.roster.has_failures_beyond(FAILURES_TOLD, rank.communicator);
                    if from == HUB || !is_known {
                        self.tell_others(Some(from), &failed);
                    }
                    if from != HUB {
                        self.note(failed);
                    }
                }
            }
            Message::Ask { communicator } => self.ask_hub(from, Question::Members(communicator)),
            Message::Gone { .. } | Message::NeverJoined { .. } | Message::RankFailed { .. } | Message::Told { .. } => {}
        }
        Ok(())
    }

    /// Reports a rank that destroyed the communicator before a collective that another rank submitted.
    fn check_leavers(&mut self, communicator: CommunicatorId, submitted: u64) {
        if let Some((rank, report)) = self.roster.take_early_leaver(communicator, submitted) {
            let failed = Message::RankFailed { rank, report };
            if self.own == HUB {
                self.tell_others(None, &failed);
            }
            self.note(failed);
        }
    }

    fn pass_on_if_own(&mut self, from: ProcessId, message: &Message) {
        if from == HUB {
            self.tell_others(None, message);
        }
    }

    fn hear_the_hub(&mut self, message: Message, now: Duration) -> Result<(), Departure> {
        self.roster.hear(HUB, now);
        match message {
            Message::Beat { standings } => standings.iter().for_each(|it| self.roster.note_standing(HUB, it, now)),
            Message::Joined { rank } => self.roster.join(HUB, rank, now)?,
            Message::Left { last } => {
                let communicator = last.rank.communicator;
                self.roster.leave(HUB, &last, now);
                let own = self.ranks_of(communicator).map(|(_, it)| it.submitted()).max();
                match own {
                    Some(submitted) => self.check_leavers(communicator, submitted),
                    None => self.roster.forget_leaver(communicator),
                }
            }
            Message::Withdrawn { rank } => self.roster.withdraw(HUB, rank),
            Message::Gone { .. } | Message::NeverJoined { .. } => self.note(message),
            Message::RankFailed { rank, ref report } => {
                self.roster.fail(HUB, rank, report);
                self.note(message);
            }
            Message::Told { communicator, members } if self.ranks_of(communicator).next().is_some() => {
                self.answers.insert(communicator, (now, members));
            }
            Message::Told { .. } | Message::Failed { .. } | Message::Ask { .. } => {}
        }
        Ok(())
    }

    /// Returns this process's ranks of a communicator.
    fn ranks_of(&self, communicator: CommunicatorId) -> impl Iterator<Item = (&RankId, &Membership)> {
        self.memberships.iter().filter(move |(rank, _)| rank.communicator == communicator)
    }

    /// Converts a report about ranks to events, for the communicators that this process is part of.
    fn note(&mut self, message: Message) {
        let concerns = |of: &RankId| self.ranks_of(of.communicator).any(|(own, it)| own != of && !it.has_failed());
        match message {
            Message::NeverJoined { process, departure } => {
                self.events.push(PeerEvent::NeverJoined { process, departure });
            }
            Message::Gone { departure, ranks, after } => {
                let gone = |rank| PeerEvent::Gone { rank, departure: departure.clone(), after: after.clone() };
                let events: Vec<_> = ranks.into_iter().filter(concerns).map(gone).collect();
                self.events.extend(events);
            }
            Message::RankFailed { rank, report } if concerns(&rank) => {
                self.events.push(PeerEvent::Failed { rank, report });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
