//! The state that the clones of a communicator share, and the lock for NCCL calls.
//!
//! ```text
//!  Communicator ─┐          ┌─ fixed: rank, ranks, name, order, deadline, mode
//!  Communicator ─┼─ Arc ── Shared ─┼─ Inner, behind the call lock: one host call at a time, as NCCL requires
//!  Window        ┘ (serial)        ├─ Life, behind a separate lock: never held during a call, so that state() never waits
//!                                  └─ Usage, likewise: shared by all communicators that borrow one `ncclComm_t`
//! ```

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::communicator::error::CommState;
use crate::communicator::order::CommOrder;
use crate::communicator::shapes::KnownShapes;
use crate::ffi::handles::{CommHandle, RegistrationHandle, WindowHandle};
use crate::ffi::library::Nccl;
use crate::unique_id::UniqueId;
use crate::watchdog::Observed;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;
use symmalloc_cuda::CudaDevice;
use symmalloc_watchdog::{Connecting, ERROR_LIMIT, Failure, MeetingId, WatchSettings, WatchdogMode};

/// A practically unlimited time.
pub(super) const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// The blocking mode of NCCL's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Calls block. Those that may wait for other ranks are made on a separate thread.
    Blocking,
    /// Calls return immediately, and NCCL is polled until their work is done.
    Nonblocking,
}

/// The owner of NCCL's communicator, who destroys it: this crate, or other code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    Owned,
    Borrowed,
}

pub(super) struct Shared {
    pub(super) nccl: &'static Nccl,
    pub(super) device: Arc<CudaDevice>,
    pub(super) name: Arc<str>,
    /// The name as NCCL reads it. NCCL keeps a pointer to it, so it must live as long as the communicator.
    pub(super) c_name: Arc<CStr>,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) deadline: Duration,
    pub(super) mode: Mode,
    pub(super) ownership: Ownership,
    pub(super) order: CommOrder,
    /// A number that is unique in the process.
    pub(super) serial: u64,
    /// Set by [`abort`](crate::communicator::Communicator::abort), to stop a thread that waits while it holds the call lock.
    pub(super) abort_requested: AtomicBool,
    /// Set by [`revoke`](crate::communicator::Communicator::revoke) until the communicator is revoked, to stop a thread that waits while it
    /// holds the call lock.
    pub(super) revoke_requested: AtomicBool,
    /// The meeting of the communicator's processes, if any.
    pub(super) meeting: Option<MeetingId>,
    /// The announcement of the communicator's creation; `None` for a borrowed communicator.
    pub(super) connecting: Option<Arc<Connecting>>,
    pub(super) watch_settings: WatchSettings,
    /// The watchdog's view of the communicator; set once the communicator is ready.
    pub(super) watched: OnceLock<Arc<Observed>>,
    pub(super) inner: Mutex<Inner>,
    pub(super) life: Arc<Mutex<Life>>,
    pub(super) usage: Arc<Mutex<Usage>>,
}

/// The state of an `ncclComm_t`, which all communicators that borrow it share.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// Bytes that a suspension released; `None` if it is not suspended.
    pub(super) suspended_bytes: Option<u64>,
    /// Number of windows and buffers that are registered.
    pub(super) registrations: usize,
    /// `true` if a borrower gave the `ncclComm_t` up. The owner then aborts it, after which another `ncclComm_t` may have the same address.
    pub(super) is_lost: bool,
}

impl Usage {
    /// Returns the state of an `ncclComm_t` that other code created: the same state for all communicators that borrow it.
    pub(super) fn borrowed(comm: CommHandle) -> Arc<Mutex<Self>> {
        static BORROWED: Mutex<BTreeMap<usize, Weak<Mutex<Usage>>>> = Mutex::new(BTreeMap::new());
        let mut borrowed = lock(&BORROWED);
        borrowed.retain(|_, usage| usage.strong_count() > 0);
        let address = comm.as_ptr().addr();
        if let Some(usage) = borrowed.get(&address).and_then(Weak::upgrade)
            && !lock(&usage).is_lost
        {
            return usage;
        }
        let usage = Arc::default();
        borrowed.insert(address, Arc::downgrade(&usage));
        usage
    }
}

