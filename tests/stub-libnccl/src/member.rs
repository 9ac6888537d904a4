//! One rank's communicator: the target of an `ncclComm_t`.
//!
//! Each host step that needs the other ranks has a ticket. A blocking communicator waits for it on the calling thread; a nonblocking one
//! reports `ncclInProgress` until the step completes. Nothing here has a timeout.

use crate::codes::{IN_PROGRESS, INTERNAL_ERROR, INVALID_ARGUMENT, REMOTE_ERROR, SUCCESS};
use crate::grow;
use crate::ledger::violate;
use crate::messages::{Round, ToJob, ToRank};
use crate::outputs;
use crate::registry;
use crate::streams::{self, Launch, Queued};
use crate::window::{PendingWindow, Windows};
use crate::wire::Connection;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The state of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Not all ranks have joined.
    Joining,
    /// All calls are allowed.
    Live,
    /// `ncclCommFinalize` was called: the communicator ends once all work has taken effect.
    Finalized,
    /// `ncclCommRevoke` was called: no work is pending, and the communicator can only be split, shrunk and ended.
    Revoked,
    /// `ncclCommDestroy` was called.
    Destroyed,
    /// `ncclCommAbort` was called.
    Aborted,
    /// The communicator could not be created; contains the result code.
    Refused(c_int),
}

/// A host step that waits for the other ranks.
#[derive(Debug)]
pub enum Step {
    /// Registers a window.
    Window(PendingWindow),
    /// Splits the communicator. Contains the new communicator, and where its handle is written.
    Split {
        /// `None` if this rank is in no part.
        child: Option<Arc<Member>>,
        /// The address of the caller's output.
        out: usize,
    },
    /// Grows the communicator.
    Grow {
        /// The new communicator.
        child: Arc<Member>,
    },
    /// Compares arguments, or connects.
    Meet,
}

impl Step {
    /// Returns the address of the output that the step writes when it completes.
    fn output(&self) -> Option<usize> {
        match self {
            Step::Window(window) => Some(window.out),
            Step::Split { out, .. } => Some(*out),
            Step::Grow { .. } | Step::Meet => None,
        }
    }
}

/// The mutable state of a communicator.
#[derive(Debug)]
pub struct Inner {
    /// See [`Life`].
    pub life: Life,
    /// The number of the job.
    pub job: u64,
    /// The socket to the job's process; `None` if the job is in this process.
    via: Option<Arc<Connection>>,
    /// The rank in the job.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// The error that `ncclCommGetAsyncError` reports from now on.
    pub error: c_int,
    /// Pending host steps by ticket.
    pub steps: BTreeMap<u64, Step>,
    /// Codes of the completed host steps by ticket. A blocking caller removes the entry of its step.
    finished: BTreeMap<u64, c_int>,
    /// Collectives of a nonblocking communicator that its thread has not submitted to a stream yet.
    pub launches: VecDeque<Launch>,
    /// `true` after one query of the thread's progress.
    polled: bool,
    /// Work on streams, in order.
    pub queue: VecDeque<Queued>,
    /// Windows and registered buffers.
    pub windows: Windows,
    /// `true` once connections are established.
    pub is_connected: bool,
}

