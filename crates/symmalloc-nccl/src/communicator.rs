//! Communicators: groups of ranks that call the same collectives in the same order.
//!
//! ```text
//!  communicator.rs          the public type
//!    builder.rs             connect, connect_env, borrow
//!    shared.rs              state shared by the clones, the call lock
//!    call.rs                NCCL calls: their thread (threads.rs) and deadline
//!    ending.rs              abnormal termination (state.rs)
//!    registering.rs         windows and buffers (registration.rs, deregister.rs)
//!    submit.rs              collectives (operation.rs), over buffers (buffers.rs)
//!    pending_comm_guard.rs  ranks that are about to create one
//!    host_entry.rs          a registration or split in the flight record
//!    watching.rs            queries by the watchdog
//!    order.rs               one global order of communicators, on every rank
//! ```

mod builder;
mod call;
mod deregister;
mod ending;
pub(crate) mod error;
pub(crate) mod order;
mod pending_comm_guard;
pub(crate) mod registration;
mod shared;
pub(crate) mod submission;
pub(crate) mod threads;
pub(crate) mod watching;

pub use builder::CommunicatorBuilder;
pub use error::{CommState, Stage};
pub use order::CommOrder;

use crate::backoff::Backoff;
use crate::communicator::call::HostEntry;
use crate::communicator::call::{Route, perform, settle};
use crate::communicator::deregister::deregister_all;
use crate::communicator::ending::{ABORT_LIMIT, Ending, end_all};
use crate::communicator::error::CommError;
use crate::communicator::pending_comm_guard::PendingCommGuard;
use crate::communicator::shared::{Inner, Life, Mode, Ownership, Shared, lock};
use crate::communicator::threads::{Kept, Waited, start, wait_for};
use crate::ffi::calls::NO_COLOR;
use crate::ffi::handles::{CommHandle, NewHandle};
use crate::ffi::library::Nccl;
use crate::ffi::version::Capability;
use crate::watchdog::{self, ERROR_LIMIT, Watched};
use cudarc::driver::CudaStream;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ops::Deref;
use std::slice::from_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;
use symmalloc_cuda::CudaDevice;

/// A safe wrapper of `ncclComm_t`. Clones are cheap and refer to the same communicator.
///
/// Any thread can use a communicator. Host calls are serialized. Every rank must call the same collectives, including registrations and
/// splits, in the same order, so threads that share a communicator must agree on an order.
///
/// # Deadlines
/// No wait for other ranks lasts longer than the [`deadline`](CommunicatorBuilder::deadline) without progress, on the host or on the
/// device. A [watchdog](crate::WatchdogMode) determines which rank is gone, stopped or stuck. Calls and waits then return
/// [`CommError::Failed`], and the communicator and its windows are gone. The allocator and other communicators continue to work. NCCL
/// cannot cancel a single call. While connecting, and for operations that the watchdog does not observe, the error is
/// [`CommError::Deadline`], which does not identify a rank. Wait for streams with [`synchronize`](Self::synchronize). See
/// `docs/watchdog.md`.
///
/// A kernel on symmetric windows has no abort flag, and the driver waits for it in `exit`. If such a kernel waits for a missing peer, the
/// communicator is [`Lost`](CommState::Lost) and the watchdog ends the process, unless it is configured not to.
///
/// # Blocking and nonblocking mode
/// | | [blocking](CommunicatorBuilder), the default | [`nonblocking`](CommunicatorBuilder::nonblocking) |
/// |---|---|---|
/// | a small collective, back to back (8 KiB all-reduce, 2 H200, `docs/measured/nccl.md`) | 10 us | 75 us: NCCL starts a thread for each |
/// | first collective of its kind, type and size, registration, split | on a separate thread, with a wait | polled |
/// | after a deadline | revoked and aborted; without `ncclCommRevoke` (before 2.28.9), and while connecting, lost | aborted |
///
/// `NCCL_COMM_BLOCKING` is respected. NCCL gives it precedence over the program's choice.
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Owner>,
}

/// State shared by the clones. The watchdog refers to it without delaying its destruction.
struct Owner(Arc<Shared>);

impl Deref for Owner {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Communicator {
    /// Returns this rank's number.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.shared.ranks
    }

