//! Streams: registered streams, the events that order them, and the captures that they are part of.

mod backend_streams;
mod captures;
mod comparisons;
mod event_pool;
mod lent;

pub(crate) use backend_streams::BackendStreams;
pub(crate) use backend_streams::is_same;
pub use captures::CaptureWatch;
pub(crate) use captures::{CaptureId, capture_of};
pub(crate) use comparisons::Comparisons;
pub use lent::LentStream;
