//! Calls that retain, release and reset contexts, and calls that grant devices access to each other's memory.

use crate::context::Context;
use crate::libcuda;
use crate::outcome::SUCCESS;
use crate::{ending, peers, settings, watch};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicI64, Ordering};

/// Number of references that the program holds to each device's primary context. The allocator holds one more.
static RETAINED: [AtomicI64; 64] = [const { AtomicI64::new(0) }; 64];

fn retained(device: c_int) -> Option<&'static AtomicI64> {
    RETAINED.get(usize::try_from(device).ok()?)
}

/// Serves `cuDevicePrimaryCtxRetain`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn retain(
    driver: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    context: *mut usize,
    device: c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(context, device) };
    if code == SUCCESS
        && let Some(retained) = retained(device)
    {
        retained.fetch_add(1, Ordering::Relaxed);
    }
    code
}

/// Releases the program's reference to a primary context. With the last reference, the allocator's memory in the context is freed, as the
/// driver frees its own memory.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn release(driver: unsafe extern "C" fn(c_int) -> c_int, device: c_int) -> c_int {
    if let Some(retained) = retained(device) {
        let before =
            retained.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count > 0).then_some(count - 1));
        if before == Ok(1) {
            end(device);
        }
    }
    // SAFETY: the caller's contract.
    let code = unsafe { driver(device) };
    watch::reset();
    code
}

/// Serves `cuDevicePrimaryCtxReset` and `cuDevicePrimaryCtxReset_v2`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn reset(driver: unsafe extern "C" fn(c_int) -> c_int, device: c_int) -> c_int {
    end(device);
    // SAFETY: the caller's contract.
    let code = unsafe { driver(device) };
    watch::reset();
    code
}

fn end(device: c_int) {
    if let Some(context) = Context::of_device(device) {
        ending::end(context);
    }
}

/// Serves `cuCtxEnablePeerAccess`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn enable_peer(
    driver: unsafe extern "C" fn(usize, c_uint) -> c_int,
    context: usize,
    flags: c_uint,
) -> c_int {
    // SAFETY: the caller's contract.
    let code = unsafe { driver(context, flags) };
    let is_served = settings::settings().is_some_and(|settings| !settings.is_watched);
    let user = libcuda::driver().and_then(|driver| driver.device_of(driver.current()?));
    if let (SUCCESS, true, Some(user)) = (code, is_served, user)
        && let Err(code) = peers::grant(context, user)
    {
        return code;
    }
    code
}
