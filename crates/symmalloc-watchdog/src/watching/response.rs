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

/// Maximum time that ending a communicator may take before the process is ended.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Maximum time for which an error waits for the communicator's end. NCCL's abort takes up to a second, and never returns if it cannot stop
/// a kernel.
pub const ERROR_LIMIT: Duration = Duration::from_millis(1500);

/// Maximum time for which the exit of the process waits for its message to be written. Standard error may have no reader.
const MESSAGE_LIMIT: Duration = Duration::from_millis(250);

/// Responds on separate threads, because each part of the response may block indefinitely. If the system cannot create a thread, this
/// thread lets the program's calls return, reports the failure without a flight record, and ends the process in time. The program's
/// callback runs as soon as a thread is available.
pub(super) fn begin(watched: &Arc<Watched>, failure: &Arc<Failure>) {
    let end_limit = EndLimit::claim(watched);
    let (of_end, cause) = (Arc::clone(watched), Arc::clone(failure));
    let end = move || {
        if let Some(communicator) = of_end.communicator() {
            communicator.end(&cause);
        }
    };
    if threads::run(end.clone()).is_err() {
        // This call uses NCCL only on a separate thread, and logs nothing if there is no thread, so it returns in time.
        end();
    }
    // Keep every communicator for the record, including those that the program drops as soon as a call returns the error.
    let (cause, unfinished, recorded) = (Arc::clone(failure), watched.process().delay_exit(), watched::all());
    let reporting = threads::run(move || {
        report(&cause);
        drop((recorded, unfinished));
    });
    if let Err(error) = reporting {
        // Only a message is written, because a disk or the program's subscriber may block this thread.
        say(format_args!("{failure}; there is no flight record, because no thread can be started: {error}"));
    }
    if let Some(callback) = watched.settings().callback() {
        let cause = Arc::clone(failure);
        let _started = threads::run_when_possible(move || {
            let _panicked = catch_unwind(AssertUnwindSafe(|| callback(&cause)));
        });
    }
    // This comes last, because it blocks this thread if no other thread can be created.
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
    // This comes last, because the program's subscriber may block.
    let communicator = &*failure.communicator;
    log(|| tracing::error!(name: "communicator.failed", target: "symmalloc", communicator, %failure));
}

impl Watched {
    /// Ends the process if an abort that has begun does not finish within two seconds. If the system cannot create a thread, the calling
    /// thread waits for the abort.
    pub fn ensure_end(self: &Arc<Self>) {
        if let Some(end_limit) = EndLimit::claim(self) {
            end_limit.enforce();
        }
    }
}

/// The duty to end the process if a communicator does not end in time. It keeps the communicator alive until then, because the program may
/// drop the communicator and then wait for its streams.
struct EndLimit {
    watched: Arc<Watched>,
    communicator: Arc<dyn Watchable>,
    begun: Instant,
}

impl EndLimit {
    /// Returns the duty to the first caller, if the watchdog's mode allows ending the process.
    fn claim(watched: &Arc<Watched>) -> Option<Self> {
        let communicator = watched.communicator()?;
        let is_claimed = watched.settings().mode() == WatchdogMode::Exit && watched.claim_end();
        is_claimed.then(|| EndLimit { watched: Arc::clone(watched), communicator, begun: Instant::now() })
    }

    /// Waits on a separate thread, or on this thread if the system cannot create one.
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
        // If the time limit is over, nobody receives this, because the process is ending.
        let _heard = sender.send(());
    });
    match speaking {
        Ok(()) => drop(written.recv_timeout(MESSAGE_LIMIT)),
        Err(_refused) => say(format_args!("{message}")),
    }
    watched.process().exit_now(FAILURE_EXIT_CODE);
}
