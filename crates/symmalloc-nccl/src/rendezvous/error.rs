//! Why the ranks did not find each other.

use std::io;
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
         NCCL_COMM_ID=host:port, the same on every rank"
    )]
    NoAddress,
    /// The address cannot be used.
    #[error(
        "{variable}=\"{value}\" is no address that can be found: write host:port, with a host that this machine knows"
    )]
    BadAddress {
        /// Where it came from.
        variable: &'static str,
        /// What it says.
        value: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address} ({kind}): name a free port of its machine in SYMMALLOC_RENDEZVOUS")]
    Listen {
        /// The last address tried.
        address: SocketAddr,
        /// The system's reason.
        kind: io::ErrorKind,
    },
    /// Some ranks did not come in time; rank 0 says this.
    #[error("ranks {missing:?} did not come within {waited:?}: look for their errors")]
    Missing {
        /// The ranks, ascending.
        missing: Vec<u32>,
        /// How long rank 0 waited.
        waited: Duration,
    },
    /// Rank 0 did not answer in time; the others say this.
    #[error("rank 0 did not answer at {address} within {waited:?}: it died, is late, or its port cannot be reached")]
    NoAnswer {
        /// Where; the first, if there were several.
        address: SocketAddr,
        /// How long this rank waited.
        waited: Duration,
    },
    /// Another process came with this rank before; the later one says this.
    #[error("another process has come as rank {rank}: the launcher gave two processes the same rank")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
}