    /// Returns the communicator's name. The name of a split is its parent's name with the number of the split and the color: "world/1.0".
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Returns the communicator's device.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.shared.device
    }

    /// Returns the library that the communicator uses.
    pub fn nccl(&self) -> &'static Nccl {
        self.shared.nccl
    }

    /// Returns the longest time that the communicator waits for other ranks without progress.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Returns `true` if NCCL's calls block the host.
    pub fn is_blocking(&self) -> bool {
        self.shared.mode == Mode::Blocking
    }

    /// Returns the communicator's position among all communicators of the job, which is equal on all of its ranks.
    pub fn order(&self) -> &CommOrder {
        &self.shared.order
    }

    /// Returns the communicator's state. Never waits.
    pub fn state(&self) -> CommState {
        self.shared.state()
    }

    /// Returns the error that ended the communicator, if any. Never waits.
    pub fn cause(&self) -> Option<CommError> {
        lock(&self.shared.life).cause.as_deref().cloned()
    }

    /// Checks that the communicator is ready and that NCCL reports no error. Waits while another thread calls NCCL with it.
    ///
    /// # Errors
    /// [`CommError::Gone`], or the error that NCCL reports, which ends the communicator.
    pub fn check(&self) -> Result<(), CommError> {
        let mut access = self.shared.access()?;
        let backoff = Backoff::new(self.shared.deadline);
        settle(from_mut(&mut access), Stage::Submit, &None, &backoff)
    }

    /// Returns NCCL's communicator, for calls that this type does not offer, or null if the communicator has ended. Never waits.
    ///
    /// The caller must ensure that no other thread calls NCCL with this communicator at the same time.
    pub fn raw(&self) -> *mut c_void {
        lock(&self.shared.life).comm.as_ptr()
    }

    /// Splits the communicator into new ones, each with the ranks of one color, ordered by key and then by rank. All ranks must call it.
    /// Returns `None` on a rank without a color, which joins no communicator.
    ///
    /// The new communicator inherits the deadline and the mode. Its name is the parent's name with the number of the split and the color.
    ///
    /// # Errors
    /// Returns an error if ranks do not arrive within the deadline, or NCCL or the driver fails; this communicator is then ended. Also
    /// returns an error if it had already ended.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, CommError> {
        let shared = &self.shared;
        let (raw_color, raw_key) =
            (color.map_or(Some(NO_COLOR), |color| c_int::try_from(color).ok()), c_int::try_from(key));
        let (Some(raw_color), Ok(raw_key)) = (raw_color, raw_key) else {
            return Err(CommError::SplitArgument { color: color.unwrap_or(0), key });
        };
        let mut access = shared.access()?;
        access.inner.splits += 1;
        let ordinal = access.inner.splits;
        let name = format!("{}/{ordinal}.{}", shared.name, color.map_or(-1, i64::from));
        let c_name: Arc<std::ffi::CStr> = CString::new(name.as_str()).map_err(|_| CommError::Name)?.into();
        let new = NewHandle::named(&c_name);
        let (kept, out): (Kept, _) = (Some(Arc::clone(&new) as _), Arc::clone(&new));
        let (comm, mode) = (access.comm, shared.mode);
        let order = shared.order.split(ordinal, color.unwrap_or(0));
        // Reports this rank as connecting until the new communicator is watched.
        let _pending = color.map(|_| PendingCommGuard::new(shared.met, shared.rank, &order));
        let entry = HostEntry::begin(shared.watched(), Stage::Split, None);
        perform(from_mut(&mut access), Stage::Split, Route::when_blocking(mode, Route::Apart), &kept, move |calls| {
            calls.split(comm, raw_color, raw_key, &out, mode == Mode::Blocking)
        })?;
        drop((entry, access));
        if color.is_none() {
            return Ok(None);
        }
        let raw = new.comm().ok_or(CommError::NoCommunicator { call: "ncclCommSplit" })?;
        let child = Shared {
            nccl: shared.nccl,
            device: Arc::clone(&shared.device),
            name: name.into(),
            c_name,
            rank: 0,
            ranks: 0,
            deadline: shared.deadline,
            mode,
            ownership: Ownership::Owned,
            order,
            serial: Shared::next_serial(),
            abort_asked: AtomicBool::new(false),
            met: shared.met,
            watch_settings: shared.watch_settings.clone(),
            watched: OnceLock::new(),
            failed_at: OnceLock::new(),
            inner: Mutex::new(Inner::default()),
            life: Life::ready(raw),
        };
        Communicator::settled(child, &Backoff::new(shared.deadline)).map(Some)
    }

    /// Destroys the communicator and its remaining windows after all its work has completed. Does nothing if it has already ended. Dropping
    /// the last clone also destroys it.
    ///
    /// Destroy graphs that contain its collectives first, because NCCL waits for them.
    ///
    /// # Errors
    /// Returns an error if its work does not complete within the deadline. The communicator is then aborted, as by [`abort`](Self::abort).
    pub fn destroy(&self) -> Result<(), CommError> {
        self.shared.destroy()
    }

    /// Ends the communicator and all of its work, including work on the device, and unblocks other threads that are inside calls with it.
    /// The watchdogs of other ranks end it on those ranks. Does nothing if it has already ended.
    ///
    /// Takes at most five seconds. Without `ncclCommRevoke` (before 2.28.9), NCCL retains the memory of remaining windows: deregister them
    /// first.
    ///
    /// # Errors
    /// Returns an error if the communicator is [`Lost`](CommState::Lost) afterwards.
    pub fn abort(&self) -> Result<(), CommError> {
        self.abort_within(ABORT_LIMIT)
    }

    /// Like [`abort`](Self::abort), but with the shorter time limit that applies after an error.
    pub(crate) fn abort_for_error(&self) -> Result<(), CommError> {
        self.abort_within(ERROR_LIMIT)
    }

    fn abort_within(&self, limit: Duration) -> Result<(), CommError> {
        self.shared.abort_asked.store(true, Ordering::Release);
        let inner = self.shared.lock_against_waiting(limit)?;
        if let Ok(mut access) = self.shared.access_with(inner) {
            // The watchdog may be about to end the communicator: record its cause for later errors.
            let failed = self.shared.failure().map(Arc::new);
            end_all(from_mut(&mut access), Ending::Idle, failed.as_ref(), limit);
        }
        match self.state() {
            CommState::Lost => Err(self.shared.gone()),
            _ => Ok(()),
        }
    }

    /// Waits until the communicator is connected, and queries NCCL for the rank and the number of ranks.
    fn settled(mut shared: Shared, backoff: &Backoff) -> Result<Communicator, CommError> {
        let mut access = shared.access()?;
        settle(from_mut(&mut access), Stage::Connect, &None, backoff)?;
        let (rank, ranks) = {
            let _current = shared.device.enter()?;
            shared.nccl.calls().rank_of_ranks(access.comm)?
        };
        drop(access);
        (shared.rank, shared.ranks) = (rank, ranks);
        let (communicator, device) = (&*shared.name, shared.device.ordinal());
        tracing::debug!(name: "communicator.ready", target: "symmalloc", communicator, rank, ranks, device);
        let shared = Arc::new(shared);
        shared.begin_to_be_watched();
        Ok(Communicator { shared: Arc::new(Owner(shared)) })
    }

    /// Ends the communicator because a wait for the device exceeded the deadline.
    pub(crate) fn give_up(&self, stage: Stage, waited: Duration) -> CommError {
        match self.shared.access() {
            Ok(mut access) => call::overdue(from_mut(&mut access), stage, waited, Ending::Idle),
            Err(gone) => gone,
        }
    }

    /// Ends the communicator because a rank's message did not arrive, although NCCL reports the collective as complete.
    pub(crate) fn miss(&self, rank: u32) -> CommError {
        let name = Arc::clone(&self.shared.name);
        match self.shared.access() {
            Ok(mut access) => call::give_up(from_mut(&mut access), Ending::Idle, |state| {
                let name = Arc::clone(&name);
                CommError::PeerLost { name, rank, state }
            }),
            Err(gone) => gone,
        }
    }

    /// Returns the number of a transport's next gather, equal on all ranks.
    pub(crate) fn next_gather(&self) -> Result<u64, CommError> {
        let mut access = self.shared.access()?;
        access.inner.gathers += 1;
        Ok(access.inner.gathers)
    }

    /// Returns an error if the stream belongs to another device.
    pub(crate) fn check_stream(&self, stream: &CudaStream) -> Result<(), CommError> {
        if stream.context().cu_ctx() == self.device().context().cu_ctx() {
            return Ok(());
        }
        Err(CommError::ForeignStream { name: Arc::clone(&self.shared.name) })
    }

    /// Returns the error that ended the communicator, if any.
    pub(crate) fn end_cause(&self) -> Option<Arc<CommError>> {
        lock(&self.shared.life).cause.clone()
    }

    pub(crate) fn watched(&self) -> &Watched {
        self.shared.watched()
    }

    /// Returns the time limit of waits in this crate, which is unlimited if the watchdog ends them.
    pub(crate) fn patience(&self) -> Duration {
        self.shared.patience()
    }

    pub(crate) fn serial(&self) -> u64 {
        self.shared.serial
    }

    /// Returns an error if the library does not support the capability.
    pub(crate) fn require(&self, capability: Capability) -> Result<(), CommError> {
        if self.shared.nccl.supports(capability) {
            return Ok(());
        }
        Err(CommError::Unsupported { capability, version: self.shared.nccl.version() })
    }
}

