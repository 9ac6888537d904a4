//! Controls of the stub of libcuda.

use crate::library::symbol;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};

pub(crate) fn control<F: Copy>(name: &str) -> F {
    // SAFETY: the callers below use the symbols' types.
    unsafe { symbol(&["libcuda.so", "libcuda.so.1"], name) }
}

/// Returns what was reported through NVTX: the number of ranges (0) or blocks (1), the size of the block at an address (2), or 1 if it has a
/// name (3).
pub fn reported(what: i32, address: u64) -> u64 {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn(c_int, usize) -> u64>("stub_nvtx")(what, address as usize) }
}

/// Makes the n-th call from now on fail once. If `nth` is 0, every call fails.
pub fn fail(call: &str, nth: u64, code: i32) {
    let call = CString::new(call).expect("the text should contain no zero byte");
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char, u64, c_int)>("stub_fail")(call.as_ptr(), nth, code) };
}

/// Like [`fail`], but calls of this thread neither count nor fail.
pub fn fail_elsewhere(call: &str, nth: u64, code: i32) {
    let call = CString::new(call).expect("the text should contain no zero byte");
    type Fail = unsafe extern "C" fn(*const c_char, u64, c_int);
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<Fail>("stub_fail_elsewhere")(call.as_ptr(), nth, code) };
}

/// Makes one call in `one_in` fail, on average, whatever its name. The seed determines which calls.
pub fn fail_by_chance(one_in: u64, seed: u64, code: i32) {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn(u64, u64, c_int)>("stub_fail_by_chance")(one_in, seed, code) };
}

/// Returns the names of the calls that have failed by chance since the last [`fail_by_chance`], oldest first.
pub fn failed_by_chance() -> Vec<String> {
    type Names = unsafe extern "C" fn(*mut u8, usize) -> usize;
    let mut names = vec![0; 1 << 16];
    // SAFETY: the symbol has this type, and the buffer has this length.
    let len = unsafe { control::<Names>("stub_failed_by_chance")(names.as_mut_ptr(), names.len()) };
    let text = std::str::from_utf8(&names[..len]).expect("the names of calls are ASCII");
    text.lines().map(str::to_owned).collect()
}

/// Makes the driver return other addresses than the hint of a reservation, or grant hints again.
pub fn move_hints(moves: bool) {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn(c_int)>("stub_move_hints")(moves.into()) };
}

/// Removes all faults.
pub fn heal() {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn()>("stub_heal")() };
}

/// Pauses the `nth` call of this name from now on, after its effect, until [`resume`].
pub fn pause(call: &str, nth: u64) {
    let call = CString::new(call).expect("the text should contain no zero byte");
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char, u64)>("stub_pause")(call.as_ptr(), nth) };
}

/// Returns `true` while a call is paused.
pub fn is_paused() -> bool {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn() -> c_int>("stub_is_paused")() == 1 }
}

/// Lets the paused call return, and cancels a planned pause.
pub fn resume() {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn()>("stub_resume")() };
}

/// Returns the number of times that a call was made.
pub fn calls(call: &str) -> u64 {
    let call = CString::new(call).expect("the text should contain no zero byte");
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_calls")(call.as_ptr()) }
}

/// Returns the number of times that this thread made a call.
pub fn own_calls(call: &str) -> u64 {
    let call = CString::new(call).expect("the text should contain no zero byte");
    // SAFETY: the symbol has this type, and the pointer is a C string.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_own_calls")(call.as_ptr()) }
}

/// Returns the total number of calls.
pub fn all_calls() -> u64 {
    // SAFETY: the symbol has this type; null selects all calls.
    unsafe { control::<unsafe extern "C" fn(*const c_char) -> u64>("stub_calls")(std::ptr::null()) }
}

/// Returns how often each call was made, by name.
pub fn calls_by_name() -> BTreeMap<String, u64> {
    type Names = unsafe extern "C" fn(*mut u8, usize) -> usize;
    let mut names = vec![0; 1 << 16];
    // SAFETY: the symbol has this type, and the buffer has this length.
    let len = unsafe { control::<Names>("stub_call_names")(names.as_mut_ptr(), names.len()) };
    let text = std::str::from_utf8(&names[..len]).expect("the names of calls are ASCII");
    text.lines().map(|name| (name.to_owned(), calls(name))).collect()
}

