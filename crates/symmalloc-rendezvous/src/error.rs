//! Errors of the rendezvous.

use crate::launch::Launcher;
use crate::version::VERSION;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use symmalloc_agreement::Ranks;
use thiserror::Error;

/// An error returned if the ranks do not find each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The environment does not specify where the ranks meet.
    #[error(
        "the ranks run on several machines, and this rank found no place to meet the others: neither SYMMALLOC_RENDEZVOUS nor MASTER_ADDR and \
         MASTER_PORT are set, and {launcher} set no identifier of the job, which would name a folder in the home directory. Set \
         SYMMALLOC_RENDEZVOUS=host:port (a free port on rank 0's machine) or SYMMALLOC_RENDEZVOUS=/a/folder/that/all/machines/share, the \
         same on every rank"
    )]
    NoAddress {
        /// The launcher that started this rank.
        launcher: Launcher,
    },
    /// The ranks are to meet in a shared folder, and nothing distinguishes their job from others that use it.
    #[error(
        "this rank could meet the ranks of another job in the folder SYMMALLOC_RENDEZVOUS, because {launcher} set no identifier of the job: set \
         MASTER_ADDR and MASTER_PORT to an address that no other job uses, the same on every rank (torchrun sets both, and `--rdzv-id` \
         suffices), or SYMMALLOC_RENDEZVOUS=host:port"
    )]
    UnnamedJob {
        /// The launcher that started this rank.
        launcher: Launcher,
    },
    /// The job needs a folder, and the environment does not specify the home directory.
    #[error(
        "the ranks run on several machines, and this rank found no place to meet the others: none of SYMMALLOC_RENDEZVOUS, MASTER_ADDR with \
         MASTER_PORT, XDG_STATE_HOME and HOME is set. Set one of them, the same on every rank"
    )]
    NoHome,
    /// The value of an environment variable is not UTF-8.
    #[error("{variable} is not UTF-8: set it to a value in UTF-8, the same on every rank")]
    NotUtf8 {
        /// Name of the environment variable.
        variable: &'static str,
    },
    /// The address cannot be used.
    #[error(
        "{variable}=\"{value}\" cannot be resolved: write host:port, with a host that this machine can resolve, or the absolute path of a folder"
    )]
    BadAddress {
        /// The source of the address.
        variable: &'static str,
        /// The text that was given as the address.
        value: String,
    },
    /// The job has more ranks than the rendezvous supports.
    #[error(
        "the job has {ranks} ranks, and at most {ranks_max} can meet: check WORLD_SIZE or its counterpart of the launcher"
    )]
    TooManyRanks {
        /// Number of ranks.
        ranks: u32,
        /// Maximum number of ranks.
        ranks_max: u32,
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
    /// Some ranks did not arrive before the earliest deadline among the ranks that did arrive. All ranks that arrived return this error.
    #[error(
        "{}{} did not arrive within {waited:?}: check the output of the missing ranks{}",
        Ranks(&missing.iter().copied().collect()), More(*more), Found(found)
    )]
    Missing {
        /// The first 1,024 of these ranks, ascending.
        missing: Vec<u32>,
        /// Number of further missing ranks.
        more: u32,
        /// The reasons why missing ranks could not join, as far as rank 0 learned them, ascending by rank. Without a job secret, any
        /// process that can connect could have sent these reasons.
        found: Vec<(u32, EndpointAnswer)>,
        /// Time that rank 0 waited.
        waited: Duration,
    },
    /// Rank 0 accepted this rank, and then reported nothing until this rank's deadline.
    #[error(
        "rank 0 accepted this rank, but did not report within {waited:?} whether all ranks arrived: rank 0 is stopped or overloaded, or its \
         machine can no longer be reached. Check the output of rank 0"
    )]
    NoOutcome {
        /// Time that this rank waited.
        waited: Duration,
    },
    /// Nobody set a key of the store in time. Ranks return this error if rank 0 never reached the store.
    #[error(
        "no rank wrote {key} to the store within {waited:?}: rank 0 failed earlier, is late, or uses a different store. Check the output of rank 0"
    )]
    KeyMissing {
        /// The key for which this rank waited.
        key: String,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// The store that the launcher runs cannot be reached.
    #[error(
        "this rank could not connect to the launcher's store at {address} (MASTER_ADDR and MASTER_PORT) within {waited:?} ({kind}): check that \
         the launcher runs and that the firewall admits this port, or set SYMMALLOC_RENDEZVOUS"
    )]
    StoreUnreachable {
        /// The address of the store.
        address: String,
        /// The last error of the system.
        kind: io::ErrorKind,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// A process accepts connections at the address of the launcher's store, but does not answer like a store.
    #[error(
        "the process at {address} (MASTER_ADDR and MASTER_PORT) does not answer as a store of PyTorch 2.2 or later: check both \
         variables, or set SYMMALLOC_RENDEZVOUS"
    )]
    ForeignStore {
        /// The address at which the process answered.
        address: String,
    },
    /// A file of the shared folder cannot be read or written.
    #[error("this rank cannot use {} for the meeting of the ranks ({kind}): set SYMMALLOC_RENDEZVOUS to a folder that this user can write", path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Another user could change the shared folder.
    #[error(
        "user {user} owns {}, and could change the files of this job: set SYMMALLOC_RENDEZVOUS to a folder that belongs to you", path.display()
    )]
    FolderOwner {
        /// The part of the path that belongs to another user.
        path: PathBuf,
        /// The owner's user id.
        user: u32,
    },
    /// Other users can write the shared folder.
    #[error("other users can write to {}, and could change the files of this job: run `chmod go-w` on it, or choose another folder", path.display())]
    FolderWritable {
        /// The part of the path that others can write.
        path: PathBuf,
    },
    /// A key or a value is too long for a store.
    #[error(
        "the store rejects a key of {key_bytes} bytes with a value of {value_bytes} bytes: use a key of at most 256 bytes and a value of at most 65536"
    )]
    TooLong {
        /// Length of the key.
        key_bytes: usize,
        /// Length of the value.
        value_bytes: usize,
    },
    /// A store has reached its size limit.
    #[error(
        "the store rejects another value, because its limit of {bytes_max} bytes is reached: use fewer keys or shorter values for one job"
    )]
    StoreFull {
        /// Maximum total size of the store's keys and values.
        bytes_max: usize,
    },
    /// Rank 0 of this job did not answer on the network in time. The other ranks return this error.
    #[error("rank 0 did not answer within {waited:?}. {}", Answers(.answers))]
    NoAnswer {
        /// Each address that was tried, with its most informative answer.
        answers: Vec<(SocketAddr, EndpointAnswer)>,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// The system cannot start a thread.
    #[error(
        "the operating system did not create a thread for the meeting of the ranks ({kind}): raise the limit on processes (`ulimit -u`)"
    )]
    Thread {
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Rank 0 did not answer on a socket of this machine in time. The other ranks return this error.
    #[error(
        "rank 0 did not answer on this machine within {waited:?}: it died, is late, or runs as another user, in another container or, if \
         MASTER_ADDR or SYMMALLOC_RENDEZVOUS is a loopback address, on another machine{}. Run all ranks of a machine as one user; count \
         each container as a machine in LOCAL_WORLD_SIZE, and set SYMMALLOC_RENDEZVOUS=host:port",
        .foreign_user.map_or(String::new(), |user| format!(" (user {user} owns a socket with its name)"))
    )]
    NoLocalAnswer {
        /// The id of the other user who owns a socket with the name that rank 0 would use, if there is such a user.
        foreign_user: Option<u32>,
        /// Time that this rank waited.
        waited: Duration,
    },
    /// Rank 0 runs another version of this library. Ranks on one machine return this error; on a network, see
    /// [`NoAnswer`](Self::NoAnswer).
    #[error(
        "rank 0 uses version {version} of the rendezvous and this rank {expected}: run the same symmalloc version on every rank"
    )]
    VersionMismatch {
        /// The version that rank 0 uses.
        version: u8,
        /// The version that this rank uses.
        expected: u8,
    },
    /// Rank 0 has a job secret, and this rank has none. Ranks on one machine return this error; on a network, see
    /// [`NoAnswer`](Self::NoAnswer).
    #[error(
        "rank 0 has a job secret, and this rank has none: set SYMMALLOC_JOB_SECRET to the same value on every rank"
    )]
    SecretMissing,
    /// This rank has a job secret, and rank 0 has none. Ranks on one machine return this error; on a network, see
    /// [`NoAnswer`](Self::NoAnswer).
    #[error(
        "this rank has a job secret, and rank 0 has none: set SYMMALLOC_JOB_SECRET to the same value on every rank"
    )]
    SecretMissingAtRank0,
    /// This rank and rank 0 have different job secrets. Ranks on one machine return this error; on a network, see
    /// [`NoAnswer`](Self::NoAnswer).
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
    #[error("the operating system returned no random numbers ({kind}): allow this process to call getrandom")]
    Random {
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// Another process has already joined with this rank. The later process returns this error.
    #[error("another process has already joined as rank {rank}: start each process with a different rank")]
    RankTwice {
        /// The rank.
        rank: u32,
    },
}

