//! NCCL calls: the thread that makes them, and their deadline.
//!
//! ```text
//!                 the call returns when            so it is made          an overdue wait is ended by
//!  Blocking       its work on the host is done     on a separate thread   ncclCommRevoke, if supported: the call
//!                                                  if it may wait         returns. Otherwise the communicator is lost
//!  Nonblocking    an NCCL thread works on it       here                   ncclCommAbort, which joins NCCL's thread
//! ```
//!
//! A thread that waits makes the calls that end the wait itself: an abort or a revoke by another thread only sets a flag.
//!
//! In both modes NCCL is then polled (`ncclCommGetAsyncError`) until nothing is in progress. In blocking mode one poll suffices, but it is
//! required: window registration may return success although it failed, and errors of NCCL's own threads are visible only there.

use crate::backoff::Backoff;
use crate::communicator::ending::{ABORT_LIMIT, Ending, GRACE, end_all, revoke_all};
use crate::communicator::error::{CommError, CommState, Stage};
use crate::communicator::shared::{Access, Mode, lock};
use crate::communicator::threads::{CallError, KeepAlive, Waited, start, wait_for};
use crate::ffi::calls::{CallProgress, Calls, Outcome};
use crate::watchdog::Observed;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use symmalloc_watchdog::{ATTRIBUTION_LIMIT, Connecting, ERROR_LIMIT, EntryNumber, Tick, Work};

/// The thread that makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallThread {
    /// The current thread: the call does not wait for other ranks.
    Current,
    /// A separate thread, which may stay in the call indefinitely.
    Separate,
}

impl CallThread {
    /// Returns `route` if NCCL's calls block; otherwise [`Current`](CallThread::Current).
    pub(super) fn when_blocking(mode: Mode, route: CallThread) -> Self {
        match mode {
            Mode::Blocking => route,
            Mode::Nonblocking => CallThread::Current,
        }
    }
}

