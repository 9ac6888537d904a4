//! What a test asks the stub, and tells it.

use crate::model::{Code, State, THREAD, with};
use std::ffi::{CStr, c_char, c_int};

/// The `nth` call of `name` from now on fails with `code`; with 0, every call does.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with(|state| state.fail(name, nth, Code(code), None));
}

/// As [`stub_fail`], but calls of this thread neither count nor fail.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail_elsewhere(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let this = std::thread::current().id();
    with(|state| state.fail(name, nth, Code(code), Some(this)));
}

/// No call fails any more.
#[unsafe(no_mangle)]
pub extern "C" fn stub_heal() {
    with(State::heal);
}

/// How often `name` was called; null: all calls together.
///
/// # Safety
/// `name` is a C string or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_calls(name: *const c_char) -> u64 {
    if name.is_null() {
        return with(|state| state.calls.values().sum());
    }
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    with(|state| state.calls.get(name.as_ref()).copied().unwrap_or(0))
}

/// How often this thread called `name`.
///
/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_own_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's contract.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    THREAD.with_borrow(|thread| thread.calls.get(name.as_ref()).copied().unwrap_or(0))
}

/// Puts work on a stream that holds up what comes behind it until `stub_external_complete` gets what is returned. 0: there is
/// no such stream.
#[unsafe(no_mangle)]
pub extern "C" fn stub_hold(stream: u64) -> u64 {
    with(|state| state.hold(stream).unwrap_or(0))
}

/// How much is left of [`crate::model::Live`] number `what`.
#[unsafe(no_mangle)]
pub extern "C" fn stub_live(what: c_int) -> u64 {
    with(|state| state.live(what))
}