/// The number of ranks that are not listed, as the rest of a list.
struct More(u32);

impl fmt::Display for More {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { Ok(()) } else { write!(f, " and {} more", self.0) }
    }
}

/// The reasons of missing ranks, as the rest of a sentence.
struct Found<'a>(&'a [(u32, EndpointAnswer)]);

impl fmt::Display for Found<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_MAX: usize = 8;
        for (rank, answer) in self.0.iter().take(SHOWN_MAX) {
            write!(f, ". Rank {rank} could not join: {answer}")?;
        }
        if self.0.len() > SHOWN_MAX { write!(f, ". {} more could not join", self.0.len() - SHOWN_MAX) } else { Ok(()) }
    }
}

/// The answer at an address that did not lead to rank 0, the least informative first. Any process can give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
#[non_exhaustive]
pub enum EndpointAnswer {
    /// The connection was refused.
    #[error("no process listens there")]
    NotListening,
    /// The connection failed for another reason.
    #[error("it cannot be reached ({kind})")]
    Unreachable {
        /// The system's error.
        kind: io::ErrorKind,
    },
    /// A process accepted the connection and did not answer.
    #[error("a process accepts connections, and does not answer")]
    Silent,
    /// A process answered that does not use this protocol.
    #[error("a process answers with a different protocol")]
    Foreign,
    /// A process gave an answer that no rank 0 gives to this rank, or without a required proof.
    #[error("a process claims to be rank 0, but its answer cannot be one of rank 0")]
    Contradiction,
    /// A rank 0 of another job, or of one with another number of ranks.
    #[error("rank 0 of a different job")]
    DifferentJob,
    /// A rank 0 of another version.
    #[error("a rank 0 that uses version {version} of the rendezvous")]
    VersionMismatch {
        /// The version.
        version: u8,
    },
    /// A rank 0 without a job secret, while this rank has one.
    #[error("a rank 0 without a job secret")]
    NoSecret,
    /// A rank 0 with a job secret, while this rank has none.
    #[error("a rank 0 with a job secret")]
    SecretNeeded,
    /// A rank 0 with another job secret.
    #[error("a rank 0 with a different job secret")]
    SecretMismatch,
}