/// Handles that NCCL must release. A thread inside a call updates them when NCCL returns, even if its caller no longer waits.
pub(super) type Handles<Handle> = Arc<Mutex<Vec<Handle>>>;

/// State that changes from call to call.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) shapes: KnownShapes,
    /// Registered windows, in registration order.
    pub(super) windows: Handles<WindowHandle>,
    /// Registered buffers, in registration order.
    pub(super) buffers: Handles<RegistrationHandle>,
    /// Number of splits so far; equal on all ranks.
    pub(super) splits: u32,
    /// Number of shrinks so far by list of excluded ranks; equal on all ranks that are not in the list.
    pub(super) shrinks: BTreeMap<Vec<u32>, u32>,
    /// Number of gathers by transports so far; equal on all ranks.
    pub(super) gathers: u64,
    /// The id of a grow that was created on this rank and not used yet.
    pub(super) grow_id: Option<UniqueId>,
}

/// The state of a communicator.
#[derive(Debug)]
pub(super) struct Life {
    /// Null if and only if the communicator is neither ready nor revoked.
    pub(super) comm: CommHandle,
    pub(super) state: CommState,
    /// The error that ended the communicator, if any.
    pub(super) cause: Option<Arc<CommError>>,
}

impl Life {
    pub(super) fn ready(comm: CommHandle) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Life { comm, state: CommState::Ready, cause: None }))
    }

    /// Ends the communicator. Subsequent calls fail.
    pub(super) fn end(&mut self, state: CommState, cause: Option<Arc<CommError>>) {
        self.comm = CommHandle::NULL;
        self.state = state;
        self.cause = cause;
    }
}

/// Permission to call NCCL with a ready communicator.
pub(super) struct Access<'a> {
    pub(super) shared: &'a Shared,
    pub(super) inner: MutexGuard<'a, Inner>,
    pub(super) comm: CommHandle,
}

