//! Normal release of what a communicator holds: its windows and buffers, and the communicator itself.

use crate::backoff::Backoff;
use crate::communicator::call::{CallThread, HostEntry, perform};
use crate::communicator::ending::{ABORT_LIMIT, Ending, end_all};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shared::{Access, Handles, Ownership, Shared, lock};
use crate::communicator::threads::{KeepAlive, Waited, start, wait_for};
use crate::ffi::calls::{Calls, Outcome};
use crate::ffi::handles::{CommHandle, RegistrationHandle, WindowHandle};
use crate::watchdog::{self, ERROR_LIMIT};
use std::slice::from_mut;
use std::sync::Arc;

/// Deregisters everything that remains, in order. Returns the first error, but tries the rest as long as the communicator is ready.
pub(super) fn deregister_all(access: &mut Access<'_>) -> Result<(), CommError> {
    let mut outcome = Ok(());
    let (windows, buffers) = (lock(&access.inner.windows).clone(), lock(&access.inner.buffers).clone());
    for window in windows {
        outcome = outcome.and(deregister_window(access, window));
    }
    for buffer in buffers {
        outcome = outcome.and(deregister_buffer(access, buffer));
    }
    outcome
}

pub(super) fn deregister_window(access: &mut Access<'_>, window: WindowHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.windows), access, window, Calls::deregister_window)
}

pub(super) fn deregister_buffer(access: &mut Access<'_>, buffer: RegistrationHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.buffers), access, buffer, Calls::deregister_buffer)
}

fn deregister<Handle: Copy + PartialEq + Send + 'static>(
    known: Handles<Handle>,
    access: &mut Access<'_>,
    handle: Handle,
    call: fn(&Calls, CommHandle, Handle) -> Outcome,
) -> Result<(), CommError> {
    if access.shared.state() != CommState::Ready {
        return Err(access.shared.gone());
    }
    let (comm, usage) = (access.comm, Arc::clone(&access.shared.usage));
    perform(from_mut(access), Stage::Deregister, CallThread::Separate, &None, move |calls| {
        // The communicator may end in the meantime, so remove the handle only after NCCL has accepted the call.
        call(calls, comm, handle).inspect(|_| {
            let mut known = lock(&known);
            let before = known.len();
            known.retain(|known| *known != handle);
            let mut usage = lock(&usage);
            usage.registrations -= before - known.len();
        })
    })
}

impl Shared {
    /// Destroys the communicator and its remaining registrations. Does nothing if it has already ended.
    pub(super) fn destroy(&self) -> Result<(), CommError> {
        let Ok(mut access) = self.access_even_revoked() else { return Ok(()) };
        if self.state() == CommState::Revoked {
            // NCCL's destruction may wait for ranks that are gone.
            end_all(from_mut(&mut access), Ending::Idle, None, ABORT_LIMIT);
            return if self.state() == CommState::Lost { Err(self.gone()) } else { Ok(()) };
        }
        let deregistered = deregister_all(&mut access);
        if self.ownership == Ownership::Borrowed {
            lock(&self.life).end(CommState::Destroyed, None);
            watchdog::leave(self.watched());
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
        let caller = start(&self.device, kept, move || calls.destroy(comm));
        // NCCL's proxy thread, which this call joins, waits for the proxies of all peers.
        let watched = self.watched();
        let is_peer_lost =
            || watched.since_peer_lost().or(watched.since_failure()).is_some_and(|since| since >= ERROR_LIMIT);
        let waited = wait_for(&caller, &backoff, is_peer_lost);
        // Leave only now: until then, the watchdog reports a peer that is gone or stopped.
        watchdog::leave(watched);
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
