//! Threads for calls that may never return.
//!
//! A thread that has finished its call waits for the next one: creating a thread costs about 50 us, and so does the first CUDA call on it.
//! A thread that hangs in a call is never reused. A new thread replaces it.

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::ffi::calls::{CallProgress, Outcome};
use crate::ffi::error::NcclError;
use std::any::Any;
use std::io::{self, ErrorKind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use symmalloc_cuda::{CudaDevice, DriverError};

type Job = Box<dyn FnOnce() + Send>;

/// Idle threads.
static IDLE: Mutex<Vec<Sender<Job>>> = Mutex::new(Vec::new());

/// Maximum number of idle threads. Further threads exit.
const IDLE_MAX: usize = 16;

/// Runs a job on a separate thread.
///
/// # Errors
/// Returns an error if the system cannot create a thread. The job then has not run.
pub(crate) fn run(job: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut job: Job = Box::new(job);
    while let Some(thread) = pop() {
        match thread.send(job) {
            Ok(()) => return Ok(()),
            // The thread has exited in the meantime: try the next one.
            Err(SendError(refused)) => job = refused,
        }
    }
    std::thread::Builder::new().name("symmalloc-nccl".to_owned()).spawn(move || work(job)).map(drop)
}

fn work(first: Job) {
    let (sender, jobs) = channel();
    let mut job = first;
    loop {
        job();
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
    IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

fn push(thread: Sender<Job>) -> bool {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let is_wanted = idle.len() < IDLE_MAX;
    if is_wanted {
        idle.push(thread);
    }
    is_wanted
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
