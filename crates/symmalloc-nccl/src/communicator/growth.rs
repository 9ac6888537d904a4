//! Growth: new ranks join the ranks of a communicator.
//!
//! ```text
//!  rank 0        grow_id ── the program passes the id and the number of ranks to all ──┐
//!  old ranks     grow  ◄───────────────────────────────────────────────────────────────┤
//!  new ranks     join  ◄───────────────────────────────────────────────────────────────┘
//! ```
//!
//! NCCL creates a new communicator and uses the old one to exchange addresses. A rank that fails leaves messages in the old communicator,
//! which the next grow would read. Every error of the NCCL call therefore ends the old communicator on the rank that gets the error.

use crate::backoff::Backoff;
use crate::communicator::Communicator;
use crate::communicator::builder::{CommunicatorBuilder, abort_when_returned};
use crate::communicator::call::{
    CallThread, creation_failure, end_overdue, end_stopped, handle_error, is_stop_requested, perform,
};
use crate::communicator::ending::{Ending, GRACE, end_all};
use crate::communicator::error::{CommError, GrowIdObstacle, Stage};
use crate::communicator::order::CommOrder;
use crate::communicator::shared::{Mode, Ownership};
use crate::communicator::threads::{KeepAlive, Waited, start, wait_for};
use crate::ffi::calls::{Calls, GrowId};
use crate::ffi::handles::NewHandle;
use crate::ffi::version::Capability;
use crate::unique_id::{COMM_ID_VARIABLE, UniqueId};
use std::ffi::{CStr, c_int};
use std::slice::{from_mut, from_ref};
use std::sync::Arc;
use symmalloc_watchdog::{Announced, CommunicatorId, Connecting, ERROR_LIMIT};

impl Communicator {
    /// Creates the id of a [`grow`](CommunicatorBuilder::grow), on rank 0. The program passes it to all ranks of the grown communicator,
    /// old and new. The id can be used once, and the next id can be created only after this one has been used.
    ///
    /// # Errors
    /// Returns an error without any effect if the library lacks `ncclCommGrow` (before 2.29.2), this is not rank 0, the last id was not
    /// used, the variable `NCCL_COMM_ID` is set, or the communicator is suspended, revoked or has ended. If NCCL fails, the communicator
    /// is ended.
    pub fn grow_id(&self) -> Result<UniqueId, CommError> {
        self.require(Capability::Grow)?;
        if self.rank() != 0 {
            return Err(self.grow_obstacle(GrowIdObstacle::NotRankZero));
        }
        if std::env::var_os(COMM_ID_VARIABLE).is_some() {
            return Err(self.grow_obstacle(GrowIdObstacle::CommIdVariable));
        }
        let mut access = self.shared.access_active()?;
        if access.inner.grow_id.is_some() {
            return Err(self.grow_obstacle(GrowIdObstacle::Unused));
        }
        let (comm, id) = (access.comm, Arc::new(GrowId::new()));
        let (out, route) = (Arc::clone(&id), CallThread::when_blocking(self.shared.mode, CallThread::Separate));
        perform(from_mut(&mut access), Stage::Grow, route, &None, move |calls| calls.grow_id(comm, &out))?;
        let id = id.get().ok_or(CommError::NoCommunicator { call: "ncclCommGetUniqueId" })?;
        Ok(*access.inner.grow_id.insert(UniqueId::from_bytes(*id)))
    }

    fn grow_obstacle(&self, obstacle: GrowIdObstacle) -> CommError {
        CommError::GrowId { name: self.name().into(), rank: self.rank(), obstacle }
    }
}

impl CommunicatorBuilder {
    /// Creates a communicator with `ranks` ranks in total: the ranks of `old`, which keep their numbers, and new ranks, which
    /// [`join`](Self::join). Every rank of `old` must call it with the id that [`grow_id`](Communicator::grow_id) returned on rank 0, after
    /// the work on `old` has completed. Waits for all ranks.
    ///
    /// The new communicator has this builder's name, deadline, mode and watchdog, which must be the same on all ranks, and the library of
    /// `old`. It has no windows: attach the pools and sync. The ranks that join need the same history in symmetric pools as the old ranks.
    /// Set a [`rendezvous`](Self::rendezvous), or the watchdog observes only ranks in the same process. `old` stays usable, but NCCL
    /// recommends destroying it on each rank.
    ///
    /// # Errors
    /// Returns an error without any effect if the library lacks `ncclCommGrow` (before 2.29.2), `ranks` is not greater than the number of
    /// ranks of `old`, rank 0 did not create the id, the builder's device is not the device of `old`, or `old` is suspended, revoked or has
    /// ended. If a rank does not arrive within the deadline or NCCL fails, `old` is ended too. To keep a communicator even then,
    /// [`split`](Communicator::split) it into one communicator with all of its ranks, and grow the split.
    pub fn grow(self, old: &Communicator, id: UniqueId, ranks: u32) -> Result<Communicator, CommError> {
        old.require(Capability::Grow)?;
        let (ordinal, actual) = (self.device.ordinal(), old.device().ordinal());
        if ordinal != actual {
            return Err(CommError::DeviceMismatch { ordinal, actual: actual as i32 });
        }
        let rank = old.rank();
        let raw_ranks = match c_int::try_from(ranks) {
            Ok(raw_ranks) if ranks > old.ranks() => raw_ranks,
            _ => return Err(CommError::GrowRanks { name: old.name().into(), ranks: old.ranks(), requested: ranks }),
        };
        let names = self.names()?;
        let backoff = Backoff::new(self.deadline);
        if old.shared.access_active()?.inner.grow_id != (rank == 0).then_some(id) {
            return Err(old.grow_obstacle(GrowIdObstacle::Unknown));
        }
        self.start_watchdog()?;
        let meeting = self.meet(rank, ranks, &backoff)?;
        let order = CommOrder::grown(&names.0, &id);
        let id = CommunicatorId::of(order.as_bytes());
        let connecting = Connecting::new(&names.0, meeting, rank, Some(ranks), id, &self.watch_settings);
        let announced = Announced::new(connecting);
        let grown = self.grow_announced(old, raw_ranks, names, order, &announced, &backoff);
        grown.inspect_err(|error| announced.fail(error.report()))
    }

