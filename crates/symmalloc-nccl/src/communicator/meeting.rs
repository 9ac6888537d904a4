//! Ids that all ranks of a communicator share, and meetings of ranks. The watchdog keeps the connections of a meeting.

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::ffi::library::Nccl;
use crate::unique_id::{COMM_ID_VARIABLE, UniqueId};
use std::time::Duration;
use symmalloc_rendezvous::{self as rendezvous, Deadline, Launch, Met};
use symmalloc_watchdog::MeetingId;

impl UniqueId {
    /// Returns a new id from NCCL. If `NCCL_COMM_ID` is set, every call on every rank returns the same id. Otherwise each call returns a
    /// different id, and the process that created an id must stay alive until all ranks have connected with it.
    ///
    /// # Errors
    /// Returns an error if NCCL cannot be used or finds no network interface.
    pub fn new() -> Result<Self, CommError> {
        Self::from_nccl(Nccl::load()?)
    }

    /// Like [`new`](Self::new), with this library.
    ///
    /// # Errors
    /// Returns an error if NCCL finds no network interface.
    pub fn from_nccl(nccl: &Nccl) -> Result<Self, CommError> {
        Ok(UniqueId::from_bytes(nccl.calls().unique_id()?))
    }

    /// Returns an id that is the same on all ranks of this job. Every rank must call this function the same number of times.
    ///
    /// If `NCCL_COMM_ID` is set, NCCL provides the id. Otherwise rank 0 sends it to the other ranks: over a Unix socket if all ranks are on
    /// this machine, and otherwise over TCP. The other ranks find rank 0 at `SYMMALLOC_RENDEZVOUS` (host:port, or a folder that all
    /// machines share), in torchrun's store or near `MASTER_ADDR` and `MASTER_PORT`, or in a folder of the home directory. Ranks with a
    /// `SYMMALLOC_JOB_SECRET` prove to each other that they know it.
    ///
    /// # Errors
    /// Returns an error if libnccl cannot be used, or the ranks do not find each other within the deadline.
    pub fn for_job(launch: &Launch, deadline: Duration) -> Result<Self, CommError> {
        Self::for_job_from(Nccl::load()?, launch, &Backoff::new(deadline))
    }

    pub(super) fn for_job_from(nccl: &Nccl, launch: &Launch, backoff: &Backoff) -> Result<Self, CommError> {
        let create = || UniqueId::from_nccl(nccl);
        if launch.ranks == 1 || std::env::var_os(COMM_ID_VARIABLE).is_some() {
            return create();
        }
        let create = || create().map(|id| *id.as_bytes());
        let met = rendezvous::share(launch, create, &Deadline::after(backoff.left()))?;
        let id = UniqueId::from_bytes(met.id);
        register(met, launch.rank, launch.ranks);
        Ok(id)
    }
}

/// Connects ranks that already have an id, at the address of rank 0 ("host:port") or in a new folder that all machines share. Every rank
/// must call this function the same number of times. Returns `None` if there is only one rank.
pub(super) fn meet(
    address: &str,
    name: &str,
    rank: u32,
    ranks: u32,
    backoff: &Backoff,
) -> Result<Option<MeetingId>, CommError> {
    let met = rendezvous::meet(address, name, rank, ranks, &Deadline::after(backoff.left()))?;
    Ok(met.map(|met| register(met, rank, ranks)))
}

fn register(Met { id, connections }: Met, rank: u32, ranks: u32) -> MeetingId {
    MeetingId::register(&id, rank, ranks, connections)
}
