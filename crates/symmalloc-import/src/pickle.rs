//! A reader for pickles of dicts, lists, numbers and text, as `pickle.dump` writes them in protocols 2 to 5.
//!
//! Python's own reader runs code that a pickle names, keeps every memoized object, and is written in Python. This reader must process
//! untrusted memory snapshots of 100 MB and more. It therefore
//!
//! * **executes nothing.** Opcodes that import, call or load objects cause an error that states their name and offset;
//! * **keeps almost nothing.** Values are pruned to the caller's vocabulary while they are read (see [`values`]). This takes one pass from
//!   start to end, so the source can be a pipe;
//! * **trusts nothing.** Memory is never allocated for a stated length. Memo indices must ascend. A value that is shared or that contains
//!   itself remains one value: the reader neither expands it nor recurses.
//!
//! A pickle is a program for a stack machine:
//!
//! ```text
//! {'size': 512}      PROTO 4 | EMPTY_DICT  MEMOIZE   SHORT_BINUNICODE "size"  MEMOIZE   BININT2 512   SETITEM | STOP
//!   stack:                     {}          {}        {} "size"                {} "size" {} "size" 512  {..}
//!   memo:                                  0: {}                              1: "size"
//! ```
//!
//! Memory: 16 bytes for each value on the stack and for each memoized value, plus what [`values`] keeps. The total is at most 48 bytes per
//! opcode, plus the kept text. A real snapshot takes twice the length of its pickle without stack frames, and half of it with them. The
//! caller sets a limit on the total. Time: linear in the input.

use std::io::Read;

use symmalloc_trace::NAME_BYTES_MAX;

mod error;
mod input;
mod opcode;
mod output;
mod values;

pub use error::PickleError;
pub(crate) use output::{Memo, PickleWriter};
pub(crate) use values::{DictId, Item, Keeps, Kept, LEADING_MAX, List, ListId, Value, Values, Word};

use crate::options::MemoryLimit;
use input::Input;
use values::ArenaFull;

/// Maximum distance of a memo index from the next expected one. All known writers count up from 0 or 1.
const MEMO_GAP_MAX: usize = 1;

/// Number of opcodes between two checks of the memory limit.
const OPCODES_PER_LIMIT_CHECK: u64 = 1024;

/// Maximum length of kept text that is not in the vocabulary, in bytes.
const TEXT_BYTES_MAX: u64 = NAME_BYTES_MAX as u64;

/// A parsed pickle: one value.
pub(crate) struct Document {
    pub(crate) root: Value,
    pub(crate) values: Values,
}

/// The parts of a pickle that the reader keeps.
#[derive(Clone, Copy)]
pub(crate) struct Vocabulary<'a> {
    /// The words: text that is always kept. There are at most 256; [`Word`] is an index into them.
    pub(crate) words: &'static [&'static str],
    /// Words whose values are kept as text even if they are not words themselves, up to [`TEXT_BYTES_MAX`] bytes.
    pub(crate) texts_of: &'static [Word],
    /// Words whose values are lists that are stored only once for equal contents.
    pub(crate) shared_lists_of: &'static [Word],
    /// The rule that selects which dicts are kept in lists.
    pub(crate) keeps: Keeps<'a>,
}

/// Reads a pickle that extends to the end of `source`, within a limit on memory.
pub(crate) fn read<R: Read>(
    source: R,
    vocabulary: Vocabulary<'_>,
    limit: impl Into<MemoryLimit>,
) -> Result<Document, PickleError> {
    Machine::new(source, vocabulary, limit.into()).run()
}

/// A frame of protocol 4 or 5: a stated number of bytes that contain whole opcodes.
#[derive(Clone, Copy)]
struct Frame {
    /// Offset of the frame's opcode.
    offset: u64,
    length_bytes: u64,
    /// Offset at which the frame ends. An opcode must end there as well.
    end: u64,
}

impl Frame {
    fn wrong_length(self) -> PickleError {
        PickleError::FrameLength { offset: self.offset, length_bytes: self.length_bytes }
    }
}

struct Machine<'a, R> {
    input: Input<R>,
    vocabulary: Vocabulary<'a>,
    /// Length of the longest word in bytes.
    word_bytes_max: usize,
    limit: MemoryLimit,
    /// Offset of the current opcode.
    offset: u64,
    frame: Option<Frame>,
    stack: Vec<Value>,
    /// Stack heights in ascending order. Opcodes cannot reach items below the last one.
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    values: Values,
}

impl<'a, R: Read> Machine<'a, R> {
    fn new(source: R, vocabulary: Vocabulary<'a>, limit: MemoryLimit) -> Self {
        assert!(vocabulary.words.len() <= 256, "a word's number has 8 bits");
        Machine {
            input: Input::new(source),
            vocabulary,
            word_bytes_max: vocabulary.words.iter().map(|word| word.len()).max().unwrap_or(0),
            limit,
            offset: 0,
            frame: None,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            values: Values::default(),
        }
    }

