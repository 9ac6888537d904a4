//! One line of a trace, read by itself: fields to a [`Statement`].
//!
//! ```text
//! line       = [ keyword { field } ] [ "#" comment ]        fields are separated by spaces or tabs
//! id, size   = decimal digits                stream = "s" digits          pool = "p" digits
//! name       = '"' { character | escape } '"'               placement = "->" segment "@" offset
//! ```
//!
//! Nothing is allocated but a name and a configuration, which are rare. What the lines before said is the ledger's
//! business.

use super::error::TraceError;
use crate::config::{Config, PoolConfig};
use crate::config_text::ConfigTextError;
use crate::ids::{AllocationId, Placement, PoolId, SegmentId, StreamId};
use crate::nearest::nearest;
use crate::op::{Op, Record};

/// The words that a line can start with, after the first line.
pub(super) const KEYWORDS: [&str; 13] =
    ["a", "f", "u", "wait", "synchronize", "reserve", "trim", "sync", "stream", "pool", "destroy", "config", "end"];

/// What a line says.
#[derive(Debug)]
pub(super) enum Statement {
    /// Blank, or a comment.
    Nothing,
    /// The allocator's configuration.
    Config(Config),
    /// A record.
    Record(Record),
    /// The end of the trace.
    End {
        /// How many records it states.
        records: u64,
    },
}

/// Reads one line, given without its line break.
#[inline]
pub(super) fn parse(line: u64, text: &str) -> Result<Statement, TraceError> {
    let mut fields = Fields { line, text, at: 0 };
    let Some(keyword) = fields.next() else { return Ok(Statement::Nothing) };
    let statement = match keyword.text {
        "a" => Statement::Record(fields.allocation()?),
        "f" => Op::Free { id: fields.id()? }.into(),
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
        "stream" => Op::RegisterStream { stream: fields.stream()? }.into(),
        "pool" => Op::CreatePool { pool: fields.pool()?, config: Box::new(fields.config::<PoolConfig>()?) }.into(),
        "destroy" => Op::DestroyPool { pool: fields.pool()? }.into(),
        "config" => Statement::Config(fields.config::<Config>()?),
        "end" => Statement::End { records: fields.number("the number of records", u64::MAX)? },
        word => {
            return Err(TraceError::UnknownKeyword { line, column: keyword.column, nearest: nearest(word, KEYWORDS) });
        }
    };
    match fields.next() {
        None => Ok(statement),
        Some(rest) => Err(TraceError::TrailingField { line, column: rest.column }),
    }
}

impl From<Op> for Statement {
    #[inline]
    fn from(op: Op) -> Self {
        Statement::Record(op.into())
    }
}

/// The fields of a line from `at` on.
struct Fields<'a> {
    line: u64,
    text: &'a str,
    /// A byte of `text`, always at a character's start.
    at: usize,
}

/// A field and the byte it starts at, counted from 1.
#[derive(Clone, Copy)]
struct Field<'a> {
    text: &'a str,
    column: usize,
}

