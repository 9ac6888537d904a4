//! What heaps remember of the past: digests, the journals that agreement looks back on, names, the segment log, layouts.

pub(crate) mod digest;
pub(crate) mod journal;
pub mod layout;
pub(crate) mod names;
pub mod segment_log;
