//! What one rank has.

use crate::job::{COMMS_MAX, SEGMENTS_MAX};
use crate::step::{Comm, Outcome, Phase, Step};

/// Which memory: the number of the op that got it, from 1; 0 is none. Memory that comes back is other memory at the same addresses.
pub type Generation = u8;

/// What became of a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    /// It runs.
    Running,
    /// It does nothing any more, and nobody is told: a stopped process, a machine that cannot be reached.
    Stopped,
    /// It is gone, and its connections are closed.
    Dead,
}

/// What became of a communicator on one rank: `CommState` of `symmalloc-nccl` without `Destroyed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It can be used.
    Ready,
    /// It has ended, but NCCL is still inside: its windows and kernels may still be there.
    Lost,
    /// It has ended, and its windows and kernels with it.
    Aborted,
}

/// A communicator on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    /// What became of it.
    pub health: Health,
    /// The memory that each segment's window is on; 0 for no window.
    pub windows: [Generation; SEGMENTS_MAX],
    /// Whether a kernel of the program's uses the windows. It reads and writes the memory of all its ranks.
    pub is_busy: bool,
}

impl Side {
    /// It has ended and taken all along.
    pub const ABORTED: Side = Side { health: Health::Aborted, windows: [0; SEGMENTS_MAX], is_busy: false };

    /// Whether it can be used.
    pub fn is_ready(&self) -> bool {
        self.health == Health::Ready
    }

    /// Whether anything of it is on the pool's memory.
    pub fn holds_memory(&self) -> bool {
        self.is_busy || self.windows.iter().any(|generation| *generation != 0)
    }

    /// The segments with a window, as bits.
    pub fn window_bits(&self) -> u8 {
        self.windows.iter().enumerate().map(|(segment, generation)| u8::from(*generation != 0) << segment).sum()
    }
}

/// One rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// What became of its process.
    pub life: Life,
    /// The op that it is in, or comes to next, by its place in the program.
    pub op: u8,
    /// Where it is in that op.
    pub step: Step,
    /// Whether it waits in the collective of that step.
    pub is_waiting: bool,
    /// What it says in [`Step::Decide`].
    pub could: bool,
    /// What the pool is to the program.
    pub phase: Phase,
    /// What lies behind the pool's addresses.
    pub memory: Generation,
    /// How its last op ended.
    pub last: Outcome,
    /// The communicators that it lost in the last wake, as bits.
    pub lost: u8,
    /// Its communicators.
    pub sides: [Side; COMMS_MAX],
}

impl Rank {
    /// A rank whose process is gone. Nothing of it matters any more.
    pub const DEAD: Rank = Rank {
        life: Life::Dead,
        op: 0,
        step: Step::Done,
        is_waiting: false,
        could: false,
        phase: Phase::Failed,
        memory: 0,
        last: Outcome::None,
        lost: 0,
        sides: [Side::ABORTED; COMMS_MAX],
    };

    /// Its communicators that can be used.
    pub fn ready(&self) -> impl Iterator<Item = (Comm, &Side)> {
        self.sides.iter().enumerate().filter(|(_, side)| side.is_ready())
    }
}
