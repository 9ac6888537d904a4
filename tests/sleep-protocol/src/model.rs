//! The state space: the states of a job, and the steps and faults that lead from one state to the next.

use crate::flaw::Flaw;
use crate::job::{COMMS_MAX, Faults, Job, RANKS_MAX};
use crate::meeting::Meetings;
use crate::properties;
use crate::protocol::Actor;
use crate::rank::{Health, Life, Rank, Side};
use crate::step::{Comm, Op, Outcome, Step};
use stateright::{Model, Property};

/// A state of the whole job.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// The ranks. Entries beyond the job's ranks are dead.
    pub ranks: [Rank; RANKS_MAX],
    /// The collectives of each communicator.
    pub meetings: [Meetings; COMMS_MAX],
    /// Faults that may still happen.
    pub left: Faults,
}

/// A possible action. The first field is the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The rank takes its next step.
    Step(usize),
    /// The collective that the rank waits in completes.
    Hear(usize),
    /// The rank finds that the communicator that it waits on has ended.
    Fail(usize),
    /// The deadline of the rank's wait expires, and the rank ends the communicator.
    Deadline(usize),
    /// The rank's watchdog reports that another rank is gone or has ended the communicator, and ends it here.
    Notified(usize, Comm),
    /// NCCL returns from a lost communicator of the rank.
    Aborted(usize, Comm),
    /// The rank's kernels do not finish within the deadline.
    Delay(usize),
    /// The rank's device is out of memory.
    Refuse(usize),
    /// The rank's device has no room for the suspended communicator, and the op returns before it calls NCCL. The program
    /// makes room, and calls the op again.
    MakeRoom(usize),
    /// The rank's program omits an op.
    Skip(usize),
    /// A communicator ends on the rank, because the program aborts it or NCCL fails.
    Break(usize, Comm),
    /// The rank's process ends.
    Die(usize),
    /// The rank's process stops.
    Stop(usize),
}

impl Action {
    /// Returns the rank that the action happens on.
    pub fn rank(self) -> usize {
        match self {
            Action::Step(rank) | Action::Hear(rank) | Action::Fail(rank) | Action::Deadline(rank) => rank,
            Action::Notified(rank, _) | Action::Aborted(rank, _) | Action::Break(rank, _) => rank,
            Action::Delay(rank)
            | Action::Refuse(rank)
            | Action::MakeRoom(rank)
            | Action::Skip(rank)
            | Action::Die(rank)
            | Action::Stop(rank) => rank,
        }
    }
}

impl State {
    fn running(&self) -> impl Iterator<Item = (usize, &Rank)> {
        self.ranks.iter().enumerate().filter(|(_, rank)| rank.life == Life::Running)
    }

    /// Returns `true` if the watchdog can report a failure of a communicator.
    fn has_news(&self, job: &Job, comm: Comm) -> bool {
        let is_lost = |rank: usize| self.ranks[rank].life == Life::Dead || !self.ranks[rank].sides[comm].is_ready();
        job.members(comm).any(is_lost)
    }

    /// Returns a number that increases with every action. It proves that every run ends, and that a state without a
    /// next action is the end of every run that reaches it. Otherwise the checker's *eventually* would not be exact.
    fn progress(&self, job: &Job) -> usize {
        let Faults { deaths, stops, breaks, refusals, delays, skips } = self.left;
        let left = usize::from(deaths + stops + breaks + refusals + delays + skips);
        let spent = 1_000_000 * (1000 - left);
        let health = |side: &Side| side.health as usize;
        let rank = |(number, rank): (usize, &Rank)| {
            let steps = 2 * place(job, number, rank) + usize::from(rank.is_waiting);
            1000 * usize::from(rank.op) + steps + rank.sides.iter().map(health).sum::<usize>()
        };
        spent + self.ranks.iter().enumerate().map(rank).sum::<usize>()
    }
}

/// Returns the progress of a rank within its op.
fn place(job: &Job, number: usize, rank: &Rank) -> usize {
    let of_window = |at| job.places(rank.op, number).position(|place| place == at).unwrap_or(0);
    let is_sync = job.program.get(usize::from(rank.op)) == Some(&Op::Sync);
    match rank.step {
        Step::Agree(comm) if is_sync => 10 * job.comms_of(rank.op, number).position(|it| it == comm).unwrap_or(0),
        Step::Register(comm, segment) if is_sync => {
            10 * job.comms_of(rank.op, number).position(|it| it == comm).unwrap_or(0) + 1 + segment
        }
        Step::Resume(comm) if comm == job.over(rank.op) => 0,
        Step::Done => 0,
        Step::Agree(_) => 1,
        Step::Quiesce | Step::Remap => 2,
        Step::Decide | Step::DecideAsleep => 3,
        Step::Resume(comm) => 4 + 2 * of_window((comm, 0)),
        Step::Deregister(comm, segment) | Step::Register(comm, segment) => 5 + 2 * of_window((comm, segment)),
        Step::Unmap => 50,
        Step::Check => 51,
        Step::Suspend(comm) => 52 + job.suspensions(rank.op, number).position(|it| it == comm).unwrap_or(0),
    }
}

