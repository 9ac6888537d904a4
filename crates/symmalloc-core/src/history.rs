//! The history of heaps: digests, the journals that agreement compares, the segment log, and layouts.

pub(crate) mod digest;
pub(crate) mod journal;
pub mod layout;
pub mod segment_log;
