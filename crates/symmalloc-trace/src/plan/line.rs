//! Parser for one line of a plan.

use crate::text::{Fields, Line, LineError};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{HeapId, PoolId};
use symmalloc_core::plans::{PlannedAllocation, StepAllocation};

/// First word of every plan's text.
pub const MAGIC: &str = "symmalloc-plan";

/// Version of the format that this library writes, and the only one that it reads.
pub const VERSION: u64 = 1;

/// Keywords that a line can start with, after the first line.
pub(super) const KEYWORDS: &[&str] = &["config", "pool", "plan", "a", "end"];

/// Word for the end of an allocation that lives longer than the next step.
pub(super) const NEVER: &str = "never";

/// First line of a plan: its heap and the key of its steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanHead {
    pub(super) heap: HeapId,
    pub(super) key: u64,
    /// Number of allocation lines that follow.
    pub(super) allocations: u64,
}

/// A statement of a plan.
#[derive(Debug)]
pub(super) enum PlanStatement {
    /// The allocator's configuration.
    Config(Config),
    /// The configuration of a pool other than the default pool.
    Pool(PoolId, PoolConfig),
    /// The first line of a plan.
    Plan(PlanHead),
    /// The next allocation of the plan.
    Allocation(PlannedAllocation),
}

/// Parses one line, given without its line break.
pub(super) fn parse(line: u64, text: &str) -> Result<Line<PlanStatement>, LineError> {
    let mut fields = Fields::new(line, text);
    let Some(keyword) = fields.next() else { return Ok(Line::Nothing) };
    let statement = match keyword.text {
        "config" => PlanStatement::Config(fields.config()?),
        "pool" => PlanStatement::Pool(fields.pool()?, fields.config()?),
        "plan" => PlanStatement::Plan(fields.head()?),
        "a" => PlanStatement::Allocation(fields.planned_allocation()?),
        "end" => return fields.end(),
        _ => return Err(fields.unknown(keyword, KEYWORDS)),
    };
    fields.finish()?;
    Ok(Line::Statement(statement))
}

impl Fields<'_> {
    /// Parses `pN sN|sN+|shared key K allocations N`.
    fn head(&mut self) -> Result<PlanHead, LineError> {
        let heap = HeapId { pool: self.pool()?, group: self.stream_group()? };
        self.word("key", "`key` and the key of the steps")?;
        let key = self.number("the key of the steps, a number", u64::MAX)?;
        self.word("allocations", "`allocations` and their number")?;
        let allocations = self.number("the number of allocations", u64::MAX)?;
        Ok(PlanHead { heap, key, allocations })
    }

    fn word(&mut self, word: &str, expected: &'static str) -> Result<(), LineError> {
        let field = self.expect(expected)?;
        if field.text == word { Ok(()) } else { Err(self.expected(field.column, expected)) }
    }

    /// Parses `SIZE sN UNTIL|never [@OFFSET]`.
    fn planned_allocation(&mut self) -> Result<PlannedAllocation, LineError> {
        const UNTIL: &str = "the number of the allocation before which it is free, or `never`";
        const OFFSET: &str = "an offset in bytes: @OFFSET";
        let requested_bytes = self.number("a size in bytes", u64::MAX)?;
        let stream = self.stream()?;
        let until = self.expect(UNTIL)?;
        let until = if until.text == NEVER {
            None
        } else {
            Some(self.decimal(until.text, until.column, UNTIL, u32::MAX.into())? as u32)
        };
        let offset_bytes = match self.next() {
            None => None,
            Some(field) => {
                let digits = field.text.strip_prefix('@').ok_or_else(|| self.expected(field.column, OFFSET))?;
                Some(self.decimal(digits, field.column + 1, OFFSET, u64::MAX)?)
            }
        };
        Ok(PlannedAllocation { wanted: StepAllocation { stream, requested_bytes, until }, offset_bytes })
    }
}
