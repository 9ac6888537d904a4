//! The actions of a rank in each step. The rules for failures are:
//!
//! 1. Before a rank receives the decision of [`Step::Decide`], it does nothing that other ranks can observe. A rank
//!    that does not receive the decision stops there: a sleep leaves the pool awake, and a wake releases the memory and
//!    leaves the pool asleep.
//! 2. After the decision, a sleep completes with or without the other ranks, and a wake keeps its memory in any case,
//!    because another rank may already be awake.
//! 3. A rank that leaves an op while others may continue ends the communicators on which they would wait for it. These
//!    are all communicators of the op if it voted yes and does not receive the decision of a sleep, and those that it
//!    has not reached if a wake breaks after its decision. No other rank then uses windows without a counterpart or
//!    waits for it.
//!    A sleep that suspends does the same until `Suspend`, because other ranks may continue to it.
//! 4. The failure of a communicator other than the one that the ranks agree over is isolated: the wake continues
//!    without it, on all ranks.

use crate::flaw::Flaw;
use crate::job::Job;
use crate::meeting::Call;
use crate::model::State;
use crate::rank::{Health, Rank, Side};
use crate::step::{Comm, Op, Outcome, Phase, Segment, Step};

/// A rank that performs an action.
pub struct Actor<'a> {
    job: &'a Job,
    state: &'a mut State,
    number: usize,
}

impl<'a> Actor<'a> {
    /// Creates an actor for the rank with this number.
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

