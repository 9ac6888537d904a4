//! The watchdog of this process, which ensures that no rank waits indefinitely.
//!
//! ```text
//!  communicator ── FlightRecorder: submitted work, and the device's progress, which its owner records
//!                              │
//!  watchdog thread ── Flight ──┴──── lifelines: live ranks, and their progress
//!        │ a rank is gone, or there is no progress until the deadline: the judgment finds the cause
//!        ▼
//!  response: the report, the flight record, the program's callback, and the communicator's end (Watchable)
//! ```
//!
//! There is one watchdog thread per process, for all communicators. It never affects a placement, and never calls the driver or NCCL,
//! because both may hang.

mod announced;
mod clock;
mod connecting;
mod failure;
mod handle;
mod judgment;
mod local_error;
mod process_record;
mod recorder;
mod response;
mod settings;
mod thread;
mod watched;
mod work;

pub use announced::Announced;
pub use clock::{POLL_INTERVAL, Tick};
pub use connecting::Connecting;
pub use failure::{Failure, FailureCause};
pub use local_error::LocalError;
pub use process_record::{flight_record, write_flight_record};
pub use recorder::{EntryNumber, Flight, FlightRecorder, Marked, StreamRef, UnfinishedWork, Unmarked};
pub use response::{ERROR_LIMIT, FAILURE_EXIT_CODE};
pub use settings::{Callback, WatchSettings, WatchdogMode};
pub use thread::{ATTRIBUTION_LIMIT, is_running, start};
pub use watched::{Identity, MeetingId, Process, Watchable, Watched};
pub use work::{Call, NamedRank, Work};
