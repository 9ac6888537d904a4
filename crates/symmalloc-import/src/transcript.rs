//! Transcripts: convert a log of addresses and raw handles to logical ids.
//!
//! Foreign logs contain addresses and handles. Ops contain neither (rule D1), so every importer feeds a transcript, which
//!
//! * numbers streams by the first appearance of their raw handle, and registers each directly before its first use;
//! * numbers allocations in order, and finds the allocation that is live at an address;
//! * keeps the recording consistent: an address that is allocated again must have been freed;
//! * counts, for a free that completes later, the records and completions until then.
//!
//! The raw default stream (handle 0) is treated like any other handle.

use std::collections::{BTreeMap, HashMap};

use symmalloc_core::ids::{AllocationId, Placement, PoolId, StreamId};
use symmalloc_core::op::{Op, Pending, Record, Refusal};
use symmalloc_core::units::SEGMENT_BYTES_MAX;

use crate::held_memory::{HeldHeap, HeldMemory, RecordedFailure};
use crate::held_records::{HeldRecords, LimitExceeded};
use crate::options::ReadOptions;
use crate::stacks::Stacks;
use crate::summary::Summary;

/// A device address in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Address(pub(crate) u64);

/// A stream in a log: a 64-bit handle, or a larger number for a stream that its handle does not identify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawStream(pub(crate) u128);

/// A pool in a log: one number or a pair of numbers; 0 is the default pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RawPool(pub(crate) u64);

impl RawPool {
    /// Creates a pool from PyTorch's pair of numbers.
    pub(crate) fn of_pair(first: u32, second: u32) -> Self {
        RawPool(u64::from(first) << 32 | u64::from(second))
    }
}

/// An allocation in a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocated<'a> {
    pub(crate) address: Address,
    pub(crate) size_bytes: u64,
    pub(crate) stream: RawStream,
    pub(crate) pool: RawPool,
    /// At most [`NAME_BYTES_MAX`](symmalloc_trace::NAME_BYTES_MAX) bytes.
    pub(crate) name: Option<&'a str>,
    pub(crate) placement: Option<Placement>,
}

/// A request in a log that the allocator refused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused<'a> {
    pub(crate) size_bytes: u64,
    pub(crate) stream: RawStream,
    pub(crate) pool: RawPool,
    /// At most [`NAME_BYTES_MAX`](symmalloc_trace::NAME_BYTES_MAX) bytes.
    pub(crate) name: Option<&'a str>,
}

/// Error that ends a transcript.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// The recording uses more streams than an allocator has ids for.
    Streams,
    /// An allocation is larger than any segment.
    Size {
        /// Requested bytes.
        size_bytes: u64,
    },
    /// The records exceed the memory limit.
    Memory {
        /// The limit.
        limit_bytes: u64,
    },
}

/// An allocation that is not freed yet.
#[derive(Clone, Copy)]
struct OpenAllocation {
    id: AllocationId,
    stream: StreamId,
    /// `true` if the log named another stream that uses the allocation.
    is_used: bool,
}

/// A free that is not completed yet.
#[derive(Clone, Copy)]
struct OpenFree {
    /// Index of the free's record.
    record: usize,
    /// Number of records and completions up to the free.
    entries: u64,
}

/// The ops so far, and the mappings from raw names to ids.
pub(crate) struct Transcript {
    records: HeldRecords,
    pub(crate) summary: Summary,
    /// Stacks of the allocations, if the log has any and its reader was asked for them.
    pub(crate) stacks: Option<Stacks>,
    /// The address of each allocation, by its id, if the reader was asked for them.
    pub(crate) addresses: Option<Vec<u64>>,
    /// The last request that the allocator refused.
    pub(crate) failure: Option<RecordedFailure>,
    /// The memory of each heap then, if the log shows it.
    pub(crate) failure_heaps: Vec<HeldHeap>,
    /// By record of a refused request: bytes that were free on the device, if the log states it.
    pub(crate) device_free_bytes: BTreeMap<usize, u64>,
    /// Never iterated, so its order does not affect decisions.
    streams: HashMap<RawStream, StreamId>,
    /// All pools except the default one. Never iterated.
    pools: HashMap<RawPool, PoolId>,
    /// Allocations that are not freed yet. Never iterated.
    live: HashMap<Address, OpenAllocation>,
    /// Frees that are not completed, by address. Never iterated.
    pending: HashMap<Address, OpenFree>,
    /// Number of completions that came later than their free.
    completions: u64,
}