impl<'a> Fields<'a> {
    /// The first byte of the next field, or nothing at the end of the line or at a comment.
    #[inline]
    fn ahead(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\t') = bytes.get(self.at) {
            self.at += 1;
        }
        bytes.get(self.at).copied().filter(|byte| *byte != b'#')
    }

    #[inline]
    fn next(&mut self) -> Option<Field<'a>> {
        self.ahead()?;
        let start = self.at;
        let bytes = &self.text.as_bytes()[start..];
        self.at += bytes.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(bytes.len());
        Some(Field { text: &self.text[start..self.at], column: start + 1 })
    }

    #[inline]
    fn expect(&mut self, expected: &'static str) -> Result<Field<'a>, TraceError> {
        // At a comment or the end, `at` is where the field is missing.
        self.next().ok_or_else(|| self.expected(self.at + 1, expected))
    }

    #[cold]
    fn expected(&self, column: usize, expected: &'static str) -> TraceError {
        TraceError::Expected { line: self.line, column, expected }
    }

    /// The number that `digits` spell, which start at `column`.
    #[inline]
    fn decimal(&self, digits: &str, column: usize, expected: &'static str, max: u64) -> Result<u64, TraceError> {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.expected(column, expected));
        }
        digits
            .bytes()
            .try_fold(0_u64, |value, digit| value.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
            .filter(|value| *value <= max)
            .ok_or(TraceError::NumberTooLarge { line: self.line, column, max })
    }

    #[inline]
    fn number(&mut self, expected: &'static str, max: u64) -> Result<u64, TraceError> {
        let field = self.expect(expected)?;
        self.decimal(field.text, field.column, expected, max)
    }

    #[inline]
    fn id(&mut self) -> Result<AllocationId, TraceError> {
        self.number("an allocation's id, a number", u64::MAX).map(AllocationId)
    }

    #[inline]
    fn size(&mut self) -> Result<u64, TraceError> {
        self.number("a size in bytes", u64::MAX)
    }

    #[inline]
    fn stream(&mut self) -> Result<StreamId, TraceError> {
        const EXPECTED: &str = "a stream: s0, s1, ...";
        let field = self.expect(EXPECTED)?;
        let digits = field.text.strip_prefix('s').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        Ok(StreamId(self.decimal(digits, field.column, EXPECTED, u16::MAX.into())? as u16))
    }

    #[inline]
    fn pool(&mut self) -> Result<PoolId, TraceError> {
        const EXPECTED: &str = "a pool: p0, p1, ...";
        let field = self.expect(EXPECTED)?;
        let digits = field.text.strip_prefix('p').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        Ok(PoolId(self.decimal(digits, field.column, EXPECTED, u32::MAX.into())? as u32))
    }

    /// A pool that may be left out: then it is the default pool.
    #[inline]
    fn pool_or_default(&mut self) -> Result<PoolId, TraceError> {
        if self.ahead() == Some(b'p') { self.pool() } else { Ok(PoolId::DEFAULT) }
    }

    /// `ID SIZE sN [pN] ["NAME"] [-> SEGMENT@OFFSET]`
    #[inline]
    fn allocation(&mut self) -> Result<Record, TraceError> {
        let id = self.id()?;
        let size_bytes = self.size()?;
        let stream = self.stream()?;
        let pool = self.pool_or_default()?;
        let name = if self.ahead() == Some(b'"') { Some(self.name()?) } else { None };
        let placement = if self.ahead() == Some(b'-') { Some(self.placement()?) } else { None };
        Ok(Record { op: Op::Allocate { id, pool, stream, size_bytes }, name, placement })
    }

    fn placement(&mut self) -> Result<Placement, TraceError> {
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

    /// A name in double quotes, the first of which is ahead.
    fn name(&mut self) -> Result<Box<str>, TraceError> {
        const CLOSED: &str = "the closing quote of the name, then a space or the end of the line";
        let start = self.at + 1;
        let mut name = String::new();
        let mut characters = self.text[start..].char_indices();
        let end = loop {
            let (at, character) = characters.next().ok_or_else(|| self.expected(self.text.len() + 1, CLOSED))?;
            match character {
                '"' => break start + at + 1,
                '\\' => match unescape(&mut characters) {
                    Some(character) => name.push(character),
                    None => {
                        let expected = r#"one of the escapes \" \\ \n \r \t \u{HEX}"#;
                        return Err(self.expected(start + at + 1, expected));
                    }
                },
                _ => name.push(character),
            }
        };
        if !matches!(self.text.as_bytes().get(end), None | Some(b' ' | b'\t')) {
            return Err(self.expected(end + 1, CLOSED));
        }
        self.at = end;
        Ok(name.into())
    }

    /// A configuration, which reaches to the end of the line or to a comment. Nothing: the defaults.
    fn config<C>(&mut self) -> Result<C, TraceError>
    where
        C: std::str::FromStr<Err = ConfigTextError>,
    {
        self.ahead();
        let start = self.at;
        let text = &self.text[start..];
        let text = text.find('#').map_or(text, |comment| &text[..comment]);
        self.at += text.len();
        text.parse().map_err(|source| TraceError::Config { line: self.line, column: start + 1, source })
    }
}

/// The character that an escape stands for, given what follows the backslash.
fn unescape(characters: &mut std::str::CharIndices<'_>) -> Option<char> {
    match characters.next()?.1 {
        'n' => Some('\n'),
        'r' => Some('\r'),
        't' => Some('\t'),
        plain @ ('"' | '\\') => Some(plain),
        'u' => {
            let rest = characters.as_str().strip_prefix('{')?;
            let (digits, _) = rest.split_once('}')?;
            if digits.is_empty() || digits.len() > 6 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return None;
            }
            // Past the digits and both braces.
            characters.nth(digits.len() + 1);
            char::from_u32(u32::from_str_radix(digits, 16).ok()?)
        }
        _ => None,
    }
}
