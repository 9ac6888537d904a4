//! Sleep and wake: a pool gives its memory back and keeps its addresses, blocks, handles and digests.
//!
//! ```text
//!  quiesce   refuse allocations ─► wait for the streams ─► save the contents      dropped: awake, as it was
//!  unmap     give the memory back                                                 asleep
//!  remap     get memory, map it at the old addresses ─► load the contents         dropped: asleep again
//!  keep      serve allocations                                                    awake
//! ```
//! The allocator's `sleep` is quiesce and unmap in a row, its `wake` is remap and keep. Who has windows on the memory does its own
//! between them: `docs/sleep-protocol.md`.

mod error;
pub(crate) mod state;

pub use error::{Phase, SleepCause, SleepError, Slept, Woken};
