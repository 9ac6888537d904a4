//! The kept parts of a pickle: dicts and lists, which are pruned to a vocabulary while they grow.
//!
//! In a snapshot with stack frames, 99 % of the data is stack frames, and the reader needs few of the keys. The caller therefore supplies a
//! vocabulary of words, and
//!
//! * text outside of the vocabulary becomes [`Value::UnusedText`]; floats, bytes, sets, `False` and `None` become [`Value::Nothing`]. Text
//!   outside of the vocabulary is kept as [`Value::Text`] only if it is written in full as the value of selected words;
//! * a dict keeps only the entries whose key is a word;
//! * a list keeps all lists in it, and those nonempty dicts that the caller selects. It counts all of its items ([`List::len`]), so a
//!   reader that expects dicts can detect items of a different kind.
//!
//! A stack frame therefore takes no space once it is in its list, regardless of how many lists share it.
//!
//! A caller that needs whole stacks keeps the leading frames of each list. PyTorch writes a separate list for each allocation, and these
//! lists share frames. Lists with equal contents are therefore stored once: when a list becomes the value of a selected word, it is
//! compared with the earlier lists.
//!
//! ```text
//! dicts   [ first ]──┐           fields, one chain per dict, at most one field per word
//! fields  [ .. (addr, 0x7f.., next) -> (action, "alloc", next) -> (size, 512, none) .. ]
//! lists   [ [dict 3, dict 4, list 0], [..] ]
//! ```
//!
//! All values are in arenas and referenced by index. A value can therefore contain itself, sharing needs no reference counts, and dropping
//! values needs no recursion. A list decides whether to keep a dict when the dict is added. It does not keep a dict that is still empty
//! then and is filled later, which happens only in self-containing data.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::mem;

/// A word of the vocabulary, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u8);

/// A dict in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DictId(u32);

/// A list or tuple in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ListId(u32);

/// A text in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TextId(u32);

/// A value, as far as it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// A value that snapshot readers do not need.
    Nothing,
    /// `True`.
    True,
    /// Text in the vocabulary.
    Word(Word),
    /// Other text that is kept.
    Text(TextId),
    /// Other text that is not kept.
    UnusedText,
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

/// A kept item of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Item {
    Dict(DictId),
    List(ListId),
}

/// A list or a tuple.
#[derive(Clone, Debug, Default)]
pub(crate) struct List {
    /// The kept items, in order.
    pub(crate) items: Vec<Item>,
    /// Total number of items, kept or not. `items.len() <= len`.
    pub(crate) len: u64,
    /// Bit set of kinds of [`Kept::First`] and [`Kept::Leading`]: those of which the list already has a dict.
    firsts: u8,
    /// Number of [`Kept::Leading`] dicts that the list does not keep.
    pub(crate) omitted: u32,
}

impl List {
    /// Returns `true` if every item was kept.
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

/// End of a chain of fields; also the maximum size of every arena.
const NONE: u32 = u32::MAX;

/// Decides whether lists keep a nonempty dict. Called once per dict, when it is first added to a list.
pub(crate) type Keeps<'a> = &'a dyn Fn(&Values, DictId) -> Kept;

/// The decision whether lists keep a dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Every list keeps the dict.
    Always,
    /// A list keeps the dict only if it has no other dict of this kind yet. The kind is below 8.
    First(u8),
    /// A list keeps the dict if it has fewer than [`LEADING_MAX`] items, or no dict of this kind yet.
    Leading(u8),
    /// No list keeps the dict.
    Never,
}

/// Number of items up to which a list keeps every [`Kept::Leading`] dict.
pub(crate) const LEADING_MAX: usize = 256;

/// Error: an arena is full. It contains 2^32 - 1 dicts, lists, fields or texts.
pub(crate) struct ArenaFull;

/// The arenas that hold all values.
#[derive(Default)]
pub(crate) struct Values {
    /// First field of each dict, or `NONE`.
    dicts: Vec<u32>,
    /// The decision whether lists keep each dict; `None` until it is made.
    kept: Vec<Option<Kept>>,
    fields: Vec<Field>,
    lists: Vec<List>,
    /// Total number of items in all lists.
    items: u64,
    texts: Vec<Box<str>>,
    /// Total bytes of all texts.
    text_bytes: u64,
    shared: SharedLists,
}