    fn run(mut self) -> Result<Document, PickleError> {
        let [first, second] = self.input.array()?;
        if first != opcode::PROTO || !(2..=5).contains(&second) {
            return Err(PickleError::Protocol { first, second });
        }
        for opcodes in 0u64.. {
            if opcodes.is_multiple_of(OPCODES_PER_LIMIT_CHECK) {
                self.check_limit()?;
            }
            self.offset = self.input.offset();
            self.check_frame()?;
            match self.input.byte()? {
                opcode::STOP => break,
                opcode => self.execute(opcode)?,
            }
        }
        self.stop()
    }

    /// Executes one opcode.
    fn execute(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            opcode::BINGET => {
                let [index] = self.input.array()?;
                self.fetch(index.into())
            }
            opcode::LONG_BINGET => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.fetch(index)
            }
            opcode::MEMOIZE => self.memoize(),
            opcode::BINPUT => {
                let [index] = self.input.array()?;
                self.store(index.into())
            }
            opcode::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.input.array()?);
                self.store(index)
            }

            opcode::SHORT_BINUNICODE | opcode::SHORT_BINSTRING => {
                let [length] = self.input.array()?;
                self.push_text(length.into())
            }
            opcode::BINUNICODE | opcode::BINSTRING => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.push_text(length.into())
            }
            opcode::BINUNICODE8 => {
                let length = u64::from_le_bytes(self.input.array()?);
                self.push_text(length)
            }
            opcode::SHORT_BINBYTES => {
                let [length] = self.input.array()?;
                self.push_skipped(length.into())
            }
            opcode::BINBYTES => {
                let length = u32::from_le_bytes(self.input.array()?);
                self.push_skipped(length.into())
            }
            opcode::BINBYTES8 | opcode::BYTEARRAY8 => {
                let length = u64::from_le_bytes(self.input.array()?);
                self.push_skipped(length)
            }
            opcode::BINFLOAT => self.push_skipped(8),
            opcode::NONE | opcode::NEWFALSE | opcode::EMPTY_SET => self.push(Value::Nothing),
            opcode::NEWTRUE => self.push(Value::True),

            opcode::BININT1 => {
                let [integer] = self.input.array()?;
                self.push(Value::Integer(integer.into()))
            }
            opcode::BININT2 => {
                let integer = u16::from_le_bytes(self.input.array()?);
                self.push(Value::Integer(integer.into()))
            }
            opcode::BININT => {
                let integer = i32::from_le_bytes(self.input.array()?);
                self.push(u64::try_from(integer).map_or(Value::OutOfRange, Value::Integer))
            }
            opcode::LONG1 => {
                let [length] = self.input.array()?;
                self.push_long(length.into())
            }
            opcode::LONG4 => {
                // The format defines the length as signed. A negative length, read as unsigned, exceeds any input.
                let length = u32::from_le_bytes(self.input.array()?);
                self.push_long(length)
            }

            opcode::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            opcode::EMPTY_DICT => {
                let dict = self.values.new_dict();
                self.push_new(dict)
            }
            opcode::EMPTY_LIST | opcode::EMPTY_TUPLE => {
                let list = self.values.new_list();
                self.push_new(list)
            }
            opcode::SETITEM => self.set_items_from(2),
            opcode::SETITEMS => {
                let count = self.above_mark()?;
                self.set_items_from(count)
            }
            opcode::APPEND => self.append_items_from(1),
            opcode::APPENDS => {
                let count = self.above_mark()?;
                self.append_items_from(count)
            }
            opcode::TUPLE1 => self.push_tuple(1),
            opcode::TUPLE2 => self.push_tuple(2),
            opcode::TUPLE3 => self.push_tuple(3),
            opcode::TUPLE => {
                let count = self.above_mark()?;
                self.push_tuple(count)
            }
            opcode::ADDITEMS => {
                let count = self.above_mark()?;
                self.drop_top(count)?;
                self.top().map(|_| ())
            }
            opcode::FROZENSET => {
                let count = self.above_mark()?;
                self.drop_top(count)?;
                self.push(Value::Nothing)
            }
            opcode::POP => match self.marks.last() {
                Some(mark) if *mark == self.stack.len() => {
                    self.marks.pop();
                    Ok(())
                }
                _ => self.drop_top(1),
            },
            opcode::POP_MARK => {
                let count = self.above_mark()?;
                self.drop_top(count)
            }
            opcode::DUP => {
                let top = self.top()?;
                self.push(top)
            }
            opcode::FRAME => self.begin_frame(),
            byte => Err(match opcode::executing(byte) {
                Some(opcode) => PickleError::Executes { opcode, offset: self.offset },
                None => PickleError::UnknownOpcode { byte, offset: self.offset },
            }),
        }
    }

    fn stop(mut self) -> Result<Document, PickleError> {
        let end = self.input.offset();
        if let Some(frame) = self.frame.filter(|frame| frame.end != end) {
            return Err(frame.wrong_length());
        }
        if !self.input.at_end()? {
            return Err(PickleError::TrailingBytes { offset: end });
        }
        match self.stack[..] {
            [root] if self.marks.is_empty() => Ok(Document { root, values: self.values }),
            _ => Err(PickleError::Unfinished { offset: self.offset, values: self.stack.len() as u64 }),
        }
    }

    // Frames and the limit.

    fn begin_frame(&mut self) -> Result<(), PickleError> {
        let length_bytes = u64::from_le_bytes(self.input.array()?);
        let end = self.input.offset().checked_add(length_bytes);
        let frame = Frame { offset: self.offset, length_bytes, end: end.unwrap_or(u64::MAX) };
        match self.frame {
            Some(outer) => Err(outer.wrong_length()),
            None => {
                self.frame = Some(frame);
                Ok(())
            }
        }
    }

    /// Checks, at the start of an opcode, that no frame ended inside the previous one.
    #[inline]
    fn check_frame(&mut self) -> Result<(), PickleError> {
        match self.frame {
            Some(frame) if frame.end <= self.offset => {
                self.frame = None;
                if frame.end == self.offset { Ok(()) } else { Err(frame.wrong_length()) }
            }
            _ => Ok(()),
        }
    }

    fn check_limit(&self) -> Result<(), PickleError> {
        let stack = self.stack.len() * size_of::<Value>() + self.marks.len() * size_of::<usize>();
        let memo = self.memo.len() * size_of::<Option<Value>>();
        let held_bytes = (stack + memo) as u64 + self.values.held_bytes();
        if held_bytes > self.limit.bytes() { Err(self.too_large()) } else { Ok(()) }
    }

    fn too_large(&self) -> PickleError {
        PickleError::TooLarge { limit_bytes: self.limit.bytes(), offset: self.offset }
    }

    // The stack.

    #[inline]
    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.stack.push(value);
        Ok(())
    }

    fn push_new(&mut self, made: Result<Value, ArenaFull>) -> Result<(), PickleError> {
        let value = made.map_err(|ArenaFull| self.too_large())?;
        self.push(value)
    }

    fn push_skipped(&mut self, length_bytes: u64) -> Result<(), PickleError> {
        self.input.skip(length_bytes)?;
        self.push(Value::Nothing)
    }

    fn push_text(&mut self, length_bytes: u64) -> Result<(), PickleError> {
        // No word is longer than 255 bytes, so any text that could be a word fits into the array.
        let mut text = [0; 256];
        if (1..=TEXT_BYTES_MAX).contains(&length_bytes) && self.is_text_key(self.stack.last()) {
            return self.push_kept_text(length_bytes as usize);
        }
        if length_bytes > self.word_bytes_max.min(text.len()) as u64 {
            self.input.skip(length_bytes)?;
            return self.push(Value::UnusedText);
        }
        let text = &mut text[..length_bytes as usize];
        self.input.fill(text)?;
        let word = word_of(self.vocabulary.words, text);
        self.push(word.unwrap_or(Value::UnusedText))
    }

    /// Pushes text after a key whose texts are all kept. A word of the vocabulary remains a word, because it may also be shared with a
    /// different key.
    fn push_kept_text(&mut self, length_bytes: usize) -> Result<(), PickleError> {
        let mut text = vec![0; length_bytes];
        self.input.fill(&mut text)?;
        let value = match (word_of(self.vocabulary.words, &text), std::str::from_utf8(&text)) {
            (Some(word), _) => Ok(word),
            (None, Ok(text)) => self.values.new_text(text),
            (None, Err(_)) => Ok(Value::UnusedText),
        };
        self.push_new(value)
    }

    fn is_text_key(&self, key: Option<&Value>) -> bool {
        matches!(key, Some(Value::Word(key)) if self.vocabulary.texts_of.contains(key))
    }

    /// Pushes an integer in little-endian two's complement of any length. Length zero means 0.
    fn push_long(&mut self, length_bytes: u32) -> Result<(), PickleError> {
        let mut low = [0; 8];
        let low_bytes = length_bytes.min(8) as usize;
        self.input.fill(&mut low[..low_bytes])?;
        let mut last = if low_bytes == 0 { 0 } else { low[low_bytes - 1] };
        let mut high_is_zero = true;
        for _ in 8..length_bytes {
            last = self.input.byte()?;
            high_is_zero &= last == 0;
        }
        let negative = last & 0x80 != 0;
        self.push(if negative || !high_is_zero { Value::OutOfRange } else { Value::Integer(u64::from_le_bytes(low)) })
    }

    /// Returns the lowest stack position that opcodes may reach.
    #[inline]
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    /// Removes the last mark, and returns the number of values above it.
    fn above_mark(&mut self) -> Result<usize, PickleError> {
        let mark = self.marks.pop().ok_or(PickleError::StackUnderflow { offset: self.offset })?;
        Ok(self.stack.len() - mark)
    }

    /// Returns the position of the lowest of the topmost `count` values.
    #[inline]
    fn start_of(&self, count: usize) -> Result<usize, PickleError> {
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= self.floor());
        start.ok_or(PickleError::StackUnderflow { offset: self.offset })
    }

    fn drop_top(&mut self, count: usize) -> Result<(), PickleError> {
        let start = self.start_of(count)?;
        self.stack.truncate(start);
        Ok(())
    }

    fn top(&self) -> Result<Value, PickleError> {
        let start = self.start_of(1)?;
        Ok(self.stack[start])
    }

    // Containers.

    /// Stores the topmost `count / 2` pairs in the dict below them.
    fn set_items_from(&mut self, count: usize) -> Result<(), PickleError> {
        let container = self.start_of(count + 1)?;
        let Value::Dict(dict) = self.stack[container] else { return Err(self.wrong_container()) };
        let pairs = self.stack[container + 1..].chunks_exact(2);
        if !pairs.remainder().is_empty() {
            return Err(self.wrong_container());
        }
        for pair in pairs {
            // Omits a text field that has no text. Most entries have none, so storing the field would cost one field
            // per entry.
            if matches!(pair[1], Value::Nothing | Value::True | Value::UnusedText) && self.is_text_key(pair.first()) {
                continue;
            }
            let value = match (pair[0], pair[1]) {
                (Value::Word(key), Value::List(list)) if self.vocabulary.shared_lists_of.contains(&key) => {
                    Value::List(self.values.share(list))
                }
                (_, value) => value,
            };
            if self.values.set(dict, pair[0], value).is_err() {
                return Err(self.too_large());
            }
        }
        self.stack.truncate(container + 1);
        Ok(())
    }

    /// Appends the topmost `count` values to the list below them.
    fn append_items_from(&mut self, count: usize) -> Result<(), PickleError> {
        let container = self.start_of(count + 1)?;
        let Value::List(list) = self.stack[container] else { return Err(self.wrong_container()) };
        for value in &self.stack[container + 1..] {
            self.values.append(list, *value, self.vocabulary.keeps);
        }
        self.stack.truncate(container + 1);
        Ok(())
    }

    /// Replaces the topmost `count` values with a tuple.
    fn push_tuple(&mut self, count: usize) -> Result<(), PickleError> {
        let start = self.start_of(count)?;
        if let [Value::Integer(first), Value::Integer(second)] = self.stack[start..]
            && let (Ok(first), Ok(second)) = (first.try_into(), second.try_into())
        {
            self.stack.truncate(start);
            return self.push(Value::Pair(first, second));
        }
        let tuple = self.values.new_list().map_err(|ArenaFull| self.too_large())?;
        if let Value::List(list) = tuple {
            for value in &self.stack[start..] {
                self.values.append(list, *value, self.vocabulary.keeps);
            }
        }
        self.stack.truncate(start);
        self.push(tuple)
    }

    fn wrong_container(&self) -> PickleError {
        PickleError::WrongContainer { offset: self.offset }
    }

    // The memo.

    fn memoize(&mut self) -> Result<(), PickleError> {
        let top = self.top()?;
        self.memo.push(Some(top));
        Ok(())
    }

    fn store(&mut self, index: u32) -> Result<(), PickleError> {
        let top = self.top()?;
        let (position, stored) = (index as usize, self.memo.len());
        if position > stored + MEMO_GAP_MAX {
            return Err(PickleError::MemoGap { index, stored: stored as u64, offset: self.offset });
        }
        if position >= stored {
            self.memo.resize(position + 1, None);
        }
        self.memo[position] = Some(top);
        Ok(())
    }

    #[inline]
    fn fetch(&mut self, index: u32) -> Result<(), PickleError> {
        match self.memo.get(index as usize) {
            Some(Some(value)) => self.push(*value),
            _ => Err(PickleError::NotInMemo { index, offset: self.offset }),
        }
    }
}

fn word_of(vocabulary: &[&str], text: &[u8]) -> Option<Value> {
    let position = vocabulary.iter().position(|word| word.as_bytes() == text);
    position.map(|position| Value::Word(Word(position as u8)))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod writer;
