//! Communicators: groups of ranks that call the same collectives in the same order.
//!
//! ```text
//!  communicator.rs      the public type
//!    builder.rs         creation: connect, connect_env, split, shrink, borrow
//!    meeting.rs         ids that ranks share, and meetings whose connections the watchdog keeps
//!    shared.rs          state shared by the clones, the call lock
//!    call.rs            NCCL calls: their thread (threads.rs) and deadline
//!    submission.rs      collectives: their buffers, and groups of them
//!    shapes.rs          calls for which NCCL has connected the ranks
//!    registration.rs    windows and buffers: registration and deregistration
//!    suspension.rs      release and restoration of NCCL's memory
//!    growth.rs          more ranks: the id of a grow, grow, join
//!    ending.rs          the end of communicators: aborts and revokes
//!      revocation.rs    a revoke that the program requests
//!      destruction.rs   normal end
//!    watching.rs        queries by the watchdog
//!    order.rs           one global order of communicators, on every rank
//! ```

mod builder;
mod call;
mod ending;
pub(crate) mod error;
mod growth;
mod meeting;
pub(crate) mod order;
pub(crate) mod registration;
mod shapes;
mod shared;
pub(crate) mod submission;
mod suspension;
pub(crate) mod threads;
pub(crate) mod watching;

pub use builder::CommunicatorBuilder;
pub use error::{CommState, GrowIdObstacle, Stage};
pub use order::CommOrder;
pub use suspension::CommMemory;

use crate::backoff::Backoff;
use crate::communicator::call::poll_until_done;
use crate::communicator::ending::{ABORT_LIMIT, Ending, end_all};
use crate::communicator::error::CommError;
use crate::communicator::shared::{Inner, Mode, Ownership, Shared, lock};
use crate::communicator::threads::start;
use crate::ffi::library::Nccl;
use crate::ffi::version::Capability;
use crate::logging::log;
use crate::watchdog::Observed;
use cudarc::driver::CudaStream;
use std::ffi::c_void;
use std::fmt;
use std::ops::Deref;
use std::slice::from_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::Duration;
use symmalloc_cuda::CudaDevice;
use symmalloc_files::is_forked;
use symmalloc_watchdog::ERROR_LIMIT;

/// A safe wrapper of `ncclComm_t`. Clones are cheap and refer to the same communicator.
///
/// Any thread can use a communicator. Host calls are serialized. Every rank must call the same collectives, including registrations and
/// splits, in the same order, so threads that share a communicator must agree on an order.
///
/// # Deadlines
/// If the other ranks make no progress, a wait for them ends after the [`deadline`](CommunicatorBuilder::deadline), on the host and on the
/// device. A [watchdog](crate::WatchdogMode) determines which rank is gone, stopped or stuck. Calls and waits then return
/// [`CommError::Failed`], and the communicator and its windows are gone. The allocator and other communicators continue to work. The whole
/// communicator ends because NCCL cannot cancel a single call. While connecting, and for operations that the watchdog does not observe, the
/// error is [`CommError::Deadline`] instead, which does not identify a rank. To wait for a stream, call [`synchronize`](Self::synchronize),
/// which returns these errors instead of blocking indefinitely. See `docs/watchdog.md`.
///
/// A kernel on symmetric windows has no abort flag, and the driver waits for such a kernel in `exit`. If such a kernel waits for a missing
/// peer, the communicator is [`Lost`](CommState::Lost) and the watchdog ends the process, unless it is configured not to.
///
/// # Blocking and nonblocking mode
/// | | [blocking](CommunicatorBuilder), the default | [`nonblocking`](CommunicatorBuilder::nonblocking) |
/// |---|---|---|
/// | time per small collective when many run back to back (8 KiB all-reduce, 2 H200, `docs/measured/nccl.md`) | 10 us | 75 us: NCCL starts a thread for each |
/// | the first collective of each kind, data type and size; registrations; splits | made on a separate thread, for which the caller waits | polled |
/// | after a deadline | the communicator is revoked and aborted; if NCCL lacks `ncclCommRevoke` (before 2.28.7) or was still connecting, the communicator is lost | the communicator is aborted |
///
/// `NCCL_COMM_BLOCKING` is respected. NCCL gives it precedence over the program's choice.
#[derive(Clone)]
pub struct Communicator {
    shared: Arc<Owner>,
}