    /// Takes the next step: performs the rank's local part, or joins the collective.
    pub fn step(&mut self) {
        let Rank { op, step, phase, memory, could, .. } = *self.rank();
        match step {
            Step::Agree(comm) if self.op() == Op::Sync && self.rank().sides[comm].is_suspended => {
                // The other ranks have suspended it, too, and do not wait.
                self.sync_next(comm, Outcome::Gone);
            }
            Step::Resume(comm) => self.come(comm, Call::Resume),
            Step::Suspend(comm) => {
                let side = self.rank().sides[comm];
                if side.is_ready() && !side.is_suspended {
                    self.come(comm, Call::Suspend);
                } else {
                    self.suspend_after(Some(comm));
                }
            }
            Step::Agree(comm) => {
                let windows = if self.op() == Op::Sync { self.rank().sides[comm].window_bits() } else { 0 };
                self.rank().lost = 0;
                let extra_ops = self.rank().extra_ops;
                self.come(comm, Call::Agree { op, extra_ops, phase, windows });
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
            Step::Decide | Step::DecideAsleep => self.come(self.over(), Call::Decide { could }),
            Step::Deregister(comm, segment) => {
                if self.is_ready(comm) {
                    self.rank().sides[comm].windows[segment] = 0;
                }
                self.deregister_next();
            }
            Step::Unmap => {
                let is_held = |side: &Side| side.health == Health::Lost && side.holds_memory();
                if self.rank().sides.iter().any(is_held) && !self.job.has(Flaw::UnmapUnderLost) {
                    self.rank().phase = Phase::Held;
                    self.rank().step = Step::Check;
                } else {
                    self.rank().memory = 0;
                    if self.job.has(Flaw::UnmapFirst) { self.deregister_next() } else { self.asleep() }
                }
            }
            Step::Register(comm, segment) => {
                debug_assert!(memory != 0 || self.job.flaw.is_some(), "only mapped memory is registered");
                self.come(comm, Call::Register { segment });
            }
            Step::Check => {
                let lost = self.rank().lost;
                self.come(self.over(), Call::Check { lost, failed: phase == Phase::Held });
            }
            Step::Done => {}
        }
    }

    /// Joins a collective, or fails if the communicator has ended.
    fn come(&mut self, comm: Comm, call: Call) {
        if self.is_ready(comm) {
            self.state.meetings[comm].come(self.number, call);
            self.rank().is_waiting = true;
        } else {
            self.fail(Outcome::Gone);
        }
    }

    /// Omits the next op.
    pub fn skip(&mut self) {
        let last = self.rank().last;
        self.finish(last);
    }

    /// Records that kernels do not finish within the deadline. This rank votes no.
    pub fn delay(&mut self) {
        self.rank().could = false;
        self.rank().step = Step::Decide;
    }

    /// Records that the device is out of memory. This rank votes no.
    pub fn refuse(&mut self) {
        self.rank().could = self.job.has(Flaw::WakeUntold);
        self.rank().step = Step::Decide;
        if self.job.has(Flaw::WakeUnasked) {
            self.finish(Outcome::Refused { mine: true });
        }
    }

    /// Receives the messages of the completed collective that this rank waits in.
    pub fn hear(&mut self) {
        let rank = *self.rank();
        let comm = self.job.comm_of(&rank);
        let calls: Vec<Call> = self.state.meetings[comm].hear(self.number).collect();
        self.rank().is_waiting = false;
        match (rank.step, self.op()) {
            (Step::Agree(_), Op::Sync) if calls.iter().any(|call| *call != calls[0]) => {
                self.sync_next(comm, Outcome::Differ);
            }
            (Step::Agree(_), Op::Sync) if rank.phase == Phase::Awake => self.sync_after(comm, None),
            (Step::Agree(_), Op::Sync) => self.sync_next(comm, Outcome::Done),
            (Step::Agree(_), op) => self.agreed(op, &calls),
            (Step::Resume(comm), _) => {
                self.rank().sides[comm].is_suspended = false;
                if comm == self.over() {
                    self.rank().has_resumed = true;
                    self.rank().step = Step::Agree(comm);
                } else {
                    self.rank().step = Step::Register(comm, 0);
                }
            }
            (Step::DecideAsleep, _) => self.suspend_after(None),
            (Step::Suspend(comm), _) => {
                self.rank().sides[comm].is_suspended = true;
                self.suspend_after(Some(comm));
            }
            (Step::Decide, op) => self.decided(op, calls.iter().all(|call| *call == Call::Decide { could: true })),
            (Step::Register(comm, segment), op) => {
                self.rank().sides[comm].windows[segment] = rank.memory;
                match op {
                    Op::Sync => self.sync_after(comm, Some(segment)),
                    _ => self.register_after(Some((comm, segment))),
                }
            }
            (Step::Check, Op::Sleep(_)) => {
                let has_failed = calls.iter().any(|call| matches!(call, Call::Check { failed: true, .. }));
                self.finish(if has_failed { Outcome::Held } else { Outcome::Done });
            }
            (Step::Check, Op::Suspend(_)) => {
                let has_failed = calls.iter().any(|call| matches!(call, Call::Check { failed: true, .. }));
                if has_failed { self.finish(Outcome::Held) } else { self.suspend_after(None) }
            }
            (Step::Check, _) => self.woken(&calls),
            (step, _) => unreachable!("{step:?} is not a collective"),
        }
    }

    /// Continues a sleep or wake after the ranks have exchanged their current op and the phase of their pool.
    fn agreed(&mut self, called: Op, calls: &[Call]) {
        let Rank { op: number, extra_ops: own, .. } = *self.rank();
        let is_same =
            |call: &Call| matches!(call, Call::Agree { op, extra_ops, .. } if (*op, *extra_ops) == (number, own));
        let all_are =
            |wanted: Phase| calls.iter().all(|call| matches!(call, Call::Agree { phase, .. } if *phase == wanted));
        let (are_awake, are_asleep) = (all_are(Phase::Awake), all_are(Phase::Asleep));
        match called {
            _ if !calls.iter().all(is_same) && !self.job.has(Flaw::OpsUncompared) => self.finish(Outcome::Differ),
            Op::Sleep(_) if are_asleep => self.finish(Outcome::Done),
            Op::Suspend(_) if are_asleep => {
                self.rank().could = true;
                self.rank().step = Step::DecideAsleep;
            }
            Op::Sleep(_) | Op::Suspend(_) if !are_awake && self.job.has(Flaw::SleepOnce) => {
                self.finish(Outcome::Differ);
            }
            // If some ranks are already asleep, this sleep makes all of them sleep.
            Op::Sleep(_) | Op::Suspend(_) => self.rank().step = Step::Quiesce,
            _ if are_awake => self.finish(Outcome::Done),
            _ if are_asleep => self.rank().step = Step::Remap,
            _ => self.finish(Outcome::Differ),
        }
    }

    /// Continues after the ranks have exchanged whether they succeeded.
    fn decided(&mut self, called: Op, could_all: bool) {
        let Rank { could, memory, .. } = *self.rank();
        let has_lied = memory == 0 && self.job.has(Flaw::WakeUntold);
        match called {
            Op::Sleep(_) | Op::Suspend(_) if could_all => self.deregister_next(),
            Op::Sleep(_) | Op::Suspend(_) => self.finish(Outcome::Refused { mine: !could }),
            _ if has_lied => self.finish(Outcome::Refused { mine: true }),
            _ if could_all => self.register_after(None),
            _ if could && self.job.has(Flaw::WakeAlone) => self.awake(Outcome::Done),
            _ => {
                self.rank().memory = if self.job.has(Flaw::KeepMemory) { memory } else { 0 };
                // The program makes room before its next wake.
                self.rank().extra_ops += u8::from(!could && self.job.has(Flaw::RecoverAsOp));
                self.finish(Outcome::Refused { mine: !could });
            }
        }
    }

    /// Completes a wake after the ranks have exchanged the communicators they lost: what one lost, all lose.
    fn woken(&mut self, calls: &[Call]) {
        let bits = |call: &Call| if let Call::Check { lost, .. } = call { *lost } else { 0 };
        let reported = calls.iter().map(bits).fold(0, |all, lost| all | lost);
        let lost = if self.job.has(Flaw::LoseUntold) { self.rank().lost } else { reported };
        self.rank().lost = reported;
        (0..self.job.comms.len()).filter(|comm| lost & 1 << comm != 0).for_each(|comm| self.end(comm));
        self.awake(Outcome::Done);
    }

    /// Handles the end of the communicator of the collective, while this rank waits in it or before it joins.
    pub fn fail(&mut self, outcome: Outcome) {
        let (Rank { step, could, .. }, is_wake) = (*self.rank(), matches!(self.op(), Op::Wake(_)));
        self.rank().is_waiting = false;
        match step {
            Step::Agree(comm) | Step::Register(comm, _) if self.op() == Op::Sync => self.sync_next(comm, outcome),
            Step::Decide if self.job.has(Flaw::GoOn) && is_wake => self.register_after(None),
            Step::Decide if self.job.has(Flaw::GoOn) => self.deregister_next(),
            Step::Decide if is_wake => {
                self.rank().memory = 0;
                self.finish(Outcome::Broken);
            }
            Step::Decide | Step::DecideAsleep => {
                // Other ranks may go to sleep, or suspend, only if this rank voted yes.
                let may_sleep = could && outcome == Outcome::Broken;
                let flaw = if step == Step::Decide { Flaw::KeepCommunicators } else { Flaw::KeepUnsuspended };
                if may_sleep && !self.job.has(flaw) {
                    self.end_all();
                }
                self.finish(Outcome::Broken);
            }
            Step::Register(comm, _) if comm != self.over() => {
                self.rank().lost |= 1 << comm;
                self.register_after(Some((comm, self.job.segments - 1)));
            }
            Step::Register(..) | Step::Check if is_wake && self.job.has(Flaw::UnmapLate) => {
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
            Step::Check if is_wake => self.awake(Outcome::Broken),
            Step::Check => {
                // Other ranks may suspend.
                if matches!(self.op(), Op::Suspend(_)) && !self.job.has(Flaw::KeepUnsuspended) {
                    self.end_all();
                }
                self.finish(Outcome::Broken);
            }
            Step::Resume(comm) if comm != self.over() => {
                self.rank().lost |= 1 << comm;
                self.register_after(Some((comm, self.job.segments - 1)));
            }
            Step::Suspend(comm) if comm != self.over() => self.suspend_after(Some(comm)),
            _ => self.finish(outcome),
        }
    }

    /// Selects the next window that a sleep deregisters. After the last one, the memory can be unmapped.
    fn deregister_next(&mut self) {
        let rank = *self.rank();
        let has_window = |(comm, segment): &(Comm, Segment)| {
            rank.sides[*comm].is_ready() && rank.sides[*comm].windows[*segment] != 0
        };
        let windows = self.job.places(rank.op, self.number).filter(has_window);
        let next = match self.job.flaw {
            Some(Flaw::KeepWindows) => None,
            Some(Flaw::UnmapFirst) if rank.memory != 0 => None,
            Some(Flaw::DifferentOrder) if self.number == 1 => windows.last(),
            _ => windows.into_iter().next(),
        };
        match next {
            Some((comm, segment)) => self.rank().step = Step::Deregister(comm, segment),
            None if rank.memory == 0 && self.job.has(Flaw::UnmapFirst) => self.asleep(),
            None => self.rank().step = Step::Unmap,
        }
    }

    /// Selects the window of a wake after `last`, or the first one. After the last one, the ranks check.
    fn register_after(&mut self, last: Option<(Comm, Segment)>) {
        let op = self.rank().op;
        let mut places = self.job.places(op, self.number);
        if let Some(last) = last {
            places.find(|place| *place == last);
        }
        let next = places.next();
        let is_suspended = |comm: Comm| self.state.ranks[self.number].sides[comm].is_suspended;
        let step = match next {
            None => Step::Check,
            Some((comm, 0)) if is_suspended(comm) && !self.job.has(Flaw::RegisterSuspended) => Step::Resume(comm),
            Some((comm, segment)) => Step::Register(comm, segment),
        };
        self.rank().step = step;
    }

    /// Selects the communicator that a sleep suspends after `last`, or the first one. After the last one, the op ends.
    fn suspend_after(&mut self, last: Option<Comm>) {
        let op = self.rank().op;
        let mut comms = self.job.suspensions(op, self.number);
        if let Some(last) = last {
            comms.find(|comm| *comm == last);
        }
        match comms.next() {
            Some(comm) => self.rank().step = Step::Suspend(comm),
            None => self.finish(Outcome::Done),
        }
    }

    /// Selects the next window of a sync on this communicator, or continues with the next communicator.
    fn sync_after(&mut self, comm: Comm, last: Option<Segment>) {
        let windows = self.rank().sides[comm].windows;
        let mut missing = (last.map_or(0, |last| last + 1)..self.job.segments).filter(|segment| windows[*segment] == 0);
        match missing.next() {
            Some(segment) => self.rank().step = Step::Register(comm, segment),
            None => self.sync_next(comm, Outcome::Done),
        }
    }

    /// Continues a sync with its next communicator, regardless of the outcome of this one.
    fn sync_next(&mut self, comm: Comm, outcome: Outcome) {
        let op = self.rank().op;
        let next = self.job.comms_of(op, self.number).skip_while(|other| *other != comm).nth(1);
        match next {
            Some(next) => self.rank().step = Step::Agree(next),
            None => self.finish(outcome),
        }
    }

    /// Ends a communicator on this rank, because of a deadline, the watchdog, the program, or another op that broke.
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
        self.rank().step = Step::Check;
        if self.job.has(Flaw::SleepUnchecked) {
            self.finish(Outcome::Done);
        }
    }

    fn awake(&mut self, outcome: Outcome) {
        self.rank().phase = Phase::Awake;
        self.finish(outcome);
    }

    /// Ends the op and continues the program. If the pool is awake, kernels run on all windows.
    fn finish(&mut self, outcome: Outcome) {
        let (segments, op) = (self.job.segments, self.rank().op + 1);
        let step = self.job.first_step(op, self.number, &self.state.ranks[self.number].sides);
        let rank = self.rank();
        *rank = Rank { last: outcome, op, step, could: false, has_resumed: false, ..*rank };
        if rank.phase == Phase::Awake {
            for side in rank.sides.iter_mut().filter(|side| side.is_ready()) {
                side.is_busy |= side.windows[..segments].iter().all(|generation| *generation != 0);
            }
        }
    }
}