impl Job {
    /// Adds the possible steps of a rank and of its watchdog. None of them can be delayed indefinitely.
    fn steps(&self, state: &State, number: usize, rank: &Rank, actions: &mut Vec<Action>) {
        if rank.is_waiting {
            let comm = self.comm_of(rank);
            if !rank.sides[comm].is_ready() {
                actions.push(Action::Fail(number));
            } else {
                if state.meetings[comm].is_complete(number, self.members(comm)) {
                    actions.push(Action::Hear(number));
                }
                if self.has_deadlines && !self.has(Flaw::NoDeadline) {
                    actions.push(Action::Deadline(number));
                }
            }
        } else if rank.step != Step::Done {
            actions.push(Action::Step(number));
        }
        let comms = (0..self.comms.len()).filter(|comm| self.is_member(*comm, number) && rank.sides[*comm].is_ready());
        actions.extend(comms.filter(|comm| state.has_news(self, *comm)).map(|comm| Action::Notified(number, comm)));
    }

    /// Adds the possible faults of a rank.
    fn faults(&self, state: &State, number: usize, rank: &Rank, actions: &mut Vec<Action>) {
        let lost = (0..self.comms.len()).filter(|comm| rank.sides[*comm].health == Health::Lost);
        actions.extend(lost.map(|comm| Action::Aborted(number, comm)));
        let Faults { deaths, stops, breaks, refusals, delays, skips } = state.left;
        if refusals > 0 && rank.step == Step::Remap {
            actions.push(Action::Refuse(number));
        }
        if refusals > 0 && matches!(rank.step, Step::Resume(_)) && self.is_between_ops(rank) {
            actions.push(Action::MakeRoom(number));
        }
        if delays > 0 && rank.step == Step::Quiesce && rank.ready().any(|(_, side)| side.is_busy) {
            actions.push(Action::Delay(number));
        }
        if skips > 0 && rank.step != Step::Done && self.is_between_ops(rank) {
            actions.push(Action::Skip(number));
        }
        if breaks > 0 {
            actions.extend(rank.ready().map(|(comm, _)| Action::Break(number, comm)));
        }
        if deaths > 0 {
            actions.push(Action::Die(number));
        }
        if stops > 0 {
            actions.push(Action::Stop(number));
        }
    }
}

impl Model for Job {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![self.start()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, rank) in state.running() {
            self.steps(state, number, rank, actions);
        }
        if !actions.is_empty() {
            // In a deadlocked state, a fault would only hide that a rank waits indefinitely.
            state.running().for_each(|(number, rank)| self.faults(state, number, rank, actions));
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Step(rank) => Actor::new(self, &mut state, rank).step(),
            Action::Hear(rank) => Actor::new(self, &mut state, rank).hear(),
            Action::Fail(rank) => Actor::new(self, &mut state, rank).fail(Outcome::Broken),
            Action::Deadline(rank) => {
                let comm = self.comm_of(&state.ranks[rank]);
                Actor::new(self, &mut state, rank).end(comm);
            }
            Action::Notified(rank, comm) => Actor::new(self, &mut state, rank).end(comm),
            Action::Aborted(rank, comm) => state.ranks[rank].sides[comm] = Side::ABORTED,
            Action::Delay(rank) => {
                state.left.delays -= 1;
                Actor::new(self, &mut state, rank).delay();
            }
            Action::Refuse(rank) => {
                state.left.refusals -= 1;
                Actor::new(self, &mut state, rank).refuse();
            }
            // A recovery is no op, and changes nothing that other ranks can observe.
            Action::MakeRoom(_) => state.left.refusals -= 1,
            Action::Skip(rank) => {
                state.left.skips -= 1;
                Actor::new(self, &mut state, rank).skip();
            }
            Action::Break(rank, comm) => {
                state.left.breaks -= 1;
                Actor::new(self, &mut state, rank).end(comm);
            }
            Action::Die(rank) => {
                state.left.deaths -= 1;
                state.ranks[rank] = Rank::DEAD;
            }
            Action::Stop(rank) => {
                state.left.stops -= 1;
                state.ranks[rank].life = Life::Stopped;
            }
        }
        let State { ranks, meetings, .. } = &mut state;
        for (comm, meetings) in meetings.iter_mut().enumerate() {
            meetings.forget(|rank| ranks[rank].life != Life::Running || !ranks[rank].sides[comm].is_ready());
        }
        assert!(
            self.flaw.is_some() || state.progress(self) > before.progress(self),
            "{action:?} makes no progress: {before:?}"
        );
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}
