//! What a sleep and a wake over several ranks did, and what can stand in their way.

use crate::communicator::CommState;
use crate::error::CommError;
use crate::registrar::error::SyncError;
use crate::registrar::plan::SegmentName;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_agreement::{Disagreement, RankSet};
use symmalloc_core::PoolId;
use symmalloc_core::errors::UnknownError;
use symmalloc_cuda::CudaError;
use thiserror::Error;

/// A pool sleeps, on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// Bytes that went back to this rank's device.
    pub released_bytes: u64,
    /// Bytes that this rank saved.
    pub kept_bytes: u64,
    /// Windows and buffers of this rank that were deregistered.
    pub deregistrations: u64,
}

/// A pool is awake, on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// Bytes that were mapped on this rank.
    pub remapped_bytes: u64,
    /// Windows and buffers of this rank that were registered.
    pub registrations: u64,
    /// Windows that have another handle than before, on any rank of their communicator, by its name: capture again what uses them. In
    /// order, and the same on every rank of that communicator. Their keys come from
    /// [`invalidations`](crate::Registrar::invalidations), too.
    pub changed: Vec<(String, SegmentName)>,
    /// Communicators of this rank that have ended since, here or on another rank, by name: connect new ones, attach the pool and sync.
    pub lost: Vec<String>,
}

/// A step of a sleep or wake: see `docs/sleep-protocol.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SleepStep {
    /// The ranks say which op they are in, and what the pool is.
    Agree,
    /// They say whether they could.
    Decide,
    /// They register windows.
    Register,
    /// They say how it went.
    Check,
}

impl fmt::Display for SleepStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SleepStep::Agree => "while the ranks agreed",
            SleepStep::Decide => "while the ranks decided",
            SleepStep::Register => "while windows were registered",
            SleepStep::Check => "while the ranks checked",
        })
    }
}

/// In what ranks differ that are to sleep or wake together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SleepField {
    /// The version of the protocol: other builds, or a rank that does something else on this communicator.
    Protocol,
    /// Which call it is: 1 to 3 a sleep that keeps, drops or zeroes, 4 a wake.
    Call,
    /// How many sleeps and wakes there were over this communicator.
    Number,
    /// Which symmetric pool.
    Pool,
    /// What the pool is: 0 awake, 1 asleep, 2 failed.
    Phase,
    /// The windows that the pool has.
    Windows,
    /// Of how many of its ranks a communicator of the pool is: the communicator that was given has not all of them.
    Communicators,
}

impl fmt::Display for SleepField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SleepField::Protocol => "what they do on it (another build, or another call)",
            SleepField::Call => "the call (1 to 3: a sleep that keeps, drops, zeroes; 4: a wake)",
            SleepField::Number => "the number of sleeps and wakes so far",
            SleepField::Pool => "the pool",
            SleepField::Phase => "what the pool is (0: awake, 1: asleep, 2: failed)",
            SleepField::Windows => "the pool's windows",
            SleepField::Communicators => "the pool's communicators, one of which has ranks that are not here",
        })
    }
}

/// How ranks differ: the same report on every rank. Nothing was done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepDifference {
    /// The first thing that differs.
    pub field: SleepField,
    /// Which ranks said what.
    pub groups: Vec<(RankSet, u64)>,
}

impl fmt::Display for SleepDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ranks differ in {}", self.field)?;
        self.groups.iter().try_for_each(|(ranks, value)| write!(f, "; ranks {ranks}: {value}"))
    }
}

/// Why a rank cannot put its pool to sleep, or wake it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// A graph is being captured.
    #[error("a graph is being captured: end the capture first")]
    Capturing,
    /// Work on the device did not end.
    #[error(
        "work on the device did not end within {waited:?}: wait for it first, or give the communicator a longer deadline"
    )]
    Work {
        /// How long it was waited for.
        waited: Duration,
    },
    /// A step of the pool is open.
    #[error("a step of the pool is open: sleep between end_step and begin_step")]
    StepOpen,
    /// Another thread does it.
    #[error("another sleep or wake of the pool is under way in another thread")]
    Busy,
    /// A stream could not be asked whether it is captured, or not be waited for.
    #[error("a stream could not be asked or waited for, the driver returned {code}")]
    Stream {
        /// The driver's code.
        code: i32,
    },
    /// The contents could not be saved.
    #[error("{live_bytes} bytes could not be saved on the host, code {code}: free host memory, or drop the contents")]
    Save {
        /// Bytes in live blocks.
        live_bytes: u64,
        /// The code.
        code: i32,
    },
    /// Dead stitched ranges name the pool's memory.
    #[error("dead stitched ranges of the pool are not given back: sync, trim, and try again")]
    Retired,
    /// A communicator that NCCL does not come out of has windows on the pool.
    #[error("a lost communicator has windows on the pool: end the processes that it waits for, and try again")]
    Lost,
    /// The device refuses memory.
    #[error("the device refused {needed_bytes} bytes, code {code}: free memory there, and wake again")]
    Memory {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// The driver's code.
        code: i32,
    },
    /// A limit is in the way.
    #[error("{needed_bytes} bytes are needed and the limit is {limit_bytes}: free memory or raise it, and wake again")]
    Limit {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The contents could not be copied back.
    #[error("the contents could not be copied back, code {code}: wake again")]
    Load {
        /// The code.
        code: i32,
    },
    /// A window finds no place in a communicator's symmetric address space.
    #[error(
        "a window of {needed_bytes} bytes finds no place in the symmetric address space: detach or put to sleep other pools"
    )]
    SymmetricSpace {
        /// Bytes of the window.
        needed_bytes: u64,
    },
    /// Something else, of another version perhaps.
    #[error("something else ({number})")]
    Other {
        /// What the rank said.
        number: u64,
    },
}

