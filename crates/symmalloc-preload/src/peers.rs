//! Peer access, which lets devices use the memory of other devices' contexts: `cuCtxEnablePeerAccess`, `cuMemPoolSetAccess`.
//!
//! The driver applies `cuCtxEnablePeerAccess` only to memory that it allocated itself. The allocator maps served memory, so this library
//! grants the access, to all of a device's served memory. If a context has no allocator yet, the access is recorded, and granted when the
//! allocator is created.

use crate::context::Context;
use crate::outcome::code_of_cuda;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// Pairs of a context and a device that may use its memory.
static GRANTED: Mutex<Vec<(usize, c_int)>> = Mutex::new(Vec::new());

/// Grants a device access to a context's present and future memory. Returns the driver's code on failure.
pub(crate) fn grant(context: usize, device: c_int) -> Result<(), c_int> {
    let mut granted = GRANTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !granted.contains(&(context, device)) {
        granted.push((context, device));
    }
    drop(granted);
    // A context that is created after this point finds the entry.
    Context::existing(context).map_or(Ok(()), |context| grant_now(context, device))
}

/// Grants the access that was requested before the context was created.
pub(crate) fn grant_to(context: &'static Context) {
    let granted = GRANTED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for (_, device) in granted.into_iter().filter(|(raw, _)| *raw == context.raw()) {
        if let Err(code) = grant_now(context, device) {
            symmalloc_files::say(format_args!(
                "device {device} has no access to memory of device {}: the driver call failed with code {code}",
                context.device()
            ));
        }
    }
}

pub(crate) fn grant_now(context: &Context, device: c_int) -> Result<(), c_int> {
    let peer = usize::try_from(device).unwrap_or(usize::MAX);
    context.allocator().core().backend().grant_access(peer).map_err(|error| code_of_cuda(&error))
}
