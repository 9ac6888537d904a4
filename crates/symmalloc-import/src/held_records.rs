//! The records that a reader holds, within a memory limit. Records with equal names share the text of the name.

use std::collections::HashSet;
use std::sync::Arc;

use symmalloc_core::config::PoolConfig;
use symmalloc_core::op::{Op, Record};

use crate::options::MemoryLimit;

/// Bytes that a name takes in addition to its text: the reference counts of its allocation, and its entry in the table
/// of names.
const NAME_BYTES: u64 = 48;

/// A list of records within a memory limit.
pub(crate) struct HeldRecords {
    records: Vec<Record>,
    /// The distinct names. Never iterated.
    names: HashSet<Arc<str>>,
    /// Bytes that a record takes, including the copies that the caller makes of it.
    record_bytes: u64,
    /// Bytes held so far.
    held_bytes: u64,
    limit: MemoryLimit,
    /// The limit when it was last computed.
    limit_bytes: u64,
}

/// Error: the records exceed the memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitExceeded {
    pub(crate) limit_bytes: u64,
}

impl HeldRecords {
    /// Creates an empty list. `copies` is the number of further copies that the caller makes of each record. Copies
    /// share the record's name.
    pub(crate) fn new(limit: MemoryLimit, copies: u32) -> Self {
        let record_bytes = size_of::<Record>() as u64 * (1 + u64::from(copies));
        let (records, names, limit_bytes) = (Vec::new(), HashSet::new(), limit.bytes());
        HeldRecords { records, names, record_bytes, held_bytes: 0, limit, limit_bytes }
    }

    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    pub(crate) fn record_mut(&mut self, index: usize) -> &mut Record {
        &mut self.records[index]
    }

    pub(crate) fn into_records(self) -> Vec<Record> {
        self.records
    }

    /// Adds a record. If an earlier record has the same name, both share its text.
    pub(crate) fn push(&mut self, mut record: Record) -> Result<(), LimitExceeded> {
        let mut bytes = self.record_bytes;
        if let Op::CreatePool { .. } = record.op {
            bytes += size_of::<PoolConfig>() as u64 * (self.record_bytes / size_of::<Record>() as u64);
        }
        let mut new_name = None;
        if let Some(name) = &mut record.name {
            match self.names.get(&**name) {
                Some(known) => *name = Arc::clone(known),
                None => {
                    bytes += NAME_BYTES + name.len() as u64;
                    new_name = Some(Arc::clone(name));
                }
            }
        }
        self.held_bytes += bytes;
        if self.held_bytes > self.limit_bytes {
            self.limit_bytes = self.limit.bytes();
        }
        if self.held_bytes > self.limit_bytes {
            return Err(LimitExceeded { limit_bytes: self.limit_bytes });
        }
        self.names.extend(new_name);
        self.records.push(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use symmalloc_core::ids::{AllocationId, PoolId, StreamId};

    fn named(id: u64, name: &str) -> Record {
        let op = Op::Allocate { id: AllocationId(id), pool: PoolId::DEFAULT, stream: StreamId(0), size_bytes: 1 };
        Record::from(op).with_name(name)
    }

    #[test]
    fn records_with_one_name_share_its_text_and_count_it_once() {
        let name = "x".repeat(4096);
        let mut held = HeldRecords::new((100 * size_of::<Record>() as u64 + 4096 + NAME_BYTES).into(), 0);
        (0..100).for_each(|id| held.push(named(id, &name)).unwrap());
        assert!(held.push(Op::Sync.into()).is_err(), "the limit is exact");
        let records = held.into_records();
        let text = |record: &Record| record.name.as_deref().map(str::as_ptr);
        assert!(records.iter().all(|record| text(record) == text(&records[0])), "a name was copied");
    }

    #[test]
    fn distinct_names_and_copies_of_records_count() {
        for (copies, fit) in [(0, 12), (3, 4)] {
            let mut held = HeldRecords::new((12 * (size_of::<Record>() as u64 + NAME_BYTES + 4)).into(), copies);
            let pushed = (0..100).map_while(|id| held.push(named(id, &format!("{id:04}"))).ok()).count();
            assert_eq!(pushed, fit, "with {copies} copies");
        }
    }
}
