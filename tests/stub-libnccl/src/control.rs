//! Controls of the stub for tests.
//!
//! With `STUB_NCCL_STRICT` in the environment, the first violation aborts the process. If the ranks are in several processes, the process
//! that created the unique id detects the violations that concern more than one rank.
//!
//! Ranks are those of the first communicator, even for communicators split from it; -1 selects all ranks. The name `*` selects any call.
//!
//! | control | meaning |
//! |---|---|
//! | `stub_nccl_fail(call, rank, nth, code)` | makes the rank's n-th call from now on return the code without any effect, once; n = 0: every call |
//! | `stub_nccl_hang(call, rank, nth)` | makes the rank's n-th call never reach the other ranks: a blocking call hangs until the communicator is aborted |
//! | `stub_nccl_die(call, rank, nth)` | kills the process in the rank's n-th call |
//! | `stub_nccl_stop(call, rank, nth)` | stops the process in the rank's n-th call, which proceeds when the process resumes |
//! | `stub_nccl_slow(call, rank, nth, ms)` | delays the rank's n-th call by this time; n = 0: every call |
//! | `stub_nccl_heal()` | removes all faults; an init that hangs fails |
//! | `stub_nccl_kill(rank)` | makes the rank disappear without notice: the others get `ncclRemoteError` |
//! | `stub_nccl_calls(call)` | number of calls; null: of all calls |
//! | `stub_nccl_live(what)` | live resources: 0 communicators, 1 windows, 2 registered buffers, 3 rounds whose memory is retained, 4 bytes of symmetric address space, 5 work on streams, 6 pieces of physical memory that ended communicators leaked (before 2.29), 7 sockets to other processes |
//! | `stub_nccl_violations(from, text, capacity)` | number of violations; writes those from `from` on, one per line |
//! | `stub_nccl_forget()` | clears the list of violations |
//! | `stub_nccl_refuse_free(from, size)` | records a violation if the block contains an output that NCCL may still write to |

use crate::ledger::{self, Strike};
use crate::member::{self, Life};
use crate::outputs;
use crate::registry;
use crate::wire;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

fn rank_of(rank: c_int) -> Option<usize> {
    usize::try_from(rank).ok()
}

/// # Safety
/// `name` must be a C string.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_fail(call: *const c_char, rank: c_int, nth: u64, code: c_int) {
    // SAFETY: guaranteed by the caller.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Fail(code));
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_hang(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: guaranteed by the caller.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Hang);
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_die(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: guaranteed by the caller.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Die);
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_stop(call: *const c_char, rank: c_int, nth: u64) {
    // SAFETY: guaranteed by the caller.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Stop);
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_slow(call: *const c_char, rank: c_int, nth: u64, ms: u64) {
    // SAFETY: guaranteed by the caller.
    ledger::plan(unsafe { text(call) }, rank_of(rank), nth, Strike::Slow(Duration::from_millis(ms)));
}

/// See the table in the module documentation.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_heal() {
    ledger::heal();
}

/// See the table in the module documentation.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_kill(rank: c_int) {
    registry::kill(rank_of(rank).expect("a rank"));
}

/// See the table in the module documentation.
///
/// # Safety
/// `call` must be a C string or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_calls(call: *const c_char) -> u64 {
    // SAFETY: guaranteed by the caller.
    let call = (!call.is_null()).then(|| unsafe { text(call) });
    ledger::calls(call.as_deref())
}

/// See the table in the module documentation.
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

/// See the table in the module documentation. Writes nothing if the text does not fit.
///
/// # Safety
/// `text` must be valid for writing `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stub_nccl_violations(from: usize, text: *mut c_char, capacity: usize) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { ledger::violations(from, text, capacity) }
}

/// See the table in the module documentation.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_refuse_free(from: usize, size: usize) {
    outputs::refuse_free(from, size);
}

/// See the table in the module documentation.
#[unsafe(no_mangle)]
pub extern "C" fn stub_nccl_forget() {
    ledger::forget();
}
