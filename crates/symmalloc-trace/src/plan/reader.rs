//! Reader for plans. It processes the text line by line.

use super::error::{PlanContradiction, PlanTextError};
use super::file::PlanFile;
use super::line::{self, MAGIC, PlanHead, PlanStatement, VERSION};
use crate::text::{Ending, FirstLine, Lines};
use std::io::BufRead;
use symmalloc_core::plans::{Plan, PlanError, PlannedAllocation};

/// Reads the text of a plan.
///
/// # Errors
/// Returns an error if the text is not a plan, is truncated, or cannot be followed by any allocator: [`PlanTextError`] names the line.
/// Overlapping allocations are detected when the plan is adopted.
pub fn read(reader: impl BufRead) -> Result<PlanFile, PlanTextError> {
    let mut lines = Lines::new(reader);
    match lines.read_first(MAGIC)? {
        FirstLine::Version(VERSION) => {}
        FirstLine::Version(found) => return Err(PlanTextError::UnsupportedVersion { found }),
        FirstLine::Foreign => return Err(PlanTextError::NotAPlan),
        FirstLine::Torn => return Err(PlanTextError::Torn { line: lines.number() }),
    }
    let mut draft = Draft::default();
    let mut statements = 0;
    loop {
        let ending = lines.read()?;
        let line = lines.number();
        if ending == Ending::Missing {
            return Err(PlanTextError::Torn { line });
        }
        let statement = match line::parse(line, lines.text()?) {
            // The line may be truncated (`end 1` of `end 12`), so it counts only with the correct number.
            Ok(PlanStatement::End(stated)) if ending == Ending::Whole || stated == statements => {
                PlanStatement::End(stated)
            }
            _ if ending == Ending::Cut => return Err(PlanTextError::Torn { line }),
            statement => statement?,
        };
        match statement {
            PlanStatement::Nothing => {}
            PlanStatement::End(stated) if stated == statements => {
                read_nothing_more(&mut lines)?;
                return draft.finish(line);
            }
            PlanStatement::End(stated) => {
                return Err(PlanTextError::WrongCount { line, stated, lines: statements });
            }
            statement => {
                draft.add(line, statement)?;
                statements += 1;
            }
        }
    }
}

/// Reads a plan from its text.
///
/// # Errors
/// Same as [`read`].
pub fn parse(text: &str) -> Result<PlanFile, PlanTextError> {
    read(text.as_bytes())
}

fn read_nothing_more(lines: &mut Lines<impl BufRead>) -> Result<(), PlanTextError> {
    while lines.read()? != Ending::Missing {
        let line = lines.number();
        if !matches!(line::parse(line, lines.text()?), Ok(PlanStatement::Nothing)) {
            return Err(PlanTextError::AfterEnd { line });
        }
    }
    Ok(())
}

/// The statements read so far.
#[derive(Default)]
struct Draft {
    /// `Some` after the first statement.
    file: Option<PlanFile>,
    open: Option<OpenPlan>,
}

/// A plan to which allocations can still be added.
struct OpenPlan {
    line: u64,
    head: PlanHead,
    allocations: Vec<PlannedAllocation>,
    /// Line number of each allocation.
    lines: Vec<u64>,
}

impl Draft {
    fn add(&mut self, line: u64, statement: PlanStatement) -> Result<(), PlanTextError> {
        let misplaced = |expected| PlanTextError::Misplaced { line, expected };
        if !matches!(statement, PlanStatement::Allocation(_)) {
            self.close()?;
        }
        match (statement, &mut self.file, &mut self.open) {
            (PlanStatement::Config(config), None, _) => self.file = Some(PlanFile::new(config)),
            (_, None, _) => return Err(misplaced("`config` and the allocator's settings")),
            (PlanStatement::Pool(pool, config), Some(file), _) => {
                file.add_pool(pool, config).map_err(|source| PlanTextError::Inconsistent { line, source })?;
            }
            (PlanStatement::Plan(head), Some(_), _) => {
                self.open = Some(OpenPlan { line, head, allocations: Vec::new(), lines: Vec::new() });
            }
            (PlanStatement::Allocation(allocation), Some(_), Some(open)) => {
                open.allocations.push(allocation);
                open.lines.push(line);
            }
            (PlanStatement::Config(_), Some(_), _) => return Err(misplaced("`pool`, `plan` or `end`")),
            _ => return Err(misplaced("`plan` and its heap")),
        }
        Ok(())
    }

    /// Completes the open plan.
    fn close(&mut self) -> Result<(), PlanTextError> {
        let (Some(file), Some(open)) = (&mut self.file, self.open.take()) else { return Ok(()) };
        let OpenPlan { line, head, allocations, lines } = open;
        let found = allocations.len() as u64;
        if found != head.allocations {
            let source = PlanContradiction::Allocations { stated: head.allocations, found };
            return Err(PlanTextError::Inconsistent { line, source });
        }
        let plan = Plan::new(head.key, head.stream, allocations).map_err(|error| {
            let line = match error {
                PlanError::Allocation { number } => lines[number as usize],
                _ => line,
            };
            PlanTextError::Inconsistent { line, source: error.into() }
        })?;
        file.add_plan(head.pool, plan).map_err(|source| PlanTextError::Inconsistent { line, source })
    }

    fn finish(mut self, line: u64) -> Result<PlanFile, PlanTextError> {
        self.close()?;
        self.file.ok_or(PlanTextError::Misplaced { line, expected: "`config` and the allocator's settings" })
    }
}
