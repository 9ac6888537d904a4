//! Generated jobs: processes join, leave, withdraw, fail, die, stop and resume while messages are in transit.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::{BTreeSet, VecDeque};

/// A process, with the messages in transit to and from the hub.
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
    Withdraw(Index, u8),
    Fail(Index, u8),
    Die(Index),
    Stop(Index),
    Continue(Index),
    Deliver(Index, u8),
    Tick(u16),
}

fn broken() -> FailureReport {
    FailureReport { text: "it broke".to_owned(), first_rank: None, stopped_ms: None }
}

fn step() -> impl Strategy<Value = Step> {
    let one = || any::<Index>();
    prop_oneof![
        6 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Join(process, id)),
        2 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Leave(process, id)),
        1 => (one(), 0..3_u8).prop_map(|(process, id)| Step::Withdraw(process, id)),
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

    /// Puts the outgoing messages of all processes in transit, and collects their events.
    fn collect(&mut self) {
        while self.processes[0].endpoint.answer(self.now) {}
        for at in 0..self.processes.len() {
            for (to, message) in self.processes[at].endpoint.take_outbox() {
                assert!(at == 0 || to == HUB, "only the hub sends to other processes");
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

    /// Delivers one message each way between a process and the hub. If one side is dead, the other side notices it after the last message.
    fn deliver(&mut self, at: usize) {
        let now = self.now;
        let acts = |process: &Process| !process.is_dead && !process.is_stopped;
        if acts(&self.processes[0]) {
            match self.processes[at].to_hub.pop_front() {
                Some(message) => {
                    self.processes[0]
                        .endpoint
                        .receive(ProcessId(at as u32), message, now)
                        .expect("the message should be within its bounds");
                }
                None if self.processes[at].is_dead => {
                    self.processes[0].endpoint.lose(ProcessId(at as u32), &Departure::Closed, now);
                }
                None => {}
            }
        }
        self.collect();
        if acts(&self.processes[at]) {
            match self.processes[at].from_hub.pop_front() {
                Some(message) => self.processes[at]
                    .endpoint
                    .receive(HUB, message, now)
                    .expect("the message should be within its bounds"),
                None if self.processes[0].is_dead => {
                    self.processes[at].endpoint.lose(HUB, &Departure::Closed, now);
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
                    self.processes[at].endpoint.join(of(number, at), self.now);
                }
            }
            Step::Leave(process, number) => {
                let at = process.index(count);
                if acts(self, at) && self.processes[at].joined.contains(&id(number)) {
                    self.processes[at].left.insert(id(number));
                    self.processes[at].endpoint.leave(of(number, at), self.now);
                }
            }
            Step::Withdraw(process, number) => {
                let at = process.index(count);
                let (acts, now) = (acts(self, at), self.now);
                let process = &mut self.processes[at];
                if acts && process.joined.contains(&id(number)) {
                    // A failure stays.
                    if !process.failed.contains(&id(number)) {
                        process.left.insert(id(number));
                    }
                    process.endpoint.withdraw(of(number, at), now);
                }
            }
            Step::Fail(process, number) => {
                let at = process.index(count);
                let (process, now) = (&mut self.processes[at], self.now);
                if !process.is_dead
                    && !process.is_stopped
                    && process.joined.contains(&id(number))
                    && !process.left.contains(&id(number))
                {
                    process.failed.insert(id(number));
                    process.endpoint.fail(of(number, at), &broken(), now);
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

    /// Resumes every process and delivers every message.
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
    fn every_death_and_failure_is_reported_exactly_to_the_processes_concerned(
        count in 2..6_u32,
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let mut job = Job::new(count);
        steps.iter().for_each(|step| job.carry_out(step));
        job.settle();
        let hub_is_dead = job.processes[0].is_dead;
        for (at, process) in job.processes.iter().enumerate() {
            // Every reported event happened.
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
                    PeerEvent::NeverJoined { process: other, .. } => {
                        // Its last messages may not have arrived.
                        prop_assert!(job.processes[other.0 as usize].is_dead, "{event:?} at {at}");
                    }
                }
            }
            if process.is_dead {
                continue;
            }
            // Every event that happened is reported. Without the hub, only the events of the hub's own rank are.
            let is_heard_of = |rank: usize| rank != at && (rank == 0 || !hub_is_dead);
            for (rank, other) in job.processes.iter().enumerate().filter(|(rank, _)| is_heard_of(*rank)) {
                if other.is_dead && other.joined.is_empty() && !process.joined.is_empty() {
                    let is_of_it = |event: &PeerEvent| {
                        matches!(event, PeerEvent::NeverJoined { process, .. } if process.0 as usize == rank)
                    };
                    prop_assert!(process.events.iter().any(is_of_it), "{} at {}", rank, at);
                }
                for id in other.joined.intersection(&process.joined) {
                    let is_in = !process.left.contains(id) && !process.failed.contains(id);
                    if !is_in || other.left.contains(id) {
                        continue;
                    }
                    let is_of_it = |event: &&PeerEvent| {
                        let of = match event {
                            PeerEvent::Gone { rank, .. } | PeerEvent::Failed { rank, .. } => *rank,
                            PeerEvent::NeverJoined { .. } => return false,
                        };
                        (of.communicator, of.rank as usize) == (*id, rank)
                    };
                    let count = process.events.iter().filter(is_of_it).count();
                    let is_over = other.is_dead || other.failed.contains(id);
                    prop_assert_eq!(count > 0, is_over, "{} of {} at {}", rank, id, at);
                }
            }
        }
    }
}

#[test]
fn a_process_that_is_stopped_is_silent_and_one_that_computes_is_not() {
    let mut job = Job::new(3);
    let id = CommunicatorId(7);
    for (at, process) in job.processes.iter_mut().enumerate() {
        let rank = RankId { communicator: id, rank: at as u32 };
        process.endpoint.join(rank, Duration::ZERO);
        process.endpoint.set_progress(
            rank,
            Progress { submitted: at as u64, finished: 0, is_destroying: false },
            Duration::ZERO,
        );
    }
    job.processes[2].is_stopped = true;
    for _ in 0..20 {
        job.carry_out(&Step::Tick(300));
        (0..8).for_each(|_| (1..3).for_each(|at| job.deliver(at)));
    }
    job.processes[1].endpoint.ask(id, job.now);
    assert!(!job.processes[1].endpoint.has_answer(id, job.now, job.now));
    job.collect();
    (0..8).for_each(|_| job.deliver(1));
    assert!(job.processes[1].endpoint.has_answer(id, job.now, job.now));
    let members = job.processes[1].endpoint.members(id, job.now);
    assert!(members.iter().all(|member| member.still_ms >= 5_000), "no rank progresses: {members:?}");
    assert_eq!(members.iter().map(|member| member.rank).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(members[0].silent_ms == 0 && members[1].silent_ms <= 300, "{members:?}");
    assert!(members[2].silent_ms >= 5_000, "{members:?}");
    assert_eq!(members[1].progress.submitted, 1);
}

#[test]
fn a_stopped_hub_is_reported_without_its_answer() {
    let (id, of) = (CommunicatorId(7), |rank| RankId { communicator: CommunicatorId(7), rank });
    let mut job = Job::new(3);
    job.processes.iter_mut().zip(0..).for_each(|(process, rank)| process.endpoint.join(of(rank), Duration::ZERO));
    job.collect();
    job.settle();
    job.carry_out(&Step::Tick(2_000));
    // The hub's beat reports its progress and the time of the last change.
    let progress = Progress { submitted: 42, finished: 41, is_destroying: false };
    job.processes[0].endpoint.set_progress(of(0), progress, job.now - Duration::from_millis(200));
    job.carry_out(&Step::Tick(300));
    (0..8).for_each(|_| (1..3).for_each(|at| job.deliver(at)));
    job.processes[0].is_stopped = true;
    job.now += Duration::from_millis(600);
    let (now, endpoint) = (job.now, &mut job.processes[1].endpoint);
    endpoint.ask(id, now);
    assert!(!endpoint.has_answer(id, now, now), "the answer may still arrive");
    let later = now + Duration::from_secs(1);
    assert!(endpoint.has_answer(id, now, later), "the hub was silent for a second");
    let members = endpoint.members(id, later);
    assert_eq!(
        members.iter().map(|member| member.rank).collect::<Vec<_>>(),
        [0, 1],
        "other ranks are unknown without the hub"
    );
    assert_eq!((members[0].progress, members[0].still_ms, members[0].silent_ms), (progress, 2_100, 1_600));
    // An old answer of the hub expires.
    let others = vec![Member { rank: 2, ..members[0].clone() }];
    endpoint
        .receive(HUB, Message::Told { communicator: id, members: others }, later)
        .expect("the message should be within its bounds");
    assert_eq!(endpoint.members(id, later).len(), 3);
    assert_eq!(endpoint.members(id, later + Duration::from_secs(2)).len(), 2);
    endpoint.lose(HUB, &Departure::Closed, later);
    assert!(endpoint.has_answer(id, later, later));
}

#[test]
fn the_progress_of_a_rank_that_left_is_known() {
    let of = |rank| RankId { communicator: CommunicatorId(7), rank };
    let mut job = Job::new(3);
    job.processes.iter_mut().zip(0..).for_each(|(process, rank)| process.endpoint.join(of(rank), Duration::ZERO));
    job.collect();
    job.settle();
    let progress = Progress { submitted: 6, finished: 6, is_destroying: false };
    for (process, rank) in job.processes[..2].iter_mut().zip(0..) {
        process.endpoint.set_progress(of(rank), progress, Duration::ZERO);
        process.endpoint.leave(of(rank), Duration::ZERO);
    }
    job.processes[2].endpoint.ask(CommunicatorId(7), Duration::ZERO);
    job.collect();
    job.settle();
    let of_others = job.processes[2].endpoint.members(CommunicatorId(7), job.now);
    let of_all = job.processes[0].endpoint.members(CommunicatorId(7), job.now);
    for left in of_others[..2].iter().chain(&of_all[..2]) {
        assert!(left.has_left && left.progress == progress, "{left:?}");
    }
}

/// Whichever rank destroys its communicator before a collective of the others, and whichever of both is known first, each other rank is
/// notified.
#[test]
fn a_rank_that_leaves_before_a_collective_of_the_others_is_reported() {
    let of = |rank: usize| RankId { communicator: CommunicatorId(7), rank: rank as u32 };
    let progress = |submitted, is_destroying| Progress { submitted, finished: submitted, is_destroying };
    for (leaver, leaves_first) in (0..3).flat_map(|leaver| [(leaver, false), (leaver, true)]) {
        for ahead in [5, 6] {
            let mut job = Job::new(3);
            for (rank, process) in job.processes.iter_mut().enumerate() {
                process.endpoint.join(of(rank), Duration::ZERO);
            }
            job.collect();
            job.settle();
            let leave = |job: &mut Job| {
                let now = job.now;
                let endpoint = &mut job.processes[leaver].endpoint;
                endpoint.set_progress(of(leaver), progress(5, true), now);
                endpoint.leave(of(leaver), now);
            };
            let submit = |job: &mut Job| {
                for rank in (0..3).filter(|rank| *rank != leaver) {
                    let now = job.now;
                    job.processes[rank].endpoint.set_progress(of(rank), progress(ahead, false), now);
                }
            };
            let steps: [&dyn Fn(&mut Job); 2] = if leaves_first { [&leave, &submit] } else { [&submit, &leave] };
            for step in steps {
                step(&mut job);
                job.collect();
                for _ in 0..3 {
                    job.carry_out(&Step::Tick(300));
                    job.settle();
                }
            }
            for rank in (0..3).filter(|rank| *rank != leaver) {
                let endpoint = &mut job.processes[rank].endpoint;
                let mut events = endpoint.take_events();
                events.extend(std::mem::take(&mut job.processes[rank].events));
                let named = |event: &PeerEvent| matches!(event, PeerEvent::Failed { rank, .. } if *rank == of(leaver));
                // It may learn it twice: from its own progress, and from the hub.
                assert_eq!(events.iter().any(named), ahead > 5, "{leaver} {leaves_first} {ahead} {rank}: {events:?}");
            }
        }
    }
}

#[test]
fn a_rank_that_joins_after_the_hub_died_is_notified() {
    let of = |rank| RankId { communicator: CommunicatorId(7), rank };
    let mut endpoint = Endpoint::new(ProcessId(1), 2, Duration::ZERO);
    endpoint
        .receive(HUB, Message::Joined { rank: of(0) }, Duration::ZERO)
        .expect("the message should be within its bounds");
    endpoint.lose(HUB, &Departure::Closed, Duration::ZERO);
    endpoint.take_events();
    endpoint.join(of(1), Duration::ZERO);
    let gone = PeerEvent::Gone { rank: of(0), departure: Departure::Closed, after: None };
    assert_eq!(endpoint.take_events(), [gone]);
}

#[test]
fn a_rank_that_joins_after_the_hub_failed_is_notified() {
    let of = |rank| RankId { communicator: CommunicatorId(7), rank };
    let mut endpoint = Endpoint::new(ProcessId(1), 2, Duration::ZERO);
    endpoint
        .receive(HUB, Message::Joined { rank: of(0) }, Duration::ZERO)
        .expect("the message should be within its bounds");
    endpoint
        .receive(HUB, Message::RankFailed { rank: of(0), report: broken() }, Duration::ZERO)
        .expect("the message should be within its bounds");
    endpoint.join(of(1), Duration::ZERO);
    assert_eq!(endpoint.take_events(), [PeerEvent::Failed { rank: of(0), report: broken() }]);
}

#[test]
fn ranks_of_one_process_learn_of_each_other() {
    let of = |rank| RankId { communicator: CommunicatorId(7), rank };
    let mut endpoint = Endpoint::new(HUB, 1, Duration::ZERO);
    let (begun, later) = (Duration::ZERO, Duration::from_secs(1));
    (0..3).for_each(|rank| endpoint.join(of(rank), begun));
    endpoint.leave(of(2), begun);
    endpoint.set_progress(of(1), Progress { submitted: 4, finished: 3, is_destroying: false }, later);
    let members = endpoint.members(CommunicatorId(7), later);
    assert!(members[2].has_left && members[1].progress.submitted == 4, "{members:?}");
    assert!(
        members[0].still_ms == 1_000 && members[1].still_ms == 0,
        "progress is current without a beat: {members:?}"
    );
    endpoint.join(of(9), later);
    endpoint.withdraw(of(9), later);
    assert_eq!(endpoint.members(CommunicatorId(7), later).len(), 3);
    endpoint.fail(of(0), &broken(), later);
    assert_eq!(endpoint.take_events(), [PeerEvent::Failed { rank: of(0), report: broken() }]);
    endpoint.fail(of(1), &broken(), later);
    assert_eq!(endpoint.take_events(), [], "no rank is left to notify");
    assert!(!endpoint.is_over());
    (0..2).for_each(|rank| endpoint.leave(of(rank), later));
    assert!(endpoint.is_over());
}

/// Each rank of a job that fails reports it. The reports of all to all others grew with the square of the number of ranks.
#[test]
fn a_process_hears_of_the_first_failures_and_not_of_all() {
    let count = 4 * FAILURES_TOLD;
    let mut job = Job::new(count as u32 + 1);
    let id = CommunicatorId(7);
    let rank = |at: usize| RankId { communicator: id, rank: at as u32 };
    (0..=count).for_each(|at| job.processes[at].endpoint.join(rank(at), Duration::ZERO));
    job.collect();
    job.settle();
    (1..count).for_each(|at| job.processes[at].endpoint.fail(rank(at), &broken(), Duration::ZERO));
    job.collect();
    job.settle();
    let heard = |job: &Job, at: usize| {
        job.processes[at].events.iter().filter(|event| matches!(event, PeerEvent::Failed { .. })).count()
    };
    assert_eq!(heard(&job, count), FAILURES_TOLD);
    assert_eq!(heard(&job, 0), count - 1, "the hub hears of all");
    // Process 0 sends what others need once it is gone.
    job.processes[0].endpoint.fail(rank(0), &broken(), Duration::ZERO);
    job.collect();
    job.settle();
    assert_eq!(heard(&job, count), FAILURES_TOLD + 1);
}
