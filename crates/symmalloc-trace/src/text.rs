//! Lines of fields: the common syntax of traces, layouts and plans.
//!
//! ```text
//! line   = [ field { field } ] [ "#" comment ]        fields are separated by spaces or tabs
//! name   = '"' { character | escape } '"'
//! ```
//!
//! A reader holds one line, whose length is bounded. Every error names the line (from 1) and, where useful, the column (the byte within the
//! line, from 1).

mod document;
mod error;
mod fields;
mod lines;
mod name;

pub use document::{Document, DocumentError, Format};
pub(crate) use document::{DocumentBuilder, Line, read};
pub use error::{LINE_BYTES_MAX, LineError};
pub(crate) use fields::Fields;
pub(crate) use lines::{Ending, FirstLine, Lines};
pub(crate) use name::write_name;