/// Lists that are stored only once for equal contents.
#[derive(Default)]
struct SharedLists {
    /// One list for each content, by the hash of the content. Never iterated.
    by_hash: HashMap<u64, ListId>,
    /// The list that stands for each list compared so far. No list is compared twice, so the time is linear. Never iterated.
    originals: HashMap<ListId, ListId>,
    hasher: RandomState,
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

    /// Sets an entry of a dict, if the key is a word.
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

    /// Appends an item to a list. The list keeps the item if it is a list, or a dict that `keeps` selects.
    pub(super) fn append(&mut self, list: ListId, value: Value, keeps: Keeps<'_>) {
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

    fn is_kept(&mut self, list: ListId, dict: DictId, keeps: Keeps<'_>) -> bool {
        let asked = self.kept[dict.0 as usize];
        let kept = asked.unwrap_or_else(|| keeps(self, dict));
        self.kept[dict.0 as usize] = Some(kept);
        match kept {
            Kept::Always => true,
            Kept::Never => false,
            Kept::First(kind) | Kept::Leading(kind) => {
                let (bit, list) = (1 << kind, &mut self.lists[list.0 as usize]);
                let is_leading = matches!(kept, Kept::Leading(_));
                let is_kept = list.firsts & bit == 0 || (is_leading && list.items.len() < LEADING_MAX);
                list.firsts |= bit;
                list.omitted = list.omitted.saturating_add(u32::from(is_leading && !is_kept));
                is_kept
            }
        }
    }

    /// Returns the list that stands for all lists with this content, and drops the items of a duplicate. Only kept items are compared. The
    /// list must be complete: if an item is later added to a duplicate, the item is lost. This happens only in self-containing data.
    pub(super) fn share(&mut self, list: ListId) -> ListId {
        if let Some(original) = self.shared.originals.get(&list) {
            return *original;
        }
        let content = |list: ListId| {
            let list = &self.lists[list.0 as usize];
            (&list.items, list.omitted)
        };
        let hash = self.shared.hasher.hash_one(content(list));
        let earlier = *self.shared.by_hash.entry(hash).or_insert(list);
        let original = if content(earlier) == content(list) { earlier } else { list };
        self.shared.originals.insert(list, original);
        if original != list {
            self.items -= mem::take(&mut self.lists[list.0 as usize].items).len() as u64;
        }
        original
    }

    /// Returns the decision whether lists keep a dict; `None` if the dict was not yet added to a list.
    pub(crate) fn kept(&self, dict: DictId) -> Option<Kept> {
        self.kept[dict.0 as usize]
    }

    /// Returns the value of a word in a dict.
    pub(crate) fn field(&self, dict: DictId, word: Word) -> Option<Value> {
        self.field_index(dict, word).map(|index| self.fields[index].value)
    }

    pub(crate) fn text(&self, text: TextId) -> &str {
        &self.texts[text.0 as usize]
    }

    pub(crate) fn list(&self, list: ListId) -> &List {
        &self.lists[list.0 as usize]
    }

    /// Returns the memory in use, in bytes. The spare capacity of the arenas can take as much again.
    pub(super) fn held_bytes(&self) -> u64 {
        let dicts = self.dicts.len() * (size_of::<u32>() + size_of::<Option<Kept>>());
        let fields = self.fields.len() * size_of::<Field>();
        let lists = self.lists.len() * size_of::<List>();
        let texts = self.texts.len() * size_of::<Box<str>>();
        let shared = self.shared.by_hash.len() * size_of::<(u64, ListId)>()
            + self.shared.originals.len() * size_of::<(ListId, ListId)>();
        (dicts + fields + lists + texts + shared) as u64 + self.items * size_of::<Item>() as u64 + self.text_bytes
    }

    /// Searches the chain of a dict for a word. This takes at most as many steps as the vocabulary has words.
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
