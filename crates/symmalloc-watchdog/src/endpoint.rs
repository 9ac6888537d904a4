//! What a process says to the others and hears from them: without input, output or a clock.
//!
//! Process 0 of a job is the hub: all others talk to it alone. Its [`Roster`] has who is in which communicator and how far, and it
//! tells all of a process that is gone. Times are durations since any moment that the caller chooses.

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use crate::message::{Departure, FailureReport, Member, Message, Standing};
use crate::roster::{Membership, Roster};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// How often a process says that it is alive.
const BEAT_EVERY: Duration = Duration::from_millis(250);

/// A process of which nothing is heard for so long is stopped, or its machine cannot be reached. One that computes is heard four
/// times a second.
pub const SILENT_AFTER: Duration = Duration::from_secs(1);

/// The process that all others talk to.
pub(crate) const HUB: ProcessId = ProcessId(0);

/// What happened to a rank of a communicator that this process has another rank of.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// Its process is gone, and it had not left the communicator.
    Gone {
        /// Which one.
        rank: RankId,
        /// How.
        departure: Departure,
        /// Why it had ended another communicator, if it had: it may have gone because of that.
        after: Option<FailureReport>,
    },
    /// It ended the communicator because of an error.
    Failed {
        /// Which one.
        rank: RankId,
        /// What it said.
        report: FailureReport,
    },
}

/// Something that a process wants to know of a communicator that it is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Question {
    /// The ranks that failed or are gone: it joins.
    News(CommunicatorId),
    /// All ranks, and how far they are: it asks.
    Members(CommunicatorId),
}

/// What one process says to the others, and hears from them.
#[derive(Debug)]
pub struct Endpoint {
    own: ProcessId,
    /// The ranks of this process. What failed stays until it is left.
    memberships: BTreeMap<RankId, Membership>,
    /// The hub's has all processes, itself included; another one's has the hub.
    roster: Roster,
    /// What the hub last told of a communicator that this process has a rank of, and when.
    told: BTreeMap<CommunicatorId, (Duration, Vec<Member>)>,
    has_joined: bool,
    last_beat: Option<Duration>,
    outbox: Vec<(ProcessId, Message)>,
    /// The hub's: what others wait for. Nobody has more questions than two for each of its communicators.
    questions: BTreeMap<ProcessId, BTreeSet<Question>>,
    /// The process that got the last answer: the next one is another's.
    last_answered: ProcessId,
    events: Vec<PeerEvent>,
}

impl Endpoint {
    /// Process `own` of so many.
    pub fn new(own: ProcessId, processes: u32, now: Duration) -> Self {
        Endpoint {
            own,
            memberships: BTreeMap::new(),
            roster: Roster::new(if own == HUB { 0..processes } else { 0..1 }, now),
            told: BTreeMap::new(),
            has_joined: false,
            last_beat: None,
            outbox: Vec::new(),
            questions: BTreeMap::new(),
            last_answered: HUB,
            events: Vec::new(),
        }
    }

    /// This process has this rank of a communicator from now on.
    pub fn join(&mut self, rank: RankId, now: Duration) {
        self.has_joined = true;
        self.memberships.insert(rank, Membership::new(now));
        self.say(Message::Joined { rank }, now);
        if self.own != HUB {
            // What became of the hub need not be asked of it, or cannot be.
            let news = self.roster.news_of(rank.communicator);
            news.into_iter().for_each(|message| self.note(message));
        }
    }

    /// The rank destroyed its communicator in order.
    pub fn leave(&mut self, rank: RankId, now: Duration) {
        let Some(membership) = self.memberships.remove(&rank) else { return };
        if self.ranks_of(rank.communicator).next().is_none() {
            self.told.remove(&rank.communicator);
        }
        // What ended with an error was told already.
        if !membership.has_failed() {
            self.say(Message::Left { last: membership.standing(rank, now) }, now);
        }
    }

