//! The rendezvous, which distributes one [`Shared`] to all ranks of a job without a side channel.
//!
//! ```text
//!  NCCL_COMM_ID=host:port set       every rank asks NCCL and gets the same id, without an exchange
//!  one rank                         it asks NCCL
//!  otherwise                        rank 0 asks NCCL and sends the id to the others, which connect to one of these endpoints:
//!
//!  SYMMALLOC_RENDEZVOUS=host:port   there; otherwise
//!  MASTER_ADDR, MASTER_PORT         there, at one of the eight ports after it (torchrun's own store sits on MASTER_PORT); otherwise
//!  all ranks on one machine         a socket of this machine
//! ```
//!
//! | ranks | meeting place | admitted |
//! |---|---|---|
//! | on one machine: all are local and the address is this machine's, or the address is a loopback one | a [socket](endpoint) on this machine, named after the job, instead of the address | processes of the same user, which both sides check with the system |
//! | at another address | TCP | with `SYMMALLOC_JOB_SECRET`, ranks that [prove](handshake) that they know it; otherwise any process that can connect |
//!
//! If rank 0 cannot use an address, it tries the next one. The other ranks try [all addresses at the same time](client) until the right
//! rank 0 answers. Strangers, other jobs and ranks without the secret are rejected and do not delay the meeting. The connections stay open:
//! the caller gives them to the watchdog, whose [lifeline](symmalloc_watchdog::Lifeline) uses them to learn the state of the other ranks.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod client;
mod deadline;
mod endpoint;
mod error;
mod handshake;
mod launch;
mod meeting;
mod secret;
mod sequence;
mod server;
#[cfg(test)]
mod tests;
mod version;

pub use deadline::Deadline;
pub use error::{EndpointAnswer, RendezvousError};
pub use handshake::Shared;
pub use launch::{Launch, LaunchError, Launcher};
pub use sequence::SequenceCounter;

use crate::endpoint::hash;
use crate::handshake::SHARED_BYTES;

use crate::meeting::{EndpointList, Meeting, job_of};
use crate::secret::{Secret, random};
use symmalloc_watchdog::Connection;

/// The result of a meeting.
#[derive(Debug)]
pub struct Met {
    /// The id that rank 0 distributed.
    pub id: Shared,
    /// Connections by the other rank: those to all ranks on rank 0, and the one to rank 0 on the others.
    pub connections: Vec<(u32, Connection)>,
}

/// Distributes the id that `create` returns on rank 0 to all ranks of the job. Every rank must call this function equally often.
pub fn share<E: From<RendezvousError>>(
    launch: &Launch,
    create: impl FnOnce() -> Result<Shared, E>,
    deadline: &Deadline,
) -> Result<Met, E> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    let secret = Secret::from_env()?;
    // The n-th meeting of one rank is the n-th of every other rank.
    let turn = COUNTER.next(hash(job_of(launch).as_bytes()), launch.rank);
    let meeting = Meeting::new(launch, turn, secret);
    let list = EndpointList::of(launch, &meeting, |name| std::env::var(name).ok())?;
    meet_at(&list, &meeting, launch.rank, create, deadline)
}

/// Connects ranks that already have an id, at the address of rank 0 ("host:port"). Every rank must call this function equally often.
/// Returns `None` if there is one rank.
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
    let meeting = Meeting { job, ranks, secret: Secret::from_env()? };
    let list = EndpointList::at(address, &meeting)?;
    let create = || {
        let mut bytes = [0; SHARED_BYTES];
        bytes[..32].copy_from_slice(&random::<32>()?);
        Ok(bytes)
    };
    meet_at(&list, &meeting, rank, create, deadline).map(Some)
}

fn meet_at<E: From<RendezvousError>>(
    list: &EndpointList,
    meeting: &Meeting,
    rank: u32,
    create: impl FnOnce() -> Result<Shared, E>,
    deadline: &Deadline,
) -> Result<Met, E> {
    if rank == 0 {
        // Listen first, so that peers can already connect.
        let listener = list.listen()?;
        let id = create()?;
        let connections = meeting.serve_id(&listener, &id, deadline)?;
        return Ok(Met { id, connections });
    }
    let (id, connection) = meeting.request_id(&list.endpoints, rank, deadline)?;
    Ok(Met { id, connections: vec![(0, connection)] })
}
