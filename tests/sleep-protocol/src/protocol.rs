//! What a rank does in each step. The rules for failures are few:
//!
//! 1. Before [`Step::Decide`] is heard nothing was done that other ranks see. A rank that does not hear it does not go on: a sleep
//!    leaves the pool awake, a wake gives the memory back and leaves it asleep.
//! 2. After it, a sleep needs no other rank, and a wake keeps its memory whatever happens: another rank may be awake already.
//! 3. A rank that leaves an op while others may go on with it ends the communicators on which they would miss it: all of the op
//!    where it does not hear the decision of a sleep, and those that it has not come to where a wake breaks after its decision.
//!    Then no other rank uses windows that have no counterpart, and none waits for it.
//! 4. A communicator other than the one that the ranks agree over takes nothing else along: the wake goes on without it, on all ranks.

use crate::flaw::Flaw;
use crate::job::Job;
use crate::meeting::Call;
use crate::model::State;
use crate::rank::{Health, Rank, Side};
use crate::step::{Comm, Op, Outcome, Phase, Segment, Step};

/// A rank that acts.
pub struct Actor<'a> {
    job: &'a Job,
    state: &'a mut State,
    number: usize,
}

impl<'a> Actor<'a> {
    /// The rank with this number.
    pub fn new(job: &'a Job, state: &'a mut State, number: usize) -> Self {
        Actor { job, state, number }
    }

    fn rank(&mut self) -> &mut Rank {
        &mut self.state.ranks[self.number]
    }

    fn op(&self) -> Op {
        self.job.program[self.state.ranks[self.number].op as usize]
    }

    fn over(&self) -> Comm {
        self.job.over(self.state.ranks[self.number].op)
    }

    fn is_ready(&self, comm: Comm) -> bool {
        self.state.ranks[self.number].sides[comm].is_ready()
    }

    /// The communicator of a step that is a collective.
    pub fn comm_of(&self, step: Step) -> Comm {
        match step {
            Step::Agree(comm) | Step::Register(comm, _) => comm,
            _ => self.over(),
        }
    }

    /// Takes the step: does what concerns this rank alone, or comes to the collective.
    pub fn step(&mut self) {
        let Rank { op, step, phase, memory, could, .. } = *self.rank();
        match step {
            Step::Agree(comm) => {
                let windows = if self.op() == Op::Sync { self.rank().sides[comm].window_bits() } else { 0 };
                self.rank().lost = 0;
                self.come(comm, Call::Agree { op, phase, windows });
            }
            Step::Quiesce => {
                let is_lost = |side: &Side| side.health == Health::Lost && side.holds_memory();
                self.rank().could = !self.rank().sides.iter().any(is_lost);
                self.rank().sides.iter_mut().filter(|side| side.is_ready()).for_each(|side| side.is_busy = false);
                self.rank().step = Step::Decide;
                if self.job.has(Flaw::SleepUnasked) {
                    self.deregister_next();
                }
            }
            Step::Remap => {
                self.rank().memory = op + 1;
                self.rank().could = true;
                self.rank().step = Step::Decide;
                if self.job.has(Flaw::WakeUnasked) {
                    self.register_after(None);
                }
            }
            Step::Decide => self.come(self.over(), Call::Decide { could }),
            Step::Deregister(comm, segment) => {
                if self.is_ready(comm) {
                    self.rank().sides[comm].windows[segment] = 0;
                }
                self.deregister_next();
            }
            Step::Unmap => {
                let is_held = |side: &Side| side.health == Health::Lost && side.holds_memory();
                if self.rank().sides.iter().any(is_held) && !self.job.has(Flaw::UnmapUnderLost) {
                    self.rank().phase = Phase::Failed;
                    return self.finish(Outcome::Held);
                }
                self.rank().memory = 0;
                if self.job.has(Flaw::UnmapFirst) {
                    return self.deregister_next();
                }
                self.asleep();
            }
            Step::Register(comm, segment) => {
                debug_assert!(memory != 0 || self.job.flaw.is_some(), "only what is mapped is registered");
                self.come(comm, Call::Register { segment });
            }
            Step::Check => {
                let lost = self.rank().lost;
                self.come(self.over(), Call::Check { lost });
            }
            Step::Done => {}
        }
    }

    /// Comes to a collective, or finds that it cannot.
    fn come(&mut self, comm: Comm, call: Call) {
        if self.is_ready(comm) {
            self.state.meetings[comm].come(self.number, call);
            self.rank().is_waiting = true;
        } else {
            self.fail(Outcome::Gone);
        }
    }

