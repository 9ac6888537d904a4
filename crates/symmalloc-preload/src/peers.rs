//! Which devices may use which context's memory: `cuCtxEnablePeerAccess`, `cuMemPoolSetAccess`.
//!
//! The driver's own memory follows `cuCtxEnablePeerAccess` by itself. Ours is mapped, and access is granted for all of it that a
//! device has. A context may have no allocator yet when access is asked for: it gets it when it is made.

use crate::context::Context;
use crate::outcome::code_of_cuda;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// The context whose memory is used, and the device that uses it.
static GRANTED: Mutex<Vec<(usize, c_int)>> = Mutex::new(Vec::new());

/// A device may use a context's memory from now on. The driver's code if it cannot.
pub(crate) fn grant(context: usize, device: c_int) -> Result<(), c_int> {
    let mut granted = GRANTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !granted.contains(&(context, device)) {
        granted.push((context, device));
    }
    drop(granted);
    // A context that is made from here on finds it noted.
    Context::existing(context).map_or(Ok(()), |context| grant_now(context, device))
}

/// A context was made: grants what was asked for before.
pub(crate) fn grant_to(context: &'static Context) {
    let granted = GRANTED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for (_, device) in granted.into_iter().filter(|(raw, _)| *raw == context.raw()) {
        if let Err(code) = grant_now(context, device) {
            crate::settings::say(format_args!(
                "device {device} has no access to what is allocated on device {}: the driver refused ({code})",
                context.device()
            ));
        }
    }
}

pub(crate) fn grant_now(context: &Context, device: c_int) -> Result<(), c_int> {
    let peer = usize::try_from(device).unwrap_or(usize::MAX);
    context.allocator().core().backend().grant_access(peer).map_err(|error| code_of_cuda(&error))
}
