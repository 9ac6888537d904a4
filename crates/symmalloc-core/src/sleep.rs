//! Sleep and wake: a pool releases its memory and keeps its addresses, blocks, handles and digests.
//!
//! ```text
//!  quiesce   refuse allocations ─► wait for the streams ─► save the contents      dropped: awake, unchanged
//!  unmap     release the memory                                                   asleep
//!  remap     map memory at the old addresses ─► load the contents                 dropped: asleep again
//!  keep      serve allocations                                                    awake
//! ```
//! The allocator's `sleep` is quiesce followed by unmap, and its `wake` is remap followed by keep. A holder of windows
//! on the memory acts between these steps: `docs/sleep-protocol.md`.

mod error;
pub(crate) mod mappings;
pub(crate) mod state;

pub use error::{Phase, SleepCause, SleepError, Slept, Woken};
