//! Identifiers of processes, communicators and ranks, equal on every rank.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A process of a job, by the rank that its launcher assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u32);

/// A communicator id: equal on all ranks of the communicator, and unique in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CommunicatorId(pub u64);

impl CommunicatorId {
    /// Derives an id from bytes that are equal on all ranks of the communicator and unique to the communicator.
    pub fn of(bytes: &[u8]) -> Self {
        // FNV-1a gives the same result in every version and on every machine.
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        CommunicatorId(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }
}

impl fmt::Display for CommunicatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A rank of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RankId {
    /// The communicator.
    pub communicator: CommunicatorId,
    /// The rank.
    pub rank: u32,
}

/// The progress of a rank on a communicator, in numbers of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Collectives submitted to streams so far.
    pub submitted: u64,
    /// Collectives known to have finished on the device.
    pub finished: u64,
    /// `true` once the rank has begun to destroy the communicator. The destruction is not a collective.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_destroying: bool,
}
