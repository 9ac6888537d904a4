//! The trace of one device: its entries and their fields.

use std::borrow::Cow;

use super::error::{Found, SnapshotError};
use super::frames;
use super::segments::AddressRange;
use super::words::{
    ACTION, ADDR, FRAMES, FREE_COMPLETED, POOL_ID, SEGMENT_POOL_ID, SIZE, STREAM, SYMMALLOC_POOL, USER_METADATA, text,
};
use crate::pickle::{DictId, Document, Item, List, Value, Word};
use crate::transcript::{Address, RawPool, RawStream};

/// The trace of one device.
pub(super) struct DeviceTrace<'a> {
    pub(super) document: &'a Document,
    pub(super) device: usize,
    pub(super) entries: &'a List,
}

/// One entry of a trace.
#[derive(Clone, Copy)]
pub(super) struct TraceEntry<'a> {
    document: &'a Document,
    dict: DictId,
    pub(super) device: usize,
    pub(super) number: u64,
}

impl<'a> DeviceTrace<'a> {
    pub(super) fn entries(&self) -> impl Iterator<Item = Result<TraceEntry<'a>, SnapshotError>> {
        let DeviceTrace { document, device, entries } = *self;
        // Only nonempty dicts and lists are kept, so an item that was not kept is not a trace entry.
        let missing = (!entries.is_whole()).then_some(Err(SnapshotError::NotAnEntry { device }));
        let entry = move |(item, number): (&Item, u64)| match item {
            Item::Dict(dict) => Ok(TraceEntry { document, dict: *dict, device, number }),
            Item::List(_) => Err(SnapshotError::NotAnEntry { device }),
        };
        missing.into_iter().chain(entries.items.iter().zip(0..).map(entry))
    }
}

impl<'a> TraceEntry<'a> {
    pub(super) fn action(&self) -> Result<Value, SnapshotError> {
        self.field(ACTION).ok_or_else(|| self.bad_field(ACTION))
    }

    pub(super) fn completes_free_of(&self, address: Address) -> bool {
        self.field(ACTION) == Some(Value::Word(FREE_COMPLETED)) && self.field(ADDR) == Some(Value::Integer(address.0))
    }

    pub(super) fn address(&self) -> Result<Address, SnapshotError> {
        self.integer(ADDR).map(Address)
    }

    pub(super) fn stream(&self) -> Result<RawStream, SnapshotError> {
        self.integer(STREAM).map(|stream| RawStream(stream.into()))
    }

    /// Returns the pool that the entry names, if it names one.
    pub(super) fn pool(&self) -> Result<Option<RawPool>, SnapshotError> {
        if self.field(SYMMALLOC_POOL).is_some() {
            return self.integer(SYMMALLOC_POOL).map(|pool| Some(RawPool(pool)));
        }
        for word in [POOL_ID, SEGMENT_POOL_ID] {
            match self.field(word) {
                None => {}
                Some(Value::Pair(first, second)) => return Ok(Some(RawPool::of_pair(first, second))),
                Some(_) => return Err(self.bad_field(word)),
            }
        }
        Ok(None)
    }

    /// Returns the name that the program gave the allocation, or else the frame that requested it.
    pub(super) fn name(&self) -> Option<Cow<'a, str>> {
        match self.field(USER_METADATA) {
            Some(Value::Text(text)) => Some(self.document.values.text(text).into()),
            Some(Value::Word(word)) => Some(text(word).into()),
            _ => frames::name(self.document, self.frames()).map(Cow::from),
        }
    }

    /// Returns the list of stack frames that requested the allocation.
    pub(super) fn frames(&self) -> Option<Value> {
        self.field(FRAMES)
    }

    pub(super) fn range(&self) -> Result<AddressRange, SnapshotError> {
        Ok(AddressRange::new(self.address()?, self.integer(SIZE)?))
    }

    pub(super) fn integer(&self, word: Word) -> Result<u64, SnapshotError> {
        match self.field(word) {
            Some(Value::Integer(integer)) => Ok(integer),
            _ => Err(self.bad_field(word)),
        }
    }

    pub(super) fn field(&self, word: Word) -> Option<Value> {
        self.document.values.field(self.dict, word)
    }

    pub(super) fn bad_field(&self, word: Word) -> SnapshotError {
        SnapshotError::Field {
            device: self.device,
            entry: self.number,
            field: text(word),
            found: Found::of(self.field(word)),
        }
    }
}