/// Makes a call for these communicators and waits until its work on the host is done.
///
/// The communicators are ended after an error that NCCL cannot recover from, and after the deadline.
pub(super) fn perform(
    accesses: &mut [Access<'_>],
    stage: Stage,
    route: CallThread,
    kept: &KeepAlive,
    call: impl FnOnce(&'static Calls) -> Outcome + Send + 'static,
) -> Result<(), CommError> {
    let shared = accesses[0].shared;
    let backoff = Backoff::new(if stage.is_watched() { shared.wait_limit() } else { shared.deadline });
    make_call(accesses, stage, route, kept, &backoff, call)?;
    poll_until_done(accesses, stage, kept, &backoff)
}

/// Makes a call on this thread or a separate one, and waits until it returns.
fn make_call(
    accesses: &mut [Access<'_>],
    stage: Stage,
    route: CallThread,
    kept: &KeepAlive,
    backoff: &Backoff,
    call: impl FnOnce(&'static Calls) -> Outcome + Send + 'static,
) -> Result<(), CommError> {
    let (calls, device) = (accesses[0].shared.nccl.calls(), &accesses[0].shared.device);
    let answer = match route {
        CallThread::Current => {
            let _current = device.enter()?;
            call(calls).map_err(CallError::Nccl)
        }
        CallThread::Separate => {
            let caller = start(device, kept.clone(), move || call(calls));
            match wait_for(&caller, backoff, || is_stop_requested(accesses)) {
                Waited::Returned(answer) => answer,
                Waited::Stopped => return Err(end_stopped(accesses, Ending::Inside { stage, caller })),
                Waited::TimedOut => {
                    return Err(end_overdue(accesses, stage, backoff.waited(), Ending::Inside { stage, caller }));
                }
            }
        }
    };
    answer.map(|_| ()).map_err(|error| handle_error(accesses, stage, error))
}

/// Polls NCCL until nothing is in progress.
pub(super) fn poll_until_done(
    accesses: &mut [Access<'_>],
    stage: Stage,
    kept: &KeepAlive,
    backoff: &Backoff,
) -> Result<(), CommError> {
    let mut next = 0;
    while let Some(access) = accesses.get(next) {
        let call = stage.call();
        match access.shared.nccl.calls().poll(call, access.comm) {
            Ok(CallProgress::Done) => next += 1,
            Ok(CallProgress::Underway) if is_stop_requested(accesses) => {
                return Err(end_stopped(accesses, Ending::Underway { kept: kept.clone() }));
            }
            Ok(CallProgress::Underway) if backoff.pause() => {}
            Ok(CallProgress::Underway) => {
                return Err(end_overdue(accesses, stage, backoff.waited(), Ending::Underway { kept: kept.clone() }));
            }
            Err(error) => {
                let error = Arc::new(attribute_error(accesses, error.into()));
                let ending = if stage.is_creation() { Ending::Pending } else { Ending::Idle };
                end_all(accesses, ending, Some(&error), limit(&error));
                return Err(Arc::unwrap_or_clone(error));
            }
        }
    }
    Ok(())
}

fn is_abort_requested(accesses: &[Access<'_>]) -> bool {
    accesses.iter().any(|access| access.shared.is_abort_requested())
}

/// Returns `true` if an abort or a revoke is requested.
pub(super) fn is_stop_requested(accesses: &[Access<'_>]) -> bool {
    let is_revoke_requested = |access: &Access<'_>| access.shared.revoke_requested.load(Ordering::Acquire);
    is_abort_requested(accesses) || accesses.iter().any(is_revoke_requested)
}

/// Handles an error that a call returned. Ends the communicators if the error makes them unusable.
pub(super) fn handle_error(accesses: &mut [Access<'_>], stage: Stage, error: CallError) -> CommError {
    let is_fatal = match &error {
        CallError::Driver(_) | CallError::Thread(_) => false,
        // A failed registration leaves tasks in NCCL's group that would run with the next call. A rank that fails to suspend, resume or grow
        // leaves the others waiting in NCCL.
        CallError::Nccl(error) => {
            matches!(stage, Stage::Register | Stage::Suspend | Stage::Resume | Stage::Grow)
                || error.is_fatal()
                || accesses.iter().any(is_broken)
        }
    };
    let error = if is_fatal { attribute_error(accesses, error.into()) } else { error.into() };
    let error = Arc::new(error);
    if is_fatal {
        let ending = if stage.is_creation() { Ending::Pending } else { Ending::Idle };
        end_all(accesses, ending, Some(&error), limit(&error));
    }
    Arc::unwrap_or_clone(error)
}

/// Returns the longest time for which the return of an error waits for the abort that it causes.
fn limit(error: &CommError) -> Duration {
    if matches!(error, CommError::Failed(_)) { ERROR_LIMIT } else { GRACE }
}

/// Replaces an error that NCCL reports with the watchdog's error, which names the missing rank. NCCL may detect the failure first.
fn attribute_error(accesses: &[Access<'_>], error: CommError) -> CommError {
    let is_observed = |access: &Access<'_>| access.shared.watched.get().is_some() || access.shared.connecting.is_some();
    let limit = if accesses.iter().any(is_observed) { ATTRIBUTION_LIMIT } else { Duration::ZERO };
    attribute(error, limit, || accesses.iter().find_map(|access| access.shared.failure()))
}

/// Returns the error of a creation that the failure of another rank ended, if any.
pub(super) fn creation_failure(connecting: &Connecting) -> Option<CommError> {
    Some(CommError::Failed(Arc::clone(connecting.failure()?)))
}

/// Replaces an error that NCCL reports because of another rank, or a deadline, with `failure`, if there is one within `limit`.
pub(super) fn attribute(error: CommError, limit: Duration, failure: impl Fn() -> Option<CommError>) -> CommError {
    let is_attributable = match &error {
        CommError::Nccl(error) => error.is_of_another_rank(),
        error => matches!(error, CommError::Deadline { .. }),
    };
    let backoff = Backoff::new(if is_attributable { limit } else { Duration::ZERO });
    loop {
        if let Some(failed) = failure() {
            return failed;
        }
        if !backoff.pause() {
            return error;
        }
    }
}

/// Returns `true` if NCCL will reject all further calls.
fn is_broken(access: &Access<'_>) -> bool {
    access.shared.nccl.calls().poll("ncclCommGetAsyncError", access.comm) != Ok(CallProgress::Done)
}

/// Ends the communicators after the deadline.
pub(super) fn end_overdue(accesses: &mut [Access<'_>], stage: Stage, waited: Duration, ending: Ending) -> CommError {
    let name = Arc::clone(&accesses[0].shared.name);
    end_unresponsive(accesses, ending, |state| CommError::Deadline { name: Arc::clone(&name), stage, waited, state })
}

/// Ends the communicators because other ranks are unresponsive. The error contains the resulting state and is recorded as the cause.
pub(super) fn end_unresponsive(
    accesses: &mut [Access<'_>],
    ending: Ending,
    error: impl Fn(CommState) -> CommError,
) -> CommError {
    end_all(accesses, ending, Some(&Arc::new(error(CommState::Lost))), GRACE);
    let error = error(accesses[0].shared.state());
    let cause = Arc::new(error.clone());
    for access in accesses {
        lock(&access.shared.life).cause = Some(Arc::clone(&cause));
    }
    error
}

/// Ends or revokes the communicators at the request of the program or the watchdog.
pub(super) fn end_stopped(accesses: &mut [Access<'_>], ending: Ending) -> CommError {
    let can_revoke =
        |access: &Access<'_>| access.shared.can_revoke().is_ok() && access.shared.state() == CommState::Ready;
    let is_growing = matches!(ending, Ending::Inside { stage: Stage::Grow, .. });
    if !is_abort_requested(accesses) && !is_growing && accesses.iter().all(can_revoke) {
        return revoke_all(accesses, ending).err().unwrap_or_else(|| accesses[0].shared.gone());
    }
    let failed = accesses.iter().find_map(|access| access.shared.failure());
    let limit = failed.as_ref().map_or(ABORT_LIMIT, limit);
    end_all(accesses, ending, failed.clone().map(Arc::new).as_ref(), limit);
    failed.unwrap_or_else(|| accesses[0].shared.gone())
}

/// A host operation that all ranks perform together, recorded from `begin` until dropped.
pub(super) struct HostEntry<'a> {
    watched: &'a Observed,
    number: EntryNumber,
}

impl<'a> HostEntry<'a> {
    pub(super) fn begin(watched: &'a Observed, stage: Stage, elements: Option<u64>) -> Self {
        let work = match stage {
            Stage::Destroy => Work::Destruction,
            _ => Work::Named { kind: stage.call().into(), elements },
        };
        HostEntry { watched, number: watched.flight().begin(work, None, Tick::now()) }
    }
}

impl Drop for HostEntry<'_> {
    fn drop(&mut self) {
        self.watched.flight().complete_on_host(self.number, Tick::now());
    }
}
