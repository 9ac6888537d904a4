//! Threads for calls that may never return.
//!
//! A thread that has finished its call waits for the next one: creating a thread costs about 50 us, and so does the first CUDA call on it.
//! A thread that hangs in a call is never reused. A new thread replaces it.

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::ffi::calls::{CallProgress, Outcome};
use crate::ffi::error::NcclError;
use std::any::Any;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use symmalloc_cuda::{CudaDevice, DriverError};

type Job = Box<dyn FnOnce() + Send>;

/// Idle threads.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// Jobs for which no thread could be created, see [`run_when_possible`].
static REFUSED: Mutex<VecDeque<Job>> = Mutex::new(VecDeque::new());

/// Maximum number of idle threads. Further threads exit.
const IDLE_MAX: usize = 16;

/// Runs a job on a separate thread.
///
/// # Errors
/// Returns an error if the system cannot create a thread. The job then has not run.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    hand_over(Box::new(job)).map_err(|(_job, error)| error)
}

/// Runs a job on a separate thread. If the system cannot create one now, the job runs as soon as a thread of this crate is idle or can be
/// created. The watchdog's thread tries that repeatedly.
///
/// # Errors
/// Returns an error if the job has to wait.
pub(crate) fn run_when_possible(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    hand_over(Box::new(job)).map_err(|(job, error)| {
        lock(&REFUSED).push_back(job);
        error
    })
}

/// Tries again to run the jobs for which no thread could be created.
pub(crate) fn retry_refused() {
    while let Some(job) = next_refused() {
        if let Err((job, _error)) = hand_over(job) {
            lock(&REFUSED).push_front(job);
            return;
        }
    }
}

fn next_refused() -> Option<Job> {
    lock(&REFUSED).pop_front()
}

/// Runs a job on an idle thread or a new one. If the system cannot create one, returns the job.
fn hand_over(mut job: Job) -> Result<(), (Job, io::Error)> {
    while let Some(thread) = pop() {
        match thread.send(job) {
            Ok(()) => return Ok(()),
            // The thread has exited in the meantime: try the next one.
            Err(SendError(refused)) => job = refused,
        }
    }
    // A thread that cannot be created drops its closure, but not the job.
    let slot = Arc::new(Mutex::new(Some(job)));
    let taken = Arc::clone(&slot);
    let started = std::thread::Builder::new().name("symmalloc-nccl".to_owned()).spawn(move || {
        let job = lock(&taken).take();
        if let Some(job) = job {
            work(job);
        }
    });
    match (started, slot) {
        (Ok(_thread), _) => Ok(()),
        (Err(error), slot) => Err((lock(&slot).take().expect("no thread took the job"), error)),
    }
}

fn work(first: Job) {
    let (sender, jobs) = channel();
    let mut job = first;
    loop {
        job();
        while let Some(refused) = next_refused() {
            refused();
        }
        if !push(sender.clone()) {
            return;
        }
        match jobs.recv() {
            Ok(next) => job = next,
            Err(_) => return,
        }
    }
}

fn pop() -> Option<Sender<Job>> {
    lock(&IDLE).pop()
}

fn push(thread: Sender<Job>) -> bool {
    let mut idle = lock(&IDLE);
    let is_wanted = idle.len() < IDLE_MAX;
    if is_wanted {
        idle.push(thread);
    }
    is_wanted
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Interval at which a thread that waits for another one checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Memory that a call writes to or that NCCL refers to, kept until NCCL no longer uses it.
pub(super) type KeepAlive = Option<Arc<dyn Any + Send + Sync>>;

/// The result of a call.
pub(super) type CallResult = Result<CallProgress, CallError>;

/// An error that a call returned, or that prevented it.
#[derive(Debug)]
pub(super) enum CallError {
    Nccl(NcclError),
    Driver(DriverError),
    /// No thread could be created for the call.
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

/// Makes a call on another thread, with the device's context current.
pub(super) fn start(
    device: &Arc<CudaDevice>,
    kept: KeepAlive,
    call: impl FnOnce() -> Outcome + Send + 'static,
) -> Receiver<CallResult> {
    let (sender, receiver) = channel();
    let (device, refused) = (Arc::clone(device), sender.clone());
    let started = run(move || {
        let answer = match device.enter() {
            Ok(_current) => {
                // NCCL waits for its own streams; before 2.30.7 it does so in the caller's capture mode.
                let _relaxed = device.relax_capture();
                call().map_err(CallError::Nccl)
            }
            Err(error) => Err(CallError::Driver(error)),
        };
        drop(kept);
        // If the call returned too late, the receiver no longer exists.
        let _heard = sender.send(answer);
    });
    if let Err(error) = started {
        let _heard = refused.send(Err(CallError::Thread(error.kind())));
    }
    receiver
}

/// The outcome of a wait for another thread.
pub(super) enum Waited {
    Returned(CallResult),
    Stopped,
    TimedOut,
}

/// Waits for the thread's answer.
pub(super) fn wait_for(caller: &Receiver<CallResult>, backoff: &Backoff, stop: impl Fn() -> bool) -> Waited {
    loop {
        match caller.recv_timeout(backoff.left().min(POLL_INTERVAL)) {
            Ok(answer) => return Waited::Returned(answer),
            Err(RecvTimeoutError::Disconnected) => return Waited::Returned(Err(CallError::Thread(ErrorKind::Other))),
            Err(RecvTimeoutError::Timeout) if stop() => return Waited::Stopped,
            Err(RecvTimeoutError::Timeout) if backoff.left().is_zero() => return Waited::TimedOut,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_does_not_delay_other_calls() {
        let (release, hung): (Sender<()>, Receiver<()>) = channel();
        let (done, finished) = channel();
        let also_done = done.clone();
        run(move || {
            hung.recv().expect("released");
            also_done.send(0).expect("the receiver is waiting");
        })
        .expect("a thread");
        for number in 1..40 {
            let done = done.clone();
            run(move || done.send(number).expect("the receiver is waiting")).expect("a thread");
            assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(number));
        }
        release.send(()).expect("the thread is waiting");
        assert_eq!(finished.recv_timeout(Duration::from_secs(10)), Ok(0));
    }
}
