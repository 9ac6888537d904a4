//! Rendezvous of the ranks of a job: the launcher's variables, a store that all ranks reach, and a meeting within a deadline.
//!
//! This crate depends on neither CUDA nor NCCL.
//!
//! ```text
//!  Launch   rank, number of ranks, launcher      from the variables of torchrun, mpirun, mpiexec, srun
//!  Store    set, get, wait                       the launcher's store, a folder that all machines share, or a server in rank 0's process
//!  Met      the same 128 bytes on all ranks      from rank 0, and a connection between rank 0 and each other rank
//! ```
//!
//! # The place
//! The first row whose condition holds is used. All ranks must find the same one.
//!
//! | condition | store | admitted |
//! |---|---|---|
//! | `SYMMALLOC_RENDEZVOUS=/folder` | files in a new folder below this one, named after the job or `MASTER_ADDR` and `MASTER_PORT` | processes of the same user, by the folder's mode |
//! | `SYMMALLOC_RENDEZVOUS=host:port` | an own store there; on a Unix socket if the address is this machine's and all ranks are local, or it is a loopback address | TCP: ranks that know `SYMMALLOC_JOB_SECRET`, or anybody without one; Unix: processes of the same user |
//! | all ranks are on one machine, and `MASTER_ADDR` is not that of another one | an own store on a Unix socket | processes of the same user |
//! | `MASTER_ADDR`, `MASTER_PORT`, and `TORCHELASTIC_USE_AGENT_STORE=True`, as torchrun sets them | torchrun's store | anybody who can connect |
//! | `MASTER_ADDR` and `MASTER_PORT` | an own store at one of the eight ports after `MASTER_PORT` | as at `host:port` |
//! | a job of mpirun, mpiexec or srun with an identifier | files in `$XDG_STATE_HOME/symmalloc/rendezvous`, or `~/.local/state/symmalloc/rendezvous` | processes of the same user |
//!
//! # The meeting
//! Rank 0 listens, and publishes its addresses and a random token in the store. The others connect to it directly: over a Unix socket from the
//! same machine, and over TCP from others, on all addresses at the same time. Both sides prove that they know the token and, if
//! there is one, the job secret. When all have arrived, or one has waited until its deadline, rank 0 reports the same outcome to all of them. The
//! connections stay open: the caller gives them to the watchdog, whose [lifeline](symmalloc_watchdog::Lifeline) uses them to learn the state of
//! the other ranks.
//!
//! # Examples
//! Two ranks, here threads of one process, meet through a folder:
//! ```
//! use std::time::Duration;
//! use symmalloc_rendezvous::{Deadline, FolderStore, Job, RendezvousError, share_through};
//!
//! let folder = tempfile::tempdir()?;
//! let meet = |rank| {
//!     let (store, deadline) = (FolderStore::open(folder.path())?, Deadline::after(Duration::from_secs(60)));
//!     let job = Job { name: "example", rank, ranks: 2 };
//!     share_through(&store, job, || Ok::<_, RendezvousError>([7; 128]), &deadline)
//! };
//! let ids = std::thread::scope(|scope| {
//!     let other = scope.spawn(|| meet(1));
//!     Ok::<_, RendezvousError>([meet(0)?.id, other.join().expect("the thread should not panic")?.id])
//! })?;
//! assert_eq!(ids, [[7; 128]; 2]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Determinism
//! No placement depends on anything in this crate.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod admission;
mod card;
mod deadline;
mod endpoint;
mod error;
mod folder;
mod handshake;
mod idle;
mod interfaces;
mod launch;
mod meeting;
mod own;
mod place;
mod search;
mod secret;
mod sequence;
mod store;
#[cfg(test)]
mod tests;
mod torch_store;
mod version;

pub use deadline::Deadline;
pub use error::{EndpointAnswer, RendezvousError};
pub use folder::FolderStore;
pub use handshake::Shared;
pub use launch::{Launch, LaunchError, Launcher};
pub use meeting::Met;
pub use sequence::SequenceCounter;
pub use store::Store;
pub use torch_store::TorchStore;