    /// What was joined is no rank after all, or joined under another number.
    pub fn withdraw(&mut self, rank: RankId, now: Duration) {
        if self.memberships.remove(&rank).is_some() {
            self.say(Message::Withdrawn { rank }, now);
        }
    }

    /// The rank ended its communicator because of an error. Only the first report is told.
    pub fn fail(&mut self, rank: RankId, report: &FailureReport, now: Duration) {
        let Some(membership) = self.memberships.get_mut(&rank) else { return };
        let report = report.clone().bounded();
        if membership.fail(&report) {
            self.say(Message::Failed { rank, report: report.clone() }, now);
            self.note(Message::RankFailed { rank, report });
        }
    }

    /// How far a rank of this process is. Others learn it with the next beat.
    pub fn set_progress(&mut self, rank: RankId, progress: Progress, now: Duration) {
        let Some(membership) = self.memberships.get_mut(&rank) else { return };
        membership.set_progress(progress, now);
        if self.own == HUB {
            let standing = membership.standing(rank, now);
            self.roster.note_standing(HUB, &standing, now);
        }
    }

    /// Asks the hub who is in the communicator and how far. [`members`](Self::members) knows when it [answered](Self::has_answer).
    pub fn ask(&mut self, communicator: CommunicatorId, now: Duration) {
        if self.own != HUB {
            self.say(Message::Ask { communicator }, now);
        }
    }

    /// Whether the hub has answered what was asked at that moment, or will not: it is gone or silent. The hub itself need not ask.
    pub fn has_answer(&self, communicator: CommunicatorId, asked: Duration, now: Duration) -> bool {
        let is_told = || self.told.get(&communicator).is_some_and(|(told, _)| *told >= asked);
        self.own == HUB || is_told() || self.roster.is_gone(HUB) || self.roster.silence(HUB, now) >= SILENT_AFTER
    }

    /// The ranks of the communicator: on the hub all of them; elsewhere this process's own, the hub's, and what the hub answered not
    /// longer than [`SILENT_AFTER`] ago.
    pub fn members(&self, communicator: CommunicatorId, now: Duration) -> Vec<Member> {
        let mut members = self.roster.members(communicator, self.own, now);
        if self.own != HUB {
            let own = self.ranks_of(communicator);
            members.extend(own.map(|(rank, it)| it.member(*rank, self.own, Duration::ZERO, now)));
            let told = self.told.get(&communicator).filter(|(told, _)| now.saturating_sub(*told) <= SILENT_AFTER);
            let told = told.map_or(&[][..], |(_, members)| members);
            let others = told.iter().filter(|told| members.iter().all(|it| it.rank != told.rank));
            let others: Vec<Member> = others.cloned().collect();
            members.extend(others);
        }
        members.sort_by_key(|member| member.rank);
        members
    }

    /// Whether nobody needs this side any more: it was part of communicators, and of none now. The hub stays as long as others talk
    /// through it.
    pub fn is_over(&self) -> bool {
        self.has_joined && self.memberships.is_empty() && (self.own != HUB || self.roster.are_through())
    }

    /// Lets time pass: beats go out.
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

    /// Takes a message of a process.
    ///
    /// # Errors
    /// If the process exceeds a bound: its connection must end, and its [loss](Self::lose) be reported.
    pub(crate) fn receive(&mut self, from: ProcessId, message: Message, now: Duration) -> Result<(), Departure> {
        if self.own == HUB {
            self.hear(from, message, now)?;
        } else if from == HUB {
            self.hear_the_hub(message, now)?;
        }
        Ok(())
    }

    /// Returns `true` if a process waits for an answer.
    pub(crate) fn has_questions(&self) -> bool {
        !self.questions.is_empty()
    }

