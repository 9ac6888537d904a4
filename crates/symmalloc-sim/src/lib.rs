//! A simulated device for `symmalloc-core`, and simulated jobs whose ranks run on such devices.
//!
//! * [`SimBackend`] is a device without hardware. Its addresses, event timing and failures derive from one seed. It
//!   panics at the first violation of the backend contract.
//! * [`job`] runs one program on thousands of ranks under adverse conditions and checks that all of them place
//!   identically.
//!
//! ```
//! use symmalloc::backend::Backend;
//! use symmalloc::ids::StreamId;
//! use symmalloc::sim::SimBackend;
//!
//! let device = SimBackend::builder().seed(7).rank(3).build();
//! let range = device.reserve(2 << 20)?;
//! device.map(range, 0, 2 << 20)?;
//! device.submit(StreamId(0), range.base, 512).unwrap();
//! assert!(device.submit(StreamId(1), range.base, 512).is_err()); // nothing orders the streams
//! let event = device.record(StreamId(0))?;
//! device.wait(StreamId(1), event)?;
//! device.submit(StreamId(1), range.base, 512).unwrap();
//! # Ok::<(), symmalloc::backend::BackendError>(())
//! ```
#![forbid(unsafe_code)]

mod device;
pub mod job;

pub use device::{
    Addresses, Call, CallCounts, Delays, Fault, FaultRule, IdleBackend, Leaks, Race, SimBackend, SimBuilder, SplitMix64,
};