use crate::endpoint::hash;
use crate::handshake::SHARED_BYTES;
use crate::meeting::{Meeting, Reach};
use crate::place::Place;
use crate::secret::{Secret, random};

/// A process's place in a job whose ranks meet through a [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job<'a> {
    /// The name of the job, the same on all ranks. Two jobs with one store need different names.
    pub name: &'a str,
    /// The rank of this process, from 0.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
}

/// Distributes what `create` returns on rank 0 to all ranks of the job that the launcher started, and connects them to rank 0. Every rank
/// must call this function equally often.
///
/// # Errors
/// Returns an error if the ranks do not meet before the deadline, and the error of `create` on rank 0. All ranks that arrived return
/// [`RendezvousError::Missing`] with the same ranks.
pub fn share<E: From<RendezvousError>>(
    launch: &Launch,
    create: impl FnOnce() -> Result<Shared, E>,
    deadline: &Deadline,
) -> Result<Met, E> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    // The n-th meeting of one rank is the n-th of every other rank.
    let turn = COUNTER.next(hash(job_of(launch).as_bytes()), launch.rank);
    let meeting = meeting_of(launch, turn, Secret::from_env()?)?;
    let place = Place::of(launch, &meeting, |name| std::env::var_os(name))?;
    place.hold(&meeting, launch.rank, create, deadline)
}

/// Like [`share`], through a store that the program provides. Every rank must call this function equally often for each name.
///
/// Other machines must be able to reach all ports of rank 0's machine. Without a job secret, any process that can read the store can join.
///
/// # Errors
/// Same as [`share`], and the errors of the store.
///
/// # Panics
/// Panics if the rank is not less than the number of ranks.
pub fn share_through<E: From<RendezvousError>>(
    store: &dyn Store,
    job: Job<'_>,
    create: impl FnOnce() -> Result<Shared, E>,
    deadline: &Deadline,
) -> Result<Met, E> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    let Job { name, rank, ranks } = job;
    assert!(rank < ranks, "rank {rank} of {ranks}: ranks count from 0");
    let turn = COUNTER.next(hash(name.as_bytes()), rank);
    let meeting = Meeting::new(hash(format!("{name} {turn}").as_bytes()), ranks, Secret::from_env()?)?;
    meeting.hold(store, &Reach::Network { toward: Vec::new(), named: Vec::new() }, rank, create, deadline)
}

/// Connects ranks that already have an id, at an address of rank 0 ("host:port") or in a folder that all machines share (an absolute path):
/// a new folder for each job, because nothing else distinguishes two jobs there that use the same name. Every rank must call this function
/// equally often. Returns `None` if there is one rank.
///
/// # Errors
/// Same as [`share`].
pub fn meet(
    address: &str,
    name: &str,
    rank: u32,
    ranks: u32,
    deadline: &Deadline,
) -> Result<Option<Met>, RendezvousError> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    if ranks < 2 {
        return Ok(None);
    }
    let turn = COUNTER.next(hash(format!("{address} {name}").as_bytes()), rank);
    let job = hash(format!("{address} {name} {turn}").as_bytes());
    let meeting = Meeting::new(job, ranks, Secret::from_env()?)?;
    let create = || {
        let mut bytes = [0; SHARED_BYTES];
        bytes[..32].copy_from_slice(&random::<32>()?);
        Ok(bytes)
    };
    Place::at(address, &meeting)?.hold(&meeting, rank, create, deadline).map(Some)
}

/// Returns a meeting of the ranks that the launcher started.
fn meeting_of(launch: &Launch, turn: u32, secret: Option<Secret>) -> Result<Meeting, RendezvousError> {
    Meeting::new(hash(format!("{}.{turn}", job_of(launch)).as_bytes()), launch.ranks, secret)
}

/// Returns a name that distinguishes this job from others on the machine.
fn job_of(launch: &Launch) -> String {
    if launch.job.is_empty() && launch.ranks == launch.local_ranks {
        // Under mpiexec and similar launchers, the ranks of one machine are children of one process.
        return format!("{}.{}", launch.launcher, std::os::unix::process::parent_id());
    }
    format!("{}.{}", launch.launcher, launch.job)
}
