//! The parts of a sync: the changes to the segments, the actions that follow from them, and their comparison across ranks.
//! `registrar/attachment/sync.rs` puts them together.

pub(crate) mod actions;
pub(crate) mod agreement;
pub(crate) mod changes;
pub(crate) mod difference;
pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod message;