    /// Leaves out the op that comes next.
    pub fn skip(&mut self) {
        let last = self.rank().last;
        self.finish(last);
    }

    /// Kernels do not end within the deadline, and this rank says so.
    pub fn delay(&mut self) {
        self.rank().could = false;
        self.rank().step = Step::Decide;
    }

    /// The device refuses memory, and this rank says so.
    pub fn refuse(&mut self) {
        self.rank().could = self.job.has(Flaw::WakeUntold);
        self.rank().step = Step::Decide;
        if self.job.has(Flaw::WakeUnasked) {
            self.finish(Outcome::Refused { mine: true });
        }
    }

    /// All have come to the collective in which this rank waits, and it hears what they say.
    pub fn hear(&mut self) {
        let Rank { op, step, phase, could, .. } = *self.rank();
        let calls: Vec<Call> = self.state.meetings[self.comm_of(step)].hear(self.number).collect();
        let all = |test: fn(&Call) -> bool| calls.iter().all(test);
        self.rank().is_waiting = false;
        match (step, self.op()) {
            (Step::Agree(comm), Op::Sync) => {
                let is_equal = calls.iter().all(|call| *call == calls[0]);
                if is_equal && phase == Phase::Awake {
                    self.sync_after(comm, None);
                } else {
                    self.sync_next(comm, if is_equal { Outcome::Done } else { Outcome::Differ });
                }
            }
            (Step::Agree(_), called) => {
                let is_same = |call: &Call| matches!(call, Call::Agree { op: other, .. } if *other == op);
                let are_same_ops = self.job.has(Flaw::OpsUncompared) || calls.iter().all(is_same);
                let are_awake = all(|call| matches!(call, Call::Agree { phase: Phase::Awake, .. }));
                let are_asleep = all(|call| matches!(call, Call::Agree { phase: Phase::Asleep, .. }));
                match called {
                    _ if !are_same_ops => self.finish(Outcome::Differ),
                    Op::Sleep(_) if are_asleep => self.finish(Outcome::Done),
                    Op::Sleep(_) if !are_awake && self.job.has(Flaw::SleepOnce) => self.finish(Outcome::Differ),
                    Op::Sleep(_) => self.rank().step = Step::Quiesce,
                    _ if are_awake => self.finish(Outcome::Done),
                    _ if are_asleep => self.rank().step = Step::Remap,
                    _ => self.finish(Outcome::Differ),
                }
            }
            (Step::Decide, called) => {
                let could_all = all(|call| matches!(call, Call::Decide { could: true }));
                match called {
                    Op::Sleep(_) if could_all => self.deregister_next(),
                    Op::Sleep(_) => self.finish(Outcome::Refused { mine: !could }),
                    _ if self.rank().memory == 0 && could => self.finish(Outcome::Refused { mine: true }),
                    _ if could_all => self.register_after(None),
                    _ if could && self.job.has(Flaw::WakeAlone) => self.awake(Outcome::Done),
                    _ => {
                        if !self.job.has(Flaw::KeepMemory) {
                            self.rank().memory = 0;
                        }
                        self.finish(Outcome::Refused { mine: !could });
                    }
                }
            }
            (Step::Register(comm, segment), called) => {
                let memory = self.rank().memory;
                self.rank().sides[comm].windows[segment] = memory;
                match called {
                    Op::Sync => self.sync_after(comm, Some(segment)),
                    _ => self.register_after(Some((comm, segment))),
                }
            }
            (Step::Check, _) => {
                let mine = self.rank().lost;
                let bits = |call: &Call| if let Call::Check { lost } = call { *lost } else { 0 };
                let told = calls.iter().map(bits).fold(0, |all, lost| all | lost);
                let lost = if self.job.has(Flaw::LoseUntold) { mine } else { told };
                self.rank().lost = told;
                (0..self.job.comms.len()).filter(|comm| lost & 1 << comm != 0).for_each(|comm| self.end(comm));
                self.awake(Outcome::Done);
            }
            _ => unreachable!("{step:?} is no collective"),
        }
    }

