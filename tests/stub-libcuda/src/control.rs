//! Controls of the stub for tests.

use crate::model::{Code, State, THREAD, with};
use std::ffi::{CStr, c_char, c_int};

/// Makes the `nth` call of `name` from now on fail with `code`. If `nth` is 0, every call fails.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with(|state| state.fail(name, nth, Code(code), None));
}

/// Like [`stub_fail`], but calls of this thread neither count nor fail.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_fail_elsewhere(name: *const c_char, nth: u64, code: c_int) {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let this = std::thread::current().id();
    with(|state| state.fail(name, nth, Code(code), Some(this)));
}

/// Makes one call in `one_in` fail with `code`, on average, whatever its name. The seed determines which calls.
#[unsafe(no_mangle)]
pub extern "C" fn stub_fail_by_chance(one_in: u64, seed: u64, code: c_int) {
    with(|state| state.fail_by_chance(one_in, seed, Code(code)));
}

/// Writes the names of the calls that have failed by chance since the last [`stub_fail_by_chance`], each followed by a line feed, and
/// returns their length in bytes. Writes nothing if the capacity is too small.
///
/// # Safety
/// `to` must be valid for writing `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_failed_by_chance(to: *mut u8, capacity: usize) -> usize {
    let names: String = with(|state| state.failed_by_chance().iter().map(|name| format!("{name}\n")).collect());
    if names.len() <= capacity {
        // SAFETY: guaranteed by the caller.
        unsafe { to.copy_from_nonoverlapping(names.as_ptr(), names.len()) };
    }
    names.len()
}

/// Reserves every address range elsewhere than at its hint if `moves` is not 0, as a driver may.
#[unsafe(no_mangle)]
pub extern "C" fn stub_move_hints(moves: c_int) {
    with(|state| state.memory.moves_hints = moves != 0);
}

/// Removes all faults.
#[unsafe(no_mangle)]
pub extern "C" fn stub_heal() {
    with(State::heal);
}

/// Returns the number of calls of `name`; null selects all calls.
///
/// # Safety
/// `name` must be a C string or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_calls(name: *const c_char) -> u64 {
    if name.is_null() {
        return with(|state| state.calls.values().sum());
    }
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    with(|state| state.calls.get(name.as_ref()).copied().unwrap_or(0))
}

/// Writes the names of all calls that were made, each followed by a line feed, and returns their length in bytes. Writes nothing if the
/// capacity is too small.
///
/// # Safety
/// `to` must be valid for writing `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_call_names(to: *mut u8, capacity: usize) -> usize {
    let names: String = with(|state| state.calls.keys().map(|name| format!("{name}\n")).collect());
    if names.len() <= capacity {
        // SAFETY: guaranteed by the caller.
        unsafe { to.copy_from_nonoverlapping(names.as_ptr(), names.len()) };
    }
    names.len()
}

/// Returns the number of calls of `name` by this thread.
///
/// # Safety
/// `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_own_calls(name: *const c_char) -> u64 {
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    THREAD.with_borrow(|thread| thread.calls.get(name.as_ref()).copied().unwrap_or(0))
}

/// Submits work to a stream that blocks the work after it until the returned handle is passed to `stub_external_complete`. Returns 0 if the
/// stream does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn stub_hold(stream: u64) -> u64 {
    with(|state| state.hold(stream).unwrap_or(0))
}

/// Runs the work of a stream until something blocks it. Returns 1 if all of it has taken effect.
#[unsafe(no_mangle)]
pub extern "C" fn stub_advance(stream: u64) -> c_int {
    let run = |state: &mut State| state.stream(stream).map(|stream| stream.submitted).map(|seq| state.run(stream, seq));
    c_int::from(with(run).unwrap_or(false))
}

/// Returns the current value of [`crate::model::Live`] number `what`.
#[unsafe(no_mangle)]
pub extern "C" fn stub_live(what: c_int) -> u64 {
    with(|state| state.live(what))
}
