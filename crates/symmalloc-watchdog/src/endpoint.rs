//! What a process knows of the others, and what it says to them: without input, output or a clock.
//!
//! Process 0 of a job is the hub: all others talk to it alone. It notes who is in which communicator and how far, and tells all of
//! a process that is gone. Times are durations since any moment that the caller chooses.

use crate::ids::{CommunicatorId, ProcessId, Progress, RankId};
use crate::message::{Departure, FailureReport, Member, Message};
use std::collections::BTreeMap;
use std::time::Duration;

/// How often a process says that it is alive.
const BEAT_EVERY: Duration = Duration::from_millis(250);

/// The process that all others talk to.
const HUB: ProcessId = ProcessId(0);

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
    /// A process is gone, whatever it was part of.
    ProcessGone {
        /// The process.
        process: ProcessId,
        /// How.
        departure: Departure,
    },
}

/// What one process knows of the others, and what it says to them.
#[derive(Debug)]
pub struct Endpoint {
    own: ProcessId,
    /// The ranks of this process.
    memberships: BTreeMap<RankId, Membership>,
    /// By process. The hub knows all, itself included; another process knows the hub.
    others: BTreeMap<ProcessId, Other>,
    /// What the hub last told of a communicator, and when.
    told: BTreeMap<CommunicatorId, (Duration, Vec<Member>)>,
    has_joined: bool,
    last_beat: Option<Duration>,
    outbox: Vec<(ProcessId, Message)>,
    events: Vec<PeerEvent>,
}

#[derive(Clone, Debug, Default)]
struct Membership {
    progress: Progress,
    /// When that changed last.
    moved: Duration,
    has_left: bool,
    failure: Option<FailureReport>,
}

#[derive(Debug, Default)]
struct Other {
    heard: Duration,
    departure: Option<Departure>,
    memberships: BTreeMap<RankId, Membership>,
    /// Whether it ever was part of a communicator.
    has_joined: bool,
}

impl Endpoint {
    /// Process `own` of so many.
    pub fn new(own: ProcessId, processes: u32, now: Duration) -> Self {
        let known = if own == HUB { 0..processes } else { 0..1 };
        let others = known.map(|process| (ProcessId(process), Other { heard: now, ..Other::default() }));
        Endpoint {
            own,
            memberships: BTreeMap::new(),
            others: others.collect(),
            told: BTreeMap::new(),
            has_joined: false,
            last_beat: None,
            outbox: Vec::new(),
            events: Vec::new(),
        }
    }

    /// This process has this rank of a communicator from now on.
    pub fn join(&mut self, rank: RankId) {
        self.has_joined = true;
        self.memberships.insert(rank, Membership::default());
        self.say(Message::Joined { rank });
        self.note_what_the_hub_met(rank.communicator);
    }

    /// A hub's rank that failed, or a hub that is gone, is known here: who joins late need not be told, or cannot be.
    fn note_what_the_hub_met(&mut self, communicator: CommunicatorId) {
        let Some(hub) = self.others.get(&HUB).filter(|_| self.own != HUB) else { return };
        for (&rank, it) in hub.memberships.iter().filter(|(rank, it)| rank.communicator == communicator && !it.has_left)
        {
            if let Some(report) = it.failure.clone() {
                self.events.push(PeerEvent::Failed { rank, report });
            } else if let Some(departure) = hub.departure.clone() {
                self.events.push(PeerEvent::Gone { rank, departure, after: None });
            }
        }
    }

    /// The rank destroyed its communicator in order.
    pub fn leave(&mut self, rank: RankId) {
        let Some(membership) = self.memberships.remove(&rank) else { return };
        if self.ranks_of(rank.communicator).next().is_none() {
            self.told.remove(&rank.communicator);
        }
        // What ended with an error was told already.
        if membership.failure.is_none() {
            self.say(Message::Left { rank });
        }
    }

    /// What was joined is no rank after all, or joined under another number.
    pub fn withdraw(&mut self, rank: RankId) {
        if self.memberships.remove(&rank).is_some() {
            self.say(Message::Withdrawn { rank });
        }
    }

