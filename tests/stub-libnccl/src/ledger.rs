//! What was called, what is to fail, and what nobody should have done.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is made.
    Go,
    /// It returns this and does nothing.
    Fail(c_int),
    /// It never gets to the other ranks.
    Hang,
}

/// What a test plans for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// It returns this and does nothing.
    Fail(c_int),
    /// It never gets to the other ranks.
    Hang,
    /// The process is killed in it.
    Die,
    /// The process is stopped in it, and makes it when it goes on.
    Stop,
    /// It is made so much later.
    Slow(Duration),
}

/// In place of a call's name: any call.
const ANY: &str = "*";

#[derive(Clone, Debug)]
struct Fault {
    call: String,
    /// `None`: all.
    rank: Option<usize>,
    /// Calls until it strikes; 0: always.
    left: u64,
    strike: Strike,
}

/// See the file's comment.
#[derive(Debug, Default)]
pub struct Ledger {
    calls: BTreeMap<&'static str, u64>,
    faults: Vec<Fault>,
    violations: Vec<String>,
    /// How often all faults were taken back.
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

/// Counts a call, and says what happens to it. What happens to the process happens here.
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
    // SAFETY: a signal to this process.
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

/// See `stub_nccl_fail` and its like.
pub fn plan(call: String, rank: Option<usize>, nth: u64, strike: Strike) {
    with(|ledger| ledger.faults.push(Fault { call, rank, left: nth, strike }));
}

/// See `stub_nccl_heal`.
pub fn heal() {
    with(|ledger| {
        ledger.faults.clear();
        ledger.healed += 1;
    });
    HEALED.notify_all();
}

/// Waits until the faults are taken back.
pub fn wait_for_heal() {
    let mut ledger = lock();
    let before = ledger.get_or_insert_default().healed;
    while ledger.get_or_insert_default().healed == before {
        ledger = HEALED.wait(ledger).unwrap_or_else(PoisonError::into_inner);
    }
}

/// How often a call was made; `None`: all calls.
pub fn calls(call: Option<&str>) -> u64 {
    with(|ledger| match call {
        Some(call) => ledger.calls.get(call).copied().unwrap_or(0),
        None => ledger.calls.values().sum(),
    })
}

/// Records what nobody should have done.
pub fn violate(text: String) {
    if std::env::var_os("STUB_NCCL_STRICT").is_some() {
        eprintln!("stub-libnccl: {text}");
        std::process::abort();
    }
    with(|ledger| ledger.violations.push(text));
}

/// How many violations there were; those from `from` on are written as lines. See `stub_nccl_violations`.
///
/// # Safety
/// `text` is valid for writing `capacity` bytes.
pub unsafe fn violations(from: usize, text: *mut c_char, capacity: usize) -> usize {
    let (count, lines) =
        with(|ledger| (ledger.violations.len(), ledger.violations.iter().skip(from).cloned().collect::<Vec<_>>()));
    let bytes = CString::new(lines.join("\n")).unwrap_or_default().into_bytes_with_nul();
    if bytes.len() <= capacity {
        // SAFETY: the caller's contract.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, bytes.len()) };
    }
    count
}

/// Forgets violations.
pub fn forget() {
    with(|ledger| ledger.violations.clear());
}
