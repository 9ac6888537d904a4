//! Results and errors of a collective sleep or wake.

use crate::communicator::CommState;
use crate::communicator::error::CommError;
use crate::sync::error::SyncError;
use crate::windows::segment::SymmetricSegment;
use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;
use symmalloc_agreement::{Disagreement, RankSet, Ranks};
use symmalloc_core::PoolId;
use symmalloc_core::backend::Reason;
use symmalloc_core::errors::UnknownError;
use symmalloc_core::sleep;
use symmalloc_cuda::CudaError;
use thiserror::Error;

/// The result of putting one or several pools to sleep on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slept {
    /// The effect on this rank's memory.
    pub memory: sleep::Slept,
    /// Windows and buffers of this rank that were deregistered.
    pub deregistrations: u64,
    /// Bytes that NCCL released on this rank because its communicators were suspended.
    pub suspended_bytes: u64,
}

/// The result of waking one or several pools on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Woken {
    /// The effect on this rank's memory.
    pub memory: sleep::Woken,
    /// Windows and buffers of this rank that were registered.
    pub registrations: u64,
    /// Windows whose handle changed on any rank of their communicator, with the communicator's name: recapture the graphs that use them.
    /// For each communicator, all of its ranks get the same windows in the same order. [`invalidations`](crate::Registrar::invalidations)
    /// also reports the keys of these windows.
    pub changed: Vec<(String, SymmetricSegment)>,
    /// Names of this rank's communicators that were resumed. NCCL restores their memory at the same addresses. A captured graph with
    /// collectives on one of them need not be captured again, unless its window is in [`changed`](Self::changed).
    pub resumed: Vec<String>,
    /// Names of this rank's communicators that ended while the pool slept, here or on another rank: connect new ones, attach the pool
    /// and sync.
    pub lost: Vec<String>,
}

impl From<sleep::Slept> for Slept {
    /// Returns the result for a pool without windows.
    fn from(memory: sleep::Slept) -> Self {
        Slept { memory, ..Slept::default() }
    }
}

impl From<sleep::Woken> for Woken {
    /// Returns the result for a pool without windows.
    fn from(memory: sleep::Woken) -> Self {
        Woken { memory, ..Woken::default() }
    }
}

impl AddAssign for Slept {
    fn add_assign(&mut self, other: Self) {
        let Slept { memory, deregistrations, suspended_bytes } = other;
        self.memory += memory;
        self.deregistrations += deregistrations;
        self.suspended_bytes += suspended_bytes;
    }
}

impl AddAssign for Woken {
    fn add_assign(&mut self, other: Self) {
        let Woken { memory, registrations, changed, resumed, lost } = other;
        self.memory += memory;
        self.registrations += registrations;
        self.changed.extend(changed);
        self.resumed.extend(resumed);
        self.lost.extend(lost);
    }
}

/// A step of a sleep or wake: see `docs/sleep-protocol.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SleepStep {
    /// The ranks exchange the current op and the state of the pool.
    Agree,
    /// The ranks exchange their verdicts.
    Decide,
    /// The ranks suspend their communicators.
    Suspend,
    /// The ranks resume their communicators.
    Resume,
    /// The ranks register windows.
    Register,
    /// The ranks exchange their results.
    Check,
}

impl fmt::Display for SleepStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SleepStep::Agree => "while the ranks compared the pool's state",
            SleepStep::Decide => "while the ranks exchanged their verdicts",
            SleepStep::Suspend => "while communicators were suspended",
            SleepStep::Resume => "while communicators were resumed",
            SleepStep::Register => "while windows were registered",
            SleepStep::Check => "while the ranks exchanged their results",
        })
    }
}

/// The properties in which ranks can differ when they put a pool to sleep or wake it together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SleepField {
    /// The version of the protocol. It differs if the ranks run different builds, or if a rank makes a different call on this communicator.
    Protocol,
    /// The call: 1 to 3 for a sleep that keeps, drops or zeroes the contents, 4 for a wake, 5 to 7 for a sleep that also suspends.
    Call,
    /// The number of sleeps and wakes over this communicator.
    Number,
    /// The symmetric pool.
    Pool,
    /// Set if the rank compares histories, which depends on the agreement mode with which it attached the pool.
    Compared,
    /// The phase of the pool: 0 awake, 1 asleep, 2 held.
    Phase,
    /// The windows of the pool.
    Windows,
    /// A communicator of the pool includes ranks that are not in the given communicator. The value is the number of its ranks.
    Communicators,
}

