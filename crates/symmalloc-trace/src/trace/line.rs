//! Parser for one line of a trace: converts its fields to a [`Statement`].
//!
//! ```text
//! line       = [ keyword { field } ] [ "#" comment ]        fields are separated by spaces or tabs
//! id, size   = decimal digits                stream = "s" digits          pool = "p" digits
//! name       = '"' { character | escape } '"'               placement = "->" segment "@" offset
//! ```
//!
//! The ledger checks the line against earlier lines.

use crate::text::{Fields, LineError};
use std::num::NonZeroU64;
use symmalloc_core::config::{Config, PoolConfig};
use symmalloc_core::ids::{AllocationId, ObserverId, Placement, PoolId, SegmentId, StreamId};
use symmalloc_core::op::{Contents, Op, Pending, Record, Refusal};

/// First word of every trace.
pub const MAGIC: &str = "symmalloc-trace";

/// Version of the format that this library writes. It also reads version 1, which has no groups of streams.
pub const VERSION: u64 = 2;

/// Keywords that a line can start with, after the first line.
const KEYWORDS: &[&str] = &[
    "a",
    "f",
    "u",
    "wait",
    "synchronize",
    "reserve",
    "trim",
    "sync",
    "begin_step",
    "end_step",
    "sleep",
    "wake",
    "stay",
    "stream",
    "pool",
    "destroy",
    "reset",
    "observe",
    "acknowledge",
    "forget",
    "reclaim",
    "refuse",
    "config",
    "end",
];

/// Words for the reasons why a request is refused.
pub(super) const REFUSALS: [(Refusal, &str); 3] =
    [(Refusal::Limit, "limit"), (Refusal::Segment, "segment"), (Refusal::Driver, "driver")];

/// A parsed line.
#[derive(Debug)]
pub(super) enum Statement {
    /// A blank line or a comment.
    Nothing,
    /// The allocator's configuration.
    Config(Config),
    /// A record.
    Record(Record),
    /// The end of the trace.
    End {
        /// The stated number of records.
        records: u64,
    },
}

/// Parses one line, given without its line break.
#[inline]
pub(super) fn parse(line: u64, text: &str) -> Result<Statement, LineError> {
    let mut fields = Fields::new(line, text);
    let Some(keyword) = fields.next() else { return Ok(Statement::Nothing) };
    let statement = match keyword.text {
        "a" => Statement::Record(fields.allocation()?),
        "f" => Statement::Record(fields.free()?),
        "u" => Op::RecordUse { id: fields.id()?, stream: fields.stream()? }.into(),
        "wait" => Op::Wait { stream: fields.stream()?, on: fields.stream()? }.into(),
        "synchronize" => Op::Synchronize { stream: fields.stream()? }.into(),
        "reserve" => {
            let size_bytes = fields.size()?;
            let stream = fields.stream()?;
            Op::Reserve { pool: fields.pool_or_default()?, stream, size_bytes }.into()
        }
        "trim" => Op::Trim { pool: fields.ahead().is_some().then(|| fields.pool()).transpose()? }.into(),
        "sync" => Op::Sync.into(),
        "begin_step" => {
            let key = fields.number("the key of a step, a number", u64::MAX)?;
            Op::BeginStep { pool: fields.pool_or_default()?, key }.into()
        }
        "end_step" => Op::EndStep { pool: fields.pool_or_default()? }.into(),
        "sleep" => {
            let contents = fields.contents("the treatment of the contents: keep, drop or zero")?;
            Op::Sleep { pool: fields.pool_or_default()?, contents }.into()
        }
        "wake" => Op::Wake { pool: fields.pool_or_default()? }.into(),
        "stay" => {
            let asked = match fields.ahead() {
                Some(b'w') => fields.wake().map(|()| None)?,
                _ => Some(fields.contents("the requested operation: keep, drop or zero for a sleep, or wake")?),
            };
            Op::Stay { pool: fields.pool_or_default()?, asked }.into()
        }
        "observe" => Op::Observe { observer: fields.observer()?, pool: fields.pool()? }.into(),
        "acknowledge" => Op::Acknowledge { observer: fields.observer()? }.into(),
        "forget" => Op::Forget { observer: fields.observer()? }.into(),
        "reclaim" => {
            let size_bytes = fields.size()?;
            let stream = fields.stream()?;
            Op::Reclaim { pool: fields.pool_or_default()?, stream, size_bytes }.into()
        }
        "refuse" => {
            let size_bytes = fields.size()?;
            let stream = fields.stream()?;
            let pool = fields.pool_or_default()?;
            let mut record = Record::from(Op::Refuse { pool, stream, size_bytes, refusal: fields.refusal()? });
            record.name = if fields.ahead() == Some(b'"') { Some(fields.name()?.into()) } else { None };
            Statement::Record(record)
        }
        "stream" => {
            let stream = fields.stream()?;
            let group = if fields.ahead() == Some(b'i') { fields.group()? } else { stream };
            let mut record = Record::from(Op::RegisterStream { stream, group });
            record.name = if fields.ahead() == Some(b'"') { Some(fields.name()?.into()) } else { None };
            Statement::Record(record)
        }
        "pool" => Op::CreatePool { pool: fields.pool()?, config: Box::new(fields.config::<PoolConfig>()?) }.into(),
        "destroy" => Op::DestroyPool { pool: fields.pool()? }.into(),
        "reset" => Op::ResetPool { pool: fields.pool()? }.into(),
        "config" => Statement::Config(fields.config::<Config>()?),
        "end" => Statement::End { records: fields.number("the number of records", u64::MAX)? },
        _ => return Err(fields.unknown(keyword, KEYWORDS)),
    };
    fields.finish()?;
    Ok(statement)
}

