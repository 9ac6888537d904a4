//! Deregistration of windows and buffers with NCCL.

use crate::communicator::call::{Route, perform};
use crate::communicator::error::CommError;
use crate::communicator::error::{CommState, Stage};
use crate::communicator::shared::{Access, Handles, lock};
use crate::ffi::calls::{Calls, Outcome};
use crate::ffi::handles::{CommHandle, RegistrationHandle, WindowHandle};
use std::slice::from_mut;
use std::sync::Arc;

/// Deregisters everything that remains, in order. Returns the first error, but tries the rest as long as the communicator is ready.
pub(super) fn deregister_all(access: &mut Access<'_>) -> Result<(), CommError> {
    let mut outcome = Ok(());
    let (windows, buffers) = (lock(&access.inner.windows).clone(), lock(&access.inner.buffers).clone());
    for window in windows {
        outcome = outcome.and(deregister_window(access, window));
    }
    for buffer in buffers {
        outcome = outcome.and(deregister_buffer(access, buffer));
    }
    outcome
}

pub(super) fn deregister_window(access: &mut Access<'_>, window: WindowHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.windows), access, window, Calls::deregister_window)
}

pub(super) fn deregister_buffer(access: &mut Access<'_>, buffer: RegistrationHandle) -> Result<(), CommError> {
    deregister(Arc::clone(&access.inner.buffers), access, buffer, Calls::deregister_buffer)
}

fn deregister<Handle: Copy + PartialEq + Send + 'static>(
    known: Handles<Handle>,
    access: &mut Access<'_>,
    handle: Handle,
    call: fn(&Calls, CommHandle, Handle) -> Outcome,
) -> Result<(), CommError> {
    if access.shared.state() != CommState::Ready {
        return Err(access.shared.gone());
    }
    let comm = access.comm;
    perform(from_mut(access), Stage::Deregister, Route::Apart, &None, move |calls| {
        // The communicator may end in the meantime, so remove the handle only after NCCL has accepted the call.
        call(calls, comm, handle).inspect(|_| lock(&known).retain(|known| *known != handle))
    })
}
