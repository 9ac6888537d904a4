//! What processes and communicators are called, on every rank alike.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A process of a job: its rank as its launcher says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId(pub u32);

/// A communicator. Equal on all its ranks, and of no other communicator of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CommunicatorId(pub u64);

impl CommunicatorId {
    /// From bytes that are equal on all its ranks and differ from those of any other communicator.
    pub fn of(bytes: &[u8]) -> Self {
        // FNV-1a: the same in every version and on every machine.
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

/// How far a rank is on a communicator: numbers of collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Given to streams so far.
    pub submitted: u64,
    /// Known to be done on the device.
    pub finished: u64,
}
