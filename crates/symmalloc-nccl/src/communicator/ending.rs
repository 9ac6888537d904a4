//! The end of communicators: aborts and revokes. [`destruction`] is the normal end.
//!
//! Every NCCL call in this module can hang as well, because a symmetric kernel has no abort flag and NCCL waits for its kernels. The calls
//! are therefore made on a separate thread, with a bounded wait: [`ABORT_LIMIT`] if the program requested an abort,
//! [`ERROR_LIMIT`](symmalloc_watchdog::ERROR_LIMIT) for an error of the watchdog or a registrar, and [`GRACE`] for other errors. If the
//! thread has not finished by then, the communicator is [`Lost`](CommState::Lost). If it finishes later, the state changes to
//! [`Aborted`](CommState::Aborted). (An abort joins NCCL's proxy thread, which runs as long as peers are connected to it: if a peer is
//! stuck but alive, an abort completes only when the peer aborts too. A revoke joins the same thread. It completes if the stuck peer is
//! another process. It does not complete if the stuck peer is a thread of this process whose communicator has windows, as seen with NCCL
//! 2.28.9.)
//!
//! | NCCL's activity | calls made |
//! |---|---|
//! | none known | `ncclCommRevoke` and deregistration if revoke is supported, then `ncclCommAbort` |
//! | an NCCL thread is working | `ncclCommAbort`, which stops it |
//! | a thread of this crate is inside a call | `ncclCommRevoke` if supported; after the thread returns, deregistration and `ncclCommAbort` |
//!
//! A revoke by the program makes the same calls without `ncclCommAbort`. If one of them fails or takes too long, the communicator is
//! aborted.
//!
//! Deregistration comes before the abort because, up to NCCL 2.28, an abort permanently retains the physical memory of windows.
//! Deregistration requires that the communicator's kernels have stopped, so it follows a revoke and a wait for the device. Without a
//! revoke, windows are left to the abort.

mod destruction;
mod revocation;

use crate::backoff::Backoff;
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shared::{Access, Handles, Life, Mode, Ownership, Shared, lock};
use crate::communicator::threads::{CallResult, KeepAlive};
use crate::ffi::calls::{CallProgress, Calls};
use crate::ffi::driver;
use crate::ffi::error::{IN_PROGRESS, NcclError};
use crate::ffi::handles::{CommHandle, RegistrationHandle, WindowHandle};
use crate::ffi::version::Capability;
use crate::logging::log;
use crate::watchdog::at_exit::Unfinished;
use std::ffi::CStr;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use symmalloc_cuda::CudaDevice;
use symmalloc_watchdog::{FailureReport, threads};

/// Time limit of an abort that the program requested.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of an abort that an error causes.
pub(super) const GRACE: Duration = Duration::from_millis(250);
/// Interval between checks for the end of a capture.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Activity on a communicator when it is ended.
pub(super) enum Ending {
    /// No host call is in progress.
    Idle,
    /// No host call is in progress, and the communicator was never ready.
    Pending,
    /// An NCCL thread is working on a call and may write to the kept memory.
    Underway { kept: KeepAlive },
    /// A thread of this crate is inside a call.
    Inside { stage: Stage, caller: Receiver<CallResult> },
}

impl Ending {
    /// Returns `true` if a revoke is possible.
    fn can_revoke(&self) -> bool {
        match self {
            Ending::Idle => true,
            // NCCL's revoke requires a connected communicator and rejects a communicator that is being destroyed. A revoke does not stop a
            // grow either, because the thread in a grow waits for new ranks on the new communicator.
            Ending::Inside { stage, .. } => !matches!(stage, Stage::Connect | Stage::Destroy | Stage::Grow),
            Ending::Pending | Ending::Underway { .. } => false,
        }
    }
}

/// The resources of a communicator that is being ended.
struct Resources {
    calls: &'static Calls,
    comm: CommHandle,
    mode: Mode,
    windows: Handles<WindowHandle>,
    buffers: Handles<RegistrationHandle>,
    life: Arc<Mutex<Life>>,
    /// The name, kept because NCCL refers to it until the abort.
    name: Arc<CStr>,
}

