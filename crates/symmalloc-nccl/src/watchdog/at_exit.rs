//! The end of the process while threads of this crate still work.
//!
//! A program that receives an error usually exits immediately. This would truncate a report of the failure that is still being written. In
//! addition, NCCL and the driver crash if their own exit handlers run while a thread is inside an abort, and the driver's handler waits for
//! kernels that never end. Therefore, `exit` first waits for reports and aborts in progress. If an abort takes too long, the process writes
//! the C library's buffered output and ends with the same status, but without running the other handlers.

use crate::ffi::driver;
use std::sync::mpsc::channel;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;
use symmalloc_files::is_forked;
use symmalloc_watchdog::Process;

/// Maximum time for which `exit` waits for reports. It is limited because a disk may be slow or gone.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// Maximum time for which `exit` waits for communicators that are being ended. It is short because the call that returned the error to the
/// program has already waited for them.
const ENDING_LIMIT: Duration = Duration::from_millis(250);

/// Numbers of pieces of unfinished work.
#[derive(Default)]
struct Counts {
    reports: usize,
    endings: usize,
}

static COUNTS: Mutex<Counts> = Mutex::new(Counts { reports: 0, endings: 0 });
static FINISHED: Condvar = Condvar::new();

fn counts() -> MutexGuard<'static, Counts> {
    COUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A piece of work in progress: `exit` waits until this value is dropped.
pub(crate) struct Unfinished(fn(&mut Counts) -> &mut usize);

impl Unfinished {
    /// A report that is being written.
    fn report() -> Self {
        Unfinished::begin(|counts| &mut counts.reports)
    }

    /// A communicator that is being ended.
    pub(crate) fn ending() -> Self {
        Unfinished::begin(|counts| &mut counts.endings)
    }

    fn begin(of: fn(&mut Counts) -> &mut usize) -> Self {
        // Registered later than the handlers of NCCL and the driver, so it runs before them.
        static AT_EXIT: Once = Once::new();
        AT_EXIT.call_once(|| driver::at_exit(finish));
        *of(&mut counts()) += 1;
        Unfinished(of)
    }
}

/// The watchdog's means to end this process, and to delay the process's exit.
pub(super) struct ThisProcess;

impl Process for ThisProcess {
    fn delay_exit(&self) -> Box<dyn Send> {
        Box::new(Unfinished::report())
    }

    fn exit_now(&self, code: i32) -> ! {
        driver::exit_now(code)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        *self.0(&mut counts()) -= 1;
        FINISHED.notify_all();
    }
}

/// Waits for the work of other threads. If a communicator does not end in time, ends the process with this status. Does nothing in a forked
/// child, which does not have these threads.
fn finish(status: i32) {
    if is_forked() {
        return;
    }
    wait(REPORT_LIMIT, |counts| counts.reports > 0);
    if wait(ENDING_LIMIT, |counts| counts.endings > 0) {
        flush_output();
        driver::exit_now(status);
    }
}

/// Writes the C library's buffered output, for at most [`REPORT_LIMIT`]: the output's reader may be gone, and another thread may hold a
/// stream's lock.
fn flush_output() {
    let (sender, flushed) = channel();
    let started = std::thread::Builder::new().spawn(move || {
        driver::flush_output();
        // After the time limit, the process has ended.
        let _heard = sender.send(());
    });
    if started.is_ok() {
        let _in_time = flushed.recv_timeout(REPORT_LIMIT);
    }
}

/// Waits until the condition no longer holds. Returns `true` if the condition still holds at the limit.
fn wait(limit: Duration, condition: impl Fn(&Counts) -> bool) -> bool {
    let waited = FINISHED.wait_timeout_while(counts(), limit, |counts| condition(counts));
    waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
}
