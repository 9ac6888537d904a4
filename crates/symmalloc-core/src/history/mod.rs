//! What heaps remember of the past: digests, the journals that agreement looks back on, the segment log, layouts.

pub(crate) mod digest;
pub(crate) mod journal;
pub mod layout;
pub mod segment_log;
