//! Deliberate flaws in the protocol. Each violates a property, and the checker must find the violation. This guards
//! against checks that cannot fail.

/// A deliberate flaw in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// A sleep unmaps before it deregisters.
    UnmapFirst,
    /// A sleep does not deregister windows.
    KeepWindows,
    /// Rank 1 deregisters the last segment first.
    DifferentOrder,
    /// A sleep does not check whether the other ranks have quiesced.
    SleepUnasked,
    /// A sleep unmaps memory that a lost communicator holds.
    UnmapUnderLost,
    /// A sleep does not wait until the others have deregistered.
    SleepUnchecked,
    /// A rank whose sleep breaks before it receives the decision keeps its other communicators.
    KeepCommunicators,
    /// The ranks do not compare their current ops.
    OpsUncompared,
    /// A sleep fails if the pool is already asleep on some ranks.
    SleepOnce,
    /// A wake neither agrees nor decides: it remaps and registers.
    WakeUnasked,
    /// A rank that could not remap reports success.
    WakeUntold,
    /// A rank that could remap stays awake although another rank could not.
    WakeAlone,
    /// A refused wake leaves the memory mapped.
    KeepMemory,
    /// The decision counts as a yes if the communicator broke.
    GoOn,
    /// A wake that breaks after its decision releases its memory.
    UnmapLate,
    /// A wake that breaks after its decision keeps the communicators that it has not reached.
    LeaveUnregistered,
    /// A wake does not report which communicators were lost during registration.
    LoseUntold,
    /// A wake registers last, not first, on the communicator over which the ranks agree.
    AgreedLast,
    /// No wait has a deadline.
    NoDeadline,
    /// A wake registers on a suspended communicator.
    RegisterSuspended,
    /// The ranks exchange messages over a suspended communicator.
    AgreeSuspended,
    /// A rank whose sleep breaks before the suspension keeps the communicators that the others suspend.
    KeepUnsuspended,
    /// The recovery of a rank whose device is full is an op of the pool.
    RecoverAsOp,
}