impl Shared {
    /// Returns a number that is unique among the communicators of this process.
    pub(super) fn next_serial() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until no other thread calls NCCL with the communicator. Fails if the watchdog has ended the communicator or is about to end
    /// it.
    pub(super) fn access(&self) -> Result<Access<'_>, CommError> {
        let access = self.access_even_revoked()?;
        if self.state() == CommState::Revoked {
            return Err(self.gone());
        }
        Ok(access)
    }

    /// Like [`access`](Self::access), for the calls that a revoked communicator accepts too.
    pub(super) fn access_even_revoked(&self) -> Result<Access<'_>, CommError> {
        // Also check before locking: the thread that ends the communicator may hold the lock.
        self.check_failure()?;
        let access = self.access_even_revoked_with(lock(&self.inner))?;
        let Some(_failed) = self.failure() else { return Ok(access) };
        drop(access);
        self.access_even_revoked()
    }

    /// Waits until no other thread calls NCCL with the communicator, and does not check for failures. For callers that end the communicator
    /// or poll until it is created.
    pub(super) fn access_unchecked(&self) -> Result<Access<'_>, CommError> {
        self.access_even_revoked_with(lock(&self.inner))
    }

    pub(super) fn check_failure(&self) -> Result<(), CommError> {
        let Some(failed) = self.failure() else { return Ok(()) };
        self.wait_for_end();
        Err(failed)
    }

    /// Waits until the communicator has ended, for at most [`ERROR_LIMIT`] after the failure that the watchdog reported. Without this wait,
    /// a program that exits immediately would unload libraries that the aborting thread still uses. If a rank is gone, all of its
    /// communicators fail at the same moment, so a program that drops them one by one waits only once. After the limit, the watchdog ends
    /// the process if necessary.
    fn wait_for_end(&self) {
        // A communicator that is being created ends in the call that creates it.
        let Some(watched) = self.watched.get() else { return };
        let since_failure = watched.since_failure().unwrap_or_default();
        let backoff = Backoff::new(ERROR_LIMIT.saturating_sub(since_failure));
        while !self.is_ended() && backoff.pause() {}
    }

    /// Returns `true` if none of the communicator's work runs any more, or if its owner must end it.
    pub(super) fn is_ended(&self) -> bool {
        self.ownership == Ownership::Borrowed
            || matches!(lock(&self.life).state, CommState::Destroyed | CommState::Aborted)
    }

    pub(super) fn access_with<'a>(&'a self, inner: MutexGuard<'a, Inner>) -> Result<Access<'a>, CommError> {
        let access = self.access_even_revoked_with(inner)?;
        if self.state() == CommState::Revoked {
            return Err(self.gone());
        }
        Ok(access)
    }

    pub(super) fn access_even_revoked_with<'a>(
        &'a self,
        inner: MutexGuard<'a, Inner>,
    ) -> Result<Access<'a>, CommError> {
        let comm = lock(&self.life).comm;
        if comm.is_null() {
            return Err(self.gone());
        }
        Ok(Access { shared: self, inner, comm })
    }

    /// Returns the error of a communicator that is not ready.
    pub(super) fn gone(&self) -> CommError {
        let life = lock(&self.life);
        if life.state == CommState::Revoked {
            return CommError::Revoked { name: Arc::clone(&self.name) };
        }
        CommError::Gone { name: Arc::clone(&self.name), state: life.state, cause: life.cause.clone() }
    }

    /// Like [`access`](Self::access), for calls that a suspended communicator does not accept.
    pub(super) fn access_active(&self) -> Result<Access<'_>, CommError> {
        let access = self.access()?;
        self.check_active()?;
        Ok(access)
    }

    /// Checks that the communicator is not suspended.
    pub(super) fn check_active(&self) -> Result<(), CommError> {
        if lock(&self.usage).suspended_bytes.is_some() {
            return Err(CommError::Suspended { name: Arc::clone(&self.name) });
        }
        Ok(())
    }

    /// Checks that the communicator is ready. Never waits.
    pub(super) fn check_ready(&self) -> Result<(), CommError> {
        match self.failure() {
            Some(failed) => Err(failed),
            None if self.state() != CommState::Ready => Err(self.gone()),
            None => Ok(()),
        }
    }

    /// Checks that the results of completed work are valid: that the communicator has neither failed nor been revoked.
    pub(super) fn check_results(&self) -> Result<(), CommError> {
        self.check_failure()?;
        if self.state() == CommState::Revoked { Err(self.gone()) } else { Ok(()) }
    }

    /// Returns the error with which the watchdog ended the communicator or its creation, if any.
    pub(super) fn failure(&self) -> Option<CommError> {
        let failure = match self.watched.get() {
            Some(watched) => watched.failure(),
            None => self.connection_failure(),
        };
        Some(CommError::Failed(Arc::clone(failure?)))
    }

    /// Returns the failure of another rank because of which the creation of the communicator must end, if any.
    fn connection_failure(&self) -> Option<&Arc<Failure>> {
        self.connecting.as_ref()?.failure()
    }

    /// Returns `true` if a thread that waits inside a call must end the communicator.
    pub(super) fn is_abort_requested(&self) -> bool {
        let is_creation_over = || self.watched.get().is_none() && self.connection_failure().is_some();
        self.abort_requested.load(Ordering::Acquire) || is_creation_over()
    }

    /// Returns the time limit of this crate's waits for other ranks. It is unlimited if the watchdog ends the waits, because the watchdog
    /// distinguishes slow ranks from stuck ones.
    pub(super) fn wait_limit(&self) -> Duration {
        let is_watched = self.watched.get().is_some() && self.watch_settings.mode() != WatchdogMode::Off;
        if is_watched && symmalloc_watchdog::is_running() { UNLIMITED } else { self.deadline }
    }

    pub(super) fn state(&self) -> CommState {
        lock(&self.life).state
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::without_provenance_mut;

    #[test]
    fn borrowers_of_one_communicator_share_its_usage_until_it_is_lost() {
        let at = |address| CommHandle::new(without_provenance_mut(address));
        let first = Usage::borrowed(at(0x1000));
        lock(&first).registrations = 2;
        assert_eq!(lock(&Usage::borrowed(at(0x1000))).registrations, 2);
        assert_eq!(lock(&Usage::borrowed(at(0x2000))).registrations, 0, "another communicator");
        lock(&first).is_lost = true;
        let next = Usage::borrowed(at(0x1000));
        assert_eq!(lock(&next).registrations, 0, "the address is that of a new communicator");
        assert!(Arc::ptr_eq(&next, &Usage::borrowed(at(0x1000))));
        drop((first, next));
        assert_eq!(lock(&Usage::borrowed(at(0x1000))).registrations, 0);
    }
}
