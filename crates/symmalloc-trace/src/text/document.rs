//! Documents: texts that are valid only as a whole. Layouts and plans are documents.
//!
//! ```text
//!   MAGIC VERSION ──► statement ──► ... ──► end N ──► nothing but comments
//!                          └── input ends here: the document is torn
//! ```

use super::error::LineError;
use super::lines::{Ending, FirstLine, Lines};
use std::error::Error;
use std::io::BufRead;

/// The format of a kind of document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Format {
    /// The word that errors use for the document.
    pub name: &'static str,
    /// The first word of every such text.
    pub magic: &'static str,
    /// The version that this library writes, and the only one that it reads.
    pub version: u64,
    /// Advice in the error for a text that is not a document of this kind.
    pub(crate) obtain: &'static str,
    /// Advice on how to replace a document that is torn or has another version.
    pub(crate) again: &'static str,
}

/// A kind of document.
pub trait Document: Sized + 'static {
    /// The format of such documents.
    const FORMAT: Format;
    /// A statement that contradicts earlier ones.
    type Contradiction: Error + 'static;
}

/// Error reading a document.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DocumentError<D: Document> {
    /// A line is invalid by itself.
    #[error(transparent)]
    Line(#[from] LineError),
    /// The first line does not identify a document of this kind.
    #[error("not a {}: the first line must be `{} {}`; {}", D::FORMAT.name, D::FORMAT.magic, D::FORMAT.version, D::FORMAT.obtain)]
    WrongFormat,
    /// The document has a later version of the format.
    #[error(
        "the {} has version {found}, but this library reads version {}: use a newer one, or {}",
        D::FORMAT.name, D::FORMAT.version, D::FORMAT.again
    )]
    UnsupportedVersion {
        /// The version that the document states.
        found: u64,
    },
    /// A statement is out of order.
    #[error("line {line}: misplaced; expected {expected}")]
    Misplaced {
        /// The line.
        line: u64,
        /// The statements allowed there.
        expected: &'static str,
    },
    /// A statement contradicts earlier ones, so no allocator can use the document.
    #[error("line {line}: {source}")]
    Contradiction {
        /// The line.
        line: u64,
        /// The contradiction.
        source: D::Contradiction,
    },
    /// The input ends without an `end` line, so its writer was interrupted.
    #[error("line {line}: the {} is torn; {}", D::FORMAT.name, D::FORMAT.again)]
    Torn {
        /// The line at which the input ended.
        line: u64,
    },
    /// The `end` line states a number of lines that the document does not have: lines were lost, or the document was
    /// edited.
    #[error(
        "line {line}: the {} states {stated} lines, but has {lines}; if it was edited on purpose, write `end {lines}`",
        D::FORMAT.name
    )]
    WrongCount {
        /// The number of the `end` line.
        line: u64,
        /// The stated number.
        stated: u64,
        /// Number of lines between the first line and the `end` line.
        lines: u64,
    },
    /// Text follows the `end` line.
    #[error("line {line}: the {} ended before this line; a file holds one {}", D::FORMAT.name, D::FORMAT.name)]
    AfterEnd {
        /// The line.
        line: u64,
    },
}

/// A parsed line.
#[derive(Debug)]
pub(crate) enum Line<S> {
    /// A blank line or a comment.
    Nothing,
    Statement(S),
    /// The end of the document, with the stated number of preceding statements.
    End(u64),
}

/// Builds a document from its statements.
pub(crate) trait DocumentBuilder: Default {
    type Document: Document;
    type Statement;

    /// Parses one line, given without its line break.
    fn parse(line: u64, text: &str) -> Result<Line<Self::Statement>, LineError>;

    /// Adds the statement of a line.
    fn add(&mut self, line: u64, statement: Self::Statement) -> Result<(), DocumentError<Self::Document>>;

    /// Completes the document at its `end` line.
    fn finish(self, line: u64) -> Result<Self::Document, DocumentError<Self::Document>>;
}

/// Reads a document line by line.
pub(crate) fn read<B: DocumentBuilder>(reader: impl BufRead) -> Result<B::Document, DocumentError<B::Document>> {
    let mut lines = Lines::new(reader);
    let format = B::Document::FORMAT;
    match lines.read_first(format.magic)? {
        FirstLine::Version(version) if version == format.version => {}
        FirstLine::Version(found) => return Err(DocumentError::UnsupportedVersion { found }),
        FirstLine::Foreign => return Err(DocumentError::WrongFormat),
        FirstLine::Torn => return Err(DocumentError::Torn { line: lines.number() }),
    }
    let mut builder = B::default();
    let mut statements = 0;
    loop {
        let ending = lines.read()?;
        let line = lines.number();
        if ending == Ending::Missing {
            return Err(DocumentError::Torn { line });
        }
        let parsed = match B::parse(line, lines.text()?) {
            // An `end` line without a line break may be truncated (`end 1` of `end 12`), so it counts only if its
            // number is correct.
            Ok(Line::End(stated)) if ending == Ending::Whole || stated == statements => Line::End(stated),
            _ if ending == Ending::Cut => return Err(DocumentError::Torn { line }),
            parsed => parsed?,
        };
        match parsed {
            Line::Nothing => {}
            Line::End(stated) if stated == statements => {
                read_nothing_more::<B>(&mut lines)?;
                return builder.finish(line);
            }
            Line::End(stated) => return Err(DocumentError::WrongCount { line, stated, lines: statements }),
            Line::Statement(statement) => {
                builder.add(line, statement)?;
                statements += 1;
            }
        }
    }
}

fn read_nothing_more<B: DocumentBuilder>(lines: &mut Lines<impl BufRead>) -> Result<(), DocumentError<B::Document>> {
    while lines.read()? != Ending::Missing {
        let line = lines.number();
        if !matches!(B::parse(line, lines.text()?), Ok(Line::Nothing)) {
            return Err(DocumentError::AfterEnd { line });
        }
    }
    Ok(())
}
