//! The fields of one line, read from left to right.
//!
//! Only names and configurations allocate memory, and both are rare.

use super::document::Line;
use super::error::LineError;
use symmalloc_core::config_text::{ConfigTextError, nearest};
use symmalloc_core::ids::{PoolId, StreamGroup, StreamId};

/// Word for the heap of a pool whose streams share one heap.
pub(crate) const SHARED: &str = "shared";

/// The remaining fields of a line, from `at` on.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    line: u64,
    text: &'a str,
    /// Byte offset into `text`. It is always at a character boundary.
    at: usize,
}

/// A field of a line.
#[derive(Clone, Copy)]
pub(crate) struct Field<'a> {
    pub(crate) text: &'a str,
    /// Column of its first byte, from 1.
    pub(crate) column: usize,
}

impl<'a> Fields<'a> {
    /// Creates the fields of a line, given without its line break.
    #[inline]
    pub(crate) fn new(line: u64, text: &'a str) -> Self {
        Fields { line, text, at: 0 }
    }

    /// Checks that the rest of the line is empty or a comment.
    #[inline]
    pub(crate) fn finish(&mut self) -> Result<(), LineError> {
        match self.next() {
            None => Ok(()),
            Some(rest) => Err(LineError::TrailingField { line: self.line, column: rest.column }),
        }
    }

    /// Parses the rest of a document's `end` line.
    pub(crate) fn end<S>(mut self) -> Result<Line<S>, LineError> {
        let stated = self.number("the number of lines", u64::MAX)?;
        self.finish()?;
        Ok(Line::End(stated))
    }

    /// Returns the first byte of the next field, or `None` if the line ends or a comment begins.
    #[inline]
    pub(crate) fn ahead(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\t') = bytes.get(self.at) {
            self.at += 1;
        }
        bytes.get(self.at).copied().filter(|byte| *byte != b'#')
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Option<Field<'a>> {
        self.ahead()?;
        let start = self.at;
        let bytes = &self.text.as_bytes()[start..];
        self.at += bytes.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(bytes.len());
        Some(Field { text: &self.text[start..self.at], column: start + 1 })
    }

    #[inline]
    pub(crate) fn expect(&mut self, expected: &'static str) -> Result<Field<'a>, LineError> {
        // At a comment or the end of the line, `at` is the position of the missing field.
        self.next().ok_or_else(|| self.expected(self.at + 1, expected))
    }

    #[cold]
    pub(crate) fn expected(&self, column: usize, expected: &'static str) -> LineError {
        LineError::Expected { line: self.line, column, expected }
    }

    /// Returns the error for an unknown keyword.
    #[cold]
    pub(crate) fn unknown(&self, keyword: Field<'_>, keywords: &'static [&'static str]) -> LineError {
        let nearest = nearest(keyword.text, keywords.iter().copied());
        LineError::UnknownKeyword { line: self.line, column: keyword.column, nearest, keywords }
    }

    /// Parses the decimal number `digits`, which starts at `column`.
    #[inline]
    pub(crate) fn decimal(
        &self,
        digits: &str,
        column: usize,
        expected: &'static str,
        max: u64,
    ) -> Result<u64, LineError> {
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(self.expected(column, expected));
        }
        digits
            .bytes()
            .try_fold(0_u64, |value, digit| value.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
            .filter(|value| *value <= max)
            .ok_or(LineError::NumberTooLarge { line: self.line, column, max })
    }

    #[inline]
    pub(crate) fn number(&mut self, expected: &'static str, max: u64) -> Result<u64, LineError> {
        let field = self.expect(expected)?;
        self.decimal(field.text, field.column, expected, max)
    }

    #[inline]
    pub(crate) fn stream(&mut self) -> Result<StreamId, LineError> {
        const EXPECTED: &str = "a stream: s0, s1, ...";
        let field = self.expect(EXPECTED)?;
        let digits = field.text.strip_prefix('s').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        Ok(StreamId(self.decimal(digits, field.column, EXPECTED, StreamId::MAX.0.into())? as u16))
    }

    #[inline]
    pub(crate) fn pool(&mut self) -> Result<PoolId, LineError> {
        const EXPECTED: &str = "a pool: p0, p1, ...";
        let field = self.expect(EXPECTED)?;
        let digits = field.text.strip_prefix('p').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        Ok(PoolId(self.decimal(digits, field.column, EXPECTED, u32::MAX.into())? as u32))
    }

    /// Parses the streams of a heap: `sN` for a single stream, `sN+` for a group named after its first stream, or
    /// `shared`.
    pub(crate) fn stream_group(&mut self) -> Result<StreamGroup, LineError> {
        const EXPECTED: &str = "a stream (s0, s1, ...), a group (s0+, s1+, ...), or `shared`";
        let field = self.expect(EXPECTED)?;
        if field.text == SHARED {
            return Ok(StreamGroup::All);
        }
        let digits = field.text.strip_prefix('s').ok_or_else(|| self.expected(field.column, EXPECTED))?;
        let first = digits.strip_suffix('+');
        let number = self.decimal(first.unwrap_or(digits), field.column, EXPECTED, StreamId::MAX.0.into())?;
        let stream = StreamId(number as u16);
        Ok(if first.is_some() { StreamGroup::Group(stream) } else { StreamGroup::One(stream) })
    }

    /// Parses a name in double quotes. The caller has seen the opening quote.
    pub(crate) fn name(&mut self) -> Result<Box<str>, LineError> {
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

    /// Parses a configuration, which extends to the end of the line or to a comment. Empty text selects the defaults.
    pub(crate) fn config<C>(&mut self) -> Result<C, LineError>
    where
        C: std::str::FromStr<Err = ConfigTextError>,
    {
        self.ahead();
        let start = self.at;
        let text = &self.text[start..];
        let text = text.find('#').map_or(text, |comment| &text[..comment]);
        self.at += text.len();
        text.parse().map_err(|source| LineError::Config { line: self.line, column: start + 1, source })
    }
}

/// Returns the character of an escape sequence, given the text after the backslash.
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
            // Skip the digits and both braces.
            characters.nth(digits.len() + 1);
            char::from_u32(u32::from_str_radix(digits, 16).ok()?)
        }
        _ => None,
    }
}
