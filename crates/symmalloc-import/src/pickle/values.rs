//! What is kept of a pickle: dicts and lists, pruned to a vocabulary while they grow.
//!
//! A snapshot with stack frames is 99 % stack frames, and its reader wants five keys. So a caller names its words
//! first, and
//!
//! * text outside of the vocabulary is [`Value::OtherText`]; floats, bytes, sets, booleans and None are [`Value::Nothing`].
//!   Only what is spelt out as the value of some chosen words is [`Value::Text`];
//! * a dict keeps only the entries whose key is a word;
//! * a list keeps only the dicts that kept something and that the caller wants in it, and lists. It counts all its items ([`List::len`]), so that who
//!   expects dicts can tell that something else was among them.
//!
//! A stack frame thus shrinks to nothing at all when it is put into its list, however many lists share it.
//!
//! ```text
//! dicts   [ first ]──┐           fields, one chain per dict, at most one field per word
//! fields  [ .. (addr, 0x7f.., next) -> (action, "alloc", next) -> (size, 512, none) .. ]
//! lists   [ [dict 3, dict 4, list 0], [..] ]
//! ```
//!
//! Everything lies in arenas and is named by number. A value that contains itself is therefore no problem, nothing is
//! shared by counting, and dropping it all needs no recursion. What a container holds is decided when it is put in: a
//! dict that is put into a list while still empty and filled later (only data that contains itself does so) is not
//! found in that list.

/// A word of the vocabulary, by its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u8);

/// A dict in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DictId(u32);

/// A list or tuple in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ListId(u32);

/// A text in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextId(u32);

/// A value, as far as it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// What no reader of a snapshot needs.
    Nothing,
    /// Text of the vocabulary.
    Word(Word),
    /// Other text.
    Text(TextId),
    /// Other text that is not kept.
    OtherText,
    /// An integer from 0 to 2^64 - 1.
    Integer(u64),
    /// A negative integer, or one of more than 64 bits.
    OutOfRange,
    /// A dict.
    Dict(DictId),
    /// A tuple of two integers from 0 to 2^32 - 1.
    Pair(u32, u32),
    /// A list or another tuple.
    List(ListId),
}

/// An item of a list, as far as it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Dict(DictId),
    List(ListId),
}

/// A list or a tuple.
#[derive(Clone, Debug, Default)]
pub(crate) struct List {
    /// The items that were kept, in order.
    pub(crate) items: Vec<Item>,
    /// How many items the list has. `items.len() <= len`.
    pub(crate) len: u64,
    /// Kinds of which it has the first, a bit each.
    firsts: u8,
}

impl List {
    /// Whether every item was kept.
    pub(crate) fn is_whole(&self) -> bool {
        self.items.len() as u64 == self.len
    }
}

/// One entry of a dict.
struct Field {
    word: Word,
    /// The next field of the same dict, or `NONE`.
    next: u32,
    value: Value,
}

/// The end of a chain of fields; also the bound on the size of every arena.
const NONE: u32 = u32::MAX;

/// Which dicts that hold something are kept in a list. Asked once for each dict, when it is first put into one.
pub(crate) type Keeps = fn(&Values, DictId) -> Kept;

/// Whether a dict is kept in lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// In each.
    Always,
    /// Where it is the first one of this kind, a number below 8.
    First(u8),
    /// In none.
    Never,
}

/// An arena is at its end: 2^32 - 1 dicts, lists, fields or texts.
pub(crate) struct ArenaFull;

/// The arenas.
#[derive(Default)]
pub(crate) struct Values {
    /// For each dict its first field, or `NONE`.
    dicts: Vec<u32>,
    /// For each dict whether lists keep it, once that was asked.
    kept: Vec<Option<Kept>>,
    fields: Vec<Field>,
    lists: Vec<List>,
    /// Over all lists.
    items: u64,
    texts: Vec<Box<str>>,
    /// Over all texts.
    text_bytes: u64,
}

