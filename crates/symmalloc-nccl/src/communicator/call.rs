//! How NCCL is called: on which thread, and for how long.
//!
//! ```text
//!                 the call returns when            so it is made          what ends a wait that is too long
//!  Blocking       its work on the host is done     on a thread of its     ncclCommRevoke, if there is one: the call comes
//!                                                  own, if it may wait    back. Otherwise the communicator is lost
//!  Nonblocking    a thread of NCCL's works on it   here                   ncclCommAbort, which joins NCCL's thread
//! ```
//!
//! In both modes NCCL is asked afterwards (`ncclCommGetAsyncError`) until nothing is under way, which in blocking mode is one
//! question: window registration returns success in any case, and errors of NCCL's own threads show only there.

use super::ending::{ABORT_LIMIT, Ending, GRACE, end_all};
use super::shared::{Access, Mode, lock};
use super::state::{CommState, Stage};
use crate::calls::{Calls, Progress};
use crate::communicator::threads;
use crate::error::{CommError, NcclError};
use crate::patience::Patience;
use std::any::Any;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use symmalloc_cuda::{CudaDevice, DriverError};

/// How often a thread that waits for another one looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(20);

/// The thread that makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// This one: the call does not wait for other ranks.
    Here,
    /// Another one, which may stay in the call for ever.
    Apart,
}

impl Route {
    /// `route` where NCCL's calls block; here otherwise.
    pub(super) fn when_blocking(mode: Mode, route: Route) -> Self {
        match mode {
            Mode::Blocking => route,
            Mode::Nonblocking => Route::Here,
        }
    }
}

/// What a call wrote to, and what NCCL points to: kept until NCCL is surely done with it.
pub(super) type Kept = Option<Arc<dyn Any + Send + Sync>>;

/// What a call came to.
pub(super) type Answer = Result<Progress, CallError>;

/// Why a call did not do its work.
#[derive(Debug)]
pub(super) enum CallError {
    Nccl(NcclError),
    Driver(DriverError),
    /// There was no thread to make it.
    Thread(ErrorKind),
}

impl From<NcclError> for CallError {
    fn from(error: NcclError) -> Self {
        CallError::Nccl(error)
    }
}

impl From<CallError> for CommError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Nccl(error) => error.into(),
            CallError::Driver(error) => error.into(),
            CallError::Thread(kind) => CommError::Thread { kind },
        }
    }
}

