//! What a run came to.

use std::ops::AddAssign;

/// The outcome of a run that is as it must be. A function of the plan alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobOutcome {
    /// Ranks at the start.
    pub ranks: u64,
    /// Ops carried out, over all ranks.
    pub ops: u64,
    /// Ops that ranks carried out for themselves, in private pools.
    pub private_ops: u64,
    /// Allocations that went where a plan says, over all ranks.
    pub planned: u64,
    /// Steps that were another one than their plan's, over all ranks.
    pub differing: u64,
    /// Points at which all live ranks were compared.
    pub syncs: u64,
    /// What happened to ranks.
    pub faults: JobFaults,
    /// Ranks that started again, for whatever reason.
    pub restarts: u64,
    /// Ranks that were lost and left the job.
    pub left: u64,
    /// Ranks that differed, because their driver refused memory, and were caught.
    pub caught: u64,
    /// Full scans of a rank's invariants.
    pub checks: u64,
    /// The most device memory that one rank held at once, in bytes.
    pub device_bytes_peak: u64,
    /// Over all heaps of the reference rank, at the last sync before everything was given up.
    pub digest: u64,
}

/// What happened to ranks, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobFaults {
    /// Calls of drivers that failed, whatever the reason.
    pub failed_calls: u64,
    /// Ranks to which at least one of them happened.
    pub ranks: u64,
    /// Injected: the driver had no memory.
    pub out_of_memory: u64,
    /// Injected: the driver refused a call.
    pub refused: u64,
    /// Injected: devices that were lost.
    pub losses: u64,
    /// Ranks whose device had less memory than the program wanted.
    pub small_devices: u64,
}

impl AddAssign for JobFaults {
    fn add_assign(&mut self, other: Self) {
        self.failed_calls += other.failed_calls;
        self.ranks += other.ranks;
        self.out_of_memory += other.out_of_memory;
        self.refused += other.refused;
        self.losses += other.losses;
        self.small_devices += other.small_devices;
    }
}

impl AddAssign for JobOutcome {
    /// Adds up runs. Peaks are the larger one; digests are folded.
    fn add_assign(&mut self, other: Self) {
        self.ranks += other.ranks;
        self.ops += other.ops;
        self.private_ops += other.private_ops;
        self.planned += other.planned;
        self.differing += other.differing;
        self.syncs += other.syncs;
        self.faults += other.faults;
        self.restarts += other.restarts;
        self.left += other.left;
        self.caught += other.caught;
        self.checks += other.checks;
        self.device_bytes_peak = self.device_bytes_peak.max(other.device_bytes_peak);
        self.digest = self.digest.rotate_left(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ other.digest;
    }
}