/// Work on a stream that lasts until this value is dropped. Work submitted after it has no effect until then.
#[derive(Debug)]
#[must_use = "the stream continues when it is dropped"]
pub struct LongWork(u64);

/// Submits long work to a stream, given by its driver handle.
pub fn hold(stream: u64) -> LongWork {
    // SAFETY: the symbol has this type.
    let work = unsafe { control::<unsafe extern "C" fn(u64) -> u64>("stub_hold")(stream) };
    assert_ne!(work, 0, "the stream is alive");
    LongWork(work)
}

impl Drop for LongWork {
    fn drop(&mut self) {
        // SAFETY: the symbol has this type, and the work has not finished.
        unsafe { control::<unsafe extern "C" fn(u64)>("stub_external_complete")(self.0) };
    }
}

/// Runs the work of a stream, given by its driver handle, until something blocks it. Returns `true` if all of it has taken effect.
///
/// Unlike a wait, this completes no event. With `STUB_LAZY`, work of the stream has no effect before.
pub fn advance(stream: u64) -> bool {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn(u64) -> c_int>("stub_advance")(stream) == 1 }
}

/// An entry of the stub's log of submitted work and of the waits that order it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    /// Work `seq` of a stream. It reads `count` bytes at `from`, unless `from` is 0, and writes `count` bytes at `to`.
    #[allow(missing_docs, reason = "see above")]
    Work { stream: u64, seq: u64, from: u64, to: u64, count: u64 },
    /// Work `seq` of a stream: a wait for work `last` of another stream, and for the work before it.
    #[allow(missing_docs, reason = "see above")]
    StreamWait { stream: u64, seq: u64, other: u64, last: u64 },
    /// The host waited for work `last` of a stream, and for the work before it.
    #[allow(missing_docs, reason = "see above")]
    HostWait { stream: u64, last: u64 },
}

/// Begins an empty log of submitted work and of the waits that order it.
pub fn begin_log() {
    // SAFETY: the symbol has this type.
    unsafe { control::<unsafe extern "C" fn()>("stub_log_begin")() };
}

/// Removes all entries from the log and returns them, oldest first.
pub fn take_log() -> Vec<Logged> {
    /// Kind, stream, number, and three numbers that depend on the kind.
    type Entry = [u64; 6];
    type Take = unsafe extern "C" fn(*mut Entry, usize) -> usize;
    let mut entries = [Entry::default(); 64];
    let mut taken = Vec::new();
    loop {
        // SAFETY: the symbol has this type, and the array has this length.
        let count = unsafe { control::<Take>("stub_log_take")(entries.as_mut_ptr(), entries.len()) };
        taken.extend(entries[..count].iter().map(|entry| match *entry {
            [0, stream, seq, from, to, count] => Logged::Work { stream, seq, from, to, count },
            [1, stream, seq, other, last, _] => Logged::StreamWait { stream, seq, other, last },
            [_, stream, last, ..] => Logged::HostWait { stream, last },
        }));
        if count < entries.len() {
            return taken;
        }
    }
}

/// The driver's live resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are sufficient")]
pub struct Live {
    pub device_bytes: u64,
    pub ranges: u64,
    pub events: u64,
    pub streams: u64,
    /// Depends on how threads interleave: the stub misaligns an allocation if the number of others is odd, and the allocator for pinned
    /// memory replaces a misaligned one by one that is a granule larger.
    pub host_bytes: u64,
    /// Number of allocations of pinned host memory.
    pub host_allocations: u64,
    pub graphs: u64,
    pub mappings: u64,
    /// Imported physical memory of other processes.
    pub imports: u64,
}

/// Returns the driver's live resources.
pub fn live() -> Live {
    let of = |what: c_int| {
        // SAFETY: the symbol has this type.
        unsafe { control::<unsafe extern "C" fn(c_int) -> u64>("stub_live")(what) }
    };
    Live {
        device_bytes: of(0),
        ranges: of(1),
        events: of(2),
        streams: of(3),
        host_bytes: of(4),
        host_allocations: of(7),
        graphs: of(5),
        mappings: of(6),
        // SAFETY: the symbol has this type.
        imports: u64::from(unsafe { control::<unsafe extern "C" fn() -> u32>("stub_imports")() }),
    }
}
