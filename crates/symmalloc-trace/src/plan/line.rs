//! One line of a plan, read by itself.

use crate::text::{Fields, LineError};
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{PoolId, StreamId};
use symmalloc_core::plans::{PlannedAllocation, StepAllocation};

/// The first word of every plan's text.
pub const MAGIC: &str = "symmalloc-plan";

/// The version of the format that this library writes, and the only one it reads.
pub const VERSION: u64 = 1;

/// The words that a line can start with, after the first line.
pub(super) const KEYWORDS: &[&str] = &["config", "pool", "plan", "a", "end"];

/// The word for an allocation that outlives the next step.
pub(super) const NEVER: &str = "never";

/// Whose plan begins, and for which steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlanHead {
    pub(super) pool: PoolId,
    pub(super) stream: Option<StreamId>,
    pub(super) key: u64,
    /// How many lines of allocations follow.
    pub(super) allocations: u64,
}

/// What a line says.
#[derive(Debug)]
pub(super) enum PlanStatement {
    /// Blank, or a comment.
    Nothing,
    /// How the allocator is configured.
    Config(Config),
    /// How another pool is configured.
    Pool(PoolId, PoolConfig),
    /// A plan begins.
    Plan(PlanHead),
    /// The next allocation of the plan.
    Allocation(PlannedAllocation),
    /// The number of statements before.
    End(u64),
}

/// Reads one line, given without its line break.
pub(super) fn parse(line: u64, text: &str) -> Result<PlanStatement, LineError> {
    let mut fields = Fields::new(line, text);
    let Some(keyword) = fields.next() else { return Ok(PlanStatement::Nothing) };
    let statement = match keyword.text {
        "config" => PlanStatement::Config(fields.config()?),
        "pool" => PlanStatement::Pool(fields.pool()?, fields.config()?),
        "plan" => PlanStatement::Plan(fields.head()?),
        "a" => PlanStatement::Allocation(fields.planned_allocation()?),
        "end" => PlanStatement::End(fields.number("the number of lines", u64::MAX)?),
        _ => return Err(fields.unknown(keyword, KEYWORDS)),
    };
    fields.finish()?;
    Ok(statement)
}

impl Fields<'_> {
    /// `pN sN|shared key K allocations N`
    fn head(&mut self) -> Result<PlanHead, LineError> {
        let (pool, stream) = (self.pool()?, self.heap_stream()?);
        self.word("key", "`key` and the key of the steps")?;
        let key = self.number("the key of the steps, a number", u64::MAX)?;
        self.word("allocations", "`allocations` and how many follow")?;
        let allocations = self.number("how many allocations follow", u64::MAX)?;
        Ok(PlanHead { pool, stream, key, allocations })
    }

    fn word(&mut self, word: &str, expected: &'static str) -> Result<(), LineError> {
        let field = self.expect(expected)?;
        if field.text == word { Ok(()) } else { Err(self.expected(field.column, expected)) }
    }

    /// `SIZE sN UNTIL|never [@OFFSET]`
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
