//! The ops of the registrar, their steps, and their outcomes.
//!
//! ```text
//!  sync    (Agree ─ Register ...) on each communicator
//!  sleep   Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check
//!  wake    Agree ─ Remap ─── Decide ─ Register ... ─────────── Check
//! ```
//!
//! `Agree`, `Decide` and `Check` are all-gathers over the op's first communicator, and `Register` is a collective of
//! NCCL. All other steps are local to the rank.

/// A communicator, identified by its index in the job.
pub type Comm = usize;
/// A segment of the pool, identified by its position in the log.
pub type Segment = usize;

/// A call that the program makes on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// `registrar.sync(..)`.
    Sync,
    /// `registrar.sleep(..)`, in which the ranks agree over this communicator.
    Sleep(Comm),
    /// `registrar.wake(..)`, in which the ranks agree over this communicator.
    Wake(Comm),
}

/// The step of an op that a rank is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Compares the ranks' ops and the phases of their pools. The first step of every op; nothing has changed yet.
    Agree(Comm),
    /// Waits until no kernel of this rank uses the pool.
    Quiesce,
    /// Obtains memory from the device, maps it at the old addresses, and restores the saved contents.
    Remap,
    /// Exchanges whether each rank succeeded. All ranks perform the rest of the op, or none does.
    Decide,
    /// Deregisters a window, in log order.
    Deregister(Comm, Segment),
    /// Returns the memory to the device.
    Unmap,
    /// Registers a window, in log order.
    Register(Comm, Segment),
    /// Exchanges the results. After a sleep, no rank has a window, so the memory has been returned to the device. After
    /// a wake, the ranks know which windows and communicators have changed.
    Check,
    /// The program has ended.
    Done,
}

/// The phase of a pool on one rank, between ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The pool has its memory and can be used.
    Awake,
    /// The pool has no memory and no window.
    Asleep,
    /// The pool can neither be used nor release its memory, because a lost communicator holds it. A later sleep may
    /// succeed.
    Failed,
}

/// The outcome of a rank's last op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// No op has ended yet.
    None,
    /// The op succeeded.
    Done,
    /// Some ranks failed, and all ranks that receive the decision do nothing.
    Refused {
        /// Set if this rank failed.
        mine: bool,
    },
    /// The ranks called different ops, or their pools are in different phases. Nothing was changed.
    Differ,
    /// The communicator had already ended. Nothing was changed.
    Gone,
    /// The communicator ended during the op.
    Broken,
    /// A lost communicator holds the memory of some ranks, whose pool has failed. All other ranks are asleep.
    Held,
}