impl From<Op> for Statement {
    #[inline]
    fn from(op: Op) -> Self {
        Statement::Record(op.into())
    }
}

impl Fields<'_> {
    #[inline]
    fn id(&mut self) -> Result<AllocationId, LineError> {
        self.number("an allocation's id, a number", u64::MAX).map(AllocationId)
    }

    #[inline]
    fn size(&mut self) -> Result<u64, LineError> {
        self.number("a size in bytes", u64::MAX)
    }

    /// Parses `in sN`, the group of a stream.
    fn group(&mut self) -> Result<StreamId, LineError> {
        const WORD: &str = "`in` and the first stream of a group, a name in quotes, or the end of the line";
        let word = self.expect(WORD)?;
        if word.text == "in" { self.stream() } else { Err(self.expected(word.column, WORD)) }
    }

    /// Parses an optional pool. If there is none, returns the default pool.
    #[inline]
    fn pool_or_default(&mut self) -> Result<PoolId, LineError> {
        if self.ahead() == Some(b'p') { self.pool() } else { Ok(PoolId::DEFAULT) }
    }

    fn observer(&mut self) -> Result<ObserverId, LineError> {
        const EXPECTED: &str = "an observer: o0, o1, ...";
        let field = self.expect(EXPECTED)?;
        let digits = field.text.strip_prefix('o').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        Ok(ObserverId(self.decimal(digits, field.column, EXPECTED, u32::MAX.into())? as u32))
    }

    fn refusal(&mut self) -> Result<Refusal, LineError> {
        const EXPECTED: &str = "the reason of the refusal: limit, segment or driver";
        let field = self.expect(EXPECTED)?;
        let refusal = REFUSALS.iter().find(|(_, word)| *word == field.text);
        refusal.map(|(refusal, _)| *refusal).ok_or_else(|| self.expected(field.column, EXPECTED))
    }

    fn contents(&mut self, expected: &'static str) -> Result<Contents, LineError> {
        let field = self.expect(expected)?;
        let contents = Contents::ALL.into_iter().find(|contents| contents.word() == field.text);
        contents.ok_or_else(|| self.expected(field.column, expected))
    }

    fn wake(&mut self) -> Result<(), LineError> {
        let field = self.expect("wake")?;
        if field.text == "wake" { Ok(()) } else { Err(self.expected(field.column, "wake")) }
    }

    /// Parses `ID SIZE sN [pN] ["NAME"] [-> SEGMENT@OFFSET [revived SIZE]]`.
    #[inline]
    fn allocation(&mut self) -> Result<Record, LineError> {
        let id = self.id()?;
        let size_bytes = self.size()?;
        let stream = self.stream()?;
        let pool = self.pool_or_default()?;
        let name = if self.ahead() == Some(b'"') { Some(self.name()?.into()) } else { None };
        let placement = if self.ahead() == Some(b'-') { Some(self.placement()?) } else { None };
        let revived_bytes = if self.ahead() == Some(b'r') { Some(self.revived()?) } else { None };
        let mut record = Record::from(Op::Allocate { id, pool, stream, size_bytes });
        (record.name, record.placement, record.revived_bytes) = (name, placement, revived_bytes);
        Ok(record)
    }

    #[cold]
    fn revived(&mut self) -> Result<NonZeroU64, LineError> {
        const WORD: &str = "`revived` or the end of the line";
        const EXPECTED: &str = "the size of the block in bytes, at least 1";
        let word = self.expect(WORD)?;
        if word.text != "revived" {
            return Err(self.expected(word.column, WORD));
        }
        let field = self.expect(EXPECTED)?;
        let block_bytes = self.decimal(field.text, field.column, EXPECTED, u64::MAX)?;
        NonZeroU64::new(block_bytes).ok_or_else(|| self.expected(field.column, EXPECTED))
    }

    /// Parses `ID [pending [ENTRIES]]`.
    #[inline]
    fn free(&mut self) -> Result<Record, LineError> {
        let id = self.id()?;
        let pending = if self.ahead() == Some(b'p') { Some(self.pending()?) } else { None };
        let mut record = Record::from(Op::Free { id });
        record.pending = pending;
        Ok(record)
    }

    fn pending(&mut self) -> Result<Pending, LineError> {
        const WORD: &str = "`pending` or the end of the line";
        const EXPECTED: &str =
            "the number of records and completions that passed, at least 1, or nothing for the rest of the trace";
        let word = self.expect(WORD)?;
        if word.text != "pending" {
            return Err(self.expected(word.column, WORD));
        }
        if self.ahead().is_none() {
            return Ok(Pending::TO_THE_END);
        }
        let field = self.expect(EXPECTED)?;
        let entries = self.decimal(field.text, field.column, EXPECTED, u64::MAX)?;
        Pending::new(entries).ok_or_else(|| self.expected(field.column, EXPECTED))
    }

    fn placement(&mut self) -> Result<Placement, LineError> {
        const EXPECTED: &str = "a placement: -> SEGMENT@OFFSET";
        let arrow = self.expect(EXPECTED)?;
        if arrow.text != "->" {
            return Err(self.expected(arrow.column, EXPECTED));
        }
        let field = self.expect(EXPECTED)?;
        let (segment, offset) = field.text.split_once('@').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        let offset_column = field.column + segment.len() + 1;
        Ok(Placement {
            segment: SegmentId(self.decimal(segment, field.column, EXPECTED, u32::MAX.into())? as u32),
            offset_bytes: self.decimal(offset, offset_column, EXPECTED, u64::MAX)?,
        })
    }
}
