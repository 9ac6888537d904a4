//! The watchdog: no rank waits indefinitely.
//!
//! ```text
//!  communicator ── Flight: what was given to it, and how far the device is
//!                    ▲                         ▲
//!    marker thread ──┘ asks the driver, NCCL   │ never asks either: both may hang
//!  watchdog thread ────────────────────────────┴──── lifelines: who is alive, and how far
//!        │ a rank is gone, or nothing gets on until the deadline: the judgement says why
//!        ▼
//!  response: the report, the flight record, the program's callback, and the communicator's end
//! ```
//!
//! There is one thread of each kind per process, for all communicators. Nothing here decides a placement.

mod clock;
mod failure;
pub(crate) mod flight;
mod handle;
mod judgement;
mod marker;
mod marks;
mod record;
mod registry;
mod response;
mod settings;
mod thread;

mod watched;

pub(crate) use clock::Tick;
pub(crate) use failure::UNBORN;
pub use failure::{Failure, FailureCause};
pub(crate) use flight::{EntryNumber, Work};
pub(crate) use marker::mark;
pub use record::{flight_record, write_flight_record};
pub(crate) use response::ERROR_LIMIT;
pub use response::FAILURE_EXIT_CODE;
pub(crate) use settings::WatchSettings;
pub use settings::WatchdogMode;
pub(crate) use thread::{NEWS_LIMIT, expect, fail, is_on, leave, meeting_of, met, watch, withdraw};
pub(crate) use watched::{Identity, MeetingId, Watchable, Watched};
