//! Ways to get the protocol wrong. Each breaks a property, and the checker must find it: a check that cannot fail checks nothing.

/// A flaw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// A sleep unmaps before it deregisters.
    UnmapFirst,
    /// A sleep leaves the windows where they are.
    KeepWindows,
    /// Rank 1 deregisters the last segment first.
    OtherOrder,
    /// A sleep does not ask whether the others have quiesced.
    SleepUnasked,
    /// A sleep unmaps memory that a lost communicator holds.
    UnmapUnderLost,
    /// A sleep does not wait until the others have deregistered.
    SleepUnchecked,
    /// A rank whose sleep broke before it heard the decision keeps its other communicators.
    KeepCommunicators,
    /// The ranks do not compare which op they are in.
    OpsUncompared,
    /// A sleep refuses to begin where the pool sleeps on some ranks already.
    SleepOnce,
    /// A wake neither agrees nor decides: it remaps and registers.
    WakeUnasked,
    /// A rank that could not remap says that it could.
    WakeUntold,
    /// A rank that could remap stays awake though another one could not.
    WakeAlone,
    /// A refused wake leaves the memory mapped.
    KeepMemory,
    /// A broken communicator's decision is taken for a yes.
    GoOn,
    /// A wake that breaks after its decision gives the memory back.
    UnmapLate,
    /// A wake that breaks after its decision keeps the communicators that it has not come to.
    LeaveUnregistered,
    /// A wake does not tell which communicators were lost on the way.
    LoseUntold,
    /// A wake registers on the communicator over which the ranks agree last, not first.
    AgreedLast,
    /// No wait has a deadline.
    NoDeadline,
}
