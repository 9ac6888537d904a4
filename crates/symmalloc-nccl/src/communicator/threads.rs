//! NCCL calls on other threads, and waits for them.

use crate::backoff::Backoff;
use crate::communicator::error::CommError;
use crate::ffi::calls::{CallProgress, Outcome};
use crate::ffi::error::NcclError;
use std::any::Any;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use symmalloc_cuda::{CudaDevice, DriverError};
use symmalloc_watchdog::threads::run;

/// Interval at which a thread that waits for another one checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Memory that a call writes to or that NCCL refers to, kept until NCCL no longer uses it.
pub(super) type KeepAlive = Option<Arc<dyn Any + Send + Sync>>;

/// The result of a call.
pub(super) type CallResult = Result<CallProgress, CallError>;

/// An error that a call returned, or that prevented the call.
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