/// The answers of all addresses, displayed after the most likely cause.
struct Answers<'a>(&'a [(SocketAddr, EndpointAnswer)]);

impl fmt::Display for Answers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.0.iter().map(|(_, answer)| *answer).max().unwrap_or(EndpointAnswer::NotListening);
        match most {
            EndpointAnswer::SecretMismatch => f.write_str(
                "The job secrets probably differ: set SYMMALLOC_JOB_SECRET to the same value on every rank",
            ),
            EndpointAnswer::SecretNeeded => f.write_str(
                "This rank probably lacks the job secret: set SYMMALLOC_JOB_SECRET to the same value on every rank",
            ),
            EndpointAnswer::NoSecret => f.write_str(
                "Rank 0 probably lacks the job secret: set SYMMALLOC_JOB_SECRET to the same value on every rank",
            ),
            EndpointAnswer::VersionMismatch { .. } => write!(
                f,
                "Rank 0 probably runs a different version than this rank, which uses version {VERSION} of the rendezvous: run the same \
                 symmalloc version on every rank"
            ),
            EndpointAnswer::DifferentJob => f.write_str(
                "Rank 0 probably failed or has different settings: check its output, and check that all ranks have the same job, the same \
                 number of ranks and the same address",
            ),
            EndpointAnswer::Contradiction | EndpointAnswer::Foreign => f.write_str(
                "Another program probably uses rank 0's port: check the output of rank 0, or set SYMMALLOC_RENDEZVOUS to a free port of \
                 its machine",
            ),
            EndpointAnswer::Silent => f.write_str(
                "Rank 0 is probably stopped or late, or another program uses its port: check the output of rank 0, or set \
                 SYMMALLOC_RENDEZVOUS to a free port of its machine",
            ),
            EndpointAnswer::Unreachable { .. } => f.write_str(
                "Rank 0's machine probably cannot be reached from this one: check the address and the firewall",
            ),
            EndpointAnswer::NotListening => {
                f.write_str("Rank 0 probably failed earlier, or is late: check its output")
            }
        }?;
        f.write_str(". Answers: ")?;
        let mut rest = self.0;
        let mut separator = "";
        while let Some((_, answer)) = rest.first() {
            // Neighbors with the same answer are displayed together.
            let (alike, others) = rest.split_at(rest.iter().take_while(|(_, other)| other == answer).count());
            write!(f, "{separator}{}", alike[0].0)?;
            if let [_, .., (last, _)] = alike {
                write!(f, " to {last}")?;
            }
            write!(f, ": {answer}")?;
            (rest, separator) = (others, "; ");
        }
        Ok(())
    }
}