impl fmt::Display for SleepField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SleepField::Protocol => "the protocol (another build, or another call)",
            SleepField::Call => {
                "the call (1 to 3: a sleep that keeps, drops, zeroes; 4: a wake; 5 to 7: a sleep that also suspends)"
            }
            SleepField::Number => "the number of sleeps and wakes so far",
            SleepField::Pool => "the pool",
            SleepField::Compared => {
                "whether they compare histories (1: yes), which the pool's agreement mode determines"
            }
            SleepField::Phase => "the phase of the pool (0: awake, 1: asleep, 2: held)",
            SleepField::Windows => "the pool's windows",
            SleepField::Communicators => "a communicator of the pool, which has ranks outside the given one",
        })
    }
}

/// The differences between ranks. Every rank gets the same report. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SleepDifference {
    /// The first field that differs.
    pub field: SleepField,
    /// The ranks, grouped by the value of the field.
    pub groups: Vec<(RankSet, u64)>,
}

impl fmt::Display for SleepDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the ranks differ in {}", self.field)?;
        self.groups.iter().try_for_each(|(ranks, value)| write!(f, "; {}: {value}", Ranks(ranks)))
    }
}

/// A condition that prevents a rank from putting its pool to sleep or waking it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// A graph is being captured.
    #[error("a graph is being captured: end the capture first")]
    Capturing,
    /// Work on the device did not complete in time.
    #[error(
        "work on the device did not complete within {waited:?}: wait for it first, or give the communicator a longer deadline"
    )]
    Work {
        /// Duration of the wait.
        waited: Duration,
    },
    /// A step of the pool is open.
    #[error("a step of the pool is open: sleep between end_step and begin_step")]
    StepOpen,
    /// Another thread is executing a sleep or wake of the pool.
    #[error("another thread is putting the pool to sleep or waking it: try again when it is done")]
    Busy,
    /// The driver failed to query or synchronize a stream.
    #[error(
        "a stream could not be queried or synchronized (driver code {code}): look for the first CUDA error of this rank"
    )]
    Stream {
        /// The driver's code.
        code: i32,
    },
    /// The contents could not be saved.
    #[error(
        "{live_bytes} bytes could not be saved, {reason}, code {code}: free host memory, or space on the disk of kept contents, or drop the \
         contents"
    )]
    Save {
        /// Bytes in live blocks.
        live_bytes: u64,
        /// The kind of the error.
        reason: Reason,
        /// The error code.
        code: i32,
    },
    /// Retired stitched ranges still map the pool's memory.
    #[error("retired stitched ranges of the pool are not released: sync, trim, and try again")]
    Retired,
    /// A communicator with windows on the pool is lost, because an NCCL call on it has not returned.
    #[error("a lost communicator has windows on the pool: end the processes that it waits for, and try again")]
    Lost,
    /// Memory of the pool is still held, by the driver or by a lost communicator.
    #[error("memory of the pool is still held: put the pool to sleep again, which reports the cause, and then wake it")]
    Held,
    /// The device is out of memory.
    #[error(
        "the device is out of memory ({needed_bytes} bytes needed, code {code}): free memory of other pools or processes there, and wake \
         again, which releases what is cached"
    )]
    Memory {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// The driver's code.
        code: i32,
    },
    /// A configured limit is too low.
    #[error(
        "{needed_bytes} bytes are needed and the limit is {limit_bytes}: free memory of other pools or raise it, and wake again"
    )]
    Limit {
        /// Bytes that the pool needs.
        needed_bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The contents could not be restored.
    #[error(
        "the contents could not be restored, {reason}, code {code}: wake again, unless the file of the contents was modified: restore the file, \
         or destroy the pool"
    )]
    Load {
        /// The kind of the error.
        reason: Reason,
        /// The error code.
        code: i32,
    },
    /// A window does not fit into a communicator's symmetric address space.
    #[error(
        "a window of {needed_bytes} bytes does not fit into the symmetric address space: detach other pools, or put them to sleep"
    )]
    SymmetricSpace {
        /// Size of the window in bytes.
        needed_bytes: u64,
    },
    /// NCCL cannot suspend a communicator of the pool.
    #[error(
        "NCCL cannot suspend a communicator of the pool: use NCCL 2.29.7 or newer without NCCL_DISABLE_MEM_MANAGER=1, or sleep without it"
    )]
    NoSuspension,
    /// A communicator to suspend has registrations of other pools.
    #[error(
        "a communicator to suspend has windows of other pools: put these to sleep first, or sleep without suspending"
    )]
    WindowsOfOtherPools,
    /// An unknown obstacle, possibly reported by another version.
    #[error("unknown obstacle ({number})")]
    Other {
        /// The number that the rank reported.
        number: u64,
    },
}

/// A rank and its obstacle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankObstacle {
    /// The rank.
    pub rank: u32,
    /// The obstacle.
    pub obstacle: Obstacle,
}

