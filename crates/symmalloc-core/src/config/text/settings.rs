//! The settings: a text split into keys and values, each of which is checked individually.
//!
//! ```text
//! text  = [ item { "," item } [ "," ] ]          item  = key ":" value
//! value = word | "[" [ pair { "," pair } ] "]"   pair  = ( megabytes | ">" ) ":" divisions
//!       | base                                 base  = "slot:" number | "0x" hexadecimal
//! ```
//!
//! Blanks around words are ignored, as in PyTorch.

use super::error::ConfigTextError;
use super::keys::{self, Key, Of, Takes};
use super::reason::{IgnoredKey, IgnoredReason, KeyRefusal};
use crate::config::debug::DebugOptions;
use crate::config::policy::RoundupPower2Divisions;
use crate::types::base::Base;
use crate::types::units::MIB;

/// The intended reader of the text, which decides how mistakes are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// This library: duplicates and keys without effect are errors.
    Strict,
    /// PyTorch: the last of two equal keys wins, and keys without effect are listed.
    PyTorch,
}

/// The settings of a text, each key once.
#[derive(Debug)]
pub(super) struct Settings<'a> {
    pub(super) dialect: Dialect,
    stated: Vec<Setting<'a>>,
    pub(super) ignored: Vec<IgnoredKey>,
}

/// One key and its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting<'a> {
    pub(super) key: &'static Key,
    /// The name as spelled in the text.
    pub(super) name: &'static str,
    /// Offset of the key.
    pub(super) offset: usize,
    value: Value<'a>,
}

/// A value in the form that its key accepts.
#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    /// Bytes, a count, 1 for `true`, or the index of the word among those that the key accepts.
    Number(u64),
    Divisions(RoundupPower2Divisions),
    Base(Base),
    Debug(DebugOptions),
    Text(&'a str),
}

impl<'a> Settings<'a> {
    pub(super) fn parse(text: &'a str, dialect: Dialect) -> Result<Self, ConfigTextError> {
        let mut settings = Settings { dialect, stated: Vec::new(), ignored: Vec::new() };
        let mut rest = Word { text, offset: 0 }.trimmed();
        while !rest.text.is_empty() {
            let (key, value, after) = split_item(rest)?;
            let (known, name, unit) = keys::find(key.text).ok_or_else(|| ConfigTextError::UnknownKey {
                offset: key.offset,
                bytes: key.text.len(),
                nearest: keys::nearest_name(key.text),
            })?;
            settings.state((known, name, unit), key.offset, value)?;
            rest = after;
        }
        Ok(settings)
    }

    fn state(
        &mut self,
        (key, name, unit): (&'static Key, &'static str, u64),
        offset: usize,
        value: Word<'a>,
    ) -> Result<(), ConfigTextError> {
        match key.of {
            Of::Never(reason) => return Err(ConfigTextError::Refused { offset, key: name, reason }),
            Of::Nothing(reason) => return self.ignore(name, offset, reason),
            _ => {}
        }
        let value = parse_value(key.takes, name, unit, value)?;
        if let ("backend", Value::Number(1..)) = (name, value) {
            return Err(ConfigTextError::Refused { offset, key: name, reason: KeyRefusal::DriverAllocator });
        }
        let setting = Setting { key, name, offset, value };
        match self.stated.iter_mut().find(|stated| stated.key.name == key.name) {
            None => self.stated.push(setting),
            Some(stated) if self.dialect == Dialect::PyTorch => *stated = setting,
            Some(stated) => return Err(ConfigTextError::Duplicate { offset, key: name, first: stated.offset }),
        }
        Ok(())
    }

    /// Lists a key without effect as ignored. In the strict dialect, returns an error instead.
    pub(super) fn ignore(
        &mut self,
        key: &'static str,
        offset: usize,
        reason: IgnoredReason,
    ) -> Result<(), ConfigTextError> {
        match self.dialect {
            Dialect::Strict => Err(ConfigTextError::Refused { offset, key, reason: KeyRefusal::NoEffect(reason) }),
            Dialect::PyTorch => {
                self.ignored.push(IgnoredKey { offset, key, reason });
                Ok(())
            }
        }
    }

    /// Returns all settings.
    pub(super) fn stated(&self) -> &[Setting<'a>] {
        &self.stated
    }