impl Transcript {
    pub(crate) fn new(options: &ReadOptions) -> Self {
        Transcript {
            records: HeldRecords::new(options.memory_limit(), options.copies),
            summary: Summary::default(),
            stacks: None,
            addresses: options.addresses.then(Vec::new),
            failure: None,
            failure_heaps: Vec::new(),
            device_free_bytes: BTreeMap::new(),
            streams: HashMap::new(),
            pools: HashMap::new(),
            live: HashMap::new(),
            pending: HashMap::new(),
            completions: 0,
        }
    }

    /// Adds an allocation that was live at the beginning of the log. Call it before all other methods.
    pub(crate) fn allocate_before(&mut self, allocated: Allocated<'_>) -> Result<(), Overflow> {
        self.allocate(allocated)?;
        self.summary.lived_before += 1;
        self.summary.lived_before_bytes = self.summary.lived_before_bytes.saturating_add(allocated.size_bytes);
        Ok(())
    }

    /// Returns the raw handle of each stream that the log names, by number.
    pub(crate) fn raw_streams(&self) -> Vec<Option<RawStream>> {
        let mut raw = vec![None; self.summary.streams as usize];
        self.streams.iter().for_each(|(handle, stream)| raw[stream.index()] = Some(*handle));
        raw
    }

    pub(crate) fn finish(self) -> (Vec<Record>, Summary) {
        (self.records.into_records(), self.summary)
    }

    /// Adds an allocation of the log.
    pub(crate) fn allocate(&mut self, allocated: Allocated<'_>) -> Result<(), Overflow> {
        let Allocated { address, size_bytes, stream, pool, name, placement } = allocated;
        if size_bytes > SEGMENT_BYTES_MAX {
            return Err(Overflow::Size { size_bytes });
        }
        if let Some(lost) = self.live.remove(&address) {
            self.summary.frees_supplied += 1;
            self.push(Op::Free { id: lost.id }.into())?;
        }
        self.complete(address);
        let (stream, pool) = (self.stream(stream)?, self.pool(pool)?);
        let id = AllocationId(self.summary.allocations);
        let mut record = Record::from(Op::Allocate { id, pool, stream, size_bytes });
        if let Some(name) = name {
            record = record.with_name(name);
        }
        if let Some(placement) = placement {
            record = record.with_placement(placement);
        }
        self.push(record)?;
        if let Some(addresses) = &mut self.addresses {
            addresses.push(address.0);
        }
        self.live.insert(address, OpenAllocation { id, stream, is_used: false });
        Ok(())
    }

    /// Adds a request that the allocator refused.
    pub(crate) fn refuse(&mut self, refused: Refused<'_>) -> Result<(), Overflow> {
        let Refused { size_bytes, stream, pool, name } = refused;
        let (stream, pool) = (self.stream(stream)?, self.pool(pool)?);
        let mut record = Record::from(Op::Refuse { pool, stream, size_bytes, refusal: Refusal::Driver });
        if let Some(name) = name {
            record = record.with_name(name);
        }
        self.failure =
            Some(RecordedFailure { record: self.records.len(), held: None, device_free_bytes: None, stack: None });
        self.push(record)
    }

    /// Adds a use by `stream` of the allocation at `address`.
    pub(crate) fn record_use(&mut self, address: Address, stream: RawStream) -> Result<(), Overflow> {
        let Some(live) = self.live.get_mut(&address) else {
            self.summary.uses_of_unknown += 1;
            return Ok(());
        };
        live.is_used = true;
        let id = live.id;
        let stream = self.stream(stream)?;
        self.push(Op::RecordUse { id, stream }.into())
    }

    /// Adds a free of the allocation at `address`. If the log names the freeing stream and it is not the allocation's own, that stream is
    /// recorded as a user of the memory.
    pub(crate) fn free(&mut self, address: Address, stream: Option<RawStream>) -> Result<(), Overflow> {
        let Some(live) = self.live.remove(&address) else {
            self.summary.frees_of_unknown += 1;
            return Ok(());
        };
        if let Some(stream) = stream {
            let stream = self.stream(stream)?;
            if stream != live.stream {
                self.push(Op::RecordUse { id: live.id, stream }.into())?;
            }
        }
        self.push(Op::Free { id: live.id }.into())
    }

