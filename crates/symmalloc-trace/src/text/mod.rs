//! Text in lines of fields: what traces, layouts and plans are written in.
//!
//! ```text
//! line   = [ field { field } ] [ "#" comment ]        fields are separated by spaces or tabs
//! name   = '"' { character | escape } '"'
//! ```
//!
//! A reader holds one line, of bounded length. Every error names the line (from 1) and, where it helps, the column (the byte in
//! the line, from 1).

mod error;
mod fields;
mod lines;
mod name;

pub use error::{LINE_BYTES_MAX, LineError};
pub(crate) use fields::{Fields, SHARED};
pub(crate) use lines::{Ending, FirstLine, Lines};
pub(crate) use name::write_name;