/// The state that the clones share. When the last clone drops it, the communicator is destroyed, even if the watchdog still refers to the
/// state.
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

    /// Returns the device whose buffers and streams this communicator accepts.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.shared.device
    }

    /// Returns the library that the communicator uses.
    pub fn nccl(&self) -> &'static Nccl {
        self.shared.nccl
    }

    /// Returns the maximum time that the communicator waits for other ranks that make no progress.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Returns `true` if NCCL's calls block the host.
    pub fn is_blocking(&self) -> bool {
        self.shared.mode == Mode::Blocking
    }

    /// Returns the communicator's position among all communicators of the job. The position is equal on all ranks of the communicator.
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
        poll_until_done(from_mut(&mut access), Stage::Submit, &None, &backoff)
    }

    /// Returns NCCL's communicator, for calls that this type does not offer, or null if the communicator has ended. Never waits.
    ///
    /// The caller must ensure that no other thread calls NCCL with this communicator at the same time.
    pub fn raw(&self) -> *mut c_void {
        lock(&self.shared.life).comm.as_ptr()
    }

    /// Destroys the communicator and its remaining windows after all its work has completed. Then waits until the watchdog has notified the
    /// other ranks, which normally takes less than a millisecond and never longer than the deadline. A revoked communicator is aborted
    /// instead, which does not wait for other ranks. Does nothing if the communicator has already ended, or in a forked child. Dropping the
    /// last clone also destroys it.
    ///
    /// First destroy all graphs that contain the communicator's collectives, because NCCL waits for these graphs.
    ///
    /// # Errors
    /// Returns an error if the communicator's work does not complete within the deadline. The communicator is then aborted, as by
    /// [`abort`](Self::abort).
    pub fn destroy(&self) -> Result<(), CommError> {
        self.shared.destroy()
    }

    /// Ends the communicator and all of its work, including work on the device, and unblocks other threads that are in NCCL calls on this
    /// communicator. The watchdogs of other ranks end it on those ranks. Does nothing if it has already ended, or in a forked child.
    ///
    /// Takes at most five seconds. Without `ncclCommRevoke` (before 2.28.7), NCCL retains the memory of remaining windows: deregister them
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
        if is_forked() {
            return Ok(());
        }
        self.shared.abort_requested.store(true, Ordering::Release);
        let inner = self.shared.lock_or_revoke(limit)?;
        if let Ok(mut access) = self.shared.access_even_revoked_with(inner) {
            // The watchdog may be about to end the communicator. Record the failure that it found, for later errors.
            let failed = self.shared.failure().map(Arc::new);
            end_all(from_mut(&mut access), Ending::Idle, failed.as_ref(), limit);
        }
        match self.state() {
            CommState::Lost => Err(self.shared.gone()),
            _ => Ok(()),
        }
    }

    /// Ends the communicator because a wait for the device exceeded the deadline.
    pub(crate) fn end_overdue(&self, stage: Stage, waited: Duration) -> CommError {
        match self.shared.access() {
            Ok(mut access) => call::end_overdue(from_mut(&mut access), stage, waited, Ending::Idle),
            Err(gone) => gone,
        }
    }

    /// Ends the communicator because a rank's message did not arrive, although NCCL reports the collective as complete.
    pub(crate) fn end_for_lost_message(&self, rank: u32) -> CommError {
        let name = Arc::clone(&self.shared.name);
        match self.shared.access() {
            Ok(mut access) => call::end_unresponsive(from_mut(&mut access), Ending::Idle, |state| {
                let name = Arc::clone(&name);
                CommError::PeerLost { name, rank, state }
            }),
            Err(gone) => gone,
        }
    }

    /// Counts a gather by a transport and returns its number, which is equal on all ranks.
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

    pub(crate) fn watched(&self) -> &Observed {
        self.shared.watched()
    }

    /// Returns the time limit of waits in this crate, which is unlimited if the watchdog ends them.
    pub(crate) fn wait_limit(&self) -> Duration {
        self.shared.wait_limit()
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
    fn overdue(&self, stage: Stage, backoff: &Backoff) -> CommError {
        let (name, waited, state) = (Arc::clone(&self.name), backoff.waited(), self.state());
        CommError::Deadline { name, stage, waited, state }
    }

    /// Acquires the call lock even if its holder hangs in a call that normally does not wait. After `patience`, revokes the holder's
    /// operation; after twice `patience`, returns an error.
    fn lock_or_revoke(&self, patience: Duration) -> Result<MutexGuard<'_, Inner>, CommError> {
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
                self.revoke_holder();
            }
            if !backoff.pause() {
                return Err(self.overdue(Stage::Abort, &backoff));
            }
        }
    }

    /// Revokes the operation for which the holder of the call lock waits inside a call.
    fn revoke_holder(&self) {
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
        if is_forked() {
            // NCCL's threads and connections belong to the parent.
            return;
        }
        if std::thread::panicking() {
            if let Ok(mut access) = self.access_even_revoked() {
                end_all(from_mut(&mut access), Ending::Idle, None, ABORT_LIMIT);
            }
            return;
        }
        if let Err(error) = self.destroy() {
            let communicator = &*self.name;
            log(|| tracing::warn!(name: "communicator.drop_failed", target: "symmalloc", communicator, %error));
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
