//! What a test asks the stub, and tells it.
//!
//! With `STUB_NCCL_STRICT` in the environment, the first violation ends the process. Of ranks in several processes, the one
//! that made the unique id sees what concerns more than one rank.
//!
//! Ranks are those of the first communicator, also for communicators split from it; -1 means all. The call `*` is any.
//!
//! | control | meaning |
//! |---|---|
//! | `stub_nccl_fail(call, rank, nth, code)` | the rank's n-th call from now on returns the code and does nothing, once; n = 0: all of them |
//! | `stub_nccl_hang(call, rank, nth)` | the rank's n-th call never gets to the other ranks: a blocking one hangs, until the communicator is aborted |
//! | `stub_nccl_die(call, rank, nth)` | the process is killed in the rank's n-th call |
//! | `stub_nccl_stop(call, rank, nth)` | the process is stopped in the rank's n-th call, and makes it when it goes on |
//! | `stub_nccl_slow(call, rank, nth, ms)` | the rank's n-th call is made so much later; n = 0: all of them |
//! | `stub_nccl_heal()` | no call fails or hangs any more; an init that hangs ends in an error |
//! | `stub_nccl_kill(rank)` | the rank is gone without a word: the others have `ncclRemoteError` |
//! | `stub_nccl_calls(call)` | how often it was called; null: all calls together |
//! | `stub_nccl_live(what)` | what is left: 0 communicators, 1 windows, 2 registered buffers, 3 rounds whose memory is kept, 4 bytes of symmetric address space, 5 work on streams, 6 physical memory that ended communicators leaked (before 2.29), 7 sockets to other processes |
//! | `stub_nccl_violations(from, text, capacity)` | how many there were; those from `from` on, one a line |
//! | `stub_nccl_forget()` | forgets violations |

use crate::ledger::{self, Strike};
use crate::member::{self, Life};
use crate::registry;
use crate::wire;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

fn rank_of(rank: c_int) -> Option<usize> {
    usize::try_from(rank).ok()
}

/// # Safety
/// `name` is a C string.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_fail(call: *const c_char, rank: c_int, nth: u64, code: c_int) {
    // SAFETY: the caller's contract.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Fail(code));
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_hang(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: the caller's contract.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Hang);
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_die(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: the caller's contract.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Die);
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_stop(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: the caller's contract.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Stop);
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_slow(call: *const c_char, rank: c_int, nth: u64, ms: u64) {
    // SAFETY: the caller's contract.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Slow(Duration::from_millis(ms)));
}

/// See the file's table.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_heal() {
    ledger::heal();
}

/// See the file's table.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_kill(rank: c_int) {
    registry::kill(rank_of(rank).expect("a rank"));
}

/// See the file's table.
///
/// # Safety
/// `call` is a C string or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_calls(call: *const c_char) -> u64 {
    // SAFETY: the caller's contract.
    let call = (!call.is_null()).then(|| unsafe { text(call) });
    ledger::calls(call.as_deref())
}

/// See the file's table.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_live(what: c_int) -> u64 {
    if what == 7 {
        return wire::sockets();
    }
    let of = |member: &member::Member| {
        let inner = member.lock();
        let [windows, buffers, rounds, leaked] = inner.windows.counts();
        match what {
            0 => u64::from(matches!(inner.life, Life::Joining | Life::Live | Life::Finalized | Life::Revoked)),
            1 => windows,
            2 => buffers,
            3 => rounds,
            4 => inner.windows.space_used(),
            5 => inner.queue.len() as u64,
            6 => leaked,
            _ => 0,
        }
    };
    member::all().iter().map(|member| of(member)).sum()
}

/// See the file's table. Nothing is written where it does not fit.
///
/// # Safety
/// `text` is valid for writing `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_violations(from: usize, text: *mut c_char, capacity: usize) -> usize {
    // SAFETY: the caller's contract.
    unsafe { ledger::violations(from, text, capacity) }
}

/// See the file's table.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_forget() {
    ledger::forget();
}
