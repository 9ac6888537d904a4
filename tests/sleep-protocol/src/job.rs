//! The input of a check: ranks, communicators, a program, and possible faults.

use crate::flaw::Flaw;
use crate::model::State;
use crate::rank::{Health, Life, Rank, Side};
use crate::step::{Comm, Op, Outcome, Phase, Segment, Step};
use std::ops::Range;

/// Maximum number of ranks.
pub const RANKS_MAX: usize = 3;
/// Maximum number of communicators.
pub const COMMS_MAX: usize = 2;
/// Maximum number of segments.
pub const SEGMENTS_MAX: usize = 2;

/// A communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Members {
    /// Number of ranks. The members are the ranks below this number.
    pub ranks: usize,
    /// Index of the first op that involves it. It is connected, and the pool attached to it, just before that op.
    pub from_op: u8,
}

/// The maximum number of faults of each kind, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    /// A process ends.
    pub deaths: u8,
    /// A process stops.
    pub stops: u8,
    /// A communicator ends on one rank, because the program aborts it or NCCL fails.
    pub breaks: u8,
    /// The device is out of memory in a wake.
    pub refusals: u8,
    /// Kernels do not finish within the deadline in a sleep.
    pub delays: u8,
    /// A rank's program omits an op.
    pub skips: u8,
}

/// A job.
#[derive(Clone, Debug)]
pub struct Job {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of segments of the pool.
    pub segments: usize,
    /// The communicators.
    pub comms: Vec<Members>,
    /// Ops of the program, the same on every rank.
    pub program: Vec<Op>,
    /// Maximum number of faults of each kind.
    pub faults: Faults,
    /// Set if a deadline may expire while a rank waits.
    pub has_deadlines: bool,
    /// Set if a communicator may take time to end, during which NCCL holds its windows.
    pub has_lost: bool,
    /// A deliberate flaw in the protocol.
    pub flaw: Option<Flaw>,
}

impl Job {
    /// Creates a job whose ranks run `program`. They have one communicator, and a pool that is awake and registered.
    pub fn new(ranks: usize, segments: usize, program: &[Op]) -> Self {
        assert!(ranks <= RANKS_MAX && segments <= SEGMENTS_MAX, "the job exceeds the limits of the model");
        Job {
            ranks,
            segments,
            comms: vec![Members { ranks, from_op: 0 }],
            program: program.to_vec(),
            faults: Faults::default(),
            has_deadlines: true,
            has_lost: false,
            flaw: None,
        }
    }

    /// Adds a communicator of the first `ranks` ranks, connected just before op `from_op`.
    pub fn with_communicator(mut self, ranks: usize, from_op: u8) -> Self {
        assert!(self.comms.len() < COMMS_MAX, "the job exceeds the limits of the model");
        self.comms.push(Members { ranks, from_op });
        self
    }

    /// Allows faults.
    pub fn with_faults(self, faults: Faults) -> Self {
        Job { faults, ..self }
    }

    /// Allows communicators to be lost: NCCL may still hold their windows after they end.
    pub fn with_lost(self) -> Self {
        Job { has_lost: true, ..self }
    }

    /// Removes all deadlines.
    pub fn without_deadlines(self) -> Self {
        Job { has_deadlines: false, ..self }
    }

    /// Adds a flaw to the protocol.
    pub fn with_flaw(self, flaw: Flaw) -> Self {
        Job { flaw: Some(flaw), ..self }
    }

    /// Returns `true` if the protocol has this flaw.
    pub fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Returns the initial state: the pool is awake on all ranks. Unless the program begins with a sync, there are
    /// windows and running kernels on every communicator that exists from the start.
    pub fn start(&self) -> State {
        let is_registered = self.program[0] != Op::Sync;
        let mut ranks = [Rank::DEAD; RANKS_MAX];
        for (number, rank) in ranks.iter_mut().enumerate().take(self.ranks) {
            *rank = Rank { life: Life::Running, phase: Phase::Awake, memory: 1, last: Outcome::None, ..Rank::DEAD };
            for comm in (0..self.comms.len()).filter(|comm| self.is_member(*comm, number)) {
                let side = &mut rank.sides[comm];
                *side = Side { health: Health::Ready, ..Side::ABORTED };
                if is_registered && self.comms[comm].from_op == 0 {
                    side.windows[..self.segments].fill(1);
                    side.is_busy = true;
                }
            }
            rank.step = self.first_step(0, number, &rank.sides);
        }
        State { ranks, meetings: Default::default(), left: self.faults }
    }

