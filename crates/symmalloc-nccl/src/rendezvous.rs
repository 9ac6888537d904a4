//! The rendezvous, which distributes one [`UniqueId`] to all ranks of a job without a side channel.
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
//! they are the [lifeline](crate::watchdog) by which each rank learns the state of the others.

mod client;
pub(crate) mod error;
mod handshake;
pub(crate) mod launch;
mod meeting;
mod secret;
mod server;
pub(crate) mod unique_id;
mod version;

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::communicator::order::SequenceCounter;
use crate::ffi::library::Nccl;
use crate::rendezvous::endpoint::hash;
use crate::rendezvous::launch::Launch;
use crate::rendezvous::meeting::{EndpointList, Meeting, job_of};
use crate::rendezvous::secret::{Secret, random};
use crate::rendezvous::unique_id::{COMM_ID_VARIABLE, UniqueId};
use crate::watchdog::{self, MeetingId};
use std::time::Duration;

impl Launch {
    /// Returns an id that is the same on all ranks of this job. Every rank must call this function equally often.
    ///
    /// If `NCCL_COMM_ID` is set, NCCL provides it. Otherwise rank 0 sends it to the others: on a socket of this machine if all ranks are on
    /// it, and otherwise over TCP, at `SYMMALLOC_RENDEZVOUS` (host:port) or near `MASTER_ADDR` and `MASTER_PORT`. Ranks with a
    /// `SYMMALLOC_JOB_SECRET` prove to each other that they know it.
    ///
    /// # Errors
    /// Returns an error if libnccl cannot be used, or the ranks do not find each other within the deadline.
    pub fn unique_id(&self, deadline: Duration) -> Result<UniqueId, CommError> {
        self.unique_id_from(Nccl::load()?, &Backoff::new(deadline))
    }

    pub(crate) fn unique_id_from(&self, nccl: &Nccl, backoff: &Backoff) -> Result<UniqueId, CommError> {
        static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
        if self.ranks == 1 || std::env::var_os(COMM_ID_VARIABLE).is_some() {
            return UniqueId::from_nccl(nccl);
        }
        let secret = Secret::from_env()?;
        // The n-th meeting of one rank is the n-th of every other rank.
        let turn = COUNTER.next(hash(job_of(self).as_bytes()), self.rank);
        let meeting = Meeting::new(self, turn, secret);
        let list = EndpointList::of(self, &meeting, |name| std::env::var(name).ok())?;
        if self.rank == 0 {
            // Listen first, so that peers can already connect.
            let listener = list.listen()?;
            let id = UniqueId::from_nccl(nccl)?;
            let connections = meeting.serve_id(&listener, &id, backoff)?;
            watchdog::register_meeting(&id, self.rank, self.ranks, connections);
            return Ok(id);
        }
        let (id, connection) = meeting.request_id(&list.endpoints, self.rank, backoff)?;
        watchdog::register_meeting(&id, self.rank, self.ranks, vec![(0, connection)]);
        Ok(id)
    }
}

/// Connects ranks that already have an id, at the address of rank 0 ("host:port"). Every rank must call this function equally often.
/// Returns `None` if there is one rank.
pub(crate) fn meet(
    address: &str,
    name: &str,
    rank: u32,
    ranks: u32,
    backoff: &Backoff,
) -> Result<Option<MeetingId>, CommError> {
    static COUNTER: SequenceCounter<u64> = SequenceCounter::new();
    if ranks < 2 {
        return Ok(None);
    }
    let turn = COUNTER.next(hash(format!("{address} {name}").as_bytes()), rank);
    let job = hash(format!("{address} {name} {turn}").as_bytes());
    let meeting = Meeting { job, ranks, secret: Secret::from_env()? };
    let list = EndpointList::at(address, &meeting)?;
    if rank == 0 {
        let listener = list.listen()?;
        let mut bytes = [0; UniqueId::BYTES];
        bytes[..32].copy_from_slice(&random::<32>()?);
        let id = UniqueId::from_bytes(bytes);
        let connections = meeting.serve_id(&listener, &id, backoff)?;
        return Ok(Some(watchdog::register_meeting(&id, rank, ranks, connections)));
    }
    let (id, connection) = meeting.request_id(&list.endpoints, rank, backoff)?;
    Ok(Some(watchdog::register_meeting(&id, rank, ranks, vec![(0, connection)])))
}

mod endpoint;
#[cfg(test)]
mod tests;