    /// Adds a free of the allocation at `address` that another stream still uses: the memory stays in use until [`complete`].
    ///
    /// If the log does not name that stream, the use is assigned to the lowest-numbered stream other than the allocation's own, which is
    /// registered if necessary. The next stream that appears in the log for the first time gets the same number.
    ///
    /// [`complete`]: Transcript::complete
    pub(crate) fn free_used_elsewhere(&mut self, address: Address) -> Result<(), Overflow> {
        let Some(live) = self.live.remove(&address) else {
            self.summary.frees_of_unknown += 1;
            return Ok(());
        };
        if !live.is_used {
            let stream = if live.stream == StreamId(0) { StreamId(1) } else { StreamId(0) };
            self.register_up_to(stream)?;
            self.push(Op::RecordUse { id: live.id, stream }.into())?;
        }
        let record = self.records.len();
        self.push(Record::from(Op::Free { id: live.id }).with_pending(Pending::TO_THE_END))?;
        self.pending.insert(address, OpenFree { record, entries: self.entries() });
        Ok(())
    }

    /// Marks the pending free at `address` as completed. Does nothing without one.
    pub(crate) fn complete(&mut self, address: Address) {
        let Some(free) = self.pending.remove(&address) else { return };
        let pending = Pending::new(self.entries() - free.entries);
        self.records.record_mut(free.record).pending = pending;
        // A completion that directly follows its free is not counted.
        self.completions += u64::from(pending.is_some());
    }

    /// Returns the number of records and completions so far.
    fn entries(&self) -> u64 {
        self.records.len() as u64 + self.completions
    }

    /// Returns the id of a new or known stream.
    fn stream(&mut self, raw: RawStream) -> Result<StreamId, Overflow> {
        if let Some(stream) = self.streams.get(&raw) {
            return Ok(*stream);
        }
        let stream = u16::try_from(self.streams.len()).ok().map(StreamId).filter(|stream| *stream <= StreamId::MAX);
        let stream = stream.ok_or(Overflow::Streams)?;
        self.streams.insert(raw, stream);
        self.register_up_to(stream)?;
        Ok(stream)
    }

    /// Returns the id of a new or known pool. A new pool is created here with default settings, because a log contains none.
    fn pool(&mut self, raw: RawPool) -> Result<PoolId, Overflow> {
        if raw == RawPool::default() {
            return Ok(PoolId::DEFAULT);
        }
        if let Some(pool) = self.pools.get(&raw) {
            return Ok(*pool);
        }
        // Each pool takes a record, and there are far fewer than 2^32 records.
        let pool = PoolId(self.pools.len() as u32 + 1);
        self.pools.insert(raw, pool);
        self.push(Op::CreatePool { pool, config: Box::default() }.into())?;
        Ok(pool)
    }

    /// Sets the memory of each heap at the failed request. All ops must be known, because they number pools and streams.
    pub(crate) fn set_failure_heaps(&mut self, heaps: BTreeMap<(RawPool, RawStream), HeldMemory>) {
        let known = |((pool, stream), held): ((RawPool, RawStream), HeldMemory)| HeldHeap {
            pool: if pool == RawPool::default() { Some(PoolId::DEFAULT) } else { self.pools.get(&pool).copied() },
            stream: self.streams.get(&stream).copied(),
            held,
        };
        self.failure_heaps = heaps.into_iter().map(known).collect();
        self.failure_heaps.sort_by_key(|heap| (heap.pool, heap.stream));
    }

    fn register_up_to(&mut self, stream: StreamId) -> Result<(), Overflow> {
        for next in self.summary.streams..=u64::from(stream.0) {
            self.push(Op::register(StreamId(next as u16)).into())?;
        }
        Ok(())
    }

