//! How a communicator ends when it does not end in order.
//!
//! Whatever is called here may hang as well: a symmetric kernel has no abort flag, and NCCL waits for its kernels. So it is called
//! on a thread of its own, which is waited for: [`ABORT_LIMIT`] long where the program asked for an abort,
//! [`ERROR_LIMIT`](watch::ERROR_LIMIT) where an error of the watchdog's or a registrar's waits, [`GRACE`] where another one does. If it is
//! not through by then, the communicator is [`Lost`](CommState::Lost); when the thread comes through later, it is
//! [`Aborted`](CommState::Aborted) from then on. (NCCL's proxy thread, which an abort joins, stays as long as peers are connected to it:
//! behind a peer that is stuck but alive, an abort ends when that peer's does.)
//!
//! | what NCCL is doing | what is called |
//! |---|---|
//! | nothing that we know of | `ncclCommRevoke` and deregistration where there is a revoke, then `ncclCommAbort` |
//! | a thread of NCCL's works | `ncclCommAbort`, which stops it |
//! | a thread of ours is inside | `ncclCommRevoke` where there is one; when the thread is back, deregistration and `ncclCommAbort` |
//!
//! Deregistration comes first because up to 2.28 an abort keeps the physical memory of windows for good. It needs a communicator
//! whose kernels have stopped, which is what a revoke does: without one, windows are left to the abort.

use super::shared::{Access, Handles, Life, Mode, Ownership, Shared, lock};
use super::state::{CommState, Stage};
use super::threads::{self, Answer, Kept};
use crate::backoff::Backoff;
use crate::calls::{CallProgress, Calls};
use crate::driver;
use crate::error::CommError;
use crate::handles::{CommHandle, RegistrationHandle, WindowHandle};
use crate::version::Capability;
use crate::watch;
use std::ffi::CStr;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use symmalloc_cuda::CudaDevice;
use symmalloc_watchdog::FailureReport;

/// How long an abort that the program asked for may take.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(5);
/// How long an error waits for the abort that follows from it.
pub(super) const GRACE: Duration = Duration::from_millis(250);
/// How often it is looked whether a capture has ended.
const LOOK: Duration = Duration::from_millis(20);

/// What is going on when a communicator is ended.
pub(super) enum Ending {
    /// No host call.
    Idle,
    /// No host call, and it was never ready.
    Unborn,
    /// A thread of NCCL's works for it, and may write to what is kept.
    Underway { kept: Kept },
    /// A thread of ours is inside a call.
    Inside { stage: Stage, caller: Receiver<Answer> },
}

impl Ending {
    /// Whether a revoke can be tried.
    fn can_revoke(&self) -> bool {
        match self {
            Ending::Idle => true,
            // NCCL's revoke needs a connected communicator, and refuses one that is being destroyed.
            Ending::Inside { stage, .. } => !matches!(stage, Stage::Connect | Stage::Destroy),
            Ending::Unborn | Ending::Underway { .. } => false,
        }
    }
}

/// What is left of a communicator that is being ended.
struct Remains {
    calls: &'static Calls,
    comm: CommHandle,
    mode: Mode,
    windows: Handles<WindowHandle>,
    buffers: Handles<RegistrationHandle>,
    life: Arc<Mutex<Life>>,
    /// NCCL points to it until the abort.
    name: Arc<CStr>,
}

