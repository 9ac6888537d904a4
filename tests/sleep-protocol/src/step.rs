//! The ops of the registrar, the steps that they are made of, and how they end.
//!
//! ```text
//!  sync    (Agree ─ Register ...) on each communicator
//!  sleep   Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check
//!  wake    Agree ─ Remap ─── Decide ─ Register ... ─────────── Check
//! ```
//!
//! `Agree`, `Decide` and `Check` are all-gathers over the op's first communicator, `Register` is NCCL's own collective; all other
//! steps concern this rank alone.

/// A communicator, by its number in the job.
pub type Comm = usize;
/// A segment of the pool, by its place in the log.
pub type Segment = usize;

/// A call of the program's, on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// `registrar.sync(..)`, as it is today.
    Sync,
    /// `registrar.sleep(..)`, in which the ranks agree over this communicator.
    Sleep(Comm),
    /// `registrar.wake(..)`, in which the ranks agree over this communicator.
    Wake(Comm),
}

/// Where a rank is in an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The ranks compare their ops and what state the pool is in. The first step of every op; nothing has been done yet.
    Agree(Comm),
    /// Waits until no kernel of this rank's uses the pool.
    Quiesce,
    /// Gets memory from the device, at the old addresses, and puts back what was kept.
    Remap,
    /// Says whether it could, and hears whether all could. What follows is done by all ranks or by none.
    Decide,
    /// A window goes, in log order.
    Deregister(Comm, Segment),
    /// The memory goes back to the device.
    Unmap,
    /// A window comes, in log order.
    Register(Comm, Segment),
    /// The ranks tell each other how it went: in a sleep, that no window is left, which is when the memory is back on the device; in a
    /// wake, which windows and communicators are not what they were.
    Check,
    /// The program has ended.
    Done,
}

/// What a pool is on one rank, between ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// It has its memory and can be used.
    Awake,
    /// It has no memory and no window.
    Asleep,
    /// It can neither be used nor give its memory back, because a lost communicator holds it. A later sleep may help.
    Failed,
}

/// How a rank's last op ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// There was none.
    None,
    /// Well.
    Done,
    /// Some ranks could not, and all that hear it do nothing. `mine` says whether this rank is one of those that could not.
    Refused {
        /// Whether this rank could not.
        mine: bool,
    },
    /// The ranks called different ops, or the pool is in different states. Nothing was done.
    Differ,
    /// The communicator had ended before: nothing was done.
    Gone,
    /// The communicator ended in the middle.
    Broken,
    /// A lost communicator holds the memory of some ranks, whose pool has failed; all others sleep.
    Held,
}