    /// The rank ended its communicator because of an error. Only the first report is told.
    pub fn fail(&mut self, rank: RankId, report: &FailureReport) {
        let Some(membership) = self.memberships.get_mut(&rank) else { return };
        if membership.failure.is_none() {
            let report = report.clone();
            membership.failure = Some(report.clone());
            self.say(Message::Failed { rank, report: report.clone() });
            self.note(Message::RankFailed { rank, report });
        }
    }

    /// How far a rank of this process is. Goes out with the next beat.
    pub fn set_progress(&mut self, rank: RankId, progress: Progress) {
        if let Some(membership) = self.memberships.get_mut(&rank) {
            membership.progress = progress;
        }
    }

    /// Asks the hub who is in the communicator and how far. The answer is in [`members`](Self::members) when it came.
    pub fn ask(&mut self, communicator: CommunicatorId) {
        if self.own != HUB {
            self.say(Message::Ask { communicator });
        }
    }

    /// The ranks of the communicator as the hub said last; on the hub itself, as they are known now. This process's own are among
    /// them. How long the hub itself is silent is known without asking it.
    pub fn members(&self, communicator: CommunicatorId, now: Duration) -> Vec<Member> {
        if self.own == HUB {
            return self.members_of(communicator, now);
        }
        // What this process knows itself: its own ranks, and the hub's.
        let mut known = self.members_of(communicator, now);
        let own = self.memberships.iter().filter(|(rank, _)| rank.communicator == communicator);
        known.extend(own.map(|(rank, it)| member(*rank, self.own, it, Duration::ZERO, now)));
        let told = self.told.get(&communicator).map_or(&[][..], |(_, members)| members);
        let is_new = |told: &&Member| known.iter().all(|it| it.rank != told.rank);
        let others: Vec<Member> = told.iter().filter(is_new).cloned().collect();
        for hub in known.iter_mut().filter(|it| it.process == HUB) {
            if let Some(said) = told.iter().find(|told| told.rank == hub.rank) {
                (hub.progress, hub.still_ms) = (said.progress, said.still_ms);
            }
        }
        known.extend(others);
        known.sort_by_key(|member| member.rank);
        known
    }

    /// When the hub last said who is in the communicator. On the hub that is known at any time.
    pub fn told_at(&self, communicator: CommunicatorId, now: Duration) -> Option<Duration> {
        if self.own == HUB { Some(now) } else { Some(self.told.get(&communicator)?.0) }
    }

    /// Whether nobody needs this side any more: it was part of communicators, and of none now. The hub stays as long as others talk
    /// through it.
    pub fn is_over(&self) -> bool {
        let is_through = |other: &Other| {
            other.departure.is_some()
                || other.has_joined && other.memberships.values().all(|it| it.has_left || it.failure.is_some())
        };
        self.has_joined && self.memberships.is_empty() && (self.own != HUB || self.others.values().all(is_through))
    }

    /// Lets time pass: beats go out.
    pub fn tick(&mut self, now: Duration) {
        if self.last_beat.is_some_and(|last| now.saturating_sub(last) < BEAT_EVERY) {
            return;
        }
        self.last_beat = Some(now);
        let progress = self.memberships.iter().map(|(rank, it)| (*rank, it.progress)).collect();
        let beat = Message::Beat { progress };
        if self.own == HUB {
            self.hear(HUB, beat, now);
            // To the others a sign of life, and nothing else.
            self.tell_others(None, &Message::Beat { progress: Vec::new() });
        } else {
            self.say(beat);
        }
    }

    /// Takes what a process said.
    pub(crate) fn receive(&mut self, from: ProcessId, message: Message, now: Duration) {
        if self.own == HUB {
            self.hear(from, message, now);
        } else if from == HUB {
            self.hear_the_hub(message, now);
        }
    }

