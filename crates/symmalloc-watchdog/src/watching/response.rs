//! The response to a failure: a report, a flight record, the program's callback, the end of the communicator, and, if a kernel cannot be
//! stopped, the end of the process.

use crate::threads;
use crate::watching::clock::POLL_INTERVAL;
use crate::watching::failure::Failure;
use crate::watching::process_record::write_flight_record;
use crate::watching::settings::{MODE_VARIABLE, WatchdogMode};
use crate::watching::watched::{self, Watchable, Watched};
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

/// Responds on separate threads, because each part may block indefinitely. If the system creates no thread, this thread lets the program's
/// calls return and ends the process in time. The other parts follow as soon as a thread is available.
pub(super) fn begin(watched: &Arc<Watched>, failure: &Arc<Failure>) {
    let end_limit = EndLimit::claim(watched);
    let (of_end, cause) = (Arc::clone(watched), Arc::clone(failure));
    let end = move || {
        if let Some(communicator) = of_end.communicator() {
            communicator.end(&cause);
        }
    };
    if threads::run(end.clone()).is_err() {
        // It calls NCCL on a separate thread only, and without one it logs nothing, so it returns in time.
        end();
    }
    // The record has every communicator, also those that the program drops as soon as a call returns the error.
    let (cause, unfinished, recorded) = (Arc::clone(failure), watched.process().delay_exit(), watched::all());
    let reporting = threads::run(move || {
        report(&cause);
        drop((recorded, unfinished));
    });
    if let Err(error) = reporting {
        // A disk or the program's subscriber may block this thread, but a message does not.
        say(format_args!("{failure}; there is no flight record, because no thread can be started: {error}"));
    }
    if let Some(callback) = watched.settings().callback() {
        let cause = Arc::clone(failure);
        let _started = threads::run_when_possible(move || {
            let _panicked = catch_unwind(AssertUnwindSafe(|| callback(&cause)));
        });
    }
    // Last, because it blocks this thread if no other can be created.
    if let Some(end_limit) = end_limit {
        end_limit.enforce();
    }
}

/// Emits an event. The program's subscriber may panic, for example because standard error is closed.
pub(super) fn log(event: impl FnOnce()) {
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
    /// Ends the process if an abort that has begun does not finish within two seconds. If the system creates no thread, the calling thread
    /// waits for that.
    pub fn ensure_end(self: &Arc<Self>) {
        if let Some(end_limit) = EndLimit::claim(self) {
            end_limit.enforce();
        }
    }
}

/// The duty to end the process if a communicator does not end in time. Keeps the communicator until then, because the program may drop it
/// and then wait for its streams.
struct EndLimit {
    watched: Arc<Watched>,
    communicator: Arc<dyn Watchable>,
    begun: Instant,
}

impl EndLimit {
    /// Returns the duty to the first caller, unless the program excludes such an end.
    fn claim(watched: &Arc<Watched>) -> Option<Self> {
        let communicator = watched.communicator()?;
        let is_claimed = watched.settings().mode() == WatchdogMode::Exit && watched.claim_end();
        is_claimed.then(|| EndLimit { watched: Arc::clone(watched), communicator, begun: Instant::now() })
    }

    /// Waits on a separate thread, or on this one if the system creates none.
    fn enforce(self) {
        let ours = Arc::new(self);
        let theirs = Arc::clone(&ours);
        if threads::run(move || theirs.wait()).is_err() {
            ours.wait();
        }
    }

    fn wait(&self) {
        while !self.communicator.is_ended() {
            if self.begun.elapsed() > END_LIMIT {
                end_process(&self.watched);
                return;
            }
            threads::retry_refused();
            std::thread::sleep(POLL_INTERVAL / 4);
        }
    }
}

/// Ends the process, unless all work on the device is known to have completed before the failure. A thread of this crate that hangs in
/// NCCL is harmless, but a spinning kernel occupies the device and blocks `exit`.
fn end_process(watched: &Watched) {
    if watched.flight().is_off_device() {
        return;
    }
    let (sender, written) = channel();
    let message = format!(
        "communicator \"{}\" cannot be ended: an NCCL kernel waits indefinitely, or no thread can be created to abort it. The \
         process exits with {FAILURE_EXIT_CODE}; {MODE_VARIABLE}=abort prevents that",
        watched.identity().name
    );
    let said = message.clone();
    let speaking = threads::run(move || {
        say(format_args!("{said}"));
        // After the time limit, the process has ended.
        let _heard = sender.send(());
    });
    match speaking {
        Ok(()) => drop(written.recv_timeout(MESSAGE_LIMIT)),
        Err(_refused) => say(format_args!("{message}")),
    }
    watched.process().exit_now(FAILURE_EXIT_CODE);
}