    /// The communicator of the collective has ended: while this rank waited in it, or before it came.
    pub fn fail(&mut self, outcome: Outcome) {
        let (step, is_wake) = (self.rank().step, matches!(self.op(), Op::Wake(_)));
        self.rank().is_waiting = false;
        match step {
            Step::Agree(comm) | Step::Register(comm, _) if self.op() == Op::Sync => self.sync_next(comm, outcome),
            Step::Decide if self.job.has(Flaw::GoOn) && is_wake => self.register_after(None),
            Step::Decide if self.job.has(Flaw::GoOn) => self.deregister_next(),
            Step::Decide if is_wake => {
                self.rank().memory = 0;
                self.finish(Outcome::Broken);
            }
            Step::Decide => {
                if !self.job.has(Flaw::KeepCommunicators) {
                    self.end_all();
                }
                self.finish(Outcome::Broken);
            }
            Step::Register(comm, _) if comm != self.over() => {
                self.rank().lost |= 1 << comm;
                self.register_after(Some((comm, self.job.segments - 1)));
            }
            Step::Register(..) | Step::Check if self.job.has(Flaw::UnmapLate) => {
                self.end_all();
                self.rank().memory = 0;
                self.finish(Outcome::Broken);
            }
            Step::Register(..) => {
                if !self.job.has(Flaw::LeaveUnregistered) {
                    self.end_all();
                }
                self.awake(Outcome::Broken);
            }
            Step::Check => self.awake(Outcome::Broken),
            _ => self.finish(outcome),
        }
    }

    /// The next window that a sleep takes away; after the last one the memory can go.
    fn deregister_next(&mut self) {
        let rank = *self.rank();
        let has_window = |(comm, segment): &(Comm, Segment)| {
            rank.sides[*comm].is_ready() && rank.sides[*comm].windows[*segment] != 0
        };
        let windows = self.job.places(rank.op, self.number).filter(has_window);
        let next = match self.job.flaw {
            Some(Flaw::KeepWindows) => None,
            Some(Flaw::UnmapFirst) if rank.memory != 0 => None,
            Some(Flaw::OtherOrder) if self.number == 1 => windows.last(),
            _ => windows.into_iter().next(),
        };
        match next {
            Some((comm, segment)) => self.rank().step = Step::Deregister(comm, segment),
            None if rank.memory == 0 && self.job.has(Flaw::UnmapFirst) => self.asleep(),
            None => self.rank().step = Step::Unmap,
        }
    }

    /// The next window of a wake after this one, or after none; after the last one the ranks check.
    fn register_after(&mut self, last: Option<(Comm, Segment)>) {
        let op = self.rank().op;
        let mut places = self.job.places(op, self.number);
        if let Some(last) = last {
            places.find(|place| *place == last);
        }
        let next = places.next();
        self.rank().step = next.map_or(Step::Check, |(comm, segment)| Step::Register(comm, segment));
    }

    /// The next window of a sync on this communicator, or the next communicator.
    fn sync_after(&mut self, comm: Comm, last: Option<Segment>) {
        let windows = self.rank().sides[comm].windows;
        let mut missing = (last.map_or(0, |last| last + 1)..self.job.segments).filter(|segment| windows[*segment] == 0);
        match missing.next() {
            Some(segment) => self.rank().step = Step::Register(comm, segment),
            None => self.sync_next(comm, Outcome::Done),
        }
    }

    /// A sync goes on with its next communicator, whatever became of this one.
    fn sync_next(&mut self, comm: Comm, outcome: Outcome) {
        let op = self.rank().op;
        let next = self.job.comms_of(op, self.number).skip_while(|other| *other != comm).nth(1);
        match next {
            Some(next) => self.rank().step = Step::Agree(next),
            None => self.finish(outcome),
        }
    }

    /// Ends a communicator on this rank: a deadline passed, the watchdog or the program says so, or another op of this rank's broke.
    pub fn end(&mut self, comm: Comm) {
        let has_lost = self.job.has_lost;
        let side = &mut self.rank().sides[comm];
        if !side.is_ready() {
            return;
        }
        if has_lost && side.holds_memory() { side.health = Health::Lost } else { *side = Side::ABORTED }
    }

    fn end_all(&mut self) {
        let op = self.rank().op;
        self.job.comms_of(op, self.number).collect::<Vec<_>>().into_iter().for_each(|comm| self.end(comm));
    }

    fn asleep(&mut self) {
        self.rank().phase = Phase::Asleep;
        self.finish(Outcome::Done);
    }

    fn awake(&mut self, outcome: Outcome) {
        self.rank().phase = Phase::Awake;
        self.finish(outcome);
    }

    /// The op is over, and the program goes on: with kernels on all windows, where the pool is awake.
    fn finish(&mut self, outcome: Outcome) {
        let (segments, op) = (self.job.segments, self.rank().op + 1);
        let step = self.job.first_step(op, self.number);
        let rank = self.rank();
        *rank = Rank { last: outcome, op, step, could: false, ..*rank };
        if rank.phase == Phase::Awake {
            for side in rank.sides.iter_mut().filter(|side| side.is_ready()) {
                side.is_busy |= side.windows[..segments].iter().all(|generation| *generation != 0);
            }
        }
    }
}