impl Shared {
    fn destroy(&self) -> Result<(), CommError> {
        let Ok(mut access) = self.access() else { return Ok(()) };
        let deregistered = deregister_all(&mut access);
        if self.ownership == Ownership::Borrowed {
            lock(&self.life).end(CommState::Destroyed, None);
            watchdog::leave(self.watched());
        }
        if self.state() != CommState::Ready {
            return deregistered;
        }
        let (comm, kept): (_, Kept) = (access.comm, Some(Arc::new(Arc::clone(&self.c_name))));
        let entry = HostEntry::begin(self.watched(), Stage::Destroy, None);
        perform(from_mut(&mut access), Stage::Destroy, Route::Apart, &kept, move |calls| calls.finalize(comm))?;
        drop(entry);
        self.destroy_finalized(comm, kept)?;
        deregistered
    }

    fn destroy_finalized(&self, comm: CommHandle, kept: Kept) -> Result<(), CommError> {
        let (calls, backoff) = (self.nccl.calls(), Backoff::new(self.deadline));
        // Even after a failure, the communicator must not be used again.
        lock(&self.life).end(CommState::Destroyed, None);
        watchdog::leave(self.watched());
        let caller = start(&self.device, kept, move || calls.destroy(comm));
        match wait_for(&caller, &backoff, || false) {
            Waited::Came(answer) => {
                answer?;
                tracing::debug!(name: "communicator.destroyed", target: "symmalloc", communicator = &*self.name);
                Ok(())
            }
            Waited::Stopped | Waited::TooLong => {
                lock(&self.life).state = CommState::Lost;
                Err(self.overdue(Stage::Destroy, &backoff))
            }
        }
    }

