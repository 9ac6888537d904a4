//! The part of the watchdog that calls the driver and NCCL. The watchdog itself is the crate `symmalloc-watchdog`.
//!
//! ```text
//!  communicator ── Observed ── FlightRecorder: submitted work, and the device's progress
//!                                ▲                         ▲
//!               marker thread ───┘ polls the driver, NCCL  │ never calls either: both may hang
//!               watchdog thread ───────────────────────────┘
//! ```
//!
//! There is one thread of each kind per process, for all communicators.

pub(crate) mod at_exit;
mod marker;
mod observed;

pub(crate) use marker::{mark, start};
pub(crate) use observed::{Observed, Polled, keyed};
