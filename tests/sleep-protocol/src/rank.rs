//! The state of one rank.

use crate::job::{COMMS_MAX, SEGMENTS_MAX};
use crate::step::{Comm, Outcome, Phase, Step};

/// A generation of memory: the number of the op that obtained it, from 1; 0 for none. A wake maps different memory at
/// the same addresses.
pub type Generation = u8;

/// The state of a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    /// The process runs.
    Running,
    /// The process no longer makes progress, and no rank is notified: it is stopped, or its machine is unreachable.
    Stopped,
    /// The process has exited, and its connections are closed.
    Dead,
}

/// The state of a communicator on one rank: `CommState` of `symmalloc-nccl` without `Destroyed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// The communicator can be used.
    Ready,
    /// The communicator has ended, but NCCL has not returned: its windows and kernels may still exist.
    Lost,
    /// The communicator has ended, and its windows and kernels are gone.
    Aborted,
}

/// A communicator on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Side {
    /// The state of the communicator.
    pub health: Health,
    /// Memory that each segment's window refers to; 0 for no window.
    pub windows: [Generation; SEGMENTS_MAX],
    /// Set if a kernel of the program uses the windows. It reads and writes the memory of all ranks of the
    /// communicator.
    pub is_busy: bool,
    /// Set if NCCL has released its memory.
    pub is_suspended: bool,
}

impl Side {
    /// A communicator that has ended, without windows or kernels.
    pub const ABORTED: Side =
        Side { health: Health::Aborted, windows: [0; SEGMENTS_MAX], is_busy: false, is_suspended: false };

    /// Returns `true` if the communicator can be used.
    pub fn is_ready(&self) -> bool {
        self.health == Health::Ready
    }

    /// Returns `true` if a window or kernel of the communicator uses the pool's memory.
    pub fn holds_memory(&self) -> bool {
        self.is_busy || self.windows.iter().any(|generation| *generation != 0)
    }

    /// Returns the segments with a window, as a bit set.
    pub fn window_bits(&self) -> u8 {
        self.windows.iter().enumerate().map(|(segment, generation)| u8::from(*generation != 0) << segment).sum()
    }
}

/// One rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    /// State of the process.
    pub life: Life,
    /// Index in the program of the current or next op.
    pub op: u8,
    /// Current step of that op.
    pub step: Step,
    /// Set while the rank waits in the collective of that step.
    pub is_waiting: bool,
    /// Set if the op has resumed the communicator that the ranks agree over.
    pub has_resumed: bool,
    /// The rank's vote in [`Step::Decide`].
    pub could: bool,
    /// Phase of the pool, as the program sees it.
    pub phase: Phase,
    /// Memory that backs the pool's addresses.
    pub memory: Generation,
    /// Outcome of the last op.
    pub last: Outcome,
    /// Communicators lost in the last wake, as a bit set.
    pub lost: u8,
    /// Ops in the pool's history beyond those of the program. 0 without a flaw.
    pub extra_ops: u8,
    /// The rank's side of each communicator.
    pub sides: [Side; COMMS_MAX],
}

impl Rank {
    /// A rank whose process has exited. The other fields are irrelevant.
    pub const DEAD: Rank = Rank {
        life: Life::Dead,
        op: 0,
        step: Step::Done,
        is_waiting: false,
        has_resumed: false,
        could: false,
        phase: Phase::Held,
        memory: 0,
        last: Outcome::None,
        lost: 0,
        extra_ops: 0,
        sides: [Side::ABORTED; COMMS_MAX],
    };

    /// Returns the rank's communicators that can be used.
    pub fn ready(&self) -> impl Iterator<Item = (Comm, &Side)> {
        self.sides.iter().enumerate().filter(|(_, side)| side.is_ready())
    }
}