    fn overdue(&self, stage: Stage, backoff: &Backoff) -> CommError {
        let (name, waited, state) = (Arc::clone(&self.name), backoff.waited(), self.state());
        CommError::Deadline { name, stage, waited, state }
    }

    /// Acquires the call lock even if its holder hangs in a call that normally does not wait. After `patience`, revokes the holder's
    /// operation; after twice `patience`, returns an error.
    fn lock_against_waiting(&self, patience: Duration) -> Result<MutexGuard<'_, Inner>, CommError> {
        let backoff = Backoff::new(patience * 2);
        let mut has_revoked = false;
        loop {
            match self.inner.try_lock() {
                Ok(inner) => return Ok(inner),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if backoff.waited() > patience && !has_revoked {
                has_revoked = true;
                self.revoke_from_outside();
            }
            if !backoff.pause() {
                return Err(self.overdue(Stage::Abort, &backoff));
            }
        }
    }

    /// Revokes the operation that another thread waits for in a call.
    fn revoke_from_outside(&self) {
        let comm = lock(&self.life).comm;
        if comm.is_null() || self.ownership == Ownership::Borrowed || !self.nccl.supports(Capability::Revoke) {
            return;
        }
        // The communicator is still valid: ending it requires the call lock, whose holder is inside a call.
        let calls = self.nccl.calls();
        start(&self.device, None, move || calls.revoke(comm));
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if let Ok(mut access) = self.access() {
                end_all(from_mut(&mut access), Ending::Idle, None, ABORT_LIMIT);
            }
            return;
        }
        if let Err(error) = self.destroy() {
            tracing::warn!(name: "communicator.drop_failed", target: "symmalloc", communicator = &*self.name, %error);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.shared.name)
            .field("rank", &self.shared.rank)
            .field("ranks", &self.shared.ranks)
            .field("device", &self.shared.device.ordinal())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
