//! Reader for plans.

use super::contradiction::PlanContradiction;
use super::file::PlanFile;
use super::line::{self, MAGIC, PlanHead, PlanStatement, VERSION};
use crate::text::{self, Document, DocumentBuilder, DocumentError, Format, Line, LineError};
use std::io::BufRead;
use symmalloc_core::plans::{Plan, PlanError, PlannedAllocation};

/// Error reading a plan.
pub type PlanTextError = DocumentError<PlanFile>;

/// Reads the text of a plan.
///
/// # Errors
/// Returns an error if the text is not a plan, is truncated, or cannot be followed by any allocator. The [`PlanTextError`] names the line.
/// Overlapping allocations are detected only when the plan is adopted.
pub fn read(reader: impl BufRead) -> Result<PlanFile, PlanTextError> {
    text::read::<Draft>(reader)
}

/// Reads a plan from its text.
///
/// # Errors
/// Same as [`read`].
pub fn parse(text: &str) -> Result<PlanFile, PlanTextError> {
    read(text.as_bytes())
}

impl Document for PlanFile {
    const FORMAT: Format = Format {
        name: "plan",
        magic: MAGIC,
        version: VERSION,
        obtain: "write one with `symmalloc plan JOB -o FILE`",
        again: "plan the job again",
    };
    type Contradiction = PlanContradiction;
}

/// The statements read so far.
#[derive(Default)]
struct Draft {
    /// `Some` after the first statement.
    file: Option<PlanFile>,
    open: Option<OpenPlan>,
}

/// The plan to which allocation lines are currently added.
struct OpenPlan {
    line: u64,
    head: PlanHead,
    allocations: Vec<PlannedAllocation>,
    /// Line number of each allocation.
    lines: Vec<u64>,
}

impl DocumentBuilder for Draft {
    type Document = PlanFile;
    type Statement = PlanStatement;

    fn parse(line: u64, text: &str) -> Result<Line<PlanStatement>, LineError> {
        line::parse(line, text)
    }

    fn add(&mut self, line: u64, statement: PlanStatement) -> Result<(), PlanTextError> {
        let misplaced = |expected| PlanTextError::Misplaced { line, expected };
        if !matches!(statement, PlanStatement::Allocation(_)) {
            self.close()?;
        }
        match (statement, &mut self.file, &mut self.open) {
            (PlanStatement::Config(config), None, _) => self.file = Some(PlanFile::new(config)),
            (_, None, _) => return Err(misplaced("`config` and the allocator's settings")),
            (PlanStatement::Pool(pool, config), Some(file), _) => {
                file.add_pool(pool, config).map_err(|source| PlanTextError::Contradiction { line, source })?;
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

    fn finish(mut self, line: u64) -> Result<PlanFile, PlanTextError> {
        self.close()?;
        self.file.ok_or(PlanTextError::Misplaced { line, expected: "`config` and the allocator's settings" })
    }
}

impl Draft {
    /// Completes the open plan, if there is one.
    fn close(&mut self) -> Result<(), PlanTextError> {
        let (Some(file), Some(open)) = (&mut self.file, self.open.take()) else { return Ok(()) };
        let OpenPlan { line, head, allocations, lines } = open;
        let found = allocations.len() as u64;
        if found != head.allocations {
            let source = PlanContradiction::Allocations { stated: head.allocations, found };
            return Err(PlanTextError::Contradiction { line, source });
        }
        let plan = Plan::new(head.key, head.heap.group, allocations).map_err(|error| {
            let line = match error {
                PlanError::Allocation { number } => lines[number as usize],
                _ => line,
            };
            PlanTextError::Contradiction { line, source: error.into() }
        })?;
        file.add_plan(head.heap.pool, plan).map_err(|source| PlanTextError::Contradiction { line, source })
    }
}
