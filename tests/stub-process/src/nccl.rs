//! Controls of the stub of libnccl; see its `control.rs`.

use crate::library::symbol;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{CString, c_char, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};

fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below use the symbols' types.
    unsafe { symbol(&["libnccl.so.2", "libnccl.so"], name) }
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("the text should contain no zero byte")
}

fn number(rank: Option<usize>) -> c_int {
    rank.map_or(-1, |rank| rank as c_int)
}

/// Makes a call of the rank return `code` without any effect: the `nth` one from now on, or every one if `nth` is 0. `None` selects any
/// rank.
pub fn fail(call: &str, rank: Option<usize>, nth: u64, code: i32) {
    type Fail = unsafe extern "C" fn(*const c_char, c_int, u64, c_int);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Fail>("stub_nccl_fail")(c_string(call).as_ptr(), number(rank), nth, code) };
}

/// Prevents a call of the rank from reaching the other ranks: the `nth` one from now on, or every one if `nth` is 0.
pub fn hang(call: &str, rank: Option<usize>, nth: u64) {
    type Hang = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Hang>("stub_nccl_hang")(c_string(call).as_ptr(), number(rank), nth) };
}

/// Kills this process in the `nth` call of the rank from now on. The name `*` selects any call.
pub fn die(call: &str, rank: Option<usize>, nth: u64) {
    type Die = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Die>("stub_nccl_die")(c_string(call).as_ptr(), number(rank), nth) };
}

/// Stops this process in the `nth` call of the rank from now on. The name `*` selects any call.
pub fn stop(call: &str, rank: Option<usize>, nth: u64) {
    type Stop = unsafe extern "C" fn(*const c_char, c_int, u64);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Stop>("stub_nccl_stop")(c_string(call).as_ptr(), number(rank), nth) };
}

/// Delays a call of the rank by `ms` milliseconds: the `nth` one from now on, or every one if `nth` is 0.
pub fn slow(call: &str, rank: Option<usize>, nth: u64, ms: u64) {
    type Slow = unsafe extern "C" fn(*const c_char, c_int, u64, u64);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Slow>("stub_nccl_slow")(c_string(call).as_ptr(), number(rank), nth, ms) };
}

/// Removes all faults.
pub fn heal() {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn()>("stub_nccl_heal")() };
}

/// Makes a rank disappear without notice.
pub fn kill(rank: usize) {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn(c_int)>("stub_nccl_kill")(number(Some(rank))) };
}

/// Returns the number of times that the ranks of this process made a call.
pub fn calls(call: &str) -> u64 {
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_nccl_calls")(c_string(call).as_ptr()) }
}

/// Returns the total number of calls.
pub fn all_calls() -> u64 {
    // SAFETY: the symbol has this type; null selects all calls.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_nccl_calls")(std::ptr::null()) }
}

/// NCCL's live resources, over all ranks of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are sufficient")]
pub struct Live {
    pub communicators: u64,
    pub windows: u64,
    pub buffers: u64,
    /// Registrations whose memory is still in use because a rank has not deregistered.
    pub kept_rounds: u64,
    /// Symmetric address space in use, in bytes.
    pub space_bytes: u64,
    /// Collectives that have not taken effect.
    pub pending: u64,
    /// Pieces of physical memory that communicators leaked when they ended with windows (before 2.29).
    pub leaked: u64,
    /// Sockets to other processes.
    pub sockets: u64,
}

/// Returns NCCL's live resources.
pub fn live() -> Live {
    let of = |what: c_int| {
        // SAFETY: the symbol has this type.
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

/// Returns the violations detected so far.
pub fn violations() -> Vec<String> {
    type Violations = unsafe extern "C" fn(usize, *mut c_char, usize) -> usize;
    let control = control::<Violations>("stub_nccl_violations");
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the symbol has this type, and the buffer has this size.
    let count = unsafe { control(0, text.as_mut_ptr().cast(), text.len()) };
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(0);
    let lines: Vec<String> = String::from_utf8_lossy(&text[..end]).lines().map(str::to_owned).collect();
    assert!(count == 0 || !lines.is_empty(), "{count} violations exceed the buffer");
    lines
}

/// Clears the list of violations.
pub fn forget() {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn()>("stub_nccl_forget")() };
}

/// Asserts that there were no violations.
///
/// # Panics
/// Panics with the list of violations, if there are any.
#[track_caller]
pub fn assert_clean() {
    let violations = violations();
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

/// A global allocator that reports to the stub each block that it frees: NCCL may still write to it.
#[derive(Debug)]
pub struct WatchedFrees;

type RefuseFree = extern "C" fn(usize, usize);

/// The stub's function as an address; 0 until [`watch_frees`].
static REFUSE_FREE: AtomicUsize = AtomicUsize::new(0);

/// Begins to report blocks that are freed, if [`WatchedFrees`] is the global allocator.
pub(crate) fn watch_frees() {
    let refuse_free: RefuseFree = control("stub_nccl_refuse_free");
    REFUSE_FREE.store(refuse_free as usize, Ordering::Release);
}

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for WatchedFrees {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let refuse_free = REFUSE_FREE.load(Ordering::Acquire);
        if refuse_free != 0 {
            // SAFETY: `watch_frees` stored a function of this type.
            let refuse_free = unsafe { std::mem::transmute::<usize, RefuseFree>(refuse_free) };
            refuse_free(pointer as usize, layout.size());
        }
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}