    /// Answers a question; processes take turns. Returns `false` if there is none.
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
                let told = Message::Told { communicator, members: self.members(communicator, now) };
                self.outbox.push((process, told));
            }
            None => {}
        }
        true
    }

    /// Notes a question of another process. Nobody need know of communicators that it is no part of.
    fn ask_hub(&mut self, process: ProcessId, question: Question) {
        let (Question::News(communicator) | Question::Members(communicator)) = question;
        if self.roster.is_in(process, communicator) {
            self.questions.entry(process).or_default().insert(question);
        }
    }

    /// The connection to a process ended.
    pub fn lose(&mut self, process: ProcessId, departure: &Departure, now: Duration) {
        self.questions.remove(&process);
        let Some(gone) = self.roster.lose(process, departure, now) else { return };
        if self.own == HUB {
            self.tell_others(Some(process), &gone);
        }
        self.note(gone);
    }

    /// What is to be sent, and to whom.
    pub(crate) fn take_outbox(&mut self) -> Vec<(ProcessId, Message)> {
        std::mem::take(&mut self.outbox)
    }

    /// What happened to others.
    pub fn take_events(&mut self) -> Vec<PeerEvent> {
        std::mem::take(&mut self.events)
    }

    /// To the hub; on the hub itself, it is heard at once.
    fn say(&mut self, message: Message, now: Duration) {
        if self.own == HUB {
            // What bounds others does not bound this process's own program.
            let _within_bounds = self.hear(HUB, message, now);
        } else {
            self.outbox.push((HUB, message));
        }
    }

    /// The hub's: to all that are not gone, but one.
    fn tell_others(&mut self, but: Option<ProcessId>, message: &Message) {
        let to = self.roster.alive().filter(|process| *process != HUB && Some(*process) != but);
        self.outbox.extend(to.map(|process| (process, message.clone())));
    }

    /// The hub's: what a process says, itself included. What the hub says of its own ranks is told to all, for when it is gone.
    fn hear(&mut self, from: ProcessId, message: Message, now: Duration) -> Result<(), Departure> {
        if !self.roster.hear(from, now) {
            return Ok(());
        }
        match message {
            Message::Beat { standings } => standings.iter().for_each(|it| self.roster.note_standing(from, it, now)),
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
                self.roster.leave(from, last, now);
                self.pass_on_if_own(from, &message);
            }
            Message::Withdrawn { rank } => {
                self.roster.withdraw(from, rank);
                self.pass_on_if_own(from, &message);
            }
            Message::Failed { rank, report } => {
                let report = report.bounded();
                if self.roster.fail(from, rank, &report) {
                    let failed = Message::RankFailed { rank, report };
                    self.tell_others(Some(from), &failed);
                    if from != HUB {
                        self.note(failed);
                    }
                }
            }
            Message::Ask { communicator } => self.ask_hub(from, Question::Members(communicator)),
            Message::Gone { .. } | Message::RankFailed { .. } | Message::Told { .. } => {}
        }
        Ok(())
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
            Message::Left { last } => self.roster.leave(HUB, &last, now),
            Message::Withdrawn { rank } => self.roster.withdraw(HUB, rank),
            Message::Gone { .. } => self.note(message),
            Message::RankFailed { rank, ref report } => {
                self.roster.fail(HUB, rank, report);
                self.note(message);
            }
            Message::Told { communicator, members } if self.ranks_of(communicator).next().is_some() => {
                self.told.insert(communicator, (now, members));
            }
            Message::Told { .. } | Message::Failed { .. } | Message::Ask { .. } => {}
        }
        Ok(())
    }

    /// This process's ranks of a communicator.
    fn ranks_of(&self, communicator: CommunicatorId) -> impl Iterator<Item = (&RankId, &Membership)> {
        self.memberships.iter().filter(move |(rank, _)| rank.communicator == communicator)
    }

    /// Turns what became of ranks into events of what this process is part of.
    fn note(&mut self, message: Message) {
        let concerns = |of: &RankId| self.ranks_of(of.communicator).any(|(own, it)| own != of && !it.has_failed());
        match message {
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
