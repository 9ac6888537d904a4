//! Text in lines of fields: what traces and layouts are written in.
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

pub use error::LineError;
pub(crate) use fields::Fields;
pub(crate) use lines::{Ending, FirstLine, Lines};
pub(crate) use name::write_name;

/// The longest line, in bytes, its line break included. No record needs more.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

/// The longest name of an allocation, in bytes of UTF-8. Escaped it takes at most six times as many.
pub(crate) const NAME_BYTES_MAX: usize = 4 << 10;
