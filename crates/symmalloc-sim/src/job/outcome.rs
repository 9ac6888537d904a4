//! The outcome of a successful run.

use std::ops::AddAssign;

/// The outcome of a successful run, determined by the plan alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobOutcome {
    /// Ranks at the start.
    pub ranks: u64,
    /// Ops that ran, over all ranks.
    pub ops: u64,
    /// Ops of the ranks' private work.
    pub private_ops: u64,
    /// Allocations that were placed where a plan put them, over all ranks.
    pub planned: u64,
    /// Steps that deviated from their plan, over all ranks.
    pub differing: u64,
    /// Points at which all live ranks were compared.
    pub syncs: u64,
    /// Faults that occurred.
    pub faults: JobFaults,
    /// Restarts of ranks, for any reason.
    pub restarts: u64,
    /// Ranks that left the job: their device was lost, or they could not be restarted.
    pub left: u64,
    /// Ranks that differed because their driver ran out of memory, and that the agreement reported.
    pub caught: u64,
    /// Full scans of a rank's invariants, over all ranks.
    pub checks: u64,
    /// Maximum amount of device memory that one rank held at once, in bytes.
    pub device_bytes_peak: u64,
    /// Digest over all heaps of the reference rank at the last sync before the liveness phase.
    pub digest: u64,
}

/// The faults that occurred, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobFaults {
    /// Driver calls that failed, for any reason.
    pub failed_calls: u64,
    /// Ranks with at least one failed call.
    pub ranks: u64,
    /// Injected faults that reported out of memory.
    pub out_of_memory: u64,
    /// Injected faults that failed a call for another reason.
    pub refused: u64,
    /// Injected losses of a device.
    pub losses: u64,
    /// Ranks whose device had less memory than the program requested.
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
    /// Adds up the counts of several runs. For peaks, takes the maximum; digests are folded into one.
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
