//! The response to a failure: a report, a flight record, the program's callback, the end of the communicator, and, if a kernel cannot be
//! stopped, the end of the process.

use crate::threads;
use crate::watching::clock::POLL_INTERVAL;
use crate::watching::failure::Failure;
use crate::watching::process_record::write_flight_record;
use crate::watching::settings::{MODE_VARIABLE, WatchdogMode};
use crate::watching::watched::{self, Watched};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use symmalloc_files::say;

/// Exit code with which the watchdog ends a process that cannot continue: an NCCL kernel waits for a missing rank and cannot be stopped.
pub const FAILURE_EXIT_CODE: i32 = 86;

/// Longest time for ending a communicator before the process is ended.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Longest time for which an error waits for the communicator's end. NCCL's abort takes up to a second, and never
/// returns under a kernel that it cannot stop.
pub const ERROR_LIMIT: Duration = Duration::from_millis(1500);

/// Longest time for which the end of the process waits for its message: standard error may have no reader.
const MESSAGE_LIMIT: Duration = Duration::from_millis(250);

/// Responds on separate threads, because each part may block indefinitely.
pub(super) fn begin(watched: &Arc<Watched>, failure: &Arc<Failure>) {
    watched.ensure_end();
    let (of_end, cause) = (Arc::clone(watched), Arc::clone(failure));
    spawn(move || {
        if let Some(communicator) = of_end.communicator() {
            communicator.end(&cause);
        }
    });
    // The record has every communicator, also those that the program drops as soon as a call returns the error.
    let (cause, unfinished, recorded) = (Arc::clone(failure), watched.process().delay_exit(), watched::all());
    spawn(move || {
        report(&cause);
        drop((recorded, unfinished));
    });
    if let Some(callback) = watched.settings().callback() {
        let cause = Arc::clone(failure);
        spawn(move || {
            let _panicked = catch_unwind(AssertUnwindSafe(|| callback(&cause)));
        });
    }
}

fn spawn(job: impl FnOnce() + Send + 'static) {
    if let Err(error) = threads::run(job) {
        log(|| tracing::warn!(name: "watchdog.failed", target: "symmalloc", %error));
    }
}

/// Emits an event. The program's subscriber may panic, for example because standard error is closed.
fn log(event: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(event));
}

fn report(failure: &Failure) {
    let written = match write_flight_record(&failure.to_string()) {
        Ok(path) => format!("the flight record is {}", path.display()),
        Err(error) => format!("there is no flight record: {error}"),
    };
    say(format_args!("{failure}; {written}"));
    // Last, because the program's subscriber may block.
    let communicator = &*failure.communicator;
    log(|| tracing::error!(name: "communicator.failed", target: "symmalloc", communicator, %failure));
}

impl Watched {
    /// Ends the process if an abort that has begun does not finish within two seconds. Keeps the communicator until then, because the
    /// program may drop it and then wait for its streams.
    pub fn ensure_end(self: &Arc<Self>) {
        let Some(communicator) = self.communicator() else { return };
        if self.settings().mode() != WatchdogMode::Exit || !self.claim_end() {
            return;
        }
        let watched = Arc::clone(self);
        spawn(move || {
            let begun = Instant::now();
            while !communicator.is_ended() {
                if begun.elapsed() > END_LIMIT {
                    end_process(&watched);
                    return;
                }
                std::thread::sleep(POLL_INTERVAL / 4);
            }
        });
    }
}

/// Ends the process, unless all work on the device is known to have completed before the failure. A thread of this crate that hangs in
/// NCCL is harmless, but a spinning kernel occupies the device and blocks `exit`.
fn end_process(watched: &Watched) {
    if watched.flight().is_off_device() {
        return;
    }
    let (sender, written) = channel();
    let communicator = Arc::clone(&watched.identity().name);
    spawn(move || {
        say(format_args!(
            "communicator \"{communicator}\" cannot be ended: an NCCL kernel waits indefinitely. The process exits with \
             {FAILURE_EXIT_CODE}; {MODE_VARIABLE}=abort prevents that"
        ));
        // After the time limit, the process has ended.
        let _heard = sender.send(());
    });
    let _in_time = written.recv_timeout(MESSAGE_LIMIT);
    watched.process().exit_now(FAILURE_EXIT_CODE);
}
