//! Call counts, faults and violations.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The treatment of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The call proceeds.
    Go,
    /// The call returns this code without any effect.
    Fail(c_int),
    /// The call never reaches the other ranks.
    Hang,
}

/// A fault that a test plans for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// The call returns this code without any effect.
    Fail(c_int),
    /// The call never reaches the other ranks.
    Hang,
    /// The process is killed in the call.
    Die,
    /// The process is stopped in the call, which proceeds when the process resumes.
    Stop,
    /// The call is delayed by this time.
    Slow(Duration),
}

/// Name that selects any call.
const ANY: &str = "*";

#[derive(Clone, Debug)]
struct Fault {
    call: String,
    /// `None` selects all ranks.
    rank: Option<usize>,
    /// Number of calls until the fault occurs; 0: every call.
    left: u64,
    strike: Strike,
}

/// Call counts, faults and violations of this process.
#[derive(Debug, Default)]
pub struct Ledger {
    calls: BTreeMap<&'static str, u64>,
    faults: Vec<Fault>,
    violations: Vec<String>,
    /// Number of times that all faults were removed.
    healed: u64,
}

static LEDGER: Mutex<Option<Ledger>> = Mutex::new(None);
static HEALED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<Ledger>> {
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(act: impl FnOnce(&mut Ledger) -> T) -> T {
    act(lock().get_or_insert_default())
}

/// Counts a call and returns its treatment. Faults that kill, stop or delay the process take effect here.
pub fn enter(call: &'static str, rank: Option<usize>) -> Verdict {
    match strike(call, rank) {
        None => {}
        Some(Strike::Fail(code)) => return Verdict::Fail(code),
        Some(Strike::Hang) => return Verdict::Hang,
        Some(Strike::Die) => signal_self(libc::SIGKILL),
        Some(Strike::Stop) => signal_self(libc::SIGSTOP),
        Some(Strike::Slow(time)) => std::thread::sleep(time),
    }
    Verdict::Go
}

fn signal_self(signal: c_int) {
    // SAFETY: sends a signal to this process.
    unsafe { libc::kill(libc::getpid(), signal) };
}

fn strike(call: &'static str, rank: Option<usize>) -> Option<Strike> {
    with(|ledger| {
        *ledger.calls.entry(call).or_default() += 1;
        let struck = ledger.faults.iter_mut().position(|fault| {
            if fault.call != call && fault.call != ANY || fault.rank.is_some() && fault.rank != rank {
                return false;
            }
            let strikes = fault.left <= 1;
            fault.left -= u64::from(fault.left > 1);
            strikes
        });
        let index = struck?;
        let strike = ledger.faults[index].strike;
        if ledger.faults[index].left == 1 {
            ledger.faults.remove(index);
        }
        Some(strike)
    })
}

/// Adds a fault; see `stub_nccl_fail` and similar controls.
pub fn plan(call: String, rank: Option<usize>, nth: u64, strike: Strike) {
    with(|ledger| ledger.faults.push(Fault { call, rank, left: nth, strike }));
}

/// Removes all faults; see `stub_nccl_heal`.
pub fn heal() {
    with(|ledger| {
        ledger.faults.clear();
        ledger.healed += 1;
    });
    HEALED.notify_all();
}

/// Waits until the faults are removed.
pub fn wait_for_heal() {
    let mut ledger = lock();
    let before = ledger.get_or_insert_default().healed;
    while ledger.get_or_insert_default().healed == before {
        ledger = HEALED.wait(ledger).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Returns the number of calls; `None` selects all calls.
pub fn calls(call: Option<&str>) -> u64 {
    with(|ledger| match call {
        Some(call) => ledger.calls.get(call).copied().unwrap_or(0),
        None => ledger.calls.values().sum(),
    })
}

/// Records a violation.
pub fn violate(text: String) {
    if std::env::var_os("STUB_NCCL_STRICT").is_some() {
        eprintln!("stub-libnccl: {text}");
        std::process::abort();
    }
    with(|ledger| ledger.violations.push(text));
}

/// Returns the number of violations, and writes those from `from` on as lines. See `stub_nccl_violations`.
///
/// # Safety
/// `text` must be valid for writing `capacity` bytes.
pub unsafe fn violations(from: usize, text: *mut c_char, capacity: usize) -> usize {
    let (count, lines) =
        with(|ledger| (ledger.violations.len(), ledger.violations.iter().skip(from).cloned().collect::<Vec<_>>()));
    let bytes = CString::new(lines.join("\n")).unwrap_or_default().into_bytes_with_nul();
    if bytes.len() <= capacity {
        // SAFETY: guaranteed by the caller.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, bytes.len()) };
    }
    count
}

/// Clears the list of violations.
pub fn forget() {
    with(|ledger| ledger.violations.clear());
}
