//! The ops of the registrar, their steps, and their outcomes.
//!
//! ```text
//!  sync    (Agree ─ Register ...) on each communicator
//!  sleep   [Resume] ─ Agree ─ Quiesce ─ Decide ─ Deregister ... ─ Unmap ─ Check [─ Suspend ...]
//!                       └─ all sleep ── DecideAsleep ─────────────────────────── [─ Suspend ...]
//!  wake    [Resume] ─ Agree ─ Remap ─── Decide ─ [Resume] Register ... ─────── Check
//! ```
//!
//! `Agree`, `Decide`, `DecideAsleep` and `Check` are all-gathers over the op's first communicator. `Register`, `Suspend`
//! and `Resume` are collectives of NCCL. All other steps are local to the rank.

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
    /// `registrar.sleep_and_suspend(..)`, in which the ranks agree over this communicator.
    Suspend(Comm),
    /// `registrar.wake(..)`, in which the ranks agree over this communicator.
    Wake(Comm),
}

/// The step of an op that a rank is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Restores NCCL's memory of a suspended communicator: the first step of an op over it, and a step of a wake for each
    /// other one.
    Resume(Comm),
    /// Compares the ranks' ops and the phases of their pools. Nothing but the communicator has changed yet.
    Agree(Comm),
    /// Waits until no kernel of this rank uses the pool.
    Quiesce,
    /// Obtains memory from the device, maps it at the old addresses, and restores the saved contents.
    Remap,
    /// Exchanges whether each rank succeeded. All ranks perform the rest of the op, or none does.
    Decide,
    /// Exchanges whether each rank can suspend, if the pool already sleeps on all ranks.
    DecideAsleep,
    /// Deregisters a window, in log order.
    Deregister(Comm, Segment),
    /// Returns the memory to the device.
    Unmap,
    /// Registers a window, in log order.
    Register(Comm, Segment),
    /// Exchanges the results. After a sleep, no rank has a window, so the memory has been returned to the device. After
    /// a wake, the ranks know which windows and communicators have changed.
    Check,
    /// Releases NCCL's memory of a communicator. The communicator that the ranks agree over is the last one.
    Suspend(Comm),
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
    Held,
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