    /// Grows `old`, after the grow has been announced to the other ranks. `old` is ended after every error of NCCL, and if another rank
    /// fails.
    fn grow_announced(
        self,
        old: &Communicator,
        raw_ranks: c_int,
        names: (Arc<str>, Arc<CStr>),
        order: CommOrder,
        announced: &Announced,
        backoff: &Backoff,
    ) -> Result<Communicator, CommError> {
        let connecting = announced.connecting();
        let failure = || creation_failure(connecting);
        let mut access = old.shared.access_active()?;
        // Only the rank that created the id passes it to NCCL. The others receive it over the old communicator.
        let own_id = access.inner.grow_id.take().map(|id| *id.as_bytes());
        let (comm, nccl, blocking) = (access.comm, old.nccl(), self.mode == Mode::Blocking);
        let new = NewHandle::named(&names.1);
        let (kept, out): (KeepAlive, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let caller = start(&self.device, kept, move || nccl.calls().grow(comm, raw_ranks, own_id, &out, blocking));
        let is_over = || is_stop_requested(from_ref(&access)) || failure().is_some();
        let answer = match wait_for(&caller, backoff, is_over) {
            Waited::Returned(answer) => answer,
            waited => {
                let caller = abort_when_returned(caller, &self.device, nccl, new);
                let (stage, accesses) = (Stage::Grow, from_mut(&mut access));
                let ending = Ending::Inside { stage, caller };
                return Err(match (waited, failure()) {
                    (Waited::Stopped, Some(failed)) => {
                        end_all(accesses, ending, Some(&Arc::new(failed.clone())), ERROR_LIMIT);
                        failed
                    }
                    (Waited::Stopped, None) => end_stopped(accesses, ending),
                    _ => end_overdue(accesses, stage, backoff.waited(), ending),
                });
            }
        };
        let met = (connecting.meeting(), Some(Arc::clone(connecting)));
        let shared = |comm| self.shared(nccl, names, order, Ownership::Owned, comm, met);
        if let Err(error) = answer {
            if let Some(comm) = new.comm() {
                end_all(from_mut(&mut shared(comm).access_unchecked()?), Ending::Pending, None, GRACE);
            }
            return Err(handle_error(from_mut(&mut access), Stage::Grow, error));
        }
        drop(access);
        let created = match new.comm() {
            Some(comm) => Communicator::finish_connecting(shared(comm), backoff),
            None => Err(CommError::NoCommunicator { call: Stage::Grow.call() }),
        };
        created.inspect_err(|error| {
            if let Ok(mut access) = old.shared.access() {
                end_all(from_mut(&mut access), Ending::Idle, Some(&Arc::new(error.clone())), GRACE);
            }
        })
    }

    /// Joins the communicator that ranks [`grow`](Self::grow), as a new rank. `rank` must be at least the number of old ranks. `id` and
    /// `ranks` must be the values that the other ranks pass. Waits for all ranks.
    ///
    /// # Errors
    /// Same as [`connect`](Self::connect). Also returns an error if the library lacks `ncclCommGrow` (before 2.29.2).
    pub fn join(self, id: UniqueId, rank: u32, ranks: u32) -> Result<Communicator, CommError> {
        let backoff = Backoff::new(self.deadline);
        let nccl = self.nccl()?;
        let capability = Capability::Grow;
        if !nccl.supports(capability) {
            return Err(CommError::Unsupported { capability, version: nccl.version() });
        }
        let order = |name: &str| CommOrder::grown(name, &id);
        let call = move |calls: &Calls, new: &NewHandle, [rank, ranks]: [c_int; 2], blocking| {
            calls.join(new, ranks, *id.as_bytes(), rank, blocking)
        };
        self.create(nccl, (rank, ranks), None, order, &backoff, call)
    }
}
