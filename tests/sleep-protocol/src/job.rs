//! What is checked: ranks, communicators, a program, and what may go wrong.

use crate::flaw::Flaw;
use crate::model::State;
use crate::rank::{Health, Life, Rank, Side};
use crate::step::{Comm, Op, Outcome, Phase, Segment, Step};
use std::ops::Range;

/// The most ranks.
pub const RANKS_MAX: usize = 3;
/// The most communicators.
pub const COMMS_MAX: usize = 2;
/// The most segments.
pub const SEGMENTS_MAX: usize = 2;

/// A communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Members {
    /// Its ranks are those below this number.
    pub ranks: usize,
    /// The first op that concerns it: it was connected, and the pool attached to it, just before.
    pub from_op: u8,
}

/// How often something may go wrong, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    /// A process ends.
    pub deaths: u8,
    /// A process stops.
    pub stops: u8,
    /// A communicator ends on one rank: the program aborts it, or NCCL fails.
    pub breaks: u8,
    /// The device refuses memory in a wake.
    pub refusals: u8,
    /// Kernels do not end in time in a sleep.
    pub delays: u8,
    /// A rank's program leaves out an op.
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
    /// What the program calls, the same on every rank.
    pub program: Vec<Op>,
    /// What may go wrong.
    pub faults: Faults,
    /// Whether a deadline may pass while a rank waits.
    pub has_deadlines: bool,
    /// Whether the end of a communicator may take time, in which NCCL holds its windows.
    pub has_lost: bool,
    /// What is wrong with the protocol.
    pub flaw: Option<Flaw>,
}

impl Job {
    /// Ranks with one communicator, whose pool is awake and registered, and that do all this.
    pub fn new(ranks: usize, segments: usize, program: &[Op]) -> Self {
        assert!(ranks <= RANKS_MAX && segments <= SEGMENTS_MAX, "the model has no room for more");
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

    /// Adds a communicator of the first ranks.
    pub fn with_communicator(mut self, ranks: usize, from_op: u8) -> Self {
        assert!(self.comms.len() < COMMS_MAX, "the model has no room for more");
        self.comms.push(Members { ranks, from_op });
        self
    }

    /// Lets go wrong what may.
    pub fn with_faults(self, faults: Faults) -> Self {
        Job { faults, ..self }
    }

    /// Lets communicators be lost.
    pub fn with_lost(self) -> Self {
        Job { has_lost: true, ..self }
    }

    /// Takes all deadlines away.
    pub fn without_deadlines(self) -> Self {
        Job { has_deadlines: false, ..self }
    }

    /// Makes the protocol wrong.
    pub fn with_flaw(self, flaw: Flaw) -> Self {
        Job { flaw: Some(flaw), ..self }
    }

    /// Whether the protocol is wrong in this way.
    pub fn has(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// All ranks have the pool awake, with windows on every communicator that was there from the beginning unless the program begins
    /// with a sync, and kernels on them.
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
            rank.step = self.first_step(0, number);
        }
        State { ranks, meetings: Default::default(), left: self.faults }
    }

    /// Whether a rank is in a communicator.
    pub fn is_member(&self, comm: Comm, rank: usize) -> bool {
        rank < self.comms[comm].ranks
    }

    /// The ranks of a communicator.
    pub fn members(&self, comm: Comm) -> Range<usize> {
        0..self.comms[comm].ranks
    }

    /// The communicator over which the ranks agree in an op.
    pub fn over(&self, op: u8) -> Comm {
        match self.program[op as usize] {
            Op::Sync => 0,
            Op::Sleep(over) | Op::Wake(over) => over,
        }
    }

    /// The communicator of the collective that a rank is in.
    pub fn comm_of(&self, rank: &Rank) -> Comm {
        match rank.step {
            Step::Agree(comm) | Step::Register(comm, _) => comm,
            _ => self.over(rank.op),
        }
    }

    /// The communicators of an op, in the order in which this rank goes through them: that over which the ranks agree comes first.
    pub fn comms_of(&self, op: u8, rank: usize) -> impl Iterator<Item = Comm> + '_ {
        let over = self.over(op);
        let (first, last) = if self.has(Flaw::AgreedLast) { (None, Some(over)) } else { (Some(over), None) };
        let others = (0..self.comms.len()).filter(move |comm| *comm != over);
        let attached = move |comm: &Comm| self.comms[*comm].from_op <= op && self.is_member(*comm, rank);
        first.into_iter().chain(others).chain(last).filter(attached)
    }

    /// The places for windows in an op, in order.
    pub fn places(&self, op: u8, rank: usize) -> impl Iterator<Item = (Comm, Segment)> + '_ {
        self.comms_of(op, rank).flat_map(|comm| (0..self.segments).map(move |segment| (comm, segment)))
    }

    /// Whether a rank runs, and is not in the middle of an op.
    pub fn is_between_ops(&self, rank: &Rank) -> bool {
        let is_between = match rank.step {
            Step::Agree(comm) => !rank.is_waiting && comm == self.over(rank.op),
            step => step == Step::Done,
        };
        rank.life == Life::Running && is_between
    }

    /// Where a rank begins an op.
    pub fn first_step(&self, op: u8, rank: usize) -> Step {
        match self.program.get(op as usize) {
            None => Step::Done,
            Some(Op::Wake(_)) if self.has(Flaw::WakeUnasked) => Step::Remap,
            Some(Op::Sync) => self.comms_of(op, rank).next().map_or(Step::Done, Step::Agree),
            Some(Op::Sleep(over) | Op::Wake(over)) => Step::Agree(*over),
        }
    }
}
