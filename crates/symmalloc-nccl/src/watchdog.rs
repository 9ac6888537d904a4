//! The watchdog, which ensures that no rank waits indefinitely.
//!
//! ```text
//!  communicator ── FlightRecorder: submitted work, and the device's progress
//!                    ▲                         ▲
//!    marker thread ──┘ polls the driver, NCCL  │ never calls either: both may hang
//!  watchdog thread ────────────────────────────┴──── lifelines: live ranks, and their progress
//!        │ a rank is gone, or there is no progress until the deadline: the judgment finds the cause
//!        ▼
//!  response: the report, the flight record, the program's callback, and the communicator's end
//! ```
//!
//! There is one thread of each kind per process, for all communicators. The watchdog never affects a placement.

mod announced;
pub(crate) mod at_exit;
mod clock;
mod connecting;
mod failure;
pub(crate) mod flight;
mod handle;
mod judgment;
mod marker;
mod record;
mod response;
mod settings;
mod thread;
mod watched;

pub(crate) use announced::Announced;
pub(crate) use clock::Tick;
pub(crate) use connecting::Connecting;
pub use failure::{Failure, FailureCause};
pub(crate) use flight::{EntryNumber, Work};
pub(crate) use marker::mark;
pub use record::{flight_record, write_flight_record};
pub use response::FAILURE_EXIT_CODE;
pub(crate) use response::{ERROR_LIMIT, ensure_end};
pub(crate) use settings::WatchSettings;
pub use settings::WatchdogMode;
pub(crate) use thread::{ATTRIBUTION_LIMIT, fail, is_on, leave, meeting_of, register_meeting, start, watch};
pub(crate) use watched::{Identity, MeetingId, Watchable, Watched};
