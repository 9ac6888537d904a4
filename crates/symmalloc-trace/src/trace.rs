//! Traces: recorded ops as text, one record per line.

mod error;
mod ledger;
mod line;
#[cfg(test)]
mod properties;
mod reader;
#[cfg(test)]
mod tests;
mod whole;
mod writer;

pub use error::{Inconsistency, TraceError, TraceWriteError};
pub use line::{MAGIC, VERSION};
pub use reader::TraceReader;
pub use whole::Trace;
pub use writer::{RecordLine, TraceWriter};