    /// Returns `true` if a rank belongs to a communicator.
    pub fn is_member(&self, comm: Comm, rank: usize) -> bool {
        rank < self.comms[comm].ranks
    }

    /// Returns the ranks of a communicator.
    pub fn members(&self, comm: Comm) -> Range<usize> {
        0..self.comms[comm].ranks
    }

    /// Returns the communicator over which the ranks agree in an op.
    pub fn over(&self, op: u8) -> Comm {
        match self.program[op as usize] {
            Op::Sync => 0,
            Op::Sleep(over) | Op::Suspend(over) | Op::Wake(over) => over,
        }
    }

    /// Returns the communicator of the collective that a rank is in.
    pub fn comm_of(&self, rank: &Rank) -> Comm {
        match rank.step {
            Step::Agree(comm) | Step::Register(comm, _) | Step::Suspend(comm) | Step::Resume(comm) => comm,
            _ => self.over(rank.op),
        }
    }

    /// Returns the communicators of an op in the order in which this rank processes them, starting with the one it
    /// agrees over.
    pub fn comms_of(&self, op: u8, rank: usize) -> impl Iterator<Item = Comm> + '_ {
        let over = self.over(op);
        let (first, last) = if self.has(Flaw::AgreedLast) { (None, Some(over)) } else { (Some(over), None) };
        let others = (0..self.comms.len()).filter(move |comm| *comm != over);
        let attached = move |comm: &Comm| self.comms[*comm].from_op <= op && self.is_member(*comm, rank);
        first.into_iter().chain(others).chain(last).filter(attached)
    }

    /// Returns the possible windows of an op, in order.
    pub fn places(&self, op: u8, rank: usize) -> impl Iterator<Item = (Comm, Segment)> + '_ {
        self.comms_of(op, rank).flat_map(|comm| (0..self.segments).map(move |segment| (comm, segment)))
    }

    /// Returns the communicators of an op in the order in which this rank suspends them.
    pub fn suspensions(&self, op: u8, rank: usize) -> impl Iterator<Item = Comm> + '_ {
        let over = self.over(op);
        let others = self.comms_of(op, rank).filter(move |comm| *comm != over);
        others.chain(self.comms_of(op, rank).find(|comm| *comm == over))
    }

    /// Returns `true` if a rank is running and is not inside an op.
    pub fn is_between_ops(&self, rank: &Rank) -> bool {
        let is_between = match rank.step {
            Step::Resume(comm) => !rank.is_waiting && comm == self.over(rank.op),
            // A communicator that was suspended has been resumed, within the op.
            Step::Agree(comm) => !rank.is_waiting && comm == self.over(rank.op) && !rank.has_resumed,
            step => step == Step::Done,
        };
        rank.life == Life::Running && is_between
    }

    /// Returns the first step of a rank in an op.
    pub fn first_step(&self, op: u8, rank: usize, sides: &[Side; COMMS_MAX]) -> Step {
        match self.program.get(op as usize) {
            None => Step::Done,
            Some(Op::Wake(_)) if self.has(Flaw::WakeUnasked) => Step::Remap,
            Some(Op::Sync) => self.comms_of(op, rank).next().map_or(Step::Done, Step::Agree),
            Some(Op::Sleep(over) | Op::Suspend(over) | Op::Wake(over))
                if sides[*over].is_suspended && !self.has(Flaw::AgreeSuspended) =>
            {
                Step::Resume(*over)
            }
            Some(Op::Sleep(over) | Op::Suspend(over) | Op::Wake(over)) => Step::Agree(*over),
        }
    }
}
