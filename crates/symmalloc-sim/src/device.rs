//! The simulated device, which implements the backend trait without hardware.

mod address_space;
mod backend;
mod builder;
mod clock;
mod contents;
mod contract;
mod fault;
mod idle;
mod interval;
mod leaks;
mod random;
mod timeline;

pub use address_space::Addresses;
pub use backend::SimBackend;
pub use builder::SimBuilder;
pub use fault::{Call, CallCounts, Fault, FaultRule};
pub use idle::IdleBackend;
pub use leaks::Leaks;
pub use random::SplitMix64;
pub use timeline::{Delays, Race};
