//! Errors of the rendezvous.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use thiserror::Error;

/// An error returned if the ranks do not find each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The environment does not specify an address of rank 0.
    #[error(
        "the address of rank 0 is unknown: set SYMMALLOC_RENDEZVOUS=host:port (a free port on rank 0's machine) or \
         NCCL_COMM_ID=host:port, the same on every rank"
    )]
    NoAddress,
    /// The address cannot be used.
    #[error("{variable}=\"{value}\" cannot be resolved: write host:port, with a host that this machine can resolve")]
    BadAddress {
        /// The source of the address.
        variable: &'static str,
        /// The value of the address.
        value: String,
    },
    /// Rank 0 cannot listen.
    #[error("rank 0 cannot listen on {address} ({kind}): set SYMMALLOC_RENDEZVOUS to a free port of its machine")]
    Listen {
        /// The last address tried.
        address: SocketAddr,
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Rank 0 cannot listen on a socket of this machine.
    #[error(
        "rank 0 cannot listen on a socket of this machine ({kind}). If another user has taken all names, set SYMMALLOC_JOB_SECRET to \
         the same random text on every rank: other users then cannot guess the names"
    )]
    ListenLocal {
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Some ranks did not arrive in time. Rank 0 returns this error.
    #[error("ranks {missing:?} did not arrive within {waited:?}: look for their errors")]
    Missing {
        /// The ranks, ascending.
        missing: Vec<u32>,
        /// Time that rank 0 waited.
        waited: Duration,
    },
    /// Rank 0 did not answer in time. The other ranks return this error.
    #[error("rank 0 did not answer at {address} within {waited:?}: it died, is late, or its port cannot be reached")]
    NoAnswer {
        /// The address, or the first of several.
        address: SocketAddr,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// Rank 0 did not answer on a socket of this machine in time. The other ranks return this error.
    #[error(
        "rank 0 did not answer on this machine within {waited:?}: it died, is late, or runs as another user or in another \
         container{}. Run all ranks of a machine as one user; count each container as a machine in LOCAL_WORLD_SIZE, and set \
         SYMMALLOC_RENDEZVOUS=host:port",
        .foreign_user.map_or(String::new(), |user| format!(" (user {user} owns a socket with its name)"))
    )]
    NoLocalAnswer {
        /// The id of another user that owns a socket of rank 0's name, if there was one.
        foreign_user: Option<u32>,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// Rank 0 runs another version of this library.
    #[error(
        "rank 0 uses version {version} of the rendezvous and this rank {expected}: run the same symmalloc version on every rank"
    )]
    OtherVersion {
        /// The version that rank 0 uses.
        version: u8,
        /// The version that this rank uses.
        expected: u8,
    },
    /// Rank 0 has a job secret, and this rank has none.
    #[error(
        "rank 0 has a job secret, and this rank has none: set SYMMALLOC_JOB_SECRET to the same value on every rank"
    )]
    SecretMissing,
    /// This rank has a job secret, and rank 0 has none.
    #[error(
        "this rank has a job secret, and rank 0 has none: set SYMMALLOC_JOB_SECRET to the same value on every rank"
    )]
    SecretMissingAtRank0,
    /// This rank and rank 0 have different job secrets.
    #[error(
        "this rank and rank 0 have different job secrets: set SYMMALLOC_JOB_SECRET to the same value on every rank"
    )]
    WrongSecret,
    /// The job secret is too short.
    #[error(
        "SYMMALLOC_JOB_SECRET has {bytes} bytes and needs {bytes_min}: use random text, for example the output of `openssl rand -hex 32`"
    )]
    ShortSecret {
        /// Length of the secret.
        bytes: usize,
        /// Required length.
        bytes_min: usize,
    },
    /// The system does not provide random numbers.
    #[error("the system provides no random numbers ({kind}): allow the system call getrandom")]
    Random {
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Another process has already joined with this rank. The later process returns this error.
    #[error("another process has already joined as rank {rank}: the launcher gave two processes the same rank")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
}
