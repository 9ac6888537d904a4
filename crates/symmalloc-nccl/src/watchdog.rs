//! The watchdog, which ensures that no rank waits indefinitely.
//!
//! ```text
//!  communicator ── Flight: submitted work, and the device's progress
//!                    ▲                         ▲
//!    marker thread ──┘ polls the driver, NCCL  │ never calls either: both may hang
//!  watchdog thread ────────────────────────────┴──── lifelines: live ranks, and their progress
//!        │ a rank is gone, or there is no progress until the deadline: the judgment finds the cause
//!        ▼
//!  response: the report, the flight record, the program's callback, and the communicator's end
//! ```
//!
//! There is one thread of each kind per process, for all communicators. The watchdog never affects a placement.

mod clock;
mod failure;
pub(crate) mod flight;
mod handle;
mod judgment;
mod marker;
mod marks;
mod record;
mod registry;
mod response;
mod settings;
mod thread;

mod watched;

pub(crate) use crate::watchdog::clock::Tick;
pub(crate) use crate::watchdog::failure::PENDING_COMM;
pub use crate::watchdog::failure::{Failure, FailureCause};
pub(crate) use crate::watchdog::flight::{EntryNumber, Work};
pub(crate) use crate::watchdog::marker::mark;
pub use crate::watchdog::record::{flight_record, write_flight_record};
pub(crate) use crate::watchdog::response::ERROR_LIMIT;
pub use crate::watchdog::response::FAILURE_EXIT_CODE;
pub(crate) use crate::watchdog::settings::WatchSettings;
pub use crate::watchdog::settings::WatchdogMode;
pub(crate) use crate::watchdog::thread::{NEWS_LIMIT, expect, fail, is_on, leave, meeting_of, met, watch, withdraw};
pub(crate) use crate::watchdog::watched::{Identity, MeetingId, Watchable, Watched};