    /// The connection to a process ended.
    pub fn lose(&mut self, process: ProcessId, departure: Departure, now: Duration) {
        let Some(other) = self.others.get_mut(&process).filter(|other| other.departure.is_none()) else { return };
        other.departure = Some(departure.clone());
        other.heard = now;
        let is_live = |it: &Membership| !it.has_left && it.failure.is_none();
        let ranks = other.memberships.iter().filter(|(_, it)| is_live(it)).map(|(rank, _)| *rank).collect();
        let after = other.memberships.values().find_map(|it| it.failure.clone());
        let gone = Message::Gone { process, departure, ranks, after };
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
    fn say(&mut self, message: Message) {
        if self.own == HUB {
            let now = self.others[&HUB].heard;
            self.hear(HUB, message, now);
        } else {
            self.outbox.push((HUB, message));
        }
    }

    /// The hub's: to all that are not gone, but one.
    fn tell_others(&mut self, but: Option<ProcessId>, message: &Message) {
        let is_alive = |(process, other): &(&ProcessId, &Other)| {
            **process != HUB && Some(**process) != but && other.departure.is_none()
        };
        let to: Vec<_> = self.others.iter().filter(is_alive).map(|(process, _)| *process).collect();
        self.outbox.extend(to.into_iter().map(|process| (process, message.clone())));
    }

    /// The hub's: what a process says, itself included.
    fn hear(&mut self, from: ProcessId, message: Message, now: Duration) {
        let Some(other) = self.others.get_mut(&from).filter(|other| other.departure.is_none()) else { return };
        other.heard = now;
        match message {
            Message::Beat { progress } => {
                for (rank, progress) in progress {
                    if let Some(it) = other.memberships.get_mut(&rank).filter(|it| it.progress != progress) {
                        (it.progress, it.moved) = (progress, now);
                    }
                }
            }
            Message::Joined { rank } => {
                other.has_joined = true;
                other.memberships.insert(rank, Membership { moved: now, ..Membership::default() });
                if from == HUB {
                    // Who loses the hub knows what was lost with it.
                    self.tell_others(None, &Message::Joined { rank });
                }
                self.tell_late_comer(from, rank.communicator);
            }
            Message::Left { rank } => {
                if let Some(membership) = other.memberships.get_mut(&rank) {
                    membership.has_left = true;
                }
                if from == HUB {
                    self.tell_others(None, &Message::Left { rank });
                }
                self.forget_if_over(rank.communicator);
            }
            Message::Withdrawn { rank } => {
                other.memberships.remove(&rank);
                if from == HUB {
                    self.tell_others(None, &Message::Withdrawn { rank });
                }
                self.forget_if_over(rank.communicator);
            }
            Message::Failed { rank, report } => {
                let Some(membership) = other.memberships.get_mut(&rank) else { return };
                membership.failure = Some(report.clone());
                let failed = Message::RankFailed { rank, report };
                self.tell_others(Some(from), &failed);
                if from != HUB {
                    self.note(failed);
                }
            }
            Message::Ask { communicator } => {
                let told = Message::Told { communicator, members: self.members_of(communicator, now) };
                self.outbox.push((from, told));
            }
            Message::Gone { .. } | Message::RankFailed { .. } | Message::Told { .. } => {}
        }
    }

    /// A rank that joins late learns what became of others meanwhile.
    fn tell_late_comer(&mut self, to: ProcessId, communicator: CommunicatorId) {
        let mut news = Vec::new();
        for (process, other) in &self.others {
            let of_it = |(rank, it): &(&RankId, &Membership)| rank.communicator == communicator && !it.has_left;
            for (rank, membership) in other.memberships.iter().filter(of_it) {
                if *process == HUB && to != HUB {
                    news.push(Message::Joined { rank: *rank });
                }
                if let Some(report) = &membership.failure {
                    news.push(Message::RankFailed { rank: *rank, report: report.clone() });
                } else if let Some(departure) = &other.departure {
                    let (departure, after) = (departure.clone(), None);
                    news.push(Message::Gone { process: *process, departure, ranks: vec![*rank], after });
                }
            }
        }
        for message in news {
            if to == HUB { self.note(message) } else { self.outbox.push((to, message)) }
        }
    }

    /// A communicator that all have left needs no memory. One with a rank that is gone or failed is kept for who joins late.
    fn forget_if_over(&mut self, communicator: CommunicatorId) {
        let is_in = |(rank, it): (&RankId, &Membership)| rank.communicator == communicator && !it.has_left;
        if !self.others.values().any(|other| other.memberships.iter().any(is_in)) {
            let others = self.others.values_mut();
            others.for_each(|other| other.memberships.retain(|rank, _| rank.communicator != communicator));
        }
    }

    fn hear_the_hub(&mut self, message: Message, now: Duration) {
        if let Some(hub) = self.others.get_mut(&HUB) {
            hub.heard = now;
        }
        match message {
            Message::Gone { .. } => self.note(message),
            Message::RankFailed { rank, ref report } => {
                if let Some(it) = self.others.entry(HUB).or_default().memberships.get_mut(&rank) {
                    it.failure = Some(report.clone());
                }
                self.note(message);
            }
            Message::Joined { rank } => {
                self.others.entry(HUB).or_default().memberships.insert(rank, Membership::default());
            }
            Message::Left { rank } => {
                if let Some(it) = self.others.entry(HUB).or_default().memberships.get_mut(&rank) {
                    it.has_left = true;
                }
                self.forget_if_over(rank.communicator);
            }
            Message::Withdrawn { rank } => {
                self.others.entry(HUB).or_default().memberships.remove(&rank);
            }
            Message::Told { communicator, members } if self.ranks_of(communicator).next().is_some() => {
                self.told.insert(communicator, (now, members));
            }
            _ => {}
        }
    }

    /// This process's ranks of a communicator.
    fn ranks_of(&self, communicator: CommunicatorId) -> impl Iterator<Item = (&RankId, &Membership)> {
        self.memberships.iter().filter(move |(rank, _)| rank.communicator == communicator)
    }

    /// Turns what became of ranks into events of what this process is part of.
    fn note(&mut self, message: Message) {
        let concerns = |of: &RankId| self.ranks_of(of.communicator).any(|(own, it)| own != of && it.failure.is_none());
        match message {
            Message::Gone { process, departure, ranks, after } => {
                let gone = |rank| PeerEvent::Gone { rank, departure: departure.clone(), after: after.clone() };
                let mut events: Vec<_> = ranks.into_iter().filter(concerns).map(gone).collect();
                events.push(PeerEvent::ProcessGone { process, departure });
                self.events.extend(events);
            }
            Message::RankFailed { rank, report } if concerns(&rank) => {
                self.events.push(PeerEvent::Failed { rank, report });
            }
            _ => {}
        }
    }

    fn members_of(&self, communicator: CommunicatorId, now: Duration) -> Vec<Member> {
        let mut members = Vec::new();
        for (process, other) in &self.others {
            let silent = if *process == self.own { Duration::ZERO } else { now.saturating_sub(other.heard) };
            let of_it = other.memberships.iter().filter(|(rank, _)| rank.communicator == communicator);
            members.extend(of_it.map(|(rank, it)| Member {
                departure: other.departure.clone(),
                ..member(*rank, *process, it, silent, now)
            }));
        }
        members.sort_by_key(|member| member.rank);
        members
    }
}

fn member(rank: RankId, process: ProcessId, it: &Membership, silent: Duration, now: Duration) -> Member {
    Member {
        rank: rank.rank,
        process,
        progress: it.progress,
        still_ms: now.saturating_sub(it.moved).as_millis() as u64,
        silent_ms: silent.as_millis() as u64,
        departure: None,
        has_left: it.has_left,
        failure: it.failure.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::Index;
    use std::collections::{BTreeSet, VecDeque};

    /// A process and what is on the way to it from the hub, and from it to the hub.
    struct Process {
        endpoint: Endpoint,
        to_hub: VecDeque<Message>,
        from_hub: VecDeque<Message>,
        is_dead: bool,
        is_stopped: bool,
        joined: BTreeSet<CommunicatorId>,
        left: BTreeSet<CommunicatorId>,
        failed: BTreeSet<CommunicatorId>,
        events: Vec<PeerEvent>,
    }

    struct Job {
        processes: Vec<Process>,
        now: Duration,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Join(Index, u8),
        Leave(Index, u8),
        Fail(Index, u8),
        Die(Index),
        Stop(Index),
        Continue(Index),
        Deliver(Index, u8),
        Tick(u16),
    }

    fn broken() -> FailureReport {
        FailureReport { text: "it broke".to_owned(), first_rank: None }
    }

    fn step() -> impl Strategy<Value = Step> {
        let one = || any::<Index>();
        prop_oneof![
            6 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Join(process, id)),
            2 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Leave(process, id)),
            1 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Fail(process, id)),
            1 => one().prop_map(Step::Die),
            1 => one().prop_map(Step::Stop),
            1 => one().prop_map(Step::Continue),
            12 => (one(), 1..4_u8).prop_map(|(process, count)| Step::Deliver(process, count)),
            3 => (1..2000_u16).prop_map(Step::Tick),
        ]
    }

    impl Job {
        fn new(count: u32) -> Self {
            let process = |own| Process {
                endpoint: Endpoint::new(ProcessId(own), count, Duration::ZERO),
                to_hub: VecDeque::new(),
                from_hub: VecDeque::new(),
                is_dead: false,
                is_stopped: false,
                joined: BTreeSet::new(),
                left: BTreeSet::new(),
                failed: BTreeSet::new(),
                events: Vec::new(),
            };
            Job { processes: (0..count).map(process).collect(), now: Duration::ZERO }
        }

        /// Puts what was said on the way.
        fn collect(&mut self) {
            for at in 0..self.processes.len() {
                for (to, message) in self.processes[at].endpoint.take_outbox() {
                    assert!(at == 0 || to == HUB, "only the hub talks to others");
                    if at == 0 {
                        self.processes[to.0 as usize].from_hub.push_back(message);
                    } else {
                        self.processes[at].to_hub.push_back(message);
                    }
                }
                let events = self.processes[at].endpoint.take_events();
                self.processes[at].events.extend(events);
            }
        }

        /// One message each way between a process and the hub, or that one of them sees that the other is gone.
        fn deliver(&mut self, at: usize) {
            let now = self.now;
            let acts = |process: &Process| !process.is_dead && !process.is_stopped;
            if acts(&self.processes[0]) {
                match self.processes[at].to_hub.pop_front() {
                    Some(message) => self.processes[0].endpoint.receive(ProcessId(at as u32), message, now),
                    None if self.processes[at].is_dead => {
                        self.processes[0].endpoint.lose(ProcessId(at as u32), Departure::Closed, now);
                    }
                    None => {}
                }
            }
            self.collect();
            if acts(&self.processes[at]) {
                match self.processes[at].from_hub.pop_front() {
                    Some(message) => self.processes[at].endpoint.receive(HUB, message, now),
                    None if self.processes[0].is_dead => {
                        self.processes[at].endpoint.lose(HUB, Departure::Closed, now);
                    }
                    None => {}
                }
            }
            self.collect();
        }

        fn carry_out(&mut self, step: &Step) {
            let count = self.processes.len();
            let id = |number: u8| CommunicatorId(u64::from(number));
            let of = |number: u8, at: usize| RankId { communicator: id(number), rank: at as u32 };
            let acts = |job: &Job, at: usize| !job.processes[at].is_dead && !job.processes[at].is_stopped;
            match *step {
                Step::Join(process, number) => {
                    let at = process.index(count);
                    if acts(self, at) && self.processes[at].joined.insert(id(number)) {
                        self.processes[at].endpoint.join(of(number, at));
                    }
                }
                Step::Leave(process, number) => {
                    let at = process.index(count);
                    if acts(self, at) && self.processes[at].joined.contains(&id(number)) {
                        self.processes[at].left.insert(id(number));
                        self.processes[at].endpoint.leave(of(number, at));
                    }
                }
                Step::Fail(process, number) => {
                    let at = process.index(count);
                    let process = &mut self.processes[at];
                    if !process.is_dead
                        && !process.is_stopped
                        && process.joined.contains(&id(number))
                        && !process.left.contains(&id(number))
                    {
                        process.failed.insert(id(number));
                        process.endpoint.fail(of(number, at), &broken());
                    }
                }
                Step::Die(process) => self.processes[process.index(count)].is_dead = true,
                Step::Stop(process) => self.processes[process.index(count)].is_stopped = true,
                Step::Continue(process) => self.processes[process.index(count)].is_stopped = false,
                Step::Deliver(process, messages) => {
                    let at = process.index(count);
                    if at != 0 {
                        (0..messages).for_each(|_| self.deliver(at));
                    }
                }
                Step::Tick(millis) => {
                    self.now += Duration::from_millis(millis.into());
                    for process in self.processes.iter_mut().filter(|it| !it.is_dead && !it.is_stopped) {
                        process.endpoint.tick(self.now);
                    }
                }
            }
            self.collect();
        }

        /// Everybody goes on, and everything arrives.
        fn settle(&mut self) {
            self.processes.iter_mut().for_each(|process| process.is_stopped = false);
            for _ in 0..200 {
                for at in 1..self.processes.len() {
                    self.deliver(at);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn every_death_and_failure_is_told_to_all_whom_it_concerns_and_nothing_else(
            count in 2..6_u32,
            steps in prop::collection::vec(step(), 0..80),
        ) {
            let mut job = Job::new(count);
            steps.iter().for_each(|step| job.carry_out(step));
            job.settle();
            let hub_is_dead = job.processes[0].is_dead;
            for (at, process) in job.processes.iter().enumerate() {
                // Nothing that did not happen.
                for event in &process.events {
                    match event {
                        PeerEvent::Gone { rank: RankId { communicator, rank }, .. } => {
                            let other = &job.processes[*rank as usize];
                            prop_assert!(other.is_dead && other.joined.contains(communicator), "{event:?} at {at}");
                            prop_assert!(process.joined.contains(communicator));
                        }
                        PeerEvent::Failed { rank: RankId { communicator, rank }, .. } => {
                            prop_assert!(job.processes[*rank as usize].failed.contains(communicator));
                            prop_assert!(process.joined.contains(communicator));
                        }
                        PeerEvent::ProcessGone { process: gone, .. } => {
                            prop_assert!(job.processes[gone.0 as usize].is_dead, "{event:?} at {at}");
                        }
                    }
                }
                if process.is_dead {
                    continue;
                }
                // Everything that did. Without the hub, what became of the hub's own rank.
                let is_heard_of = |rank: usize| rank != at && (rank == 0 || !hub_is_dead);
                for (rank, other) in job.processes.iter().enumerate().filter(|(rank, _)| is_heard_of(*rank)) {
                    for id in other.joined.intersection(&process.joined) {
                        let is_in = !process.left.contains(id) && !process.failed.contains(id);
                        if !is_in || other.left.contains(id) {
                            continue;
                        }
                        let is_told = process.events.iter().any(|event| match event {
                            PeerEvent::Gone { rank: of, .. } | PeerEvent::Failed { rank: of, .. } => {
                                (of.communicator, of.rank as usize) == (*id, rank)
                            }
                            PeerEvent::ProcessGone { .. } => false,
                        });
                        prop_assert_eq!(is_told, other.is_dead || other.failed.contains(id), "{} of {} at {}", rank, id, at);
                    }
                }
            }
            // Who loses the hub learns of it.
            for process in job.processes.iter().skip(1).filter(|it| hub_is_dead && !it.is_dead) {
                let gone = |event: &PeerEvent| matches!(event, PeerEvent::ProcessGone { process: HUB, .. });
                prop_assert_eq!(process.events.iter().filter(|event| gone(event)).count(), 1);
            }
        }
    }

    #[test]
    fn a_process_that_is_stopped_is_silent_and_one_that_computes_is_not() {
        let mut job = Job::new(3);
        let id = CommunicatorId(7);
        for (at, process) in job.processes.iter_mut().enumerate() {
            let rank = RankId { communicator: id, rank: at as u32 };
            process.endpoint.join(rank);
            process.endpoint.set_progress(rank, Progress { submitted: at as u64, finished: 0 });
        }
        job.processes[2].is_stopped = true;
        for _ in 0..20 {
            job.carry_out(&Step::Tick(300));
            (0..8).for_each(|_| (1..3).for_each(|at| job.deliver(at)));
        }
        job.processes[1].endpoint.ask(id);
        job.collect();
        (0..8).for_each(|_| job.deliver(1));
        assert_eq!(job.processes[1].endpoint.told_at(id, job.now), Some(job.now));
        let members = job.processes[1].endpoint.members(id, job.now);
        assert!(members.iter().skip(1).all(|member| member.still_ms >= 5_000), "nobody moves: {members:?}");
        assert_eq!(members.iter().map(|member| member.rank).collect::<Vec<_>>(), [0, 1, 2]);
        assert!(members[0].silent_ms == 0 && members[1].silent_ms <= 300, "{members:?}");
        assert!(members[2].silent_ms >= 5_000, "{members:?}");
        assert_eq!(members[1].progress.submitted, 1);
        // The hub is stopped as well: nobody has to say so.
        let members = job.processes[1].endpoint.members(id, job.now + Duration::from_secs(9));
        assert!(members[0].silent_ms >= 9_000 && members[1].silent_ms == 0, "{members:?}");
    }

    #[test]
    fn who_joins_after_the_hub_is_gone_misses_it() {
        let of = |rank| RankId { communicator: CommunicatorId(7), rank };
        let mut endpoint = Endpoint::new(ProcessId(1), 2, Duration::ZERO);
        endpoint.receive(HUB, Message::Joined { rank: of(0) }, Duration::ZERO);
        endpoint.lose(HUB, Departure::Closed, Duration::ZERO);
        endpoint.take_events();
        endpoint.join(of(1));
        let gone = PeerEvent::Gone { rank: of(0), departure: Departure::Closed, after: None };
        assert_eq!(endpoint.take_events(), [gone]);
    }

    #[test]
    fn who_joins_after_the_hub_failed_learns_of_it_without_asking() {
        let of = |rank| RankId { communicator: CommunicatorId(7), rank };
        let mut endpoint = Endpoint::new(ProcessId(1), 2, Duration::ZERO);
        endpoint.receive(HUB, Message::Joined { rank: of(0) }, Duration::ZERO);
        endpoint.receive(HUB, Message::RankFailed { rank: of(0), report: broken() }, Duration::ZERO);
        endpoint.join(of(1));
        assert_eq!(endpoint.take_events(), [PeerEvent::Failed { rank: of(0), report: broken() }]);
    }

    #[test]
    fn ranks_of_one_process_learn_of_each_other() {
        let of = |rank| RankId { communicator: CommunicatorId(7), rank };
        let mut endpoint = Endpoint::new(HUB, 1, Duration::ZERO);
        (0..3).for_each(|rank| endpoint.join(of(rank)));
        endpoint.leave(of(2));
        endpoint.set_progress(of(1), Progress { submitted: 4, finished: 3 });
        endpoint.tick(Duration::from_secs(1));
        let members = endpoint.members(CommunicatorId(7), Duration::from_secs(1));
        assert!(members[2].has_left && members[1].progress.submitted == 4, "{members:?}");
        endpoint.join(of(9));
        endpoint.withdraw(of(9));
        assert_eq!(endpoint.members(CommunicatorId(7), Duration::from_secs(1)).len(), 3);
        endpoint.fail(of(0), &broken());
        assert_eq!(endpoint.take_events(), [PeerEvent::Failed { rank: of(0), report: broken() }]);
        endpoint.fail(of(1), &broken());
        assert_eq!(endpoint.take_events(), [], "nobody is left to be told");
        assert!(!endpoint.is_over());
        (0..2).for_each(|rank| endpoint.leave(of(rank)));
        assert!(endpoint.is_over());
    }
}