fn listed(ranks: &[RankObstacle]) -> String {
    let text = |of: &RankObstacle| format!("rank {}: {}", of.rank, of.obstacle);
    ranks.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// An error returned by a collective sleep or wake. `docs/sleep-protocol.md` describes the state of the other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CollectiveSleepError {
    /// The pool does not exist.
    #[error(transparent)]
    Unknown(#[from] UnknownError),
    /// The pool is not attached to the communicator. No message was sent to other ranks.
    #[error(
        "{pool} is not attached to communicator \"{communicator}\": attach it on every rank, or use another communicator"
    )]
    NotAttached {
        /// Name of the communicator.
        communicator: String,
        /// The pool.
        pool: PoolId,
    },
    /// A graph is being captured, and the ranks' messages would become part of it. No message was sent, so the other ranks wait for this
    /// one.
    #[error("a graph is being captured: end the capture before the pool sleeps or wakes")]
    Capturing,
    /// The driver cannot report whether a graph is being captured. No message was sent, so the other ranks wait for this one.
    #[error("communicator \"{communicator}\": {error}")]
    Cuda {
        /// Name of the communicator.
        communicator: String,
        /// The driver's error.
        error: CudaError,
    },
    /// The communicator had already ended. The pool is unchanged.
    #[error("communicator \"{communicator}\" is {state}: connect a new one, attach the pool to it, and use it")]
    Gone {
        /// Name of the communicator.
        communicator: String,
        /// The communicator's state.
        state: CommState,
        /// The error that ended it, if any.
        cause: Option<Arc<CommError>>,
    },
    /// This rank's device has no room for the memory of the suspended communicator over which the ranks communicate. No message was sent,
    /// and the call is not recorded as an op: the other ranks wait for this one until the deadline. Make room, and repeat the call. A rank
    /// that does not repeat it has one op fewer than the others.
    #[error(
        "communicator \"{communicator}\" needs {needed_bytes} bytes to resume, and the device has {free_bytes}: free memory of other pools \
         or processes, and call it again before the deadline"
    )]
    NoRoom {
        /// Name of the communicator.
        communicator: String,
        /// Bytes that NCCL needs.
        needed_bytes: u64,
        /// Bytes that are free on the device.
        free_bytes: u64,
    },
    /// The ranks' histories differ. Nothing was changed on any rank.
    #[error("communicator \"{communicator}\": {disagreement}")]
    Disagreed {
        /// Name of the communicator.
        communicator: String,
        /// The core's report.
        disagreement: Box<Disagreement>,
    },
    /// The ranks make different calls, or the pool differs between them. Nothing was changed on any rank.
    #[error(
        "communicator \"{communicator}\": {difference}: make the same calls at the same points of the program on every rank; a pool \
         that sleeps on some ranks can wake once it sleeps on all"
    )]
    Differ {
        /// Name of the communicator.
        communicator: String,
        /// The differences.
        difference: Box<SleepDifference>,
    },
    /// Some ranks were unable to proceed, so none did. Another attempt may succeed.
    #[error("communicator \"{communicator}\": the pool is unchanged: {}", listed(.ranks))]
    Refused {
        /// Name of the communicator.
        communicator: String,
        /// The ranks and their obstacles.
        ranks: Vec<RankObstacle>,
    },
    /// The communicator ended during the op. The state of the pool on this rank depends on the step:
    /// - In `Decide` of a sleep to which this rank had agreed, and in `Register`: all communicators of the pool have ended on this rank,
    ///   and the pool has no windows. It is asleep only if it was asleep before the call to sleep.
    /// - In `Check` of a sleep: the pool is asleep, or held if a window or the driver still holds its memory.
    /// - In `Check` of a wake: the pool is awake, with its windows on other communicators.
    /// - In `Suspend`: the pool is asleep.
    /// - In all other cases: the pool is unchanged.
    #[error("communicator \"{communicator}\" ended {step}, and the pool is {}: {error}", if *.is_asleep { "asleep" } else { "awake" })]
    Broken {
        /// Name of the communicator.
        communicator: String,
        /// The step during which it ended.
        step: SleepStep,
        /// `false` if the pool is awake on this rank.
        is_asleep: bool,
        /// The underlying error.
        error: Box<SyncError>,
    },
    /// All ranks sleep, but some could not release their memory: a lost communicator has windows on it, or a driver call failed.
    #[error(
        "communicator \"{communicator}\": the pool sleeps, but the memory of {} could not be released, because a communicator \
         is lost or a driver call failed: end the lost communicator, and sleep again",
        Ranks(ranks)
    )]
    Held {
        /// Name of the communicator.
        communicator: String,
        /// The ranks whose memory is held.
        ranks: RankSet,
    },
}
