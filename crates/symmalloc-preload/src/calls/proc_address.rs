//! `cuGetProcAddress`, through which the CUDA runtime looks up nearly all calls. The driver answers first. If its answer is a served call,
//! the program gets our function instead.

use crate::libcuda;
use crate::served_call::{self, ServedCall};
use std::ffi::{CStr, c_char, c_int, c_void};

/// `cuGetProcAddress` before CUDA 12.
pub(super) type FirstCall = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
/// `cuGetProcAddress_v2`.
pub(super) type SecondCall = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// Serves `cuGetProcAddress`.
///
/// # Safety
/// See the driver's call.
pub(super) unsafe fn first(
    all: &[&'static ServedCall],
    driver: FirstCall,
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        let code = driver(symbol, function, version, flags);
        put_ours(all, code, symbol, function, version, flags);
        code
    }
}

/// Serves `cuGetProcAddress_v2`.
///
/// # Safety
/// See the driver's call.
#[allow(clippy::too_many_arguments, reason = "the driver's signature, and the served calls")]
pub(super) unsafe fn second(
    all: &[&'static ServedCall],
    driver: SecondCall,
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        let code = driver(symbol, function, version, flags, status);
        put_ours(all, code, symbol, function, version, flags);
        code
    }
}

/// Replaces the driver's answer with our function if the call is served.
///
/// # Safety
/// The driver must have answered a call with these arguments.
unsafe fn put_ours(
    all: &[&'static ServedCall],
    code: c_int,
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) {
    if code != 0 || symbol.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the driver accepted both pointers.
    let (name, found) = unsafe { (CStr::from_ptr(symbol), function.read()) };
    let (Ok(name), false, Some(library)) = (name.to_str(), found.is_null(), libcuda::if_loaded()) else { return };
    if let Some(call) = served_call::by_request(all, library, name, version, flags, found) {
        // SAFETY: the driver wrote to the pointer.
        unsafe { function.write(call.served()) };
    }
}
