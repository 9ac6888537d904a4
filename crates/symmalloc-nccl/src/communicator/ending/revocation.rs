//! Revokes: the program stops all work of a communicator, and keeps the communicator only to shrink it.
//!
//! NCCL revokes locally: a rank that does not revoke continues to wait for those that did. A thread that waits inside a call holds the call
//! lock. It notices the request, makes the revoke itself and returns [`CommError::Revoked`]. Without such a thread, the caller of
//! [`Communicator::revoke`] makes the revoke.

use crate::communicator::Communicator;
use crate::communicator::ending::{ABORT_LIMIT, Ending, revoke_all};
use crate::communicator::error::{CommError, CommState};
use crate::communicator::shared::{Ownership, Shared, lock};
use crate::ffi::version::Capability;
use std::slice::from_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Communicator {
    /// Stops all work of the communicator on this rank, on the host and on the device, and unblocks threads that wait inside calls with it.
    /// Afterwards the communicator can only [`shrink`](Self::shrink), and be destroyed or aborted. Does nothing if it is revoked already.
    ///
    /// Use it when the program learns before the watchdog that a rank is lost or will not continue, and the other ranks are to continue.
    /// Every rank that continues must revoke, because the call is local: a rank that does not revoke waits for the others until its
    /// deadline. Then the ranks shrink.
    ///
    /// - **Calls and results.** Pending and later calls return [`CommError::Revoked`], and so do waits with
    ///   [`synchronize`](Self::synchronize) and [`guarded`](Self::guarded). The streams continue. The buffers of stopped collectives have
    ///   undefined contents.
    /// - **Windows and buffers** are deregistered. A registrar drops them at its next sync or sweep, and keeps the pools.
    /// - **Watchdog.** The watchdog stops watching the communicator on this rank. If a rank is lost later, the communicator does not end.
    /// - **Graphs** that contain its collectives must not be launched again.
    ///
    /// Takes at most five seconds. Afterwards the communicator is [`Lost`](CommState::Lost) in two cases: if a kernel on symmetric windows
    /// waits for a lost rank, because NCCL cannot stop such a kernel; and if the communicator has windows and the lost rank is a thread of
    /// this process, because NCCL then waits for that rank. If the communicator has windows, the call waits for all work on the device,
    /// including the work of other communicators. If several communicators may be stuck, revoke them at the same time, on separate threads.
    ///
    /// # Errors
    /// Returns an error without any effect if the library lacks `ncclCommRevoke` (before 2.28.7), or the communicator is borrowed,
    /// suspended or has ended. If NCCL fails or the work does not stop in time, the communicator is aborted or lost.
    pub fn revoke(&self) -> Result<(), CommError> {
        let shared = &self.shared;
        shared.can_revoke()?;
        shared.check_failure()?;
        shared.check_active()?;
        {
            let life = lock(&shared.life);
            if life.state == CommState::Ready {
                shared.revoke_requested.store(true, Ordering::Release);
            }
        }
        let inner = shared.lock_or_revoke(ABORT_LIMIT)?;
        let mut access = shared.access_even_revoked_with(inner)?;
        match shared.state() {
            CommState::Revoked => Ok(()),
            _ => revoke_all(from_mut(&mut access), Ending::Idle),
        }
    }
}

impl Shared {
    /// Checks that this crate may revoke the communicator.
    pub(in crate::communicator) fn can_revoke(&self) -> Result<(), CommError> {
        let capability = Capability::Revoke;
        if !self.nccl.supports(capability) {
            return Err(CommError::Unsupported { capability, version: self.nccl.version() });
        }
        match self.ownership {
            Ownership::Owned => Ok(()),
            Ownership::Borrowed => Err(CommError::Borrowed { name: Arc::clone(&self.name) }),
        }
    }
}