/// One rank's communicator; see the module documentation.
#[derive(Debug)]
pub struct Member {
    /// `ncclComm_t`.
    pub handle: u64,
    /// Rank in the first communicator.
    pub world: usize,
    /// Device of the rank.
    pub device: c_int,
    /// `true` if calls block.
    pub is_blocking: bool,
    busy: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// Number of ended communicators whose tombstones remain. Calls on a communicator that ended before these are calls on an unknown one.
const TOMBSTONES_MAX: usize = 64;

static MEMBERS: Mutex<BTreeMap<u64, Arc<Member>>> = Mutex::new(BTreeMap::new());
/// Handles of the tombstones, oldest first.
static TOMBSTONES: Mutex<VecDeque<u64>> = Mutex::new(VecDeque::new());
static NEXT: AtomicU64 = AtomicU64::new(1);

fn members() -> MutexGuard<'static, BTreeMap<u64, Arc<Member>>> {
    MEMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that was never used before, for handles and tickets.
pub fn fresh() -> u64 {
    0x5000_0000_0000 + NEXT.fetch_add(1, Ordering::Relaxed) * 0x100
}

/// Returns a communicator by its handle, even if it has ended.
pub fn find(handle: u64) -> Option<Arc<Member>> {
    members().get(&handle).cloned()
}

/// Returns all communicators.
pub fn all() -> Vec<Arc<Member>> {
    members().values().cloned().collect()
}

/// Delivers a message of a job, from another process or this one, to a communicator.
pub fn deliver(handle: u64, message: &ToRank, via: Option<&Arc<Connection>>) {
    if let Some(member) = find(handle) {
        member.receive(message, via);
    }
}

/// Fails the communicators whose jobs were in the process behind a lost socket.
pub fn lose(connection: &Arc<Connection>) {
    let is_lost = |via: &Option<Arc<Connection>>| via.as_ref().is_some_and(|via| Arc::ptr_eq(via, connection));
    for member in all().into_iter().filter(|member| is_lost(&member.lock().via)) {
        let (tickets, rounds): (Vec<u64>, Vec<u64>) = {
            let inner = member.lock();
            (inner.steps.keys().copied().collect(), inner.windows.kept_rounds())
        };
        for ticket in tickets {
            member.receive(&ToRank::Finished { ticket, round: u64::MAX, code: REMOTE_ERROR }, None);
        }
        member.receive(&ToRank::Failed { code: REMOTE_ERROR }, None);
        rounds.into_iter().for_each(|round| member.receive(&ToRank::Free { round }, None));
    }
}

impl Inner {
    /// Cancels a host step after the communicator has ended.
    fn cancel(&mut self, step: &Step) {
        if let Step::Window(window) = step {
            self.windows.cancel(window);
        }
    }
}

impl Member {
    /// Creates a communicator that joins a job.
    pub fn create(world: usize, device: c_int, is_blocking: bool) -> Arc<Member> {
        let inner = Inner {
            life: Life::Joining,
            job: 0,
            via: None,
            rank: 0,
            ranks: 0,
            error: SUCCESS,
            steps: BTreeMap::new(),
            finished: BTreeMap::new(),
            launches: VecDeque::new(),
            polled: false,
            queue: VecDeque::new(),
            windows: Windows::default(),
            is_connected: false,
        };
        let member = Arc::new(Member {
            handle: fresh(),
            world,
            device,
            is_blocking,
            busy: AtomicBool::new(false),
            inner: Mutex::new(inner),
            changed: Condvar::new(),
        });
        members().insert(member.handle, Arc::clone(&member));
        member
    }

    /// Locks the mutable state.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a thread is in a call on the communicator. Returns `false` if another thread is.
    pub fn occupy(&self) -> bool {
        !self.busy.swap(true, Ordering::AcqRel)
    }

