//! Normal end of a communicator: deregistration of the remaining windows and buffers, and destruction.

use crate::backoff::Backoff;
use crate::communicator::call::{CallThread, HostEntry, perform};
use crate::communicator::ending::{ABORT_LIMIT, Ending, end_all};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::registration::deregister_all;
use crate::communicator::shared::{Ownership, Shared, lock};
use crate::communicator::threads::{KeepAlive, Waited, start, wait_for};
use crate::ffi::handles::CommHandle;
use crate::watchdog::at_exit::Unfinished;
use std::slice::from_mut;
use std::sync::Arc;
use symmalloc_files::is_forked;
use symmalloc_watchdog::ERROR_LIMIT;

impl Shared {
    /// Destroys the communicator and its remaining registrations. Does nothing if it has already ended, or in a forked child.
    pub(in crate::communicator) fn destroy(&self) -> Result<(), CommError> {
        if is_forked() {
            return Ok(());
        }
        let Ok(mut access) = self.access_even_revoked() else { return Ok(()) };
        if self.state() == CommState::Revoked {
            // Abort it instead, because `ncclCommDestroy` may wait for ranks that are gone.
            end_all(from_mut(&mut access), Ending::Idle, None, ABORT_LIMIT);
            return if self.state() == CommState::Lost { Err(self.gone()) } else { Ok(()) };
        }
        let deregistered = deregister_all(&mut access);
        if self.ownership == Ownership::Borrowed {
            lock(&self.life).end(CommState::Destroyed, None);
            self.watched().leave();
        }
        if self.state() != CommState::Ready {
            return deregistered;
        }
        let (comm, kept): (_, KeepAlive) = (access.comm, Some(Arc::new(Arc::clone(&self.c_name))));
        let entry = HostEntry::begin(self.watched(), Stage::Destroy, None);
        perform(from_mut(&mut access), Stage::Destroy, CallThread::Separate, &kept, move |calls| calls.finalize(comm))?;
        drop(entry);
        self.destroy_finalized(comm, kept)?;
        deregistered
    }

    fn destroy_finalized(&self, comm: CommHandle, kept: KeepAlive) -> Result<(), CommError> {
        let (calls, backoff) = (self.nccl.calls(), Backoff::new(self.deadline));
        // Even after a failure, the communicator must not be used again.
        lock(&self.life).end(CommState::Destroyed, None);
        self.watched().close();
        // If the call does not return, the `exit` handlers would wait for it or crash.
        let unfinished = Unfinished::ending();
        let caller = start(&self.device, kept, move || {
            let outcome = calls.destroy(comm);
            drop(unfinished);
            outcome
        });
        // NCCL's proxy thread, which this call joins, waits for the proxies of all peers.
        let watched = self.watched();
        let is_peer_lost =
            || watched.since_peer_lost().or(watched.since_failure()).is_some_and(|since| since >= ERROR_LIMIT);
        let waited = wait_for(&caller, &backoff, is_peer_lost);
        // Leave only now: until then, the watchdog reports a peer that is gone or stopped.
        watched.leave();
        match waited {
            Waited::Returned(answer) => {
                answer?;
                tracing::debug!(name: "communicator.destroyed", target: "symmalloc", communicator = &*self.name);
                Ok(())
            }
            Waited::Stopped | Waited::TimedOut => {
                lock(&self.life).state = CommState::Lost;
                Err(self.overdue(Stage::Destroy, &backoff))
            }
        }
    }
}