/// Ends these communicators, and waits so long for it. They are aborted or lost afterwards.
pub(super) fn end_all(accesses: &mut [Access<'_>], ending: Ending, cause: Option<&Arc<CommError>>, limit: Duration) {
    for access in &mut *accesses {
        // From here on no other thread calls NCCL with it.
        lock(&access.shared.life).end(CommState::Lost, cause.cloned());
        tell(access.shared, cause);
    }
    let owned = || accesses.iter().all(|access| access.shared.ownership == Ownership::Owned);
    let has_revoke = || accesses.iter().all(|access| access.shared.nccl.supports(Capability::Revoke));
    let revokes = ending.can_revoke() && owned() && has_revoke();
    if !owned() {
        // Another one's to abort: what NCCL may still write to or point to stays.
        std::mem::forget(ending);
        for access in &*accesses {
            std::mem::forget(Arc::clone(&access.shared.c_name));
            report(access);
        }
        return;
    }
    // Nothing gets a thread out of a call without a revoke; should it come back, the communicator is aborted then.
    let limit = if matches!(ending, Ending::Inside { .. }) && !revokes { Duration::ZERO } else { limit };
    let device = Arc::clone(&accesses[0].shared.device);
    let remains: Vec<Remains> = accesses.iter().map(remains).collect();
    let (sender, through) = channel();
    let started = threads::run(move || {
        // Without a context there is no device left to end anything on.
        if let Ok(_current) = device.enter() {
            let _relaxed = device.relax_capture();
            end(ending, &remains, revokes, &device);
            for one in &remains {
                lock(&one.life).state = CommState::Aborted;
            }
        }
        // Nobody listens any more when it took too long.
        let _heard = sender.send(());
    });
    if started.is_ok() {
        let _in_time = through.recv_timeout(limit);
    }
    accesses.iter().for_each(report);
}

/// Tells the other ranks, which would wait for this one.
fn tell(shared: &Shared, cause: Option<&Arc<CommError>>) {
    // One that was never ready is not known to them.
    let Some(watched) = shared.watched.get() else { return };
    let text = match cause {
        Some(cause) => cause.to_string(),
        None if thread::panicking() => "its thread panicked".to_owned(),
        None => "its program aborted the communicator".to_owned(),
    };
    let first_rank = match cause.map(|cause| &**cause) {
        Some(CommError::PeerLost { rank, .. }) => Some(*rank),
        Some(CommError::Failed(failure)) => failure.cause.rank(),
        _ => None,
    };
    watch::fail(watched, FailureReport { text, first_rank });
}

fn remains(access: &Access<'_>) -> Remains {
    Remains {
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
    tracing::warn!(name: "communicator.ended", target: "symmalloc", communicator = name, %state);
}

fn end(ending: Ending, remains: &[Remains], revokes: bool, device: &CudaDevice) {
    let revoked = revokes && remains.iter().all(Remains::revoke);
    let kept = match ending {
        Ending::Inside { caller, .. } => {
            // What it came to does not matter any more; that it is out of NCCL does.
            let _answer = caller.recv();
            None
        }
        Ending::Underway { kept } => kept,
        Ending::Idle | Ending::Unborn => None,
    };
    if revoked && remains.iter().any(|one| !lock(&one.windows).is_empty()) {
        // The revoke has stopped all kernels but symmetric ones. While one of these waits for a dead peer, this waits as well:
        // nothing may be taken from under it. So it does while a stream is captured, for which the driver refuses to wait.
        while device.synchronize().is_err_and(|error| driver::is_capture_in_the_way(&error)) {
            thread::sleep(LOOK);
        }
    }
    for one in remains {
        if revoked {
            one.deregister();
        }
        one.abort();
    }
    drop(kept);
}

impl Remains {
    /// Stops what is in flight, on the host and on the device. Whether that worked.
    fn revoke(&self) -> bool {
        // It may come while another thread is inside a call: that is what it is for.
        if self.calls.revoke(self.comm).is_err() {
            return false;
        }
        let backoff = Backoff::new(ABORT_LIMIT);
        loop {
            match self.calls.poll("ncclCommRevoke", self.comm) {
                Ok(CallProgress::Underway) if self.mode == Mode::Nonblocking && backoff.pause() => {}
                answer => return answer == Ok(CallProgress::Done),
            }
        }
    }

    /// Gives back what is registered, of which nothing runs any more. Errors change nothing: the abort follows.
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
            tracing::warn!(name: "communicator.abort_failed", target: "symmalloc", communicator = name, %error);
        }
    }
}