    /// Records that the thread has left the call.
    pub fn vacate(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Sends a message to the job.
    pub fn send(&self, message: ToJob) {
        let (job, rank, via) = {
            let inner = self.lock();
            (inner.job, inner.rank, inner.via.clone())
        };
        match via {
            Some(connection) => connection.send_to_job(job, rank, message),
            None => registry::send_to_job(job, rank, message),
        }
    }

    /// Begins a host step. Returns its ticket.
    pub fn begin(&self, step: Step, round: Option<Round>) -> u64 {
        let ticket = fresh();
        let mut inner = self.lock();
        let is_accepted = match inner.life {
            Life::Aborted | Life::Destroyed => false,
            Life::Revoked => matches!(step, Step::Split { .. }),
            _ => true,
        };
        if !is_accepted {
            // Another thread ended the communicator after this call began, so the step would never complete.
            inner.cancel(&step);
            return ticket;
        }
        step.output().into_iter().for_each(outputs::add);
        inner.steps.insert(ticket, step);
        drop(inner);
        if let Some(round) = round {
            self.send(ToJob::Round { ticket, round });
        }
        ticket
    }

    /// Waits for a host step. Returns its code.
    pub fn wait(&self, ticket: u64) -> c_int {
        let mut inner = self.lock();
        loop {
            if let Some(code) = inner.finished.remove(&ticket) {
                return code;
            }
            // A revoke cancels the steps that were pending.
            let is_cancelled = inner.life == Life::Revoked && !inner.steps.contains_key(&ticket);
            if is_cancelled || matches!(inner.life, Life::Aborted | Life::Destroyed) {
                return INTERNAL_ERROR;
            }
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the communicator has joined its job or failed to.
    pub fn wait_until_joined(&self) -> c_int {
        let mut inner = self.lock();
        while inner.life == Life::Joining {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        match inner.life {
            Life::Refused(code) => code,
            Life::Aborted => INTERNAL_ERROR,
            _ => SUCCESS,
        }
    }

    /// Returns the asynchronous error, like `ncclCommGetAsyncError`.
    pub fn poll(self: &Arc<Self>) -> c_int {
        let launches = {
            let mut inner = self.lock();
            match inner.life {
                Life::Joining => return IN_PROGRESS,
                Life::Refused(code) => return code,
                _ if inner.error != SUCCESS => return inner.error,
                _ if !inner.steps.is_empty() => return IN_PROGRESS,
                Life::Finalized if !inner.queue.is_empty() => return IN_PROGRESS,
                _ if inner.launches.is_empty() => return SUCCESS,
                _ => {}
            }
            // Reports every launch as in progress once: the thread is as late as possible.
            inner.polled = !inner.polled;
            if inner.polled {
                return IN_PROGRESS;
            }
            take(&mut inner.launches)
        };
        for launch in launches {
            let code = streams::launch(self, launch);
            if code != SUCCESS {
                self.lock().error = code;
                return code;
            }
        }
        SUCCESS
    }

    /// Returns `true` if the previous call has completed, which NCCL requires before the next one.
    pub fn is_ready(&self) -> bool {
        let inner = self.lock();
        let is_flushed = inner.life != Life::Finalized || inner.queue.is_empty();
        inner.life != Life::Joining && inner.steps.is_empty() && inner.launches.is_empty() && is_flushed
    }

    /// Waits until all work has taken effect, or the communicator is aborted.
    pub fn drain(&self) {
        let mut inner = self.lock();
        while !inner.queue.is_empty() && !matches!(inner.life, Life::Aborted | Life::Revoked) {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the communicator. Only its tombstone remains, and any memory that an old NCCL leaks.
    pub fn end(self: &Arc<Self>, life: Life) {
        let Some(queue) = self.stop(life) else { return };
        self.lock().windows.forget();
        self.send(ToJob::Leave);
        queue.iter().for_each(streams::cancel);
        self.bury();
    }

    /// Adds this communicator to the tombstones. Removes the oldest one, unless memory of its windows is still in use or leaked.
    fn bury(&self) {
        let mut tombstones = TOMBSTONES.lock().unwrap_or_else(PoisonError::into_inner);
        tombstones.push_back(self.handle);
        if tombstones.len() > TOMBSTONES_MAX {
            let oldest = tombstones.pop_front().expect("the list is not empty");
            if find(oldest).is_some_and(|member| member.lock().windows.counts() == [0; 4]) {
                members().remove(&oldest);
            }
        }
    }

    /// Revokes the communicator, like `ncclCommRevoke`: pending work ends without effect, even if a thread is inside a call.
    pub fn revoke(self: &Arc<Self>) -> c_int {
        if self.lock().life != Life::Live {
            return INVALID_ARGUMENT;
        }
        let Some(queue) = self.stop(Life::Revoked) else { return INVALID_ARGUMENT };
        self.lock().error = SUCCESS;
        self.send(ToJob::Withdraw);
        queue.iter().for_each(streams::cancel);
        SUCCESS
    }

    /// Cancels all pending steps and launches. Returns the queued work.
    fn stop(&self, life: Life) -> Option<VecDeque<Queued>> {
        let mut inner = self.lock();
        if matches!(inner.life, Life::Destroyed | Life::Aborted) {
            return None;
        }
        inner.life = life;
        for step in take(&mut inner.steps).into_values() {
            step.output().into_iter().for_each(outputs::remove);
            inner.cancel(&step);
        }
        inner.launches.clear();
        let queue = take(&mut inner.queue);
        drop(inner);
        self.changed.notify_all();
        Some(queue)
    }

    fn receive(self: &Arc<Self>, message: &ToRank, via: Option<&Arc<Connection>>) {
        match *message {
            ToRank::Joined { job, rank, ranks } => {
                let mut inner = self.lock();
                (inner.job, inner.rank, inner.ranks, inner.via) = (job, rank, ranks, via.cloned());
                if inner.life == Life::Joining {
                    inner.life = Life::Live;
                } else {
                    drop(inner);
                    self.send(ToJob::Leave);
                }
            }
            ToRank::Refused { code } => {
                let mut inner = self.lock();
                if inner.life == Life::Joining {
                    inner.life = Life::Refused(code);
                }
            }
            ToRank::Done { instance } => streams::done(self, instance),
            ToRank::Finished { ticket, round, code } => self.finish(ticket, round, code),
            ToRank::Grown { ticket, ref id, ranks } => self.grow(ticket, id, ranks),
            ToRank::Free { round } => self.lock().windows.free(round),
            ToRank::Failed { code } => {
                let mut inner = self.lock();
                if inner.error == SUCCESS {
                    inner.error = code;
                }
            }
        }
        self.changed.notify_all();
    }

    /// Completes the meeting of a communicator that grows: the new one joins its job.
    fn grow(&self, ticket: u64, id: &[u8], ranks: usize) {
        let (child, rank) = {
            let inner = self.lock();
            let Some(Step::Grow { child }) = inner.steps.get(&ticket) else { return };
            (Arc::clone(child), inner.rank)
        };
        registry::begin(grow::join(&child, id.to_vec(), rank, ranks));
        self.finish(ticket, u64::MAX, SUCCESS);
    }

    fn finish(&self, ticket: u64, round: u64, code: c_int) {
        let mut inner = self.lock();
        let Some(step) = inner.steps.remove(&ticket) else { return };
        step.output().into_iter().for_each(outputs::remove);
        match step {
            Step::Window(window) => inner.windows.install(window, round, code),
            Step::Split { child, out } if code == SUCCESS => {
                let handle = child.map_or(0, |child| child.handle);
                // SAFETY: the caller of `ncclCommSplit` keeps the output valid until the call completes.
                unsafe { (out as *mut u64).write(handle) };
            }
            Step::Split { child, .. } => {
                if let Some(child) = child {
                    child.lock().life = Life::Refused(code);
                }
            }
            Step::Grow { child } if code != SUCCESS => {
                child.lock().life = Life::Refused(code);
                child.changed.notify_all();
            }
            Step::Grow { .. } | Step::Meet => {}
        }
        if self.is_blocking {
            inner.finished.insert(ticket, code);
        } else if code != SUCCESS {
            inner.error = code;
        }
    }
}

/// Returns the communicator of a handle, or an error code if the call is not permitted.
pub fn check(call: &str, handle: u64) -> Result<Arc<Member>, c_int> {
    let Some(member) = find(handle) else {
        if handle != 0 {
            violate(format!("{call} on {handle:#x}, which is not a communicator"));
        }
        return Err(INVALID_ARGUMENT);
    };
    let life = member.lock().life;
    match life {
        Life::Destroyed | Life::Aborted => {
            violate(format!("{call} on a communicator of rank {} that is {life:?}", member.world));
            Err(INVALID_ARGUMENT)
        }
        _ => Ok(member),
    }
}