    /// Returns the setting of this name.
    pub(super) fn find(&self, name: &str) -> Option<Setting<'a>> {
        debug_assert!(keys::is_name(name), "{name} is not a key");
        self.stated.iter().copied().find(|stated| stated.key.name == name)
    }

    /// Returns the number given for a key, or the number that its word stands for.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.find(name).and_then(|stated| if let Value::Number(number) = stated.value { Some(number) } else { None })
    }

    /// Returns the number given for a key that accepts 32 bits.
    pub(super) fn count(&self, name: &str) -> Option<u32> {
        self.number(name).map(|count| count as u32)
    }

    /// Returns the value for the word or flag that is given, or the default.
    pub(super) fn one_of<T: Copy + Default, const N: usize>(&self, name: &str, values: [T; N]) -> T {
        self.number(name).map_or_else(T::default, |at| values[at as usize])
    }

    /// Returns the given text without checking it.
    pub(super) fn text(&self, name: &str) -> Option<&'a str> {
        self.find(name).and_then(|stated| if let Value::Text(text) = stated.value { Some(text) } else { None })
    }

    pub(super) fn base(&self) -> Option<Base> {
        self.find("base").and_then(|stated| if let Value::Base(base) = stated.value { Some(base) } else { None })
    }

    /// Returns the given debugging options.
    pub(super) fn debug(&self) -> Option<DebugOptions> {
        if let Value::Debug(options) = self.find("debug")?.value { Some(options) } else { None }
    }

    pub(super) fn divisions(&self) -> Option<RoundupPower2Divisions> {
        let stated = self.find("roundup_power2_divisions")?;
        if let Value::Divisions(divisions) = stated.value { Some(divisions) } else { None }
    }
}

/// A part of the text and its offset.
#[derive(Clone, Copy, Debug)]
struct Word<'a> {
    text: &'a str,
    offset: usize,
}

impl<'a> Word<'a> {
    fn trimmed(self) -> Self {
        let text = self.text.trim_ascii_start();
        let offset = self.offset + self.text.len() - text.len();
        Word { text: text.trim_ascii_end(), offset }
    }

    /// Returns the parts before and after the first byte for which `at` returns `true`, trimmed. The byte itself
    /// belongs to neither part.
    fn split_at_first(self, at: impl Fn(char) -> bool) -> Option<(Self, Self)> {
        let (index, found) = self.text.char_indices().find(|(_, character)| at(*character))?;
        let after = index + found.len_utf8();
        let before = Word { text: &self.text[..index], offset: self.offset };
        let after = Word { text: &self.text[after..], offset: self.offset + after };
        Some((before.trimmed(), after.trimmed()))
    }

    fn end(self) -> usize {
        self.offset + self.text.len()
    }

    fn expected(offset: usize, expected: &'static str) -> ConfigTextError {
        ConfigTextError::Expected { offset, expected }
    }
}

/// Returns the key and value of the first item, and the rest after its comma.
fn split_item(rest: Word<'_>) -> Result<(Word<'_>, Word<'_>, Word<'_>), ConfigTextError> {
    let key_end = rest.text.find([':', ',', '[', ']']);
    let Some((key, after)) = rest.split_at_first(|c| matches!(c, ':' | ',' | '[' | ']')) else {
        return Err(Word::expected(rest.end(), "a colon and a value after the key"));
    };
    if key.text.is_empty() {
        return Err(Word::expected(key.offset, "a key"));
    }
    if key_end.is_some_and(|end| !rest.text[end..].starts_with(':')) {
        return Err(Word::expected(key.end(), "a colon and a value after the key"));
    }
    if after.text.starts_with('[') {
        let Some((list, after_list)) = after.split_at_first(|c| c == ']') else {
            return Err(Word::expected(after.end(), "a closing bracket"));
        };
        return match after_list.text.strip_prefix(',') {
            None if after_list.text.is_empty() => Ok((key, list, after_list)),
            None => Err(Word::expected(after_list.offset, "a comma after the list")),
            Some(text) => Ok((key, list, Word { text, offset: after_list.offset + 1 }.trimmed())),
        };
    }
    let end = Word { text: "", offset: after.end() };
    let (value, after) = after.split_at_first(|c| c == ',').unwrap_or((after, end));
    let is_unexpected = |c| matches!(c, '[' | ']') || c == ':' && !keys::takes_colon(key.text);
    match value.text.find(is_unexpected) {
        Some(at) => Err(Word::expected(value.offset + at, "a comma")),
        None if value.text.is_empty() => Err(Word::expected(value.offset, "a value")),
        None => Ok((key, value, after)),
    }
}

fn parse_value<'a>(takes: Takes, key: &'static str, unit: u64, value: Word<'a>) -> Result<Value<'a>, ConfigTextError> {
    let refused = |allowed| ConfigTextError::Value { offset: value.offset, key, allowed };
    let number = match (takes, value.text) {
        (Takes::Bytes, _) => unit * parse_number(key, value, u64::MAX / unit, "a whole number")?,
        (Takes::Count, _) => parse_number(key, value, u32::MAX.into(), "a whole number")?,
        (Takes::Flag, "false" | "False") => 0,
        (Takes::Flag, "true" | "True") => 1,
        (Takes::Flag, _) => return Err(refused("true or false")),
        (Takes::Word(words, allowed), word) => {
            words.iter().position(|known| *known == word).ok_or_else(|| refused(allowed))? as u64
        }
        (Takes::Text, text) => return Ok(Value::Text(text)),
        (Takes::Base, text) => {
            let invalid = |source| ConfigTextError::Base { offset: value.offset, source: Box::new(source) };
            return text.parse().map(Value::Base).map_err(invalid);
        }
        (Takes::Divisions, _) => return parse_divisions(key, value).map(Value::Divisions),
        (Takes::Debug, _) => return parse_debug(key, value).map(Value::Debug),
        (Takes::Anything, _) => return Err(refused("left out")),
    };
    Ok(Value::Number(number))
}