/// Makes a call for these communicators and waits until its work on the host is done.
///
/// After an error that NCCL cannot recover from, and after the deadline, the communicators are ended.
pub(super) fn perform(
    accesses: &mut [Access<'_>],
    stage: Stage,
    route: Route,
    kept: &Kept,
    call: impl FnOnce(&'static Calls) -> Result<Progress, NcclError> + Send + 'static,
) -> Result<(), CommError> {
    let patience = Patience::new(accesses[0].shared.deadline);
    make(accesses, stage, route, kept, &patience, call)?;
    settle(accesses, stage, kept, &patience)
}

/// Makes a call, on this thread or on another one, and waits until it returns.
pub(super) fn make(
    accesses: &mut [Access<'_>],
    stage: Stage,
    route: Route,
    kept: &Kept,
    patience: &Patience,
    call: impl FnOnce(&'static Calls) -> Result<Progress, NcclError> + Send + 'static,
) -> Result<(), CommError> {
    let (calls, device) = (accesses[0].shared.nccl.calls(), &accesses[0].shared.device);
    let answer = match route {
        Route::Here => {
            let _current = device.enter()?;
            call(calls).map_err(CallError::Nccl)
        }
        Route::Apart => {
            let caller = start(device, kept.clone(), move || call(calls));
            match wait_for(&caller, patience, || is_abort_asked(accesses)) {
                Waited::Came(answer) => answer,
                Waited::Stopped => return Err(stopped(accesses, Ending::Inside { stage, caller })),
                Waited::TooLong => {
                    return Err(overdue(accesses, stage, patience.waited(), Ending::Inside { stage, caller }));
                }
            }
        }
    };
    answer.map(|_| ()).map_err(|error| failed(accesses, stage, error))
}

/// Asks until nothing is under way.
pub(super) fn settle(
    accesses: &mut [Access<'_>],
    stage: Stage,
    kept: &Kept,
    patience: &Patience,
) -> Result<(), CommError> {
    let mut next = 0;
    while let Some(access) = accesses.get(next) {
        let call = stage.call();
        // SAFETY: the communicator lives, and the access is this thread's.
        match unsafe { access.shared.nccl.calls().poll(call, access.comm.0) } {
            Ok(Progress::Done) => next += 1,
            Ok(Progress::Underway) if is_abort_asked(accesses) => {
                return Err(stopped(accesses, Ending::Underway { kept: kept.clone() }));
            }
            Ok(Progress::Underway) if patience.pause() => {}
            Ok(Progress::Underway) => {
                return Err(overdue(accesses, stage, patience.waited(), Ending::Underway { kept: kept.clone() }));
            }
            Err(error) => {
                let error = Arc::new(CommError::from(error));
                let ending = if stage.is_birth() { Ending::Unborn } else { Ending::Idle };
                end_all(accesses, ending, Some(&error), GRACE);
                return Err(Arc::unwrap_or_clone(error));
            }
        }
    }
    Ok(())
}

/// Makes a call on another thread, with the device's context current.
pub(super) fn start(
    device: &Arc<CudaDevice>,
    kept: Kept,
    call: impl FnOnce() -> Result<Progress, NcclError> + Send + 'static,
) -> Receiver<Answer> {
    let (sender, receiver) = channel();
    let (device, refused) = (Arc::clone(device), sender.clone());
    let started = threads::run(move || {
        let answer = match device.enter() {
            Ok(_current) => call().map_err(CallError::Nccl),
            Err(error) => Err(CallError::Driver(error)),
        };
        drop(kept);
        // Nobody listens any more when the call came back too late.
        let _heard = sender.send(answer);
    });
    if let Err(error) = started {
        let _heard = refused.send(Err(CallError::Thread(error.kind())));
    }
    receiver
}

/// How a wait for another thread ended.
pub(super) enum Waited {
    Came(Answer),
    Stopped,
    TooLong,
}

/// Waits for the thread's answer.
pub(super) fn wait_for(caller: &Receiver<Answer>, patience: &Patience, stop: impl Fn() -> bool) -> Waited {
    loop {
        match caller.recv_timeout(patience.left().min(LOOK)) {
            Ok(answer) => return Waited::Came(answer),
            Err(RecvTimeoutError::Disconnected) => return Waited::Came(Err(CallError::Thread(ErrorKind::Other))),
            Err(RecvTimeoutError::Timeout) if stop() => return Waited::Stopped,
            Err(RecvTimeoutError::Timeout) if patience.left().is_zero() => return Waited::TooLong,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn is_abort_asked(accesses: &[Access<'_>]) -> bool {
    accesses.iter().any(|access| access.shared.abort_asked.load(Ordering::Acquire))
}

/// A call returned an error: ends the communicators if it is one that they do not survive.
fn failed(accesses: &mut [Access<'_>], stage: Stage, error: CallError) -> CommError {
    let is_fatal = match &error {
        CallError::Driver(_) | CallError::Thread(_) => false,
        // A failed registration leaves tasks behind in NCCL's group that would run with the next call.
        CallError::Nccl(error) => stage == Stage::Register || error.is_fatal() || accesses.iter().any(is_broken),
    };
    let error = Arc::new(CommError::from(error));
    if is_fatal {
        end_all(accesses, if stage.is_birth() { Ending::Unborn } else { Ending::Idle }, Some(&error), GRACE);
    }
    Arc::unwrap_or_clone(error)
}

/// Whether NCCL will refuse everything from now on.
fn is_broken(access: &Access<'_>) -> bool {
    // SAFETY: the communicator lives, and the access is this thread's.
    let outcome = unsafe { access.shared.nccl.calls().poll("ncclCommGetAsyncError", access.comm.0) };
    outcome != Ok(Progress::Done)
}

/// The deadline passed.
pub(super) fn overdue(accesses: &mut [Access<'_>], stage: Stage, waited: Duration, ending: Ending) -> CommError {
    let name = Arc::clone(&accesses[0].shared.name);
    give_up(accesses, ending, |state| CommError::Deadline { name, stage, waited, state })
}

/// Other ranks cannot be counted on any more. The error is told what became of the communicator, and is the cause of its end.
pub(super) fn give_up(
    accesses: &mut [Access<'_>],
    ending: Ending,
    error: impl FnOnce(CommState) -> CommError,
) -> CommError {
    end_all(accesses, ending, None, GRACE);
    let error = error(accesses[0].shared.state());
    let cause = Arc::new(error.clone());
    for access in accesses {
        lock(&access.shared.life).cause = Some(Arc::clone(&cause));
    }
    error
}

/// The program asked for an abort.
fn stopped(accesses: &mut [Access<'_>], ending: Ending) -> CommError {
    end_all(accesses, ending, None, ABORT_LIMIT);
    accesses[0].shared.gone()
}
