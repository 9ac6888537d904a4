//! Writer for pickles of dicts, lists, numbers and text. It writes protocol 2, which every Python 3 and PyTorch's own reader accept.
//!
//! Repeated text and values are written once and then fetched from the memo, so that a million trace entries do not contain
//! `free_requested` a million times. The output depends only on the calls: equal calls produce equal bytes.

use std::collections::HashMap;
use std::io::{self, Write};

use super::opcode;

/// Batch size of Python's own writer.
const BATCH_ITEMS: usize = 1000;

/// A reference to a value in the memo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memo(u32);

/// A pickle being written to `sink`.
///
/// Dicts and lists are opened, filled and closed. In a dict, each value follows its key.
pub(crate) struct PickleWriter<W> {
    sink: W,
    memo_count: u32,
    /// Text that was already written. Never iterated.
    texts: HashMap<Box<str>, Memo>,
}

impl<W: Write> PickleWriter<W> {
    pub(crate) fn new(mut sink: W) -> io::Result<Self> {
        sink.write_all(&[opcode::PROTO, 2])?;
        Ok(PickleWriter { sink, memo_count: 0, texts: HashMap::new() })
    }

    /// Ends the pickle.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.sink.write_all(&[opcode::STOP])?;
        Ok(self.sink)
    }

    pub(crate) fn open_dict(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::EMPTY_DICT, opcode::MARK])
    }

    pub(crate) fn close_dict(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::SETITEMS])
    }

    pub(crate) fn open_list(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::EMPTY_LIST, opcode::MARK])
    }

    pub(crate) fn close_list(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::APPENDS])
    }

    /// Starts an item of a list. `number` is the number of items before it. Call it before each item, because it splits long lists into
    /// batches, as Python does. The viewer's JavaScript cannot process a batch of many thousands.
    pub(crate) fn item(&mut self, number: usize) -> io::Result<()> {
        if number > 0 && number.is_multiple_of(BATCH_ITEMS) {
            self.sink.write_all(&[opcode::APPENDS, opcode::MARK])?;
        }
        Ok(())
    }

    /// Replaces the last two values with a tuple.
    pub(crate) fn pair(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::TUPLE2])
    }

    pub(crate) fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(memo) = self.texts.get(text) {
            return self.fetch(*memo);
        }
        let length = u32::try_from(text.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.sink.write_all(&[opcode::BINUNICODE])?;
        self.sink.write_all(&length.to_le_bytes())?;
        self.sink.write_all(text.as_bytes())?;
        let memo = self.keep()?;
        self.texts.insert(text.into(), memo);
        Ok(())
    }

    /// Writes text in full, even if it was written before, and makes it available for fetching. A reader that keeps text only after some
    /// keys finds it this way.
    pub(crate) fn text_in_full(&mut self, text: &str) -> io::Result<Memo> {
        self.texts.remove(text);
        self.text(text)?;
        Ok(self.texts[text])
    }

    pub(crate) fn integer(&mut self, number: u64) -> io::Result<()> {
        match number {
            0..=0xff => self.sink.write_all(&[opcode::BININT1, number as u8]),
            0x100..=0xffff => {
                let [low, high] = (number as u16).to_le_bytes();
                self.sink.write_all(&[opcode::BININT2, low, high])
            }
            0x1_0000..=0x7fff_ffff => {
                self.sink.write_all(&[opcode::BININT])?;
                self.sink.write_all(&(number as u32).to_le_bytes())
            }
            _ => {
                // Uses the smallest number of bytes that hold the number and its sign.
                let bytes = number.to_le_bytes();
                let length =
                    9 - (number.leading_zeros().saturating_sub(1) / 8) as usize - usize::from(number >> 63 == 0);
                self.sink.write_all(&[opcode::LONG1, length as u8])?;
                self.sink.write_all(&bytes[..length.min(8)])?;
                self.sink.write_all(&[0][..length.saturating_sub(8)])
            }
        }
    }

    /// Writes the number -1.
    pub(crate) fn minus_one(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::BININT])?;
        self.sink.write_all(&(-1_i32).to_le_bytes())
    }

    /// Writes the floating-point number 0.0.
    pub(crate) fn zero(&mut self) -> io::Result<()> {
        self.sink.write_all(&[opcode::BINFLOAT])?;
        self.sink.write_all(&0_f64.to_be_bytes())
    }

    pub(crate) fn boolean(&mut self, is_true: bool) -> io::Result<()> {
        self.sink.write_all(&[if is_true { opcode::NEWTRUE } else { opcode::NEWFALSE }])
    }

    /// Stores the last value in the memo.
    pub(crate) fn keep(&mut self) -> io::Result<Memo> {
        let memo = self.memo_count;
        match u8::try_from(memo) {
            Ok(short) => self.sink.write_all(&[opcode::BINPUT, short])?,
            Err(_) => {
                self.sink.write_all(&[opcode::LONG_BINPUT])?;
                self.sink.write_all(&memo.to_le_bytes())?;
            }
        }
        self.memo_count += 1;
        Ok(Memo(memo))
    }

    /// Fetches a value from the memo. The result is the same object rather than a copy.
    pub(crate) fn fetch(&mut self, Memo(memo): Memo) -> io::Result<()> {
        match u8::try_from(memo) {
            Ok(short) => self.sink.write_all(&[opcode::BINGET, short]),
            Err(_) => {
                self.sink.write_all(&[opcode::LONG_BINGET])?;
                self.sink.write_all(&memo.to_le_bytes())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::{Document, Kept, Value, Vocabulary, Word, read};

    const VOCABULARY: &[&str] = &["key", "other"];
    const EVERYTHING: Vocabulary<'static> =
        Vocabulary { words: VOCABULARY, texts_of: &[], shared_lists_of: &[], keeps: &|_, _| Kept::Always };

    fn read_back(write: impl FnOnce(&mut PickleWriter<Vec<u8>>) -> io::Result<()>) -> Document {
        let mut pickle = PickleWriter::new(Vec::new()).unwrap();
        write(&mut pickle).unwrap();
        read(&pickle.finish().unwrap()[..], EVERYTHING, u64::MAX).unwrap()
    }

    #[test]
    fn integers_of_every_width_survive_a_round_trip() {
        let mut numbers: Vec<u64> = (0..64).flat_map(|bits| [(1 << bits) - 1, 1 << bits, (1 << bits) + 1]).collect();
        numbers.push(u64::MAX);
        for number in numbers {
            let document = read_back(|pickle| pickle.integer(number));
            assert_eq!(document.root, Value::Integer(number), "{number:#x}");
        }
    }

    #[test]
    fn repeated_text_is_fetched_from_the_memo() {
        let mut pickle = PickleWriter::new(Vec::new()).unwrap();
        pickle.open_dict().unwrap();
        for key in ["key", "other"] {
            pickle.text(key).unwrap();
            pickle.text("key").unwrap();
        }
        pickle.close_dict().unwrap();
        let bytes = pickle.finish().unwrap();
        assert_eq!(bytes.windows(3).filter(|window| window == b"key").count(), 1);
        let document = read(&bytes[..], EVERYTHING, u64::MAX).unwrap();
        let Value::Dict(root) = document.root else { panic!("{:?}", document.root) };
        for word in [Word(0), Word(1)] {
            assert_eq!(document.values.field(root, word), Some(Value::Word(Word(0))));
        }
    }

    #[test]
    fn long_lists_are_split_into_batches() {
        let mut pickle = PickleWriter::new(Vec::new()).unwrap();
        pickle.open_list().unwrap();
        for n in 0..2001 {
            pickle.item(n).unwrap();
            pickle.open_dict().unwrap();
            pickle.text("key").unwrap();
            pickle.boolean(true).unwrap();
            pickle.close_dict().unwrap();
        }
        pickle.close_list().unwrap();
        let bytes = pickle.finish().unwrap();
        assert_eq!(
            bytes.iter().filter(|byte| **byte == opcode::APPENDS).count(),
            3 + 1,
            "three batches, and the letter `e` of `key`"
        );
        let document = read(&bytes[..], EVERYTHING, u64::MAX).unwrap();
        let Value::List(list) = document.root else { panic!("{:?}", document.root) };
        assert_eq!(document.values.list(list).len, 2001);
    }

    #[test]
    fn more_than_255_memos_are_distinguished() {
        let document = read_back(|pickle| {
            pickle.open_dict()?;
            pickle.text("other")?;
            pickle.open_list()?;
            for n in 0..300 {
                pickle.text(&format!("word {n}"))?;
            }
            pickle.close_list()?;
            pickle.text("key")?;
            pickle.text("key")?;
            pickle.close_dict()
        });
        let Value::Dict(root) = document.root else { panic!("{:?}", document.root) };
        assert_eq!(document.values.field(root, Word(0)), Some(Value::Word(Word(0))));
    }
}