fn parse_number(key: &'static str, digits: Word<'_>, max: u64, allowed: &'static str) -> Result<u64, ConfigTextError> {
    let Word { text, offset } = digits;
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ConfigTextError::Value { offset, key, allowed });
    }
    match text.parse() {
        Ok(number) if number <= max => Ok(number),
        _ => Err(ConfigTextError::NumberTooLarge { offset, key, max }),
    }
}

/// Parses one option, or a list such as `[poison,canary,quarantine_mb:64,unmap]`.
fn parse_debug(key: &'static str, value: Word<'_>) -> Result<DebugOptions, ConfigTextError> {
    const LIST: &str = "a list of poison, canary, quarantine_mb:N and unmap, as in [poison,canary]";
    let mut rest = match value.text.strip_prefix('[') {
        Some(list) => Word { text: list, offset: value.offset + 1 }.trimmed(),
        None => value,
    };
    let mut options = DebugOptions::default();
    while !rest.text.is_empty() {
        let end = Word { text: "", offset: rest.end() };
        let (option, after) = rest.split_at_first(|c| c == ',').unwrap_or((rest, end));
        let (name, number) = option.split_at_first(|c| c == ':').map_or((option, None), |(name, n)| (name, Some(n)));
        match (name.text, number) {
            ("poison", None) => options.poison = true,
            ("canary", None) => options.canary = true,
            ("unmap", None) => options.unmap = true,
            ("quarantine_mb", Some(number)) => {
                options.quarantine_bytes = MIB * parse_number(key, number, u64::MAX / MIB, LIST)?;
            }
            ("quarantine_bytes", Some(number)) => {
                options.quarantine_bytes = parse_number(key, number, u64::MAX, LIST)?;
            }
            _ => return Err(ConfigTextError::Value { offset: option.offset, key, allowed: LIST }),
        }
        rest = after;
    }
    Ok(options)
}

/// Parses one number for all sizes, or a list such as `[256:1,512:2,1024:4,>:8]`, with PyTorch's index rule.
///
/// Sizes are in MiB and powers of two. Entry `s:d` sets the divisions of sizes from s MiB up to 2 s MiB. The first
/// entry also covers all smaller sizes, and `>:d` covers all sizes beyond the entry before it, or all sizes if it comes
/// first. Sizes between two entries that are not adjacent are not rounded.
fn parse_divisions(key: &'static str, value: Word<'_>) -> Result<RoundupPower2Divisions, ConfigTextError> {
    const LIST: &str = "a power of two, or a list of MiB:DIVISIONS as in [256:1,512:2,1024:4,>:8]";
    const DIVISIONS: &str = "divided into zero or a power of two of steps";
    const SIZE: &str = "listed by sizes in MiB that are powers of two, and a `>` for all beyond them";
    let refused = |offset, allowed| ConfigTextError::Value { offset, key, allowed };
    let divisions_of = |word: Word<'_>| match parse_number(key, word, 1 << 31, DIVISIONS)? {
        0 => Ok(0),
        divisions if divisions.is_power_of_two() => Ok(divisions as u32),
        _ => Err(refused(word.offset, DIVISIONS)),
    };

    let mut by_size = [0_u32; 16];
    let Some(list) = value.text.strip_prefix('[') else {
        by_size = [divisions_of(value)?; 16];
        return RoundupPower2Divisions::per_size(by_size).map_err(|_| refused(value.offset, LIST));
    };
    let mut rest = Word { text: list, offset: value.offset + 1 }.trimmed();
    let mut last = None;
    while !rest.text.is_empty() {
        let end = Word { text: "", offset: rest.end() };
        let (pair, after) = rest.split_at_first(|c| c == ',').unwrap_or((rest, end));
        let (size, divisions) = pair.split_at_first(|c| c == ':').ok_or_else(|| refused(pair.offset, LIST))?;
        let divisions = divisions_of(divisions)?;
        if size.text == ">" {
            by_size[last.map_or(0, |last| last + 1)..].fill(divisions);
        } else {
            let mebibytes = parse_number(key, size, u64::MAX, SIZE)?;
            if !mebibytes.is_power_of_two() {
                return Err(refused(size.offset, SIZE));
            }
            let index = (mebibytes.ilog2() as usize).min(by_size.len() - 1);
            if last.is_none() {
                by_size[..index].fill(divisions);
            }
            by_size[index] = divisions;
            last = Some(index);
        }
        rest = after;
    }
    RoundupPower2Divisions::per_size(by_size).map_err(|_| refused(value.offset, LIST))
}