    fn push(&mut self, record: Record) -> Result<(), Overflow> {
        self.summary.count(&record);
        self.records.push(record).map_err(|LimitExceeded { limit_bytes }| Overflow::Memory { limit_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the records as lines, without the fields that these tests ignore.
    fn lines_of(transcript: Transcript) -> Vec<String> {
        let (records, _) = transcript.finish();
        let line = |record: &Record| match record.op {
            Op::RegisterStream { stream, .. } => format!("register {stream}"),
            Op::Allocate { id, stream, .. } => format!("allocate {id} {stream}"),
            Op::Free { id } => format!("free {id}"),
            Op::RecordUse { id, stream } => format!("use {id} {stream}"),
            ref other => format!("{other:?}"),
        };
        records.iter().map(line).collect()
    }

    fn transcript(limit_bytes: u64) -> Transcript {
        Transcript::new(&ReadOptions::default().memory_limit_bytes(limit_bytes))
    }

    fn allocated(address: u64, stream: u64) -> Allocated<'static> {
        let (address, stream) = (Address(address), RawStream(stream.into()));
        Allocated { address, size_bytes: 512, stream, pool: RawPool(0), name: None, placement: None }
    }

    fn allocate(transcript: &mut Transcript, address: u64, stream: u64) {
        transcript.allocate(allocated(address, stream)).unwrap();
    }

    #[test]
    fn streams_are_numbered_by_first_appearance_and_registered_when_needed() {
        let mut transcript = transcript(u64::MAX);
        for (address, stream) in [(1, 77), (2, 0), (3, 77), (4, 5)] {
            allocate(&mut transcript, address, stream);
        }
        assert_eq!(
            lines_of(transcript),
            [
                "register s0",
                "allocate a0 s0",
                "register s1",
                "allocate a1 s1",
                "allocate a2 s0",
                "register s2",
                "allocate a3 s2"
            ]
        );
    }

    #[test]
    fn an_unnamed_use_goes_to_the_lowest_other_stream_which_keeps_its_number() {
        let mut transcript = transcript(u64::MAX);
        allocate(&mut transcript, 1, 77);
        transcript.free_used_elsewhere(Address(1)).unwrap();
        allocate(&mut transcript, 2, 99);
        transcript.free_used_elsewhere(Address(2)).unwrap();
        assert_eq!(
            lines_of(transcript),
            [
                "register s0",
                "allocate a0 s0",
                "register s1",
                "use a0 s1",
                "free a0",
                "allocate a1 s1",
                "use a1 s0",
                "free a1"
            ]
        );
    }

    #[test]
    fn a_free_on_another_stream_is_a_use_of_that_stream() {
        let mut transcript = transcript(u64::MAX);
        allocate(&mut transcript, 1, 7);
        allocate(&mut transcript, 2, 7);
        transcript.free(Address(1), Some(RawStream(8))).unwrap();
        transcript.free(Address(2), Some(RawStream(7))).unwrap();
        assert_eq!(
            lines_of(transcript),
            ["register s0", "allocate a0 s0", "allocate a1 s0", "register s1", "use a0 s1", "free a0", "free a1"]
        );
    }

    #[test]
    fn an_address_allocated_twice_was_freed_in_between() {
        let mut transcript = transcript(u64::MAX);
        allocate(&mut transcript, 1, 7);
        allocate(&mut transcript, 1, 7);
        transcript.free(Address(1), None).unwrap();
        transcript.free(Address(1), None).unwrap();
        let summary = transcript.summary.clone();
        assert_eq!(lines_of(transcript), ["register s0", "allocate a0 s0", "free a0", "allocate a1 s0", "free a1"]);
        assert_eq!((summary.frees, summary.frees_supplied, summary.frees_of_unknown), (2, 1, 1));
    }

    #[test]
    fn more_streams_than_ids_are_refused() {
        let mut transcript = transcript(u64::MAX);
        for stream in 0..65_535 {
            allocate(&mut transcript, stream, stream);
        }
        assert_eq!(transcript.allocate(allocated(1 << 40, 65_535)), Err(Overflow::Streams));
    }

    #[test]
    fn pools_are_numbered_by_first_appearance_and_keep_their_names() {
        let mut transcript = transcript(u64::MAX);
        for (address, pool, name) in [(1, 9, Some("one")), (2, 0, None), (3, 4, None), (4, 9, None)] {
            transcript.allocate(Allocated { pool: RawPool(pool), name, ..allocated(address, 0) }).unwrap();
        }
        let lines: Vec<String> =
            transcript.finish().0.iter().map(|record| symmalloc_trace::RecordLine(record).to_string()).collect();
        assert!(lines[1].starts_with("pool p1 ") && lines[4].starts_with("pool p2 "), "{lines:?}");
        assert_eq!(
            [&lines[2], &lines[3], &lines[5], &lines[6]],
            ["a 0 512 s0 p1 \"one\"", "a 1 512 s0", "a 2 512 s0 p2", "a 3 512 s0 p1"]
        );
    }

    #[test]
    fn names_count_toward_the_limit() {
        let mut transcript = transcript(950);
        let name = "x".repeat(900);
        let result = transcript.allocate(Allocated { name: Some(&name), ..allocated(1, 0) });
        assert_eq!(result, Err(Overflow::Memory { limit_bytes: 950 }));
    }

    #[test]
    fn records_stay_under_the_limit() {
        let mut transcript = transcript(10 * size_of::<Record>() as u64);
        let count = (0..20).map_while(|n| transcript.allocate(allocated(n, 0)).ok()).count();
        assert_eq!(count, 9);
        assert!(matches!(transcript.free(Address(0), None), Err(Overflow::Memory { .. })));
    }
}
