//! Reader for layouts. It processes the text line by line.

use super::error::LayoutTextError;
use super::line::{self, LayoutStatement, MAGIC, VERSION};
use super::rules::{LayoutBuilder, Misfit};
use crate::text::{Ending, FirstLine, Lines};
use std::io::BufRead;
use symmalloc_core::layout::Layout;

/// Reads the text of a layout.
///
/// # Errors
/// Returns an error if the text is not a layout, is truncated, or contradicts itself: [`LayoutTextError`] names the
/// line.
pub fn read(reader: impl BufRead) -> Result<Layout, LayoutTextError> {
    let mut lines = Lines::new(reader);
    match lines.read_first(MAGIC)? {
        FirstLine::Version(VERSION) => {}
        FirstLine::Version(found) => return Err(LayoutTextError::UnsupportedVersion { found }),
        FirstLine::Foreign => return Err(LayoutTextError::NotALayout),
        FirstLine::Torn => return Err(LayoutTextError::Torn { line: lines.number() }),
    }
    let mut layout = LayoutBuilder::default();
    let mut statements = 0;
    loop {
        let ending = lines.read()?;
        let line = lines.number();
        if ending == Ending::Missing {
            return Err(LayoutTextError::Torn { line });
        }
        let statement = match line::parse(line, lines.text()?) {
            // The line may be truncated (`end 1` of `end 12`), so it counts only with the correct number.
            Ok(LayoutStatement::End(stated)) if ending == Ending::Whole || stated == statements => {
                LayoutStatement::End(stated)
            }
            _ if ending == Ending::Cut => return Err(LayoutTextError::Torn { line }),
            statement => statement?,
        };
        match statement {
            LayoutStatement::Nothing => {}
            LayoutStatement::End(stated) if stated == statements => {
                read_nothing_more(&mut lines)?;
                return layout.finish().map_err(|misfit| refused(line, misfit));
            }
            LayoutStatement::End(stated) => {
                return Err(LayoutTextError::WrongCount { line, stated, lines: statements });
            }
            LayoutStatement::Item(item) => {
                layout.add(item).map_err(|misfit| refused(line, misfit))?;
                statements += 1;
            }
        }
    }
}

/// Reads a layout from its text.
///
/// # Errors
/// Same as [`read`].
pub fn parse(text: &str) -> Result<Layout, LayoutTextError> {
    read(text.as_bytes())
}

fn read_nothing_more(lines: &mut Lines<impl BufRead>) -> Result<(), LayoutTextError> {
    while lines.read()? != Ending::Missing {
        let line = lines.number();
        if !matches!(line::parse(line, lines.text()?), Ok(LayoutStatement::Nothing)) {
            return Err(LayoutTextError::AfterEnd { line });
        }
    }
    Ok(())
}

fn refused(line: u64, misfit: Misfit) -> LayoutTextError {
    match misfit {
        Misfit::Misplaced { expected } => LayoutTextError::Misplaced { line, expected },
        Misfit::Contradiction(source) => LayoutTextError::Contradiction { line, source },
    }
}