/// Ends these communicators and waits for at most `limit`. Afterwards, they are aborted or lost.
pub(super) fn end_all(accesses: &mut [Access<'_>], ending: Ending, cause: Option<&Arc<CommError>>, limit: Duration) {
    let are_ready = accesses.iter().all(|access| access.shared.state() == CommState::Ready);
    for access in &mut *accesses {
        // The other ranks of a revoked communicator do not wait for this rank.
        let was_revoked = access.shared.state() == CommState::Revoked;
        // From here on, no other thread calls NCCL with this communicator.
        lock(&access.shared.life).end(CommState::Lost, cause.cloned());
        if !was_revoked {
            notify_ranks(access.shared, cause);
        }
    }
    let owned = || accesses.iter().all(|access| access.shared.ownership == Ownership::Owned);
    let has_revoke = || accesses.iter().all(|access| access.shared.nccl.supports(Capability::Revoke));
    // NCCL can revoke a communicator only once.
    let revokes = ending.can_revoke() && are_ready && owned() && has_revoke();
    if !owned() {
        // The owner must abort a borrowed communicator, so keep all memory that NCCL may still write to or refer to.
        std::mem::forget(ending);
        for access in &*accesses {
            lock(&access.shared.usage).is_lost = true;
            std::mem::forget(Arc::clone(&access.shared.c_name));
            report(access);
        }
        return;
    }
    // Only a revoke unblocks a thread inside a call. Without a revoke, the communicator is aborted only if that thread returns.
    let limit = if matches!(ending, Ending::Inside { .. }) && !revokes { Duration::ZERO } else { limit };
    let device = Arc::clone(&accesses[0].shared.device);
    let resources: Vec<Resources> = accesses.iter().map(resources).collect();
    let (sender, through) = channel();
    let unfinished = Unfinished::ending();
    let started = threads::run_when_possible(move || {
        // Without a context, the device is unusable, so there is nothing to end.
        if let Ok(_current) = device.enter() {
            let _relaxed = device.relax_capture();
            end(ending, &resources, revokes, &device);
            for one in &resources {
                lock(&one.life).state = CommState::Aborted;
            }
        }
        drop(unfinished);
        // After a timeout the channel is closed.
        let _heard = sender.send(());
    });
    if started.is_ok() {
        let _in_time = through.recv_timeout(limit);
    }
    accesses.iter().for_each(ensure_end);
    // If no thread could be started, the current thread may be the watchdog's, which the program's subscriber must not block.
    if started.is_ok() {
        accesses.iter().for_each(report);
    }
}

/// Lets the watchdog end the process if a lost communicator does not end soon.
fn ensure_end(access: &Access<'_>) {
    if let Some(watched) = access.shared.watched.get()
        && !access.shared.is_ended()
    {
        watched.watched().ensure_end();
    }
}

/// Notifies the other ranks, which would otherwise wait for this one.
fn notify_ranks(shared: &Shared, cause: Option<&Arc<CommError>>) {
    // The watchdogs of the other ranks do not know a communicator that was never ready.
    let Some(watched) = shared.watched.get() else { return };
    let report = match cause {
        Some(cause) => cause.report(),
        None => {
            let is_panic = thread::panicking();
            let text = if is_panic { "its thread panicked" } else { "its program aborted the communicator" };
            FailureReport { text: text.to_owned(), first_rank: None, stopped_ms: None }
        }
    };
    watched.fail(report);
}

fn resources(access: &Access<'_>) -> Resources {
    Resources {
        calls: access.shared.nccl.calls(),
        comm: access.comm,
        mode: access.shared.mode,
        windows: Arc::clone(&access.inner.windows),
        buffers: Arc::clone(&access.inner.buffers),
        life: Arc::clone(&access.shared.life),
        name: Arc::clone(&access.shared.c_name),
    }
}

fn report(access: &Access<'_>) {
    let (name, state) = (&*access.shared.name, access.shared.state());
    log(|| tracing::warn!(name: "communicator.ended", target: "symmalloc", communicator = name, %state));
}

/// Revokes these communicators. This crate must own them, and their library must support revokes. After an error, they are aborted or lost.
pub(super) fn revoke_all(accesses: &mut [Access<'_>], ending: Ending) -> Result<(), CommError> {
    for access in &*accesses {
        // Until the revoke is done, no other thread calls NCCL with this communicator.
        lock(&access.shared.life).end(CommState::Lost, None);
        access.shared.watched().close();
    }
    let device = Arc::clone(&accesses[0].shared.device);
    let resources: Vec<Resources> = accesses.iter().map(resources).collect();
    // The channel has no buffer, so a message is either received or returned to the sender as an error.
    let (sender, through) = sync_channel(0);
    let unfinished = Unfinished::ending();
    // If the job runs late, nobody receives the outcome, and the job itself aborts the communicators.
    let started = threads::run_when_possible(move || {
        let _unfinished = unfinished;
        let Ok(_current) = device.enter() else { return };
        let _relaxed = device.relax_capture();
        let (outcome, kept) = stop(ending, &resources, true, &device);
        if outcome.is_ok() && sender.send(Ok(())).is_ok() {
            return;
        }
        for one in &resources {
            one.abort();
            lock(&one.life).state = CommState::Aborted;
        }
        drop(kept);
        // After a timeout the channel is closed.
        let _heard = sender.send(outcome);
    });
    let outcome = match started {
        Ok(()) => through.recv_timeout(ABORT_LIMIT),
        Err(error) => return Err(revoke_failed(accesses, &CommError::Thread { kind: error.kind() })),
    };
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(revoke_failed(accesses, &error.into())),
        Err(_late) => {
            let overdue = |state| {
                let (name, stage) = (Arc::clone(&accesses[0].shared.name), Stage::Revoke);
                CommError::Deadline { name, stage, waited: ABORT_LIMIT, state }
            };
            return Err(revoke_failed(accesses, &overdue(accesses[0].shared.state())));
        }
    }
    for access in &*accesses {
        lock(&access.shared.usage).registrations = 0;
        let mut life = lock(&access.shared.life);
        (life.state, life.comm) = (CommState::Revoked, access.comm);
        access.shared.revoke_requested.store(false, Ordering::Release);
        drop(life);
        access.shared.watched().leave();
        let communicator = &*access.shared.name;
        log(|| tracing::warn!(name: "communicator.revoked", target: "symmalloc", communicator));
    }
    Ok(())
}

/// Records the error of a revoke as the cause of the communicators' end.
fn revoke_failed(accesses: &[Access<'_>], error: &CommError) -> CommError {
    let cause = Arc::new(error.clone());
    for access in accesses {
        lock(&access.shared.life).cause = Some(Arc::clone(&cause));
        notify_ranks(access.shared, Some(&cause));
        ensure_end(access);
        report(access);
    }
    error.clone()
}

fn end(ending: Ending, resources: &[Resources], revokes: bool, device: &CudaDevice) {
    let (_outcome, kept) = stop(ending, resources, revokes, device);
    resources.iter().for_each(Resources::abort);
    drop(kept);
}

/// Waits until no thread is in a call. If `revokes` is set, stops all work before that wait, and deregisters everything after it. Returns
/// the outcome of the revoke, and the memory that must be kept until an abort.
fn stop(
    ending: Ending,
    resources: &[Resources],
    revokes: bool,
    device: &CudaDevice,
) -> (Result<(), NcclError>, KeepAlive) {
    let outcome = if revokes { resources.iter().try_for_each(Resources::revoke) } else { Ok(()) };
    let revoked = revokes && outcome.is_ok();
    let kept = match ending {
        Ending::Inside { caller, .. } => {
            // The result is irrelevant: only the return from NCCL matters.
            let _answer = caller.recv();
            None
        }
        Ending::Underway { kept } => kept,
        Ending::Idle | Ending::Pending => None,
    };
    if revoked && resources.iter().any(|one| !lock(&one.windows).is_empty()) {
        // A revoke stops all kernels except symmetric ones. While a symmetric kernel waits for a dead peer, wait, too, because the kernel's
        // memory must stay registered. Also wait while a stream is being captured, because synchronization fails during a capture.
        while device.synchronize().is_err_and(|error| driver::is_capture_in_the_way(&error)) {
            thread::sleep(POLL_INTERVAL);
        }
    }
    if revoked {
        resources.iter().for_each(Resources::deregister);
    }
    (outcome, kept)
}

impl Resources {
    /// Stops all operations in flight, on the host and on the device.
    fn revoke(&self) -> Result<(), NcclError> {
        // A revoke is allowed while another thread is inside a call.
        self.calls.revoke(self.comm)?;
        let backoff = Backoff::new(ABORT_LIMIT);
        loop {
            match self.calls.poll("ncclCommRevoke", self.comm) {
                Ok(CallProgress::Underway) if self.mode == Mode::Nonblocking && backoff.pause() => {}
                Ok(CallProgress::Underway) => {
                    return Err(NcclError { call: "ncclCommRevoke", code: IN_PROGRESS, detail: None });
                }
                answer => return answer.map(drop),
            }
        }
    }

    /// Deregisters all remaining windows and buffers, which no work uses any more. Errors are ignored because the abort follows.
    fn deregister(&self) {
        for window in lock(&self.windows).drain(..) {
            let _given_back = self.calls.deregister_window(self.comm, window);
        }
        for buffer in lock(&self.buffers).drain(..) {
            let _given_back = self.calls.deregister_buffer(self.comm, buffer);
        }
    }

    fn abort(&self) {
        if let Err(error) = self.calls.abort(self.comm) {
            let name = &*self.name.to_string_lossy();
            log(|| tracing::warn!(name: "communicator.abort_failed", target: "symmalloc", communicator = name, %error));
        }
    }
}