/// A rank that could not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankObstacle {
    /// The rank.
    pub rank: u32,
    /// Why.
    pub obstacle: Obstacle,
}

fn listed(ranks: &[RankObstacle]) -> String {
    let text = |of: &RankObstacle| format!("rank {}: {}", of.rank, of.obstacle);
    ranks.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// Why a pool did not fall asleep, or wake, on all ranks. `docs/sleep-protocol.md` says what is known of the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SleepError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool is not attached to the communicator. Nothing was said to other ranks.
    #[error("{pool} is not attached to communicator \"{communicator}\": attach it on every rank, or take another one")]
    NotAttached {
        /// The communicator.
        communicator: String,
        /// The pool.
        pool: PoolId,
    },
    /// A graph is being captured, into which the ranks' talk must not come. Nothing was said to other ranks, which wait for this one.
    #[error("a graph is being captured: end the capture before the pool sleeps or wakes")]
    Capturing,
    /// The driver does not say whether a graph is being captured. Nothing was said to other ranks, which wait for this one.
    #[error("communicator \"{communicator}\": {error}")]
    Cuda {
        /// The communicator.
        communicator: String,
        /// What the driver says.
        error: CudaError,
    },
    /// The communicator had ended. The pool is as it was.
    #[error("communicator \"{communicator}\" is {state}: connect a new one, attach the pool, and take that")]
    Gone {
        /// The communicator.
        communicator: String,
        /// What became of it.
        state: CommState,
        /// The error that ended it, if one did.
        cause: Option<Arc<CommError>>,
    },
    /// The ranks' histories differ. Nothing was done, on any rank.
    #[error("communicator \"{communicator}\": {disagreement}")]
    Disagreed {
        /// The communicator.
        communicator: String,
        /// The core's report.
        disagreement: Box<Disagreement>,
    },
    /// The ranks make other calls, or the pool is not the same on all of them. Nothing was done, on any rank.
    #[error(
        "communicator \"{communicator}\": {difference}: make the same calls at the same points of the program on every rank; a pool \
         that sleeps on some wakes once it sleeps on all"
    )]
    Differ {
        /// The communicator.
        communicator: String,
        /// What differs.
        difference: Box<SleepDifference>,
    },
    /// Some ranks could not, and none did: another attempt may succeed.
    #[error("communicator \"{communicator}\": the pool is as it was: {}", listed(.ranks))]
    Refused {
        /// The communicator.
        communicator: String,
        /// Which, and why.
        ranks: Vec<RankObstacle>,
    },
    /// The communicator ended in the middle. In `Decide` of a sleep, where this rank had said yes, and in `Register`, all communicators of the
    /// pool have ended here, and it is awake without windows. In `Check` it sleeps, or is awake with its windows on other communicators.
    /// Otherwise it is as it was.
    #[error("communicator \"{communicator}\" ended {step}, and the pool is {}: {error}", if *.is_asleep { "asleep" } else { "awake" })]
    Broken {
        /// The communicator.
        communicator: String,
        /// When.
        step: SleepStep,
        /// Whether the pool sleeps on this rank.
        is_asleep: bool,
        /// What a sync would say.
        error: Box<SyncError>,
    },
    /// All ranks sleep, and some could not give their memory back: a lost communicator has windows on it, or the driver refused.
    #[error(
        "communicator \"{communicator}\": the pool sleeps, but the memory of ranks {ranks} is held, by a lost communicator or the driver: sleep \
         again once that has ended"
    )]
    Held {
        /// The communicator.
        communicator: String,
        /// Which ranks.
        ranks: RankSet,
    },
}
