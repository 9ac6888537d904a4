//! Reads a layout line by line.

use super::line::{self, Statement};
use super::rules::{Draft, Refusal};
use super::{Layout, LayoutTextError, MAGIC, VERSION};
use crate::text::{Ending, FirstLine, Lines};
use std::io::BufRead;
use std::str::FromStr;

impl Layout {
    /// Reads the text of a layout.
    ///
    /// # Errors
    /// When it is not one, is torn, or says what no heap could look like: [`LayoutTextError`] names the line.
    pub fn read(reader: impl BufRead) -> Result<Self, LayoutTextError> {
        let mut lines = Lines::new(reader);
        match lines.read_first(MAGIC)? {
            FirstLine::Version(VERSION) => {}
            FirstLine::Version(found) => return Err(LayoutTextError::UnsupportedVersion { found }),
            FirstLine::Foreign => return Err(LayoutTextError::NotALayout),
            FirstLine::Torn => return Err(LayoutTextError::Torn { line: lines.number() }),
        }
        let mut draft = Draft::default();
        let mut statements = 0;
        loop {
            let ending = lines.read()?;
            let line = lines.number();
            if ending == Ending::Missing {
                return Err(LayoutTextError::Torn { line });
            }
            let statement = match line::parse(line, lines.text()?) {
                // The line may lack its end (`end 1` of `end 12`), so it counts only when it is the right one.
                Ok(Statement::End(stated)) if ending == Ending::Whole || stated == statements => Statement::End(stated),
                _ if ending == Ending::Cut => return Err(LayoutTextError::Torn { line }),
                statement => statement?,
            };
            match statement {
                Statement::Nothing => {}
                Statement::End(stated) if stated == statements => {
                    read_nothing_more(&mut lines)?;
                    return draft.finish().map_err(|refusal| refused(line, refusal));
                }
                Statement::End(stated) => return Err(LayoutTextError::WrongCount { line, stated, lines: statements }),
                statement => {
                    draft.admit(statement).map_err(|refusal| refused(line, refusal))?;
                    statements += 1;
                }
            }
        }
    }

    /// Reads a layout from its text.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, LayoutTextError> {
        Self::read(text.as_bytes())
    }
}

fn read_nothing_more(lines: &mut Lines<impl BufRead>) -> Result<(), LayoutTextError> {
    while lines.read()? != Ending::Missing {
        let line = lines.number();
        if !matches!(line::parse(line, lines.text()?), Ok(Statement::Nothing)) {
            return Err(LayoutTextError::AfterEnd { line });
        }
    }
    Ok(())
}

fn refused(line: u64, refusal: Refusal) -> LayoutTextError {
    match refusal {
        Refusal::Misplaced(expected) => LayoutTextError::Misplaced { line, expected },
        Refusal::Contradiction(source) => LayoutTextError::Contradiction { line, source },
    }
}

impl FromStr for Layout {
    type Err = LayoutTextError;

    fn from_str(text: &str) -> Result<Self, LayoutTextError> {
        Self::parse(text)
    }
}