impl Values {
    pub(super) fn new_dict(&mut self) -> Result<Value, ArenaFull> {
        let id = next_index(self.dicts.len())?;
        self.dicts.push(NONE);
        self.kept.push(None);
        Ok(Value::Dict(DictId(id)))
    }

    pub(super) fn new_list(&mut self) -> Result<Value, ArenaFull> {
        let id = next_index(self.lists.len())?;
        self.lists.push(List::default());
        Ok(Value::List(ListId(id)))
    }

    pub(super) fn new_text(&mut self, text: &str) -> Result<Value, ArenaFull> {
        let id = next_index(self.texts.len())?;
        self.texts.push(text.into());
        self.text_bytes += text.len() as u64;
        Ok(Value::Text(TextId(id)))
    }

    /// Sets an entry of a dict, if its key is a word.
    pub(super) fn set(&mut self, dict: DictId, key: Value, value: Value) -> Result<(), ArenaFull> {
        let Value::Word(word) = key else { return Ok(()) };
        if let Some(field) = self.field_index(dict, word) {
            self.fields[field].value = value;
            return Ok(());
        }
        let first = next_index(self.fields.len())?;
        self.fields.push(Field { word, next: self.dicts[dict.0 as usize], value });
        self.dicts[dict.0 as usize] = first;
        Ok(())
    }

    /// Appends an item to a list, if it is worth keeping.
    pub(super) fn append(&mut self, list: ListId, value: Value, keeps: Keeps) {
        let item = match value {
            Value::Dict(dict) if self.dicts[dict.0 as usize] != NONE && self.is_kept(list, dict, keeps) => {
                Some(Item::Dict(dict))
            }
            Value::List(inner) => Some(Item::List(inner)),
            _ => None,
        };
        let list = &mut self.lists[list.0 as usize];
        list.len += 1;
        if let Some(item) = item {
            list.items.push(item);
            self.items += 1;
        }
    }

    fn is_kept(&mut self, list: ListId, dict: DictId, keeps: Keeps) -> bool {
        let asked = self.kept[dict.0 as usize];
        let kept = asked.unwrap_or_else(|| keeps(self, dict));
        self.kept[dict.0 as usize] = Some(kept);
        match kept {
            Kept::Always => true,
            Kept::Never => false,
            Kept::First(kind) => {
                let (bit, list) = (1 << kind, &mut self.lists[list.0 as usize]);
                let is_first = list.firsts & bit == 0;
                list.firsts |= bit;
                is_first
            }
        }
    }

    /// What a dict has under a word.
    pub(crate) fn field(&self, dict: DictId, word: Word) -> Option<Value> {
        self.field_index(dict, word).map(|index| self.fields[index].value)
    }

    pub(crate) fn text(&self, text: TextId) -> &str {
        &self.texts[text.0 as usize]
    }

    pub(crate) fn list(&self, list: ListId) -> &List {
        &self.lists[list.0 as usize]
    }

    /// Memory in use, in bytes; what the arenas hold in reserve can be as much again.
    pub(super) fn held_bytes(&self) -> u64 {
        let dicts = self.dicts.len() * (size_of::<u32>() + size_of::<Option<Kept>>());
        let fields = self.fields.len() * size_of::<Field>();
        let lists = self.lists.len() * size_of::<List>();
        let texts = self.texts.len() * size_of::<Box<str>>();
        (dicts + fields + lists + texts) as u64 + self.items * size_of::<Item>() as u64 + self.text_bytes
    }

    /// Walks the chain of a dict: at most as many steps as the vocabulary has words.
    #[inline]
    fn field_index(&self, dict: DictId, word: Word) -> Option<usize> {
        let mut index = self.dicts[dict.0 as usize];
        while index != NONE {
            let field = &self.fields[index as usize];
            if field.word == word {
                return Some(index as usize);
            }
            index = field.next;
        }
        None
    }
}

fn next_index(len: usize) -> Result<u32, ArenaFull> {
    u32::try_from(len).ok().filter(|index| *index != NONE).ok_or(ArenaFull)
}
