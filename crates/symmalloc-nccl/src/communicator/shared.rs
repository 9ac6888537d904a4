//! What the clones of a communicator share, and the lock under which NCCL is called with it.
//!
//! ```text
//!  Communicator ─┐          ┌─ fixed: rank, ranks, name, order, deadline, mode
//!  Communicator ─┼─ Arc ── Shared ─┼─ Inner, behind the call lock: one host call at a time, as NCCL demands
//!  Window        ┘ (serial)        └─ Life, behind a lock of its own: never held during a call, so that state() never waits
//! ```

use super::operation::KnownShapes;
use super::order::CommOrder;
use super::state::CommState;
use crate::backoff::Backoff;
use crate::error::CommError;
use crate::handles::{CommHandle, RegistrationHandle, WindowHandle};
use crate::library::Nccl;
use crate::watch::{self, ERROR_LIMIT, MeetingId, WatchSettings, WatchdogMode, Watched};
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use symmalloc_cuda::CudaDevice;

/// For longer than a program lives.
pub(super) const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Whether NCCL's calls return before their work on the host is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// They block: those that may wait for other ranks are made on a thread of their own.
    Blocking,
    /// They return, and NCCL is asked until it is done.
    Nonblocking,
}

/// Who destroys the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    Owned,
    Borrowed,
}

pub(super) struct Shared {
    pub(super) nccl: &'static Nccl,
    pub(super) device: Arc<CudaDevice>,
    pub(super) name: Arc<str>,
    /// NCCL keeps a pointer to it, so it goes wherever the communicator goes.
    pub(super) c_name: Arc<CStr>,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) deadline: Duration,
    pub(super) mode: Mode,
    pub(super) ownership: Ownership,
    pub(super) order: CommOrder,
    /// Unique in the process.
    pub(super) serial: u64,
    /// Set by [`abort`](super::Communicator::abort), for a thread that waits with the call lock held.
    pub(super) abort_asked: AtomicBool,
    /// Where its processes met.
    pub(super) met: Option<MeetingId>,
    pub(super) watch_settings: WatchSettings,
    /// Set when it is ready.
    pub(super) watched: OnceLock<Arc<Watched>>,
    /// When an error of the watchdog's first waited for the end.
    pub(super) failed_at: OnceLock<Instant>,
    pub(super) inner: Mutex<Inner>,
    pub(super) life: Arc<Mutex<Life>>,
}

/// Handles that NCCL would take back. A thread that is inside a call changes them when NCCL has answered, whoever waits for it.
pub(super) type Handles<Handle> = Arc<Mutex<Vec<Handle>>>;

/// What changes from call to call.
#[derive(Debug, Default)]
pub(super) struct Inner {
    pub(super) shapes: KnownShapes,
    /// Windows that are there, in the order of their registration.
    pub(super) windows: Handles<WindowHandle>,
    /// Registrations that are there, in order.
    pub(super) buffers: Handles<RegistrationHandle>,
    /// Number of splits so far; equal on all ranks.
    pub(super) splits: u32,
    /// Number of gathers by transports so far; equal on all ranks.
    pub(super) gathers: u64,
}

/// What became of it.
#[derive(Debug)]
pub(super) struct Life {
    /// Null exactly when it is not ready.
    pub(super) comm: CommHandle,
    pub(super) state: CommState,
    /// The error that ended it.
    pub(super) cause: Option<Arc<CommError>>,
}

impl Life {
    pub(super) fn ready(comm: CommHandle) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Life { comm, state: CommState::Ready, cause: None }))
    }

    /// It is over. Calls from now on fail.
    pub(super) fn end(&mut self, state: CommState, cause: Option<Arc<CommError>>) {
        self.comm = CommHandle::NULL;
        self.state = state;
        self.cause = cause;
    }
}

/// The right to call NCCL with a communicator that is ready.
pub(super) struct Access<'a> {
    pub(super) shared: &'a Shared,
    pub(super) inner: MutexGuard<'a, Inner>,
    pub(super) comm: CommHandle,
}

impl Shared {
    /// A number that no other communicator of this process has.
    pub(super) fn next_serial() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits until no other thread calls NCCL with it. Refuses what the watchdog has ended, or is about to.
    pub(super) fn access(&self) -> Result<Access<'_>, CommError> {
        // Before the lock as well, which the end that follows may hold.
        self.check_failure()?;
        let access = self.access_with(lock(&self.inner))?;
        let Some(_failed) = self.failure() else { return Ok(access) };
        drop(access);
        self.access()
    }

    pub(super) fn check_failure(&self) -> Result<(), CommError> {
        let Some(failed) = self.failure() else { return Ok(()) };
        self.wait_for_end();
        Err(failed)
    }

    /// An error of the watchdog's waits for the end that follows from it, and errors behind it for what is left of that time: a program
    /// that exits at once would unload libraries under the thread that aborts. After so long the watchdog ends the process, where it
    /// must.
    fn wait_for_end(&self) {
        let failed_at = self.failed_at.get_or_init(Instant::now);
        let backoff = Backoff::new(ERROR_LIMIT.saturating_sub(failed_at.elapsed()));
        while !self.is_ended() && backoff.pause() {}
    }

    /// Whether nothing of it runs any more, or it is another one's to end.
    pub(super) fn is_ended(&self) -> bool {
        self.ownership == Ownership::Borrowed
            || matches!(lock(&self.life).state, CommState::Destroyed | CommState::Aborted)
    }

    pub(super) fn access_with<'a>(&'a self, inner: MutexGuard<'a, Inner>) -> Result<Access<'a>, CommError> {
        let comm = lock(&self.life).comm;
        if comm.is_null() {
            return Err(self.gone());
        }
        Ok(Access { shared: self, inner, comm })
    }

    /// The error of a communicator that is not ready.
    pub(super) fn gone(&self) -> CommError {
        let life = lock(&self.life);
        CommError::Gone { name: Arc::clone(&self.name), state: life.state, cause: life.cause.clone() }
    }

    /// Refuses what is not ready. Waits for nobody.
    pub(super) fn check_ready(&self) -> Result<(), CommError> {
        match self.failure() {
            Some(failed) => Err(failed),
            None if lock(&self.life).comm.is_null() => Err(self.gone()),
            None => Ok(()),
        }
    }

    /// The error of what the watchdog ended.
    pub(super) fn failure(&self) -> Option<CommError> {
        Some(CommError::Failed(Arc::clone(self.watched.get()?.failure()?)))
    }

    /// How long a wait of this crate's own for other ranks lasts. The watchdog knows whether they are slow or stuck, and ends it.
    pub(super) fn patience(&self) -> Duration {
        let is_watched = self.watched.get().is_some() && self.watch_settings.mode() != WatchdogMode::Off;
        if is_watched && watch::is_on() { FOR_EVER } else { self.deadline }
    }

    pub(super) fn state(&self) -> CommState {
        lock(&self.life).state
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
