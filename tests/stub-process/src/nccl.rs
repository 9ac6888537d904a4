//! The controls of the stub of libnccl, see its `control.rs`.

use crate::library::symbol;
use std::ffi::{CString, c_char, c_int};

fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below name the symbols' types.
    unsafe { symbol(&["libnccl.so.2", "libnccl.so"], name) }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("no zero byte")
}

fn number(rank: Option<usize>) -> c_int {
    rank.map_or(-1, |rank| rank as c_int)
}

/// The rank's n-th call from now on returns `code` and does nothing, once; with 0, every call does. `None`: any rank.
pub fn fail(call: &str, rank: Option<usize>, nth: u64, code: i32) {
    type Fail = unsafe extern "C" fn(*const c_char, c_int, u64, c_int);
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<Fail>("stub_nccl_fail")(c_string(call).as_ptr(), number(rank), nth, code) };
}

/// The rank's n-th call from now on never gets to the other ranks, once; with 0, no call does.
pub fn hang(call: &str, rank: Option<usize>, nth: u64) {
    type Hang = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<Hang>("stub_nccl_hang")(c_string(call).as_ptr(), number(rank), nth) };
}

/// This process is killed in the rank's n-th call from now on. The call `*` is any.
pub fn die(call: &str, rank: Option<usize>, nth: u64) {
    type Die = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<Die>("stub_nccl_die")(c_string(call).as_ptr(), number(rank), nth) };
}

/// This process is stopped in the rank's n-th call from now on.
pub fn stop(call: &str, rank: Option<usize>, nth: u64) {
    type Stop = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<Stop>("stub_nccl_stop")(c_string(call).as_ptr(), number(rank), nth) };
}

/// The rank's n-th call from now on is made so many milliseconds later; with 0, every call is.
pub fn slow(call: &str, rank: Option<usize>, nth: u64, ms: u64) {
    type Slow = unsafe extern "C" fn(*const c_char, c_int, u64, u64);
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<Slow>("stub_nccl_slow")(c_string(call).as_ptr(), number(rank), nth, ms) };
}

/// No call fails or hangs any more.
pub fn heal() {
    // SAFETY: the symbol's type.
    unsafe { control::<unsafe extern "C" fn()>("stub_nccl_heal")() };
}

/// A rank is gone without a word.
pub fn kill(rank: usize) {
    // SAFETY: the symbol's type.
    unsafe { control::<unsafe extern "C" fn(c_int)>("stub_nccl_kill")(number(Some(rank))) };
}

/// How often a call was made, by all ranks of this process.
pub fn calls(call: &str) -> u64 {
    // SAFETY: the symbol's type, and a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_nccl_calls")(c_string(call).as_ptr()) }
}

/// How often any call was made.
pub fn all_calls() -> u64 {
    // SAFETY: the symbol's type; null asks for all.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_nccl_calls")(std::ptr::null()) }
}

/// What NCCL still has, over all ranks of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Live {
    pub communicators: u64,
    pub windows: u64,
    pub buffers: u64,
    /// Registrations whose memory is kept, because some rank did not deregister.
    pub kept_rounds: u64,
    /// Symmetric address space in use.
    pub space_bytes: u64,
    /// Collectives that did not take effect.
    pub pending: u64,
    /// Physical memory that communicators took along when they ended with windows (before 2.29).
    pub leaked: u64,
    /// Sockets to other processes.
    pub sockets: u64,
}

/// What NCCL still has.
pub fn live() -> Live {
    let of = |what: c_int| {
        // SAFETY: the symbol's type.
        unsafe { control::<unsafe extern "C" fn(c_int) -> u64>("stub_nccl_live")(what) }
    };
    Live {
        communicators: of(0),
        windows: of(1),
        buffers: of(2),
        kept_rounds: of(3),
        space_bytes: of(4),
        pending: of(5),
        leaked: of(6),
        sockets: of(7),
    }
}

/// What nobody should have done, so far.
pub fn violations() -> Vec<String> {
    type Violations = unsafe extern "C" fn(usize, *mut c_char, usize) -> usize;
    let control = control::<Violations>("stub_nccl_violations");
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the symbol's type, and a buffer of that size.
    let count = unsafe { control(0, text.as_mut_ptr().cast(), text.len()) };
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(0);
    let lines: Vec<String> = String::from_utf8_lossy(&text[..end]).lines().map(str::to_owned).collect();
    assert!(count == 0 || !lines.is_empty(), "{count} violations are more than fit");
    lines
}

/// Forgets violations.
pub fn forget() {
    // SAFETY: the symbol's type.
    unsafe { control::<unsafe extern "C" fn()>("stub_nccl_forget")() };
}

/// Nobody did what nobody should do.
///
/// # Panics
/// With the violations, if there were any.
#[track_caller]
pub fn assert_clean() {
    let violations = violations();
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}
