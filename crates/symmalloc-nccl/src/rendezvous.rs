//! How all ranks of a job come by one [`UniqueId`](crate::UniqueId) without a side channel.

use std::net::SocketAddr;
use std::time::Duration;
use thiserror::Error;

/// The ranks did not find each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Nothing says where rank 0 is.
    #[error(
        "nothing says where rank 0 is: set SYMMALLOC_RENDEZVOUS=host:port (a free port on rank 0's machine) or \
         NCCL_COMM_ID=host:port on every rank"
    )]
    NoAddress,
    /// The address cannot be used.
    #[error("{variable}=\"{value}\" is not an address: write host:port")]
    BadAddress {
        /// Where it came from.
        variable: &'static str,
        /// What it says.
        value: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address} (system error {code}): choose another port in SYMMALLOC_RENDEZVOUS")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's code.
        code: i32,
    },
    /// Some ranks did not come in time; rank 0 says this.
    #[error("ranks {missing:?} did not come within {waited:?}: look for their errors")]
    Missing {
        /// The ranks.
        missing: Vec<u32>,
        /// How long rank 0 waited.
        waited: Duration,
    },
    /// Rank 0 did not answer in time; the others say this.
    #[error("rank 0 did not answer at {address} within {waited:?}: it died, is late, or its port cannot be reached")]
    NoAnswer {
        /// Where.
        address: String,
        /// How long this rank waited.
        waited: Duration,
    },
    /// Two ranks said that they are the same one.
    #[error("rank {rank} came twice: two processes have the same rank")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
}
