//! Reader for layouts.

use super::contradiction::Contradiction;
use super::line::{self, MAGIC, VERSION};
use super::rules::{LayoutBuilder, LayoutItem, Misfit};
use crate::text::{self, Document, DocumentBuilder, DocumentError, Format, Line, LineError};
use std::io::BufRead;
use symmalloc_core::layout::Layout;

/// Error reading a layout.
pub type LayoutTextError = DocumentError<Layout>;

/// Reads the text of a layout.
///
/// # Errors
/// Returns an error if the text is not a layout, is truncated, or contradicts itself. The [`LayoutTextError`] names the
/// line.
pub fn read(reader: impl BufRead) -> Result<Layout, LayoutTextError> {
    text::read::<LayoutBuilder>(reader)
}

/// Reads a layout from its text.
///
/// # Errors
/// Same as [`read`].
pub fn parse(text: &str) -> Result<Layout, LayoutTextError> {
    read(text.as_bytes())
}

impl Document for Layout {
    const FORMAT: Format = Format {
        name: "layout",
        magic: MAGIC,
        version: VERSION,
        obtain: "decompress a compressed layout first",
        again: "save the layout again",
    };
    type Contradiction = Contradiction;
}

impl DocumentBuilder for LayoutBuilder {
    type Document = Layout;
    type Statement = LayoutItem;

    fn parse(line: u64, text: &str) -> Result<Line<LayoutItem>, LineError> {
        line::parse(line, text)
    }

    fn add(&mut self, line: u64, item: LayoutItem) -> Result<(), LayoutTextError> {
        self.add_item(item).map_err(|misfit| misfit.at(line))
    }

    fn finish(self, line: u64) -> Result<Layout, LayoutTextError> {
        self.layout().map_err(|misfit| misfit.at(line))
    }
}

impl Misfit {
    fn at(self, line: u64) -> LayoutTextError {
        match self {
            Misfit::Misplaced { expected } => DocumentError::Misplaced { line, expected },
            Misfit::Contradiction(source) => DocumentError::Contradiction { line, source },
        }
    }
}
